"""What a fused chain does not write and an observer asks for: its result, and dL/dz.

Made for one site at a time, in a launch each on a GPU (`kernels/chain_values.py`); else, and where
that fails, in plain torch.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering.chain_formulas import activated
from loka_compile.lowering.chain_formulas import block_norm_act_backward

log = logging.getLogger("loka_compile")

#: Rows that plain torch takes at a time: op by op it needs several times their memory.
ROWS = 8192
#: Why our kernels do not run, once they have failed to compile or to start.
_FAILED: list[str] = []


def _by_kernels(t: Tensor) -> bool:
    narrow = t.dtype != torch.float64
    return t.is_cuda and narrow and not _FAILED and _compat.why_no_triton() is None


def _failed(error: Exception) -> None:
    if isinstance(error, torch.OutOfMemoryError):
        return
    _FAILED.append(f"{type(error).__name__}: {error}")
    log.warning("loka: what is observed of chains is computed by plain torch: %s", _FAILED[0])


@torch.no_grad()
def value_of(x: Tensor, gain: Tensor | None, act: str) -> Tensor:
    """x itself where act is ""; else x is a chain's u (..., N) and this is act(gain * u), as rows,
    from the u that the chain keeps: rounded once more than what its reader got."""
    if not act:
        return x
    u = x.reshape(-1, x.shape[-1])
    if _by_kernels(u):
        from loka_compile.kernels import chain_values

        try:
            return chain_values.activated(u, gain, act)
        except Exception as error:
            _failed(error)
    if u.shape[0] <= ROWS:
        return activated(u, gain, act)
    return torch.cat([activated(part, gain, act) for part in u.split(ROWS)])


@torch.no_grad()
def gradient_of(
    gy: Tensor, u: Tensor, r: Tensor, gain: Tensor | None, block: int, act: str, gate: bool
) -> Tensor:
    """dL/dz (rows, N) of a chain in gy's dtype; arguments as `observe_chain` has them."""
    gy, u, r = (t.reshape(-1, t.shape[-1]) for t in (gy, u, r))
    if _by_kernels(u):
        from loka_compile.kernels import chain_values

        try:
            return chain_values.gradient(gy, u, r, gain, block, act, gate)
        except Exception as error:
            _failed(error)
    if u.shape[0] <= ROWS:
        return block_norm_act_backward(gy, u, r, gain, block, act, gate)[0]
    parts = zip(gy.split(ROWS), u.split(ROWS), r.split(ROWS), strict=True)
    return torch.cat([block_norm_act_backward(*p, gain, block, act, gate)[0] for p in parts])
