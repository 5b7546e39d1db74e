"""Graph -> graph with `loka::block_norm` for every norm over the last dimension.

These are layer_norm, rms_norm, and group_norm of a matrix (rows, features), whose groups are its
blocks. A gain stays a per-feature multiply, the mean goes. On rms_norm no wider than one block this
is the same function; `ExactBlockNorm` does only that, for models whose function must not change.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

import loka_compile.lowering.ops  # noqa: F401  (defines the ops named below)
from loka_compile.kernels.block_norm import block_of
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes import norm_blocks
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext

BLOCK_NORM = torch.ops.loka.block_norm.default


class BlockNorm:
    """Needs canonical norms; runs when Mods are on."""

    name = "block_norm"
    exact_only = False

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        transformed = m.transformed(gm)
        facts = Facts(gm)
        for node in list(gm.graph.nodes):
            if g.is_call(node, torch.rms_norm) and len(node.args) == 4:
                bias = None
            elif g.is_call(node, F.layer_norm) and len(node.args) == 5:
                bias = node.args[3]
                if self.exact_only:
                    continue
            elif g.is_call(node, F.group_norm) and len(node.args) == 5 and not self.exact_only:
                bias = node.args[3]
            else:
                continue
            why = "inside a functorch transform" if transformed else self._why_not(node)
            writer = None if why else facts.written(node.args[0], after=node)  # type: ignore[arg-type]
            if writer is not None:
                # Our op saves its input for the backward, which torch's own need not do.
                why = f"its input is written to in place later ({m.name_of(writer)})"
            if why is not None:
                context.refused(node, f"{m.name_of(node)} left as written: {why}")
                continue
            features, width = norm_blocks.features(node), norm_blocks.width(node)
            block = self._block(node, width, context)
            if width % block and width != features:
                # A ragged last block would run into the next group.
                block = width
            groups = "" if width == features else f" in groups of {width}"
            what = f"{m.name_of(node)} over {features} features{groups} -> block_norm of {block}"
            if node.target is torch.rms_norm and block == features:
                context.rewrote(node, what)
            else:
                context.changed(node, what)
            self._rewrite(gm, facts, node, bias, block)

    def _block(self, node: fx.Node, width: int, context: PassContext) -> int:
        if self.exact_only:
            return width
        return min(context.options.block or norm_blocks.block_for(node), width)

    def _why_not(self, node: fx.Node) -> str | None:
        shape: Any = node.args[1]
        eps = node.args[-1]
        x, y = m.tensor(node.args[0]), m.tensor(node)
        if g.is_call(node, F.group_norm):
            if x is None or x.dim() != 2:
                return "it does not run over the last dimension"
        elif len(shape) != 1:
            return f"it runs over {len(shape)} dimensions"
        if not isinstance(norm_blocks.width(node), int) or norm_blocks.width(node) < 1:
            return "its width is not a number"
        if isinstance(eps, bool) or not isinstance(eps, (int, float)):
            return "eps is a graph input, not a literal (dynamic=True makes it one)"
        if x is None or y is None or not x.is_floating_point():
            return "its input is not a floating-point tensor"
        if self.exact_only and block_of(shape[0]) != shape[0]:
            return f"over {shape[0]} features it equals block_norm no more, and Mods are off"
        return None

    def _rewrite(
        self, gm: fx.GraphModule, facts: Facts, node: fx.Node, bias: fx.Node | None, block: int
    ) -> None:
        eps: Any = node.args[-1]
        x, gain = node.args[0], node.args[2]
        with gm.graph.inserting_before(node):
            args = (x, gain, block, float(eps))
            pair = m.call(gm.graph, BLOCK_NORM, args, like=node)
            out = m.call(gm.graph, operator.getitem, (pair, 0), like=node)
            if bias is not None:
                out = m.call(gm.graph, operator.add, (out, bias), like=node)
            # Autocast on CUDA computes norms in FP32 and returns that; our op keeps x's dtype.
            out = m.cast(gm.graph, out, g.value(node).dtype, like=node)
        facts.replace(node, out)


class ExactBlockNorm(BlockNorm):
    """Only rms_norm, only where block_norm computes the same; runs when Mods are off."""

    name = "exact_block_norm"
    exact_only = True
