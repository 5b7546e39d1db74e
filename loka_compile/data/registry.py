"""``open_source("flights")``, ``open_source("kuairand:DIR")``: names to sources."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from loka_compile.data.base import DataError
from loka_compile.data.base import Source

#: Called with what follows the colon ("" when nothing does), the label or None, and on_bad_row.
Opener = Callable[..., Source]
_OPENERS: dict[str, tuple[Opener, str]] = {}


def register_source(name: str, opener: Opener, usage: str) -> None:
    """Add a source: ``opener(where, label=..., on_bad_row=...)``; ``usage`` is shown in errors."""
    _OPENERS[name] = (opener, usage)


def sources() -> dict[str, str]:
    """Source name -> how to write it."""
    return {name: usage for name, (_, usage) in sorted(_OPENERS.items())}


def open_source(
    spec: str, *, label: str | None = None, on_bad_row: Any = "error", dense: str = "standard"
) -> Source:
    """Open ``NAME`` or ``NAME:WHERE``.

    ``label`` picks the column to predict where the source offers several. ``dense``: ``standard``
    (log counts, standardised, clipped), ``log`` or ``raw`` (as they are), where a source has
    counts. Raises ``DataError`` for an unknown name, a missing package, directory or file, a label
    or a form that does not exist.
    """
    name, _, where = spec.partition(":")
    if name not in _OPENERS:
        near = difflib.get_close_matches(name, _OPENERS, n=1, cutoff=0.4)
        hint = f"did you mean {_OPENERS[near[0]][1]!r}? " if near else ""
        known = ", ".join(sources().values())
        raise DataError(f"unknown data source {name!r}; {hint}Known sources: {known}")
    # Openers that were registered without it need not know of the option.
    more = {} if dense == "standard" else {"dense": dense}
    return _OPENERS[name][0](where, label=label, on_bad_row=on_bad_row, **more)


def _flights(where: str, label: str | None, on_bad_row: Any, dense: str = "standard") -> Source:
    from loka_compile.data.flights import Flights

    if dense != "standard":
        raise DataError(f"flights has no dense form {dense!r}; it has standard")
    if label not in (None, Flights.schema.label):
        raise DataError(f"flights has one label, {Flights.schema.label!r}; got {label!r}")
    return Flights(where or None, on_bad_row=on_bad_row)


def _kuairand(where: str, label: str | None, on_bad_row: Any, dense: str = "standard") -> Source:
    from loka_compile.data.kuairand import DEFAULT_LABEL
    from loka_compile.data.kuairand import KuaiRand

    if not where:
        raise DataError("kuairand needs the directory that holds its Parquet files: kuairand:DIR")
    return KuaiRand(where, label=label or DEFAULT_LABEL, on_bad_row=on_bad_row, dense_form=dense)


def _criteo(where: str, label: str | None, on_bad_row: Any, dense: str = "standard") -> Source:
    from loka_compile.data.criteo import Criteo

    if not where:
        raise DataError("criteo needs the file: criteo:FILE")
    if label not in (None, Criteo.schema.label):
        raise DataError(f"criteo has one label, {Criteo.schema.label!r}; got {label!r}")
    return Criteo(where, on_bad_row=on_bad_row, dense_form=dense)


def _parquet(where: str, label: str | None, on_bad_row: Any, dense: str = "standard") -> Source:
    from loka_compile.data.parquet_table import ParquetTable

    if not where:
        raise DataError(
            "parquet needs the file: parquet:FILE, with FILE's .schema.json beside it or named as "
            "parquet:FILE,schema=OTHER"
        )
    path, _, schema = where.partition(",schema=")
    return ParquetTable(
        path, label=label, on_bad_row=on_bad_row, dense_form=dense, schema=schema or None
    )


def _synthetic(where: str, label: str | None, on_bad_row: Any, dense: str = "standard") -> Source:
    from loka_compile.data.synthetic import Synthetic

    if label not in (None, "click"):
        raise DataError(f"synthetic has one label, 'click'; got {label!r}")
    sizes: dict[str, Any] = {}
    for part in filter(None, where.split(",")):
        key, _, value = part.partition("=")
        kind = {"rows": int, "seed": int, "fields": int, "dense": int, "tail": float}.get(key)
        try:
            if kind is None:
                raise ValueError(key)
            sizes[key] = kind(value)
        except ValueError:
            raise DataError(
                f"synthetic does not know {part!r}; write synthetic:rows=1000000,seed=0 "
                "(and fields, dense, tail)"
            ) from None
    return Synthetic(**sizes, on_bad_row=on_bad_row, dense_form=dense)


register_source("flights", _flights, "flights")
register_source("kuairand", _kuairand, "kuairand:DIR")
register_source("criteo", _criteo, "criteo:FILE")
register_source("parquet", _parquet, "parquet:FILE[,schema=FILE]")
register_source("synthetic", _synthetic, "synthetic:rows=N")
