"""loka-compile: `torch.compile(model, backend="loka")`, FP8 for large recommendation models.

Importing this package is cheap; torch is loaded when a name below is first used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

__version__ = "0.1.0"

_HERE = Path(__file__).parent
if not (_HERE / "passes").exists() and (_HERE.parent / "passes" / "registry.py").exists():
    # A source tree that comes before the installed package (python started in a clone): there
    # passes/, lowering/ and kernels/ stand beside this folder.
    __path__.append(str(_HERE.parent))

#: public name -> module that has it
_PUBLIC = {
    "BlockNorm": "loka_compile.modules",
    "Options": "loka_compile.options",
    "Plan": "loka_compile.plan",
    "apply_mods": "loka_compile.modules",
    "calibrate": "loka_compile.calibration",
    "check_pattern": "loka_compile.user_patterns",
    "explain": "loka_compile.report.explain",
    "loka_backend": "loka_compile.backend",
    "make_plan": "loka_compile.dry_run",
    "mark_modded": "loka_compile.mods",
    "name_layers": "loka_compile.names",
    "pattern": "loka_compile.user_patterns",
    "patterns": "loka_compile.user_patterns",
    "plain_metrics": "loka_compile.probe.plain_steps",
    "plan_from_state": "loka_compile.offline_plan",
    "plan_of": "loka_compile.plans",
    "probe_events": "loka_compile.probe.public",
    "probe_metrics": "loka_compile.probe.public",
    "probe_rows": "loka_compile.probe.rows",
    "probe_save": "loka_compile.probe.public",
    "quantify": "loka_compile.probe.offline",
}

if TYPE_CHECKING:
    from loka_compile.backend import loka_backend
    from loka_compile.calibration import calibrate
    from loka_compile.dry_run import make_plan
    from loka_compile.mods import mark_modded
    from loka_compile.modules import BlockNorm
    from loka_compile.modules import apply_mods
    from loka_compile.names import name_layers
    from loka_compile.offline_plan import plan_from_state
    from loka_compile.options import Options
    from loka_compile.plan import Plan
    from loka_compile.plans import plan_of
    from loka_compile.probe.offline import quantify
    from loka_compile.probe.plain_steps import plain_metrics
    from loka_compile.probe.public import probe_events
    from loka_compile.probe.public import probe_metrics
    from loka_compile.probe.public import probe_save
    from loka_compile.probe.rows import probe_rows
    from loka_compile.report.explain import explain
    from loka_compile.user_patterns import check_pattern
    from loka_compile.user_patterns import pattern
    from loka_compile.user_patterns import patterns

__all__ = [
    "BlockNorm",
    "Options",
    "Plan",
    "apply_mods",
    "calibrate",
    "check_pattern",
    "explain",
    "loka_backend",
    "make_plan",
    "mark_modded",
    "name_layers",
    "pattern",
    "patterns",
    "plain_metrics",
    "plan_from_state",
    "plan_of",
    "probe_events",
    "probe_metrics",
    "probe_rows",
    "probe_save",
    "quantify",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'loka_compile' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
