"""Launch kernels of ours without a GPU, as Triton does and directly, and compare what arrives.

    python tests/helpers/launch_nowhere.py

Run by tests/kernels/test_call.py in a process without TRITON_INTERPRET. Kernels are compiled for
Hopper and go through Triton's own launcher, under which lies a libcuda that launches nothing. One
JSON line per case: `by_triton`, `direct`, digests of every launch (grid, attributes, stream,
function and all parameters, tensor maps bit by bit); `new_maps`, the same with maps made anew;
`unknown`, kernels without a direct launch; `calls`, the Python functions that a call of the op runs
once everything is settled.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
FOLDER = tempfile.mkdtemp(prefix="nowhere-")
os.environ["TRITON_LIBCUDA_PATH"] = FOLDER

import torch  # noqa: E402
import triton  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "f32": 4, "fp64": 8}
STREAM = 77


class Config(ctypes.Structure):
    """CUlaunchConfig up to what Triton sets."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def library() -> Any:
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    target = Path(FOLDER) / "libcuda.so.1"
    source = HERE / "libcuda_nowhere.c"
    flags = ["-shared", "-fPIC", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *flags, "-o", target, source], check=True)
    (Path(FOLDER) / "libcuda.so").symlink_to(target.name)
    # Before anything else asks for the name.
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def stand_in() -> None:
    """What Triton and we ask torch about a device."""
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda index: STREAM  # type: ignore[attr-defined]
    from triton.backends.nvidia.driver import CudaDriver

    triton.runtime.driver.set_active(CudaDriver())


class Launches:
    """Digests of launches, in order."""

    def __init__(self, cuda: Any) -> None:
        self.sizes: dict[int, list[int]] = {}
        self.found: list[str] | None = None
        kind = ctypes.CFUNCTYPE(
            None,
            ctypes.POINTER(Config),
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
        )
        self._callback = kind(self._seen)
        cuda.tell(self._callback)

    def know(self, kernel: Any) -> None:
        """How large the parameters of a compiled kernel are; two places of scratch come last."""
        sizes = []
        for one in kernel.src.signature.values():
            if one.startswith("tensordesc"):
                rank = one.count(",") + 1
                sizes += [128, *[4] * rank, *[8] * rank]
            elif one != "constexpr":
                sizes.append(8 if one.startswith("*") else SIZES[one])
        self.sizes[kernel.function] = [*sizes, 8, 8]

    def _seen(self, config: Any, function: int, params: Any) -> None:
        if self.found is None:
            return
        config = config.contents
        # An attribute is 8 bytes of what it is and 64 of its value.
        attributes = ctypes.string_at(config.attributes, 72 * config.count) if config.count else b""
        kinds = [attributes[72 * i] for i in range(config.count)]
        text = f"{[*config.sizes]} {config.stream} {function} {kinds}"
        whole = hashlib.sha256(text.encode())
        for i, size in enumerate(self.sizes[function]):
            whole.update(ctypes.string_at(params[i], size))
        self.found.append(f"{text} {whole.hexdigest()}")

    def of(self, call: Callable[[], Any]) -> list[str]:
        self.found = []
        call()
        found, self.found = self.found, None
        return found


def cases() -> dict[str, Callable[[], Any]]:
    """As compiled code calls the ops of a step."""
    from loka_compile.kernels import chain_values
    from loka_compile.kernels import estimate
    from loka_compile.kernels.observe import observe
    from loka_compile.kernels.orientations import Scale
    from loka_compile.kernels.quantize_both import quantize_both
    from loka_compile.kernels.quantize_rows import quantize_rows
    from loka_compile.kernels.quantize_weights import quantize_weights
    from loka_compile.kernels.quantize_weights import sizes_of
    from loka_compile.kernels.weight_group import Asked
    from loka_compile.lowering import chain
    from loka_compile.lowering import chain_backward
    from loka_compile.lowering import interaction
    from loka_compile.probe.coherence import record_kernels
    from loka_compile.probe.statistics import Statistics

    m, n, k, block = 80, 256, 384, 128
    bf16, one = torch.bfloat16, torch.ones(())

    def full(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    a, w = full(m, k, dtype=E4M3), full(n, k, dtype=E4M3)
    gy, u, r = full(m, n), full(m, n), torch.ones(m, n // block)
    x, p, left = full(9, 32, 16), full(8, 32).t(), full(24, 32)
    gfm, gc = full(9, 32, 8), full(9, 24, 16)
    cells = torch.zeros(2, dtype=torch.int64)
    gain, unaligned = full(n), full(n + 1)[1:]
    tail = (block, 1e-6, True, "hard_swish", False, True, bf16)
    chain_of = chain._fused_chain_cuda
    back = (block, "hard_swish", False)
    recorded = Statistics.empty(n, bf16, torch.device("cpu"), gradient=True).tensors
    state, of_gradient = recorded[:3], recorded[3:]
    shown, good = torch.zeros(m, n), torch.zeros(m - 1, dtype=torch.int32)
    gw, inputs, wanted = full(n, k), full(m, k), torch.ones(1, dtype=torch.bool)
    rows, tensor = (torch.ones(m, 1), torch.ones(n, 1)), Scale("tensor")
    weights, asked = (full(n, k), full(k, n), full(40, n)), (Asked(tensor, tensor),) * 3
    sizes = sizes_of(weights)
    return {
        "forward": lambda: chain_of(a, rows[0], w, rows[1], gy, unaligned, *tail, one, True, True),
        "backward": lambda: chain_backward._fused_chain_backward_cuda(
            gy, u, r, None, *back, False, E5M2, False, E5M2, cells
        ),
        "backward_rows": lambda: chain_backward._fused_chain_backward_cuda(
            gy, u, r, gain, *back, True, E5M2, True, E5M2
        ),
        "backward_groups": lambda: chain_backward._fused_chain_backward_groups_cuda(
            gy, u, r, None, *back, E4M3, E4M3
        ),
        "interaction": lambda: interaction._forward_cuda(x, p, left),
        "interaction_backward": lambda: interaction._backward_cuda(gfm, gc, x, p, left),
        "quantize": lambda: quantize_both(gy, tensor, tensor, columns_up=True),
        "quantize_rows": lambda: quantize_rows(gy),
        "quantize_weights": lambda: quantize_weights(weights, asked, bf16, sizes),
        "observe": lambda: observe(gy, None, *state, candidates=32, weight=0.1),
        "observe_some": lambda: observe(
            unaligned.view(1, n), wanted, *state, candidates=32, weight=0.1
        ),
        "chain_value": lambda: chain_values.activated(u, gain, "hard_swish"),
        "chain_gradient": lambda: chain_values.gradient(gy, u, r, None, *back),
        "clean_rows": lambda: estimate.clean(state[0], state[2]),
        "error": lambda: estimate.error(gy, shown, good, 0.1),
        "coherence": lambda: record_kernels(gw, gy, inputs, state[2], *of_gradient),
    }


class Same:
    """Allocates what it did at the same place of the call before: so do a step's allocations."""

    def __init__(self) -> None:
        self.made: dict[Any, torch.Tensor] = {}
        self.at = 0

    def room(self, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        self.at += 1
        key = (self.at, shape, strides, dtype)
        if key not in self.made:
            self.made[key] = torch.empty_strided(shape, strides, dtype=dtype)
        return self.made[key]

    def allocator(self, device: torch.device) -> Callable[..., torch.Tensor]:
        return self.room

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        from loka_compile.kernels.room import dense

        return self.room(*dense(shape, dtype))


def main() -> None:
    launches = Launches(library())
    stand_in()
    from loka_compile.kernels import call as calls
    from loka_compile.kernels import chain_values
    from loka_compile.kernels import estimate
    from loka_compile.kernels import fused_backward
    from loka_compile.kernels import fused_backward_blocks
    from loka_compile.kernels import fused_forward
    from loka_compile.kernels import fused_recipe
    from loka_compile.kernels import interaction
    from loka_compile.kernels import launch
    from loka_compile.kernels import observe
    from loka_compile.kernels import quantize_both
    from loka_compile.kernels import quantize_rows
    from loka_compile.kernels import quantize_weights
    from loka_compile.kernels import sketch
    from loka_compile.lowering import chain

    modules = [fused_forward, fused_backward, fused_backward_blocks, interaction]
    modules += [quantize_both, quantize_rows, quantize_weights, observe, sketch, estimate]
    modules.append(chain_values)
    allocate = Same()
    chain.fused_kernel()
    for one in (*modules, fused_recipe):
        for name in ("allocator", "empty"):
            if hasattr(one, name):
                setattr(one, name, getattr(allocate, name))
        if hasattr(one, "overlaps"):
            one.overlaps = lambda device: True
    chain.fused_kernel = lambda: (fused_forward.forward, allocate.allocator)  # type: ignore[assignment]
    calls.raw_stream = launch.raw_stream = torch._C._cuda_getCurrentRawStream  # type: ignore[attr-defined]
    launchers = [v for m in modules for v in vars(m).values() if isinstance(v, launch.Launcher)]
    recipes = [v for m in modules for v in vars(m).values() if isinstance(v, launch.Recipes)]

    for name, run in cases().items():

        def call(run: Callable[[], Any] = run) -> None:
            allocate.at = 0
            run()

        call()
        compiled = [one for by in launchers for one in by._compiled.values()]
        for one in compiled:
            launches.know(one.kernel)
        directs = [(one, one.direct) for one in compiled]
        for one in compiled:
            one.direct = None
        for recipe in recipes:
            recipe.clear()
        by_triton = launches.of(call)
        for one, direct in directs:
            one.direct = direct
        call()
        direct_ones = launches.of(call)
        # Tensor maps of addresses that were not seen, and where there is room for one more map.
        for one in compiled:
            one.maps.clear()
            one.maps.update(dict.fromkeys(range(launch.Recipes.MOST - 1), ()))
        found = {
            "case": name,
            "by_triton": by_triton,
            "direct": direct_ones,
            "new_maps": launches.of(call),
            "unknown": [one.kernel.name for one, direct in directs if direct is None],
            "calls": counted(call),
        }
        print(json.dumps(found), flush=True)


def counted(call: Callable[[], None]) -> int:
    """Python functions of ours below the op's, allocation left out."""
    seen = SimpleNamespace(count=0)

    def count(frame: Any, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        seen.count += event == "call" and "loka_compile" in file + frame.f_globals["__name__"]

    call()
    sys.setprofile(count)
    call()
    sys.setprofile(None)
    return seen.count


if __name__ == "__main__":
    main()
