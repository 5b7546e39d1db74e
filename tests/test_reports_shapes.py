"""Public bug reports restated: numerics, shapes and strides (FP8 here is row-scaled, emulated)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loka_compile
from loka_compile import loka_backend

BOTH = pytest.mark.parametrize("fp8", [False, True], ids=["high", "fp8"])


class Mlp(nn.Module):
    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


# -- numerics -------------------------------------------------------------------------------------


@BOTH
def test_subnormal_and_zero_inputs_stay_finite(fp8: bool) -> None:
    """Azure/MS-AMP#131: amax so small that max / amax overflows."""
    torch._dynamo.reset()
    model = Mlp(32, 64, 32, bias=False)
    options = {"inner": "aot_eager", "mods": "off", "emulate": fp8}
    if fp8:
        options["force"] = {"*": "torch:rowwise"}
    compiled = torch.compile(model, backend=loka_backend, options=options)
    one = torch.zeros(32, 32)
    one[3, 5] = 1e-40
    inputs = [torch.randn(32, 32)] * 9 + [torch.randn(32, 32) * 1e-38, one, torch.zeros(32, 32)]
    for x in inputs:
        model.zero_grad()
        y = compiled(x)
        y.sum().backward()
        assert torch.isfinite(y).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_values_past_448_are_clamped_alike_everywhere(agrees) -> None:
    """pytorch/ao#1912: past 448 one path gave NaN, another 448."""
    x = torch.randn(32, 32)
    x[0, :4] = torch.tensor([448.0, 464.0, 465.0, 1000.0])
    x[1] = 1e15
    agrees(Mlp(32, 48, bias=False), x, fp8=True, loss=lambda y: (y * 1e-15).square().sum())


def test_rows_are_independent_of_each_other() -> None:
    """flashinfer-ai/flashinfer#3650: padding and bad rows leaked into valid ones."""
    torch._dynamo.reset()
    model = Mlp(32, 64, 32)
    options = {"inner": "aot_eager", "mods": "off", "emulate": True}
    options["force"] = {"*": "torch:rowwise"}
    compiled = torch.compile(model, backend=loka_backend, options=options, dynamic=True)
    for _ in range(10):
        compiled(torch.randn(33, 32)).sum().backward()
    assert loka_compile.plan_of(model).active
    for rows in (5, 33):
        x = torch.randn(rows, 32)
        whole = compiled(x)
        torch.testing.assert_close(whole[:2], compiled(x[:2]))
        x[3] = float("nan")
        x[4] = 1e30
        bad = compiled(x)
        assert torch.equal(bad[:3], whole[:3]) and bad[3].isnan().all()


def test_zero_initialised_adapter(agrees) -> None:
    """pytorch/ao#3356: NaN loss from the first step of FP8 LoRA."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64)
            self.a = nn.Linear(64, 16, bias=False)
            self.b = nn.Linear(16, 64, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    model = Lora()
    agrees(model, torch.randn(32, 64), fp8=True)
    assert model.b.weight.grad.abs().sum() > 0


def test_a_written_cast_keeps_its_rounding(agrees) -> None:
    """pytorch/pytorch#181568: a middle rounding to bf16 was dropped."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 64, bias=False)
            self.bias = nn.Parameter(torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.fc(x).to(torch.bfloat16) + self.bias).mean(-1)

    agrees(Rounded(), torch.randn(32, 32))


# -- shapes ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("rows", [1, 7, 9])
def test_small_odd_batches(agrees, fp8: bool, rows: int) -> None:
    """deepseek-ai/DeepGEMM#23, NVIDIA/TransformerEngine#1571: M of 1, 7, 9."""
    agrees(Mlp(128, 256, 32), torch.randn(rows, 128), fp8=fp8)


@BOTH
@pytest.mark.parametrize(
    "sizes", [(32, 15), (48, 2), (64, 1), (13, 64, 7), (32, 1, 15, 32), (712, 96), (128, 128)]
)
def test_widths_that_are_no_multiple_of_16(agrees, fp8: bool, sizes: tuple[int, ...]) -> None:
    """pytorch/ao#1268 (15, 2, 1 outputs), TransformerEngine#1422 (712), ao#4089 (128 x 128)."""
    agrees(Mlp(*sizes), torch.randn(33, sizes[0]), fp8=fp8)


@pytest.mark.slow
def test_inductor_pads_an_intermediate(agrees) -> None:
    """pytorch/ao#569: shape 1040 got stride 1152 between two linears."""
    model, x = Mlp(64, 1040, 1040), torch.randn(32, 64)
    agrees(model, x, fp8=True)
    plan = loka_compile.plan_of(model)
    torch._dynamo.reset()
    options = {"mods": "off", "emulate": True, "plan": plan}
    with torch.no_grad():
        got = torch.compile(model, backend=loka_backend, options=options)(x)
        assert 0 < (got - model(x)).norm() < 0.15 * model(x).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bias_in_every_dtype(agrees, dtype: torch.dtype) -> None:
    """pytorch/ao#3525: no bias with FP32 output; the result keeps the model's dtype."""
    agrees(Mlp(32, 64, 16).to(dtype), torch.randn(32, 32, dtype=dtype), fp8=True)


@BOTH
@pytest.mark.parametrize(
    "loss",
    [
        lambda y: (y.t() @ torch.ones(33, 3)).square().sum(),
        lambda y: y.transpose(0, 1).contiguous().sin().sum(),
        lambda y: y.sum(),
        lambda y: y.mean(0).sum(),
        lambda y: y[:, :1].expand(-1, 7).sum(),
    ],
)
def test_transposed_and_expanded_gradients(agrees, fp8: bool, loss) -> None:
    """pytorch/ao#4470 (transposed gradient), ROCm/TransformerEngine#623 (stride 0)."""
    agrees(Mlp(32, 64, 32), torch.randn(33, 32), fp8=fp8, loss=loss)


@BOTH
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x[:, 2:],
        lambda x: x[0].permute(1, 0, 2),
        lambda x: x[0, 0, 0],
        lambda x: x.flip(0)[::2],
        lambda x: x[..., :1].expand(-1, -1, -1, 64),
    ],
)
def test_strides_and_ranks(agrees, fp8: bool, view) -> None:
    """pytorch/FBGEMM#3505 (4-D strides), vllm-project/vllm#44712 (slices that are no view)."""
    x = view(torch.randn(4, 6, 5, 64)).requires_grad_()
    agrees(Mlp(64, 64, 16), x, fp8=fp8, loss=lambda y: y.square().sum())


def test_no_rows(agrees) -> None:
    """pytorch/pytorch#27619, pytorch/pytorch#49800: zero rows, also between normal batches."""

    class Masked(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[x[:, 0] > 0])

    agrees(Mlp(100, 1), torch.randn(0, 100))
    model = Masked(32, 64, 1)
    compiled = agrees(model, torch.randn(33, 32), fp8=True)
    before = loka_compile.plan_of(model)
    model.zero_grad()
    y = compiled(torch.zeros(33, 32))
    y.sum().backward()
    assert y.shape == (0, 1) and not model.layers[0].weight.grad.any()
    assert loka_compile.plan_of(model) == before
