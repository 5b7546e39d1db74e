"""Per-site statistics in memory, and how a batch updates them without a host sync.

One observed tensor (a GEMM's input, or its output gradient) of shape (M, C) has three state tensors
on its device:

    rows     (R + 1, C)   R real rows, drawn from the probed batches by algorithm R; the last row is
                          a bin for candidates that lost
    moments  (5, C) fp64  mean, sum of squared deviations (Welford; Chan merge), count of exact
                          zeros, exponentially weighted mean and second moment
    scalars  (HEAD + 2 RING) fp64: counters and maxima below, then rings of each batch's maximum and
             of its root mean square

An output gradient has three more: `coherence (COHERENCES, C)` of the last batches
(`probe/coherence.py`), and the `sketch` and `marks` of some of them (`probe/sketch.py`).

The batch maximum is an order statistic of the batch: no model of single rows can predict it, and
tensorwise scaling stands or falls with it, so it is recorded as such.

Rows that hold a NaN or inf are counted and kept out of everything else. In `rows` they take their
place as they are and are left out when it is read: which row lies in which slot then depends on the
position alone, and a site's input and gradient stay paired where only one of them is non-finite.
Rows that the user excludes (`probe/rows.py`) are treated alike, and not counted as non-finite.

On a GPU four Triton kernels do the update (`kernels/observe.py`); `observe_ref` is the definition.
Both read what comes as FP32, doubles too: those never run in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
from torch import Tensor

from loka_compile.probe import rows as user_rows
from loka_compile.probe import sketch as sk
from loka_compile.probe.covariance import accumulate
from loka_compile.probe.forwards import Pairing

RESERVOIR = 256
#: Candidate rows taken from each probed batch: eight early probes fill the reservoir.
ROWS_PER_BATCH = 32
RING = 64
#: Batches whose coherence is kept: what differs most from batch to batch takes the most of them.
#: Of wide gradients fewer, down to RING: no more than so many numbers.
COHERENCES = 256
COHERENCE_SIZE = 1 << 21
#: Weight of the newest probe in the exponentially weighted statistics.
EW = 0.1

#: Counters, then the plain and the exponentially weighted maximum of |x| over the probed batches.
BATCHES, ROWS_SEEN, NON_FINITE, CANDIDATES, ROWS_USED, EXCLUDED, AMAX, AMAX_EW = range(8)
HEAD = 8
SCALARS = HEAD + 2 * RING
COUNTERS = (BATCHES, ROWS_SEEN, NON_FINITE, CANDIDATES, ROWS_USED, EXCLUDED)


@dataclass(frozen=True)
class Statistics:
    """The state of one observed tensor with `features` = C."""

    rows: Tensor
    moments: Tensor
    scalars: Tensor
    #: Gradients only: see `probe/coherence.py`.
    coherence: Tensor | None = None
    #: Gradients only: see `probe/sketch.py`.
    sketch: Tensor | None = None
    marks: Tensor | None = None
    #: Inputs only, on request: (C, C) fp64, scatter about the mean (see `probe/covariance.py`).
    scatter: Tensor | None = None
    #: Gradients only: which input each of them belongs to, see `probe/pairing.py`.
    pairing: Pairing | None = field(default=None, compare=False)

    @classmethod
    def empty(
        cls,
        features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        gradient: bool = False,
        covariance: bool = False,
    ) -> Statistics:
        kept = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
        sketch, marks = sk.empty(kept, device) if gradient else (None, None)
        return cls(
            torch.zeros((RESERVOIR + 1, features), dtype=kept, device=device),
            torch.zeros((5, features), dtype=torch.float64, device=device),
            torch.zeros((SCALARS,), dtype=torch.float64, device=device),
            torch.full(
                (coherences(features), features), math.nan, dtype=torch.float32, device=device
            )
            if gradient
            else None,
            sketch,
            marks,
            torch.zeros((features, features), dtype=torch.float64, device=device)
            if covariance
            else None,
            Pairing() if gradient else None,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of the state, in order."""
        further = (self.coherence, self.sketch, self.marks, self.scatter)
        return (self.rows, self.moments, self.scalars, *(t for t in further if t is not None))

    def like(self, tensors: Sequence[Tensor]) -> Statistics:
        """Other statistics of the same parts: `tensors` in the order of `self.tensors`."""
        rest = list(tensors[3:])
        own = (self.coherence, self.sketch, self.marks, self.scatter)
        rows, moments, scalars = tensors[:3]
        coherence, sketch, marks, scatter = (None if t is None else rest.pop(0) for t in own)
        # What comes next to the one is nothing to the other.
        pairing = None if self.pairing is None else Pairing(mixed=self.pairing.mixed)
        return Statistics(
            rows, moments, scalars, coherence, sketch, marks, scatter, pairing=pairing
        )

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def features(self) -> int:
        return self.moments.shape[1]

    @property
    def batches(self) -> int:
        return int(self.scalars[BATCHES].item())

    def drawn(self) -> Tensor:
        """(up to R, C): every row drawn, non-finite ones included; slot by slot as in the pair."""
        return self.rows[: min(RESERVOIR, int(self.scalars[CANDIDATES].item()))]

    def reservoir(self) -> Tensor:
        """(up to R, C): the finite rows held."""
        rows = self.drawn()
        return rows[torch.isfinite(rows).all(dim=1)]

    def batch_maxima(self) -> Tensor:
        """(up to RING,) fp32: max |x| of the last probed batches."""
        return self.scalars[HEAD : HEAD + min(RING, self.batches)].float()

    def batch_rms(self) -> Tensor:
        """(up to RING,) fp32: root mean square of the last probed batches, in the same slots."""
        first = HEAD + RING
        return self.scalars[first : first + min(RING, self.batches)].float()

    def recorded_coherence(self) -> Tensor | None:
        """(batches, C): coherence of the weight's gradient in each probed batch that has one."""
        if self.coherence is None:
            return None
        held = self.coherence[: min(self.coherence.shape[0], self.batches)]
        held = held[torch.isfinite(held).any(dim=1)]
        return held if held.shape[0] else None

    def mean(self) -> Tensor:
        return self.moments[0]

    def variance(self) -> Tensor:
        """Unbiased, per feature; zero before two rows."""
        return self.moments[1] / max(self.scalars[ROWS_USED].item() - 1, 1)

    def covariance(self) -> Tensor | None:
        """(C, C) fp64, unbiased; None where only its diagonal is kept."""
        if self.scatter is None:
            return None
        return self.scatter / max(self.scalars[ROWS_USED].item() - 1, 1)

    def zero_share(self) -> Tensor:
        return self.moments[2] / max(self.scalars[ROWS_USED].item(), 1)

    def weighted_mean(self) -> Tensor:
        """Per feature, the newest probe with weight EW."""
        return self.moments[3]

    def weighted_variance(self) -> Tensor:
        """Per feature, about the weighted mean; forgets old probes, which `variance` never does."""
        return (self.moments[4] - self.moments[3] ** 2).clamp(min=0)

    def rms(self) -> float:
        """Exponentially weighted root mean square over all features."""
        return math.sqrt(float(self.moments[4].mean()))

    def summary(self) -> dict[str, float]:
        """Plain numbers for headers, logs and tables; one host sync."""
        head = self.scalars[:HEAD].tolist()
        return {
            "batches": int(head[BATCHES]),
            "rows": int(head[ROWS_SEEN]),
            "excluded_rows": int(head[EXCLUDED]),
            "non_finite": int(head[NON_FINITE]),
            "mean": float(self.mean().mean()),
            "std": math.sqrt(float(self.variance().mean())),
            "rms_weighted": self.rms(),
            "std_weighted": math.sqrt(float(self.weighted_variance().mean())),
            "amax": head[AMAX],
            "amax_weighted": head[AMAX_EW],
            "zero_share": float(self.zero_share().mean()),
        }


def coherences(features: int) -> int:
    """Batches whose coherence is kept of a gradient of so many features."""
    return max(RING, min(COHERENCES, COHERENCE_SIZE // max(features, 1)))


def _uniform(counter: Tensor) -> Tensor:
    """int64 counters -> fp64 in [0, 1): the same numbers on every device and in every run.

    The hash is by position only, so that a site's input and its gradient, observed in the same
    steps, keep the same rows and stay paired for wgrad.
    """
    h = (counter * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = h ^ (h >> shift)
        h = (h * factor) & 0xFFFFFFFF
    return (h ^ (h >> 16)).to(torch.float64) / 2.0**32


def update(x: Tensor, held: Statistics, ahead: Statistics | None = None) -> None:
    """Record the batch x (..., C); rows that the user excludes are left out. ahead: state that has
    recorded this batch already, and last of all: rows go where its rows lie."""
    x = flat(x)
    if x.shape[0] == 0:
        return
    wanted = user_rows.wanted(x.shape[0], x.device)
    if held.scatter is not None:
        with torch.no_grad():
            # First: it needs the mean and the count of the batches before this one.
            accumulate(x, wanted, held.mean(), held.scalars[ROWS_USED], held.scatter.data)
    state = (held.rows, held.moments, held.scalars)
    if x.is_cuda:
        from loka_compile.kernels.observe import observe

        counters = None if ahead is None else ahead.scalars
        observe(x, wanted, *state, ahead=counters, candidates=ROWS_PER_BATCH, weight=EW)
        return
    with torch.no_grad():
        # Aliases with version counters of their own: a loop under way may have saved them.
        counters = None if ahead is None else ahead.scalars.data
        rows, moments, scalars = (t.data for t in state)
        observe_ref(x, wanted, rows, moments, scalars, counters)


def flat(x: Tensor) -> Tensor:
    """(..., C) -> (M, C), beside autograd; no view of what is so already: those take host time."""
    if x.requires_grad:
        x = x.detach()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def observe_ref(
    x: Tensor,
    wanted: Tensor | None,
    rows: Tensor,
    moments: Tensor,
    scalars: Tensor,
    ahead: Tensor | None = None,
) -> None:
    """x (M, C); wanted: bool (M,), False for rows to leave out, or None; ahead: scalars of state
    that has recorded this batch already. Updates the state; a batch without rows leaves it as it
    is."""
    if x.shape[0] == 0:
        return
    x = x.to(torch.float32)
    finite = torch.isfinite(x)
    good = finite.all(dim=1)
    broken = x.shape[0] * x.shape[1] - finite.sum()
    excluded = torch.zeros((), dtype=torch.int64, device=x.device)
    if wanted is not None:
        excluded = (~wanted).sum()
        broken = (~finite & wanted.unsqueeze(1)).sum()
        good = good & wanted
        x = torch.where(wanted.unsqueeze(1), x, float("nan"))
    used = good.sum()
    clean = torch.where(good.unsqueeze(1), x, 0.0)
    count = min(ROWS_PER_BATCH, x.shape[0])
    number, first = scalars[BATCHES].long(), scalars[CANDIDATES].long()
    if ahead is not None:
        number, first = ahead[BATCHES].long() - 1, ahead[CANDIDATES].long() - count
    keep_rows(x, rows, number, first)
    scalars[CANDIDATES] = first + count
    _merge_moments(clean, good, used, moments, scalars)
    amax = clean.abs().amax().double()
    slot = HEAD + scalars[BATCHES].long() % RING
    square = (clean * clean).sum(dtype=torch.float64) / (used.clamp(min=1) * x.shape[1])
    both = torch.stack([amax, square.sqrt()])
    scalars.index_copy_(0, torch.stack([slot, slot + RING]), both)
    weight = torch.where(scalars[BATCHES] == 0, 1.0, EW)
    scalars[AMAX] = torch.maximum(scalars[AMAX], amax)
    scalars[AMAX_EW] += (amax - scalars[AMAX_EW]) * weight
    scalars[BATCHES] += 1
    scalars[ROWS_SEEN] += x.shape[0]
    scalars[NON_FINITE] += broken
    scalars[ROWS_USED] += used
    scalars[EXCLUDED] += excluded


def keep_rows(
    x: Tensor,
    rows: Tensor,
    number: Tensor,
    first: Tensor,
    *,
    behind: int = 0,
    wanted: Tensor | None = None,
) -> None:
    """Offer some rows of x (M, C), M > 0, to the reservoir. number, first: int64 (), batches and
    candidates before this one. behind: candidates that were offered since, whose places are not
    taken from them. wanted: bool (M,), False for rows that are left out, or None."""
    m = x.shape[0]
    count = min(ROWS_PER_BATCH, m)
    order = torch.arange(count, device=x.device)
    offset = (_uniform(number) * m).long()
    picked = (order * m // count + offset) % m
    some = x[picked].to(rows.dtype)
    if wanted is not None:
        some = torch.where(wanted[picked].unsqueeze(1), some, float("nan"))
    rows.index_copy_(0, slots(first, count, behind), some)


def slots(first: Tensor, count: int, behind: int = 0) -> Tensor:
    """int64 (count,): where the candidates from the `first`th on go; RESERVOIR, the bin, where they
    are not taken, or lost their place to one of the `behind` candidates after them."""
    order = torch.arange(count + behind, device=first.device)
    position = first + order
    drawn = (_uniform(position + 0x51ED) * (position + 1)).long()
    slot = torch.where(position < RESERVOIR, position, drawn)
    slot = torch.where(slot < RESERVOIR, slot, RESERVOIR)
    # Of two candidates for one slot the later wins: a race would mix two rows into one.
    own = slot[:count].unsqueeze(1)
    later = (own == slot.unsqueeze(0)) & (order.unsqueeze(0) > order[:count].unsqueeze(1))
    return torch.where(later.any(dim=1), RESERVOIR, slot[:count])


def _merge_moments(
    clean: Tensor, finite: Tensor, used: Tensor, moments: Tensor, scalars: Tensor
) -> None:
    n = used.double()
    safe = n.clamp(min=1)
    mean = (clean.sum(0, dtype=torch.float64)) / safe
    near = mean.float()
    centred = torch.where(finite.unsqueeze(1), clean - near, 0.0)
    deviation = (centred * centred).sum(0, dtype=torch.float64)
    # Taken about the mean rounded to FP32: the shift matters where the mean dwarfs the spread.
    deviation = (deviation - n * (mean - near) ** 2).clamp(min=0)
    before = scalars[ROWS_USED]
    total = (before + n).clamp(min=1)
    delta = mean - moments[0]
    moments[0] += delta * (n / total)
    moments[1] += deviation + delta * delta * (before * n / total)
    moments[2] += ((clean == 0) & finite.unsqueeze(1)).sum(0)
    # The first probe with a finite row sets the weighted statistics, later ones pull at them.
    weight = torch.where(before == 0, 1.0, EW) * (n > 0)
    moments[3] += (mean - moments[3]) * weight
    moments[4] += (deviation / safe + mean * mean - moments[4]) * weight
