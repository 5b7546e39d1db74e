"""The fused backward against plain torch: on a GPU compiled, elsewhere in Triton's interpreter.

Shapes are the least that reach a branch: a row tail past a multiple of 16 (M = 37), several row
tiles, a block that is no power of two (48), a ragged last block (N = 100), nothing to mask (M = 512
of tiles of 256), a block of one row a step (1024).
"""

from __future__ import annotations

import pytest
import torch

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels import fused_backward as fb
from loka_compile.kernels.fused_backward import fused_backward
from loka_compile.lowering import chain_formulas
from loka_compile.lowering.chain_backward import fused_chain_backward_ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TENSOR = (False, E5M2, False, E5M2)
ROWS = (True, E4M3, True, E4M3)


def saved(m: int, n: int, block: int, dtype=torch.bfloat16):
    z = torch.randn(m, n, device=DEVICE) * torch.randn(m, 1, device=DEVICE).exp()
    u, r = bn.normalize(z, block, 1e-6)
    gy = torch.randn(m, n, device=DEVICE) * torch.randn(m, 1, device=DEVICE).exp() * 1e-4
    return gy.to(dtype), u.to(dtype), r


def close(got, want, m: int) -> None:
    """Scales equal; values within one FP8 step where the FP32 gradient rounds to the other side."""
    q, scale, qt, scale_t, ggain = got
    for mine, theirs in ((scale, want[1]), (scale_t, want[3])):
        assert mine.shape == theirs.shape
        # An amax at the edge of a power of two may fall on either side of it.
        assert (mine != theirs).float().mean() < 0.02
    for mine, by, theirs, their_by, turned in (
        (q, scale, want[0], want[1], False),
        (qt[:, :m], scale_t, want[2][:, :m], want[3], True),
    ):
        a, b = mine.double() * by.double(), theirs.double() * their_by.double()
        assert (a - b).norm() / b.norm() < 0.01, turned
        # FP32 sums in another order: here and there a value rounds to the other side.
        assert (mine.float() != theirs.float()).float().mean() < 0.02, turned
    assert ggain.shape == want[4].shape
    torch.testing.assert_close(ggain.sum(0), want[4].sum(0), rtol=1e-4, atol=1e-7)
    assert qt.shape[1] % 16 == 0 and (qt[:, m:].float() == 0).all()


@pytest.mark.parametrize("kind", [TENSOR, ROWS, (True, E4M3, False, E5M2)], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "block"),
    [(37, 64, 32), (20, 100, 64), (33, 96, 48), (512, 32, 32), (17, 1024, 1024)],
)
def test_shapes_and_scales(m: int, n: int, block: int, kind) -> None:
    gy, u, r = saved(m, n, block)
    gain = None
    got = fused_backward(gy, u, r, gain, block, "hard_swish", False, *kind)
    close(got, fused_chain_backward_ref(gy, u, r, gain, block, "hard_swish", False, *kind), m)


@pytest.mark.parametrize("act", ["none", "hard_swish", "hard_sigmoid"])
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
def test_epilogues_with_gain(act: str, gate: bool) -> None:
    gy, u, r = saved(24, 64, 64)
    gain = torch.rand(64, device=DEVICE) + 0.5
    got = fused_backward(gy, u, r, gain, 64, act, gate, *ROWS)
    close(got, fused_chain_backward_ref(gy, u, r, gain, 64, act, gate, *ROWS), 24)


def test_zero_huge_and_nan_rows() -> None:
    gy, u, r = saved(32, 64, 64, torch.float32)
    gy[3] = 0
    gy[5] *= 1e30
    gy[7, 2] = float("nan")
    q, scale, qt, scale_t, _ = fused_backward(gy, u, r, None, 64, "hard_swish", False, *ROWS)
    assert (q[3].float() == 0).all()
    assert q[5].float().isfinite().all()
    # A NaN stays in its row where the scale is per row, and is seen by every column.
    assert scale[7].isnan()
    assert torch.isfinite(scale[[i for i in range(32) if i != 7]]).all()
    assert scale_t.isnan().all()
    assert q[7].float().isnan().all() and qt[:, 0].float().isnan().all()


def test_a_nan_does_not_reach_the_tail() -> None:
    """Rows past M are zeros, beside a scale that is NaN too, and under a scale of the whole."""
    gy, u, r = saved(37, 96, 48, torch.float32)
    gy[36, 2] = float("nan")
    for kind in (TENSOR, ROWS):
        _, _, qt, scale_t, _ = fused_backward(gy, u, r, None, 48, "hard_swish", False, *kind)
        assert scale_t.reshape(-1)[0].isnan() and qt[:48, :37].float().isnan().all()
        assert (qt[:, 37:].float() == 0).all()


def test_no_rows() -> None:
    gy, u, r = saved(4, 64, 32)
    q, _, qt, _, _ = fused_backward(gy[:0], u[:0], r[:0], None, 32, "hard_swish", False, *TENSOR)
    assert q.shape == (0, 64) and qt.shape == (64, 0)


def test_the_maximum_is_kept_on_the_way() -> None:
    gy, u, r = saved(70, 96, 32)
    gain = torch.rand(96, device=DEVICE).to(gy.dtype) + 0.5
    plain = fused_backward(gy, u, r, gain, 32, "hard_swish", False, *TENSOR)
    cells = torch.tensor([float("nan"), 0.0], device=DEVICE)
    got = fused_backward(gy, u, r, gain, 32, "hard_swish", False, *TENSOR, cells=cells)
    for one, other in zip(got, plain, strict=True):
        assert torch.equal(one.float(), other.float())
    wide = [t.float() for t in (gy, u, r, gain)]
    gz, _ = chain_formulas.block_norm_act_backward(*wide, 32, "hard_swish", False)
    torch.testing.assert_close(cells, gz.abs().max().expand(2), rtol=1e-5, atol=0)
    fused_backward(gy / 4, u, r, gain, 32, "hard_swish", False, *TENSOR, cells=cells)
    torch.testing.assert_close(4 * cells[0], cells[1], rtol=1e-5, atol=0)


def test_the_maximum_is_kept_at_its_own_place() -> None:
    gy, u, r = saved(33, 64, 32)
    alone = torch.zeros(2, device=DEVICE)
    fused_backward(gy, u, r, None, 32, "hard_swish", False, *TENSOR, cells=alone)
    cells = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    fused_backward(gy, u, r, None, 32, "hard_swish", False, *TENSOR, cells=cells, at=1)
    pairs = cells.view(torch.float32).view(3, 2)
    assert torch.equal(pairs[1], alone) and (alone > 0).all()
    assert (pairs[[0, 2]] == 0).all()


@pytest.mark.parametrize("rules", [TENSOR, ROWS])
def test_launches_of_millions_of_rows_fit_a_grid(rules):
    """CUDA takes no more than 65,535 programs but in the first dimension."""
    shape, bf16 = torch.Size((1 << 24, 256)), torch.bfloat16
    how = fb._recipe(
        shape, bf16, bf16, None, 256, "hard_swish", False, *rules, DEVICE, None, None, False
    )
    assert all(max(call.grid[1:]) <= 65_535 for call in (how.find, how.write))
    assert how.write.grid[0] > 65_535
