"""What a kernel costs at a site: looked up, else timed on the spot, else estimated.

A time is the median under CUDA-graph replay of the compiled kernel with quantise and layout, and of
the epilogue where the site is fused; it is taken at the M of the table's bucket. Without CUDA there
is nothing to time: FP8 on a CPU is emulation.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import cast

import torch
from torch import Tensor

from loka_compile.errors import CostTableError
from loka_compile.kernels.block_norm import count_blocks
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering import chain
from loka_compile.lowering import formulas
from loka_compile.lowering import gemm
from loka_compile.lowering import ops
from loka_compile.lowering import pointwise_autograd  # noqa: F401  (defines the op)
from loka_compile.lowering.cost_store import CostTable
from loka_compile.lowering.cost_store import default_table
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.cost_table import today
from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.epilogue import Pointwise
from loka_compile.lowering.epilogue import is_pointwise
from loka_compile.lowering.estimator import product_of
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import HIGH_PRECISION

log = logging.getLogger("loka_compile")

REPEATS = 5

#: A separate epilogue kernel: launch, bytes per element (read, write, saved u), bytes per us.
EPILOGUE_US = 1.5
EPILOGUE_BYTES = 6
EPILOGUE_BYTES_PER_US = 3e6


@dataclass(frozen=True)
class Cost:
    """`source`: "measured" (now), "table", "estimated" or "failed" (then `note` is the error)."""

    us: float | None
    source: str
    note: str = ""


@dataclass(frozen=True)
class Place:
    """Where a kernel is to run: all that its price hangs on but the kernel and the direction.

    epilogue: text of the fused chain behind the GEMM, "" for none. In the backward it stands for
    the chain's own gradient before the GEMM, which for FP8 writes the quantised operand. dgrad and
    wgrad share that step, and each price holds it whole.
    """

    shape: GemmShape
    dtype: torch.dtype
    device: torch.device
    layout: str = "nk"
    epilogue: str = ""

    def key(self, direction: str, kernel: str, handed: bool = False) -> CostKey:
        # The gradient of an exact epilogue is the same code whatever kernel follows.
        alone = direction != "fwd" and is_pointwise(self.epilogue)
        return CostKey.of(
            kernel,
            direction,
            self.shape.m,
            self.shape.k,
            self.shape.n,
            self.dtype,
            self.device,
            layout=self.layout,
            epilogue="" if alone else self.epilogue,
            handed=handed,
        )


def price(
    direction: str,
    kernel: str,
    place: Place,
    *,
    tune: str,
    handed: bool = False,
    table: CostTable | None = None,
) -> Cost | None:
    """The cost of one direction at `place`; None when nothing is known and nothing may be timed.

    tune: "auto" may time on a CUDA device, which adds a row to the table; "never" may not.
    """
    table = default_table() if table is None else table
    key = place.key(direction, kernel, handed)
    held = table.find(key)
    if held is not None:
        return Cost(held.us, "table")
    if is_pointwise(key.epilogue) and not chain.is_own(kernel):
        return _with_epilogue(direction, kernel, place, tune, handed, table)
    if tune == "auto" and place.device.type == "cuda":
        return _measured(key, place, table)
    return estimated(key, table)


def _with_epilogue(
    direction: str, kernel: str, place: Place, tune: str, handed: bool, table: CostTable
) -> Cost | None:
    """The bare GEMM, whose rows all sites of the shape share, and the epilogue's pass after it."""
    bare = price(
        direction, kernel, replace(place, epilogue=""), tune=tune, handed=handed, table=table
    )
    if bare is None or bare.us is None:
        return bare
    size = place.dtype.itemsize
    # t is read again and y written anew; each operand is read by either form.
    moved = 2 * size * place.shape.m * place.shape.n
    return replace(bare, us=bare.us + EPILOGUE_US + moved / EPILOGUE_BYTES_PER_US)


def latency_us(
    direction: str, kernel: str, shape: GemmShape, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Microseconds of the bare GEMM with its quantise steps, timed if need be; None on a CPU."""
    cost = price(direction, kernel, Place(shape, dtype, device), tune="auto")
    return None if cost is None else cost.us


def estimated(key: CostKey, table: CostTable) -> Cost | None:
    """By a fit to the kernel's rows at other shapes; None with too few of them.

    Without rows of the fused chain, the bare GEMM and one pass of the epilogue over its output
    stand for it.
    """
    fitted = table.fit(key)
    extra = 0.0
    if fitted is None and key.epilogue and not key.handed:
        fitted = table.fit(replace(key, epilogue=""))
        extra = EPILOGUE_US + EPILOGUE_BYTES * key.m * key.n / EPILOGUE_BYTES_PER_US
    if fitted is None:
        return None
    return Cost(
        fitted.predict(*product_of(key.direction, key.m, key.k, key.n)) + extra, "estimated"
    )


#: What failed while it was timed is not tried again: key -> the error.
_FAILED: dict[CostKey, str] = {}


def _measured(key: CostKey, place: Place, table: CostTable) -> Cost:
    if key in _FAILED:
        return Cost(None, "failed", _FAILED[key])
    try:
        us = time_us(key, place.dtype, place.device)
    except Exception as error:
        _FAILED[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        log.debug("could not time %s", key, exc_info=error)
        return Cost(None, "failed", _FAILED[key])
    try:
        table.put([CostRow(key, us, today())])
    except CostTableError as error:
        log.warning("loka: %s", error)
    return Cost(us, "measured")


def time_us(key: CostKey, dtype: torch.dtype, device: torch.device) -> float:
    """Median microseconds of what `key` names, at the M of its bucket. CUDA only."""
    from triton.testing import do_bench_cudagraph

    # A plan may be made inside a step: under autocast.
    with torch.no_grad(), torch.amp.autocast(device.type, enabled=False):
        compiled, arguments = compiled_workload(key, dtype, device)
        compiled(*arguments)
        # One repeat is a mean over many replays already; the median takes out a disturbed one.
        times = [do_bench_cudagraph(lambda: compiled(*arguments), rep=5) for _ in range(REPEATS)]
    return statistics.median(times) * 1e3


def compiled_workload(
    key: CostKey, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Inductor's code for what `key` names, and operands.

    Not through torch.compile: Dynamo would count every shape as a recompile of one function, and
    run the ninth in eager.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    function, arguments = workload(key, dtype, device)
    graph = make_fx(function)(*arguments)
    return cast("Callable[..., Any]", compile_fx(graph, list(arguments))), arguments


def workload(
    key: CostKey, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The function that `key` prices, and operands of its shape."""
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
        x_scale = torch.ones((), device=device)

    def fused(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        # y, u and r: what a training step keeps.
        y, _, _, u, r, _ = ops.FUSED(
            x, x8, x_scale, w, gain if epilogue.gain else None, epilogue.block, 1e-6,
            epilogue.act, epilogue.gate, kernel, HIGH_PRECISION, HIGH_PRECISION, "y", [],
            None, None, None, True, None, None, addend,
        )  # fmt: skip
        return y, u, r

    return fused, (x, w)


def _pointwise(
    epilogue: Pointwise, kernel: str, handed: bool, x: Tensor, w: Tensor
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Our own forward with what a training step keeps."""
    assert chain.is_own(kernel), kernel
    m, n = x.shape[0], w.shape[0]

    def make(wanted: bool, *shape: int) -> Tensor | None:
        return torch.randn(shape, device=x.device).to(x.dtype) if wanted else None

    bias, add = make(epilogue.bias, n), make(epilogue.add, m, n)
    shape = () if epilogue.mul == "scale" else (m, n)
    mul = make(bool(epilogue.mul), *shape)
    x8 = x.to(torch.float8_e4m3fn) if handed else None
    x_scale = torch.ones((), device=x.device) if handed else None

    def fused(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.loka.linear_pointwise(
            x, w, bias, mul, add, epilogue.act, kernel, HIGH_PRECISION, HIGH_PRECISION,
            x8, x_scale, None, None, None, None, None, True,
        )  # fmt: skip

    return fused, (x, w)


def _backward(
    key: CostKey, epilogue: Epilogue | None, x: Tensor, w: Tensor, gy: Tensor
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    kernel, wgrad = key.kernel, key.direction == "wgrad"
    other = x if wgrad else w
    ready = None
    if key.handed:
        # What a producer wrote beside its output: the transpose, filled up to 16 rows.
        x8t = fill(x.t().contiguous().to(torch.float8_e4m3fn), 1, ALIGNMENT)
        ready = (x8t, torch.ones((), device=x.device))

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
    if epilogue.add:
        # The addend's gradient is dL/dz: it is written, and quantised behind that.
        rules = None

    def fused(gy: Tensor, other: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        assert rules is not None
        a, b = rules
        q, scale, qt, scale_t, ggain = torch.ops.loka.fused_chain_backward(
            gy, u, r, gain, *form, a.rows, a.dtype, b.rows, b.dtype
        )
        return product(gy, other, (qt, scale_t) if wgrad else (q, scale)), ggain

    def in_steps(gy: Tensor, other: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        gz, ggain = formulas.block_norm_act_backward(gy, u, r, gain, *form)
        return product(gz, other), ggain

    return (fused if rules else in_steps), (gy, other, u, r)
