"""What puts us into the cache keys of Inductor and AOTAutograd: sources, options, decisions."""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from loka_compile import _compat
from loka_compile.lowering import ops
from loka_compile.options import Options


class CacheKey(CustomGraphPass):
    """Does nothing to the graph; its uuid puts us into the FX and AOTAutograd cache keys.

    Decompositions and registered backwards are in no cache key of torch's own: without this a
    changed formula would run stale in the next process.
    """

    #: See `lowering.direct_calls`.
    of_loka = True

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        return None

    def uuid(self) -> str:
        return self.key


def key_of(decided: tuple[Any, ...], options: Options) -> str:
    """decided: all that shapes a variant beside the options, in plain values."""
    parts = [
        sources_digest(),
        # An entry written while our ops were opaque must not serve a process that lowers them.
        repr(_compat.missing_decompositions(ops.DECOMPOSITIONS)),
        options.fingerprint(),
        repr([_pattern_digest(p) for p in options.patterns]),
        repr(decided),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _pattern_digest(pattern: Any) -> str:
    digest = getattr(pattern, "digest", None)
    if callable(digest):
        return str(digest())
    try:
        return inspect.getsource(type(pattern)) + repr(vars(pattern))
    except (OSError, TypeError):
        return f"{type(pattern).__qualname__} {pattern!r}"


@functools.cache
def sources_digest() -> str:
    """Hash of every source file that shapes compiled code."""
    import loka_compile.kernels as kernels
    import loka_compile.lowering as lowering
    import loka_compile.passes as passes
    import loka_compile.probe as probe

    digest = hashlib.sha256()
    for package in (kernels, lowering, passes, probe):
        for path in sorted(_folder(package).rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _folder(package: ModuleType) -> Path:
    return Path(next(iter(package.__path__)))
