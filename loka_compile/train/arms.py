"""The three arms of the comparison: the same model, three ways to run its dense part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from loka_compile.zoo.recommender import Recommender

ARMS = ("original", "bf16_mods", "loka")


@dataclass(eq=False)
class Arm:
    """A model ready to train. ``model`` owns the state; ``dense`` is ``model.dense``, compiled."""

    name: str
    model: Recommender
    dense: Callable[..., torch.Tensor]
    plan_active: Callable[[], bool] = lambda: False
    recording: Callable[[], AbstractContextManager[Any]] = nullcontext
    notes: list[str] = field(default_factory=list)


def build(name: str, model: Recommender, options: dict[str, Any]) -> Arm:
    """Arm ``name`` on a deep copy of ``model``; ``options`` go to the backend "loka"."""
    own = copy.deepcopy(model)
    return _BUILDERS[name](own, options)


def _original(model: Recommender, options: dict[str, Any]) -> Arm:
    return Arm("original", model, torch.compile(model.dense, backend="inductor"))


def _bf16_mods(model: Recommender, options: dict[str, Any]) -> Arm:
    import loka_compile

    changes = loka_compile.apply_mods(model.dense)
    compiled = torch.compile(model.dense, backend="inductor")
    return Arm("bf16_mods", model, compiled, notes=changes.summary().splitlines())


def _loka(model: Recommender, options: dict[str, Any]) -> Arm:
    import loka_compile

    dense = model.dense
    compiled = torch.compile(dense, backend="loka", options=options)
    return Arm(
        "loka",
        model,
        compiled,
        plan_active=lambda: bool(loka_compile.plan_of(dense).active),
        recording=loka_compile.explain,
    )


_BUILDERS = {"original": _original, "bf16_mods": _bf16_mods, "loka": _loka}


def loka_options(emulate: bool, plan: Path | None) -> dict[str, Any]:
    """Options of the loka arm. Mods are forced on: the arm is compared against ``bf16_mods``."""
    options: dict[str, Any] = {"mods": "on", "emulate": emulate}
    if plan is not None:
        options["plan"] = str(plan)
    return options


def has_fp8(device: torch.device) -> bool:
    """Whether ``device`` multiplies FP8 in hardware: sm89 and later, or MI300 and later."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)
