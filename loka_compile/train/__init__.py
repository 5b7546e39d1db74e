"""Train a reference model three ways and say what FP8 and the Mods did to its quality."""

from __future__ import annotations

from loka_compile.train.compare import CompareConfig
from loka_compile.train.loop import LoopSettings
from loka_compile.train.loop import Trace
from loka_compile.train.loop import TrainError
from loka_compile.train.loop import run_arm
from loka_compile.train.result import ArmResult
from loka_compile.train.result import CompareResult
from loka_compile.train.result import Window

__all__ = [
    "ArmResult",
    "CompareConfig",
    "CompareResult",
    "LoopSettings",
    "Trace",
    "TrainError",
    "Window",
    "run_arm",
]
