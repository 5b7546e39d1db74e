"""The quantisers against their FP64 definition, bit for bit, and against committed bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from loka_compile.kernels import quantize as q
from loka_compile.kernels import quantize_blockwise as qb

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)


def _boundary() -> Tensor:
    """Rows whose amax is the format's largest value times 2**k, one FP32 step above, one below."""
    rows = []
    for maximum in (448.0, 57344.0):
        for k in (-140, -100, -9, 0, 7, 100):
            at = torch.tensor(maximum * 2.0**k, dtype=torch.float32)
            for edge in (at, at.nextafter(torch.tensor(math.inf)), at.nextafter(torch.tensor(0.0))):
                rows.append(edge * torch.linspace(-1, 1, 16))
    return torch.stack(rows)


def _rows_with(value: float) -> Tensor:
    """Row 2 holds `value` once; the rows around it are ordinary."""
    x = torch.randn(5, 16)
    x[2, 3] = value
    return x


# 16 columns: enough for a maximum that is not the first element, small enough for FP64 logarithms.
CASES = {
    "normal": lambda: torch.randn(33, 16),
    "heavy": lambda: torch.randn(33, 16) * torch.exp(4 * torch.randn(33, 16)),
    "zero_rows": lambda: torch.randn(7, 16) * torch.tensor([1.0, 0, 1, 0, 0, 1, 1]).unsqueeze(1),
    "zeros": lambda: torch.zeros(3, 16),
    "nan_row": lambda: _rows_with(math.nan),
    "inf_row": lambda: _rows_with(-math.inf),
    "huge": lambda: 1e38 * torch.randn(9, 16).clamp(-3, 3),
    "tiny": lambda: 1e-38 * torch.randn(9, 16),
    "subnormal": lambda: torch.tensor([[1e-40] + [0.0] * 15, [1.4e-45] * 16]),
    "boundary": _boundary,
    "past_448": lambda: torch.tensor([[448.0, 464.0, 465.0, 1000.0] * 4]),
}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bytes; a NaN equals a NaN whatever its sign and payload."""
    a, b = a.cpu(), b.cpu()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    nan_a, nan_b = a.float().isnan(), b.float().isnan()
    bits = {1: torch.uint8, 4: torch.int32}[a.element_size()]
    differ = a.contiguous().view(bits) != b.contiguous().view(bits)
    return bool((nan_a == nan_b).all() and not (differ & ~nan_a).any())


@FORMATS
@DTYPES
@pytest.mark.parametrize("case", list(CASES))
def test_fast_equals_definition(case, dtype, fp8, device):
    x = CASES[case]().to(dtype)
    # FP64 input is rounded to FP32 first: the definition sees what the quantiser sees.
    seen = x.float() if dtype == torch.float64 else x
    on = x.to(device)
    for rowwise, function in ((True, q.quantize_rowwise), (False, q.quantize_tensorwise)):
        got, scale = function(on, fp8)
        want, want_scale = q.quantize_ref(seen, fp8, rowwise=rowwise)
        assert same(got, want)
        assert same(scale, want_scale)
        assert scale.dtype == torch.float32
        assert scale.shape == ((x.shape[0], 1) if rowwise else ())


@FORMATS
@pytest.mark.parametrize("case", list(CASES))
def test_fake_equals_real(case, fp8, device):
    x = CASES[case]().to(device)
    for amax in (q.amax_rowwise(x), q.amax_tensorwise(x)):
        real, scale = q.quantize(x, amax, fp8)
        fake, fake_scale = q.fake_quantize(x, amax, fp8)
        assert same(fake.to(fp8), real)
        assert same(fake, real.float())
        assert same(fake_scale, scale)


@pytest.mark.parametrize("fp8", list(q.FP8_MAX), ids=str)
def test_round_equals_cast_on_every_bf16_value(fp8, device):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    # Random FP32 bits beside them: ties and their neighbours, which bf16 cannot express.
    bits = torch.randint(-(2**31), 2**31, (2**17,)).to(torch.int32).view(torch.float32)
    around = torch.randint(-(2**19), 2**19, (2**17,)).float() / 1024
    v = torch.cat([every.float(), bits, around]).to(device)
    maximum = q.FP8_MAX[fp8]
    cast = v.clamp(-maximum, maximum).to(fp8).float()
    torch.testing.assert_close(q.round_to_fp8(v, fp8), cast, rtol=0, atol=0, equal_nan=True)


def test_a_nan_or_inf_stays_in_its_row(device):
    for bad in (math.nan, math.inf):
        x = torch.randn(5, 16, device=device)
        want, want_scale = q.quantize_rowwise(x, E4M3)
        x[2, 3] = bad
        got, scale = q.quantize_rowwise(x, E4M3)
        others = [0, 1, 3, 4]
        assert same(got[others], want[others])
        assert same(scale[others], want_scale[others])
        # Visible, not clamped away to 448.
        assert scale[2].isnan().all() and got[2].float().isnan().all()


@FORMATS
def test_small_and_large_never_become_nan_or_inf(fp8, device):
    """MS-AMP 131: 448 / amax overflows for a subnormal amax."""
    for size in (0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e30, 3e38):
        x = torch.full((2, 16), size, device=device)
        got, scale = q.quantize_rowwise(x, fp8)
        back = got.float() * scale
        assert torch.isfinite(back).all()
        # (Above 3.2e38 the nearest FP8 value lies past the FP32 range; no scale can help.)
        # Within half a step of the coarser format, or flushed with the subnormals.
        torch.testing.assert_close(back, x, rtol=0.125, atol=2.0**-126)


def test_a_nan_is_seen_whatever_its_sign():
    """x86 makes NaNs with the sign bit set; compiled code passes them on as they are."""
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nan.signbit().tolist() == [False, True]
    scale, inverse = q.power_of_two_scale(nan, E4M3)
    assert scale.isnan().all() and inverse.isnan().all()


@FORMATS
def test_scale_is_the_least_power_of_two_that_fits(fp8):
    amax = torch.cat([_boundary().abs().amax(1), torch.rand(500) * 1e4])
    amax = amax[amax > 2.0**-100]
    scale, inverse = q.power_of_two_scale(amax, fp8)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert (scale.double() * inverse.double() == 1).all()
    maximum = q.FP8_MAX[fp8]
    assert (amax.double() / scale.double() <= maximum).all()
    assert (amax.double() / (scale.double() / 2) > maximum).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[3:, 1:],
        lambda x: x[:1].expand(8, 32),
        lambda x: x[:, :1].expand(16, 8),
        lambda x: x.reshape(4, 4, 32).transpose(0, 1),
        lambda x: x.reshape(2, 8, 32)[:, 3:],
    ],
    ids=["t", "step", "slice", "stride0_rows", "stride0_cols", "3d_permuted", "3d_slice"],
)
def test_strides_do_not_matter(view, device):
    x = view(torch.randn(16, 32, device=device))
    for function in (q.quantize_rowwise, q.quantize_tensorwise):
        got, scale = function(x, E4M3)
        want, want_scale = function(x.clone(memory_format=torch.contiguous_format), E4M3)
        assert got.shape == x.shape
        assert same(got, want) and same(scale, want_scale)


def test_static_scale_clamps_and_divides(device):
    x = torch.tensor([[0.0, 1.0, -2.0, 1e6, -1e6, 223.0]], device=device)
    got = q.quantize_static(x, torch.tensor(0.5, device=device), E4M3).float()
    # 446 lies halfway between no two values of the grid but nearest 448.
    assert got.tolist() == [[0.0, 2.0, -4.0, 448.0, -448.0, 448.0]]


def _fixed_input() -> Tensor:
    """64 x 32 FP32 values over 40 binades, by integer arithmetic alone: the same everywhere."""
    i = torch.arange(64 * 32, dtype=torch.int64)
    h = (i * 2654435761 + 12345) % 2**32
    size = (h % 2001 - 1000).to(torch.float32)
    exponent = (h // 2001 % 40 - 20).to(torch.int32)
    return (size * ((exponent + 127) << 23).view(torch.float32)).reshape(64, 32)


GOLDEN = {
    ("rowwise", E4M3): "724ccaa0b27a9190f2c782c318d2ec60d6a53fb8fbd33ccb6423c4f8bd825471",
    ("rowwise", E5M2): "ab6467ce7a940fce5a6d0c9c91c3b0379f6bfb0bb49faea8e5f46511b59da643",
    ("tensorwise", E4M3): "b5f43596254dd1a99bb9dac18a9abc8d4126de2180f4441f7bbb673a51cf86e2",
    ("tensorwise", E5M2): "50ef4cd8d302a49344cce92a359d30857084f1d16af7cdb152a24b9e940adf69",
}


def _digest(parts: list[Tensor]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", list(GOLDEN), ids=lambda w: f"{w[0]}-{w[1]}")
def test_golden_bytes(which, dtype, device):
    """Same bytes on every torch version and device: the digests are constants."""
    kind, fp8 = which
    function = q.quantize_rowwise if kind == "rowwise" else q.quantize_tensorwise
    x = _fixed_input().to(device)
    if dtype == torch.bfloat16:
        # 11-bit integers do not fit bf16: its own input, exact in it, with its own reference.
        x = (x.to(torch.bfloat16)).float()
        got, scale = function(x.to(dtype), fp8)
        want, want_scale = function(x, fp8)
        assert same(got, want) and same(scale, want_scale)
        return
    got, scale = function(x, fp8)
    assert _digest([got, scale]) == GOLDEN[which]


@pytest.mark.slow
def test_inductor_gives_the_same_bytes(device):
    """Generated code may divide and round differently; these bytes may not change."""

    def quantisers(x: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        fake, _ = q.fake_quantize(x, q.amax_rowwise(x), E4M3)
        return (
            *q.quantize_rowwise(x, E4M3),
            *q.quantize_rowwise(finite.t(), E5M2),
            *q.quantize_tensorwise(finite, E4M3),
            fake,
        )

    parts = ("normal", "heavy", "zero_rows", "nan_row", "inf_row", "huge", "tiny", "boundary")
    x = torch.cat([CASES[case]() for case in parts]).to(device)
    finite = _fixed_input().to(device)
    compiled = torch.compile(quantisers, fullgraph=True, dynamic=False)
    for got, want in zip(compiled(x, finite), quantisers(x, finite), strict=True):
        assert same(got, want)


def traced(f: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(f, tracing_mode="fake")(*inputs)


@pytest.mark.parametrize(
    "quantiser", [q.quantize_rowwise, q.quantize_tensorwise, qb.quantize_groups, qb.quantize_blocks]
)
def test_maxima_in_a_graph_are_fp32(quantiser: Callable[..., Any]) -> None:
    """A bf16 maximum that is stored twice does not compile on a CPU."""
    x = torch.randn(64, 128).bfloat16()
    graph = traced(lambda x: quantiser(x, torch.float8_e4m3fn), x).graph
    maxima = [n for n in graph.nodes if n.target is torch.ops.aten.amax.default]
    assert [n.args[0].meta["val"].dtype for n in maxima] == [torch.float32]
    # In eager the copy would take longer than the maximum; the bits are the same.
    inner = torch.fx.Interpreter(traced(lambda x: quantiser(x, torch.float8_e4m3fn), x)).run(x)
    for a, b in zip(inner, quantiser(x, torch.float8_e4m3fn), strict=True):
        assert torch.equal(a.float(), b.float())


def test_two_readers_of_one_gradient_compile() -> None:
    """As where two linears read one gradient: the same maxima, stored for each."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x * y
        return q.amax_rowwise(z.t()), q.amax_rowwise(z.t().contiguous()), z.sum()

    x, y = torch.randn(64, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    compiled = torch._inductor.compile(traced(f, x, y), [x, y])
    for a, b in zip(compiled(x, y), f(x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.1)
