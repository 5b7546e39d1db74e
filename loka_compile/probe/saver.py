"""Saves probe state beside training: a copy on the device now, the file from a thread.

One file per rank, `probe-<rank>-of-<ranks>.safetensors`; `load_folder` merges them exactly. A save
that is still being written is not waited for: the newest request replaces one that has not begun.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from loka_compile.errors import ProbeFileError
from loka_compile.lowering.balance import StepTimes
from loka_compile.probe import store
from loka_compile.probe.merge import merge
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.weight_models import WeightModels

log = logging.getLogger("loka_compile")


@dataclass(frozen=True)
class Snapshot:
    statistics: dict[tuple[str, str], Statistics]
    weights: dict[str, Tensor]
    step: int
    #: layer -> the weight itself, where its distribution is learnt.
    values: dict[str, Tensor] = field(default_factory=dict)
    #: First site of a graph -> what its step takes.
    steps: dict[str, StepTimes] = field(default_factory=dict)


class Saver:
    """`collect` makes a Snapshot of live tensors. `rows`: write the reservoirs too. `models`: what
    learns the distributions of its weight values, if anything does."""

    def __init__(
        self,
        folder: Path,
        collect: Callable[[], Snapshot],
        *,
        rows: bool,
        models: WeightModels | None = None,
    ) -> None:
        self.folder = folder
        self.models = models
        self.rows = rows
        self._collect = collect
        self._wake = threading.Condition()
        self._next: tuple[Snapshot, torch.cuda.Event | None] | None = None
        self._busy = False
        self._thread: threading.Thread | None = None
        # Through a weak reference: at exit is no reason to keep a model's state.
        own = weakref.ref(self)

        def at_exit() -> None:
            saver = own()
            if saver is not None:
                saver.finish()

        atexit.register(at_exit)

    @property
    def path(self) -> Path:
        rank, ranks = _rank()
        return self.folder / f"probe-{rank:05d}-of-{ranks:05d}.safetensors"

    def request(self) -> None:
        """Copy the state as it is now and have it written. Returns at once, without a sync."""
        copied = _copied(self._collect(), sketches=self.rows)
        event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
        with self._wake:
            self._next = (copied, event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="loka-probe", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def wait(self) -> None:
        """Until everything that was requested is on disk."""
        with self._wake:
            while self._next is not None or self._busy:
                self._wake.wait()

    def finish(self) -> None:
        """Write the state as it is now, in this thread."""
        self.wait()
        self._write(self._collect())

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._next is None:
                    self._wake.wait()
                snapshot, event = self._next
                self._next, self._busy = None, True
            if event is not None:
                event.synchronize()
            self._write(snapshot)
            with self._wake:
                self._busy = False
                self._wake.notify_all()

    def _write(self, one: Snapshot) -> None:
        if not one.statistics:
            return
        try:
            if self.models is not None:
                self.models.update(one.values)
            store.save(
                one.statistics,
                self.path,
                rows=self.rows,
                weights=one.weights,
                step=one.step,
                weight_models=None if self.models is None else self.models.held,
                steps=one.steps,
            )
        except (ProbeFileError, OSError) as error:
            # Training goes on: the Probe's record is not worth a run.
            log.warning("loka: probe state was not saved: %s", error)


def _copied(one: Snapshot, *, sketches: bool) -> Snapshot:
    held = one.statistics
    if not sketches:
        held = {k: replace(s, sketch=None, marks=None) for k, s in held.items()}
    return Snapshot(
        {k: s.like([t.clone() for t in s.tensors]) for k, s in held.items()},
        {k: t.clone() for k, t in one.weights.items()},
        one.step,
        {k: t.clone() for k, t in one.values.items()},
        one.steps,
    )


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def load_folder(folder: Path | str) -> store.Loaded:
    """Every rank's file of one run, merged. Raises ProbeFileError where files miss or mix."""
    files = sorted(Path(folder).glob("probe-*-of-*.safetensors"))
    if not files:
        raise ProbeFileError(folder, "no probe-*-of-*.safetensors in it")
    ranks = {f.stem.rpartition("-")[2] for f in files}
    if len(ranks) > 1 or int(next(iter(ranks))) != len(files):
        raise ProbeFileError(
            folder, f"{len(files)} files of runs with {', '.join(sorted(ranks))} ranks"
        )
    loaded = [store.load_all(f) for f in files]
    keys = sorted({k for one in loaded for k in one.statistics})
    return store.Loaded(
        {k: reduce(merge, [o.statistics[k] for o in loaded if k in o.statistics]) for k in keys},
        loaded[0].weights,
        max(o.step for o in loaded),
        loaded[0].weight_models,
        loaded[0].steps,
    )
