"""Which Mods: their names, what users may say of them, and what is in force for one graph.

`no_bias`     every bias of a linear or norm goes, except in heads
`block_norm`  norms over the last dimension become BlockNorm
`hard_swish`  SiLU becomes Hard Swish, `v * sigmoid(norm(v))` takes hard sigmoid
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loka_compile.errors import BadOptionError
from loka_compile.errors import PatternMatchesNothingError

#: In the order in which their passes run.
EVERY = ("no_bias", "block_norm", "hard_swish")
#: Mod -> name patterns of the layers that it leaves as written.
Keep = Mapping[str, tuple[str, ...]]
#: (Mod, layer) pairs.
Kept = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ModSet:
    """The Mods that are in force: which, and where not.

    names: in the order of `EVERY`. kept: layers that one of them leaves as written, sorted.
    """

    names: tuple[str, ...] = ()
    kept: Kept = ()

    @classmethod
    def of(cls, names: Iterable[str], kept: Iterable[tuple[str, str]] = ()) -> ModSet:
        """In normal form, so that equal sets are equal: a Mod that is off keeps nothing."""
        ordered = in_order(names)
        return cls(ordered, tuple(sorted({pair for pair in kept if pair[0] in ordered})))

    def __bool__(self) -> bool:
        return bool(self.names)

    def keeps(self, mod: str, layer: str) -> bool:
        """`mod` leaves `layer` as written though it is on."""
        return (mod, layer) in self.kept

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int = 3) -> str:
        """`on`, `off`, `on (block_norm, hard_swish)`, `on; no_bias keeps mlp.0`.

        most: layers that are listed by name for each Mod.
        """
        if not self.names:
            return "off"
        some = "" if self.names == EVERY else f" ({', '.join(self.names)})"
        parts = [f"on{some}"]
        for mod, layers in by_mod(self.kept).items():
            more = f", ... {len(layers)} in all" if len(layers) > most else ""
            parts.append(f"{mod} keeps {', '.join(layers[:most])}{more}")
        return "; ".join(parts)


ON = ModSet(EVERY)
OFF = ModSet()


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """In the order of `EVERY`, each once."""
    given = set(names)
    return tuple(name for name in EVERY if name in given)


def missing(names: Iterable[str]) -> tuple[str, ...]:
    """The Mods that are not among `names`."""
    given = set(names)
    return tuple(name for name in EVERY if name not in given)


def by_mod(pairs: Collection[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """(Mod, layer) pairs -> Mod -> layers."""
    return {
        mod: layers
        for mod in EVERY
        if (layers := tuple(sorted({layer for name, layer in pairs if name == mod})))
    }


def pairs_of(by: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """The reverse of `by_mod`."""
    return [(mod, layer) for mod, layers in by.items() for layer in layers]


# -- what users say -------------------------------------------------------------------------------


def parse_mods(
    value: Any, words: Collection[str] = ("auto", "on", "off"), option: str = "mods"
) -> str | tuple[str, ...]:
    """One of `words`, or the names of some Mods; all of them are "on", none is "off".

    A lone name is a list of one. Raises BadOptionError, which lists the names.
    """
    if isinstance(value, str) and value in words:
        return value
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Collection) or isinstance(names, Mapping):
        raise BadOptionError(option, value, _want(words))
    for name in names:
        if name not in EVERY:
            near = difflib.get_close_matches(str(name), EVERY, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise BadOptionError(option, value, _want(words) + hint)
    ordered = in_order(names)
    return {EVERY: "on", (): "off"}.get(ordered, ordered)


def _want(words: Collection[str]) -> str:
    return f"{', '.join(map(repr, words))}, or names out of {', '.join(EVERY)}"


def names_of(mods: str | tuple[str, ...]) -> tuple[str, ...]:
    """The Mods that are on where `mods`, from `parse_mods`, turns any on; "auto": all."""
    if isinstance(mods, tuple):
        return mods
    return () if mods == "off" else EVERY


def parse_keep(value: Any) -> Keep | None:
    """{Mod: name patterns}, or None. Raises BadOptionError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadOptionError("keep", value, "a dict {Mod: name patterns}, {'no_bias': ['mlp.*']}")
    for name in value:
        if name not in EVERY:
            raise BadOptionError("keep", value, "keys out of " + ", ".join(EVERY))
    keep = {}
    for name, given in value.items():
        patterns = (given,) if isinstance(given, str) else given
        if not isinstance(patterns, Collection) or not all(isinstance(p, str) for p in patterns):
            raise BadOptionError("keep", value, f"name patterns for {name!r}")
        keep[name] = tuple(patterns)
    return keep


def matches(layer: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(layer, pattern) for pattern in patterns)


def check_keep(
    keep: Keep | None, known: Mapping[str, Collection[str]], elsewhere: Collection[str] = ()
) -> None:
    """A pattern that matches nothing is an error: the user believes that it protects something.

    known: Mod -> layers that it changes here. elsewhere: layers that may be in another graph.
    Raises PatternMatchesNothingError.
    """
    for mod, patterns in (keep or {}).items():
        for pattern in patterns:
            here = known.get(mod, ())
            if not any(matches(layer, [pattern]) for layer in (*here, *elsewhere)):
                raise PatternMatchesNothingError(
                    f"keep[{mod!r}]", pattern, here, f"layer that {mod} changes"
                )
