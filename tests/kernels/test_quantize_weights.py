"""All weights of a graph in two launches, against one by one, byte for byte.

On a GPU compiled, elsewhere in Triton's interpreter. 150 x 300: a tile and a ragged one in one
direction, two and a ragged one in the other, no multiple of 4 or 16; 130 x 20 has two tiles that
are mostly mask.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from loka_compile.kernels import quantize_weights as qw
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.orientations import quantize_both_ref
from loka_compile.kernels.quantize_both import quantize_both
from loka_compile.kernels.weight_group import Asked
from loka_compile.kernels.weight_group import Place
from loka_compile.kernels.weight_group import layout
from loka_compile.kernels.weight_group import quantize_weights_ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ("tensor", "row", "128x128")
SHAPES = [(150, 300), (20, 40), (1, 16), (33, 1), (128, 128)]


def asked_of(*pairs: tuple[str, str], rows_up: bool = True) -> tuple[Asked, ...]:
    return tuple(Asked(Scale(a), Scale(b), rows_up) for a, b in pairs)


def parts(ws: list[Tensor], asked: tuple[Asked, ...], made: tuple[Tensor, ...]) -> list[Tensor]:
    """(w8, w_scale, w8t, wt_scale) of each, in order."""
    q, qt, scales = made
    places = layout(tuple(tuple(w.shape) for w in ws), asked).places
    return [p.of(t) for four in places for p, t in zip(four, (q, scales, qt, scales), strict=True)]


def same(got: Tensor, want: Tensor) -> bool:
    """Equal bytes; a NaN equals a NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype
    nan = got.float().isnan()
    bits = {1: torch.uint8, 4: torch.int32}[got.element_size()]
    differ = got.contiguous().view(bits) != want.contiguous().view(bits)
    return bool((nan == want.float().isnan()).all() and not (differ & ~nan).any())


def check(ws: list[Tensor], asked: tuple[Asked, ...], dtype: torch.dtype | None = None) -> None:
    """Against plain torch and, where it is not interpreted, the kernel for one weight."""
    assert qw.why_not(ws, asked) is None
    got = parts(ws, asked, qw.quantize_weights(ws, asked, dtype))
    for by in (quantize_both_ref, *([quantize_both] if DEVICE.type == "cuda" else [])):
        want = parts(ws, asked, quantize_weights_ref(ws, asked, dtype, by=by))
        for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            assert same(mine, theirs), (i // 4, i % 4, by)


def of_shapes(shapes=SHAPES, dtype=torch.bfloat16) -> list[Tensor]:
    return [torch.randn(*s, device=DEVICE).to(dtype) for s in shapes]


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind(kind: str) -> None:
    check(of_shapes(), asked_of(*[(kind, kind)] * len(SHAPES)))


def test_kinds_side_by_side() -> None:
    pairs = [(a, b) for a in KINDS for b in KINDS]
    check(of_shapes([(130, 20), (20, 140), (24, 40)] * 3), asked_of(*pairs))


def _with(value: float) -> Tensor:
    w = torch.randn(130, 20)
    w[129, 7] = value
    return w


VALUES = {
    "heavy": lambda: torch.randn(20, 130) * torch.exp(4 * torch.randn(20, 130)),
    "zero_rows": lambda: torch.randn(130, 20) * (torch.arange(130) % 3 > 0).unsqueeze(1),
    "zeros": lambda: torch.zeros(20, 40),
    "nan": lambda: _with(math.nan),
    "inf": lambda: _with(-math.inf),
    "huge": lambda: 1e38 * torch.randn(20, 127).clamp(-3, 3),
    "tiny": lambda: 1e-38 * torch.randn(20, 127),
    "subnormal_rows": lambda: torch.randn(20, 40) * torch.logspace(-45, -30, 20).unsqueeze(1),
}


def test_values_under_all_kinds() -> None:
    """What is not finite stays with its own weight, block, row or column."""
    ws = [make().to(DEVICE) for make in VALUES.values() for _ in range(2)]
    pairs = [("tensor", "row"), ("row", "128x128")] * len(VALUES)
    check(ws, asked_of(*pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    check(of_shapes(dtype=dtype), asked_of(*[("tensor", "row")] * len(SHAPES)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_first_where_told(dtype: torch.dtype) -> None:
    ws = [3 * w for w in of_shapes([(20, 140), (64, 48)], torch.float32)]
    asked = asked_of(("tensor", "tensor"), ("row", "128x128"))
    check(ws, asked, dtype)
    plain, rounded = (qw.quantize_weights(ws, asked, d)[0] for d in (None, dtype))
    assert not same(parts(ws, asked, (plain,) * 3)[0], parts(ws, asked, (rounded,) * 3)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_as_they_are_and_other_formats(kind: str) -> None:
    ws = of_shapes([(140, 40), (20, 40)])
    check(ws, asked_of((kind, kind), (kind, kind), rows_up=False))
    check(ws, tuple(Asked(Scale(kind, E5M2), Scale(kind, E4M3)) for _ in ws))


def test_stored_the_other_way_and_with_gaps() -> None:
    asked = tuple(
        Asked(Scale(a, E4M3), Scale(b, E5M2), up)
        for a, b, up in (
            ("tensor", "row", True),
            ("row", "tensor", False),
            ("128x128", "row", True),
        )
    )
    ws = of_shapes([(150, 140), (40, 20), (32, 64)])
    check([w.t() for w in ws], asked)
    check([w[:, 3:17] for w in ws], asked)
    check([w[3:17].t() for w in ws], asked)


def test_one_and_many() -> None:
    check(of_shapes([(150, 300)]), asked_of(("tensor", "tensor")))
    # A program of the interpreter takes a tenth of a second.
    many = 40 if DEVICE.type == "cuda" else 12
    shapes = [(int(n), int(k)) for n, k in torch.randint(1, 40, (many, 2))]
    pairs = [(KINDS[i % 3], KINDS[i // 3 % 3]) for i in range(many)]
    check(of_shapes(shapes), asked_of(*pairs))


def test_more_tiles_than_programs_that_look_for_maxima(monkeypatch) -> None:
    monkeypatch.setattr(qw.wt, "MOST_SHARES", 2)
    check(of_shapes([(300, 500), (20, 40)]), asked_of(("tensor", "row"), ("tensor", "tensor")))


def test_a_weight_that_moves_and_one_that_changes() -> None:
    """Two models of one shape, and a parameter that gets another storage."""
    asked = asked_of(("tensor", "row"), ("row", "tensor"))
    ws = of_shapes([(40, 48), (32, 64)])
    check(ws, asked)
    ws[0].mul_(5)
    check(ws, asked)
    others = of_shapes([(40, 48), (32, 64)])
    check(others, asked)
    ws[1] = ws[1] * 3
    check(ws, asked)
    check(others, asked)
    # The same addresses with other shapes.
    check([w.view(*reversed(w.shape)) for w in ws], asked)


def test_an_odd_address() -> None:
    base = torch.randn(64 * 64 + 1, device=DEVICE, dtype=torch.bfloat16)
    check([base[1:].view(64, 64), *of_shapes([(64, 64)])], asked_of(*[("tensor", "tensor")] * 2))


def test_what_is_no_group_goes_one_by_one() -> None:
    asked = asked_of(("tensor", "row"), ("row", "tensor"))
    ws = of_shapes([(40, 48), (32, 64)])
    cases = {
        "dtype": [w.double() for w in ws],
        "several": [ws[0], ws[1].half()],
        "without": [ws[0], ws[1][:0]],
        "neighbouring": [ws[0], torch.randn(64, 32, device=DEVICE).bfloat16().t()],
        "subclass": [ws[0], torch.Tensor._make_subclass(_Other, ws[1])],
    }
    for why, case in cases.items():
        assert why in str(qw.why_not(case, asked))
        if why not in ("subclass", "without"):
            got = parts(case, asked, qw.quantize_weights(case, asked))
            want = parts(case, asked, quantize_weights_ref(case, asked))
            assert all(same(a, b) for a, b in zip(got, want, strict=True)), why
    q, qt, _ = qw.quantize_weights(cases["without"], asked)
    assert len(q) == len(qt) == 48 * 48
    assert "scales" in str(qw.why_not(ws, asked_of(("1x128", "tensor"), ("row", "row"))))
    with pytest.raises(ValueError, match="other sizes"):
        qw.quantize_weights(of_shapes([(48, 40), (32, 64)]), asked, None, qw.sizes_of(ws))
    with pytest.raises(ValueError, match="one FP8 type"):
        qw.quantize_weights(ws, (Asked(Scale("row", E5M2), Scale("row")), asked[1]))


class _Other(torch.Tensor):
    pass


def test_tables_are_made_when_an_address_is_new_and_forgotten_when_many(monkeypatch) -> None:
    made = []
    table = qw.wt.Plan._table
    monkeypatch.setattr(qw.wt.Plan, "_table", lambda s, a: made.append(a) or table(s, a))
    monkeypatch.setattr(qw.wt, "_MOST", 3)
    asked = asked_of(("tensor", "tensor"))
    kept = [of_shapes([(17, 19)]) for _ in range(4)]
    for _ in range(3):
        check(kept[0], asked)
    assert len(made) == 1
    for ws in kept:
        check(ws, asked)
    assert len(made) == 4
    check(kept[3], asked)
    check(kept[0], asked)
    assert len(made) == 5


def test_places_begin_where_kernels_read_best() -> None:
    held = layout(((20, 40), (1, 16)), asked_of(("row", "128x128"), ("tensor", "tensor")))
    assert held.places[0][0] == Place((32, 48), 0) and held.places[0][2] == Place((48, 32), 0)
    for four in held.places:
        for place, size in zip(four, (1, 4, 1, 4), strict=True):
            assert place.offset * size % 128 == 0
    assert held.sizes[0] == 1536 + 256 and held.sizes[1] == 1536 + 256


@pytest.mark.gpu
def test_a_captured_graph_follows_its_weights() -> None:
    asked = asked_of(("tensor", "row"), ("row", "tensor"), ("128x128", "tensor"))
    ws = of_shapes([(150, 304), (256, 512), (300, 300)])
    check(ws, asked)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = qw.quantize_weights(ws, asked)
    for factor in (2.0, 0.37):
        for w in ws:
            w.mul_(factor)
        graph.replay()
        got, want = parts(ws, asked, made), parts(ws, asked, quantize_weights_ref(ws, asked))
        assert all(same(a, b) for a, b in zip(got, want, strict=True))
    # Weights that nobody quantised before: one by one.
    new = of_shapes([(150, 304), (256, 512), (300, 300)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = qw.quantize_weights(new, asked)
    new[0].mul_(3)
    graph.replay()
    got, want = parts(new, asked, made), parts(new, asked, quantize_weights_ref(new, asked))
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_two_streams_at_once() -> None:
    asked = asked_of(*[("tensor", "row")] * 3)
    models = [of_shapes([(1024, 2048), (2048, 512), (300, 2048)]) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in models]
    torch.cuda.synchronize()
    made: list[list] = [[], []]
    for _ in range(20):
        for one, stream, found in zip(models, streams, made, strict=True):
            with torch.cuda.stream(stream):
                found.append(qw.quantize_weights(one, asked))
    torch.cuda.synchronize()
    for ws, found in zip(models, made, strict=True):
        want = parts(ws, asked, quantize_weights_ref(ws, asked))
        for one in found:
            got = parts(ws, asked, one)
            assert all(same(a, b) for a, b in zip(got, want, strict=True))
