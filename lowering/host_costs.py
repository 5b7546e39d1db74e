"""What a part costs the host, where no CUDA graph replays it.

Where the host needs longer to start a step's kernels than the device to run them, FP8, which starts
more kernels than it replaces, loses what it gains on the device (`balance.py`). Measured once per
process, in milliseconds of time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.direct_calls import DIRECT
from loka_compile.lowering.parts import EPILOGUE
from loka_compile.lowering.parts import GRADIENT
from loka_compile.lowering.parts import QUANTISE
from loka_compile.lowering.parts import is_gemm
from loka_compile.lowering.parts import parse_pair
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Granularity

#: Kernels that Inductor makes of a step: a norm's statistics and its values, and their gradient.
_LAUNCHES = {EPILOGUE: 2, GRADIENT: 3}
#: Of quantising one operand: a tensor's maximum takes two.
_QUANTISE = {Granularity.TENSOR: 3, Granularity.ROW: 2}
#: Libraries whose product is one ATen call.
_ATEN = ("torch", "torchao", "bf16")
_REPEATS = 5


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of host time to start: a compiled kernel, a product of ATen, one of FP8 operands
    (which asks its library for an algorithm at every call), an op of ours."""

    launch: float
    call: float
    scaled: float
    own: float

    def us(self, key: CostKey) -> float:
        """Of the part that `key` names (`parts.py`)."""
        if is_gemm(key):
            # Other libraries are called through Python, as our ops are.
            if key.library not in _ATEN:
                return self.own
            plain = key.kernel == HIGH_PRECISION or key.library == "bf16"
            return self.call if plain else self.scaled
        if key.library == "loka":
            # Weights are quantised together: what each adds are the views that its readers take.
            return self.launch if key.direction == QUANTISE else self.own
        if key.direction == QUANTISE:
            rules = [rule for rule in parse_pair(key.recipe) if rule is not None]
            return self.launch * sum(_QUANTISE.get(rule.granularity, 1) for rule in rules)
        return self.launch * _LAUNCHES.get(key.direction, 1)


def host_costs(device: torch.device, replayed: bool = False) -> HostCosts | None:
    """None where the host does not matter: without CUDA, and where graphs are replayed."""
    if device.type != "cuda" or replayed:
        return None
    return _measured(device)


@functools.cache
def _measured(device: torch.device) -> HostCosts:
    from loka_compile.lowering import chain

    with torch.no_grad(), torch.amp.autocast("cuda", enabled=False):
        a = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(a)
        # As compiled code calls it.
        direct = DIRECT[torch.ops.loka.fused_chain.default]["cuda"]
        q, one = a.to(chain.E4M3), torch.ones((), dtype=torch.float32, device=device)

        def own() -> Any:
            return direct(
                q, one, q, one, None, None, 64, 1e-6, True, "hard_swish", False, True, a.dtype,
                None, True, False,
            )  # fmt: skip

        return HostCosts(
            launch=_host_us(lambda: torch.add(a, a, out=out), device),
            call=_host_us(lambda: torch.mm(a, a, out=out), device),
            scaled=_host_us(
                lambda: torch._scaled_mm(q, q.t(), one, one, out_dtype=a.dtype), device
            ),
            own=_host_us(own, device),
        )


def _host_us(start: Callable[[], Any], device: torch.device, calls: int = 100) -> float:
    """Least of several means: what else the host does is no cost of ours."""
    found = []
    for _ in range(_REPEATS):
        start()
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(calls):
            start()
        found.append((time.perf_counter() - begun) / calls * 1e6)
    return min(found)
