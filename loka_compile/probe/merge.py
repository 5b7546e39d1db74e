"""Statistics of several ranks as one: Chan's merge, exact, and equal on every rank.

    n = na + nb,  d = mean_b - mean_a,  mean = mean_a + d nb / n,  S = S_a + S_b + d d na nb / n

At save time, never per probe. Raw second moments are never summed: in FP32 that loses everything
where the mean dwarfs the spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from loka_compile.probe import sketch as sk
from loka_compile.probe.statistics import AMAX
from loka_compile.probe.statistics import AMAX_EW
from loka_compile.probe.statistics import COUNTERS
from loka_compile.probe.statistics import HEAD
from loka_compile.probe.statistics import RESERVOIR
from loka_compile.probe.statistics import RING
from loka_compile.probe.statistics import ROWS_SEEN
from loka_compile.probe.statistics import ROWS_USED
from loka_compile.probe.statistics import Statistics


def merge(a: Statistics, b: Statistics) -> Statistics:
    """Chan merge of two ranks' statistics; reservoirs are mixed in proportion to their rows."""
    out = a.like([t.clone() for t in a.tensors])
    na, nb = a.scalars[ROWS_USED], b.scalars[ROWS_USED]
    total = (na + nb).clamp(min=1)
    delta = b.moments[0] - a.moments[0]
    out.moments[0] = a.moments[0] + delta * nb / total
    out.moments[1] = a.moments[1] + b.moments[1] + delta * delta * na * nb / total
    out.moments[2] = a.moments[2] + b.moments[2]
    out.moments[3:] = (a.moments[3:] * na + b.moments[3:] * nb) / total
    if a.scatter is None or b.scatter is None:
        out = replace(out, scatter=None)
    elif out.scatter is not None:
        out.scatter.add_(b.scatter).addr_(delta, delta * (na * nb / total))
    for one in COUNTERS:
        out.scalars[one] = a.scalars[one] + b.scalars[one]
    out.scalars[AMAX] = torch.maximum(a.scalars[AMAX], b.scalars[AMAX])
    out.scalars[AMAX_EW] = (a.scalars[AMAX_EW] * na + b.scalars[AMAX_EW] * nb) / total
    # Alternately, so that where both rings are full neither rank's large batches are dropped.
    ma, mb = a.batch_maxima(), b.batch_maxima()

    def mixed(one: Tensor, other: Tensor) -> Tensor:
        shared = min(one.shape[0], other.shape[0])
        both = torch.stack([one[:shared], other[:shared]], dim=1).flatten(0, 1)
        return torch.cat([both, one[shared:], other[shared:]])

    maxima, rms = mixed(ma, mb)[:RING], mixed(a.batch_rms(), b.batch_rms())[:RING]
    out.scalars[HEAD:] = 0
    out.scalars[HEAD : HEAD + maxima.numel()] = maxima
    out.scalars[HEAD + RING : HEAD + RING + rms.numel()] = rms
    if out.coherence is not None and a.coherence is not None and b.coherence is not None:
        room = out.coherence.shape[0]
        both = a.coherence[: min(room, a.batches)], b.coherence[: min(room, b.batches)]
        coherence = mixed(*both)[:room]
        out.coherence[: coherence.shape[0]] = coherence
    if (
        a.sketch is not None
        and a.marks is not None
        and b.sketch is not None
        and b.marks is not None
    ):
        sketch, marks = sk.merged((a.sketch, a.marks), (b.sketch, b.marks))
        out = replace(out, sketch=sketch, marks=marks)
    if out.pairing is not None and b.pairing is not None:
        out.pairing.mixed |= b.pairing.mixed
    # By rows seen, which a site's input and gradient have in common: the pair merges alike.
    sa, sb = float(a.scalars[ROWS_SEEN]), float(b.scalars[ROWS_SEEN])
    ra, rb = a.drawn(), b.drawn()
    take = round(sb / max(sa + sb, 1.0) * min(RESERVOIR, ra.shape[0] + rb.shape[0]))
    take = min(max(take, RESERVOIR - ra.shape[0]), rb.shape[0])
    keep = min(RESERVOIR - take, ra.shape[0])
    out.rows[: keep + take] = torch.cat([ra[:keep], rb[:take]])
    return out


def merge_ranks(
    state: Mapping[tuple[str, str], Statistics], group: dist.ProcessGroup | None = None
) -> dict[tuple[str, str], Statistics]:
    """`state` merged over all ranks of `group`, in rank order, so that every rank gets the same.

    A collective: every rank of the group must call it, with the same sites. Returns `state` as it
    is outside of torch.distributed.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return dict(state)
    merged = {}
    for key in sorted(state):
        held = state[key]
        # Not gathered: K^2 numbers times the ranks.
        small = replace(held, scatter=None)
        gathered: list[list[Tensor]] = []
        for tensor in small.tensors:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            gathered.append(parts)
        ranks = [small.like(parts) for parts in zip(*gathered, strict=True)]
        merged[key] = reduce(merge, ranks)
        if held.scatter is not None:
            scatter = _summed(held, merged[key].mean(), group)
            merged[key] = replace(merged[key], scatter=scatter)
    return merged


def _summed(own: Statistics, mean: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Scatter of all ranks about their common mean: S = sum_r S_r + n_r d_r d_r^T."""
    assert own.scatter is not None
    delta = own.mean() - mean
    total = own.scatter.addr(delta, delta * own.scalars[ROWS_USED])
    dist.all_reduce(total, group=group)
    return total
