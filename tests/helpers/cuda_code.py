"""Inductor's code for a GPU without one: how many kernels a step has with and without records.

    python tests/helpers/cuda_code.py

Run by tests/lowering/test_meters.py in a process without TRITON_INTERPRET. Autograd runs on CPU
tensors; each graph that it hands to the inner compiler is compiled anew on fake CUDA ones, with the
device's properties made up, and is not run. Prints one JSON line: case -> [kernels of the forward,
of the backward].
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_function
from torch._guards import TracingContext
from torch._guards import tracing
from torch._inductor import compile_fx as inductor
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

from loka_compile.lowering import meters
from loka_compile.lowering import ops  # noqa: F401  (defines ours)

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32,
    max_threads_per_block=1024, shared_memory_per_block=49152, gcnArchName="", uuid="none",
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
)  # fmt: skip


class Driver:
    """What Inductor asks Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class CodeWritten(BaseException):
    """Raised where the code would be compiled and loaded; Inductor catches plain exceptions."""


@contextlib.contextmanager
def made_up_device() -> Iterator[None]:
    def gives(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    torch._C._ensureCUDADeviceGuardSet()
    answers = {
        torch.cuda: {
            "is_available": True, "device_count": 1, "current_device": 0, "_lazy_init": None,
            "get_device_properties": H200, "get_device_capability": (9, 0), "synchronize": None,
            "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
            "_exchange_device": 0, "_maybe_exchange_device": 0, "is_initialized": False,
        },
        CudaInterface: {
            "is_available": True, "is_triton_capable": True, "raise_if_triton_unavailable": None,
            "get_compute_capability": 90, "get_device_properties": H200, "current_device": 0,
        },
        CudaInterface.Worker: {"get_device_properties": H200, "current_device": 0},
        fake_tensor: {"init_gpu_context": None},
    }  # fmt: skip
    with contextlib.ExitStack() as patches:
        for owner, names in answers.items():
            for name, value in names.items():
                call: Any = gives(value)
                if isinstance(owner, type):
                    call = staticmethod(call)
                patches.enter_context(mock.patch.object(owner, name, call, create=True))
        patches.enter_context(mock.patch.object(triton.runtime.driver, "_active", Driver()))
        yield


def on_cuda(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor], Any]:
    """An AOT graph of CPU tensors -> the same on fake CUDA ones, its inputs and their mode."""
    for node in gm.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    gm.recompile()
    likes = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    mode = fake_tensor.FakeTensorMode()
    with mode:
        args = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in likes
        ]
        return make_fx(gm)(*args), args, mode


def kernels_of(function: Callable[..., Tensor], args: list[Tensor]) -> list[int]:
    """Kernels of the forward and of the backward graph."""
    counts: list[int] = []

    def count(graph: GraphLowering) -> None:
        code = graph.codegen()[0]
        text = getattr(code, "value", code)
        counts.append(len(re.findall(r"^\s+triton_\w+\.run\(", text, re.M)))
        raise CodeWritten

    def compiler(gm: fx.GraphModule, _: Any, **__: Any) -> Any:
        (out,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
        likes = [None if node is None else node.meta["val"] for node in out]
        with (
            fake_tensor.unset_fake_temporarily(),
            torch.no_grad(),
            made_up_device(),
            mock.patch.object(GraphLowering, "compile_to_module", count),
        ):
            new, fakes, mode = on_cuda(gm)
            with tracing(TracingContext(mode)), contextlib.suppress(CodeWritten):
                inductor.compile_fx_inner(new, fakes)

        def run(_: list[Any]) -> list[Any]:
            return [
                None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
                for t in likes
            ]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    compiled = aot_function(
        function,
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    compiled(*args).sum().backward()
    return counts


def gate(x: Tensor, first: Tensor, second: Tensor, *cells: Tensor) -> Tensor:
    """Two sites that share their input, and whose gradients are made of the same."""
    names = ["torch:tensorwise"] * 3
    sites = [meters.place_of(index, 2) for index in range(2)] if cells else []
    probes = [[cells[number][row]] for number, row in sites] or [[], []]
    one, other = (
        torch.ops.loka.linear(x, w, None, *names, probe, *[None] * 7)
        for w, probe in zip((first, second), probes, strict=True)
    )
    return torch.relu(one) * other


def main() -> None:
    assert meters.install_lowering()
    like = {"dtype": torch.bfloat16, "requires_grad": True}
    args = [torch.zeros(s, **like) for s in ((4096, 512), (256, 512), (256, 512))]
    cells = list(torch.zeros(meters.shape_of(2), dtype=torch.int64).unbind(0))
    found = {}
    with torch._inductor.config.patch(force_disable_caches=True):
        found["without"] = kernels_of(gate, args)
        found["with"] = kernels_of(gate, [*args, *cells])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
