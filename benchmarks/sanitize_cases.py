"""What `sanitize.py` runs: kernel -> one call at a ragged shape, held against its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _near(got: Any, want: Any, allowed: float) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= allowed, f"relative error {error}"


def _forward(split: int = 1, m: int = 200, **more: Any) -> None:
    import torch

    from loka_compile.kernels.fused_forward import fused_forward
    from loka_compile.kernels.fused_forward import fused_forward_ref
    from loka_compile.kernels.quantize import quantize_rowwise
    from loka_compile.kernels.tiles import Config

    # 200 rows: a tile and a ragged one; N = 200: a block and a ragged one; K = 592: a K tail.
    k, n = 592, 200
    a = quantize_rowwise(torch.randn(m, k, device="cuda"), torch.float8_e4m3fn)
    w = quantize_rowwise(torch.randn(n, k, device="cuda"), torch.float8_e4m3fn)
    out = fused_forward(
        *a, *w, block=128, out_dtype=torch.float32, save_dtype=torch.float32, transposed=True,
        config=Config(64, 128, split, 4, 3), **more,
    )  # fmt: skip
    y, _, _ = fused_forward_ref(*a, *w, block=128, **more)
    _near(out.y, y, 5e-3)
    assert out.yt is not None
    _near(out.yt[:, :m].t(), y, 5e-3)


def _tail() -> None:
    """A wave of whole tiles, and two that are split."""
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    _forward(split=4, m=sms // 2 * 64 + 8)


def _groups() -> None:
    import torch

    from loka_compile.kernels.fused_forward import fused_forward
    from loka_compile.kernels.fused_forward import fused_forward_ref
    from loka_compile.kernels.quantize_blockwise import quantize_blocks
    from loka_compile.kernels.quantize_blockwise import quantize_groups

    a = quantize_groups(torch.randn(200, 592, device="cuda"), torch.float8_e4m3fn)
    w = quantize_blocks(torch.randn(200, 592, device="cuda"), torch.float8_e4m3fn)
    out = fused_forward(*a, *w, block=128, out_dtype=torch.float32, groups=True)
    _near(out.y, fused_forward_ref(*a, *w, block=128, groups=True)[0], 5e-3)


def _backward_blocks() -> None:
    import torch

    from loka_compile.kernels import block_norm as bn
    from loka_compile.kernels.fused_backward_blocks import fused_backward_blocks
    from loka_compile.kernels.fused_backward_blocks import fused_backward_blocks_ref
    from loka_compile.kernels.orientations import Scale
    from loka_compile.lowering.chain_formulas import block_norm_act_backward

    u, r = bn.normalize(torch.randn(200, 200, device="cuda"), 128, 1e-6)
    gy, gain = torch.randn(200, 200, device="cuda"), torch.rand(200, device="cuda") + 0.5
    rule = Scale("1x128", turned=True, multiple=4)
    args = (gy, u, r, gain, 128, "hard_swish", False)
    got, sums = fused_backward_blocks(*args, rule, rule)
    gz, ggain = block_norm_act_backward(*args)
    want = fused_backward_blocks_ref(gz, rule, rule)
    _near(got.q.float(), want.q.float(), 0.02)
    _near(got.qt.float(), want.qt.float(), 0.02)
    _near(sums.sum(0), ggain, 1e-4)


def _pointwise() -> None:
    import torch

    extras = {"bias": (200,), "mul": (200, 200), "addend": (200, 200)}
    more = {name: torch.randn(*shape, device="cuda") for name, shape in extras.items()}
    _forward(norm=False, act="silu", **more)


def _fp8_output() -> None:
    import torch

    from loka_compile.kernels.fused_forward import fused_forward
    from loka_compile.kernels.tiles import Config

    a = torch.randn(200, 592, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(200, 592, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    call = {"block": 128, "config": Config(64, 128, 1, 4, 3)}
    scale = torch.full((), 128**0.5 / 448.0, device="cuda")
    out = fused_forward(a, one, w, one, out_scale=scale, transposed=True, **call)
    want = fused_forward(a, one, w, one, out_dtype=torch.float32, **call)
    _near(out.y.float() * scale, want.y, 0.05)
    assert out.yt is not None
    assert torch.equal(out.yt[:, :200].t().contiguous().view(torch.uint8), out.y.view(torch.uint8))


def _backward(rows: bool) -> None:
    import torch

    from loka_compile.kernels import block_norm as bn
    from loka_compile.kernels.fused_backward import fused_backward
    from loka_compile.lowering.chain_backward import fused_chain_backward_ref

    kind = torch.float8_e4m3fn if rows else torch.float8_e5m2
    u, r = bn.normalize(torch.randn(200, 200, device="cuda"), 128, 1e-6)
    gy = torch.randn(200, 200, device="cuda")
    gain = torch.rand(200, device="cuda") + 0.5
    args = (gy, u, r, gain, 128, "hard_swish", False, rows, kind, rows, kind)
    got, want = fused_backward(*args), fused_chain_backward_ref(*args)
    _near(got[0].float() * got[1], want[0].float() * want[1], 0.01)
    _near(got[2].float() * got[3], want[2].float() * want[3], 0.01)


def _quantize(kind: str, **layout: Any) -> None:
    import torch

    from loka_compile.kernels.orientations import Scale
    from loka_compile.kernels.orientations import quantize_both_ref
    from loka_compile.kernels.quantize_both import quantize_both

    x = torch.randn(200, 300, device="cuda", dtype=torch.bfloat16)
    rule = Scale(kind, **layout)
    static = torch.full((), 0.0123, device="cuda")
    got = quantize_both(x, rule, rule, static=static, rows_up=True, columns_up=True)
    want = quantize_both_ref(x, rule, rule, static=static, rows_up=True, columns_up=True)
    for mine, theirs in zip(vars(got).values(), vars(want).values(), strict=True):
        same = mine.reshape(-1).view(torch.uint8) == theirs.reshape(-1).view(torch.uint8)
        assert bool(same.all())


def _rows() -> None:
    import torch

    from loka_compile.kernels.quantize import quantize_rowwise
    from loka_compile.kernels.quantize_rows import quantize_rows

    x = torch.randn(203, 300, device="cuda", dtype=torch.bfloat16)
    want, want_scale = quantize_rowwise(x, torch.float8_e4m3fn)
    q, scale = quantize_rows(x, columns_up=True)
    assert torch.equal(scale, want_scale)
    assert torch.equal(q[:, :300].contiguous().view(torch.uint8), want.view(torch.uint8))


def _interaction() -> None:
    import torch

    from loka_compile.kernels.interaction import interaction
    from loka_compile.kernels.interaction import interaction_backward
    from loka_compile.lowering.interaction import interaction_backward_ref
    from loka_compile.lowering.interaction import interaction_ref

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    b, n, d, k, m = 300, 20, 24, 6, 5
    x, p, left, gfm, gc = made(b, n, d), made(k, n).t(), made(m, n), made(b, n, k), made(b, m, d)
    wide = [t.double() for t in (gfm, gc, x, p, left)]
    for got, want in zip(interaction(x, p, left), interaction_ref(*wide[2:]), strict=True):
        _near(got, want, 0.02)
    back = interaction_backward(gfm, gc, x, p, left)
    for got, want in zip(back, interaction_backward_ref(*wide), strict=True):
        _near(got, want, 0.02)


def _chain_values() -> None:
    import torch

    from loka_compile.kernels.chain_values import activated
    from loka_compile.kernels.chain_values import gradient
    from loka_compile.lowering import chain_formulas as formulas

    gy, u = torch.randn(333, 600, device="cuda"), torch.randn(333, 600, device="cuda")
    r, gain = torch.rand(333, 3, device="cuda"), torch.rand(600, device="cuda")
    got, want = (one(u, gain, "hard_swish") for one in (activated, formulas.activated))
    torch.testing.assert_close(got, want)
    how = (gy, u, r, gain, 256, "hard_swish", True)
    _near(gradient(*how), formulas.block_norm_act_backward(*how)[0], 1e-5)


def _observe() -> None:
    import torch

    from loka_compile.kernels.observe import observe
    from loka_compile.probe import statistics as st

    x = torch.randn(333, 300, device="cuda")
    got, want = (st.Statistics.empty(300, torch.float32, x.device) for _ in range(2))
    observe(x, None, *got.tensors, candidates=st.ROWS_PER_BATCH, weight=st.EW)
    st.observe_ref(x, None, *want.tensors)
    for mine, theirs in zip(got.tensors, want.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


def _sketch() -> None:
    import torch

    from loka_compile.kernels.sketch import sketch
    from loka_compile.probe import coherence as co
    from loka_compile.probe import sketch as sk
    from loka_compile.probe import statistics as st

    gy, x = torch.randn(70, 40, device="cuda"), torch.randn(70, 130, device="cuda")
    got, want = (st.Statistics.empty(40, torch.float32, x.device, gradient=True) for _ in range(2))
    for one in (got, want):
        one.scalars[st.BATCHES] = 1
    state = [(s.scalars, s.coherence, s.sketch, s.marks) for s in (got, want)]
    sketch(
        gy.t() @ x, gy, x, *state[0], columns_gy=sk.GY, columns_x=sk.X, first_weight=sk.WEIGHTS,
        energy_rows=sk.ENERGY_ROWS, even=sk.EVEN,
    )  # fmt: skip
    co.record_ref(gy.t() @ x, gy, x, *state[1])
    for mine, theirs in zip(state[0], state[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0, equal_nan=True)


def _estimate() -> None:
    import torch

    from loka_compile.kernels.estimate import clean
    from loka_compile.kernels.estimate import clean_ref
    from loka_compile.kernels.estimate import error
    from loka_compile.kernels.estimate import error_ref
    from loka_compile.probe import statistics as st

    held = st.Statistics.empty(300, torch.bfloat16, torch.device("cuda"))
    st.update(torch.randn(333, 300, device="cuda", dtype=torch.bfloat16), held)
    got, good = clean(held.rows, held.scalars)
    want, real = clean_ref(held.rows, held.scalars)
    assert torch.equal(got, want) and torch.equal(good, real)
    ref = torch.randn(good.numel() + 1, 100, device="cuda")
    out = ref + 0.1
    found, wanted = (one(out, ref, good, 0.1) for one in (error, error_ref))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def _weight_sizes() -> None:
    import torch

    from loka_compile.kernels.weight_sizes import Places
    from loka_compile.kernels.weight_sizes import record
    from loka_compile.probe import weights as wt

    weights = [torch.randn(s, device="cuda") for s in ((333, 130), (7, 3), (1, 1))]
    got, want = wt.Record(weights), wt.Record(weights)
    record(Places.of(weights), got.state, wt.EW)
    wt.observe_ref(weights, want.state, want.sizes)
    torch.testing.assert_close(got.state, want.state, rtol=1e-5, atol=0)


def _quantize_weights() -> None:
    import torch

    from loka_compile.kernels.orientations import Scale
    from loka_compile.kernels.quantize_weights import quantize_weights
    from loka_compile.kernels.weight_group import Asked
    from loka_compile.kernels.weight_group import layout
    from loka_compile.kernels.weight_group import quantize_weights_ref

    shapes, kinds = ((200, 300), (7, 3), (144, 256)), ("tensor", "row", "128x128")
    ws = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    asked = tuple(
        Asked(Scale(a), Scale(b)) for a, b in zip(kinds, kinds[1:] + kinds[:1], strict=True)
    )
    got, want = (call(ws, asked) for call in (quantize_weights, quantize_weights_ref))
    for four in layout(shapes, asked).places:
        for place, to in zip(four, (0, 2, 1, 2), strict=True):
            mine, theirs = place.of(got[to]), place.of(want[to])
            same = mine.reshape(-1).view(torch.uint8) == theirs.reshape(-1).view(torch.uint8)
            assert bool(same.all())


CASES: dict[str, Callable[[], None]] = {
    "fused_forward": _forward,
    "fused_split": lambda: _forward(split=4),
    "fused_tail": _tail,
    "fused_groups": _groups,
    "fused_gate": lambda: _forward(act="hard_sigmoid", gate=True),
    "fused_pointwise": _pointwise,
    "fused_fp8_output": _fp8_output,
    "fused_backward_tensor": lambda: _backward(False),
    "fused_backward_rows": lambda: _backward(True),
    "fused_backward_blocks": _backward_blocks,
    "quantize_tensor": lambda: _quantize("tensor"),
    "quantize_row": lambda: _quantize("row"),
    "quantize_1x128": lambda: _quantize("1x128", turned=True, multiple=4),
    "quantize_128x128": lambda: _quantize("128x128", multiple=4),
    "quantize_static": lambda: _quantize("static"),
    "quantize_rows": _rows,
    "interaction": _interaction,
    "estimate": _estimate,
    "chain_values": _chain_values,
    "observe": _observe,
    "sketch": _sketch,
    "weight_sizes": _weight_sizes,
    "quantize_weights": _quantize_weights,
}
