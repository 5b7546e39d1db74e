"""Whose turn it is on a device: processes that time kernels on it at once would time each other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import filelock
import torch

from loka_compile.options import Environment

log = logging.getLogger("loka_compile")

#: A time is over in a fraction of a second; who waits longer goes on, and is disturbed at worst.
LONGEST_WAIT = 60.0


@contextlib.contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """The device to ourselves among the processes of this user's cache, where that can be had."""
    lock = None
    try:
        folder = Environment.read().cache
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / f"turn-{_name(device)}.lock")
        lock.acquire(timeout=LONGEST_WAIT)
    except (OSError, filelock.Timeout) as error:
        log.debug("timing without a turn of our own: %s", error)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _name(device: torch.device) -> str:
    """Of the device itself: each rank of a machine may call its own `cuda:0`."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", device.index or 0))
