"""Quantised weights for inference: made once per version of the parameter, at a stable address.

A version is told by identity, `_version`, `data_ptr` and the number of optimizer steps in this
process: fused optimizers, and those that write through `.data`, move no version counter. A write
through `.data` by hand moves none of these, and neither does one to a parameter that was made under
`inference_mode`; `weight_cache="off"` is for programs that do that. Nor does FSDP2 where it gathers
a weight, which is therefore quantised at every call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from loka_compile import _compat
from loka_compile.lowering import chain
from loka_compile.lowering import gemm

_steps = 0


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


def watch_optimizers() -> None:
    """Count optimizer steps from now on; called once something is cached."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_post_hook(_count_step)


_watching = False


def like(w: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """Empty CPU tensors of the shapes and dtypes that `quantize` gives for w (N, K)."""
    rule = chain.rule_of(kernel).b
    n, k = (int(s) for s in w.shape)
    scale = (n, 1) if rule.rows else ()
    return torch.empty((n, k), dtype=rule.dtype), torch.empty(scale, dtype=torch.float32)


@dataclass(eq=False)
class Stored:
    """One weight as one kernel's forward reads it."""

    kernel: str
    dtype: torch.dtype
    transposed: bool
    q: Tensor
    scale: Tensor

    @classmethod
    def of(cls, w: Tensor, kernel: str, dtype: torch.dtype, transposed: bool) -> Stored:
        watch_optimizers()
        q, scale = _quantized(w, kernel, dtype, transposed)
        return cls(kernel, dtype, transposed, q, scale)

    def renew(self, w: Tensor) -> None:
        """Quantise `w` again into the same memory: CUDA graphs hold its address."""
        q, scale = _quantized(w, self.kernel, self.dtype, self.transposed)
        with torch.inference_mode(False), torch.no_grad():
            self.q.view(torch.uint8).copy_(q.view(torch.uint8))
            self.scale.copy_(scale)


def _quantized(
    w: Tensor, kernel: str, dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor]:
    # Tensors made under inference_mode could not be written to later, outside it.
    with torch.inference_mode(False), torch.no_grad():
        w = w.detach().to(dtype)
        w = w.t() if transposed else w
        q, scale = gemm.operand(w, chain.rule_of(kernel).b, kernel)
        return q.contiguous(), scale.contiguous()


_version_of = operator.attrgetter("_version")


def _version(w: Tensor) -> int:
    # Tensors made under inference_mode have no version counter, and raise when asked for it.
    return 0 if w.is_inference() else w._version


class Cache:
    """The stored weights of one binding, renewed together before a call."""

    def __init__(self, stored: Sequence[Stored], positions: Sequence[int], frozen: bool) -> None:
        """`positions`: where each weight stands among the graph's arguments."""
        self.stored = list(stored)
        self.positions = list(positions)
        self.frozen = frozen
        #: FSDP2 gathers into a weight anew before each forward, and moves no version by it.
        self._gathered = False
        self.tensors = tuple(t for one in self.stored for t in (one.q, one.scale))
        self._seen: list[tuple[int, int]] = []
        self._sum = -1
        self._addresses: list[int] = []
        #: False where a weight has no version counter.
        self._counted = False
        self._steps = -1

    def refresh(self, args: Sequence[Tensor]) -> None:
        """Quantise again what has changed since the last call. Host cost: two reads per weight."""
        if self.frozen and self._seen:
            return
        weights = [args[i] for i in self.positions]
        if not self._seen:
            self._gathered = any(_compat.gathered(w) is not None for w in weights)
        addresses = list(map(Tensor.data_ptr, weights))
        same = addresses == self._addresses and self._steps == _steps and not self._gathered
        # Versions only grow: their sum moves when one does.
        if same and self._counted and sum(map(_version_of, weights)) == self._sum:
            return
        now = [(_version(w), w.data_ptr()) for w in weights]
        if same and now == self._seen:
            return
        self._counted = not any(w.is_inference() for w in weights)
        self._sum, self._addresses = sum(version for version, _ in now), addresses
        everything = self._steps != _steps or self._gathered
        for index, (one, position) in enumerate(zip(self.stored, self.positions, strict=True)):
            if everything or index >= len(self._seen) or now[index] != self._seen[index]:
                one.renew(args[position])
        self._seen, self._steps = now, _steps
