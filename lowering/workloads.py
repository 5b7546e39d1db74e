"""What is timed for a key of the cost table: a function of plain operands, and how it is run.

Whole directions (quantise, GEMM, epilogue) go through Inductor; so do the memory-bound parts. A
kernel alone, and our own kernels, are called as they are: nothing is compiled for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from typing import cast

import torch
from torch import Tensor

from loka_compile.kernels.block_norm import count_blocks
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering import chain
from loka_compile.lowering import chain_formulas
from loka_compile.lowering import gemm
from loka_compile.lowering import ops
from loka_compile.lowering import part_workloads
from loka_compile.lowering import pointwise_autograd  # noqa: F401  (defines the op)
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.epilogue import Pointwise
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.parts import MEMORY_BOUND
from loka_compile.lowering.parts import QUANTISE
from loka_compile.lowering.parts import is_gemm
from loka_compile.lowering.recipes import HIGH_PRECISION

Workload = tuple[Callable[..., Any], tuple[Tensor, ...]]


def ready_to_time(
    key: CostKey, dtype: torch.dtype, device: torch.device, many: bool = False
) -> Workload:
    """What `key` names, compiled where that is how it runs, and operands.

    many: quantising is timed at many sizes, which share one compiled function.
    """
    if is_gemm(key) or part_workloads.is_own(key):
        return workload(key, dtype, device)
    if many and key.direction == QUANTISE and not any(size % ALIGNMENT for size in (key.m, key.k)):
        return _quantiser(key.recipe), workload(key, dtype, device)[1]
    return compiled_workload(key, dtype, device)


@functools.cache
def _quantiser(recipe: str) -> Callable[..., Any]:
    """Of all sizes that are multiples of 16."""
    quantise = part_workloads.quantiser(recipe)

    def run(t: Tensor) -> tuple[Tensor, ...]:
        for size in t.shape:
            torch._check(size % ALIGNMENT == 0)
        return quantise(t)

    compiled = torch.compile(run, dynamic=True)

    def limited(t: Tensor) -> Any:
        # One code object serves all recipes; past Dynamo's limit it would run in eager, unnoticed.
        limits: dict[str, Any] = {"recompile_limit": 512, "accumulated_recompile_limit": 4096}
        with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
            return compiled(t)

    return limited


def compiled_workload(key: CostKey, dtype: torch.dtype, device: torch.device) -> Workload:
    """Inductor's code for what `key` names, and operands.

    Not through torch.compile: Dynamo would count every shape as a recompile of one function, and
    run the ninth in eager.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    function, arguments = workload(key, dtype, device)
    graph = make_fx(function)(*arguments)
    return cast("Callable[..., Any]", compile_fx(graph, list(arguments))), arguments


def workload(key: CostKey, dtype: torch.dtype, device: torch.device) -> Workload:
    """The function that `key` prices, and operands of its shape."""
    if is_gemm(key):
        return part_workloads.kernel_alone(key, dtype, device)
    if key.direction in MEMORY_BOUND:
        return part_workloads.moving(key, dtype, device)
    m, k, n = key.m, key.k, key.n
    kernel = key.kernel
    x = torch.randn(m, k, device=device).to(dtype)
    w = torch.randn(n, k, device=device).to(dtype)
    if key.layout == "kn":
        w = w.t().contiguous().t()
    gy = torch.randn(m, n, device=device).to(dtype)
    epilogue = Epilogue.parse(key.epilogue)
    if key.direction != "fwd":
        assert not isinstance(epilogue, Pointwise), key
        return _backward(key, epilogue, x, w, gy)
    if epilogue is None:
        return functools.partial(gemm.forward, kernel=kernel), (x, w)
    if isinstance(epilogue, Pointwise):
        return _pointwise(epilogue, kernel, key.handed, x, w)
    gain = torch.ones(n, device=device, dtype=dtype)
    addend = torch.randn_like(gy) if epilogue.add else None
    x8 = x_scale = None
    if key.handed:
        x8 = x.to(torch.float8_e4m3fn)
        x_scale = torch.ones((), dtype=torch.float32, device=device)

    def fused(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        # y, u and r: what a training step keeps.
        y, _, _, u, r, _ = ops.FUSED(
            x, x8, x_scale, w, gain if epilogue.gain else None, epilogue.block, 1e-6,
            epilogue.act, epilogue.gate, kernel, HIGH_PRECISION, HIGH_PRECISION, "y", [],
            None, None, None, True, None, None, addend,
        )  # fmt: skip
        return y, u, r

    return fused, (x, w)


def _pointwise(epilogue: Pointwise, kernel: str, handed: bool, x: Tensor, w: Tensor) -> Workload:
    """Our own forward with what a training step keeps."""
    assert chain.is_own(kernel), kernel
    m, n = x.shape[0], w.shape[0]

    def make(wanted: bool, *shape: int) -> Tensor | None:
        return torch.randn(shape, device=x.device).to(x.dtype) if wanted else None

    bias, add = make(epilogue.bias, n), make(epilogue.add, m, n)
    shape = () if epilogue.mul == "scale" else (m, n)
    mul = make(bool(epilogue.mul), *shape)
    x8 = x.to(torch.float8_e4m3fn) if handed else None
    x_scale = torch.ones((), dtype=torch.float32, device=x.device) if handed else None

    def fused(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.loka.linear_pointwise(
            x, w, bias, mul, add, epilogue.act, kernel, HIGH_PRECISION, HIGH_PRECISION,
            x8, x_scale, None, None, None, None, None, True,
        )  # fmt: skip

    return fused, (x, w)


def _backward(
    key: CostKey, epilogue: Epilogue | None, x: Tensor, w: Tensor, gy: Tensor
) -> Workload:
    kernel, wgrad = key.kernel, key.direction == "wgrad"
    other = x if wgrad else w
    ready = None
    if key.handed:
        # What a producer wrote beside its output: the transpose, filled up to 16 rows.
        x8t = fill(x.t().contiguous().to(torch.float8_e4m3fn), 1, ALIGNMENT)
        ready = (x8t, torch.ones((), dtype=torch.float32, device=x.device))

    def product(g: Tensor, other: Tensor, quantised: gemm.Quantized | None = None) -> Tensor:
        call = gemm.wgrad if wgrad else gemm.dgrad
        return call(g, other, kernel, ready=(quantised, ready))

    if epilogue is None:
        return product, (gy, other)
    n = gy.shape[1]
    gain = torch.ones(n, device=x.device, dtype=x.dtype) if epilogue.gain else None
    blocks = count_blocks(n, epilogue.block)
    r = torch.ones(gy.shape[0], blocks, device=x.device, dtype=torch.float32)
    u = torch.randn_like(gy)
    form = (epilogue.block, epilogue.act, epilogue.gate)
    rules = chain.backward_rules(chain.OWN + "tensorwise", kernel, kernel)

    def fused(gy: Tensor, other: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        assert rules is not None
        a, b = rules
        q, scale, qt, scale_t, ggain = torch.ops.loka.fused_chain_backward(
            gy, u, r, gain, *form, a.rows, a.dtype, b.rows, b.dtype
        )
        return product(gy, other, (qt, scale_t) if wgrad else (q, scale)), ggain.sum(0)

    def in_steps(gy: Tensor, other: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        gz, ggain = chain_formulas.block_norm_act_backward(gy, u, r, gain, *form)
        return product(gz, other), ggain

    return (fused if rules else in_steps), (gy, other, u, r)
