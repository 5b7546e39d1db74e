"""One arm of figure 10 in a process of its own (`turns.py`): a model's training and inference."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from speed import Case
from speed import Ready
from speed import ready
from speed import timed
from turns import Watch
from turns import say
from turns import settings
from turns import wait_for_turn

import loka_compile


def main() -> None:
    begun, given = time.perf_counter(), settings()
    device = torch.device(given["device"])
    subjects: list[Ready | dict[str, Any]] = []
    trained = None
    watches: list[Watch] = []

    def made(dense: torch.nn.Module) -> None:
        if given["makes_plan"] and not watches:
            watches.append(Watch(lambda: bool(loka_compile.plan_of(dense).sites)))

    for one in given["cases"]:
        case = Case(**one)
        try:
            subjects.append(ready(case, device, given["options"], trained, made))
        except Exception as e:  # a training that cannot run must not take the inference with it
            subjects.append({"error": f"{type(e).__name__}: {e}"[:300]})
            continue
        trained = subjects[-1] if case.train and isinstance(subjects[-1], Ready) else trained
    for watch in watches:
        watch.end()
    say(ready_s=round(time.perf_counter() - begun, 1))
    for subject in subjects:
        wait_for_turn()
        say(**(timed(subject, device) if isinstance(subject, Ready) else subject))


if __name__ == "__main__":
    main()
