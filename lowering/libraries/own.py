"""Our own Triton kernel: the forward of a fused chain, with BlockNorm and activation inside, or of
a linear with an exact pointwise epilogue.

A bare GEMM is cuBLAS's ground; this library offers the chain's forward only. The backward of such a
chain quantises dL/dz in both orientations in our own kernel, and leaves the two GEMMs to the
kernels that the site's dgrad and wgrad name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.kernels.block_norm import block_of
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import BLOCKWISE
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.lowering.recipes import TENSORWISE
from loka_compile.lowering.recipes import Gemm
from loka_compile.lowering.recipes import Recipe

#: A block lies in one tile, and a tile's accumulator in the registers of one program.
WIDEST = 256


def block_in(epilogue: str) -> int:
    """`block_norm:256:hard_swish+gain` -> 256, 0 without a norm: see `lowering.epilogue`."""
    return int(epilogue.split(":")[1]) if epilogue.startswith("block_norm:") else 0


class Own(Library):
    name = "loka"
    distribution = "loka-compile"
    hands_over = True
    recipes = {
        r.name: Recipe(r.name, fwd=r.fwd, dgrad=None, wgrad=None)
        for r in (TENSORWISE, ROWWISE, BLOCKWISE)
    }
    # Finer scales for a site whose rows one scale does not cover; slower than the others elsewhere.
    on_request = frozenset({"blockwise"})

    def why_unavailable(self, device: torch.device) -> str | None:
        return _compat.why_no_triton() or _compat.why_no_fp8(device)

    def why_not(self, recipe: str, direction: str, shape: GemmShape) -> str | None:
        why = super().why_not(recipe, direction, shape)
        if why is None and not shape.epilogue:
            return "the linear is not part of a fused chain, and loka offers only those"
        if why is None and direction == "fwd":
            if shape.k % ALIGNMENT:
                return f"K = {shape.k} is no multiple of {ALIGNMENT}, which tensor descriptors need"
            block = block_in(shape.epilogue)
            if block > WIDEST:
                return f"block {block} is wider than the {WIDEST} features that one tile holds"
        return why

    def kernel_dtype(self, gemm: Gemm, out_dtype: torch.dtype) -> torch.dtype:
        # The GEMM's result stays in FP32 registers until the epilogue is done.
        return torch.float32

    def gemm(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        gemm: Gemm,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """The bare product, which errors of a chain are measured on: its FP32 accumulator."""
        # Defines the op; at the top of the file it would be a cycle.
        from loka_compile.lowering import chain  # noqa: F401

        y, _, _, _ = torch.ops.loka.fused_chain(
            a,
            a_scale.contiguous(),
            b,
            b_scale.contiguous(),
            None,
            None,
            block_of(b.shape[0]),
            0.0,
            False,
            "none",
            False,
            gemm.fast_accum,
            torch.float32,
            None,
            False,
            False,
        )
        return y.to(out_dtype)
