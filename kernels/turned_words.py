"""Triton pieces of what is written as FP8 in both orientations without a detour through shared
memory: a thread holds 16 rows of a column, four to a word, and stores those 16 bytes by itself.

`tl.store` would first move a tile to the threads that its addresses suit best, through shared
memory and barriers; inline assembly stores from where the values are. EXACT: the interpreter, which
has no assembly, and where it makes no difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loka_compile.kernels.fp8 import to_fp8

#: What a kernel has to be told where it holds words: no pointer has the type.
TRITON_FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def put(to, value, mask, EXACT: tl.constexpr):
    """Store FP32 values from the threads that hold them."""
    if EXACT:
        tl.store(to, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r", [to.to(tl.int64), value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def put_words(to, a, b, c, d, mask, EXACT: tl.constexpr):
    """Store four words of int32 one behind the other. to: aligned to 16 bytes."""
    if EXACT:
        tl.store(to, a, mask=mask)
        tl.store(to + 1, b, mask=mask)
        tl.store(to + 2, c, mask=mask)
        tl.store(to + 3, d, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $6, 0;"
            " @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r", [to.to(tl.int64), a, b, c, d, mask.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def word_of(a, b, c, d, like: tl.constexpr, MAX: tl.constexpr, EXACT: tl.constexpr):
    """Four FP32 tiles -> one of int32: FP8 bytes (`like`), `a` the lowest."""
    if EXACT:
        word = to_fp8(a, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= to_fp8(b, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= to_fp8(c, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= to_fp8(d, like, MAX, EXACT).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    else:
        # One instruction casts and packs two values; taken apart again they would cost six.
        KIND: tl.constexpr = "e4m3x2" if MAX < 1000.0 else "e5m2x2"
        CODE: tl.constexpr = (
            "{ .reg .b16 lo, hi;"
            " cvt.rn.satfinite." + KIND + ".f32 lo, $2, $1;"
            " cvt.rn.satfinite." + KIND + ".f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }"
        )
        word = tl.inline_asm_elementwise(
            CODE, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def kept(word, left):
    """The first `left` (rows,) bytes of a word, of none to all four; the rest are zeros."""
    left = tl.minimum(tl.maximum(left, 0), 4)
    return word & tl.where(left == 4, -1, (1 << (8 * left)) - 1)[:, None]


@triton.jit
def read(gy_ptr, u_ptr, r_ptr, rows, inside, M, wanted, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """dL/dy, u (rows, block) and r (rows,) as they are stored. WHOLE: only `wanted` masks. KEEP:
    eviction policy."""
    if WHOLE:
        gy = tl.load(gy_ptr, mask=wanted, other=0.0, eviction_policy=KEEP)
        u = tl.load(u_ptr, mask=wanted, other=0.0, eviction_policy=KEEP)
        r = tl.load(r_ptr, mask=wanted, other=1.0)
    else:
        here = (rows < M) & wanted
        mask = here[:, None] & inside[None, :]
        gy = tl.load(gy_ptr, mask=mask, other=0.0, eviction_policy=KEEP)
        u = tl.load(u_ptr, mask=mask, other=0.0, eviction_policy=KEEP)
        r = tl.load(r_ptr, mask=here, other=1.0)
    return gy, u, r
