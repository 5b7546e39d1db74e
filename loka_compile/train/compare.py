"""Three arms, one truth: same initial weights, same batches in the same order, one pass each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from loka_compile.data.base import Source
from loka_compile.train.arms import ARMS
from loka_compile.train.arms import build
from loka_compile.train.arms import has_fp8
from loka_compile.train.arms import loka_options
from loka_compile.train.cache import BatchCache
from loka_compile.train.environment import versions
from loka_compile.train.loop import LoopSettings
from loka_compile.train.loop import Trace
from loka_compile.train.loop import TrainError
from loka_compile.train.loop import run_arm
from loka_compile.train.result import CompareResult
from loka_compile.train.share import fp8_share
from loka_compile.train.summary import eval_from
from loka_compile.train.summary import summarise
from loka_compile.zoo import MODELS
from loka_compile.zoo import build_model

#: (arm, what happens, rows done, rows in all or None)
Progress = Callable[[str, str, int, "int | None"], None]


@dataclass(frozen=True)
class CompareConfig:
    """Everything that decides a run, apart from the data source."""

    model: str = "wukong"
    scale: str = "tiny"
    batch: int = 512
    limit: int | None = None
    seed: int = 0
    arms: tuple[str, ...] = ARMS
    device: str = "auto"
    lr: float = 1e-3
    optimizer: str = "adam"
    table_lr: float = 0.05
    windows: int = 10
    eval_from: int | None = None
    plan: Path | None = None
    out: Path | None = None
    #: Of the backend, over those that this comparison chooses; `mods` and `keep` hold for the arm
    #: bf16_mods too.
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("model", self.model, tuple(MODELS)),
            ("scale", self.scale, tuple(MODELS[self.model].scales if self.model in MODELS else ())),
            ("device", self.device, ("auto", "cpu", "cuda")),
            *(("arm", arm, ARMS) for arm in self.arms),
        ):
            if value not in known:
                raise TrainError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
        if not self.arms or len(set(self.arms)) != len(self.arms):
            raise TrainError(f"arms are {', '.join(self.arms) or 'empty'}; name each arm once")
        for name in ("batch", "windows"):
            if getattr(self, name) < 1:
                raise TrainError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.plan is not None and not Path(self.plan).is_file():
            raise TrainError(f"plan {self.plan}: no such file; leave --plan out to make a new plan")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise TrainError("device cuda: this torch sees no CUDA device; use --device cpu")

    def torch_device(self) -> torch.device:
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compare(
    source: Source, config: CompareConfig, progress: Progress = lambda *a: None
) -> CompareResult:
    """Train every arm of ``config`` on ``source`` and compare them row by row.

    Raises ``TrainError`` or ``DataError`` for what the user can mend.
    """
    device = config.torch_device()
    emulate = not has_fp8(device)
    settings = LoopSettings(
        device, lr=config.lr, optimizer=config.optimizer, table_lr=config.table_lr
    )
    if MODELS[config.model].uses_history and source.schema.history is None:
        source.attach_history()
    batches = BatchCache(source, config.batch, config.limit)
    batches.fill(lambda n: progress("data", "reading", n, source.rows))
    _check_eval_from(config.eval_from, batches.rows)
    if device.type == "cuda":
        batches.to(device)
    torch.manual_seed(config.seed)
    # One table for all fields: one lookup per step instead of one per field.
    model = build_model(config.model, config.scale, source.schema, shared_table=True)
    flops, parameters = model.flops_per_example(), model.parameter_counts()
    model.to(device)
    traces: dict[str, Trace] = {}
    seconds: dict[str, float] = {}
    report: Any = None
    changes: list[str] = []
    files: dict[str, str] = {}
    for name in config.arms:
        torch._dynamo.reset()
        torch.manual_seed(config.seed)
        done = 0

        def on_rows(n: int, name: str = name) -> None:
            nonlocal done
            done += n
            progress(name, "training", done, batches.rows)

        begun = time.perf_counter()
        progress(name, "compiling", 0, batches.rows)
        arm = build(name, model, {**loka_options(emulate, config.plan), **config.options})
        with arm.recording() as seen:
            traces[name] = run_arm(arm, batches, settings, on_rows)
        seconds[name] = time.perf_counter() - begun
        if name == "loka":
            report, changes = seen, list(seen.changes)
            files = _save(arm.model.dense, report, config.out)
        elif arm.notes and not changes:
            changes = arm.notes
        del arm
    sites = [dict(s) for s in report.sites] if report is not None else []
    result = summarise(
        traces, seconds, eval_from(config.eval_from, source.name, batches.rows), config.windows
    )
    return CompareResult(
        **result,
        fp8_share=fp8_share(sites, traces["loka"].plan_active)
        if report is not None
        else {"steps": 0.0, "flops": 0.0},
        sites=sites,
        env={**versions(device), "emulated": emulate},
        config={
            **asdict(config),
            "eval_from": eval_from(config.eval_from, source.name, batches.rows),
            "flops_per_example": flops,
            "parameters": parameters,
        },
        data={
            "source": source.name,
            "label": source.schema.label,
            "rows": batches.rows,
            "bad_rows": source.counts.bad,
            "unlabelled": source.counts.unlabelled,
            "summary": source.counts.summary(),
        },
        changes=changes,
        files=files,
    )


def _check_eval_from(asked: int | None, rows: int) -> None:
    if asked is not None and not 0 <= asked < rows:
        raise TrainError(f"--eval-from is row {asked}, but there are {rows} rows; use less")


def _save(dense: torch.nn.Module, report: Any, out: Path | None) -> dict[str, str]:
    """Report (text, JSON and a page for a browser) and plan beside each other; where each went."""
    if out is None:
        return {}
    import loka_compile

    out.mkdir(parents=True, exist_ok=True)
    files = {
        "report": out / "report.txt",
        "report_json": out / "report.json",
        "report_html": out / "report.html",
        "plan": out / "plan.json",
    }
    report.save(files["report"])
    report.save(files["report_json"])
    report.save(files["report_html"])
    loka_compile.plan_of(dense).save(files["plan"])
    return {name: str(path) for name, path in files.items()}
