"""Every question about a torch, triton or library version, with its range and removal condition."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch

TORCH = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])


# -- devices --------------------------------------------------------------------------------------


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


def _release(version: str) -> tuple[int, ...]:
    """'0.1.5.post1' -> (0, 1, 5, 1): enough to order the releases of one package."""
    numbers = re.match(r"(\d+)\.(\d+)\.?(\d*)(?:\.post(\d+))?", version)
    return tuple(int(n or 0) for n in numbers.groups()) if numbers else ()


#: Package -> [(first release, last release, torch versions that its binaries load into)]. None of
#: these packages declares the torch it was built for. Releases not listed are simply tried.
_PAIRS: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], set[tuple[int, int]]]]] = {
    "fbgemm-gpu-genai": [
        ((0,), (1, 5, 99), {(2, 10)}),
        ((1, 6), (1, 6, 99), {(2, 11)}),
        ((1, 7), (1, 7, 99), {(2, 12)}),
        ((1, 8), (1, 8, 99), {(2, 13)}),
        ((1, 9), (1, 9, 99), {(2, 14)}),
    ],
    "sgl-deep-gemm": [
        ((0, 0, 1), (0, 1, 5, 1), {(2, 11), (2, 12)}),
        ((0, 1, 5, 2), (0, 2, 0, 99), {(2, 13)}),
        ((0, 2, 1, 1), (0, 2, 5, 99), {(2, 14)}),
    ],
}


def why_wrong_pairing(distribution: str, version: str) -> str | None:
    """Why the installed `version` cannot be loaded beside this torch, where that is known."""
    release = _release(version)
    for first, last, torches in _PAIRS.get(distribution, []):
        if release and first <= release <= last and TORCH not in torches:
            wanted = " or ".join(".".join(map(str, t)) for t in sorted(torches))
            return f"{distribution} {version} is built for torch {wanted}, not {torch.__version__}"
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


# -- lowering by decomposition --------------------------------------------------------------------


def install_decompositions(table: dict[Any, Callable[..., Any]]) -> None:
    """Put `table` into both of Inductor's decomposition tables, in place.

    Torch 2.11 to 2.14: `fast_random_decomps()` is a frozen copy made at Inductor's first compile.
    Updating only the base dict would leave our ops opaque, with no message, in any process that ran
    a plain torch.compile before. Remove when Inductor has a public hook for decompositions.
    """
    from torch._inductor import decomposition

    decomposition.decompositions.update(table)
    decomposition.fast_random_decomps().update(table)


def register_fake(name: str, lib: torch.library.Library) -> Callable[[Any], Any]:
    """`torch.library.register_fake`, at less than half of its time.

    Torch 2.11 to 2.14 ask `inspect` for the caller's line, which looks at every loaded module: for
    all of our ops a fifth of the time that importing them takes, at every start.
    """
    from torch._library import utils

    def register(fake: Any) -> Any:
        code = getattr(fake, "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else name
        asked = getattr(utils, "get_source", None)
        try:
            if asked is not None:
                setattr(utils, "get_source", lambda stacklevel: where)  # noqa: B010
            torch.library.register_fake(name, fake, lib=lib)
        finally:
            if asked is not None:
                setattr(utils, "get_source", asked)  # noqa: B010
        return fake

    return register


def missing_decompositions(table: dict[Any, Callable[..., Any]]) -> list[str]:
    """The ops of `table` that Inductor would not lower as asked; empty when all is in force."""
    from torch._inductor import decomposition

    active = decomposition.select_decomp_table()
    return [str(op) for op, formula in table.items() if active.get(op) is not formula]


# -- exceptions that are no failures --------------------------------------------------------------


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions by which the inner compiler asks Dynamo to trace again; they must pass through.

    TensorifyScalarRestartAnalysis, for one, turns float inputs (a norm's eps under dynamic=True)
    into literals on the second trace.
    """
    from torch._dynamo.exc import RestartAnalysis

    return (RestartAnalysis,)


# -- distributed ----------------------------------------------------------------------------------


def default_store() -> Any:
    """The key-value store of the default process group. Torch 2.11 to 2.14 have no public name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


# -- autograd -------------------------------------------------------------------------------------


def set_versions_to_zero(tensors: tuple[torch.Tensor, ...]) -> None:
    """Make autograd forget that `tensors` were written to in place since they were saved.

    Torch 2.11 to 2.14 have this only under `_C`. Remove when a saved tensor can opt out of the
    check.
    """
    torch._C._autograd._unsafe_set_version_counter(tensors, (0,) * len(tensors))


def saved_tensors_are_hooked() -> bool:
    """Is something (a checkpoint, offloading) packing what autograd saves here.

    Torch 2.11 to 2.14 have this only under `_C`.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensors_unhooked() -> contextlib.AbstractContextManager[Any]:
    """What is computed inside is none of the step's: a checkpoint around it must not count it."""
    if not saved_tensors_are_hooked():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def keeping_graphs() -> Any:
    """A compile whose backward may run twice, or the first of its two backwards.

    Torch 2.11 to 2.14: AOTAutograd decides when it traces, by a global setting, whether a backward
    may take over the forward's buffers, and looks at the setting once more when it runs.
    """
    return torch._functorch.config.patch(donated_buffer=False)


def guard_backward(node: Any, on_failure: Callable[..., Any]) -> bool:
    """Let `on_failure(node, gradients, error)` answer where the backward of AOTAutograd's `node`
    raises; False where `node` is none of its.

    Torch 2.11 to 2.14 make one autograd.Function per compiled graph; from 2.13 on its gradients
    come in a list that it empties. Remove when compiled backwards can be wrapped by a hook.
    """
    function = getattr(type(node), "_forward_cls", None)
    if function is None or not hasattr(function, "compiled_bw"):
        return False
    if not hasattr(function, "loka_guarded"):
        backward = function.backward

        def guarded(ctx: Any, *given: Any) -> Any:
            boxed = getattr(function, "boxed_grads_call", False)
            grads = list(given[0]) if boxed else list(given)
            try:
                return backward(ctx, *given)
            except Exception as error:
                return on_failure(ctx, grads, error)

        function.loka_guarded = True
        function.backward = staticmethod(guarded)
    return True


def in_backward() -> bool:
    """True inside autograd's backward, where a checkpoint calls its forward again."""
    return torch._C._current_graph_task_id() != -1


# -- fake tensors and tracing ---------------------------------------------------------------------


def count_guards(fake_mode: Any) -> int:
    shape_env = getattr(fake_mode, "shape_env", None)
    return 0 if shape_env is None else len(shape_env.guards)


def graph_module(root: Any, graph: torch.fx.Graph, class_name: str) -> torch.fx.GraphModule:
    """A GraphModule whose code is made at its first call, as Dynamo's own: for a large graph that
    takes longer than a pass, and most copies are never called."""
    from torch.fx import _lazy_graph_module as lazy

    with lazy._use_lazy_graph_module(True):
        return lazy._make_graph_module(root, graph, class_name=class_name)


#: What Dynamo of torch 2.14 calls for attributes that it read by `getattr` before.
_ATTRIBUTES: dict[Any, str] = {torch.ops.aten.numpy_T: "T", torch.ops.aten.mT: "mT"}


def spell_attributes(graph: torch.fx.Graph) -> None:
    """`x.T` and `x.mT` as every other version's Dynamo writes them."""
    for node in graph.nodes:
        if node.op == "call_function" and len(node.args) == 1 and not node.kwargs:
            name = _ATTRIBUTES.get(node.target)
            if name is not None:
                node.target, node.args = getattr, (node.args[0], name)


def plain_dispatch() -> bool:
    """No dispatch mode is active: a tensor that is made is the one that was asked for."""
    return torch._C._len_torch_dispatch_stack() == 0


def new_fake(
    fake_mode: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    """A fake of its own memory, without the dispatch of a factory op (ten times the time)."""
    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    new = fake_mode.fake_tensor_converter.from_meta_and_device(fake_mode, meta, device)
    return new.requires_grad_() if requires_grad else new


@contextlib.contextmanager
def late_compile(fake_mode: Any) -> Iterator[None]:
    """What a compile needs when it runs after Dynamo has finished: its lock and a fresh context."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._guards import TracingContext
    from torch._guards import tracing

    with compile_lock, _compiling(), tracing(TracingContext(fake_mode)):
        yield


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """What Dynamo holds true while it compiles.

    Without it another thread that calls compiled code meanwhile is taken for an FX trace of it.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def real_inputs(gm: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """`inputs` with real tensors in place of fakes, where Dynamo still holds them.

    DDPOptimizer, on by default, hands fakes of the parameters to the backend.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    found = list(inputs)
    for i, (node, given) in enumerate(zip(placeholders, inputs, strict=False)):
        held = node.meta.get("grapharg")
        if held is not None and is_fake(given):
            real = held.example
            found[i] = real if isinstance(real, torch.Tensor) else given
    return found


def size_hint(size: Any, fallback: int = 0) -> int:
    """A dimension's example value, without a guard: an int as it is, a SymInt by its hint."""
    if isinstance(size, int):
        return size
    node = size.node
    hint = getattr(node, "hint", None)
    if hint is not None:
        return int(hint)
    optimization_hint = getattr(node.shape_env, "optimization_hint", None)  # torch >= 2.13
    if optimization_hint is not None:
        return int(optimization_hint(node.expr, fallback=fallback))
    return fallback


def source_name(node: torch.fx.Node) -> str | None:
    """Dynamo's name of a placeholder's source. A property since 2.13, a method before."""
    # A graph that DDPOptimizer split off keeps the source in its meta only.
    source = getattr(node, "_dynamo_source", None) or getattr(
        node.meta.get("grapharg"), "source", None
    )
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


# -- custom graph passes --------------------------------------------------------------------------


def join_graph_passes(ours: Any, theirs: Any) -> Any:
    """Keep the user's own `joint_custom_pre_pass`: a list since 2.13, one composed pass before."""
    if theirs is None:
        return ours
    if TORCH >= (2, 13):
        return [ours, *(theirs if isinstance(theirs, (list, tuple)) else [theirs])]

    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Both(CustomGraphPass):
        of_loka = True

        def __call__(self, graph: torch.fx.Graph) -> None:
            ours(graph)
            theirs(graph)

        def uuid(self) -> Any:
            uuid = getattr(theirs, "uuid", None)
            return (ours.uuid(), uuid() if uuid is not None else None)

    return Both()


# -- autocast -------------------------------------------------------------------------------------


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@contextlib.contextmanager
def restore_autocast(state: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """A late compile must trace under the autocast state of the first one."""
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in state:
            if kind == "cuda" and not torch.cuda.is_available():
                continue
            stack.enter_context(torch.amp.autocast(kind, dtype=dtype, enabled=enabled))
        yield


def compile_in_processes(count: int) -> None:
    """Let Inductor compile kernels in `count` processes, and start them now.

    Setting the number alone leaves the first kernels to this process: the pool starts with them.
    """
    from torch._inductor import async_compile
    from torch._inductor import config

    config.compile_threads = count
    warm = getattr(async_compile, "maybe_warm_pool", None)
    if warm is not None:
        warm()
