"""Columns of whole probed batches: what no rows can show of a sum over a batch.

    gw_n = sum_m gy_mn x_m       error of row n: sum over the batch too

Whether the error of that sum is noise (grows like sqrt(M)) or an offset (grows like M), and how the
largest value of a column bounds its scale, is seen on all M rows only. So of each probed batch all
rows of a few columns are kept:

    sketch (ROWS, GY + X)          a ring: batches one behind the other, each in consecutive rows,
                                   GY columns of the output gradient beside X columns of the input
    marks  (SLOTS + 1, WIDTH) fp64 per batch: first row, rows (0: none), batch maxima of x and gy,
                                   weight of each of the X columns; last: where the next one goes

Columns of gy are spread evenly. Columns of x are drawn in proportion to their energy (estimated on
some rows of the batch, a tenth of the chance being equal for all) and weigh 1 / chance, so that
weighted sums over them estimate sums over all K without bias.

A batch longer than the ring is kept up to its end. It holds a user's data: like rows, it reaches
the disk only on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 32768
SLOTS = 64
GY, X = 16, 32
FIRST, LENGTH, X_AMAX, GY_AMAX, WEIGHTS = range(5)
WIDTH = WEIGHTS + X
#: Rows on which the energy of the input's columns is estimated.
ENERGY_ROWS = 256
#: Share of a column's chance that its energy says nothing about.
EVEN = 0.1


@dataclass(frozen=True)
class Sketch:
    """All rows of one batch: gy (M, GY), x (M, X), fp64 weight (X,) of x's columns, maxima ()."""

    gy: Tensor
    x: Tensor
    weights: Tensor
    x_amax: Tensor
    gy_amax: Tensor


def empty(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for batches, without any: (sketch, marks)."""
    return (
        torch.zeros((ROWS, GY + X), dtype=dtype, device=device),
        torch.zeros((SLOTS + 1, WIDTH), dtype=torch.float64, device=device),
    )


def sketches(sketch: Tensor, marks: Tensor) -> Iterator[Sketch]:
    """The batches held, without those that a non-finite value is in."""
    for row in marks[:SLOTS].cpu().unbind(0):
        first, length = int(row[FIRST]), int(row[LENGTH])
        held = sketch[first : first + length]
        if length == 0 or not bool(torch.isfinite(held).all() & torch.isfinite(row).all()):
            continue
        amax = row[[X_AMAX, GY_AMAX]].float().to(sketch.device)
        weights = row[WEIGHTS:].to(sketch.device)
        yield Sketch(held[:, :GY], held[:, GY:], weights, amax[0], amax[1])


def record_ref(
    gy: Tensor, x: Tensor, start: Tensor, sketch: Tensor, marks: Tensor, amax: Tensor
) -> None:
    """gy (M, N), x (M, K), M > 0; start: fp64 () in [0, 1), offset of the draws; amax: fp32 (2,),
    maxima of x and gy. Updates sketch and marks in place, without a host sync."""
    m, n = gy.shape
    k = x.shape[1]
    order = torch.arange(X, device=x.device)
    some = x[:: -(-m // ENERGY_ROWS)].double()
    energy = torch.nan_to_num((some * some).sum(0), nan=0.0, posinf=0.0)
    total = energy.sum()
    # With an equal share for each; of an input that is zero all chances are equal.
    chance = torch.where(total > 0, energy / total, 1.0 / k) * (1 - EVEN) + EVEN / k
    reached = chance.cumsum(0)
    targets = (order + start) / X * reached[-1]
    columns = (reached.unsqueeze(0) <= targets.unsqueeze(1)).sum(1).clamp(max=k - 1)
    weights = reached[-1] / (X * chance[columns])
    rows_of_gw = ((torch.arange(GY, device=x.device) + start) * n / GY).long().clamp(max=n - 1)
    length = min(m, ROWS)
    at = marks[SLOTS, 0].clone()
    first = torch.where(at + length > ROWS, 0.0, at)
    slot = (marks[SLOTS, 1] % SLOTS).long()
    # What the new rows overwrite is gone.
    own = marks[:SLOTS]
    hit = (own[:, FIRST] < first + length) & (own[:, FIRST] + own[:, LENGTH] > first)
    own[:, LENGTH] = torch.where(hit, 0.0, own[:, LENGTH])
    head = torch.stack([first, torch.full_like(first, length), *amax.double().unbind()])
    marks.index_copy_(0, slot.reshape(1), torch.cat([head, weights]).unsqueeze(0))
    marks[SLOTS, 0] = first + length
    marks[SLOTS, 1] += 1
    both = torch.cat(
        [gy[:length, rows_of_gw].to(sketch.dtype), x[:length, columns].to(sketch.dtype)], 1
    )
    sketch.index_copy_(0, first.long() + torch.arange(length, device=x.device), both)


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Batches of two ranks in one ring, alternately, as many as there is room for."""
    sketch, marks = torch.zeros_like(one[0]), torch.zeros_like(one[1])
    lists = [list(_newest(*held)) for held in (one, other)]
    at = count = 0
    for number in range(max(map(len, lists))):
        for held in lists:
            if number >= len(held):
                continue
            rows, row = held[number]
            if count == SLOTS or at + rows.shape[0] > ROWS:
                continue
            sketch[at : at + rows.shape[0]] = rows
            marks[count] = row
            marks[count, FIRST] = at
            at, count = at + rows.shape[0], count + 1
    marks[SLOTS, 0], marks[SLOTS, 1] = at, count
    return sketch, marks


def _newest(sketch: Tensor, marks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    count = int(marks[SLOTS, 1])
    for number in range(count - 1, max(count - SLOTS, 0) - 1, -1):
        row = marks[number % SLOTS]
        first, length = int(row[FIRST]), int(row[LENGTH])
        if length:
            yield sketch[first : first + length], row
