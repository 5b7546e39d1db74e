"""gate="budget" while a graph is probed: one extra backward per probe, for the loss of kernels.

The Scorer of a set of parameters watches the gradients that the user's loss sends into the graph's
outputs. Once they show that an output is a logit of a log loss (`probe/likelihood.py`), the last
early probes run one backward more, from the logits, and keep a few samples' rows of every site.
Every kernel's predicted loss is computed from those (`probe/gauss_newton.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.backward_hook import Hook
from loka_compile.options import PROBE_STEPS
from loka_compile.probe import gauss_newton
from loka_compile.probe import likelihood
from loka_compile.probe import rows as user_rows
from loka_compile.probe.extra_backward import KEPT
from loka_compile.probe.extra_backward import SAMPLES
from loka_compile.probe.extra_backward import Collector
from loka_compile.probe.extra_backward import Taken
from loka_compile.probe.extra_backward import collecting
from loka_compile.probe.statistics import Statistics

#: Assignments that a replay may refuse before everything stays in high precision.
ROUNDS = 4


class NoScoreError(Exception):
    """The loss of a kernel at this site cannot be predicted; the message says why."""


@dataclass(eq=False)
class Scorer:
    """One per set of parameters and training graph, while it is probed."""

    #: Output number -> what it is, of those that the loss reads as logits or probabilities.
    kinds: dict[int, str] = field(default_factory=dict)
    why: str = "no backward has run yet"
    _taken: dict[str, deque[Taken]] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    #: The last gradient of each candidate output, beside its value.
    _seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def saw(
        self,
        out: Any,
        step: int,
        weights: Sequence[Tensor],
        sites: Mapping[str, Statistics],
        states: tuple[Tensor, ...],
    ) -> None:
        """A probed forward returned `out`; before anything else hooks into it.

        step: probed steps before this one. weights: what the extra backward runs towards. sites:
        site -> statistics of its gradient. states: what the graph was called with as such.
        """
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        found = {i: t for i, t in enumerate(outputs) if likelihood.may_be_logits(t)}
        if not found:
            self.why = (
                "no output of this graph can be logits: compile the model without its loss, and "
                "without graph breaks behind this site"
            )
            return
        if step >= PROBE_STEPS - KEPT:
            self._identify(found)
            if self.kinds:
                self._take(found, step, weights, sites, states)
        for i, t in found.items():
            t.register_hook(Hook(self._remember(i, t.detach())))

    def _remember(self, i: int, value: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._seen[i] = value, gradient.detach()

        return hook

    def _identify(self, found: Mapping[int, Tensor]) -> None:
        self.kinds = {}
        for i in found:
            if i not in self._seen:
                continue
            kind = likelihood.kind_of(*self._seen[i])
            if kind is None:
                # Its share of the loss would be missing from every score.
                self.kinds = {}
                self.why = (
                    "an output of this graph is read by something else than a plain log loss of "
                    "logits or probabilities"
                )
                return
            self.kinds[i] = kind

    def _take(
        self,
        found: Mapping[int, Tensor],
        step: int,
        weights: Sequence[Tensor],
        sites: Mapping[str, Statistics],
        states: tuple[Tensor, ...],
    ) -> None:
        if _compat.saved_tensors_are_hooked():
            self.why = (
                "a checkpoint, or another hook of saved tensors, stands around this graph: it has "
                "no second backward"
            )
            return
        outputs = {i: found[i] for i in self.kinds if i in found}
        batches = {t.shape[0] for t in outputs.values()}
        if len(batches) != 1:
            self.why = f"its logits are of {len(batches)} batch sizes at once"
            return
        batch = batches.pop()
        generator = torch.Generator().manual_seed(step)
        seeds = [likelihood.seed(self.kinds[i], t, generator) for i, t in outputs.items()]
        picks = _picks(batch, next(iter(outputs.values())).device)
        collector = Collector(sites, batch, picks)
        _compat.set_versions_to_zero(states)
        try:
            with collecting(collector), _compat.keeping_graphs():
                torch.autograd.grad(
                    list(outputs.values()), list(weights), seeds, True, allow_unused=True
                )
        except RuntimeError as error:
            self.why = f"the extra backward failed ({type(error).__name__}: {error})"
            return
        for site, one in collector.taken.items():
            self._taken.setdefault(site, deque(maxlen=KEPT)).append(one)
        self._refused.update(collector.refused)
        self.why = "no gradient of the logits reaches it (or its weight takes none)"

    def nats(self, site: str, kernel: str, w: Tensor) -> float:
        """Predicted loss of `kernel` in the forward of `site`: w (N, K). Raises NoScoreError."""
        held = self._taken.get(site)
        if not held:
            raise NoScoreError(self._refused.get(site, self.why))
        return gauss_newton.taken_score(kernel, w, held)


def _picks(batch: int, device: torch.device) -> Tensor:
    """int64: samples to keep, spread over the batch, none of them excluded by the user."""
    rows = torch.arange(batch, device=device)
    wanted = user_rows.wanted(batch, device)
    if wanted is not None:
        rows = rows[wanted]
    count = min(SAMPLES, rows.numel())
    order = torch.arange(count, device=device) * rows.numel() // max(count, 1)
    return rows[order]


def within(
    choose: Callable[[float], Any], replay: Callable[[Any], float | None], budget: float
) -> tuple[Any, float | None]:
    """What `choose` makes of a budget that its own replay keeps, and the replayed loss.

    choose: a budget in nats -> an assignment whose predicted loss is within it. replay: the loss
    of an assignment as a whole, None where it cannot be had. Sites do not add up exactly (0.9 to
    1.4 of the sum), so the budget to choose within shrinks until the replay is within the real one.
    """
    limit = budget
    for _ in range(ROUNDS):
        chosen = choose(limit)
        measured = replay(chosen)
        if measured is None or measured <= budget:
            return chosen, measured
        limit *= 0.9 * budget / measured
    return choose(0.0), 0.0
