"""Processes that get ready side by side and then measure one at a time.

Compiling takes a core for a minute and needs no device to itself; timing needs an idle machine. A
process per subject, too: what ran before in one changes what its host costs per step.

Those that make a plan come first: they time kernels for it, in turns, while nobody else is at work.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Begins the lines that the parent reads; a library may print others.
MARK = "@@ "
#: A process that takes longer hangs, and must not cost the others their turn.
PLAN_SECONDS, READY_SECONDS, MEASURE_SECONDS = 120.0, 160.0, 60.0
DEFAULTS = {
    # Of Inductor's own, each process would start one per core.
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    # Threads that wait for work would take the cores of the other processes.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Worker:
    """One process, which runs `script` with `settings` as JSON in its first argument.

    It says `planned_s` once it has a plan, if it makes one; something when it is ready; and one
    row for each of the `turns` that it is given.
    """

    def __init__(
        self, script: Path, settings: dict[str, Any], turns: int = 1, makes_plan: bool = False
    ) -> None:
        self.script, self.settings = script, settings
        self.turns, self.makes_plan = turns, makes_plan
        self.planned_s: float | None = None
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
            env={**DEFAULTS, **os.environ},
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
        """What it said last; better, the last line of its that names an error, with the place of
        one that has no words."""
        said = [_COLOURS.sub("", line).strip() for line in reversed(self._errors)]
        said = [line for line in said if line] or [f"status {self._process.poll()}"]
        at = next(
            (i for i, line in enumerate(said) if re.match(r"[\w.]*(Error|Exception)\b", line)), 0
        )
        places = (line for line in said[at:] if line.startswith("File "))
        return said[at] if ": " in said[at] else " ".join([said[at], *itertools.islice(places, 2)])

    def await_plan(self, limit: float) -> None:
        """Until it has a plan, or will not get one."""
        with contextlib.suppress(RuntimeError):
            self.planned_s = self.hear(limit)["planned_s"]

    def await_ready(self, limit: float) -> dict[str, Any]:
        """What it says of how it got ready. Raises RuntimeError."""
        if self.makes_plan and self.planned_s is None:
            self.planned_s = self.hear(limit)["planned_s"]
        return {"planned_s": self.planned_s, **self.hear(limit)}

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


def in_turn(
    workers: Iterable[Worker],
    deadline: float,
    side_by_side: int,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[tuple[Worker, int, dict[str, Any]]]:
    """(worker, which of its turns, its row, or the `error` that ended it), as they come.

    `side_by_side` of them get ready at the same time; when all of those are, or `ready_seconds`
    have gone by, they measure. deadline: of `time.monotonic`; what is not begun by then is left.
    """
    waiting = sorted(workers, key=lambda worker: not worker.makes_plan)
    while waiting and time.monotonic() < deadline:
        batch, waiting = waiting[:side_by_side], waiting[side_by_side:]
        try:
            makers = [worker for worker in batch if worker.makes_plan]
            for worker in makers:
                worker.start()
            limit = min(deadline, time.monotonic() + PLAN_SECONDS)
            for worker in makers:
                worker.await_plan(limit)
            for worker in batch:
                if not worker.makes_plan:
                    worker.start()
            yield from _measured(batch, min(deadline, time.monotonic() + ready_seconds))
        finally:
            # Not one after its turn: the end of a process, whose memory the driver takes back,
            # takes seconds, in which others would be measured.
            stop_all(batch)


def _measured(batch: list[Worker], limit: float) -> Iterator[tuple[Worker, int, dict[str, Any]]]:
    ready: dict[Worker, dict[str, Any]] = {}
    for worker in batch:
        try:
            ready[worker] = worker.await_ready(limit)
        except RuntimeError as error:
            worker.stop()
            yield worker, 0, {"error": str(error)}
    for worker, said in ready.items():
        for turn in range(worker.turns):
            try:
                row = worker.measure(time.monotonic() + MEASURE_SECONDS)
            except RuntimeError as error:
                yield worker, turn, {"error": str(error)}
                break
            yield worker, turn, {**row, **said}


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


class Watch(threading.Thread):
    """Says so once there is a plan: what follows compiles, and times nothing."""

    def __init__(self, has_plan: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.has_plan, self.begun = has_plan, time.perf_counter()
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.has_plan() and not self.ended.wait(0.1):
            pass
        say(planned_s=round(time.perf_counter() - self.begun, 1))

    def end(self) -> None:
        self.ended.set()
        self.join()
