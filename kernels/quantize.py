"""Guarded FP8 quantisers: one per scale granularity, in plain aten, used by every path.

Scales are powers of two, taken from the exponent bits of amax. A power-of-two scale multiplies
exactly, so the quantised bytes are the same in eager, under Inductor, on a CPU, on a GPU and on
every torch version (division by an arbitrary scale is not: generated GPU code divides
approximately). It costs e4m3 nothing in relative error and at most one bit of its range.

    scale = 2 ** ceil(log2(amax / max))        dequantise: q * scale
    q     = cast(clamp(x / scale, -max, max))

Guards (each has a test): amax in FP32; floor on amax, so zero and subnormal rows give zeros and no
inf; clamp before the cast (torch 2.11 casts overflow to NaN, 2.13 saturates); a NaN or inf in x
gives a NaN scale, so a non-finite row stays visibly non-finite and is not clamped to 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest finite value of each format.
FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
#: Explicit mantissa bits and smallest normal exponent.
_LAYOUT = {
    torch.float8_e4m3fn: (3, -6),
    torch.float8_e5m2: (2, -14),
    torch.float8_e4m3fnuz: (3, -7),
    torch.float8_e5m2fnuz: (2, -15),
}
_MANTISSA = 0x7FFFFF


def _exponent_split(maximum: float) -> tuple[int, int]:
    """`maximum` = 1.mantissa * 2**exponent, mantissa as 23 FP32 bits."""
    one = torch.tensor(maximum, dtype=torch.float32, device="cpu")
    bits = int(one.view(torch.int32).item())
    return (bits >> 23) - 127, bits & _MANTISSA


_SPLIT = {dtype: _exponent_split(maximum) for dtype, maximum in FP8_MAX.items()}


def exponent_split(dtype: torch.dtype) -> tuple[int, int]:
    """(exponent, 23 mantissa bits) of the largest finite value of an FP8 type."""
    return _SPLIT[dtype]


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """amax (any shape, fp32, >= 0) -> (scale, 1 / scale), fp32, both exact powers of two.

    The smallest scale with amax / scale <= max(dtype). NaN where amax is NaN or inf.
    """
    exponent, mantissa = _SPLIT[dtype]
    # Without the sign: generated CPU code hands over NaNs that carry one, and as a negative integer
    # a NaN would pass for the smallest amax.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    # Adding (2**23 - 1 - mantissa) carries into the exponent exactly when amax's own mantissa is
    # above that of the largest FP8 value: a ceil without a logarithm.
    biased = ((bits + (_MANTISSA - mantissa)) >> 23) - exponent
    # 2**-126 .. 2**126: scale and its reciprocal are both normal numbers.
    biased = biased.clamp(1, 253)
    finite = bits < 0x7F800000
    nan = float("nan")
    scale = torch.where(finite, (biased << 23).view(torch.float32), nan)
    inverse = torch.where(finite, ((254 - biased) << 23).view(torch.float32), nan)
    return scale, inverse


def amax_rowwise(x: Tensor) -> Tensor:
    """(..., C) -> (..., 1) fp32: max |x| along the last dimension, NaN where a row holds NaN; 0
    where C is 0."""
    if _is_zero(x.shape[-1]):
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    if _may_be_zero(x.shape[-1]):
        x = torch.cat([x, x.new_zeros((*x.shape[:-1], 1))], dim=-1)
    return widened(x).abs().amax(dim=-1, keepdim=True).to(torch.float32)


def amax_tensorwise(x: Tensor) -> Tensor:
    """Any shape -> () fp32: max |x|; 0 of nothing, as of zeros."""
    if _is_zero(x.numel()):
        return x.new_zeros((), dtype=torch.float32)
    if _may_be_zero(x.numel()):
        x = torch.cat([x.abs().flatten(), x.new_zeros(1)])
    return widened(x).abs().amax().to(torch.float32)


def widened(x: Tensor) -> Tensor:
    """x for a maximum of it: fp32 in a graph that is traced; itself in eager, where a copy takes
    longer than the maximum.

    Inductor (seen in torch 2.13) names two stores of one bf16 maximum alike on a CPU, as of a
    gradient that two GEMMs read, and its C++ does not compile. One of fp32 needs no name.
    """
    return x if type(x) in (Tensor, torch.nn.Parameter) else x.to(torch.float32)


def _is_zero(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 0


def _may_be_zero(size: int | torch.SymInt) -> bool:
    """Of symbolic sizes only those that depend on data: others are compiled for 2 and more."""
    if isinstance(size, int):
        return False
    # Imported late: it takes long, and nothing else here needs it.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def quantize(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x, amax broadcastable to x) -> (q in `dtype`, scale fp32 of amax's shape)."""
    scale, inverse = power_of_two_scale(amax, dtype)
    return cast(x, inverse, dtype), scale


def cast(x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """x times `inverse` (fp32, broadcastable), clamped, in `dtype`."""
    maximum = FP8_MAX[dtype]
    return (x.to(torch.float32) * inverse).clamp(-maximum, maximum).to(dtype)


def fake_quantize(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `quantize`, but q stays in FP32 and holds the values that the cast would hold.

    Bit arithmetic instead of the FP8 cast: fast on machines without FP8, and equal to it on every
    value (tested exhaustively).
    """
    scale, inverse = power_of_two_scale(amax, dtype)
    return fake_cast(x, inverse, dtype), scale


def fake_cast(x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """As `cast`, with the FP8 values held in FP32."""
    return round_to_fp8(x.to(torch.float32) * inverse, dtype)


def round_to_fp8(v: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 -> fp32: clamp to the format's range, round to nearest even on its grid."""
    mantissa_bits, least = _LAYOUT[dtype]
    maximum = FP8_MAX[dtype]
    v = v.clamp(-maximum, maximum)
    exponent = ((v.view(torch.int32) >> 23) & 0xFF).clamp(min=127 + least)
    # One unit in the last place of the FP8 format at v's exponent; exact powers of two, so that
    # scaling, rounding to an integer (half to even) and scaling back is the FP8 rounding.
    step = ((exponent - mantissa_bits) << 23).view(torch.float32)
    per_step = ((254 + mantissa_bits - exponent) << 23).view(torch.float32)
    return torch.round(v * per_step) * step


def quantize_rowwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, C) -> (q (R, C), scale (R, 1)): one scale per row."""
    return quantize(x, amax_rowwise(x), dtype)


def quantize_tensorwise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Any shape -> (q, scale ()): one scale for the tensor."""
    return quantize(x, amax_tensorwise(x), dtype)


def quantize_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x with a scale known beforehand (fp32, broadcastable) -> q. No pass over x for its amax."""
    maximum = FP8_MAX[dtype]
    return (x.to(torch.float32) / scale).clamp(-maximum, maximum).to(dtype)


def quantize_ref(
    x: Tensor, dtype: torch.dtype, *, rowwise: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, in FP64 with a logarithm: what the fast forms above are tested against."""
    wide = x.double()
    if amax is None:
        amax = wide.abs().amax(-1, keepdim=True) if rowwise else wide.abs().amax()
    amax = amax.double()
    maximum = FP8_MAX[dtype]
    exponent = torch.ceil(torch.log2(amax / maximum)).clamp(-126, 126)
    scale = torch.pow(torch.tensor(2.0, dtype=torch.float64), exponent)
    scale = torch.where(torch.isfinite(amax), scale, float("nan"))
    q = (wide / scale).clamp(-maximum, maximum).to(torch.float32).to(dtype)
    return q, scale.to(torch.float32)
