"""Many weights -> FP8 as they lie and FP8 transposed, in two launches for all of them.

    1 maxima   per program: of its share of a weight; of rows and columns where those are asked for
    2 cast     per tile of 128 x 128: both FP8 forms from one read, the transposed one by words

Bytes and scales are those of `quantize_both`, weight by weight. A step of a model starts two
kernels in place of two for each weight, most of which are over before the host has started the next
one. Weights are read where they lie, by their addresses, from a table on the device that is made
anew when one of them has moved; parameters do not between steps. The Triton code is in
`weights_kernels`.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from loka_compile.kernels import weight_table as wt
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import aligned
from loka_compile.kernels.launch import empty
from loka_compile.kernels.launch import kind
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split
from loka_compile.kernels.quantize_both import quantize_both
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
        if sizes != sizes_of(ws):
            raise ValueError(f"weights of other sizes and strides than {sizes}: {sizes_of(ws)}")
        if why_not(ws, asked) is not None or wt.capturing(first.device):
            return quantize_weights_ref(ws, asked, dtype, by=quantize_both)
        if group is None:
            if len(_GROUPS) >= _MOST:
                wt.forget(_GROUPS, first.device)
            group = _GROUPS[signature] = _Group(ws, asked, dtype)
        places = group.plan.place(addresses, first.device)
    elif wt.capturing(first.device):
        # The graph reads the table as often as it is replayed.
        wt.CAPTURED.add(places)
    return group.launch(places)


class _Group:
    """Weights of some shapes and scales: all about their launches but the addresses."""

    def __init__(
        self, ws: Sequence[Tensor], asked: tuple[Asked, ...], dtype: torch.dtype | None
    ) -> None:
        # Its identity is the group's key.
        self.asked = asked
        like, self.device = ws[0].dtype, ws[0].device
        held = layout(tuple((w.shape[0], w.shape[1]) for w in ws), asked)
        self.sizes, self.types = held.sizes, formats(asked)
        #: Memory has all of them transposed: what lies straight there is w8t.
        self.turned = any(w.stride(1) != 1 for w in ws)
        self.plan = wt.plan([w.t() if self.turned else w for w in ws], asked, held, self.turned)
        rounded = 0 if dtype in (None, like) else _ROUND[dtype]
        self.lines = self.plan.lines > 0
        types = self.types[::-1] if self.turned else self.types
        self.keys: dict[bool, Hashable] = {}
        self.constants: dict[bool, tuple[dict[str, Any], dict[str, Any]]] = {}
        for even in (False, True):
            both = {
                "LIKE": _TRITON[like],
                "EVEN": 16 // ws[0].element_size() if even else 1,
                "ROUND": rounded,
                "EXACT": self.device.type != "cuda",
            }
            cast = {
                **both,
                "WHOLE": "tensor" in self.plan.kinds,
                "LINES": self.lines,
                "BLOCKS": "128x128" in self.plan.kinds,
                "SHARES_UP": wt.MOST_SHARES,
                "SIZE": wt.SIZE,
            }
            for of, tail in zip(types, ("", "_T"), strict=True):
                exponent, mantissa = exponent_split(of)
                cast["MAX" + tail] = FP8_MAX[of]
                cast["EXPONENT" + tail] = exponent
                cast["MANTISSA" + tail] = mantissa
            self.constants[even] = ({**both, "LINES": self.lines, **_BLOCK}, cast)
            sizes = kind(self.plan.programs_at, self.plan.tiles_at)
            some = self.plan.programs > 0
            self.keys[even] = (sizes, some, types, *cast.values(), self.device.index)

    def launch(self, places: wt.Places) -> tuple[Tensor, Tensor, Tensor]:
        plan, table, device = self.plan, places.table, self.device
        q = empty(self.sizes[:1], self.types[0], device)
        qt = empty(self.sizes[1:2], self.types[1], device)
        scales = empty(self.sizes[2:], torch.float32, device)
        maxima, cast = self.constants[places.even]
        key = (self.keys[places.even], aligned(q, qt, scales))
        amax = table
        if plan.programs:
            size = (plan.programs + plan.lines,)
            # Those of lines are gathered by atomics, from zero.
            made = torch.zeros(size, dtype=torch.int32, device=device) if self.lines else None
            amax = empty(size, torch.int32, device) if made is None else made
            read = (table, amax, plan.programs_at)
            _launch_maxima(key, (plan.programs,), read, maxima, device, num_warps=8)
        outs = (qt, q) if self.turned else (q, qt)
        args = (table, amax, *outs, scales, plan.tiles_at)
        _launch_cast(key, (plan.tiles,), args, cast, device, num_warps=8)
        return q, qt, scales


_GROUPS: dict[Hashable, _Group] = {}
_MOST = 256
