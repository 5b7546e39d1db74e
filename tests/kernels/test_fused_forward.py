"""The fused chain against its FP64 reference: on a GPU compiled, elsewhere in Triton's interpreter.

Shapes are the least that reach a branch: a masked row tail (M = 33), a K tail inside a descriptor
(80 of 96), a block that is no power of two (48), a ragged last block (N = 100), several K steps per
split. The interpreter takes about a second each.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from fused_cases import DEVICE
from fused_cases import E4M3
from fused_cases import SMALL
from fused_cases import TOLERANCE
from fused_cases import needs_descriptors
from fused_cases import operands
from fused_cases import relative
from fused_cases import split

from loka_compile.kernels.block_norm import block_of
from loka_compile.kernels.fused_forward import RECIPES
from loka_compile.kernels.fused_forward import fused_forward
from loka_compile.kernels.fused_forward import fused_forward_ref
from loka_compile.kernels.fused_kernel import fused_kernel
from loka_compile.kernels.fused_tile import ACTIVATIONS
from loka_compile.kernels.quantize import quantize_rowwise
from loka_compile.kernels.quantize import quantize_tensorwise
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.kernels.quantize_blockwise import quantize_blocks
from loka_compile.kernels.quantize_blockwise import quantize_groups
from loka_compile.kernels.quantize_rows import quantize_rows
from loka_compile.kernels.tiles import Config
from loka_compile.kernels.tiles import counters_of
from loka_compile.kernels.tiles import default_config
from loka_compile.kernels.tiles import programs_of
from loka_compile.kernels.tiles import whole_tiles

pytestmark = needs_descriptors
#: (M, K, N, block, splits).
GROUPED = [(33, 144, 96, 48, 1), (20, 272, 160, 64, 2)]


@pytest.mark.parametrize(
    ("m", "k", "n", "block", "splits"),
    [
        (33, 64, 96, 32, 1),
        (33, 80, 96, 48, 1),
        (20, 64, 100, 64, 1),
        (33, 256, 64, 64, 4),
        (1, 64, 64, 64, 2),
    ],
)
@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_shapes_scales_and_splits(
    m: int, k: int, n: int, block: int, splits: int, rows: bool
) -> None:
    args = operands(m, k, n, rows)
    gain = torch.rand(n, device=DEVICE) + 0.5
    got = fused_forward(
        *args,
        gain,
        block=block,
        out_dtype=torch.float32,
        save_dtype=torch.float32,
        transposed=True,
        config=split(splits),
    )
    y, u, r = fused_forward_ref(*args, gain, block=block)
    assert relative(got.y, y) < TOLERANCE
    assert relative(got.u, u) < TOLERANCE
    assert relative(got.r, r) < TOLERANCE
    assert torch.equal(got.yt[:, :m].t(), got.y)
    assert got.yt.shape == (n, -(-m // 16) * 16) and (got.yt[:, m:] == 0).all()


@pytest.mark.parametrize(("m", "k", "n", "block", "splits"), GROUPED)
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
def test_scales_along_k(m: int, k: int, n: int, block: int, splits: int, turned: bool) -> None:
    """1x128 of a, 128x128 of w; K ends inside a group, N inside a block of scales."""
    x = torch.randn(m, k, device=DEVICE) * torch.randn(m, k, device=DEVICE).exp()
    a, a_scale = quantize_groups(x, E4M3)
    w, w_scale = quantize_blocks(torch.randn(n, k, device=DEVICE) * 0.1, E4M3)
    w_scale *= torch.rand_like(w_scale) + 0.5
    if turned:
        a_scale, w_scale = (fill(s.t(), 1, 4).contiguous().t() for s in (a_scale, w_scale))
        a_scale, w_scale = a_scale[:m], w_scale[: -(-n // 128)]
    config = Config(SMALL.block_m, 128, splits, 8, 3)
    got = fused_forward(
        a, a_scale, w, w_scale, block=block, out_dtype=torch.float32, groups=True, config=config
    )
    y, _, _ = fused_forward_ref(a, a_scale, w, w_scale, block=block, groups=True)
    assert relative(got.y, y) < TOLERANCE


def test_scales_along_k_ask_for_steps_of_128() -> None:
    a, w = (torch.zeros(16, 256, device=DEVICE).to(E4M3) for _ in range(2))
    scale = torch.ones(16, 2, device=DEVICE)
    with pytest.raises(ValueError, match="128"):
        fused_forward(a, scale, w, scale[:1], block=16, groups=True, config=Config(64, 64))


@pytest.mark.parametrize("act", [a for a in ACTIVATIONS if a != "hard_swish"])
@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])
def test_activations(act: str, gate: bool) -> None:
    args = operands(17, 32, 32)
    got = fused_forward(*args, block=32, act=act, gate=gate, out_dtype=torch.float32, config=SMALL)
    y, _, _ = fused_forward_ref(*args, block=32, act=act, gate=gate)
    assert relative(got.y, y) < TOLERANCE


def test_static_e4m3_output_never_saturates() -> None:
    """One-hot rows are the worst case: the whole of a block's energy in one feature."""
    block = 64
    args = operands(32, 64, 64)
    w = torch.eye(64, device=DEVICE).to(E4M3)
    a = (torch.eye(64, device=DEVICE)[:32] * 8).to(E4M3)
    scale = torch.full((), block**0.5 / 448.0, device=DEVICE)
    got = fused_forward(a, *args[1:2], w, args[3], block=block, out_scale=scale, config=SMALL)
    y, _, _ = fused_forward_ref(a, *args[1:2], w, args[3], block=block)
    back = got.y.double() * scale.double()
    assert got.y.dtype == E4M3
    assert relative(back, y) < 0.04
    assert got.y.float().abs().max() <= 448


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_heavy_tails(rows: bool) -> None:
    quantize = quantize_rowwise if rows else quantize_tensorwise
    a = quantize(
        torch.randn(32, 64, device=DEVICE) * torch.randn(32, 64, device=DEVICE).exp(), E4M3
    )
    w = quantize(torch.randn(64, 64, device=DEVICE) * torch.randn(64, 1, device=DEVICE).exp(), E4M3)
    got = fused_forward(
        *a, *w, block=64, out_dtype=torch.float32, save_dtype=torch.float32, config=SMALL
    )
    y, u, r = fused_forward_ref(*a, *w, block=64)
    for mine, theirs in ((got.y, y), (got.u, u), (got.r, r)):
        assert relative(mine, theirs) < TOLERANCE


def test_zero_huge_tiny_and_nan_rows() -> None:
    a, _, w, _ = operands(32, 64, 64)
    x = a.float()
    x[3] = 0
    x[5] *= 1e30
    x[6] *= 1e-25
    a, a_scale = quantize_rowwise(x, E4M3)
    one = torch.ones((), device=DEVICE)
    a_scale = a_scale.clone()
    a_scale[7] = float("nan")
    got = fused_forward(a, a_scale, w, one, block=64, out_dtype=torch.float32, config=SMALL).y
    assert (got[3] == 0).all()
    assert torch.isfinite(got[5]).all()
    assert got[7].isnan().all()
    rest = [i for i in range(32) if i not in (3, 5, 6, 7)]
    y, _, _ = fused_forward_ref(a, a_scale, w, one, block=64)
    assert relative(got[rest], y[rest]) < TOLERANCE
    assert relative(got[6], y[6]) < TOLERANCE and (got[6] != 0).any()


def test_constants_come_in_the_kernels_order() -> None:
    """A compiled kernel takes them by place."""
    fused_forward(*operands(33, 64, 64), block=64, config=SMALL)
    how = next(iter(RECIPES.values()))
    names = list(inspect.signature(getattr(fused_kernel, "fn", fused_kernel)).parameters)
    constants = list(how.call.constants)
    assert constants == names[-len(constants) :]


def test_no_rows() -> None:
    a, a_scale, w, w_scale = operands(4, 64, 64)
    out = fused_forward(a[:0], a_scale, w, w_scale, block=64, transposed=True)
    assert out.y.shape == (0, 64) and out.yt.shape == (64, 0)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 7680, 256), (1024, 7680, 256), (16384, 2048, 2048)])
def test_the_default_config_is_resident_where_it_splits(m: int, k: int, n: int) -> None:
    block = block_of(n)
    config = default_config(m, n, k, block)
    tiles = -(-m // config.block_m) * -(-n // block)
    assert config.split_k == 1 or tiles * config.split_k <= 132
    assert config.block_m % config.split_k == 0


@pytest.mark.parametrize("m", [1, SMALL.block_m], ids=["ragged", "full"])
def test_only_tiles_beyond_whole_waves_are_split(m: int) -> None:
    """One more tile than programs run at once: four in the interpreter, a wave of SMs on a GPU."""
    wave = programs_of(DEVICE)
    args = operands(wave * SMALL.block_m + m, 256, 64)
    got = fused_forward(*args, block=64, out_dtype=torch.float32, config=split(2))
    assert whole_tiles(wave + 1, 2, wave) == wave
    y, _, _ = fused_forward_ref(*args, block=64)
    assert relative(got.y[:-m], y[:-m]) < TOLERANCE
    assert relative(got.y[-m:], y[-m:]) < TOLERANCE


def test_partial_sums_are_as_wide_as_the_results() -> None:
    """bf16 partial sums cost no more than one more rounding of a bf16 result."""
    args = operands(33, 512, 64)
    y, _, _ = fused_forward_ref(*args, block=64)
    whole = relative(fused_forward(*args, block=64, config=SMALL).y, y)
    assert relative(fused_forward(*args, block=64, config=split(4)).y, y) < 2 * whole


@pytest.mark.gpu
def test_a_split_too_wide_to_be_resident_is_refused() -> None:
    args = operands(16384, 512, 256)
    with pytest.raises(ValueError, match="resident"):
        fused_forward(*args, block=256, config=Config(64, 128, 8, 4, 3))


@pytest.mark.gpu
def test_graph_replay_and_changing_splits() -> None:
    """Counters only grow; a replay and another split must not upset them."""
    args = operands(1024, 7680, 256)
    want = fused_forward(*args, block=256, config=Config(64, 128, 1, 4, 3)).y
    for count in (2, 4, 8, 2):
        config = Config(64, 128, count, 4, 3)
        fused_forward(*args, block=256, config=config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fused_forward(*args, block=256, config=config).y
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert relative(got, want.double()) < 5e-3


@pytest.mark.gpu
def test_kernels_that_overlap_wait_for_each_other() -> None:
    """Each starts before the one ahead has ended: quantise, a split product, a product of its y8.

    The same buffers every time, so that a kernel that did not wait would read or overwrite them.
    """
    x = torch.empty(512, 4096, device=DEVICE, dtype=torch.bfloat16)
    w, w_scale = quantize_rowwise(torch.randn(512, 4096, device=DEVICE), E4M3)
    v, v_scale = quantize_tensorwise(torch.randn(2048, 512, device=DEVICE), E4M3)
    scale = torch.full((), 16 / 448.0, device=DEVICE)
    inputs = [torch.randn_like(x) * 2.0**i for i in range(8)]

    def chain(wait: bool) -> torch.Tensor:
        settle = torch.cuda.synchronize if wait else lambda: None
        q, q_scale = quantize_rows(x)
        settle()
        mid = fused_forward(
            q, q_scale, w, w_scale, block=256, out_scale=scale, config=Config(64, 128, 4, 4, 4)
        )
        settle()
        return fused_forward(mid.y, scale, v, v_scale, block=256).y

    want = []
    for one in inputs:
        x.copy_(one)
        want.append(chain(wait=True))
    graph, got = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for one in inputs:
            x.copy_(one)
            got.append(chain(wait=False))
    for _ in range(20):
        graph.replay()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
    for one, theirs in zip(inputs, want, strict=True):
        x.copy_(one)
        assert torch.equal(chain(wait=False), theirs)


@pytest.mark.gpu
def test_streams_count_their_own_parts():
    device = torch.device("cuda", torch.cuda.current_device())
    mine = counters_of(device, 4)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        theirs = counters_of(device, 4)
        assert counters_of(device, 4) is theirs is not mine
    assert counters_of(device, 4) is mine
