"""Rows quantised in one launch against the plain formula, byte for byte.

On a GPU compiled, elsewhere in Triton's interpreter. 300 columns: a masked tail; 3 rows: fewer than
a program holds; 2100: one row a program.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from loka_compile.kernels.quantize import quantize_rowwise
from loka_compile.kernels.quantize_rows import LONGEST
from loka_compile.kernels.quantize_rows import quantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def same(got, want) -> bool:
    """Equal bytes and scales; a NaN equals a NaN."""
    (q, scale), (want_q, want_scale) = got, want
    nan = want_q.float().isnan()
    differ = (q.view(torch.uint8) != want_q.view(torch.uint8)) & ~nan
    scales = torch.equal(scale.nan_to_num(-1.0), want_scale.nan_to_num(-1.0))
    return scales and bool((q.float().isnan() == nan).all()) and not bool(differ.any())


def awkward(r: int, c: int) -> torch.Tensor:
    x = torch.randn(r, c, device=DEVICE) * torch.randn(r, 1, device=DEVICE).mul(3).exp()
    if r > 6:
        x[1] = 0
        x[2] *= 1e35
        # (The interpreter widens subnormal bf16 wrongly; see below for FP32's.)
        x[3] *= 1e-33
        x[4, c - 1] = math.nan
        x[5, 0] = -math.inf
    return x


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("r", "c"), [(40, 300), (3, 16), (9, 2100), (20, 1), (1, 128)])
def test_bytes_of_the_formula(r: int, c: int, fp8: torch.dtype) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = awkward(r, c).to(dtype)
        assert same(quantize_rows(x, fp8), quantize_rowwise(x, fp8))


def test_subnormal_rows() -> None:
    x = torch.randn(20, 40, device=DEVICE) * torch.logspace(-45, -36, 20, device=DEVICE)[:, None]
    assert same(quantize_rows(x), quantize_rowwise(x, E4M3))


def test_strides_and_filled_columns() -> None:
    x = awkward(40, 300)
    assert same(quantize_rows(x.t()), quantize_rowwise(x.t().contiguous(), E4M3))
    assert same(quantize_rows(x[3:, ::3]), quantize_rowwise(x[3:, ::3].contiguous(), E4M3))
    q, scale = quantize_rows(x, columns_up=True)
    assert q.shape == (40, 304) and (q[:, 300:].view(torch.uint8) == 0).all()
    assert same((q[:, :300].contiguous(), scale), quantize_rowwise(x, E4M3))


def test_sizes_at_the_edge() -> None:
    q, scale = quantize_rows(torch.randn(0, 32, device=DEVICE))
    assert q.shape == (0, 32) and scale.shape == (0, 1)
    with pytest.raises(ValueError, match="fit"):
        quantize_rows(torch.randn(1, LONGEST + 1, device=DEVICE))
    with pytest.raises(ValueError, match="e4m3fn and e5m2"):
        quantize_rows(torch.randn(1, 16, device=DEVICE), torch.float8_e4m3fnuz)
