"""Processes that get ready side by side and then measure one at a time.

Compiling takes a core for a minute and needs no device to itself; timing needs an idle machine. A
process per subject, too: what ran before in one changes what its host costs per step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Begins the lines that the parent reads; a library may print others.
MARK = "@@ "
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Worker:
    """One process, which runs `script` with `settings` as JSON in its first argument."""

    def __init__(self, script: Path, settings: dict[str, Any]) -> None:
        self.script, self.settings = script, settings
        self._said: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._errors: list[str] = []
        self._ended = False
        self.runs = False

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(self.script), json.dumps(self.settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
            # Of Inductor's own, each process would start one per core.
            env={"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ},
            start_new_session=True,
        )  # fmt: skip
        self.runs = True
        for follow in (self._listen, self._keep_errors):
            threading.Thread(target=follow, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                with self._heard:
                    self._said.append(json.loads(line.removeprefix(MARK)))
                    self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.rstrip()]

    def hear(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises RuntimeError when the process ended or the time is up."""
        with self._heard:
            left = max(deadline - time.monotonic(), 0.0)
            self._heard.wait_for(lambda: self._said or self._ended, timeout=left)
            if self._said:
                return self._said.pop(0)
            ended = self._ended
        raise RuntimeError(f"its process ended: {self._why()}" if ended else "out of time")

    def _why(self) -> str:
        """What it said last; better, the last line of its that names an error."""
        said = [_COLOURS.sub("", line).strip() for line in reversed(self._errors)]
        said = [line for line in said if line] or [f"status {self._process.poll()}"]
        return next(
            (line for line in said if re.match(r"[\w.]*(Error|Exception)\b", line)), said[0]
        )

    def measure(self, deadline: float) -> dict[str, Any]:
        """Give it the turn; what it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.hear(deadline)

    def stop(self) -> None:
        """With the compilers that it started, which would slow those who are measured. Any number
        of times."""
        stop_all([self])


def stop_all(workers: Iterable[Worker]) -> None:
    """Those that were started."""
    running = [worker for worker in workers if worker.runs]
    for worker in running:
        # Those that it started may be there when it is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker._process.pid, signal.SIGKILL)
    for worker in running:
        worker._process.wait()
        worker.runs = False


# -- in the process -------------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    given: dict[str, Any] = json.loads(sys.argv[1])
    return given


def say(**message: Any) -> None:
    print(MARK + json.dumps(message), flush=True)


def wait_for_turn() -> None:
    """Ends the process where nobody is left to give it one."""
    if not sys.stdin.readline():
        raise SystemExit("no turn: the parent is gone")
