"""What observers make of a fused chain, against plain torch; on a CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from loka_compile.kernels import chain_values
from loka_compile.lowering.chain_formulas import activated
from loka_compile.lowering.chain_formulas import block_norm_act_backward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 160), (33, 1100), (0, 16)])
@pytest.mark.parametrize("act", ["none", "hard_swish"])
@pytest.mark.parametrize("with_gain", [False, True])
def test_activated(device, dtype, m, n, act, with_gain) -> None:
    u = (4 * torch.randn(m, n, device=device)).to(dtype)
    if m > 2:
        u[0], u[1], u[2, 0] = 0, 300, float("nan")
    gain = torch.rand(n, device=device).to(dtype) if with_gain else None
    got, want = chain_values.activated(u, gain, act), activated(u, gain, act)
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "block"), [(3, 16, 16), (33, 160, 160), (40, 600, 256), (2, 4096, 4096), (0, 16, 16)]
)
@pytest.mark.parametrize(
    ("act", "gate", "with_gain"),
    [
        ("none", False, False),
        ("hard_swish", False, True),
        ("hard_swish", True, True),
        ("hard_sigmoid", True, False),
    ],
)
def test_gradient(device, dtype, m, n, block, act, gate, with_gain) -> None:
    u = torch.randn(m, n, device=device).to(dtype)
    gy = torch.randn(m, n, device=device).to(dtype)
    r = torch.rand(m, -(-n // block), device=device) + 0.5
    if m > 2:
        gy[0], gy[1, :2] = 0, 1e4
        u[2, 0] = float("nan")
    gain = (torch.rand(n, device=device) + 0.5).to(dtype) if with_gain else None
    got = chain_values.gradient(gy, u, r, gain, block, act, gate)
    want = block_norm_act_backward(gy, u, r, gain, block, act, gate)[0]
    assert got.dtype == dtype and got.shape == want.shape
    # A row's mean is summed in another order: judged by the row's size.
    size = want.float().nan_to_num().abs().amax(dim=-1, keepdim=True).clamp(min=1e-20)
    assert torch.equal(got.isnan(), want.isnan())
    error = ((got.float() - want.float()).nan_to_num() / size).abs()
    assert m == 0 or error.max() < 8 * torch.finfo(dtype).eps


def test_strides_do_not_matter(device) -> None:
    u = torch.randn(24, 10, device=device).t()
    torch.testing.assert_close(
        chain_values.activated(u, None, "hard_swish"), activated(u, None, "hard_swish")
    )
    gy, r = torch.randn(24, 10, device=device).t(), torch.rand(10, 2, device=device)
    torch.testing.assert_close(
        chain_values.gradient(gy, u, r, None, 16, "none", False),
        block_norm_act_backward(gy, u, r, None, 16, "none", False)[0],
    )
