"""bf16 in pairs against plain torch, over all 65,536 of them: on a GPU the instructions, else their
plain form in the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from loka_compile.kernels import pairs
from loka_compile.kernels.fp8 import LIKE
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import cast
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.quantize import power_of_two_scale

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = DEVICE.type != "cuda"
HALF = 2**15


def every() -> tuple[torch.Tensor, torch.Tensor]:
    """All values of bf16, in FP32, in two halves."""
    bits = torch.arange(2**16, dtype=torch.int32, device=DEVICE) << 16
    return bits.view(torch.float32).split(HALF)  # type: ignore[return-value]


@triton.jit
def _inverses_kernel(
    a_ptr, b_ptr, low_ptr, high_ptr, both_ptr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    EXACT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SIZE)
    pair = pairs.rounded_pair(tl.load(a_ptr + at), tl.load(b_ptr + at), EXACT)
    low, high = pairs.inverse_scales(pair, EXPONENT, MANTISSA, EXACT)
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)
    tl.store(both_ptr + at, pairs.inverse_scale_pair(pair, EXPONENT, MANTISSA, EXACT))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_those_of_each_amax(dtype: torch.dtype) -> None:
    a, b = every()
    low, high = torch.empty_like(a), torch.empty_like(b)
    both = torch.empty(HALF, dtype=torch.int32, device=DEVICE)
    exponent, mantissa = exponent_split(dtype)
    _inverses_kernel[(1,)](a, b, low, high, both, exponent, mantissa, EXACT, HALF)
    for got, amax in ((low, a), (high, b)):
        torch.testing.assert_close(
            got, power_of_two_scale(amax.abs(), dtype)[1], rtol=0, atol=0, equal_nan=True
        )
    want = power_of_two_scale(torch.maximum(a.abs(), b.abs()), dtype)[1].bfloat16()
    for got in both.view(torch.bfloat16).view(HALF, 2).unbind(1):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _largest_kernel(a_ptr, b_ptr, out_ptr, EXACT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * 4 + tl.arange(0, 4)[None, :]
    pair = pairs.rounded_pair(tl.load(a_ptr + at), tl.load(b_ptr + at), EXACT)
    most = pairs.largest_pair(pair, 1, EXACT)
    tl.store(out_ptr + tl.arange(0, SIZE), most & 0x7FFF7FFF)


def test_the_largest_magnitudes_and_nan_above_all() -> None:
    torch.manual_seed(0)
    a, b = (half[torch.randperm(HALF, device=DEVICE)] for half in every())
    out = torch.empty(HALF // 4, dtype=torch.int32, device=DEVICE)
    _largest_kernel[(1,)](a, b, out, EXACT, HALF // 4)
    for got, of in zip(out.view(torch.bfloat16).view(-1, 2).unbind(1), (a, b), strict=True):
        want = of.view(-1, 4).abs().amax(1).bfloat16()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _words_kernel(
    x_ptr, out_ptr, by: tl.constexpr, LIKE: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SIZE)
    ab = pairs.rounded_pair(tl.load(x_ptr + at * 4), tl.load(x_ptr + at * 4 + 1), EXACT)
    cd = pairs.rounded_pair(tl.load(x_ptr + at * 4 + 2), tl.load(x_ptr + at * 4 + 3), EXACT)
    scale = tl.full((SIZE,), by, tl.int32)
    tl.store(out_ptr + at, pairs.word_of_pairs(ab, cd, scale, LIKE, MAX, EXACT))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.filterwarnings("ignore:(invalid|overflow)")
@pytest.mark.parametrize("by", [1.0, 2.0**-20, 2.0**30])
def test_words_are_the_bytes_of_four_values(dtype: torch.dtype, by: float) -> None:
    """Past the range they saturate, as does inf where bf16 overflows on the way."""
    x = torch.cat(every())
    scale = int(torch.tensor([by, by], dtype=torch.bfloat16).view(torch.int32).item())
    out = torch.empty(x.numel() // 4, dtype=torch.int32, device=DEVICE)
    _words_kernel[(1,)](x, out, scale, LIKE[dtype], FP8_MAX[dtype], EXACT, x.numel() // 4)
    want = cast(x, torch.tensor(by, device=DEVICE), dtype)
    got = out.view(dtype)
    same = (got.view(torch.uint8) == want.view(torch.uint8)) | (
        got.float().isnan() & want.float().isnan()
    )
    assert same.all()


@triton.jit
def _wide_kernel(x_ptr, out_ptr, EXACT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, pairs.wide_of(tl.load(x_ptr + at), EXACT))


def test_bf16_as_fp32() -> None:
    x = torch.cat(every())
    # The interpreter widens subnormal numbers wrongly.
    x[x.abs() < 2.0**-126] = 0
    out = torch.empty_like(x)
    _wide_kernel[(1,)](x.bfloat16(), out, EXACT, x.numel())
    torch.testing.assert_close(out, x, rtol=0, atol=0, equal_nan=True)
