"""The Probe of a process: what happens after a probed step besides the observers.

Weights are recorded, drift is watched, state is saved. Nothing here waits for the device: the
scalars of a probed step are copied to the host in the background and looked at when the next probed
step comes, so an alarm is one probe late.

Past the first probes a probed step does one of two things beside the observers, in turn: it records
the weights, which move slowly, or it estimates the error of one site's kernel.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

import torch
from torch import Tensor

from loka_compile.errors import ProbeFileError
from loka_compile.lowering.balance import StepTimes
from loka_compile.options import PROBE_STEPS
from loka_compile.probe import store
from loka_compile.probe.drift import DriftEvent
from loka_compile.probe.drift import DriftWatch
from loka_compile.probe.estimate import clamped_error
from loka_compile.probe.estimate import kernel_of
from loka_compile.probe.listing import Probed
from loka_compile.probe.listing import collect
from loka_compile.probe.listing import site_name
from loka_compile.probe.matrix_normal import MatrixNormal
from loka_compile.probe.saver import Saver
from loka_compile.probe.saver import Snapshot
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.watched import ERROR
from loka_compile.probe.watched import Looked
from loka_compile.probe.watched import Watched
from loka_compile.probe.weight_models import WeightModels
from loka_compile.probe.weights import Record

log = logging.getLogger("loka_compile")

SAVE_EVERY = 10_000
#: Estimates of a kernel's error that make its reference.
ERROR_WARMUP = 12


@dataclass(eq=False)
class Session:
    """One per probe folder (or None) and process."""

    folder: Path | None = None
    rows_on_disk: bool = False
    weight_model: str = "actual"
    save_every: int = SAVE_EVERY
    drift: DriftWatch = field(default_factory=DriftWatch)
    step: int = 0
    #: Where an earlier run stopped; 0 without one.
    resumed: int = 0
    #: First site of a graph -> what its step takes, as the last plan of it was made with.
    steps: dict[str, StepTimes] = field(default_factory=dict)
    _entries: weakref.WeakSet[Probed] = field(default_factory=weakref.WeakSet)
    _weights: dict[tuple[int, ...], Watched] = field(default_factory=dict)
    _looked: dict[tuple[int, ...], Looked] = field(default_factory=dict)
    #: The site whose error is estimated next.
    _next: dict[tuple[int, ...], int] = field(default_factory=dict)
    #: Batches of each watched series when it was last fed.
    _fed: dict[tuple[int, str, str], float] = field(default_factory=dict)
    #: Sites whose error cannot be estimated.
    _silent: set[str] = field(default_factory=set)
    _loaded: store.Loaded | None = None
    _saver: Saver | None = None
    _saved: int = 0

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        models = WeightModels() if self.weight_model == "matrix_normal" else None
        self._saver = Saver(self.folder, self.snapshot, rows=self.rows_on_disk, models=models)
        if self._saver.path.exists():
            self._loaded = store.load_all(self._saver.path)
            self.step = self.resumed = self._saved = self._loaded.step
            self.steps.update(self._loaded.steps)
            if models is not None:
                models.held.update(self._loaded.weight_models)

    # -- what runs tell ---------------------------------------------------------------------------

    def resume(self, site: str, role: str, fresh: Statistics) -> None:
        """Fill `fresh` with what an earlier run saved for this site, where the shapes agree."""
        held = None if self._loaded is None else self._loaded.statistics.get((site, role))
        if held is None or held.rows.shape != fresh.rows.shape:
            return
        if fresh.scatter is not None and held.scatter is None:
            # A covariance of the rows to come beside a mean of all of them would be neither.
            return
        for mine, saved in zip(fresh.tensors, held.tensors, strict=False):
            mine.copy_(saved)
        if fresh.pairing is not None and held.pairing is not None:
            fresh.pairing.mixed = held.pairing.mixed

    def probed(
        self, entries: Iterable[Probed], step: int, news: Sequence[Statistics] | None = None
    ) -> None:
        """A probed step of these parameters has been launched (its backward may still run).

        news: what has changed since the last one; None: any of it may have.
        """
        held = [(e, w) for e in entries if (w := e.ref()) is not None and e.statistics]
        if not held:
            return
        self.step = max(self.step, step)
        key = tuple(id(w) for _, w in held)
        known = self._weights.get(key)
        if known is not None and known.alive() is not held[0][1]:
            # Another model's, whose weights died and whose ids came back.
            self._forget(key)
            known = None
        if known is None:
            self._entries.update(e for e, _ in held)
        weights = self._weights_of(key, held)
        first, odd = weights.probes < PROBE_STEPS, weights.probes % 2 == 1
        weights.probes += 1
        if first or not odd:
            weights.record.observe([w for _, w in held])
        entries = [e for e, _ in held]
        seen = weights.named(entries, news)
        self._look(key, entries, step, seen, estimate=first or odd)
        if self._saver is not None and step // self.save_every > self._saved // self.save_every:
            self._saved = step
            self._saver.request()

    def _weights_of(self, key: tuple[int, ...], held: list[tuple[Probed, Tensor]]) -> Watched:
        if key not in self._weights:
            for gone in [k for k, one in self._weights.items() if one.alive() is None]:
                self._forget(gone)
            names = [e.name for e, _ in held]
            record = Record([w for _, w in held])
            self._weights[key] = Watched(record, names, held[0][0].ref)
        return self._weights[key]

    def _forget(self, key: tuple[int, ...]) -> None:
        del self._weights[key]
        self._looked.pop(key, None)
        self._next.pop(key, None)
        owner = hash(key)
        self._fed = {k: batches for k, batches in self._fed.items() if k[0] != owner}
        self.drift.forget(owner)

    def _look(
        self,
        key: tuple[int, ...],
        entries: list[Probed],
        step: int,
        seen: list[tuple[Statistics, tuple[str, str]]],
        estimate: bool,
    ) -> None:
        before = self._looked.pop(key, None)
        if before is not None:
            self._watch(before, hash(key))
        tensors = [one.scalars for one, _ in seen]
        erring, error = self._estimate(key, entries) if estimate else (None, None)
        if error is not None:
            tensors.append(error.double())
        if not tensors:
            return
        self._looked[key] = Looked.at([name for _, name in seen], erring, torch.cat(tensors), step)

    def _estimate(
        self, key: tuple[int, ...], entries: list[Probed]
    ) -> tuple[str | None, Tensor | None]:
        """One site whose forward runs in FP8, each time the next, and the error of it, (1,): all
        at once would be a dozen small kernels each."""
        sites = [(entry, call) for entry in entries for call in entry.sites]
        first = self._next.get(key, 0)
        for at in range(first, first + len(sites)):
            entry, call = sites[at % len(sites)]
            w, x, name = entry.ref(), entry.statistics.get((call, "x")), site_name(entry, call)
            if w is None or x is None or name in self._silent:
                continue
            kernel = kernel_of(entry.sites[call], w.device, emulated=entry.emulated)
            if kernel is None:
                continue
            self._next[key] = (at + 1) % len(sites)
            try:
                with torch.amp.autocast(w.device.type, enabled=False):
                    return name, clamped_error(kernel, w, x).reshape(1)
            except Exception as error:
                # Watching is not worth a step.
                self._silent.add(name)
                log.debug("no error estimate of %s by %s: %s", name, kernel, error)
                break
        return None, None

    def _watch(self, looked: Looked, owner: int) -> None:
        for site, what, value in looked.read(self._fed, owner):
            warmup = ERROR_WARMUP if what == ERROR else None
            self.feed(site, what, looked.step, value, owner, warmup)

    def feed(
        self,
        site: str,
        quantity: str,
        step: int,
        value: float,
        owner: int = 0,
        warmup: int | None = None,
    ) -> DriftEvent | None:
        """One value of a watched series; an alarm is logged and kept in `drift.events`."""
        event = self.drift.feed(site, quantity, step, value, owner, warmup)
        if event is not None:
            log.warning("loka: %s", event)
        return event

    # -- what others ask --------------------------------------------------------------------------

    def statistics(self) -> dict[tuple[str, str], Statistics]:
        """(site, role) -> live statistics of every parameter that was probed."""
        return collect(self._entries)

    def weights(self) -> dict[str, Tensor]:
        return {
            name: one.record.state[i]
            for one in self._weights.values()
            for i, name in enumerate(one.names)
            if one.alive() is not None
        }

    def snapshot(self) -> Snapshot:
        values = {}
        if self.weight_model != "actual":
            values = {e.name: w for e in self._entries if (w := e.ref()) is not None}
        return Snapshot(self.statistics(), self.weights(), self.step, values, dict(self.steps))

    def weight_models(self) -> dict[str, MatrixNormal]:
        """layer -> the distribution of its weight, as learnt at the last save."""
        models = None if self._saver is None else self._saver.models
        return {} if models is None else dict(models.held)

    def save(self) -> Path | None:
        """Write the state now and wait for it; None without a folder."""
        if self._saver is None:
            return None
        self._saver.finish()
        return self._saver.path


_SESSIONS: dict[Path | None, Session] = {}


def session(
    folder: Path | None = None, *, rows_on_disk: bool = False, weight_model: str = "actual"
) -> Session:
    """The process's session for `folder`. Raises ProbeFileError where its file is unusable."""
    if folder is not None:
        folder = folder.absolute()
        if folder.exists() and not folder.is_dir():
            raise ProbeFileError(folder, "probe_dir is a file; name a folder")
    if folder not in _SESSIONS:
        _SESSIONS[folder] = Session(folder, rows_on_disk, weight_model)
    return _SESSIONS[folder]


def sessions() -> list[Session]:
    return list(_SESSIONS.values())
