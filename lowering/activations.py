"""Activations that an exact epilogue may hold: name -> function and gradient, in plain aten.

Gradients follow PyTorch's own rules at kinks and for NaN; both take and give the wide dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from loka_compile.kernels import hard_swish as hs

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    of: Callable[[Tensor], Tensor]
    #: (dL/dy, v) -> dL/dv
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS: dict[str, Activation] = {
    "none": Activation(lambda v: v, lambda g, v: g),
    "relu": Activation(torch.relu, lambda g, v: _aten.threshold_backward(g, v, 0)),
    "silu": Activation(F.silu, lambda g, v: _aten.silu_backward(g, v)),
    "sigmoid": Activation(torch.sigmoid, lambda g, v: _aten.sigmoid_backward(g, torch.sigmoid(v))),
    "tanh": Activation(torch.tanh, lambda g, v: _aten.tanh_backward(g, torch.tanh(v))),
    "gelu": Activation(F.gelu, lambda g, v: _aten.gelu_backward(g, v)),
    "gelu_tanh": Activation(
        lambda v: F.gelu(v, approximate="tanh"),
        lambda g, v: _aten.gelu_backward(g, v, approximate="tanh"),
    ),
    "hard_swish": Activation(hs.hard_swish, lambda g, v: g * hs.hard_swish_grad(v)),
    "hard_sigmoid": Activation(hs.hard_sigmoid, lambda g, v: g * hs.hard_sigmoid_grad(v)),
}
