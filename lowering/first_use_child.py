"""A child process in which kernels are tried that may end it, or never return.

It is asked in lines of JSON, each a list of keys, on its standard input, and answers each key with
a line in a file: what libraries print goes elsewhere. It stays for the next question until it is
closed, since it starts for seconds; it ends when its parent does, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loka_compile.lowering.first_use_memory import NO_CHILD
from loka_compile.lowering.first_use_memory import Key
from loka_compile.lowering.libraries.base import GemmShape

#: One answer of a child process: start of Python, CUDA context, JIT compilation and one call.
LIMIT_SECONDS = 60.0
_LOOK_SECONDS = 0.01
#: Status of a child that answered, but whose CUDA context is lost: it is good for nothing more.
LOST = 77

Answers = dict[Key, "str | None"]


class Child:
    """One after the other: a child that dies or hangs costs its current key, a new one goes on."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._answered = 0
        self._started = 0

    def start(self) -> None:
        """Raises OSError where no process can be started."""
        if self._process is not None:
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="loka-first-use-")
        self._started += 1
        self._answered = 0
        self._file.touch()
        # The parent may know the package only through a changed sys.path.
        path = os.pathsep.join(p for p in sys.path if p)
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._file)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                text=True,
            )

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"answered-{self._started}.jsonl"

    @property
    def _said(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"said-{self._started}.txt"

    def ask(self, keys: Sequence[Key]) -> None:
        """Go on to `answers`; what goes wrong here shows there."""
        with contextlib.suppress(OSError):
            self.start()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps([encode(key) for key in keys]) + "\n")
            self._process.stdin.flush()

    def answers(self, keys: Sequence[Key]) -> Answers:
        """Of the keys that `ask` was called with."""
        done: Answers = {}
        left, fruitless = list(keys), 0
        while left:
            if self._process is None:
                try:
                    self.start()
                except OSError as error:
                    done[left.pop(0)] = f"{NO_CHILD}: {error}"
                    continue
                self.ask(left)
            found, how = self._wait(len(left))
            done.update(zip(left, found, strict=False))
            left = left[len(found) :]
            # Lost before it was asked: the next one is asked instead, once.
            fruitless = 0 if found else fruitless + 1
            if left and (how or fruitless > 1):
                done[left.pop(0)] = how or f"first use ended its child process with status {LOST}"
        return done

    def _wait(self, count: int) -> tuple[list[str | None], str]:
        """(answers so far, what became of the child if the next key ended it)."""
        process, seen, since = self._process, 0, time.monotonic()
        assert process is not None
        how, ended = "", None
        while not how:
            ended = process.poll()
            lines = self._file.read_text().split("\n")[self._answered : -1]
            if len(lines) >= count:
                break
            if len(lines) > seen:
                seen, since = len(lines), time.monotonic()
            if ended == LOST:
                break
            if ended is not None:
                said = self._said.read_text(errors="replace").strip().splitlines()
                last = (said or ["no message"])[-1][:200]
                how = f"first use ended its child process with status {ended}: {last}"
            elif time.monotonic() - since > LIMIT_SECONDS:
                how = f"first use did not return within {LIMIT_SECONDS:g} s in a child process"
            else:
                time.sleep(_LOOK_SECONDS)
        self._answered += len(lines)
        if how or ended is not None:
            self._end()
        return [json.loads(line) for line in lines], how

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def close(self) -> None:
        self._end()
        if self._folder is not None:
            self._folder.cleanup()


def encode(key: Key) -> list[object]:
    kernel, direction, shape, dtype, device = key
    name = str(dtype).removeprefix("torch.")
    return [kernel, direction, [shape.m, shape.k, shape.n, shape.epilogue], name, device]


def decode(row: list[Any]) -> Key:
    kernel, direction, (m, k, n, epilogue), dtype, device = row
    shape = GemmShape(int(m), int(k), int(n), str(epilogue))
    return str(kernel), str(direction), shape, getattr(torch, str(dtype)), str(device)


# -- the child ------------------------------------------------------------------------------------


def _questions(told: Callable[[str], None]) -> None:
    """Pass on what the parent says. A child that outlived it would go on using the device, perhaps
    in a kernel that never ends."""

    def wait() -> None:
        for line in sys.stdin:
            told(line)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _main(answered: str) -> None:
    from loka_compile.lowering.first_use import run_and_compare

    asked: queue.Queue[str] = queue.Queue()
    _questions(asked.put)
    with Path(answered).open("a") as out:
        while True:
            for row in json.loads(asked.get()):
                why = run_and_compare(*decode(row))
                out.write(json.dumps(why) + "\n")
                out.flush()
                if why is not None and not _is_well():
                    os._exit(LOST)


def _is_well() -> bool:
    """After an illegal access every further call fails, whatever it is."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.zeros((), device="cuda").item()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    _main(*sys.argv[1:])
