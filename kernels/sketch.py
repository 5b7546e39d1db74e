"""What a probed step records of a weight's gradient, in a few launches and without a host sync.

    1 lengths   per row of x: its length; the maximum of x. The same of gw
    2 columns   per feature of gy: sum over rows of (gy * length)^2, in FP64; the maximum of gy
    3 energies  per feature of x: sum of squares over some `ENERGY_ROWS` rows
    4 finish    coherence of every row of gw; which columns of x the sketch takes; its marks
    5 copy      the chosen columns of all rows into the ring

The definitions are `probe.coherence.coherence` and `probe.sketch.record_ref`; the state is
described there.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind
from loka_compile.kernels.sketch_kernels import _columns_kernel
from loka_compile.kernels.sketch_kernels import _copy_kernel
from loka_compile.kernels.sketch_kernels import _energies_kernel
from loka_compile.kernels.sketch_kernels import _finish_kernel
from loka_compile.kernels.sketch_kernels import _lengths_kernel

#: Programs that columns are split over: enough to fill a device where features are few.
_COLUMN_PROGRAMS = 1024
#: Partial sums that are read at once.
_CHUNK = 16

_lengths = Launcher(_lengths_kernel)
_energies = Launcher(_energies_kernel)
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
    (m, n), k = gy.shape, x.shape[1]
    # Of x, of gy, and of gw, which nobody asks for.
    amax = torch.zeros(3, dtype=torch.int32, device=device)
    lengths, signal = empty((m,), torch.float64, device), empty((n,), torch.float64, device)
    sums, energy = empty((how.splits, n), torch.float64, device), empty((k,), torch.float64, device)
    picked = empty((columns_x,), torch.int32, device)
    some = x[:: how.stride]
    of_x, of_gy, of_gw, of_some = aligned(x), aligned(gy), aligned(gw), aligned(some)
    how.lengths.run((x, lengths, amax), of_x)
    how.columns.run((gy, lengths, sums, amax), of_gy)
    how.signal.run((gw, signal, amax[2:]), of_gw)
    how.energies.run((some, energy), of_some)
    how.finish.run((sums, signal, scalars, coherence, energy, picked, marks, amax), True)
    how.copy.run((gy, x, picked, scalars, marks, ring), (of_gy, of_x))


class _Launch:
    """One kernel's launch: what does not change with the addresses. `key` tells apart what the
    integers and the dtypes do not; those of `tensors` that a caller brings may lie unaligned."""

    def __init__(
        self,
        by: Launcher,
        grid: tuple[int, ...],
        sizes: tuple[int, ...],
        constants: dict[str, Any],
        device: torch.device,
        *key: Hashable,
    ) -> None:
        self.by, self.grid, self.sizes, self.constants = by, grid, sizes, constants
        self.device = device
        self.key = (kind(*sizes), tuple(constants.values()), *key, device.index)

    def run(self, tensors: tuple[Tensor, ...], even: Hashable) -> None:
        args = (*tensors, *self.sizes)
        self.by((self.key, even), self.grid, args, self.constants, self.device, num_warps=4)


class _Recipe:
    """All of the launches that follows from shapes, dtypes and switches."""

    def __init__(
        self, gw_shape, gw_strides, gw_dtype, gy_shape, gy_strides, gy_dtype, x_shape, x_strides,
        x_dtype, coherence, ring, ring_dtype, marks, columns_gy, columns_x, first_weight,
        energy_rows, even, device,
    ) -> None:  # fmt: skip
        (m, n), k, bn = gy_shape, x_shape[1], 128
        #: Of the rows that energies are taken from.
        self.stride = -(-m // energy_rows)
        some = -(-m // self.stride)
        some_strides = (x_strides[0] * self.stride, x_strides[1])
        across = triton.cdiv(n, bn)
        blocks = triton.cdiv(m, 32)
        steps = triton.cdiv(blocks, max(_COLUMN_PROGRAMS // across, 1))
        self.splits = triton.cdiv(blocks, steps)
        rows = min(m, ring[0])
        slots, width = marks[0] - 1, marks[1]

        def lengths(shape: Any, strides: Any, *key: Hashable) -> _Launch:
            bm, bk = (16, 256) if shape[1] <= 256 else (8, 512)
            grid = (triton.cdiv(shape[0], bm),)
            sizes = (*shape, *strides)
            return _Launch(_lengths, grid, sizes, {"BM": bm, "BK": bk}, device, *key)

        self.lengths = lengths(x_shape, x_strides, x_dtype, 0)
        # Its maximum goes to the third place of three, which lies unaligned.
        self.signal = lengths(gw_shape, gw_strides, gw_dtype, 2)
        self.columns = _Launch(
            _columns, (across, self.splits), (m, n, *gy_strides, steps),
            {"ROWS": 4, "BM": 32, "BN": bn}, device, gy_dtype,
        )  # fmt: skip
        self.energies = _Launch(
            _energies, (triton.cdiv(k, 32),), (some, k, *some_strides), {"BM": 32, "BK": 32},
            device, x_dtype,
        )  # fmt: skip
        # The ring's length and the batches of coherences (fewer of wide gradients) are compiled in.
        constants = {
            "SLOTS": slots, "WIDTH": width, "FIRST_WEIGHT": first_weight, "ROWS": ring[0],
            "X": columns_x, "EVEN": even, "COHERENCES": coherence[0],
            "BS": triton.next_power_of_2(slots), "BN": bn, "BK": 1024, "CHUNK": _CHUNK,
        }  # fmt: skip
        self.finish = _Launch(_finish, (1 + across,), (n, k, self.splits, rows), constants, device)
        constants = {"SLOTS": slots, "WIDTH": width, "GY": columns_gy, "X": columns_x, "BM": 64}
        self.copy = _Launch(
            _copy, (triton.cdiv(rows, 64),), (rows, n, *gy_strides, *x_strides), constants, device,
            gy_dtype, x_dtype, ring_dtype,
        )  # fmt: skip


RECIPES = Recipes()
