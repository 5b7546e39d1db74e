"""A site's input and its gradient are recorded so that slot by slot their rows are of one sample.

The reservoir is drawn by position alone (`statistics.py`), so in the ordinary step, a forward and
then its backward, the two states agree by themselves. Where gradients come in another order than
their inputs (`forwards.py`), the gradient's rows are put where those of its own input lie, as far
as the input still holds them; after gradients that never came, by the input's counters. Rows
without a gradient are NaN in the gradient's state, and so left out when the two are read together.
Moments and maxima need no pairs: they record everything.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from loka_compile.probe import rows as user_rows
from loka_compile.probe import statistics as st
from loka_compile.probe.forwards import Forward
from loka_compile.probe.forwards import Pairing
from loka_compile.probe.forwards import Passing
from loka_compile.probe.forwards import Seen
from loka_compile.probe.statistics import Statistics


def record_input(
    x: Tensor, held: Statistics, gradient: Statistics, forward: Forward | None
) -> None:
    """x (..., K) of a site whose gradient's state is `gradient`; forward: None where nobody says
    which one it is."""
    pairing = gradient.pairing
    rows = math.prod(x.shape[:-1])
    if pairing is None or rows == 0:
        return st.update(x, held)
    for seen in pairing.lost():
        _void(seen, held, gradient, pairing)
    st.update(x, held)
    pairing.saw_input(min(st.ROWS_PER_BATCH, rows), forward)


def record_gradient(gy: Tensor, held: Statistics, x: Statistics, passing: Passing) -> None:
    """gy (..., N) of the site whose input's state is x."""
    pairing = held.pairing
    rows = math.prod(gy.shape[:-1])
    if pairing is None or rows == 0:
        return st.update(gy, held)
    count = min(st.ROWS_PER_BATCH, rows)
    if not passing.known or (gy.is_cuda and torch.cuda.is_current_stream_capturing()):
        st.update(gy, held)
        return pairing.saw_gradient(pairing.covered + count)
    seen = pairing.take(passing.forward)
    if seen is not None and seen.count != count:
        seen = None
    if seen is not None and pairing.follows(seen):
        st.update(gy, held)
        return pairing.saw_gradient(pairing.covered + count)
    if seen is not None and seen.number + 1 == pairing.batches:
        # Of earlier inputs gradients are missing: the input's own counters say where its rows lie.
        if not pairing.filled:
            with torch.no_grad():
                held.rows.data.fill_(math.nan)
        st.update(gy, held, ahead=x)
        return pairing.saw_gradient(pairing.candidates)
    _apart(gy, held, x, pairing, seen)


def _apart(
    gy: Tensor, held: Statistics, x: Statistics, pairing: Pairing, seen: Seen | None
) -> None:
    """Record everything of gy but its rows, and those where the rows of its input lie."""
    st.update(gy, replace(held, rows=torch.empty_like(held.rows)))
    with torch.no_grad():
        rows = held.rows.data
        if not pairing.filled:
            rows.fill_(math.nan)
        if seen is not None:
            flat = st.flat(gy)
            wanted = user_rows.wanted(flat.shape[0], flat.device)
            number, first = _counters(seen, x, pairing)
            st.keep_rows(flat, rows, number, first, behind=pairing.behind(seen), wanted=wanted)
        # Slots of inputs whose gradient has not come hold NaN, or are left out by `unpaired`.
        at = st.CANDIDATES
        held.scalars.data[at].copy_(x.scalars[at])
    pairing.saw_gradient(pairing.candidates)


def _void(seen: Seen, x: Statistics, held: Statistics, pairing: Pairing) -> None:
    """No gradient belongs to these rows of the input."""
    if not pairing.filled:
        return
    with torch.no_grad():
        slots = _slots(seen, x, pairing)
        held.rows.data.index_fill_(0, slots, math.nan)


def unpaired(x: Statistics, gy: Statistics) -> Tensor | None:
    """int64: slots of x whose rows have no gradient in gy (yet); None where there are none."""
    pairing = gy.pairing
    if pairing is None or not pairing.open:
        return None
    return torch.cat([_slots(seen, x, pairing) for seen in pairing.open])


def _slots(seen: Seen, x: Statistics, pairing: Pairing) -> Tensor:
    """int64 (count,): where the candidates of an input lie; the bin where they were replaced."""
    _, first = _counters(seen, x, pairing)
    return st.slots(first, seen.count, pairing.behind(seen))


def _counters(seen: Seen, x: Statistics, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """x's counters, as they were before this input: on the device, by what has come since."""
    number = x.scalars[st.BATCHES] - (pairing.batches - seen.number)
    first = x.scalars[st.CANDIDATES] - (pairing.candidates - seen.first)
    return number.long(), first.long()
