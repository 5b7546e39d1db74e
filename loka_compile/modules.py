"""`apply_mods(model)`: the Mods as modules, before optimizer, DDP or FSDP see the parameters.

Recommended for new models: eager and compiled then compute the same, and the biases are really
gone. It sees modules only: `F.silu(...)` or `F.layer_norm(...)` in a forward stay as they are, in
eager and compiled alike.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor
from torch import nn

from loka_compile import _compat
from loka_compile import module_order
from loka_compile.kernels.block_norm import block_of
from loka_compile.ledger import LEDGER
from loka_compile.lowering import formulas
from loka_compile.lowering import ops  # noqa: F401  (defines torch.ops.loka.block_norm)
from loka_compile.mod_set import by_mod
from loka_compile.mod_set import check_keep
from loka_compile.mod_set import matches
from loka_compile.mod_set import missing
from loka_compile.mod_set import names_of
from loka_compile.mod_set import parse_keep
from loka_compile.mod_set import parse_mods

if TYPE_CHECKING:
    from loka_compile.module_flow import Flow


class BlockNorm(nn.Module):
    """RMS over blocks of `block` features of the last dimension; no mean.

    x (..., N) -> (..., N) in x's dtype, statistics in FP32. `weight` (N,), when kept from the norm
    it replaces, is a per-feature gain; `bias` (N,), where the Mod that removes it is off, is added.
    Source: LoKA (arXiv 2605.10886), section III.B.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        block: int | None = None,
        eps: float = 1e-6,
        weight: nn.Parameter | None = None,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.block = min(block or block_of(features), features)
        self.eps = eps
        self._formula = formulas.digest()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        args = x, self.weight, self.block, self.eps, self._formula
        # The op has a backward and no more: torch.func.jvp would find its derivative to be zero.
        plain = _compat.in_functorch()
        y, _ = (formulas.block_norm if plain else torch.ops.loka.block_norm.default)(*args)
        return y if self.bias is None else (y + self.bias).to(y.dtype)

    def extra_repr(self) -> str:
        gain = "gain" if self.weight is not None else "no gain"
        bias = ", bias" if self.bias is not None else ""
        return f"{self.features}, block={self.block}, eps={self.eps}, {gain}{bias}"


@dataclass(frozen=True)
class ModsReport:
    """What `apply_mods` changed: (layer, what); the heads and the layers that it left alone, and
    the Mods that it left off. kept: (Mod, layer)."""

    changes: tuple[tuple[str, str], ...]
    heads: tuple[str, ...]
    kept: tuple[tuple[str, str], ...] = ()
    left_off: tuple[str, ...] = ()

    def summary(self) -> str:
        counts = Counter(what for _, what in self.changes)
        listed = ", ".join(f"{n} x {what}" for what, n in sorted(counts.items()))
        parts = [f"apply_mods: {listed or 'nothing to change'}"]
        if self.heads and self.changes:
            parts.append(f"heads kept: {', '.join(self.heads)}")
        if self.left_off:
            parts.append(f"left off: {', '.join(self.left_off)}")
        for mod, layers in by_mod(self.kept).items():
            parts.append(f"kept as written for {mod}: {', '.join(layers)}")
        return "; ".join(parts)


def apply_mods(
    model: nn.Module,
    *,
    mods: str | Collection[str] = "on",
    keep: Mapping[str, Sequence[str]] | None = None,
    heads: Sequence[str] | None = None,
    block: int | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> ModsReport:
    """Rewrite `model` in place; a second call changes nothing.

    `no_bias`: every bias of a Linear or norm goes, except in heads. `block_norm`: LayerNorm and
    RMSNorm over the last dimension become BlockNorm (their gain stays). `hard_swish`: SiLU becomes
    Hard Swish; a Sigmoid right behind such a norm in a Sequential (the SwishLayerNorm gate) becomes
    hard sigmoid.

    mods: the names of those that are wanted; all by default. keep: {Mod: name patterns of layers
    that it leaves as written}. heads: name patterns. block: BlockNorm width for every norm; by
    default that of `kernels.block_norm.block_of`: the whole row where no linear feeds the norm.
    example_inputs: arguments of the forward. With them heads are those of the backend (Linears of
    at most 16 outputs that reach the model's output through no other linear and no norm), and so
    are the norms that no linear feeds. Without them the order of registration stands for the order
    of the forward (`module_order`).

    Raises BadOptionError, and PatternMatchesNothingError for a pattern in `keep`.
    """
    names = names_of(parse_mods(mods, ("on", "off")))
    patterns = parse_keep(keep) or {}
    flow = None
    if example_inputs is not None:
        from loka_compile.module_flow import flow_of

        flow = flow_of(model, example_inputs)
    spared = _heads(model, heads, flow)
    alone = module_order.norms_behind_no_linear(model)
    if flow is not None:
        alone = (alone - flow.norms.keys()) | {n for n, fed in flow.norms.items() if not fed}
    places = list(_places(model))
    check_keep(patterns, by_mod([(one.mod, one.layer) for one in places]))
    changes: list[tuple[str, str]] = []
    kept: set[tuple[str, str]] = set()
    for one in places:
        if one.mod not in names or (one.mod == "no_bias" and one.layer in spared):
            continue
        if matches(one.layer, patterns.get(one.mod, ())):
            kept.add((one.mod, one.layer))
            continue
        changes.append((one.layer, _change(one, block, one.layer in alone)))
    for parameter in model.parameters():
        entry = LEDGER.entry(parameter)
        entry.baked = True
    LEDGER.baked.update(model.modules())
    LEDGER.touch()
    return ModsReport(tuple(changes), tuple(sorted(spared)), tuple(sorted(kept)), missing(names))


@dataclass(frozen=True)
class _Place:
    """A module that a Mod changes, where it hangs, and its path from the root."""

    mod: str
    layer: str
    parent: nn.Module | None
    name: str
    module: nn.Module


def _places(model: nn.Module) -> Iterator[_Place]:
    """All of them, a module's bias before the module itself. What is shared has its first path."""
    paths = {module: path for path, module in model.named_modules()}
    for module, path in paths.items():
        if _has_bias(module):
            yield _Place("no_bias", path, None, "", module)
    for parent in paths:
        gates = _gates(parent)
        for name, child in parent.named_children():
            layer = paths[child]
            if isinstance(child, (nn.LayerNorm, nn.RMSNorm)) and len(child.normalized_shape) == 1:
                yield _Place("block_norm", layer, parent, name, child)
            if type(child) is nn.SiLU or child in gates:
                yield _Place("hard_swish", layer, parent, name, child)


def _has_bias(module: nn.Module) -> bool:
    kinds = (nn.Linear, nn.LayerNorm, BlockNorm)
    return isinstance(module, kinds) and module.bias is not None


def _gates(parent: nn.Module) -> list[nn.Module]:
    """Sigmoids right behind a norm over the last dimension, in a Sequential."""
    if not isinstance(parent, nn.Sequential):
        return []
    pairs = itertools.pairwise(parent._modules.values())
    return [b for a, b in pairs if type(b) is nn.Sigmoid and a is not None and _over_last(a)]


def _over_last(module: nn.Module) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape) == 1
    return isinstance(module, BlockNorm)


def _change(one: _Place, block: int | None, alone: bool) -> str:
    """Make the change; what it is called."""
    old = one.module
    if one.mod == "no_bias":
        old.register_parameter("bias", None)
        return "bias removed"
    assert one.parent is not None
    if isinstance(old, nn.SiLU):
        one.parent._modules[one.name] = nn.Hardswish(inplace=old.inplace)
        return "SiLU -> Hard Swish"
    if isinstance(old, nn.Sigmoid):
        one.parent._modules[one.name] = nn.Hardsigmoid()
        return "Sigmoid gate of a norm -> hard sigmoid"
    assert isinstance(old, (nn.LayerNorm, nn.RMSNorm))
    features = int(old.normalized_shape[0])
    eps = old.eps
    if eps is None:
        # RMSNorm's default: the machine epsilon of the dtype it computes in.
        dtype = old.weight.dtype if old.weight is not None else torch.float32
        eps = torch.finfo(dtype).eps
    bias = getattr(old, "bias", None)
    new = BlockNorm(features, block or block_of(features, not alone), eps, old.weight, bias)
    one.parent._modules[one.name] = new.train(old.training)
    return f"{type(old).__name__} -> BlockNorm"


def _heads(model: nn.Module, patterns: Sequence[str] | None, flow: Flow | None) -> set[str]:
    if patterns is not None:
        linears = (n for n, m in model.named_modules() if isinstance(m, nn.Linear))
        return {n for n in linears if any(fnmatch.fnmatchcase(n, p) for p in patterns)}
    return flow.heads if flow is not None else module_order.heads(model)
