"""What a probed step records of a weight's gradient, in a few launches and without a host sync.

    1 sizes     per row of x: its length; the same of gw; per feature of x: sum of squares over some
                `ENERGY_ROWS` rows; maxima of x
    2 columns   per feature of gy: sum over rows of (gy * length)^2, in FP64; maxima of gy
    3 finish    coherence of every row of gw; which columns of x the sketch takes; its marks
    4 copy      the chosen columns of all rows into the ring

The definitions are `probe.coherence.coherence` and `probe.sketch.record_ref`; the state is
described there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from loka_compile.kernels.call import Call
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense
from loka_compile.kernels.sketch_kernels import _columns_kernel
from loka_compile.kernels.sketch_kernels import _copy_kernel
from loka_compile.kernels.sketch_kernels import _finish_kernel
from loka_compile.kernels.sketch_kernels import _sizes_kernel

#: Programs that columns are split over: enough to fill a device where features are few.
_COLUMN_PROGRAMS = 1024
#: Partial sums that are read at once.
_CHUNK = 16

#: Rows and columns of a tile of energies.
_SIDE = 32

_sizes = Launcher(_sizes_kernel)
_columns = Launcher(_columns_kernel)
_finish = Launcher(_finish_kernel)
_copy = Launcher(_copy_kernel)


def sketch(
    gw: Tensor,
    gy: Tensor,
    x: Tensor,
    scalars: Tensor,
    coherence: Tensor,
    ring: Tensor,
    marks: Tensor,
    *,
    columns_gy: int,
    columns_x: int,
    first_weight: int,
    energy_rows: int,
    even: float,
) -> None:
    """gw (N, K), gy (M, N), x (M, K), M > 0, any strides. Updates the last three in place.

    The sizes are those of `probe.sketch`: columns kept of each, the place of their weights in a
    row of marks, rows on which energies are taken, the share of a column's chance without them.
    """
    device = x.device
    signature = (
        gw.shape, gw.stride(), gw.dtype, gy.shape, gy.stride(), gy.dtype, x.shape, x.stride(),
        x.dtype, coherence.shape, ring.shape, ring.dtype, marks.shape, columns_gy, columns_x,
        first_weight, energy_rows, even, device,
    )  # fmt: skip
    how = RECIPES.get(signature)
    if how is None:
        how = RECIPES[signature] = _Recipe(*signature)
    scratch = allocator(device)(*how.scratch)
    at_gy, at_x, first = gy.data_ptr(), x.data_ptr(), scratch.data_ptr()
    lengths, sums, signal, energy, tops_x, tops_gy, picked = [first + 8 * p for p in how.places]
    at_scalars, at_marks = scalars.data_ptr(), marks.data_ptr()
    finish = [sums, signal, at_scalars, coherence.data_ptr(), energy, picked, at_marks]
    launches = (
        (how.sizes, [at_x, gw.data_ptr(), lengths, signal, energy, tops_x]),
        (how.columns, [at_gy, lengths, sums, tops_gy]),
        (how.finish, [*finish, tops_x, tops_gy]),
        (how.copy, [at_gy, at_x, picked, at_scalars, at_marks, ring.data_ptr()]),
    )
    for call, pointers in launches:
        if not call.start(pointers):
            given = (gw, gy, x, scalars, coherence, ring, marks)
            call.run(how.tensors(pointers, scratch, given))


class _Recipe:
    """All of the launches that follows from shapes, dtypes and switches."""

    def __init__(
        self, gw_shape, gw_strides, gw_dtype, gy_shape, gy_strides, gy_dtype, x_shape, x_strides,
        x_dtype, coherence, ring, ring_dtype, marks, columns_gy, columns_x, first_weight,
        energy_rows, even, device,
    ) -> None:  # fmt: skip
        (m, n), k, bn = gy_shape, x_shape[1], 128
        # Energies are taken from every so many rows.
        stride = -(-m // energy_rows)
        some = -(-m // stride)
        across = triton.cdiv(n, bn)
        blocks = triton.cdiv(m, 32)
        steps = triton.cdiv(blocks, max(_COLUMN_PROGRAMS // across, 1))
        self.splits = triton.cdiv(blocks, steps)
        rows = min(m, ring[0])
        slots, width = marks[0] - 1, marks[1]
        bm, bk = (16, 256) if k <= 256 else (8, 512)
        of_x, of_gw, of_gy = triton.cdiv(m, bm), triton.cdiv(n, bm), across * self.splits
        #: Places in the scratch, in numbers of 8 bytes, all aligned: lengths of x, sums over gy,
        #: lengths of gw, energies of x; then integers of 4, maxima of x and of gy and the columns
        #: picked of x.
        sizes = [m, self.splits * n, n, k, -(-of_x // 2), -(-of_gy // 2)]
        self.places = [0, *accumulate(size + size % 2 for size in sizes)]
        self.scratch = dense((self.places[-1] + -(-columns_x // 2),), torch.float64)

        def call(
            by: Launcher, grid: tuple[int, ...], sizes: Any, constants: Any, *types: Any
        ) -> Call:
            key = (kind(*sizes), tuple(constants.values()), *types, device.index)
            return Call(by, grid, sizes, constants, key, device, num_warps=4)

        self.sizes = call(
            _sizes, (of_x + of_gw + triton.cdiv(k, _SIDE),),
            (m, n, k, some, *x_strides, *gw_strides, x_strides[0] * stride, of_x, of_gw),
            {"BM": bm, "BK": bk, "SIDE": _SIDE}, x_dtype, gw_dtype,
        )  # fmt: skip
        self.columns = call(
            _columns, (across, self.splits), (m, n, *gy_strides, steps),
            {"ROWS": 4, "BM": 32, "BN": bn}, gy_dtype,
        )  # fmt: skip
        # The ring's length and the batches of coherences (fewer of wide gradients) are compiled in.
        constants = {
            "SLOTS": slots, "WIDTH": width, "FIRST_WEIGHT": first_weight, "ROWS": ring[0],
            "X": columns_x, "EVEN": even, "COHERENCES": coherence[0],
            "BS": triton.next_power_of_2(slots), "BN": bn, "BK": 1024, "CHUNK": _CHUNK,
        }  # fmt: skip
        counts = (n, k, self.splits, rows, of_x, of_gy)
        self.finish = call(_finish, (1 + across,), counts, constants)
        constants = {"SLOTS": slots, "WIDTH": width, "GY": columns_gy, "X": columns_x, "BM": 64}
        self.copy = call(
            _copy, (triton.cdiv(rows, 64),), (rows, n, *gy_strides, *x_strides), constants,
            gy_dtype, x_dtype, ring_dtype,
        )  # fmt: skip

    def tensors(
        self, pointers: list[int], scratch: Tensor, given: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """What lies at these addresses."""
        own = [scratch[place:] for place in self.places[:4]]
        own += [scratch[place:].view(torch.int32) for place in self.places[4:]]
        at = {t.data_ptr(): t for t in (*own, *given)}
        return tuple([at[pointer] for pointer in pointers])


RECIPES = Recipes()
