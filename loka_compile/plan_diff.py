"""Two plans compared, one line per difference; what `loka plan diff` prints."""

from __future__ import annotations

from collections.abc import Iterator

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.mod_set import ModSet
from loka_compile.plan import Plan


def diff(a: Plan, b: Plan) -> Iterator[str]:
    """Nothing for plans that decide the same: all that a plan file says of what is run. What was
    measured, and where, and for which batch, does not count as a difference."""
    for name in ("mods", "kept", "block", "heads", "emulated"):
        old, new = getattr(a, name), getattr(b, name)
        if name == "mods":
            old, new = str(ModSet.of(old)), str(ModSet.of(new))
        if old != new:
            yield f"{name}: {old} -> {new}"
    yield from _parts(a, b)
    yield from _blocks(a, b)
    for name in sorted({*a.sites, *b.sites}):
        if name not in b.sites:
            yield f"- {name}: no longer planned"
        elif name not in a.sites:
            yield f"+ {name}: {', '.join(b.sites[name].kernels)}"
        else:
            old_site, new_site = a.sites[name], b.sites[name]
            if (old_site.K, old_site.N) != (new_site.K, new_site.N):
                yield (f"{name}: K={old_site.K}, N={old_site.N} -> K={new_site.K}, N={new_site.N}")
            for direction in DIRECTIONS:
                old_choice, new_choice = old_site.choice(direction), new_site.choice(direction)
                if old_choice.kernel != new_choice.kernel:
                    why = f" ({new_choice.reason})" if new_choice.reason else ""
                    yield f"{name} {direction}: {old_choice.kernel} -> {new_choice.kernel}{why}"


def _blocks(a: Plan, b: Plan) -> Iterator[str]:
    """Widths of BlockNorm's blocks, norm by norm. One that a plan does not name has the width that
    the rule gives it; plans from before norms had their own went by the number of features."""
    for name in sorted({*(a.blocks or {}), *(b.blocks or {})}):
        old, new = (_block_of(name, p) for p in (a, b))
        if old != new:
            yield f"{name}: block_norm of {old} -> {new}"
    if (a.blocks is None) != (b.blocks is None):
        old, new = (_block_of("", p) for p in (a, b))
        yield f"every other norm: block_norm of {old} -> {new}"


def _block_of(name: str, plan: Plan) -> str:
    if plan.blocks is None:
        return "the default for its width alone"
    return str(plan.blocks.get(name, "the default"))


def _parts(a: Plan, b: Plan) -> Iterator[str]:
    """Parameters for which other Mods are in force, where `mods` does not say so already; those of
    one change share a line. Of a parameter that a plan does not name it decides no Mods.

    `mods of mlp.0, mlp.1.weight: on -> not named`
    """
    changes: dict[str, list[str]] = {}
    for name in sorted({*a.parameters, *b.parameters, *a.fewer, *b.fewer}):
        old, new = _mods_of(name, a), _mods_of(name, b)
        follow = all(name in p.parameters and name not in p.fewer for p in (a, b))
        if old != new and not follow:
            changes.setdefault(f"{old} -> {new}", []).append(name)
    for change, names in changes.items():
        yield f"mods of {', '.join(names)}: {change}"


def _mods_of(name: str, plan: Plan) -> str:
    if name not in plan.fewer and name not in plan.parameters:
        return "not named"
    return str(ModSet.of(plan.fewer.get(name, plan.mods)))
