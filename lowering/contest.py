"""What one site may take while it is decided: who runs there, at what price, how accurately.

A kernel that nobody has looked at yet stands in the offers all the same, by its price: what is
chosen is looked at before it may stay (`settle.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any
from typing import Protocol

import torch

from loka_compile.lowering import gate
from loka_compile.lowering.choose import Candidate
from loka_compile.lowering.choose import Offers
from loka_compile.lowering.choose import forced_choice
from loka_compile.lowering.choose import judge
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import Cost
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import candidates
from loka_compile.lowering.select import forced
from loka_compile.options import Options

#: (direction, kernel) -> Errors.
Quantify = Callable[[str, str], Any]
#: Forward kernel -> its predicted loss in nats, or why that is not known.
Score = Callable[[str], "float | str"]


class Priced(Protocol):
    """What offers need of `SitePrices`."""

    def alone(self, direction: str, kernel: str) -> Cost | None: ...


@dataclass(eq=False)
class Contest:
    """prices: None where nothing is timed, as in emulation. dtype: in which the site computes.

    score: for gate="budget". It speaks of the forward alone: what a backward does to the loss shows
    only in later steps, and the gate of the local errors holds it.
    """

    name: str
    shape: GemmShape
    device: torch.device
    options: Options
    quantify: Quantify
    prices: Priced | None
    score: Score | None = None
    directions: Sequence[str] = DIRECTIONS
    dtype: torch.dtype | None = None
    #: (direction, kernel) -> None once it ran and was right, else why it may not be chosen. Sites
    #: with the same GEMM share it.
    tried: dict[tuple[str, str], str | None] = field(default_factory=dict)
    errors: dict[tuple[str, str], Any] = field(default_factory=dict)
    _nats: dict[str, float | str] = field(default_factory=dict)
    _names: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)

    def names(self, direction: str) -> list[str]:
        """Kernels that may be looked at: none where the choice is forced."""
        if direction in self._forced():
            return []
        return [k for k in self._found(direction)[0] if self.tried.get((direction, k)) is None]

    def _forced(self) -> dict[str, str]:
        return forced(self.name, self.options, (self.shape.k, self.shape.n))

    def _found(self, direction: str) -> tuple[list[str], list[str]]:
        if direction not in self._names:
            self._names[direction] = candidates(
                direction, self.shape, self.device, self.options, self.dtype
            )
        return self._names[direction]

    def measure(self, direction: str, kernel: str) -> str | None:
        """Quantify it, unless that was done; why it is too inaccurate, None where it is not."""
        key = direction, kernel
        if key not in self.errors:
            self.errors[key] = self.quantify(direction, kernel)
        return gate.why_refused(self.errors[key], self.options.gate, self.options.max_mere)

    def offers(self, budget: float | None = None) -> dict[str, Offers]:
        """Direction -> Offers, as far as is known. budget: in nats, instead of the options'."""
        options = self.options if budget is None else replace(self.options, loss_budget=budget)
        return {d: self._offers(d, options) for d in self.directions}

    def _offers(self, direction: str, options: Options) -> Offers:
        fixed = self._forced().get(direction)
        if fixed is not None:
            return Offers(fixed=forced_choice(fixed, direction, self.shape))
        names, prices = self.names(direction), self.prices
        _, reasons = self._found(direction)
        failed = [f"{k}: {why}" for (d, k), why in self.tried.items() if d == direction and why]
        high = None if prices is None or not names else prices.alone(direction, HIGH_PRECISION)
        found: list[Candidate] = []
        for kernel in names:
            cost = None if prices is None else prices.alone(direction, kernel)
            us, source, note = (None, "", "") if cost is None else (cost.us, cost.source, cost.note)
            errors = self.errors.get((direction, kernel))
            found.append(Candidate(kernel, errors, us, source, note))
        high_us = high.us if high is not None else None
        one = judge(found, high_us, options, [*reasons, *failed], joint=True)
        return self._scored(one, options) if direction == "fwd" and self.score else one

    def _scored(self, one: Offers, options: Options) -> Offers:
        """With the predicted loss of what passed; refused is what has none or costs too much."""
        passed: list[tuple[Candidate, float | None]] = []
        refused = list(one.refused)
        for candidate, speedup in one.passed:
            nats = self._score(candidate.kernel)
            if isinstance(nats, str):
                refused.append((candidate, f"no predicted loss: {nats}"))
            elif not nats <= options.loss_budget:
                why = (
                    f"predicted loss {nats:.2g} > the whole budget of {options.loss_budget:g} nats"
                )
                refused.append((replace(candidate, score=nats), why))
            else:
                passed.append((replace(candidate, score=nats), speedup))
        return replace(one, passed=tuple(passed), refused=tuple(refused))

    def _score(self, kernel: str) -> float | str:
        assert self.score is not None
        if kernel not in self._nats:
            self._nats[kernel] = self.score(kernel)
        return self._nats[kernel]


def offers_of(
    name: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    quantify: Quantify,
    prices: Priced | None,
    score: Score | None = None,
    directions: Sequence[str] = DIRECTIONS,
    unusable: Mapping[tuple[str, str], str] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Offers]:
    """Direction -> Offers for one site, all of whose kernels are looked at.

    unusable: (direction, kernel) -> why it may not be chosen; such a kernel is not even run.
    """
    one = Contest(name, shape, device, options, quantify, prices, score, directions, dtype)
    one.tried.update(unusable or {})
    for direction in directions:
        for kernel in one.names(direction):
            one.measure(direction, kernel)
    return one.offers()
