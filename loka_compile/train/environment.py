"""What a run ran on, for its record and for ``loka env``."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

#: Shown name -> distributions that may hold it.
_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
    "torchao": ("torchao",),
    "fbgemm": ("fbgemm-gpu-genai", "fbgemm-gpu"),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm"),
    "loka_compile": ("loka-compile",),
}


def versions(device: Any = None) -> dict[str, Any]:
    """Package versions (None where absent), Python, platform and, given ``device``, its name."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for shown, names in _PACKAGES.items():
        found[shown] = next((v for n in names if (v := _version(n)) is not None), None)
    if device is not None:
        found["device"] = device_name(device)
    return found


def device_name(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm{major}{minor})"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
