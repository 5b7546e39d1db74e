"""A study: several arms, several seeds, each (seed, arm) trained once and kept in a file.

A unit is one arm from one seed over one pass of the data. Its file is written whole, so a study
that was stopped goes on where it was, and units may be trained in any order by any processes.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loka_compile.data import open_source
from loka_compile.data.base import Source
from loka_compile.files import replacing
from loka_compile.files import write_text
from loka_compile.mod_set import EVERY
from loka_compile.train.arms import EVERY_ARM
from loka_compile.train.arms import build
from loka_compile.train.arms import has_fp8
from loka_compile.train.cache import BatchCache
from loka_compile.train.loop import LoopSettings
from loka_compile.train.loop import Trace
from loka_compile.train.loop import TrainError
from loka_compile.train.loop import run_arm
from loka_compile.train.share import fp8_share
from loka_compile.zoo import MODELS
from loka_compile.zoo import build_model

DEFAULT_ARMS = ("bf16_mods", "loka", "control", "original")
#: Arms without the backend -> whose compiled code they run: all seeds share it.
PLAIN_ARMS = {
    "original": "original",
    "bf16_mods": "bf16_mods",
    "control": "bf16_mods",
    "mods_blocks": "mods_blocks",
    "mods_even": "mods_even",
    "mods_rows": "mods_rows",
    **{f"bf16_{mod}": f"bf16_{mod}" for mod in EVERY},
}
#: That one process trains of an arm before the next arm.
SEEDS_IN_A_ROW = 4
#: Tables of more parameters than this get sparse gradients on a GPU too: below it a dense update is
#: one small kernel, while a sparse one makes the host wait for the number of rows.
SMALL_TABLE = 1 << 25


@dataclass(frozen=True)
class StudyConfig:
    """All that decides a unit's outcome. ``options`` go to the backend, over its defaults here."""

    data: str
    label: str | None = None
    dense: str = "standard"
    model: str = "wukong"
    scale: str = "tiny"
    batch: int = 512
    limit: int | None = None
    arms: tuple[str, ...] = DEFAULT_ARMS
    device: str = "auto"
    lr: float = 1e-3
    table_lr: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = MODELS.get(self.model)
        for name, value, known in (
            ("model", self.model, tuple(MODELS)),
            ("scale", self.scale, tuple(kind.scales) if kind else ()),
            ("device", self.device, ("auto", "cpu", "cuda")),
            *(("arm", arm, EVERY_ARM) for arm in self.arms),
        ):
            if value not in known:
                raise TrainError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise TrainError("device cuda: this torch sees no CUDA device; use --device cpu")

    def torch_device(self) -> torch.device:
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def open(self) -> Source:
        source = open_source(self.data, label=self.label, dense=self.dense)
        if MODELS[self.model].uses_history and source.schema.history is None:
            source.attach_history()
        return source

    def identity(self) -> dict[str, Any]:
        """What a folder of units must agree in; arms may be added later."""
        return {k: v for k, v in asdict(self).items() if k != "arms"} | {
            "device": self.torch_device().type
        }


@dataclass(frozen=True)
class Unit:
    seed: int
    arm: str

    def path(self, folder: Path) -> Path:
        return folder / "units" / f"{self.arm}-{self.seed:04d}.npz"


def open_folder(folder: Path, config: StudyConfig) -> None:
    """Make ``folder`` this study's, or find that it is; TrainError when it holds another."""
    path = folder / "study.json"
    want = json.loads(json.dumps(config.identity()))
    if not path.exists():
        write_text(path, json.dumps(want, indent=1) + "\n")
        return
    try:
        found = json.loads(path.read_text())
    except ValueError as e:
        raise TrainError(f"{path}: damaged ({e}); name another --out") from e
    if found != want:
        differ = sorted(k for k in want.keys() | found.keys() if want.get(k) != found.get(k))
        raise TrainError(f"{folder} holds a study with another {', '.join(differ)}; use --out")


class Worker:
    """One process's share: the data is read once and kept where the model is."""

    def __init__(self, folder: Path, config: StudyConfig) -> None:
        self.folder, self.config = folder, config
        self.device = config.torch_device()
        self.source = config.open()
        self.batches = BatchCache(self.source, config.batch, config.limit)
        self.batches.fill()
        self.batches.to(self.device)
        self.emulate = not has_fp8(self.device)
        self._code: str | None = None
        self._longest = self._latest = 0.0

    def run(
        self,
        units: Iterable[Unit],
        deadline: float | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Train what is not there yet; returns the faults. Leaves off before ``deadline``.

        ``on_step`` is called after every step: the first has compiled.
        """
        faults = []
        for unit in units:
            if unit.path(self.folder).exists():
                continue
            begun = time.time()
            # Without a compilation a unit takes a small part of what its first one took.
            expected = self._latest if self._shares_code(unit) else self._longest
            if deadline is not None and begun + expected > deadline:
                break
            try:
                self._train(unit, on_step)
            except Exception as e:  # one bad unit must not take the others with it
                faults.append(f"{unit.arm}, seed {unit.seed}: {type(e).__name__}: {e}"[:500])
            self._latest = time.time() - begun
            self._longest = max(self._longest, self._latest)
        return faults

    def _shares_code(self, unit: Unit) -> bool:
        """Arms under plain Inductor differ between seeds in their weights only."""
        return PLAIN_ARMS.get(unit.arm, "") == self._code

    def _train(self, unit: Unit, on_step: Callable[[], None]) -> None:
        config = self.config
        if not self._shares_code(unit):
            torch._dynamo.reset()
        self._code = PLAIN_ARMS.get(unit.arm)
        torch.manual_seed(unit.seed)
        table = sum(self.source.schema.cardinalities)
        model = build_model(
            config.model,
            config.scale,
            self.source.schema,
            shared_table=True,
            sparse=self.device.type == "cpu" or table * 64 > SMALL_TABLE,
        ).to(self.device)
        options = {"mods": "on", "emulate": self.emulate, **config.options}
        settings = LoopSettings(self.device, lr=config.lr, table_lr=config.table_lr)
        begun = time.perf_counter()
        arm = build(unit.arm, model, options)
        with arm.recording() as seen:
            trace = run_arm(arm, self.batches, settings, lambda rows: on_step())
        sites = [dict(s) for s in seen.sites] if seen is not None else []
        about = {
            "seconds": time.perf_counter() - begun,
            "examples_per_s": trace.examples_per_s,
            "sites": sites,
            "fp8_share": fp8_share(sites, trace.plan_active),
            "swap_row": trace.swap_row,
        }
        save_trace(unit.path(self.folder), trace, about)


def save_trace(path: Path, trace: Trace, about: dict[str, Any]) -> None:
    arrays = {k: v for k, v in vars(trace).items() if v is not None}
    with replacing(path) as temporary, open(temporary, "wb") as stream:
        np.savez_compressed(stream, about=np.array(json.dumps(about, default=str)), **arrays)


def load_trace(path: Path) -> tuple[Trace, dict[str, Any]]:
    """TrainError for a file that is no unit's."""
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays = {k: held[k] for k in held.files if k != "about"}
            return Trace(**arrays), json.loads(str(held["about"]))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as e:
        raise TrainError(f"{path}: no unit of a study ({e}); delete it and run again") from e


def run_units(
    folder: Path,
    config: StudyConfig,
    units: Sequence[Unit],
    jobs: int = 1,
    time_limit: float | None = None,
) -> list[str]:
    """Train every unit that has no file yet, in ``jobs`` processes; returns what went wrong."""
    deadline = None if time_limit is None else time.time() + time_limit
    open_folder(folder, config)
    left = [u for u in units if not u.path(folder).exists()]
    if not left or (deadline is not None and time.time() >= deadline):
        return []
    # What is wrong with the data is said here, not by a process that dies of it.
    config.open()
    if jobs == 1:
        # A few seeds of one arm in a row share compiled code, and a study that is stopped has
        # pairs all the same.
        left.sort(key=lambda u: (u.seed // SEEDS_IN_A_ROW, PLAIN_ARMS.get(u.arm, u.arm), u.seed))
        return Worker(folder, config).run(left, deadline)
    # Imported here: it imports this module, in the processes it starts too.
    from loka_compile.train.processes import in_processes
    from loka_compile.train.processes import shares

    return in_processes(folder, config, shares(left, jobs), jobs, deadline)
