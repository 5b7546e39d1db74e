"""Which layers of a graph the user keeps as written, for one set of parameters.

The option `keep` says so, else the plan, else, where `auto` follows what was decided before, what
was kept then. A graph has its own names for layers; blocks that share one differ in their prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

from loka_compile import names
from loka_compile.capture import Source
from loka_compile.ledger import Entry
from loka_compile.mod_set import ModSet
from loka_compile.mod_set import matches
from loka_compile.mod_set import pairs_of
from loka_compile.options import Options
from loka_compile.plan import Plan

#: (Mod, layer as the graph calls it) -> its name from the model's root, for some parameters.
Layers = Mapping[tuple[str, str], str]


def layers(source: Source, weights: Mapping[str, Any]) -> Layers:
    """weights: site name -> parameter."""
    linears = {}
    prefix = ""
    for site in source.sites:
        weight = weights.get(site.name)
        own = site.name.partition("#")[0]
        registered = None if weight is None else names.registered_name(weight)
        linears[own] = own if registered is None else names.layer_path(registered)
        inner = source.paths.get(site.weight)
        if registered and inner and registered.endswith(f".{inner}"):
            prefix = registered.removesuffix(inner)
    return {
        (mod, layer): linears.get(layer) or prefix + layer
        for mod, found in source.layers.items()
        for layer in found
    }


def kept(
    found: Layers, options: Options, plan: Plan | None, before: Iterable[Entry]
) -> list[tuple[str, str]]:
    """(Mod, layer as the graph calls it) of all that is kept.

    before: entries whose decisions hold here.
    """
    if options.keep is not None:
        keep = options.keep
        said = {(mod, name) for (mod, _), name in found.items() if matches(name, keep.get(mod, ()))}
    elif plan is not None:
        said = set(pairs_of(plan.kept))
    else:
        said = {pair for entry in before for pair in entry.kept}
    return [(mod, own) for (mod, own), name in found.items() if (mod, name) in said]


def wanted(found: Layers, options: Options) -> ModSet:
    """What the options alone ask for, as if "auto" had turned them on."""
    return ModSet.of(options.wanted_mods, kept(found, options, None, ()))


def from_the_root(mods: ModSet, found: Layers) -> ModSet:
    """`mods` with the names that layers have from the model's root."""
    return ModSet.of(mods.names, ((mod, found[mod, own]) for mod, own in mods.kept))
