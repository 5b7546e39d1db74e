"""What is timed for the parts of a step (`parts.py`): a kernel alone, and what moves memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka_compile.kernels.block_norm import count_blocks
from loka_compile.kernels.epilogue import ACTIVATIONS
from loka_compile.kernels.epilogue import epilogue_ref
from loka_compile.kernels.orientations import Scale
from loka_compile.kernels.quantize_blockwise import fill
from loka_compile.lowering import chain_formulas
from loka_compile.lowering import gemm
from loka_compile.lowering import pointwise
from loka_compile.lowering import weights
from loka_compile.lowering.bounded import bounded_e4m3
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.epilogue import Pointwise
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import ALIGNMENT
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.parts import BOUNDED
from loka_compile.lowering.parts import EPILOGUE
from loka_compile.lowering.parts import GRADIENT
from loka_compile.lowering.parts import QUANTISE
from loka_compile.lowering.parts import out_of
from loka_compile.lowering.parts import parse_pair
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import Operand

Workload = tuple[Callable[..., Any], tuple[Tensor, ...]]
_EPS = 1e-6
#: Of a norm: hardly a difference, and a width divides it or is narrower.
_BLOCK = 256


def is_own(key: CostKey) -> bool:
    """A part that is a kernel of ours, which Inductor does not compile."""
    return key.library == "loka"


def kernel_alone(key: CostKey, dtype: torch.dtype, device: torch.device) -> Workload:
    """The GEMM on operands that are quantised and laid out; our own kernel with its whole chain."""
    m, k, n = key.m, key.k, key.n
    x, w = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    gy = torch.randn(m, n, device=device).to(dtype)
    if key.layout == "kn":
        w = w.t().contiguous().t()
    a, b = {"fwd": (x, w), "dgrad": (gy, w.t()), "wgrad": (gy.t(), x.t())}[key.direction]
    if key.kernel == HIGH_PRECISION:
        return lambda a, b: torch.mm(a, b.t()), (a, b)
    library, recipe, _ = split_kernel_name(key.kernel)
    rule = library.recipes[recipe].gemm(key.direction)
    assert rule is not None, key
    quantised = gemm.quantized(a, b, key.direction, library, recipe, rule)
    out, epilogue = out_of(key)
    if epilogue:
        form = Epilogue.parse(epilogue)
        if isinstance(form, Pointwise):
            return _pointwise(quantised, rule.fast_accum, form, dtype)
        return _chain(quantised, rule.fast_accum, form, out, dtype)
    # An adapter may be one function that lays out and calls.
    call = library.gemm if type(library).call is Library.call else library.call
    prepared = library.prepare(*quantised, rule)

    def run(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        return call(a, a_scale, b, b_scale, rule, dtype)

    return run, tuple(prepared)


def _chain(
    quantised: tuple[Tensor, ...], fast: bool, form: Epilogue | None, out: str, dtype: torch.dtype
) -> Workload:
    assert form is not None and out in chain_formulas.OUTPUTS
    _, _, w, _ = quantised
    gain = torch.ones(w.shape[0], device=w.device, dtype=dtype) if form.gain else None
    rows = quantised[0].shape[0]
    addend = torch.randn(rows, w.shape[0], device=w.device).to(dtype) if form.add else None
    scale = None if out == "y" else torch.ones((), dtype=torch.float32, device=w.device)

    def run(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> Any:
        # Saves u and r: what a training step keeps.
        return torch.ops.loka.fused_chain(
            a, a_scale, w, w_scale, addend, gain, form.block, _EPS, True, form.act, form.gate,
            fast, dtype, scale, True, out == "y8t",
        )  # fmt: skip

    return run, quantised


def _pointwise(
    quantised: tuple[Tensor, ...], fast: bool, form: Pointwise, dtype: torch.dtype
) -> Workload:
    a, _, w, _ = quantised
    bias, mul, add = _pointwise_operands(form, a.shape[0], w.shape[0], dtype, w.device)
    kept = dtype if pointwise.keeps(mul, form.act, True) else None

    def run(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor) -> Any:
        return torch.ops.loka.fused_pointwise(
            a, a_scale, w, w_scale, bias, mul, add, form.act, fast, dtype, kept
        )

    return run, quantised


def _pointwise_operands(
    form: Pointwise, m: int, n: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(bias, mul, addend)."""

    def make(wanted: bool, *shape: int) -> Tensor | None:
        return torch.randn(shape, device=device).to(dtype) if wanted else None

    mul = make(bool(form.mul), *(() if form.mul == "scale" else (m, n)))
    return make(form.bias, n), mul, make(form.add, m, n)


def moving(key: CostKey, dtype: torch.dtype, device: torch.device) -> Workload:
    """The parts that move memory, in plain aten for Inductor; our own backward kernel."""
    if key.direction == QUANTISE:
        return _quantise(
            key, torch.randn(key.m, key.k, dtype=torch.float32, device=device).to(dtype)
        )
    if key.direction == BOUNDED:
        y = torch.randn(key.m, key.k, dtype=torch.float32, device=device).to(dtype)
        turned = key.recipe == "y8t"
        return lambda y: bounded_e4m3(y, None, min(key.k, _BLOCK), turned), (y,)
    if key.direction in (EPILOGUE, GRADIENT):
        form = Epilogue.parse(key.epilogue)
        if isinstance(form, Pointwise):
            return _pointwise_step(key, form, dtype, device)
        assert form is not None, key
        return _epilogue(key, form, dtype, device)
    x8 = torch.randn(key.m, key.k, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), dtype=torch.float32, device=device)
    return lambda x8, scale: (x8.to(torch.float32) * scale).to(dtype), (x8, scale)


def _pointwise_step(
    key: CostKey, form: Pointwise, dtype: torch.dtype, device: torch.device
) -> Workload:
    t = torch.randn(key.m, key.n, device=device).to(dtype)
    bias, mul, add = _pointwise_operands(form, key.m, key.n, dtype, device)

    def forward(t: Tensor) -> Tensor:
        p = t if bias is None else t + bias
        p = p if mul is None else p * mul
        return ACTIVATIONS[form.act](p if add is None else p + add)

    return forward, (t,)


def _quantise(key: CostKey, t: Tensor) -> Workload:
    if is_own(key):
        first, second = parse_pair(key.recipe)
        assert first is not None and second is not None, key
        straight, turned = (Scale(r.granularity.value, r.dtype) for r in (first, second))
        both = weights.both(t.device)

        def once(t: Tensor) -> tuple[Tensor | None, ...]:
            made = both(t, straight, turned, rows_up=True, columns_up=True)
            return made.q, made.scale, made.qt, made.scale_t

        return once, (t,)
    quantise = quantiser(key.recipe)

    def run(t: Tensor) -> tuple[Tensor, ...]:
        made = quantise(t)
        if parse_pair(key.recipe)[1] is None:
            return made
        # The contraction over the batch is filled up, as in `gemm.quantized`.
        return (*made[:-2], fill(made[-2], 1, ALIGNMENT), made[-1])

    return run, (t,)


def quantiser(recipe: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """t -> FP8 and scales for its two readers, as the recipe of a `quantise` key says."""
    first, second = parse_pair(recipe)

    def made_by(rule: Operand, t: Tensor) -> tuple[Tensor, Tensor]:
        # Every library reads the same rules in the same time; its own layout of scales is nothing.
        return LIBRARIES["torch" if rule.scaled else "bf16"].quantize("", t, rule)

    def run(t: Tensor) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        if first is not None:
            made += made_by(first, t)
        if second is not None:
            q, scale = made_by(second, t.t())
            made += (q.contiguous(), scale)
        return tuple(made)

    return run


def _epilogue(key: CostKey, form: Epilogue, dtype: torch.dtype, device: torch.device) -> Workload:
    m, n = key.m, key.n
    gain = torch.ones(n, device=device, dtype=dtype) if form.gain else None
    z = torch.randn(m, n, device=device).to(dtype)
    addend = torch.randn_like(z) if form.add else None
    if key.direction == EPILOGUE:

        def forward(z: Tensor) -> tuple[Tensor, ...]:
            z = z.float() if addend is None else z.float() + addend
            y, u, r = epilogue_ref(z, gain, form.block, _EPS, form.act, form.gate)
            return y.to(dtype), u.to(dtype), r

        return forward, (z,)
    gy, u = torch.randn_like(z), z
    r = torch.ones(m, count_blocks(n, form.block), dtype=torch.float32, device=device)
    if not is_own(key):

        def backward(gy: Tensor, u: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            return chain_formulas.block_norm_act_backward(
                gy, u, r, gain, form.block, form.act, form.gate
            )

        return backward, (gy, u, r)
    first, second = parse_pair(key.recipe)
    assert first is not None and second is not None, key

    def own(gy: Tensor, u: Tensor, r: Tensor) -> Any:
        *parts, sums = torch.ops.loka.fused_chain_backward(
            gy, u, r, gain, form.block, form.act, form.gate, first.rows, first.dtype,
            second.rows, second.dtype,
        )  # fmt: skip
        return (*parts, sums if gain is None else sums.sum(0).to(gain.dtype))

    return own, (gy, u, r)
