"""Cost table: what a kernel costs at a shape, in microseconds. Rows measured on some device.

Two layers: rows shipped in the package (`costs_*.json` beside this file) and the user's own
(`cost_store.py`, SQLite in the user's cache), which come first. A key names everything that a
latency hangs on, versions too, so a row of another library or torch version is never used: it is
stale, listed as such, and at most fits the estimator. Our own kernels' version is a digest of their
sources (`own_version.py`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import fields
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import torch

from loka_compile import _compat
from loka_compile.errors import CostTableError
from loka_compile.files import write_text
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.own_version import own_version
from loka_compile.lowering.recipes import HIGH_PRECISION

VERSION = 1
KIND = "loka-costs"
#: The library of our own kernels.
OWN = "loka"

log = logging.getLogger("loka_compile")

#: By other names, because CostKey has a field `torch`.
Dtype = torch.dtype
Device = torch.device


def bucket(m: int) -> int:
    """The M that stands for `m` in the table: the next of four steps per octave, at least 16.

    At most a quarter above `m`, so that dynamic batches need few rows.
    """
    if m <= 16:
        return 16
    step = 1 << ((m - 1).bit_length() - 3)
    return -(-m // step) * step


@dataclass(frozen=True)
class CostKey:
    """What one latency hangs on. M is a bucket; K and N are exact.

    dtype: of the site's input; "tf32" for float32 whose products may use TF32.
    layout: "nk" for a weight stored (N, K), as nn.Linear does; "kn" for its transpose.
    epilogue: "" for the bare GEMM, else what the row covers besides it, such as
    "block_norm:256:hard_swish". handed: the input arrives as e4m3, so nothing is quantised.
    """

    device: str
    direction: str
    m: int
    k: int
    n: int
    dtype: str
    library: str
    recipe: str
    version: str
    torch: str
    layout: str = "nk"
    epilogue: str = ""
    handed: bool = False

    @classmethod
    def of(
        cls,
        kernel: str,
        direction: str,
        m: int,
        k: int,
        n: int,
        dtype: Dtype,
        device: Device,
        *,
        layout: str = "nk",
        epilogue: str = "",
        handed: bool = False,
    ) -> CostKey:
        """The key of `kernel` as it is installed here."""
        library, _, recipe = kernel.partition(":")
        if kernel == HIGH_PRECISION:
            library, recipe = "torch", HIGH_PRECISION
        return cls(
            _compat.device_key(device),
            direction,
            bucket(m),
            k,
            n,
            dtype_name(dtype),
            library,
            recipe,
            version_of(library, direction),
            torch.__version__,
            layout,
            epilogue,
            handed,
        )

    @property
    def kernel(self) -> str:
        if self.recipe == HIGH_PRECISION:
            return HIGH_PRECISION
        return f"{self.library}:{self.recipe}"

    def family(self) -> tuple[Any, ...]:
        """What rows must share to be compared over shapes: all but M, K, N and the versions."""
        return (
            self.device,
            self.direction,
            self.dtype,
            self.library,
            self.recipe,
            self.layout,
            self.epilogue.partition(":")[0],
            self.handed,
        )


@dataclass(frozen=True)
class CostRow:
    key: CostKey
    us: float
    date: str
    #: "shipped" or "user".
    origin: str = "user"

    def why_stale(self) -> str | None:
        """None while the row holds, else which version moved."""
        here = version_of(self.key.library, self.key.direction)
        if here != self.key.version and self.key.library == OWN:
            return f"measured with our own kernels of {self.key.version}; here they are {here}"
        if here != self.key.version:
            what = f"{self.key.library} is {here or 'not installed'} here"
            return f"measured with {self.key.library} {self.key.version or '(unknown)'}; {what}"
        if torch.__version__ != self.key.torch:
            return f"measured with torch {self.key.torch}; torch is {torch.__version__} here"
        return None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.key), "us": self.us, "date": self.date}


_KEY_FIELDS = tuple(f.name for f in fields(CostKey))


def row_of(data: Mapping[str, Any], origin: str = "user") -> CostRow:
    """Raises KeyError, TypeError or ValueError for what is no row."""
    unknown = set(data) - {*_KEY_FIELDS, "us", "date"}
    if unknown:
        raise ValueError(f"unknown column {sorted(unknown)[0]!r}")
    key = CostKey(**{name: data[name] for name in _KEY_FIELDS if name in data})
    us = float(data["us"])
    if not 0 < us < float("inf") or key.k < 0 or key.n < 0:
        raise ValueError(f"us = {us}: a latency is positive")
    return CostRow(key, us, str(data["date"]), origin)


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def dtype_name(dtype: torch.dtype) -> str:
    if dtype == torch.float32 and _compat.tf32_allowed():
        return "tf32"
    return str(dtype).removeprefix("torch.")


@functools.cache
def version_of(library: str, direction: str) -> str:
    """Installed version of a kernel library, "" where it is not installed.

    direction: of our own kernels, whose versions are digests of their sources.
    """
    if library == "torch":
        return torch.__version__
    if library == OWN:
        return own_version(direction)
    if library in LIBRARIES:
        return LIBRARIES[library].version()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- files ----------------------------------------------------------------------------------------


def export_rows(rows: Iterable[CostRow], path: str | os.PathLike[str]) -> Path:
    """Write `rows` as JSON, one row a line, sorted. Nothing but such a file is overwritten."""
    target = Path(path)
    if target.exists():
        list(import_rows(target))
    lines = sorted(json.dumps(row.to_dict()) for row in rows)
    head = json.dumps({"kind": KIND, "version": VERSION})[:-1]
    return write_text(target, head + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n")


def import_rows(path: str | os.PathLike[str], origin: str = "user") -> Iterator[CostRow]:
    """Raises CostTableError for a missing, damaged, foreign or newer file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CostTableError(path, "no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CostTableError(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(data, Mapping) or data.get("kind") != KIND:
        raise CostTableError(path, f"not a cost table (no 'kind': '{KIND}')")
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CostTableError(
            path, f"version {version}, this loka-compile reads up to {VERSION}; upgrade it"
        )
    try:
        yield from [row_of(one, origin) for one in data["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CostTableError(path, f"damaged ({type(error).__name__}: {error})") from error


@functools.cache
def shipped_rows() -> tuple[CostRow, ...]:
    """The rows that came with the package."""
    found: list[CostRow] = []
    for path in sorted(Path(__file__).parent.glob("costs_*.json")):
        found += import_rows(path, "shipped")
    return tuple(found)
