"""What the slots of the programme may take (`programme.py`), and tests that pick among it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka_compile.lowering import weights
from loka_compile.lowering.chain import gradient_rule
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.parts import PLAIN
from loka_compile.lowering.parts import Pair
from loka_compile.lowering.parts import rules_of
from loka_compile.lowering.recipes import E4M3
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Operand

if TYPE_CHECKING:
    from loka_compile.lowering.site_prices import SitePrices

#: (site, role): a direction, or "gradient".
Slot = tuple[str, str]
BACKWARD = ("dgrad", "wgrad")


@dataclass(frozen=True)
class Kernel:
    """A kernel that may run. score: its share of the loss budget."""

    name: str
    score: float = 0.0


@dataclass(eq=False)
class Entry:
    """One form that a slot may take.

    ready: dL/dz comes quantised. rules: how the chain's gradient is written; None: in bf16.
    """

    kernel: str
    cost: Cost
    score: float = 0.0
    x: str = PLAIN
    ready: bool = False
    rules: Pair | None = None
    needs: tuple[Want, ...] = ()

    @property
    def is_fp8(self) -> bool:
        return self.kernel != HIGH_PRECISION or self.rules is not None


@dataclass(frozen=True)
class Outcome:
    """What a direction took. us, high_us: of the device, with its half of the chain's gradient and
    of what it shares. best_us: of the FP8 form that it had and that counted least, None where it
    had none. host: that of `us`. gain: of that form over high precision, as `Cost.at` counts.
    for_host: the host counted (`balance.py`)."""

    kernel: str
    us: float
    high_us: float
    source: str
    best: str = ""
    best_us: float | None = None
    host: float = 0.0
    gain: float | None = None
    for_host: bool = False


#: A slot, and which of its entries are meant.
Want = tuple[Slot, Callable[[Entry], bool]]


def takes_e4m3(kernel: str, direction: str) -> bool:
    """Can this kernel read the site's input as e4m3 with one scale: forward, or wgrad's transpose.

    Scales along the contraction are not what one static scale can stand for.
    """
    operand = operand_of(direction, "x", kernel)
    return operand is not None and operand.dtype == E4M3 and not operand.blocks


def hands_over(kernel: str) -> bool:
    """Can this forward kernel write its chain's output as e4m3 with a static scale."""
    return kernel != HIGH_PRECISION and split_kernel_name(kernel)[0].hands_over


def is_own(entry: Entry) -> bool:
    return hands_over(entry.kernel)


def input_is(x: str) -> Callable[[Entry], bool]:
    return lambda entry: entry.x == x


def writes(side: int, rule: Operand | None) -> Callable[[Entry], bool]:
    return lambda entry: entry.rules is not None and entry.rules[side] == rule


def reads(direction: str, rule: Operand | None) -> Callable[[Entry], bool]:
    return lambda entry: entry.ready and gradient_rule(direction, entry.kernel) == rule


def could_read(direction: str, rules: set[Operand | None]) -> Callable[[Entry], bool]:
    return lambda entry: not entry.ready and gradient_rule(direction, entry.kernel) in rules


def quantises(direction: str, tensor: str, rule: Operand) -> Callable[[Entry], bool]:
    def test(entry: Entry) -> bool:
        comes_so = {"gy": entry.ready, "x": entry.x != PLAIN, "w": False}[tensor]
        return not comes_so and operand_of(direction, tensor, entry.kernel) == rule

    return test


@functools.cache
def operand_of(direction: str, tensor: str, kernel: str) -> Operand | None:
    """How `kernel` reads `tensor`: "x" (fwd, wgrad), "gy" (dgrad, wgrad) or, where our own kernel
    can quantise it, "w" (fwd, dgrad)."""
    a, b = rules_of(kernel, direction)
    if tensor == "w":
        shared = direction != "wgrad" and weights.scale_of(kernel, direction) is not None
        return b if shared else None
    reads = {("fwd", "x"): a, ("wgrad", "x"): b, ("dgrad", "gy"): a, ("wgrad", "gy"): a}
    return reads.get((direction, tensor))


def gradient_pairs(kernels: Mapping[str, Sequence[Kernel]], prices: SitePrices) -> dict[Pair, Cost]:
    """Every way in which our backward kernel may have to write dL/dz, priced."""
    found: dict[Pair, Cost] = {}
    firsts, seconds = ({gradient_rule(d, k.name) for k in kernels[d]} - {None} for d in BACKWARD)
    for first in sorted(firsts, key=str):
        for second in sorted(seconds, key=str):
            cost = prices.gradient((first, second))
            if cost is not None and cost.us is not None:
                found[first, second] = cost
    return found
