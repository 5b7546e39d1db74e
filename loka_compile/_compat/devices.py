"""What a device can, and what it is called."""

from __future__ import annotations

import functools

import torch

from loka_compile._compat.versions import TORCH


def why_no_fp8(device: torch.device) -> str | None:
    """None when `torch._scaled_mm` has FP8 hardware under it on `device`, else the reason."""
    if device.type != "cuda":
        return f"no FP8 hardware on {device.type} (set emulate=True to run the same arithmetic)"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip:
        return "ROCm is not supported in this version"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"compute capability {major}.{minor} has no FP8 units (8.9 or newer needed)"
    return None


def why_no_bf16(device: torch.device) -> str | None:
    """None when `device` multiplies bf16 faster than float32, else the reason.

    Without a GPU it is that for FP8: one reason for all kernels is what the report has to say.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return why_no_fp8(device)
    major, minor = torch.cuda.get_device_capability(device)
    if not torch.version.hip and major < 8:
        return f"compute capability {major}.{minor} has no bf16 units (8.0 or newer needed)"
    return None


@functools.cache
def why_no_triton() -> str | None:
    """None when Triton with host tensor descriptors can be imported, else the reason."""
    try:
        import triton.tools.tensor_descriptor  # noqa: F401
    except ImportError as error:
        return f"triton with tensor descriptors is missing ({error})"
    return None


def why_no_scaled_mm_rowwise(device: torch.device) -> str | None:
    """Torch 2.11's CPU kernel takes one scale per tensor; row scales came later."""
    if device.type == "cpu" and TORCH < (2, 13):
        return f"torch {torch.__version__} has no row-scaled _scaled_mm on CPU"
    return None


def why_no_block_scaled_mm(device: torch.device) -> str | None:
    """The second version of scaled_mm, with 1 x 128 and 128 x 128 scales: cuBLASLt 12.9, Hopper."""
    from torch.nn import functional

    if not hasattr(getattr(functional, "ScalingType", None), "BlockWise1x128"):
        return f"torch {torch.__version__} has no block-scaled scaled_mm"
    if device.type != "cuda":
        return f"no block-scaled scaled_mm on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"block-scaled scaled_mm needs compute capability 9.0, this is {major}.{minor}"
    cuda = tuple(int(x) for x in (torch.version.cuda or "0.0").split(".")[:2])
    if cuda < (12, 9):
        return f"block-scaled scaled_mm needs CUDA 12.9, this torch has {torch.version.cuda}"
    return None


def device_key(device: torch.device) -> str:
    """Name and capability, as plans and cost rows are keyed."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} sm{major}{minor}"
    return device.type


def multiprocessors(name: str) -> int:
    """SMs of the device that a `device_key` gives: of the one here, else of a known kind."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if device_key(torch.device("cuda", index)) == name:
                return int(torch.cuda.get_device_properties(index).multi_processor_count)
    known = {"H200": 132, "H100": 132, "GB200": 148, "B200": 148, "L40": 142, "4090": 128}
    return next((count for kind, count in known.items() if kind in name), 132)


def tf32_allowed() -> bool:
    """May float32 products use TF32 on CUDA.

    Torch 2.11 to 2.14 have two switches for it, and reading the older one raises once the newer
    one was written. Remove the first branch when `allow_tf32` goes.
    """
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def delay_device(device: torch.device, us: float) -> None:
    """Keep the current stream of `device` busy for `us` microseconds or more.

    Torch 2.11 to 2.14 have this for their own tests, in cycles of the device's clock, which is
    taken for 2.7 GHz.
    """
    with torch.cuda.device(device):
        torch.cuda._sleep(int(2.7e3 * us))


def await_stream(device: torch.device) -> None:
    """Until what was started on the current stream of `device` is done; at once without CUDA."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
