"""The backward with 1x128 scales against plain torch: on a GPU compiled, else in the interpreter.

Shapes are the least that reach a branch: a row tail past a multiple of 16 (M = 37), a second tile
of rows (130), two groups in a block, a ragged last block (N = 300), one narrow block (97), whose
scales are filled up to a multiple of 4.
"""

from __future__ import annotations

import pytest
import torch

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.fused_backward_blocks import fused_backward_blocks
from loka_compile.kernels.fused_backward_blocks import fused_backward_blocks_ref
from loka_compile.kernels.fused_backward_blocks import programs_per_block
from loka_compile.kernels.fused_backward_blocks import stages_of
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.tiles import programs_of
from loka_compile.lowering.chain_formulas import block_norm_act_backward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = Scale("1x128")
#: As DeepGEMM reads its first operand.
DEEP = Scale("1x128", turned=True, multiple=4)


def saved(m: int, n: int, block: int, dtype=torch.bfloat16):
    z = torch.randn(m, n, device=DEVICE) * torch.randn(m, 1, device=DEVICE).exp()
    u, r = bn.normalize(z, block, 1e-6)
    gy = torch.randn(m, n, device=DEVICE) * torch.randn(m, 1, device=DEVICE).exp() * 1e-4
    return gy.to(dtype), u.to(dtype), r


def check(m, n, block, straight, turned, gain=None, act="hard_swish", gate=False, **kwargs) -> None:
    gy, u, r = saved(m, n, block)
    got, ggain = fused_backward_blocks(gy, u, r, gain, block, act, gate, straight, turned, **kwargs)
    gz, want_gain = block_norm_act_backward(gy.float(), u.float(), r, gain, block, act, gate)
    want = fused_backward_blocks_ref(gz.float(), straight, turned)
    for mine, theirs in ((got.scale, want.scale), (got.scale_t, want.scale_t)):
        assert mine.shape == theirs.shape
        # An amax at the edge of a power of two may fall on either side of it.
        assert (mine != theirs).float().mean() < 0.02
    for mine, theirs in ((got.q, want.q), (got.qt, want.qt)):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        # FP32 sums in another order: here and there a value rounds to the other side.
        assert (mine.float() != theirs.float()).float().mean() < 0.02
    assert (got.qt[:, m:].float() == 0).all()
    if gain is not None:
        torch.testing.assert_close(ggain.sum(0), want_gain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [PLAIN, DEEP], ids=["plain", "turned"])
@pytest.mark.parametrize(("m", "n", "block"), [(37, 97, 97), (130, 300, 256), (20, 256, 128)])
def test_shapes_and_layouts(m: int, n: int, block: int, scale: Scale) -> None:
    check(m, n, block, scale, scale)


def test_other_types_and_nothing_to_mask() -> None:
    """Of both orientations; several tiles of rows."""
    check(640, 128, 128, PLAIN, Scale("1x128", E5M2))
    check(128, 256, 128, Scale("1x128", E5M2), DEEP)


@pytest.mark.parametrize("act", ["none", "hard_swish", "hard_sigmoid"])
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
def test_epilogues_with_gain(act: str, gate: bool) -> None:
    check(24, 128, 128, PLAIN, DEEP, torch.rand(128, device=DEVICE) + 0.5, act, gate)


def test_maxima_are_rounded_to_bf16() -> None:
    """dL/dz is dL/dy here. 449 rounds to even, down to 448, where it saturates; 449.1 rounds up."""
    gy = torch.rand(128, 128, device=DEVICE)
    gy[0, 5], gy[1, 5] = 449.0, -449.1
    u, r = torch.zeros_like(gy), torch.ones(128, 1, device=DEVICE)
    got, _ = fused_backward_blocks(gy, u, r, None, 128, "none", False, PLAIN, PLAIN)
    want = fused_backward_blocks_ref(gy, PLAIN, PLAIN)
    assert got.scale[:2, 0].tolist() == [1.0, 2.0]
    assert got.q[:2, 5].float().tolist() == [448.0, -224.0]
    for mine, theirs in ((got.q, want.q), (got.qt, want.qt)):
        assert torch.equal(mine.float(), theirs.float())
    assert torch.equal(got.scale, want.scale) and torch.equal(got.scale_t, want.scale_t)


def test_zero_huge_tiny_and_nan_rows() -> None:
    gy, u, r = saved(140, 256, 256, torch.float32)
    gy[3] = 0
    gy[5] *= 1e30
    gy[6] *= 1e-30
    gy[7, 2] = float("nan")
    got, _ = fused_backward_blocks(gy, u, r, None, 256, "hard_swish", False, PLAIN, PLAIN)
    assert (got.q[3].float() == 0).all() and (got.scale[3] > 0).all()
    assert got.q[5].float().isfinite().all() and (got.q[6].float() != 0).any()
    # The mean of its block carries a NaN to the whole block of that row, and to no other row.
    assert got.scale[7].isnan().all() and got.q[7].float().isnan().all()
    rest = [i for i in range(140) if i != 7]
    assert got.scale[rest].isfinite().all() and got.q[rest].float().isfinite().all()
    # Of the columns it reaches the first group of rows alone.
    assert got.scale_t[:, 0].isnan().all() and got.scale_t[:, 1].isfinite().all()
    assert (got.qt[:, 140:].float() == 0).all()


def test_a_program_takes_tile_after_tile() -> None:
    """More tiles than programs, of several widths; the sums of a gain begin anew with each."""
    rows = 128 * 2 * programs_of(DEVICE) + 70
    check(rows, 200, 200, PLAIN, DEEP, torch.rand(200, device=DEVICE) + 0.5)


@pytest.mark.parametrize(
    ("tall", "blocks", "want"),
    # A tile each; two each, where 33 slots would save nothing; rounds of programs; nothing to do.
    [(4, 3, 4), (32, 16, 16), (10, 1000, 1), (0, 2, 1)],
)
def test_programs_share_the_tiles_of_a_block(tall: int, blocks: int, want: int) -> None:
    assert programs_per_block(tall, blocks, 264) == want


@pytest.mark.parametrize(
    ("wide", "size", "programs", "stages"),
    [(256, 4, 2, 3), (256, 8, 2, 2), (512, 4, 1, 3), (512, 8, 1, 2), (1024, 4, 1, 1)],
)
def test_the_pipeline_fits_shared_memory(wide: int, size: int, programs: int, stages: int) -> None:
    assert stages_of(wide, size, programs, torch.device("cpu")) == stages


def test_no_rows() -> None:
    gy, u, r = saved(4, 128, 128)
    got, _ = fused_backward_blocks(
        gy[:0], u[:0], r[:0], None, 128, "hard_swish", False, PLAIN, PLAIN
    )
    assert got.q.shape == (0, 128) and got.qt.shape == (128, 0)


@pytest.mark.parametrize(("kind", "block"), [("row", 128), ("1x128", 64)])
def test_what_cannot_be_is_refused(kind: str, block: int) -> None:
    gy, u, r = saved(4, 128, block)
    with pytest.raises(ValueError, match=r"1x128|multiple of 128"):
        fused_backward_blocks(gy, u, r, None, block, "none", False, Scale(kind), PLAIN)
