"""Variants 7, 8, 10, 13 and 19: what `loka::linear_epilogue` takes in, with the values they had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from chain_models import LINEAR
from chain_models import K
from chain_models import N
from torch import Tensor
from torch import nn
from variant_models import Ops
from variant_models import Variant
from variant_models import linear
from variant_models import reference

from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.passes import graph as g
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse import FUSED
from loka_compile.passes.fuse_epilogue import label


def act_before_norm(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", o.silu(o.linear("a", x)))


def act_before_norm_and_behind(o: Ops, x: Tensor) -> Tensor:
    return torch.tanh(o.norm("n", F.gelu(o.linear("a", x), approximate="tanh")))


def relu_before_groups(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", F.relu(o.linear("a", x)).unflatten(-1, (2, N // 2)))


def norm_before(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.linear("a", o.norm("n", x)))


def residual(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.norm("n", o.linear("a", x) + x.repeat_interleave(2, -1)[..., :N]))


def residual_of_one_column(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.norm("n", x.mean(-1, keepdim=True) + o.linear("a", x)))


def residual_over_groups(o: Ops, x: Tensor) -> Tensor:
    """Wukong's and DHEN's outer norm: a linear's features as n embeddings of width d."""
    shortcut = x.repeat_interleave(2, -1)[..., :N].unflatten(-1, (2, N // 2))
    return o.norm("n", o.linear("a", x).unflatten(-1, (2, N // 2)) + shortcut)


def two_gemms(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", o.linear("a", x) + o.linear("b", x))


def three_gemms(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", sum((o.linear("b", x), o.linear("c", x)), o.linear("a", x)))


def stacked_ensemble(o: Ops, x: Tensor) -> Tensor:
    stacked = torch.stack(
        [o.linear("a", x), o.linear("b", x), x[..., :1].expand(*x.shape[:-1], N)], -1
    )
    return o.norm("n", (stacked * o.layers["n"].weight[:3].softmax(0)).sum(-1))


def stacked_in_front(o: Ops, x: Tensor) -> Tensor:
    weights = o.layers["n"].weight[:2].softmax(0).view(2, *(1,) * x.dim())
    return o.norm(
        "n", torch.sum(weights * torch.stack([o.linear("a", x), o.linear("b", x)]), dim=0)
    )


def weighted_sum_behind_a_gate(o: Ops, x: Tensor) -> Tensor:
    """DHEN as it was found in production."""
    weights = o.layers["n"].weight[:2].softmax(0)
    y = o.linear("a", x)
    for i, name in enumerate("bc"):
        y = y + weights[i] * o.linear(name, x)
    return y * o.gate(o.norm("n", y))


def se_gate(o: Ops, x: Tensor) -> Tensor:
    return x * torch.sigmoid(o.linear("b", o.silu(o.linear("a", x))))


def masked_block(o: Ops, x: Tensor) -> Tensor:
    """MaskNet: an instance-guided mask on the normalised input, then linear, norm, ReLU."""
    mask = o.linear("b", F.relu(o.linear("a", x)))
    return F.relu(o.norm("m", o.linear("c", o.norm("n", x) * mask)))


def cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) + x


def gated_cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) * torch.sigmoid(o.linear("b", x)) + x


Made = tuple[Variant, list[str]]

#: name -> (model, label of each op)
FUSED_AS: dict[str, Callable[[], Made]] = {
    "7-act-before-norm": lambda: (
        Variant(act_before_norm, a=linear(), n=nn.LayerNorm(N)),
        ["hard_swish+block_norm"],
    ),
    "7-gelu-before-norm-then-tanh": lambda: (
        Variant(act_before_norm_and_behind, a=linear(), n=nn.RMSNorm(N)),
        ["gelu_tanh+block_norm+tanh"],
    ),
    "7-relu-before-groups": lambda: (
        Variant(relu_before_groups, a=linear(), n=nn.LayerNorm(N // 2)),
        ["relu+block_norm"],
    ),
    "8-norm-before": lambda: (
        Variant(norm_before, a=linear(), n=nn.LayerNorm(K)),
        ["hard_swish"],
    ),
    "10-residual": lambda: (
        Variant(residual, a=linear(), n=nn.LayerNorm(N)),
        ["addend+block_norm+hard_swish"],
    ),
    "10-residual-of-one-column": lambda: (
        Variant(residual_of_one_column, a=linear(), n=nn.LayerNorm(N)),
        ["addend+block_norm+hard_swish"],
    ),
    "10-residual-over-groups": lambda: (
        Variant(residual_over_groups, a=linear(), n=nn.LayerNorm(N // 2)),
        ["addend+block_norm"],
    ),
    "10-two-gemms": lambda: (
        Variant(two_gemms, a=linear(), b=linear(), n=nn.LayerNorm(N)),
        ["addend+block_norm"],
    ),
    "10-three-gemms": lambda: (
        Variant(three_gemms, a=linear(), b=linear(), c=linear(), n=nn.LayerNorm(N)),
        ["addend", "addend+block_norm"],
    ),
    "10-stacked-ensemble": lambda: (
        Variant(stacked_ensemble, a=linear(), b=linear(), n=nn.LayerNorm(N)),
        ["scale+addend+block_norm", "scale+addend"],
    ),
    "10-stacked-in-front": lambda: (
        Variant(stacked_in_front, a=linear(), b=linear(), n=nn.LayerNorm(N)),
        ["scale+addend+block_norm", "scale"],
    ),
    "10-weighted-sum-behind-a-gate": lambda: (
        Variant(
            weighted_sum_behind_a_gate, a=linear(), b=linear(), c=linear(), n=nn.LayerNorm(N)
        ),
        ["addend+block_norm+hard_sigmoid+gate", "scale+addend", "scale"],
    ),
    "13-se-gate": lambda: (
        Variant(se_gate, a=linear(), b=linear(K, N)),
        ["hard_swish", "sigmoid+factor"],
    ),
    "13-mask": lambda: (
        Variant(
            masked_block,
            a=linear(), b=linear(K, N), c=linear(), n=nn.LayerNorm(K), m=nn.LayerNorm(N),
        ),
        ["relu", "factor", "block_norm"],
    ),
    "13-gated-cross": lambda: (
        Variant(gated_cross, a=linear(K), b=linear(K)),
        ["factor", "sigmoid+factor+residual"],
    ),
    "19-cross": lambda: (Variant(cross, a=linear(K)), ["factor+residual"]),
}  # fmt: skip


def parts_of(node) -> str:
    """What an op has besides its linear. Where our kernel can run it, a norm's op is the other."""
    if g.is_call(node, LINEAR_EPILOGUE):
        return label(node)
    parts = {"addend": node.args[20] is not None, "block_norm": True}
    parts |= {node.args[7]: node.args[7] != "none", "gate": node.args[8]}
    return "+".join(name for name, there in parts.items() if there)


@pytest.mark.parametrize("name", FUSED_AS)
def test_variants_that_fuse(name, pair, capture, agree):
    model, labels = FUSED_AS[name]()
    model.train(pair.train)
    captured = capture(model, "mods")
    agree(captured, model, reference, pair, K)
    assert sorted(map(parts_of, captured.nodes(LINEAR_EPILOGUE, FUSED))) == sorted(labels)
    # 10: of a sum of plain linears one takes the others in; 13: the mask's third has a norm behind.
    left = {"10-two-gemms": 1, "10-three-gemms": 1}.get(name, 0)
    assert captured.count(LINEAR) == left
    assert captured.count(BLOCK_NORM) == (name in ("8-norm-before", "13-mask"))
    assert (
        captured.notes("remarks", "fuse")
        == ["not fused: it is the addend of another linear's fused op"] * left
    )
