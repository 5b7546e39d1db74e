"""One adapter per library. A kernel is named `<library>:<recipe>`, e.g. `torch:rowwise`."""

from __future__ import annotations

from typing import Any

import torch

from loka_compile.errors import UnknownKernelError
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.libraries.bf16 import Bf16
from loka_compile.lowering.libraries.deep_gemm import DeepGEMM
from loka_compile.lowering.libraries.fbgemm import FBGEMM
from loka_compile.lowering.libraries.fbgemm import FBGEMMTriton
from loka_compile.lowering.libraries.optional import OptionalLibrary
from loka_compile.lowering.libraries.own import Own
from loka_compile.lowering.libraries.torch_scaled_mm import TorchScaledMM
from loka_compile.lowering.libraries.torchao import TorchAO
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION

#: In the order in which equally good candidates are preferred.
LIBRARIES: dict[str, Library] = {
    lib.name: lib
    for lib in (Own(), TorchScaledMM(), TorchAO(), FBGEMM(), FBGEMMTriton(), DeepGEMM(), Bf16())
}


def kernel_names() -> list[str]:
    return [f"{lib.name}:{recipe}" for lib in LIBRARIES.values() for recipe in lib.recipes]


def check_kernel_name(kernel: str) -> str:
    """`kernel` if some library answers to it; else UnknownKernelError with the nearest name."""
    if kernel != HIGH_PRECISION and kernel.removesuffix(EMULATED) not in kernel_names():
        raise UnknownKernelError(kernel, [HIGH_PRECISION, *kernel_names()])
    return kernel


def split_kernel_name(kernel: str) -> tuple[Library, str, bool]:
    """`torch:rowwise+emulated` -> (library, recipe name, emulated)."""
    plain = kernel.removesuffix(EMULATED)
    library, _, recipe = plain.partition(":")
    if library not in LIBRARIES or recipe not in LIBRARIES[library].recipes:
        raise UnknownKernelError(kernel, [HIGH_PRECISION, *kernel_names()])
    return LIBRARIES[library], recipe, plain != kernel


def availability(device: torch.device | str) -> list[dict[str, Any]]:
    """What can run on `device`: rows of `library, kernel, available, reason, version`."""
    device = torch.device(device)
    rows: list[dict[str, Any]] = [
        {
            "library": "torch",
            "kernel": HIGH_PRECISION,
            "available": True,
            "reason": "",
            "version": torch.__version__,
        }
    ]
    for lib in LIBRARIES.values():
        # On a machine without the hardware, a wrong pairing is worth knowing all the same.
        pairing = lib.why_wrong_pairing() if isinstance(lib, OptionalLibrary) else None
        for recipe in lib.recipes:
            why = lib.why_no_recipe(recipe, device)
            said = [w for w in (why, pairing) if w]
            rows.append(
                {
                    "library": lib.name,
                    "kernel": f"{lib.name}:{recipe}",
                    "available": why is None,
                    "reason": "; ".join(dict.fromkeys(said)),
                    "version": lib.version(),
                }
            )
    return rows
