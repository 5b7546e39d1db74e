"""A script as two real processes: rank 0 and rank 1."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

#: Seconds for both.
LIMIT = 600.0


def run_both(folder: Path, text: str) -> list[tuple[dict, str]]:
    """(what it printed, its log) of both ranks of a script. Where one fails the other, which would
    wait for it, is ended, and the log of the first is shown."""
    script = folder / "run.py"
    script.write_text(text)
    end = time.monotonic() + LIMIT
    said = [folder / f"said{rank}" for rank in range(2)]
    logs = [folder / f"log{rank}" for rank in range(2)]
    started = []
    for rank in range(2):
        with said[rank].open("w") as out, logs[rank].open("w") as log:
            command = [sys.executable, str(script), str(folder), str(rank)]
            started.append(subprocess.Popen(command, stdout=out, stderr=log, cwd=folder))
    try:
        while any(one.poll() is None for one in started):
            assert time.monotonic() < end, f"out of time; rank 0: {logs[0].read_text()[-3000:]}"
            failed = [rank for rank, one in enumerate(started) if one.poll()]
            assert not failed, f"rank {failed[0]}: {logs[failed[0]].read_text()[-3000:]}"
            time.sleep(0.05)
    finally:
        for one in started:
            one.kill()
            one.wait()
    for rank, one in enumerate(started):
        assert one.returncode == 0, f"rank {rank}: {logs[rank].read_text()[-3000:]}"
    return [
        (json.loads(said[rank].read_text().splitlines()[-1]), logs[rank].read_text())
        for rank in range(2)
    ]
