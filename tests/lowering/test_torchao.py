"""Our restatement of TorchAO's three recipe sets against TorchAO's own linear.

Shapes are tiny: on a CPU its `torch._scaled_mm` is a reference kernel.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import nn

from loka_compile import _compat
from loka_compile.lowering import gemm
from loka_compile.lowering.recipes import EMULATED

_LINEAR = pytest.importorskip("torchao.float8.float8_linear", reason="torchao is not installed")
from torchao.float8 import Float8LinearConfig  # noqa: E402

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# All multiples of 16, as TorchAO needs (M too, for wgrad), and no two alike.
M, K, N = 32, 48, 64


def _spread(rows: int, columns: int, device: torch.device) -> Tensor:
    """bf16 with rows and columns of very different size, so that a wrong scale axis shows."""
    across = torch.exp(torch.linspace(-3, 3, columns, device=device))
    down = torch.exp(torch.linspace(2, -2, rows, device=device)).unsqueeze(1)
    return (torch.randn(rows, columns, device=device) * across * down).bfloat16()


def _theirs(recipe: str, x: Tensor, w: Tensor, gy: Tensor) -> dict[str, Tensor]:
    """y, gx, gw of TorchAO's Float8Linear."""
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False, device=x.device, dtype=x.dtype)
    linear.weight.data.copy_(w)
    config = Float8LinearConfig.from_recipe_name(recipe)
    theirs = _LINEAR.Float8Linear.from_float(linear, config)
    x = x.clone().requires_grad_()
    y = theirs(x)
    gx, gw = torch.autograd.grad(y, (x, theirs.weight), gy)
    return {"fwd": y.detach(), "dgrad": gx, "wgrad": gw}


def _ours(kernel: str, x: Tensor, w: Tensor, gy: Tensor) -> dict[str, Tensor]:
    return {
        "fwd": gemm.forward(x, w, kernel),
        "dgrad": gemm.dgrad(gy, w, kernel),
        "wgrad": gemm.wgrad(gy, x, kernel),
    }


@pytest.fixture
def case(device):
    why = _compat.why_no_scaled_mm_rowwise(device)
    if device.type == "cuda":
        why = _compat.why_no_fp8(device)
    if why is not None:
        pytest.skip(why)
    return _spread(M, K, device), _spread(N, K, device), _spread(M, N, device)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bitwise_equal_to_torchao(recipe, case):
    theirs = _theirs(recipe, *case)
    for direction, got in _ours(f"torchao:{recipe}", *case).items():
        torch.testing.assert_close(got, theirs[direction], rtol=0, atol=0, msg=direction)


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_is_close_to_torchao(recipe, case):
    theirs = _theirs(recipe, *case)
    for direction, got in _ours(f"torchao:{recipe}{EMULATED}", *case).items():
        want = theirs[direction]
        # Same bytes in; FP32 sums in another order and one or two roundings to bf16.
        size = 1e-3 * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=2**-6, atol=size, msg=direction)


def test_the_recipes_really_differ(case):
    """Else the comparisons above would pass with any one of them for all three."""
    results = {recipe: _theirs(recipe, *case) for recipe in RECIPES}
    assert not torch.equal(results["tensorwise"]["fwd"], results["rowwise"]["fwd"])
    assert not torch.equal(results["rowwise"]["dgrad"], results["rowwise_with_gw_hp"]["dgrad"])
    assert not torch.equal(results["rowwise"]["wgrad"], results["rowwise_with_gw_hp"]["wgrad"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_degenerate_inputs_equal_torchao(recipe, case):
    """Zero rows, and an amax under TorchAO's floor of 1e-12."""
    x, w, gy = (t.clone() for t in case)
    x[3] = 0
    gy[:, 5] = 0
    w[7] = 1e-20
    theirs = _theirs(recipe, x, w, gy)
    for direction, got in _ours(f"torchao:{recipe}", x, w, gy).items():
        torch.testing.assert_close(got, theirs[direction], rtol=0, atol=0, msg=direction)
        assert torch.isfinite(got).all()


def test_our_own_recipes_are_not_torchaos(case):
    """Power-of-two scales against max / amax: same idea, other bits."""
    ours = gemm.forward(case[0], case[1], "torch:tensorwise")
    assert not torch.equal(ours, _theirs("tensorwise", *case)["fwd"])
