"""The built-in passes, in the order in which the backend runs them.

To add one: write `passes/<stem>.py` with a class that has `name` and `__call__(gm, context)`, edits
the one graph that it is given in place, and tells `context` what it changed, rewrote or refused
(the manager visits bodies, times, lints and diffs); put its test into
`tests/passes/test_<stem>.py`; name it here at its place.

After `PREPARE` a pass may rely on the spellings that `canonicalize` lists. Between `PREPARE` and
the lists below every linear gets its site name, in `node.meta[graph.SITE]`: a pass that replaces a
linear hands it on with `graph.inherit`.

A pass that changes the model's function belongs to a Mod, and runs where that Mod is on.

`strip_bias`, `block_norm` and `hard_swish` are patterns, written with the API that users have
(`loka_compile.pattern`) and run by the same engine (`user_pattern.apply`); `mod.Mod` is all that
they have besides. What is no pattern, and why:

    canonicalize   patterns are spelled by it, before they are looked for: a pattern for
                   x * sigmoid(x) would be one for silu
    fuse           a chain takes any number of casts, views and sums between its parts, and each of
                   these may be missing: hundreds of patterns of fixed arguments. It changes no
                   function. What prepares it (a norm of concatenated parts, a sum of stacked ones)
                   takes any number of parts
    observe, dispatch, hand-over, shared and stored weights   look at the whole graph

A user's passes run first, unless their `before` or `after` names another place: see `order`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

from loka_compile.errors import PatternError
from loka_compile.mod_set import EVERY
from loka_compile.passes.block_norm import BLOCK_NORMS
from loka_compile.passes.block_norm import EXACT_BLOCK_NORM
from loka_compile.passes.canonicalize import Canonicalize
from loka_compile.passes.fuse import Fuse
from loka_compile.passes.hard_swish import HARD_SWISH
from loka_compile.passes.manager import Pass
from loka_compile.passes.strip_bias import STRIP_BIAS

#: Before sites are named; always.
PREPARE: tuple[Pass, ...] = (Canonicalize(),)


#: Mod -> what runs where it is on, and where it is off.
_OF_MOD: dict[str, tuple[Pass, Pass | None]] = {
    "no_bias": (STRIP_BIAS, None),
    "block_norm": (BLOCK_NORMS, EXACT_BLOCK_NORM),
    "hard_swish": (HARD_SWISH, None),
}


def built_in(mods: Sequence[str]) -> list[Pass]:
    """These Mods change the model's function; then what may be fused exactly is fused."""
    chosen = [on if mod in mods else off for mod, (on, off) in _OF_MOD.items()]
    return [*(one for one in chosen if one is not None), Fuse()]


def with_mods() -> list[Pass]:
    """The model's function changes: no bias, BlockNorm, Hard Swish; then they are fused."""
    return built_in(EVERY)


def without_mods() -> list[Pass]:
    """The same function: only fusions that are exact."""
    return built_in(())


#: Names that `before` and `after` may give, in order; a pass that is not run keeps its place.
PLACES = ("strip_bias", "block_norm", "exact_block_norm", "hard_swish", "fuse", "dispatch")


def order(patterns: Sequence[Any], built_in: Sequence[Pass]) -> list[Pass]:
    """Built-in passes with the user's among them.

    patterns: passes of the user; `before` and `after`, names or tuples of names, are optional.
    Default: first. Only `before`: directly before. Raises PatternError for a name that is unknown
    or given twice, and for a circle.
    """
    users = {p.name: p for p in patterns}
    if len(users) < len(patterns):
        twice = next(p.name for i, p in enumerate(patterns) if users[p.name] is not p)
        raise PatternError(twice, "two different patterns have this name; rename one")
    before = {name: _names(p, "before") for name, p in users.items()}
    after = {name: _names(p, "after") for name, p in users.items()}
    known = [*PLACES, *users]
    for name in users:
        if name in PLACES:
            raise PatternError(name, "a built-in pass has this name; rename the pattern")
        for other in (*before[name], *after[name]):
            if other not in known:
                near = difflib.get_close_matches(other, known, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise PatternError(name, f"no pass is named {other!r}; {hint}")
    waits_for: dict[str, set[str]] = {n: set(after.get(n, ())) for n in known}
    for first, then in itertools.pairwise(PLACES):
        waits_for[then].add(first)
    for name, others in before.items():
        for other in others:
            waits_for[other].add(name)
    _refuse_circles(waits_for, users)
    place: dict[str, float] = {name: float(i) for i, name in enumerate(PLACES)}

    def place_of(name: str) -> float:
        if name not in place:
            step = {True: 0.5, False: 0.0}
            late = [place_of(o) + step[o in PLACES] for o in after[name]]
            early = [place_of(o) - step[o in PLACES] for o in before[name]]
            place[name] = max(late) if late else min(early, default=-1.0)
        return place[name]

    sorted_names: list[str] = []
    left = sorted(known, key=lambda n: (place_of(n), known.index(n)))
    while left:
        ready = next(n for n in left if waits_for[n] <= set(sorted_names))
        left.remove(ready)
        sorted_names.append(ready)
    running: dict[str, Pass] = {**{p.name: p for p in built_in}, **users}
    return [running[n] for n in sorted_names if n in running]


def _names(one: Any, which: str) -> tuple[str, ...]:
    given = getattr(one, which, None) or ()
    return (given,) if isinstance(given, str) else tuple(given)


def _refuse_circles(waits_for: dict[str, set[str]], users: dict[str, Any]) -> None:
    left = dict(waits_for)
    while ready := [n for n, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    if left:
        # What is left may also only stand behind a circle: walk until a name comes again.
        path = [next(iter(left))]
        while path[-1] not in path[:-1]:
            path.append(next(o for o in sorted(left[path[-1]]) if o in left))
        circle = path[path.index(path[-1]) :]
        name = next((n for n in circle if n in users), circle[0])
        raise PatternError(name, "order is a circle: " + " waits for ".join(circle))
