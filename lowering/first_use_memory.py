"""Outcomes of first uses, kept in the user's cache: one small file each, named by all that counts.

A file is written whole and never changed, so any number of processes may share the folder; what
cannot be read counts as not there. What may pass by itself (no memory left) is not kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from pathlib import Path

import torch

from loka_compile import _compat
from loka_compile.files import write_text
from loka_compile.lowering.cost_table import today
from loka_compile.lowering.cost_table import version_of
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Environment

log = logging.getLogger("loka_compile")

#: (kernel, direction, shape, dtype, device)
Key = tuple[str, str, GemmShape, torch.dtype, str]

#: Outcomes that begin so are those of the moment.
NO_MEMORY = "first use ran out of memory"
NO_CHILD = "no child process could be started to try it"


def recall(key: Key) -> tuple[str | None] | None:
    """(None,) for a kernel that was right, (why,) for one that was not; None: nothing is known."""
    if not _is_kept(key):
        return None
    try:
        held = json.loads(_path(key).read_text(encoding="utf-8"))
        return None if held["key"] != _text(key) else (held["why"],)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("cannot read %s: %s", _path(key), error)
        return None


def remember(key: Key, why: str | None) -> None:
    if not _is_kept(key) or (why or "").startswith((NO_MEMORY, NO_CHILD)):
        return
    try:
        body = {"key": _text(key), "why": why, "date": today()}
        write_text(_path(key), json.dumps(body, indent=1) + "\n")
    except OSError as error:
        log.debug("cannot write %s: %s", _path(key), error)


def folder() -> Path:
    return Environment.read().cache / "first_use"


def _is_kept(key: Key) -> bool:
    return key[0] != HIGH_PRECISION and not key[0].endswith(EMULATED)


def _path(key: Key) -> Path:
    return folder() / (hashlib.sha256(repr(_text(key)).encode()).hexdigest()[:32] + ".json")


def _text(key: Key) -> list[str]:
    """All that an outcome hangs on: the GEMM, the device, every version and our own sources."""
    kernel, direction, shape, dtype, device = key
    library = kernel.partition(":")[0]
    return [
        kernel,
        direction,
        f"M={shape.m} K={shape.k} N={shape.n} {shape.epilogue}".strip(),
        str(dtype),
        _compat.device_key(torch.device(device)),
        f"{library} {version_of(library, direction)}",
        f"torch {torch.__version__}",
        f"sources {_sources()}",
    ]


@functools.cache
def _sources() -> str:
    """Of what runs a kernel and what it is compared with."""
    import loka_compile.kernels as kernels

    digest = hashlib.sha256()
    for place in (Path(__file__).parent, Path(next(iter(kernels.__path__)))):
        for path in sorted(place.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
