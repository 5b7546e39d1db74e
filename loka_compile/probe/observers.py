"""What stands in a graph that observes: `loka::observe` and `loka::observe_coherence`.

    observe            x or an output's gradient -> its statistics
    observe_coherence  a weight's gradient, beside what it was made of -> how coherent it is
    observe_chain      both for a fused chain, whose gradient before BlockNorm nobody writes: it is
                       computed here, at a site that is asked

An input that a fused chain hands over as e4m3 is written nowhere else: `x` is then the u that the
chain keeps for its backward, and the value is act(gain * u), which is made at a site that is asked.

All find the state by `cell` (`places.py`). They return before they launch anything at a site that
rests, and in the extra backward of the Gauss-Newton score, whose collector is given the operands.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering import direct_calls
from loka_compile.probe import chains
from loka_compile.probe import coherence
from loka_compile.probe import extra_backward
from loka_compile.probe import pairing
from loka_compile.probe import places
from loka_compile.probe import statistics
from loka_compile.probe.forwards import Forward
from loka_compile.probe.places import Place

_LIBRARY = torch.library.Library("loka", "FRAGMENT")
_MADE = "Tensor? x_gain=None, str x_act=''"
_LIBRARY.define(f"observe(Tensor x, Tensor cell, Tensor(a!) order, {_MADE}) -> ()")
_LIBRARY.define(
    "observe_coherence(Tensor gw, Tensor gy, Tensor x, Tensor cell, Tensor(a!) order, "
    f"{_MADE}) -> ()"
)

_LIBRARY.define(
    "observe_chain(Tensor gw, Tensor gy, Tensor u, Tensor r, Tensor? gain, int block, str act, "
    f"bool gate, Tensor x, Tensor cell, Tensor(a!) order, {_MADE}) -> ()"
)


_runs = threading.local()


@contextlib.contextmanager
def forward_of(forward: Forward | None, *, again: bool) -> Iterator[None]:
    """Inside runs the forward that `forward` stands for; None: no gradients will come, or nobody
    can say whose they are. again: a checkpoint runs it a second time, whose inputs the first one
    has recorded. Gradients come but once."""
    before = getattr(_runs, "now", (None, False))
    _runs.now = forward if forward is not None and forward.named else None, again
    try:
        yield
    finally:
        _runs.now = before


def set_around(observe: Callable[[Callable[[], None]], None] | None) -> None:
    """From here on, in this thread, `observe` is given what observers would do, and does it."""
    _runs.around = observe


def _asked(cell: Tensor) -> Place | None:
    place = places.at(cell)
    return None if place is None or place.rests else place


def _observe(
    x: Tensor, cell: Tensor, order: Tensor, x_gain: Tensor | None = None, x_act: str = ""
) -> None:
    if (place := _asked(cell)) is not None:
        _record(chains.value_of(x, x_gain, x_act), place)


def _record(x: Tensor, place: Place) -> None:
    if extra_backward.collector() is not None:
        return
    forward, again = getattr(_runs, "now", (None, False))
    if again:
        return
    if place.other is None:
        statistics.update(x, place.held)
    elif place.is_gradient:
        pairing.record_gradient(x, place.held, place.other, place.passing)
    else:
        pairing.record_input(x, place.held, place.other, forward)


def _observe_coherence(
    gw: Tensor,
    gy: Tensor,
    x: Tensor,
    cell: Tensor,
    order: Tensor,
    x_gain: Tensor | None = None,
    x_act: str = "",
) -> None:
    if (place := _asked(cell)) is not None:
        _record_coherence(gw, gy, chains.value_of(x, x_gain, x_act), place)


def _record_coherence(gw: Tensor, gy: Tensor, x: Tensor, place: Place) -> None:
    collector = extra_backward.collector()
    if collector is None:
        coherence.update(gw, gy, x, place.held)
    else:
        collector.take(place.held, gy, x)


def _observe_chain(
    gw: Tensor,
    gy: Tensor,
    u: Tensor,
    r: Tensor,
    gain: Tensor | None,
    block: int,
    act: str,
    gate: bool,
    x: Tensor,
    cell: Tensor,
    order: Tensor,
    x_gain: Tensor | None = None,
    x_act: str = "",
) -> None:
    if (place := _asked(cell)) is not None:
        gz = chains.gradient_of(gy, u, r, gain, block, act, gate)
        _record(gz, place)
        _record_coherence(gw, gz, chains.value_of(x, x_gain, x_act), place)


def _timed(run: Callable[..., None]) -> Callable[..., None]:
    def observed(*args: object, **named: object) -> None:
        around_it = getattr(_runs, "around", None)
        if around_it is None:
            run(*args, **named)
        else:
            around_it(lambda: run(*args, **named))

    return observed


_RUNS: dict[str, Callable[..., None]] = {
    "observe": _timed(_observe),
    "observe_coherence": _timed(_observe_coherence),
    "observe_chain": _timed(_observe_chain),
}
for _name, _run in _RUNS.items():
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    # Most calls are of sites that rest: through the dispatcher those took the most.
    direct_calls.register(_name, cuda=_run, cpu=_run)


@_compat.register_fake("loka::observe", _LIBRARY)
def _(x, cell, order, x_gain=None, x_act=""):
    return None


@_compat.register_fake("loka::observe_chain", _LIBRARY)
def _(gw, gy, u, r, gain, block, act, gate, x, cell, order, x_gain=None, x_act=""):
    return None


@_compat.register_fake("loka::observe_coherence", _LIBRARY)
def _(gw, gy, x, cell, order, x_gain=None, x_act=""):
    return None
