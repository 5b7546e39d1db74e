"""Graph -> graph in which the forward of an inference graph takes its weights quantised already.

Each quantised weight enters as two extra placeholders (e4m3 and its scale) that the runtime binds;
it quantises again, into the same memory, when the parameter has changed. Training graphs are left
alone: their weights change at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from loka_compile.lowering import chain
from loka_compile.lowering import weight_cache
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.passes import graph as g
from loka_compile.passes.handover import FUSED
from loka_compile.passes.handover import LINEAR
from loka_compile.passes.handover import set_arguments
from loka_compile.passes.manager import PassContext
from loka_compile.passes.observe import static_placeholder

_WEIGHT = {LINEAR: 1, LINEAR_EPILOGUE: 1, FUSED: 3}
_FORWARD = {LINEAR: 3, LINEAR_EPILOGUE: 3, FUSED: 9}
_STORED = {LINEAR: (10, 11), LINEAR_EPILOGUE: (10, 11), FUSED: (15, 16)}


@dataclass(frozen=True)
class WeightKey:
    """One quantised weight: the parameter's placeholder, and how the forward reads it."""

    placeholder: str
    kernel: str
    dtype: torch.dtype
    transposed: bool


class StoreWeights:
    """Runs after `handover`. `keys` lists the weights, in binding order: two placeholders each."""

    name = "store_weights"

    def __init__(self) -> None:
        self.keys: list[WeightKey] = []
        self._visited = False

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        # Bodies of higher-order ops quantise per call: placeholders live at the top.
        if self._visited or torch.is_grad_enabled():
            return
        self._visited = True
        held: dict[WeightKey, list[fx.Node]] = {}
        for node in list(gm.graph.nodes):
            if not g.is_call(node, *_WEIGHT):
                continue
            kernel = str(node.args[_FORWARD[node.target]])
            if kernel == HIGH_PRECISION or kernel.endswith(EMULATED):
                continue
            w = node.args[_WEIGHT[node.target]]
            parameter = g.parameter_of(w)
            if parameter is None:
                context.refused(node, "weight quantised at every call: it is computed")
                continue
            if chain.rule_of(kernel).b.blocks:
                context.refused(node, "weight quantised at every call: its scales are blocks")
                continue
            key = WeightKey(parameter.name, kernel, g.value(w).dtype, g.is_transposed(w))
            if key not in held:
                held[key] = _placeholders(gm, len(held), key, g.value(w))
                self.keys.append(key)
            set_arguments(node, dict(zip(_STORED[node.target], held[key], strict=True)))
            context.rewrote(node, "takes its weight quantised once per version")


def _placeholders(gm: fx.GraphModule, index: int, key: WeightKey, w: torch.Tensor) -> list[fx.Node]:
    shapes = weight_cache.like(w, key.kernel)
    return [
        static_placeholder(gm, f"loka_weight_{index}_{part}", empty, w)
        for part, empty in zip(("q", "scale"), shapes, strict=True)
    ]
