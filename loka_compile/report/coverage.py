"""A model's linears against the sites of a report: which ones no compiled graph holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

WHY = (
    "in no compiled graph: left eager by a graph break, torch.compiler.disable or a wrapper (the "
    "root of an FSDP model), or not called"
)


@dataclass(frozen=True)
class Linear:
    """An nn.Linear of the user's model. name: its path from the model's root."""

    name: str
    K: int
    N: int


def linears_of(model: nn.Module) -> list[Linear]:
    """Each weight once, under its first name; wrappers' own path parts are left out."""
    found: dict[int, Linear] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            wrappers = ("_orig_mod", "_fsdp_wrapped_module", "module", "_checkpoint_wrapped_module")
            name = ".".join(p for p in path.split(".") if p not in wrappers)
            one = Linear(name or "model", module.in_features, module.out_features)
            found.setdefault(id(module.weight), one)
    return list(found.values())


def left_eager(linears: Iterable[Linear], sites: Sequence[Mapping[str, Any]]) -> list[Linear]:
    """Those with no site of their name and size.

    A part of a model that is compiled by itself names its sites from its own root, so a name that
    ends in the site's counts, and each site stands for one linear unless its name is the whole one.
    """
    known = {(s["name"].partition("#")[0], s["K"], s["N"]) for s in sites}
    return [one for one in linears if not any(_is(one, *site) for site in known)]


def _is(one: Linear, name: str, k: int, n: int) -> bool:
    if (k, n) != (one.K, one.N):
        return False
    return one.name == name or one.name.endswith(f".{name}") or name.endswith(f".{one.name}")


def models_in_memory() -> Iterator[nn.Module]:
    """Outermost living modules that hold a linear; for scripts, whose models nobody names."""
    alive = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    inner = {id(child) for module in alive for child in _children(module)}
    for module in alive:
        if id(module) not in inner and any(isinstance(m, nn.Linear) for m in module.modules()):
            yield module


def _children(module: nn.Module) -> Iterator[nn.Module]:
    # A module whose constructor has not run, or failed, has no children yet.
    yield from (c for c in module.__dict__.get("_modules", {}).values() if c is not None)
