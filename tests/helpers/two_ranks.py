"""A script as two real processes: rank 0 and rank 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run_both(folder: Path, text: str) -> list[tuple[dict, str]]:
    """(what it printed, its log) of both ranks of a script."""
    script = folder / "run.py"
    script.write_text(text)
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(2)
    ]
    found = []
    for one in started:
        said, log = one.communicate(timeout=600)
        assert one.returncode == 0, log[-3000:]
        found.append((json.loads(said.splitlines()[-1]), log))
    return found
