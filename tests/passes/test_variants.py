"""The variants of linear, norm and activation that recommendation models are written in.

Forward and backward, FP32 and autocast, training and evaluation, two and three dimensions. A
variant that the fused op does not offer keeps its linears and norms apart, and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chain_models import EPS32
from chain_models import LINEAR
from chain_models import K
from chain_models import N
from chain_models import perturb
from torch import Tensor
from torch import nn

from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.kernels.block_norm import block_of
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse import FUSED


@dataclass
class Ops:
    """What a variant is written with: the model's own layers, or these layers after the Mods."""

    layers: nn.ModuleDict
    modded: bool

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.layers[name].weight) if self.modded else self.layers[name](x)

    def norm(self, name: str, x: Tensor) -> Tensor:
        norm = self.layers[name]
        if not self.modded:
            return norm(x)
        features = x.shape[-1]
        block = block_of(features)
        if isinstance(norm, nn.GroupNorm):
            block = features // norm.num_groups
        eps = EPS32 if norm.eps is None else norm.eps
        return block_norm_ref(x, getattr(norm, "weight", None), block, eps)

    def silu(self, x: Tensor) -> Tensor:
        return F.hardswish(x) if self.modded else F.silu(x)

    def gate(self, x: Tensor) -> Tensor:
        """The sigmoid of v * sigmoid(norm(v))."""
        return F.hardsigmoid(x) if self.modded else torch.sigmoid(x)


class Variant(nn.Module):
    def __init__(self, how: Callable[[Ops, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = perturb(nn.ModuleDict(layers))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(Ops(self.layers, False), x)


def reference(model: Variant, x: Tensor) -> Any:
    return model.how(Ops(model.layers, True), x)


def linear(features: int = N, into: int = K, **options: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(into, features, **options)


def swish(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.norm("n", o.linear("a", x)))


def torchrec_gate(o: Ops, x: Tensor) -> Tensor:
    y = o.linear("a", x)
    return y * o.gate(o.norm("n", y))


def wide_gate(o: Ops, x: Tensor) -> Tensor:
    y = o.linear("a", x)
    wide = y.float()
    return (wide * o.gate(o.norm("n", wide))).to(y.dtype)


def rms_silu_in_fp32(o: Ops, x: Tensor) -> Tensor:
    y = o.linear("a", x)
    return o.silu(o.norm("n", y.float())).to(y.dtype)


def wide_then_chunk(o: Ops, x: Tensor) -> Tensor:
    gate, up = o.norm("n", o.linear("a", x)).chunk(2, -1)
    return o.silu(gate) * up


def concatenated(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.norm("n", torch.cat([o.linear("a", x), o.linear("b", x)], -1)))


def concatenated_with_input(o: Ops, x: Tensor) -> Tensor:
    return o.norm(
        "n", torch.cat([x.repeat_interleave(64, -1)[..., :256], o.linear("b", x)], dim=-1)
    )


def by_einsum(o: Ops, x: Tensor) -> Tensor:
    y = torch.einsum("...k,nk->...n", x, o.layers["a"].weight)
    return o.silu(o.norm("n", y))


def written_hard_swish(write: Callable[[Tensor], Tensor]) -> Callable[[Ops, Tensor], Tensor]:
    return lambda o, x: write(o.norm("n", o.linear("a", x)))


def by_relu6(v: Tensor) -> Tensor:
    return v * F.relu6(v + 3) / 6


def by_clamp(v: Tensor) -> Tensor:
    return v * (v + 3).clamp(0, 6) / 6


def with_reader_behind(o: Ops, x: Tensor) -> Tensor:
    h = o.norm("n", o.linear("a", x))
    return o.silu(h) + 0.5 * h


#: name -> (model, number of fused ops)
FUSE = {
    "4-gate-in-fp32": lambda: (Variant(wide_gate, a=linear(), n=nn.LayerNorm(N)), 1),
    "5-rms-gate": lambda: (Variant(torchrec_gate, a=linear(), n=nn.RMSNorm(N, eps=1e-5)), 1),
    "5-rms-silu-in-fp32": lambda: (Variant(rms_silu_in_fp32, a=linear(), n=nn.RMSNorm(N)), 1),
    "12-one-wide-then-chunk": lambda: (Variant(wide_then_chunk, a=linear(), n=nn.LayerNorm(N)), 1),
    "12-concatenated": lambda: (
        Variant(concatenated, a=linear(256), b=linear(256), n=nn.LayerNorm(512)),
        2,
    ),
    "12-concatenated-with-input": lambda: (
        Variant(concatenated_with_input, b=linear(256), n=nn.RMSNorm(512)),
        1,
    ),
    "15-no-affine": lambda: (
        Variant(swish, a=linear(), n=nn.LayerNorm(N, elementwise_affine=False)),
        1,
    ),
    "15-no-bias": lambda: (Variant(swish, a=linear(), n=nn.LayerNorm(N, bias=False)), 1),
    "15-shape-of-one": lambda: (Variant(swish, a=linear(), n=nn.LayerNorm((N,))), 1),
    "17-module": lambda: (
        Variant(written_hard_swish(F.hardswish), a=linear(), n=nn.LayerNorm(N)),
        1,
    ),
    "17-relu6": lambda: (
        Variant(
            written_hard_swish(lambda v: v * F.relu6(v + 3) / 6), a=linear(), n=nn.LayerNorm(N)
        ),
        1,
    ),
    "17-clamp": lambda: (
        Variant(written_hard_swish(by_clamp), a=linear(), n=nn.LayerNorm(N)),
        1,
    ),
    "20-norm-read-twice": lambda: (
        Variant(with_reader_behind, a=linear(), n=nn.LayerNorm(N)),
        1,
    ),
    "einsum": lambda: (Variant(by_einsum, a=linear(), n=nn.LayerNorm(N)), 1),
}


@pytest.mark.parametrize("name", FUSE)
def test_variants_that_fuse(name, pair, capture, agree):
    model, fused = FUSE[name]()
    model.train(pair.train)
    captured = capture(model, "mods")
    agree(captured, model, reference, pair, K)
    assert captured.count(FUSED) == fused
    assert captured.count(LINEAR) == 0
    assert captured.count(F.layer_norm, F.silu, torch.einsum) == 0


def act_before_norm(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", o.silu(o.linear("a", x)))


def norm_before(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.linear("a", o.norm("n", x)))


def residual(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.norm("n", o.linear("a", x) + x.mean(-1, keepdim=True)))


def two_gemms(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", o.linear("a", x) + o.linear("b", x))


def ensemble(o: Ops, x: Tensor) -> Tensor:
    stacked = torch.stack([o.linear("a", x), o.linear("b", x)], -1)
    return o.norm("n", (stacked * o.layers["n"].weight[:2].softmax(0)).sum(-1))


def narrow_concatenated(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", torch.cat([o.linear("a", x), o.linear("b", x)], -1))


def chunk_then_norm(o: Ops, x: Tensor) -> Tensor:
    gate, up = o.linear("a", x).chunk(2, -1)
    return o.silu(o.norm("n", gate)) * up


def se_gate(o: Ops, x: Tensor) -> Tensor:
    return x * torch.sigmoid(o.linear("b", o.silu(o.linear("a", x))))


def gated_cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) * torch.sigmoid(o.linear("b", x)) + x


def cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) + x


def saved_before(o: Ops, x: Tensor) -> Tensor:
    y = o.linear("a", x)
    return o.silu(o.norm("n", y)) + y.detach().square().mean()


#: name -> (model, what the report says)
APART = {
    "7-act-before-norm": (
        lambda: Variant(act_before_norm, a=linear(), n=nn.LayerNorm(N)),
        "hardswish stands in between, and the fused op computes the norm first",
    ),
    "8-norm-before": (
        lambda: Variant(norm_before, a=linear(), n=nn.LayerNorm(K)),
        "no norm reads it (hardswish does); the norm before it belongs to its input",
    ),
    "10-residual": (
        lambda: Variant(residual, a=linear(), n=nn.LayerNorm(N)),
        "a sum (residual",
    ),
    "10-ensemble": (
        lambda: Variant(ensemble, a=linear(), b=linear(), n=nn.LayerNorm(N)),
        "a sum of stacked layers stands in between",
    ),
    "12-narrow-concatenated": (
        lambda: Variant(narrow_concatenated, a=linear(4), b=linear(6), n=nn.LayerNorm(N)),
        "a block of 10 features runs over the parts of 4, 6",
    ),
    "12-chunk-then-norm": (
        lambda: Variant(chunk_then_norm, a=linear(), n=nn.LayerNorm(N // 2)),
        "the norm reads a part of the linear only",
    ),
    "13-se-gate": (
        lambda: Variant(se_gate, a=linear(), b=linear(K, N)),
        "no norm reads it: its result is a gate or is gated",
    ),
    "13-gated-cross": (
        lambda: Variant(gated_cross, a=linear(K), b=linear(K)),
        "no norm reads it: its result is a gate or is gated",
    ),
    "19-cross": (
        lambda: Variant(cross, a=linear(K)),
        "no norm reads it: x0 * linear(x) + x",
    ),
    "20-saved-before": (
        lambda: Variant(saved_before, a=linear(), n=nn.LayerNorm(N)),
        "other readers",
    ),
}


@pytest.mark.parametrize("name", APART)
def test_variants_that_stay_apart_say_why(name, pair, capture, agree):
    make, why = APART[name]
    model = make().train(pair.train)
    captured = capture(model, "mods")
    agree(captured, model, reference, pair, K)
    assert captured.count(FUSED) == 0
    assert why in "\n".join([captured.refusals("fuse"), *captured.notes("remarks", "fuse")])


def test_group_norm_of_rows_is_a_block_norm(case, capture, agree):
    """Variant 15: on a matrix group_norm runs over blocks of the last dimension, elsewhere not."""
    model = Variant(swish, a=linear(12), n=nn.GroupNorm(3, 12)).train(case.train)
    captured = capture(model, "mods")
    if len(case.shape) == 1:
        agree(captured, model, reference, case, K)
        assert captured.nodes(FUSED)[0].args[5] == 4
    else:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, K))  # three dimensions: the channels would be dimension 1
        other = nn.GroupNorm(3, 12)
        captured = capture(other, "mods")
        x = torch.randn(2, 12, 5)
        assert torch.equal(captured(x), other(x))
        assert "does not run over the last dimension" in captured.refusals("block_norm")


def test_norm_over_two_dimensions_stays(case, capture, agree):
    model = nn.LayerNorm((3, K)).train(case.train)
    x = torch.randn(2, 3, K)
    captured = capture(model, "mods")
    with case.context():
        assert torch.equal(captured(x), model(x))
    assert captured.count(BLOCK_NORM) == 0
    assert "it runs over 2 dimensions" in captured.refusals("block_norm")


def test_a_hook_on_the_linear_is_a_reader(capture, close):
    """Variant 20: a metric hook keeps the value before the norm."""
    model = Variant(swish, a=linear(bias=False), n=nn.RMSNorm(N))
    model.layers["a"].register_forward_hook(lambda m, args, y: model.seen.append(y))

    def forward(x):
        model.seen = []
        return model(x), model.seen[0]

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    got, seen = captured(x)
    close(seen, F.linear(x, model.layers["a"].weight))
    close(got, reference(model, x))
    assert captured.count(FUSED) == 0
    assert "other readers" in captured.refusals("fuse")
