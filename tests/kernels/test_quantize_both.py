"""Both orientations of one read against plain torch, byte for byte.

On a GPU compiled, elsewhere in Triton's interpreter. 150 x 300: two tiles and a ragged one in each
direction, no multiple of 4 or 16; 20 x 40 has one tile that is mostly mask.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from loka_compile.kernels.orientations import KINDS
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.kernels.quantize_both import quantize_both

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _with(value: float) -> Tensor:
    x = torch.randn(150, 300)
    x[130, 140] = value
    return x


CASES = {
    "normal": lambda: torch.randn(150, 300),
    "heavy": lambda: torch.randn(150, 300) * torch.exp(4 * torch.randn(150, 300)),
    "zero_rows": lambda: torch.randn(150, 300) * (torch.arange(150) % 3 > 0).unsqueeze(1),
    "zeros": lambda: torch.zeros(20, 40),
    "nan": lambda: _with(math.nan),
    "inf": lambda: _with(-math.inf),
    "huge": lambda: 1e38 * torch.randn(20, 129).clamp(-3, 3),
    "tiny": lambda: 1e-38 * torch.randn(20, 127),
    "subnormal_rows": lambda: torch.randn(20, 40) * torch.logspace(-45, -30, 20).unsqueeze(1),
    "one_row": lambda: torch.randn(1, 16),
    "one_column": lambda: torch.randn(33, 1),
}
#: Every layout that a library's reader asks for.
LAYOUTS = [
    *(Scale(k) for k in KINDS),
    Scale("1x128", E4M3, turned=True),
    Scale("1x128", E4M3, turned=True, multiple=4),
    Scale("128x128", E4M3, multiple=4),
    Scale("128x128", E4M3, turned=True),
    Scale("tensor", E5M2),
    Scale("row", E5M2),
    Scale("1x128", E5M2),
    Scale("static", E5M2),
]


def same(got: Tensor | None, want: Tensor | None) -> bool:
    """Equal bytes; a NaN equals a NaN."""
    if got is None or want is None:
        return got is want
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    nan = got.float().isnan()
    bits = {1: torch.uint8, 4: torch.int32}[got.element_size()]
    differ = got.contiguous().view(bits) != want.contiguous().view(bits)
    return bool((nan == want.float().isnan()).all() and not (differ & ~nan).any())


def check(x: Tensor, straight: Scale | None, turned: Scale | None, **kwargs) -> None:
    x = x.to(DEVICE)
    got = quantize_both(x, straight, turned, **kwargs)
    want = quantize_both_ref(x, straight, turned, **kwargs)
    for part in ("q", "scale", "qt", "scale_t"):
        assert same(getattr(got, part), getattr(want, part)), part


def static() -> Tensor:
    """No power of two: the division has to be exact."""
    return torch.tensor(0.0123, device=DEVICE)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("kind", KINDS)
def test_values(case: str, kind: str) -> None:
    """Zero, huge, tiny and non-finite rows: bytes and scales of the guarded formulas."""
    check(CASES[case](), Scale(kind), Scale(kind, E5M2), static=static())


@pytest.mark.parametrize(
    "one", LAYOUTS, ids=lambda s: f"{s.kind}-{s.turned}-{s.multiple}-{s.dtype}"
)
def test_layouts(one: Scale) -> None:
    x = torch.randn(150, 300)
    other = Scale("row")
    check(x, one, None, static=static())
    check(x, None, one, static=static())
    check(x, one, other, static=static())
    check(x, other, one, static=static())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    check(torch.randn(20, 40).to(dtype), Scale("row"), Scale("tensor"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "1x128"])
def test_rounds_first_where_told(dtype: torch.dtype, kind: str) -> None:
    """An FP32 master weight under autocast: the cast happens on the way."""
    x = torch.randn(20, 140) * 3
    check(x, Scale(kind), Scale(kind), dtype=dtype)
    plain = quantize_both(x.to(DEVICE), Scale(kind), None)
    assert not same(plain.q, quantize_both(x.to(DEVICE), Scale(kind), None, dtype=dtype).q)


@pytest.mark.parametrize("view", ["t", "step", "slice"])
def test_strides_do_not_matter(view: str) -> None:
    x = torch.randn(64, 80)
    seen = {"t": x.t(), "step": x[:, ::2], "slice": x[3:, 5:]}[view]
    check(seen, Scale("row"), Scale("row"))
    check(seen, Scale("1x128"), Scale("128x128"))


@pytest.mark.parametrize("kind", ["tensor", "row", "128x128"])
def test_filled_up_to_16(kind: str) -> None:
    """As a GEMM wants a weight whose sizes are no multiples of 16; NaN scales leave zeros there."""
    x = torch.randn(20, 40)
    x[3, 3] = math.nan
    check(x, Scale(kind), Scale(kind), rows_up=True, columns_up=True)
    got = quantize_both(x.to(DEVICE), Scale(kind), Scale(kind), rows_up=True, columns_up=True)
    assert got.q.shape == (32, 48) and got.qt.shape == (48, 32)
    assert (got.q[20:].float() == 0).all() and (got.q[:, 40:].float() == 0).all()
    assert (got.qt[40:].float() == 0).all() and (got.qt[:, 20:].float() == 0).all()


def test_a_nan_stays_in_its_row() -> None:
    x = torch.randn(40, 140)
    clean = quantize_both(x.to(DEVICE), Scale("row"), Scale("row"))
    x[7, 9] = math.nan
    got = quantize_both(x.to(DEVICE), Scale("row"), Scale("row"))
    rest = [i for i in range(40) if i != 7]
    assert got.scale[7].isnan().all() and got.q[7].float().isnan().all()
    assert same(got.q[rest], clean.q[rest]) and same(got.scale[rest], clean.scale[rest])
    rest = [i for i in range(140) if i != 9]
    assert got.scale_t[9].isnan().all()
    assert same(got.qt[rest], clean.qt[rest])


@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_nothing_to_quantise(shape: tuple[int, int]) -> None:
    got = quantize_both(torch.randn(*shape, device=DEVICE), Scale("row"), Scale("tensor"))
    assert got.q.shape == shape and got.scale.shape == (shape[0], 1)
    assert got.qt.shape == (shape[1], -(-shape[0] // 16) * 16)


def test_what_cannot_be_is_refused() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match="static="):
        quantize_both(x, Scale("static"), None)
    with pytest.raises(ValueError, match="neither"):
        quantize_both(x, None, None)
    with pytest.raises(ValueError, match="FP8 types"):
        quantize_both(x, Scale("row", torch.float8_e4m3fnuz), None)
    with pytest.raises(ValueError, match="one layout"):
        Scale("row", turned=True)
    with pytest.raises(ValueError, match="kind"):
        Scale("column")


@pytest.mark.gpu
def test_offsets_past_32_bits() -> None:
    x = torch.zeros(2**16 + 16, 2**15, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -1] = 3.0
    got = quantize_both(x, Scale("row"), Scale("tensor"))
    assert float(got.q[-1, -1].float() * got.scale[-1, 0]) == 3.0
    assert float(got.qt[-1, x.shape[0] - 1].float() * got.scale_t) == 3.0
    assert (got.q[:-1].view(torch.uint8) == 0).all()
