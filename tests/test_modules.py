"""apply_mods: what it changes, that eager and compiled agree, that a second call does nothing."""

from __future__ import annotations

import torch
from torch import nn

import loka_compile
from loka_compile import BlockNorm
from loka_compile import apply_mods
from loka_compile.kernels.block_norm import block_norm_ref


class SwishNorm(nn.Module):
    """TorchRec's SwishLayerNorm."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(n), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.norm(x)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 300),
        nn.LayerNorm(300, eps=1e-3),
        nn.SiLU(),
        nn.Linear(300, 64),
        SwishNorm(64),
        nn.Linear(64, 16),
        nn.RMSNorm(16),
        nn.Linear(16, 2),
    )


def test_changes_heads_and_idempotence() -> None:
    m = model()
    report = apply_mods(m)
    assert [type(x).__name__ for x in m] == [
        "Linear", "BlockNorm", "Hardswish", "Linear", "SwishNorm", "Linear", "BlockNorm", "Linear",
    ]  # fmt: skip
    assert [x.bias is None for x in m if isinstance(x, nn.Linear)] == [True, True, True, False]
    assert isinstance(m[4].norm[1], nn.Hardsigmoid)
    # Behind a linear: blocks.
    assert m[1].block == 256 and m[1].eps == 1e-3 and m[1].weight is not None
    assert report.heads == ("7",) and len(report.changes) == 10
    assert "bias removed" in report.summary()
    again = apply_mods(m)
    assert again.changes == () and again.summary() == "apply_mods: nothing to change"


def test_gain_stays_and_bias_is_gone_from_state_dict() -> None:
    m = model()
    gain = m[1].weight
    apply_mods(m)
    assert m[1].weight is gain
    assert "1.weight" in m.state_dict() and "1.bias" not in m.state_dict()


def test_block_norm_module_equals_the_reference_with_gradient() -> None:
    norm = BlockNorm(300, eps=1e-4, weight=nn.Parameter(torch.randn(300))).double()
    x = torch.randn(7, 300, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    reference = block_norm_ref(x, norm.weight, 256, 1e-4)
    torch.testing.assert_close(y, reference)
    g = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, (x, norm.weight), g),
        torch.autograd.grad(reference, (x, norm.weight), g),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_derivatives_of_torch_func_are_those_of_the_reference() -> None:
    norm = BlockNorm(64, weight=nn.Parameter(torch.rand(64) + 0.5)).double()
    x, v = torch.randn(2, 5, 64, dtype=torch.float64)

    def reference(x):
        return block_norm_ref(x, norm.weight, norm.block, norm.eps)

    for transform in (torch.func.jacfwd, torch.func.jacrev, torch.func.vmap):
        torch.testing.assert_close(transform(norm)(x), transform(reference)(x))
    got, want = (torch.func.jvp(f, (x,), (v,))[1] for f in (norm, reference))
    torch.testing.assert_close(got, want)
    assert want.norm() > 0.1


def test_eager_and_compiled_agree_and_nothing_more_is_changed() -> None:
    torch._dynamo.reset()
    m = model()
    apply_mods(m)
    compiled = torch.compile(
        m, backend=loka_compile.loka_backend, options={"inner": "aot_eager", "mods": "auto"}
    )
    x = torch.randn(9, 32)
    with loka_compile.explain() as report:
        y = compiled(x)
    torch.testing.assert_close(y, m(x), rtol=1e-5, atol=1e-6)
    assert report.changes == []
    assert {row["name"]: row["fused"] for row in report.sites} == {
        "0": "0+block_norm+hard_swish",
        "3": "3+block_norm+hard_sigmoid+gate",
        "5": "5+block_norm",
        "7": None,
    }


def test_heads_by_pattern() -> None:
    m = model()
    apply_mods(m, heads=["3"])
    assert m[3].bias is not None and m[7].bias is None


def test_the_graph_names_the_formula() -> None:
    """Plain Inductor's cache keys hold the graph only, not what our ops decompose to."""
    from loka_compile.lowering import formulas

    seen = []

    def backend(gm, inputs):
        seen.extend(n for n in gm.graph.nodes if n.target is torch.ops.loka.block_norm.default)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(BlockNorm(32), backend=backend)(torch.randn(4, 32))
    assert [n.args[-1] for n in seen] == [formulas.digest()]
