"""Fill the cost table: every part of a step at given places, timed one by one.

What has a row is skipped, so a run that was ended goes on where it stopped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import replace

import torch

from loka_compile.lowering import chain
from loka_compile.lowering.chain import gradient_rule
from loka_compile.lowering.chain_formulas import OUTPUTS
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.entries import operand_of
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.own import block_in
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.measure import measured
from loka_compile.lowering.parts import Place
from loka_compile.lowering.parts import backward_parts
from loka_compile.lowering.parts import forward_parts
from loka_compile.lowering.parts import is_gemm
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import candidates
from loka_compile.options import Options

#: A key, and the dtype that its operands have: "tf32" in a key is float32.
Wanted = tuple[CostKey, torch.dtype]

#: Sizes at which what moves memory is timed once per device, so that a fit stands for all others:
#: (rows, features), below and above what an L2 holds.
MEMORY_SIZES = (
    (256, 1024), (1024, 512), (2048, 4096), (4096, 1024), (4096, 2048), (8192, 2048), (4096, 8192),
    (16384, 4096),
)  # fmt: skip


def kernels_alone(place: Place, options: Options) -> Iterator[CostKey]:
    """Every kernel that can run at `place`, in every direction."""
    for direction in DIRECTIONS:
        names, _ = candidates(direction, place.shape, place.device, options, place.dtype)
        for kernel in [HIGH_PRECISION, *names]:
            outs = OUTPUTS if chain.is_own(kernel) and _is_bounded(place) else ("y",)
            for out in outs:
                yield place.gemm(direction, kernel, out)


def _is_bounded(place: Place) -> bool:
    """Its output may be handed over: a norm's, with neither a gate nor a hard sigmoid."""
    open_ended = place.epilogue.endswith("+gate") or "hard_sigmoid" in place.epilogue
    return place.has_gradient and not open_ended


def moving_parts(place: Place, options: Options) -> Iterator[CostKey]:
    """All that moves memory at `place`, for the kernels that can run there."""
    names = {
        d: [HIGH_PRECISION, *candidates(d, place.shape, place.device, options, place.dtype)[0]]
        for d in DIRECTIONS
    }
    yield place.widen()
    yield place.bounded(turned=True)
    for direction in DIRECTIONS:
        for kernel in names[direction]:
            if direction == "fwd":
                keys = forward_parts(place, kernel)
            else:
                keys = backward_parts(place, direction, kernel)
            yield from (key for key in keys if not is_gemm(key))
    for tensor, one, other in (
        ("x", "fwd", "wgrad"),
        ("w", "fwd", "dgrad"),
        ("gy", *DIRECTIONS[1:]),
    ):
        firsts, seconds = (
            {operand_of(d, tensor, k) for k in names[d]} - {None} for d in (one, other)
        )
        for pair in itertools.product(sorted(firsts, key=str), sorted(seconds, key=str)):
            yield place.quantise(tensor, pair)
    if place.has_gradient:
        yield place.gradient(None)
    if place.own_gradient:
        firsts, seconds = ({gradient_rule(d, k) for k in names[d]} - {None} for d in DIRECTIONS[1:])
        for pair in itertools.product(sorted(firsts, key=str), sorted(seconds, key=str)):
            yield place.gradient(pair)


def wanted_at(places: Iterable[Place], options: Options) -> list[Wanted]:
    """What `places` ask for, each once: kernels at their shapes, memory at `MEMORY_SIZES`."""
    places = list(places)
    found: dict[Wanted, None] = {}
    for place in places:
        found.update(dict.fromkeys((key, place.dtype) for key in kernels_alone(place, options)))
    # One family per epilogue's kind and dtype is fitted: its exact form hardly matters.
    kinds = {(p.dtype, p.epilogue): p for p in places if p.epilogue} or {
        (p.dtype, p.epilogue): p for p in places
    }
    for place in kinds.values():
        for m, size in MEMORY_SIZES:
            # A width that the chain's blocks divide.
            block = block_in(place.epilogue) or 1
            n = max(size // block, 1) * block
            at = replace(place, shape=GemmShape(m, n, n, place.epilogue), layout="nk")
            keys = moving_parts(at, options)
            found.update(dict.fromkeys((key, place.dtype) for key in keys))
    return list(found)


def fill(
    wanted: Iterable[Wanted],
    device: torch.device,
    table: CostTable,
    seconds: float,
    told: Callable[[CostKey, Cost | None], None] = lambda key, cost: None,
) -> bool:
    """Time what has no row; `told` hears of each key, with None for what had one. False: the time
    was spent before the end."""
    deadline = time.monotonic() + seconds
    for key, dtype in wanted:
        if table.find(key) is not None:
            told(key, None)
            continue
        if time.monotonic() > deadline:
            return False
        told(key, measured(key, dtype, device, table, many=True))
    return True
