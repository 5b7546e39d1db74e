"""A plan from a saved Probe state, without training: what the run that saved it decides as well."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka_compile import _compat
from loka_compile import eligibility
from loka_compile import planner
from loka_compile.lowering.balance import StepTimes
from loka_compile.model_sites import look_at
from loka_compile.options import Options
from loka_compile.plan import Plan
from loka_compile.probe import saver
from loka_compile.probe import store
from loka_compile.probe.statistics import Statistics
from loka_compile.probed_site import Probed


def plan_from_state(
    model: nn.Module,
    inputs: Sequence[Any],
    state: str | os.PathLike[str] | store.Loaded,
    *,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Decide for every site of `model` from what a run recorded of it.

    inputs: positional arguments of one call: they give the shapes. state: a probe file, the
    `probe_dir` of a run, or what was loaded of one; it needs real rows (`probe_rows_on_disk=True`).
    options: as for torch.compile. Runs one forward of `model`; weights are read as they are now.
    Given the same state, weights and cost table, the plan is that of the run itself.

    Raises ProbeFileError for a bad file, BadOptionError for a wrong option.
    """
    parsed = Options.parse(options, None)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    loaded = state if isinstance(state, store.Loaded) else _load(Path(state), device)
    seen = look_at(model, inputs, device, parsed)
    probed = []
    for one in seen.found:
        statistics: dict[tuple[int, str], Statistics] = {}
        for role in ("x", "g"):
            held = loaded.statistics.get((one.site.name, role))
            if held is not None:
                statistics[one.site.call, role] = held
        probed.append(
            Probed(
                one.site,
                one.weight,
                statistics,
                one.fused,
                one.place.epilogue,
                one.producer,
                stays=one.stays,
                bounded=one.bounded,
            )
        )
    eligible = eligibility.eligible((one.site for one in seen.found), device, parsed)
    rows = {p.site.name: p.site.m for p in probed}
    mine = [times for name, times in loaded.steps.items() if rows.get(name) == times.rows]
    step = StepTimes.sum(mine) if parsed.weighs_host else None
    sites, _ = planner.decide([p for p in probed if p.site.name in eligible], parsed, step=step)
    mods = parsed.wanted_mods
    names = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.dim() > 1]
    return Plan(
        sites=sites,
        mods=mods,
        parameters=tuple(sorted(names)) if mods else (),
        kept=seen.kept,
        block=parsed.block,
        heads=parsed.heads,
        blocks=seen.blocks if mods else {},
        emulated=parsed.emulate,
        env={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
        },
    )


def _load(path: Path, device: torch.device) -> store.Loaded:
    if not path.is_dir():
        return store.load_all(path, device)
    loaded = saver.load_folder(path)
    moved = {
        key: held.like([t.to(device) for t in held.tensors])
        for key, held in loaded.statistics.items()
    }
    return store.Loaded(moved, loaded.weights, loaded.step, steps=loaded.steps)
