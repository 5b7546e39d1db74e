"""What a first use runs: one GEMM, or the whole chain where one kernel runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loka_compile.kernels.epilogue import ACTIVATIONS
from loka_compile.kernels.epilogue import pointwise_ref
from loka_compile.lowering import gemm
from loka_compile.lowering import ops
from loka_compile.lowering import pointwise_autograd  # noqa: F401  (defines the op)
from loka_compile.lowering.chain import is_own
from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.epilogue import Pointwise
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import ANY_EPILOGUE
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import HIGH_PRECISION

#: (a, b, kernel) -> the result, for the kernel and for its emulation.
Call = Callable[[Tensor, Tensor, str], Tensor]

_GEMMS: dict[str, Call] = {"fwd": gemm.forward, "dgrad": gemm.dgrad, "wgrad": gemm.wgrad}


def call_of(kernel: str, direction: str, shape: GemmShape) -> Call:
    library, _, _ = split_kernel_name(kernel)
    epilogue = None if shape.epilogue == ANY_EPILOGUE else Epilogue.parse(shape.epilogue)
    if direction != "fwd" or not library.hands_over or epilogue is None:
        return _GEMMS[direction]
    return _pointwise(epilogue) if isinstance(epilogue, Pointwise) else _chain(epilogue)


def _chain(epilogue: Epilogue) -> Call:
    def chain(x: Tensor, w: Tensor, kernel: str) -> Tensor:
        gain = None
        if epilogue.gain:
            gain = torch.linspace(0.5, 2.0, w.shape[0], device=x.device).to(x.dtype)
        y, _, _, u, _, _ = ops.FUSED(
            x, None, None, w, gain, epilogue.block, 1e-6, epilogue.act, epilogue.gate, kernel,
            HIGH_PRECISION, HIGH_PRECISION, "y", [], None, None, None, True, None, None,
        )  # fmt: skip
        # Beside y, which an activation flattens to zeros, what the backward would read.
        return torch.cat([y, u], dim=1)

    return chain


def _pointwise(epilogue: Pointwise) -> Call:
    def linear(x: Tensor, w: Tensor, kernel: str) -> Tensor:
        m, n = x.shape[0], w.shape[0]

        def ramp(*shape: int) -> Tensor:
            count = max(torch.Size(shape).numel(), 1)
            return torch.linspace(0.5, 2.0, count, device=x.device).reshape(shape).to(x.dtype)

        bias = ramp(n) if epilogue.bias else None
        addend = ramp(m, n) if epilogue.add else None
        mul = None
        if epilogue.mul:
            mul = ramp(m, n) if epilogue.mul == "mul" else x.new_full((), 0.75)
        if is_own(kernel):
            y, _ = torch.ops.loka.linear_pointwise(
                x, w, bias, mul, addend, epilogue.act, kernel, HIGH_PRECISION, HIGH_PRECISION,
                None, None, None, None, None, None, None, True,
            )  # fmt: skip
            return y
        _, p = pointwise_ref(gemm.forward(x, w, kernel), bias, mul, addend)
        return ACTIVATIONS[epilogue.act](p).to(x.dtype)

    return linear
