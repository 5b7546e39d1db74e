"""Libraries that may be missing, broken or paired with another torch: found when asked for."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from loka_compile import _compat
from loka_compile.lowering.libraries.base import Library


@functools.cache
def load(module: str) -> ModuleType:
    """Import `module` once. Raises what the import raises."""
    return importlib.import_module(module)


@functools.cache
def why_no_import(module: str, distribution: str) -> str | None:
    """None when `module` imports, else why not, in one line."""
    try:
        load(module)
    except ModuleNotFoundError as e:
        if e.name is not None and (module == e.name or module.startswith(e.name + ".")):
            return f"{distribution} is not installed (pip install {distribution})"
        return f"{distribution} needs {e.name} (pip install {e.name})"
    except Exception as e:
        # An undefined symbol, an assert about CUDA_HOME, a missing driver library: all are a reason
        # not to use this library and none is a reason to stop the user's program.
        said = str(e).strip().splitlines() or [""]
        return f"{distribution} does not import: {type(e).__name__}: {said[0][:200]}"
    return None


class OptionalLibrary(Library):
    """An adapter whose kernels live in `module`, for devices of the capabilities listed."""

    module: str
    #: Major compute capabilities that have kernels.
    majors: tuple[int, ...]
    emulated_elsewhere = True

    def why_wrong_pairing(self) -> str | None:
        """What package metadata alone says about this version beside this torch."""
        return _compat.why_wrong_pairing(self.distribution, self.version())

    def why_unavailable(self, device: torch.device) -> str | None:
        # The device first: nothing is imported for a machine that could not run it.
        why = _compat.why_no_fp8(device) or self.why_wrong_pairing()
        if why is not None:
            return why
        major, minor = torch.cuda.get_device_capability(device)
        if major not in self.majors:
            return f"{self.distribution} has no kernels for compute capability {major}.{minor}"
        return self.why_environment() or why_no_import(self.module, self.distribution)

    def why_environment(self) -> str | None:
        """What the library needs beside its own files, where that can be known beforehand."""
        return None
