"""Many weights -> FP8 as they lie and FP8 transposed, in two launches for all of them.

    1 maxima   per program: of its share of a weight; of rows and columns where those are asked for
    2 cast     per tile of 128 x 128: both FP8 forms from one read, the transposed one by words

Bytes and scales are those of `quantize_both`, weight by weight. A step of a model starts two
kernels in place of two for each weight, most of which are over before the host has started the next
one. (Scales by row take a third launch, which clears the places where maxima are gathered.)
Weights are read where they lie, by their addresses, from a table on the device that is made anew
when one of them has moved; parameters do not between steps. The Triton code is in
`weights_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import captured
from loka_compile.kernels import weight_table as wt
from loka_compile.kernels.call import Call
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.launch import kind
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.quantize_both import quantize_both
from loka_compile.kernels.room import allocator
from loka_compile.kernels.room import dense
from loka_compile.kernels.weight_group import Asked
from loka_compile.kernels.weight_group import formats
from loka_compile.kernels.weight_group import layout
from loka_compile.kernels.weight_group import quantize_weights_ref
from loka_compile.kernels.weights_kernels import cast_kernel
from loka_compile.kernels.weights_kernels import maxima_kernel

_TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_ROUND = {torch.bfloat16: 1, torch.float16: 2}
#: Half of a tile at a time: twice as many programs then share an SM's registers.
_BLOCK = {"BR": wt.SIZE // 2, "BC": wt.SIZE}

_launch_maxima = Launcher(maxima_kernel)
_launch_cast = Launcher(cast_kernel)


def why_not(ws: Sequence[Tensor], asked: Sequence[Asked]) -> str | None:
    """Why these are no group for two launches; None where they are."""
    first = ws[0]
    if first.dtype not in _TRITON:
        return f"dtype {first.dtype}"
    for w in ws:
        if type(w) not in (Tensor, torch.nn.Parameter):
            return f"a tensor subclass, {type(w).__name__}"
        if w.dtype != first.dtype or w.device != first.device:
            return "of several dtypes or devices"
        if not w.numel():
            return "without values"
    if not any(all(w.stride(dim) == 1 for w in ws) for dim in (1, 0)):
        return "not all with neighbouring rows, nor all with neighbouring columns"
    rules = [rule for one in asked for rule in (one.straight, one.turned)]
    if any(rule.kind not in wt.KINDS or rule.turned or rule.multiple != 1 for rule in rules):
        return f"scales are {', '.join(wt.KINDS)}, as they lie"
    return None


def sizes_of(ws: Sequence[Tensor]) -> tuple[int, ...]:
    """N, K and their strides, of one weight after the other."""
    return tuple(size for w in ws for size in (*w.shape, *w.stride()))


def quantize_weights(
    ws: Sequence[Tensor],
    asked: tuple[Asked, ...],
    dtype: torch.dtype | None = None,
    sizes: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ws: (N, K) each, floating -> q, qt, scales; see `weight_group`.

    dtype: bf16 or fp16, to which weights are rounded first, as a cast under autocast would. What
    fills up is zero. sizes: `sizes_of(ws)` for a caller who knows; to ask for them takes longer
    than to launch. What `why_not` objects to, and weights that first come here while a CUDA graph
    is captured, are quantised one by one. Raises ValueError where FP8 types differ, or other sizes
    come than are said.
    """
    first = ws[0]
    if sizes is None:
        sizes = sizes_of(ws)
    # All that a table is good for; `asked` by its identity, since it is long.
    signature = (sizes, id(asked), first.dtype, dtype, first.device)
    group = _GROUPS.get(signature)
    addresses = tuple([w.data_ptr() for w in ws])
    places = None if group is None else group.plan.known(addresses)
    if group is None or places is None:
        if sizes[0::4] + sizes[1::4] != (*(w.shape[0] for w in ws), *(w.shape[1] for w in ws)):
            raise ValueError(f"weights of other sizes than {sizes}: {sizes_of(ws)}")
        moved = sizes != sizes_of(ws)
        if moved or why_not(ws, asked) is not None or wt.capturing(first.device):
            return quantize_weights_ref(ws, asked, dtype, by=quantize_both)
        if group is None:
            if len(_GROUPS) >= _MOST:
                wt.forget(_GROUPS, first.device)
            group = _GROUPS[signature] = _Group(ws, asked, dtype)
        places = group.plan.place(addresses, first.device)
    elif wt.capturing(first.device):
        # The graph reads the table as often as it is replayed.
        captured.keep(places, addresses, first.device)
    return group.launch(places)


class _Group:
    """Weights of some shapes and scales: all about their launches but the addresses."""

    def __init__(
        self, ws: Sequence[Tensor], asked: tuple[Asked, ...], dtype: torch.dtype | None
    ) -> None:
        # Its identity is the group's key.
        self.asked = asked
        first, self.device = ws[0], ws[0].device
        #: Memory has all of them transposed: what lies straight there is w8t.
        self.turned = any(w.stride(1) != 1 for w in ws)
        held = layout(tuple((w.shape[0], w.shape[1]) for w in ws), asked)
        matrices = [w.t() if self.turned else w for w in ws]
        plan = self.plan = wt.plan(matrices, asked, held, self.turned)
        types = formats(asked)
        q, qt, scales = held.sizes
        self.rooms = dense((q,), types[0]), dense((qt,), types[1]), dense((scales,), torch.float32)
        #: For maxima; None where all are found within a tile. Those of lines are gathered by
        #: atomics, from zero.
        self.amax = dense((plan.programs + plan.lines,), torch.int32) if plan.programs else None
        both: dict[str, Any] = {
            "LIKE": _TRITON[first.dtype],
            "ROUND": 0 if dtype in (None, first.dtype) else _ROUND[dtype],
            "EXACT": self.device.type != "cuda",
            "LINES": plan.lines > 0,
        }
        cast: dict[str, Any] = {
            "WHOLE": "tensor" in plan.kinds,
            "BLOCKS": "128x128" in plan.kinds,
            "SHARES_UP": wt.MOST_SHARES,
            "SIZE": wt.SIZE,
        }
        in_memory = types[::-1] if self.turned else types
        for of, tail in zip(in_memory, ("", "_T"), strict=True):
            exponent, mantissa = exponent_split(of)
            cast |= {"MAX" + tail: FP8_MAX[of], "EXPONENT" + tail: exponent}
            cast["MANTISSA" + tail] = mantissa
        key = (*both.values(), in_memory, self.device.index)
        #: Are rows of 16 bytes -> the two launches.
        self.calls: dict[bool, tuple[Call, Call]] = {}
        for even in (False, True):
            also = {**both, "EVEN": 16 // first.element_size() if even else 1}
            at = plan.programs_at, plan.tiles_at
            find_key, write_key = (key, even, kind(at[0])), (key, even, *cast.values(), kind(at[1]))
            find = Call(
                _launch_maxima, (plan.programs,), at[:1], {**also, **_BLOCK}, find_key, self.device,
                num_warps=8,
            )  # fmt: skip
            write = Call(
                _launch_cast, (plan.tiles,), at[1:], {**also, **cast}, write_key, self.device,
                num_warps=8,
            )  # fmt: skip
            self.calls[even] = find, write

    def launch(self, places: wt.Places) -> tuple[Tensor, Tensor, Tensor]:
        make, table = allocator(self.device), places.table
        q, qt, scales = (make(*room) for room in self.rooms)
        find, write = self.calls[places.even]
        amax = scales
        if self.amax is not None:
            amax = make(*self.amax)
            if self.plan.lines:
                amax.zero_()
            if not find.start([places.address, amax.data_ptr()]):
                find.run((table, amax))
        straight, turned = (qt, q) if self.turned else (q, qt)
        tensors = (amax, straight, turned, scales)
        if not write.start([places.address, *[t.data_ptr() for t in tensors]]):
            write.run((table, *tensors))
        return q, qt, scales


_GROUPS = Recipes()
#: Fewer than are held elsewhere: each has tables on the device.
_MOST = 256
