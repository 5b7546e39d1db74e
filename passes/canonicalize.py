"""Graph -> the same function with one spelling per op.

After it, whoever wrote the model and however:

    linear    F.linear(x, w, bias or None), w (N, K), three positional arguments
    norms     F.layer_norm(x, shape, weight, bias, eps), torch.rms_norm(x, shape, weight, eps)
    swish     F.silu(x), torch.sigmoid(x), F.hardswish(x), F.hardsigmoid(x)
    dropout   gone where it does nothing

Values keep their dtype and, up to the order of rounding, their value. What stands in the way (a
second reader, an in-place write, a change of dtype) leaves the code as it is, with the reason.
"""

from __future__ import annotations

from torch import fx

from loka_compile.passes import canonical_act
from loka_compile.passes import canonical_einsum
from loka_compile.passes import canonical_hard
from loka_compile.passes import canonical_linear
from loka_compile.passes import canonical_norm
from loka_compile.passes import canonical_rms
from loka_compile.passes import matching as m
from loka_compile.passes.manager import PassContext


class Canonicalize:
    name = "canonicalize"

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        if m.transformed(gm):
            first = next(iter(gm.graph.nodes))
            context.refused(first, "inside a functorch transform (vmap, grad): left as written")
            return
        # Dropouts first: one that does nothing must not hide what stands on its two sides.
        canonical_act.drop_dropouts(gm, context)
        canonical_einsum.einsums(gm, context)
        canonical_linear.products(gm, context)
        canonical_linear.biases(gm, context)
        canonical_norm.library_norms(gm, context)
        canonical_rms.written_norms(gm, context)
        canonical_act.swishes(gm, context)
        canonical_hard.hard_gates(gm, context)
