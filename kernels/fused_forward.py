"""One kernel: FP8 GEMM -> scales -> BlockNorm -> gain -> activation -> store (bf16, fp32 or e4m3).

    z = (a * a_scale) @ (w * w_scale).T          u = z * r,  r = rsqrt(mean_block(z**2) + eps)
    y = act(gain * u)      or, with `gate`,      y = z * act(gain * u)

A tile spans one block of features, so BlockNorm's statistics never leave the registers; a block
whose width is no power of two runs as a masked tile. Operands come through tensor descriptors
(TMA), which zero-fill tails in M and K. The grid is persistent.

Few tiles and a long K (N = 256, K = 7680 fills 16 of 132 SMs) are split along K: the programs of
one tile put FP32 partial sums into a workspace, meet at a counter, and each then reduces and
finishes its share of the rows. All programs of a split launch are resident at once (the grid is at
most the number of SMs), so waiting at the counter cannot dead-lock. Counters only grow: a launch
adds exactly SPLIT_K to each, so nothing is reset and CUDA-graph replay works; splits of different
width have counters of their own, since a count that is no multiple of SPLIT_K would never be met.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka_compile.kernels import block_norm as bn
from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import kind

ACTIVATIONS = {
    "none": 0,
    "hard_swish": 1,
    "hard_sigmoid": 2,
    "relu": 3,
    "silu": 4,
    "sigmoid": 5,
    "gelu": 6,
}


@dataclass(frozen=True)
class Config:
    """Tile and pipeline of one launch; the tile's N is the block, rounded up to a power of two."""

    block_m: int = 64
    block_k: int = 128
    split_k: int = 1
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class FusedOutput:
    """y (M, N), e4m3 when an `out_scale` was given; yt (N, M rounded up to 16) its transposed
    copy, zero-filled; u (M, N) and r (M, blocks) when saved."""

    y: Tensor
    yt: Tensor | None
    u: Tensor | None
    r: Tensor | None


@triton.jit
def _activate(v, ACT: tl.constexpr):
    if ACT == 1:
        v = v * tl.minimum(tl.maximum(v + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    elif ACT == 2:
        v = tl.minimum(tl.maximum(v + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    elif ACT == 3:
        v = tl.maximum(v, 0.0)
    elif ACT == 4:
        v = v / (1.0 + tl.exp(-v))
    elif ACT == 5:
        v = 1.0 / (1.0 + tl.exp(-v))
    elif ACT == 6:
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    return v


@triton.jit
def _finish(
    acc, rows, first, tile_n,
    y_ptr, yt_ptr, u_ptr, r_ptr, a_scale_ptr, w_scale_ptr, gain_ptr, out_scale_ptr,
    M, M_UP, N, block, blocks, eps,
    BN: tl.constexpr, A_ROWS: tl.constexpr, W_ROWS: tl.constexpr, NORM: tl.constexpr,
    GAIN: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, SAVE: tl.constexpr,
    FP8: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """Epilogue of `acc` (rows, BN): scales, BlockNorm, gain, activation, stores."""
    local = tl.arange(0, BN)
    columns = first + local
    inside = (local < block) & (columns < N)
    row_ok = rows < M
    if A_ROWS:
        acc = acc * tl.load(a_scale_ptr + rows, mask=row_ok, other=0.0)[:, None]
    else:
        acc = acc * tl.load(a_scale_ptr)
    if W_ROWS:
        acc = acc * tl.load(w_scale_ptr + columns, mask=inside, other=0.0)[None, :]
    else:
        acc = acc * tl.load(w_scale_ptr)
    # A tile may reach into its neighbour's columns: they are not this block's.
    z = tl.where(inside[None, :], acc, 0.0)
    width = tl.minimum(block, N - first).to(tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(z * z, axis=1) / width + eps)
        u = z * r[:, None]
    else:
        r = tl.full((z.shape[0],), 1.0, dtype=tl.float32)
        u = z
    v = u
    if GAIN:
        v = v * tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = _activate(v, ACT)
    if GATE:
        y = y * z
    # 64-bit offsets: M * N passes 2**31 for real batches.
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_ok[:, None] & inside[None, :]
    if FP8:
        y = y / tl.load(out_scale_ptr)
        # NaN passes the clamp: a non-finite row must stay visible.
        y = tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    wide = y
    tl.store(y_ptr + at, wide.to(y_ptr.dtype.element_ty), mask=mask)
    if TRANSPOSE:
        # Rows past M belong to the zero-filled tail: those of this tile are written here.
        turned = columns.to(tl.int64)[:, None] * M_UP + rows[None, :]
        tail = inside[:, None] & (rows < M_UP)[None, :]
        # Transposed before it is rounded: Triton 3.6 mixes up the elements of an FP8 tile that is
        # stored both as it lies and transposed.
        t = tl.where(row_ok[None, :], tl.trans(wide), 0.0).to(yt_ptr.dtype.element_ty)
        tl.store(yt_ptr + turned, t, mask=tail)
    if SAVE:
        tl.store(u_ptr + at, u.to(u_ptr.dtype.element_ty), mask=mask)
        tl.store(r_ptr + rows.to(tl.int64) * blocks + tile_n, r, mask=row_ok)


@triton.jit
def _kernel(
    a_desc, w_desc, y_ptr, yt_ptr, u_ptr, r_ptr, a_scale_ptr, w_scale_ptr, gain_ptr,
    out_scale_ptr, partial_ptr, counter_ptr, M, M_UP, N, K, block, blocks, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT_K: tl.constexpr,
    WAIT: tl.constexpr, IMPRECISE: tl.constexpr,
    A_ROWS: tl.constexpr, W_ROWS: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr,
    ACT: tl.constexpr, GATE: tl.constexpr, SAVE: tl.constexpr, FP8: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BM)
    tiles = tiles_m * blocks
    steps = tl.cdiv(K, BK)
    per_split = tl.cdiv(steps, SPLIT_K)
    for work in range(tl.program_id(0), tiles * SPLIT_K, tl.num_programs(0)):
        split = work % SPLIT_K
        tile = work // SPLIT_K
        # Down the rows first: neighbours in time share the weight's tile in L2.
        tile_m = tile % tiles_m
        tile_n = tile // tiles_m
        first_row = tile_m * BM
        first = tile_n * block
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        begin = split * per_split
        for step in range(begin, tl.minimum(begin + per_split, steps)):
            a = a_desc.load([first_row, step * BK])
            w = w_desc.load([first, step * BK])
            if IMPRECISE:
                acc = tl.dot(a, w.T, acc)
            else:
                acc = tl.dot(a, w.T, acc, max_num_imprecise_acc=BK)
        if SPLIT_K == 1:
            rows = first_row + tl.arange(0, BM)
            _finish(
                acc, rows, first, tile_n, y_ptr, yt_ptr, u_ptr, r_ptr, a_scale_ptr, w_scale_ptr,
                gain_ptr, out_scale_ptr, M, M_UP, N, block, blocks, eps, BN, A_ROWS, W_ROWS, NORM,
                GAIN, ACT, GATE, SAVE, FP8, TRANSPOSE,
            )  # fmt: skip
        else:
            at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            base = partial_ptr + tile.to(tl.int64) * (SPLIT_K * BM * BN)
            tl.store(base + split * (BM * BN) + at, acc)
            # Every thread's stores, then one arrival that releases them.
            tl.debug_barrier()
            seen = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
            if WAIT:
                target = (seen // SPLIT_K + 1) * SPLIT_K
                while tl.atomic_add(counter_ptr + tile, 0, sem="acquire") < target:
                    pass
                tl.debug_barrier()
                SHARE: tl.constexpr = BM // SPLIT_K
                local = split * SHARE + tl.arange(0, SHARE)
                offset = local[:, None] * BN + tl.arange(0, BN)[None, :]
                total = tl.zeros((SHARE, BN), dtype=tl.float32)
                for other in tl.static_range(SPLIT_K):
                    total += tl.load(base + other * (BM * BN) + offset)
                _finish(
                    total, first_row + local, first, tile_n, y_ptr, yt_ptr, u_ptr, r_ptr,
                    a_scale_ptr, w_scale_ptr, gain_ptr, out_scale_ptr, M, M_UP, N, block, blocks,
                    eps, BN, A_ROWS, W_ROWS, NORM, GAIN, ACT, GATE, SAVE, FP8, TRANSPOSE,
                )  # fmt: skip
            elif seen % SPLIT_K == SPLIT_K - 1:
                # Programs that run one after another (the interpreter) cannot wait: the last one
                # to arrive finishes the whole tile.
                total = tl.zeros((BM, BN), dtype=tl.float32)
                for other in tl.static_range(SPLIT_K):
                    total += tl.load(base + other * (BM * BN) + at)
                _finish(
                    total, first_row + tl.arange(0, BM), first, tile_n, y_ptr, yt_ptr, u_ptr,
                    r_ptr, a_scale_ptr, w_scale_ptr, gain_ptr, out_scale_ptr, M, M_UP, N, block,
                    blocks, eps, BN, A_ROWS, W_ROWS, NORM, GAIN, ACT, GATE, SAVE, FP8, TRANSPOSE,
                )  # fmt: skip


_launch = Launcher(_kernel)


@functools.cache
def programs_of(device: torch.device) -> int:
    """Programs of a persistent grid: the SMs; one in the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=4096)
def default_config(m: int, n: int, k: int, block: int, sms: int = 132) -> Config:
    """A sane config without tuning: fill the SMs, split K where tiles are few."""
    wide = triton.next_power_of_2(block)
    block_m = 128 if -(-m // 128) * -(-n // block) >= sms else 64
    warps = 8 if block_m * wide >= 128 * 256 else 4
    tiles = -(-m // block_m) * -(-n // block)
    split = 1
    while split < 8 and tiles * split * 2 <= sms and k // (split * 2) >= 512:
        split *= 2
    return Config(block_m, 128, split, warps, 3 if block_m * wide >= 128 * 256 else 4)


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
#: A split launch has at most as many tiles as the device has SMs.
_MOST_TILES = 1024


def _counters(device: torch.device, split: int) -> Tensor:
    """Made once per device and split: a CUDA graph keeps the address."""
    key = (device, split)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
    return _COUNTERS[key]


def fused_forward(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    gain: Tensor | None = None,
    *,
    block: int,
    eps: float = 1e-6,
    act: str = "hard_swish",
    gate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor | None = None,
    save_dtype: torch.dtype | None = None,
    transposed: bool = False,
    norm: bool = True,
    fast_accum: bool = True,
    config: Config | None = None,
) -> FusedOutput:
    """a (M, K), w (N, K) e4m3, K a multiple of 16 -> y (M, N).

    a_scale, w_scale: FP32 multipliers, () for the tensor or one per row ((M,) or (M, 1); (N,) or
    (N, 1)). out_scale: FP32 scale of an e4m3 y, e.g. sqrt(block) * max|gain| / 448. save_dtype:
    also return u in it and r (M, blocks) FP32. transposed: also return y.T, which wgrad reads.
    norm=False leaves BlockNorm out (then u is z). Error against FP64 on the same FP8 operands: the
    rounding of y's dtype; of the accumulation with fast_accum (13 fraction bits on Hopper).
    """
    (m, k), n = a.shape, w.shape[0]
    blocks = bn.count_blocks(n, block)
    config = config or default_config(m, n, k, block)
    interpreted = a.device.type != "cuda"
    programs = programs_of(a.device)
    wide = max(triton.next_power_of_2(block), 16)
    tiles = -(-m // config.block_m) * blocks
    if config.split_k > 1 and not interpreted and tiles * config.split_k > programs:
        raise ValueError(
            f"split_k={config.split_k} with {tiles} tiles needs more programs than the {programs} "
            "that are resident at once; take a smaller split"
        )
    dtype = torch.float8_e4m3fn if out_scale is not None else out_dtype
    y = torch.empty((m, n), dtype=dtype, device=a.device)
    u = r = None
    if save_dtype is not None:
        u = torch.empty((m, n), dtype=save_dtype, device=a.device)
        r = torch.empty((m, blocks), dtype=torch.float32, device=a.device)
    m_up = -(-m // 16) * 16
    yt = torch.empty((n, m_up), dtype=dtype, device=a.device) if transposed else None
    if m == 0:
        return FusedOutput(y, yt, u, r)
    partial = counters = y
    if config.split_k > 1:
        size = tiles * config.split_k * config.block_m * wide
        partial = torch.empty(size, dtype=torch.float32, device=a.device)
        counters = _counters(a.device, config.split_k)
    grid = min(programs, tiles * config.split_k)
    args = (
        TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(w, [wide, config.block_k]),
        y,
        yt if yt is not None else y,
        u if u is not None else y,
        r if r is not None else y,
        a_scale,
        w_scale,
        gain if gain is not None else w_scale,
        out_scale if out_scale is not None else w_scale,
        partial,
        counters,
        m,
        m_up,
        n,
        k,
        block,
        blocks,
        float(eps),
    )
    constants = {
        "BM": config.block_m,
        "BN": wide,
        "BK": config.block_k,
        "SPLIT_K": config.split_k,
        "WAIT": not interpreted,
        "IMPRECISE": fast_accum,
        "A_ROWS": a_scale.numel() > 1,
        "W_ROWS": w_scale.numel() > 1,
        "NORM": norm,
        "GAIN": gain is not None,
        "ACT": ACTIVATIONS[act],
        "GATE": gate,
        "SAVE": save_dtype is not None,
        "FP8": out_scale is not None,
        "TRANSPOSE": transposed,
    }
    # Sizes of the layer are settled by it; of those that follow the batch, their kind.
    key = (
        config,
        kind(m, m_up),
        (n, k, block),
        (y.dtype, u.dtype if u is not None else None, gain.dtype if gain is not None else None),
        tuple(constants.values()),
        aligned(a_scale, w_scale, gain, out_scale),
        a.device.index,
    )
    _launch(
        key,
        (grid,),
        args,
        constants,
        a.device,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return FusedOutput(y, yt, u, r)


def fused_forward_ref(
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    gain: Tensor | None = None,
    *,
    block: int,
    eps: float = 1e-6,
    act: str = "hard_swish",
    gate: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, u, r) in FP64 from the same FP8 operands: the definition."""
    left = a.double() * a_scale.double().reshape(-1, 1)
    right = w.double() * w_scale.double().reshape(-1, 1)
    return epilogue_ref(left @ right.t(), gain, block, eps, act, gate)
