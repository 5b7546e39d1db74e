"""Two plans compared, one line per difference; what `loka plan diff` prints."""

from __future__ import annotations

from collections.abc import Iterator

from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.mod_set import ModSet
from loka_compile.plan import Plan


def diff(a: Plan, b: Plan) -> Iterator[str]:
    """Nothing for plans that decide the same. Measured numbers do not count as differences."""
    for name in ("mods", "kept", "block", "heads", "emulated"):
        old, new = getattr(a, name), getattr(b, name)
        if name == "mods":
            old, new = str(ModSet.of(old)), str(ModSet.of(new))
        if old != new:
            yield f"{name}: {old} -> {new}"
    yield from _parts(a, b)
    for name in sorted({*(a.blocks or {}), *(b.blocks or {})}):
        widths = [(p.blocks or {}).get(name) for p in (a, b)]
        if None not in widths and widths[0] != widths[1]:
            yield f"{name}: block_norm of {widths[0]} -> {widths[1]}"
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


def _parts(a: Plan, b: Plan) -> Iterator[str]:
    """Where parts of the model have Mods of their own; parameters of one change share a line.

    `mods of mlp.0, mlp.1.weight: on -> off`
    """
    changes: dict[str, list[str]] = {}
    for name in sorted({*a.fewer, *b.fewer}):
        old, new = _mods_of(name, a), _mods_of(name, b)
        if old != new:
            changes.setdefault(f"{old} -> {new}", []).append(name)
    for change, names in changes.items():
        yield f"mods of {', '.join(names)}: {change}"


def _mods_of(name: str, plan: Plan) -> str:
    if name not in plan.fewer and name not in plan.parameters:
        return "not named"
    return str(ModSet.of(plan.fewer.get(name, plan.mods)))
