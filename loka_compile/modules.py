"""`apply_mods(model)`: the Mods as modules, before optimizer, DDP or FSDP see the parameters.

Recommended for new models: eager and compiled then compute the same, and the biases are really
gone. It sees modules only: `F.silu(...)` or `F.layer_norm(...)` in a forward stay as they are, in
eager and compiled alike.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor
from torch import nn

from loka_compile import module_order
from loka_compile.kernels.block_norm import block_of
from loka_compile.ledger import LEDGER
from loka_compile.lowering import formulas
from loka_compile.lowering import ops  # noqa: F401  (defines torch.ops.loka.block_norm)

if TYPE_CHECKING:
    from loka_compile.module_flow import Flow


class BlockNorm(nn.Module):
    """RMS over blocks of `block` features of the last dimension; no mean, no bias.

    x (..., N) -> (..., N) in x's dtype, statistics in FP32. `weight` (N,), when kept from the norm
    it replaces, is a per-feature gain. Source: LoKA (arXiv 2605.10886), section III.B.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        features: int,
        block: int | None = None,
        eps: float = 1e-6,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.block = min(block or block_of(features), features)
        self.eps = eps
        self._formula = formulas.digest()
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.loka.block_norm.default(
            x, self.weight, self.block, self.eps, self._formula
        )[0]

    def extra_repr(self) -> str:
        gain = "gain" if self.weight is not None else "no gain"
        return f"{self.features}, block={self.block}, eps={self.eps}, {gain}"


@dataclass(frozen=True)
class ModsReport:
    """What `apply_mods` changed: (layer, what), and the heads that it left alone."""

    changes: tuple[tuple[str, str], ...]
    heads: tuple[str, ...]

    def summary(self) -> str:
        if not self.changes:
            return "apply_mods: nothing to change"
        counts = Counter(what for _, what in self.changes)
        listed = ", ".join(f"{n} x {what}" for what, n in sorted(counts.items()))
        kept = f"; heads kept: {', '.join(self.heads)}" if self.heads else ""
        return f"apply_mods: {listed}{kept}"


def apply_mods(
    model: nn.Module,
    *,
    heads: Sequence[str] | None = None,
    block: int | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> ModsReport:
    """Rewrite `model` in place; a second call changes nothing.

    Every bias of a Linear goes, except in heads; LayerNorm and RMSNorm over the last dimension
    become BlockNorm (their gain stays); SiLU becomes Hard Swish; a Sigmoid right behind a replaced
    norm in a Sequential (the SwishLayerNorm gate) becomes hard sigmoid.

    heads: name patterns. block: BlockNorm width for every norm; by default that of
    `kernels.block_norm.block_of`: the whole row where no linear feeds the norm.
    example_inputs: arguments of the forward. With them heads are those of the backend (Linears of
    at most 16 outputs that reach the model's output through no other linear and no norm), and so
    are the norms that no linear feeds. Without them the order of registration stands for the order
    of the forward (`module_order`).
    """
    flow = None
    if example_inputs is not None:
        from loka_compile.module_flow import flow_of

        flow = flow_of(model, example_inputs)
    kept = _heads(model, heads, flow)
    alone = module_order.norms_behind_no_linear(model)
    if flow is not None:
        alone = (alone - flow.norms.keys()) | {n for n, fed in flow.norms.items() if not fed}
    changes: list[tuple[str, str]] = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module.bias is not None and name not in kept:
            module.register_parameter("bias", None)
            changes.append((name, "bias removed"))
        for child_name, child in list(module.named_children()):
            path = f"{name}.{child_name}" if name else child_name
            new, what = _replacement(module, child_name, child, block, path in alone)
            if new is not None:
                module._modules[child_name] = new
                changes.append((path, what))
    for parameter in model.parameters():
        entry = LEDGER.entry(parameter)
        entry.baked = True
    LEDGER.touch()
    return ModsReport(tuple(changes), tuple(sorted(kept)))


def _replacement(
    parent: nn.Module, name: str, child: nn.Module, block: int | None, alone: bool
) -> tuple[nn.Module | None, str]:
    if isinstance(child, (nn.LayerNorm, nn.RMSNorm)) and len(child.normalized_shape) == 1:
        features = int(child.normalized_shape[0])
        eps = child.eps
        if eps is None:
            # RMSNorm's default: the machine epsilon of the dtype it computes in.
            dtype = child.weight.dtype if child.weight is not None else torch.float32
            eps = torch.finfo(dtype).eps
        new = BlockNorm(features, block or block_of(features, not alone), eps, child.weight)
        new.train(child.training)
        return new, f"{type(child).__name__} -> BlockNorm"
    if type(child) is nn.SiLU:
        return nn.Hardswish(inplace=child.inplace), "SiLU -> Hard Swish"
    if type(child) is nn.Sigmoid and isinstance(parent, nn.Sequential):
        before = list(parent._modules)[: list(parent._modules).index(name)]
        previous = parent._modules[before[-1]] if before else None
        if isinstance(previous, (nn.LayerNorm, nn.RMSNorm, BlockNorm)):
            return nn.Hardsigmoid(), "Sigmoid gate of a norm -> hard sigmoid"
    return None, ""


def _heads(model: nn.Module, patterns: Sequence[str] | None, flow: Flow | None) -> set[str]:
    if patterns is not None:
        linears = (n for n, m in model.named_modules() if isinstance(m, nn.Linear))
        return {n for n in linears if any(fnmatch.fnmatchcase(n, p) for p in patterns)}
    return flow.heads if flow is not None else module_order.heads(model)
