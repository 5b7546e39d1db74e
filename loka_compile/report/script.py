"""Run somebody's script as if it were started by itself, under `explain()`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path

from loka_compile.report.coverage import models_in_memory
from loka_compile.report.explain import Report
from loka_compile.report.explain import explain


def run_script(path: Path, arguments: Sequence[str], done: Callable[[Report], None]) -> None:
    """`done` gets the report, also when the script fails or exits; that error then goes on.

    It is called while the script's objects live: diffs need the graphs.
    """
    argv, search = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    # As `python SCRIPT` does, so that the script finds the modules beside it.
    sys.path.insert(0, str(path.resolve().parent))
    kept: dict[str, object] = {}
    try:
        with explain() as report:
            try:
                kept.update(runpy.run_path(str(path), run_name="__main__"))
            finally:
                for model in models_in_memory():
                    report.expect(model)
                done(report)
    finally:
        sys.argv, sys.path[:] = argv, search
        kept.clear()
