"""Per-site statistics in memory, and `loka::observe`, which updates them without a host sync.

One observed tensor (a GEMM's input, or its output gradient) of shape (M, C) has three state tensors
on its device:

    rows     (R + 1, C)   R real rows, drawn from the probed batches by algorithm R; the last row is
                          a bin for candidates that lost
    moments  (5, C) fp64  mean, sum of squared deviations (Welford; Chan merge), count of exact
                          zeros, exponentially weighted mean and second moment
    scalars  (HEAD + RING) fp64: counters below, then a ring of per-batch maxima

The batch maximum is an order statistic of the batch: no model of single rows can predict it, and
tensorwise scaling stands or falls with it, so it is recorded as such.

Rows that hold a NaN or inf are counted and kept out of everything else. In `rows` they take their
place as they are and are left out when it is read: which row lies in which slot then depends on the
position alone, and a site's input and gradient stay paired where only one of them is non-finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RESERVOIR = 256
#: Candidate rows taken from each probed batch: eight early probes fill the reservoir.
ROWS_PER_BATCH = 32
RING = 64
#: Weight of the newest probe in the exponentially weighted statistics.
EW = 0.1

BATCHES, ROWS_SEEN, NON_FINITE, CANDIDATES, ROWS_USED = range(5)
HEAD = 8

_LIBRARY = torch.library.Library("loka", "FRAGMENT")
_LIBRARY.define("observe(Tensor x, Tensor(a!) rows, Tensor(b!) moments, Tensor(c!) scalars) -> ()")


@dataclass(frozen=True)
class Statistics:
    """The state of one observed tensor with `features` = C."""

    rows: Tensor
    moments: Tensor
    scalars: Tensor

    @classmethod
    def empty(cls, features: int, dtype: torch.dtype, device: torch.device) -> Statistics:
        kept = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
        return cls(
            torch.zeros((RESERVOIR + 1, features), dtype=kept, device=device),
            torch.zeros((5, features), dtype=torch.float64, device=device),
            torch.zeros((HEAD + RING,), dtype=torch.float64, device=device),
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return (self.rows, self.moments, self.scalars)

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

    def mean(self) -> Tensor:
        return self.moments[0]

    def variance(self) -> Tensor:
        """Unbiased, per feature; zero before two rows."""
        return self.moments[1] / max(self.scalars[ROWS_USED].item() - 1, 1)

    def zero_share(self) -> Tensor:
        return self.moments[2] / max(self.scalars[ROWS_USED].item(), 1)

    def summary(self) -> dict[str, float]:
        maxima = self.batch_maxima()
        return {
            "batches": self.batches,
            "rows": int(self.scalars[ROWS_SEEN].item()),
            "non_finite": int(self.scalars[NON_FINITE].item()),
            "mean": float(self.mean().mean()),
            "std": math.sqrt(float(self.variance().mean())),
            "amax": float(maxima.max()) if maxima.numel() else 0.0,
            "zero_share": float(self.zero_share().mean()),
        }


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


def _observe(x: Tensor, rows: Tensor, moments: Tensor, scalars: Tensor) -> None:
    with torch.no_grad():
        # Through aliases with version counters of their own: a backward that saved the state may
        # run twice, or after another one of the same site, and autograd would refuse it.
        rows, moments, scalars = rows.data, moments.data, scalars.data
        x = x.detach().reshape(-1, x.shape[-1])
        if x.shape[0] == 0:
            return
        x = x.to(torch.float32)
        finite = torch.isfinite(x).all(dim=1)
        used = finite.sum()
        clean = torch.where(finite.unsqueeze(1), x, 0.0)
        _keep_rows(x, rows, scalars)
        _merge_moments(clean, finite, used, moments, scalars)
        slot = HEAD + scalars[BATCHES].long() % RING
        scalars.index_copy_(0, slot.reshape(1), clean.abs().amax().double().reshape(1))
        scalars[BATCHES] += 1
        scalars[ROWS_SEEN] += x.shape[0]
        scalars[NON_FINITE] += x.numel() - torch.isfinite(x).sum()
        scalars[ROWS_USED] += used


def _keep_rows(x: Tensor, rows: Tensor, scalars: Tensor) -> None:
    m = x.shape[0]
    count = min(ROWS_PER_BATCH, m)
    order = torch.arange(count, device=x.device)
    offset = (_uniform(scalars[BATCHES].long()) * m).long()
    picked = (order * m // count + offset) % m
    position = scalars[CANDIDATES].long() + order
    drawn = (_uniform(position + 0x51ED) * (position + 1)).long()
    slot = torch.where(position < RESERVOIR, position, drawn)
    slot = torch.where(slot < RESERVOIR, slot, RESERVOIR)
    # Of two candidates for one slot the later wins: a race would mix two rows into one.
    later = (slot.unsqueeze(0) == slot.unsqueeze(1)) & (order.unsqueeze(0) > order.unsqueeze(1))
    slot = torch.where(later.any(dim=1), RESERVOIR, slot)
    rows.index_copy_(0, slot, x[picked].to(rows.dtype))
    scalars[CANDIDATES] += count


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


def merge(a: Statistics, b: Statistics) -> Statistics:
    """Chan merge of two ranks' statistics; reservoirs are mixed in proportion to their rows."""
    out = Statistics(*(t.clone() for t in a.tensors))
    na, nb = a.scalars[ROWS_USED], b.scalars[ROWS_USED]
    total = (na + nb).clamp(min=1)
    delta = b.moments[0] - a.moments[0]
    out.moments[0] = a.moments[0] + delta * nb / total
    out.moments[1] = a.moments[1] + b.moments[1] + delta * delta * na * nb / total
    out.moments[2] = a.moments[2] + b.moments[2]
    out.moments[3:] = (a.moments[3:] * na + b.moments[3:] * nb) / total
    out.scalars[:HEAD] = a.scalars[:HEAD] + b.scalars[:HEAD]
    # Alternately, so that where both rings are full neither rank's large batches are dropped.
    ma, mb = a.batch_maxima(), b.batch_maxima()
    shared = min(ma.numel(), mb.numel())
    maxima = torch.stack([ma[:shared], mb[:shared]], dim=1).flatten()
    maxima = torch.cat([maxima, ma[shared:], mb[shared:]])[:RING]
    out.scalars[HEAD:] = 0
    out.scalars[HEAD : HEAD + maxima.numel()] = maxima
    # By rows seen, which a site's input and gradient have in common: the pair merges alike.
    sa, sb = float(a.scalars[ROWS_SEEN]), float(b.scalars[ROWS_SEEN])
    ra, rb = a.drawn(), b.drawn()
    take = round(sb / max(sa + sb, 1.0) * min(RESERVOIR, ra.shape[0] + rb.shape[0]))
    take = min(max(take, RESERVOIR - ra.shape[0]), rb.shape[0])
    keep = min(RESERVOIR - take, ra.shape[0])
    out.rows[: keep + take] = torch.cat([ra[:keep], rb[:take]])
    return out


_LIBRARY.impl("observe", _observe, "CompositeExplicitAutograd")


@torch.library.register_fake("loka::observe", lib=_LIBRARY)
def _(x, rows, moments, scalars):
    return None
