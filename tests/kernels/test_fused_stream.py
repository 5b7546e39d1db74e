"""Stream-K schedules of the fused chain against the FP64 reference, as in test_fused_forward.

Tiles are more than half of the programs and fewer: here of a handful, on a GPU of its SMs. Helpers
come first in the interpreter, so owners come last and keep their part; without owners (`head` = 0)
whoever has a tile's last steps comes last, and adds up parts that were all written.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from fused_cases import DEVICE
from fused_cases import E4M3
from fused_cases import ON_GPU
from fused_cases import SMALL
from fused_cases import TOLERANCE
from fused_cases import needs_descriptors
from fused_cases import operands
from fused_cases import relative

from loka_compile.kernels import fused_forward as ff
from loka_compile.kernels import fused_recipe
from loka_compile.kernels import schedule
from loka_compile.kernels.fused_forward import fused_forward
from loka_compile.kernels.fused_forward import fused_forward_ref
from loka_compile.kernels.fused_kernel import fused_kernel
from loka_compile.kernels.fused_stream_kernel import stream_kernel
from loka_compile.kernels.quantize_blockwise import quantize_blocks
from loka_compile.kernels.quantize_blockwise import quantize_groups
from loka_compile.kernels.tiles import STREAM
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import counters_of
from loka_compile.kernels.tiles import programs_of

pytestmark = needs_descriptors
SHARED = Config(SMALL.block_m, SMALL.block_k, STREAM, SMALL.warps, SMALL.stages)
#: Rows of as many tiles as programs, but one; the last has three rows.
PROGRAMS = programs_of(DEVICE) if ON_GPU else 7
ROWS = (PROGRAMS - 2) * SHARED.block_m + 3


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as let several helpers share a tile, and one help several."""
    monkeypatch.setattr(fused_recipe, "programs_of", lambda device: PROGRAMS)
    ff.RECIPES.clear()


@pytest.mark.parametrize("head", [None, 0, 1, 4])
@pytest.mark.parametrize("tiles", [PROGRAMS // 2 + 1, PROGRAMS - 1])
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
def test_shares(head: int | None, tiles: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps and a short sixth; a ragged last tile of rows; results do not change from run to
    run, and counters are left as they were."""
    if head is not None:
        monkeypatch.setattr(schedule, "head_of", lambda *_: head)
    m, k, n = tiles * SHARED.block_m - 5, 5 * SHARED.block_k + 16, 64
    args = operands(m, k, n)
    dtype = torch.float32 if wide else torch.bfloat16
    got = fused_forward(*args, block=n, out_dtype=dtype, save_dtype=dtype, config=SHARED)
    y, u, r = fused_forward_ref(*args, block=n)
    for mine, theirs in ((got.y, y), (got.u, u)):
        assert relative(mine, theirs) < (TOLERANCE if wide else 6e-3)
    assert relative(got.r, r) < (TOLERANCE if wide else 3e-3)
    again = fused_forward(*args, block=n, out_dtype=dtype, save_dtype=dtype, config=SHARED)
    assert torch.equal(again.y, got.y) and torch.equal(again.r, got.r)
    assert (counters_of(DEVICE, STREAM) == 0).all()


def test_every_output_of_ragged_blocks() -> None:
    """Blocks of 48 of tiles of 64; rows of scales; the transposed copy and e4m3."""
    tall = (PROGRAMS // 2) * SHARED.block_m // 2
    args = operands(tall, 4 * SHARED.block_k, 128, rows=True)
    gain = torch.rand(128, device=DEVICE) + 0.5
    scale = torch.full((), 48**0.5 * 1.5 / 448.0, device=DEVICE)
    kwargs = {"block": 48, "out_scale": scale, "save_dtype": torch.float32, "transposed": True}
    got = fused_forward(*args, gain, config=SHARED, **kwargs)
    # Here and there a byte may be the next one.
    assert relative(got.y, fused_forward(*args, gain, config=SMALL, **kwargs).y.double()) < 0.01
    _, u, _ = fused_forward_ref(*args, gain, block=48)
    assert torch.equal(got.yt[:, :tall].t().float(), got.y.float())
    assert (got.yt[:, tall:].float() == 0).all()
    assert relative(got.u, u) < TOLERANCE


def test_scales_along_k() -> None:
    m, k = ROWS - SHARED.block_m, 4 * 128 + 16
    a, a_scale = quantize_groups(torch.randn(m, k, device=DEVICE), E4M3)
    w, w_scale = quantize_blocks(torch.randn(64, k, device=DEVICE), E4M3)
    config = Config(SHARED.block_m, 128, STREAM, 8, 3)
    got = fused_forward(
        a, a_scale, w, w_scale, block=64, out_dtype=torch.float32, groups=True, config=config
    )
    y, _, _ = fused_forward_ref(a, a_scale, w, w_scale, block=64, groups=True)
    assert relative(got.y, y) < TOLERANCE


def test_nan_and_zero_rows() -> None:
    a, a_scale, w, w_scale = operands(ROWS, 4 * SHARED.block_k, 64, rows=True)
    a_scale = a_scale.clone()
    a_scale[7] = float("nan")
    a[3] = 0
    got = fused_forward(a, a_scale, w, w_scale, block=64, out_dtype=torch.float32, config=SHARED).y
    assert got[7].isnan().all() and (got[3] == 0).all()
    assert torch.isfinite(got[[i for i in range(ROWS) if i != 7]]).all()


@pytest.mark.parametrize(("tiles", "steps"), [(PROGRAMS // 2, 4), (PROGRAMS, 4), (4, 1)])
def test_what_cannot_be_shared_is_refused(tiles: int, steps: int) -> None:
    args = operands(tiles * SHARED.block_m, steps * SHARED.block_k, 64)
    with pytest.raises(ValueError, match="split_k=0"):
        fused_forward(*args, block=64, config=SHARED)


@pytest.mark.parametrize("programs", [7, 132])
def test_the_line_is_shared_evenly_and_no_tile_has_more_parts_than_places(programs: int) -> None:
    """The kernel's arithmetic, in Python, over every number of tiles."""
    for tiles in range(programs // 2 + 1, programs):
        for steps in (2, 3, 20, 60):
            for head in {0, schedule.head_of(tiles, steps, programs)}:
                rest, helpers = steps - head, programs - (tiles if head else 0)
                line = tiles * rest
                found = [0] * tiles
                for helper in range(helpers):
                    low, high = helper * line // helpers, (helper + 1) * line // helpers
                    assert low < high
                    for tile in range(low // rest, (high - 1) // rest + 1):
                        nearest = ((tile * rest + 1) * helpers - 1) // line
                        assert helper - nearest == found[tile]
                        found[tile] += 1
                farthest = [((t + 1) * rest * helpers - 1) // line for t in range(tiles)]
                assert farthest[-1] == helpers - 1
                most = schedule.most_parts(tiles, steps, head, programs)
                assert max(found) + (head > 0) <= most <= max(found) + (head > 0) + 1


def test_constants_come_in_the_kernels_order() -> None:
    """A compiled kernel takes them by place."""
    for kernel, config in ((stream_kernel, SHARED), (fused_kernel, SMALL)):
        args = operands(ROWS, 4 * SHARED.block_k, 64)
        fused_forward(*args, block=64, config=config)
        (how,) = ff.RECIPES.values()
        ff.RECIPES.clear()
        names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
        assert list(how.constants) == names[-len(how.constants) :]


@pytest.mark.gpu
def test_graph_replay_while_others_run() -> None:
    """Whoever comes last, the bits are the same; replays clear their counters."""
    args = operands(1024, 4096, 2560)
    config = Config(128, 128, STREAM, 8, 3)
    want = fused_forward(*args, block=256, config=config).y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [fused_forward(*args, block=256, config=config).y for _ in range(3)]
    noise = torch.randn(4096, 4096, device=DEVICE)
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            noise @ noise
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, want) for one in got)
