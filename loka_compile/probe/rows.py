"""Which rows of a batch the Probe leaves out: padding, masked positions.

    with loka_compile.probe_rows(mask):          # bool (B,), True: a real row
        loss = model(batch).mean()
        loss.backward()

The mask is copied into a buffer that keeps its address, so that a replayed CUDA graph sees the
mask of the step and not the one of its recording; that holds when the step was recorded inside the
`with` too, with a mask of the same length. Tensors with more rows than the mask (tokens of a
sample) repeat it; a tensor whose rows are no multiple of it is observed whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BUFFERS: dict[tuple[torch.device, int], Tensor] = {}
# Not thread-local: autograd runs the backward of CUDA tensors in a thread of its own.
_active: list[Tensor] = []


@contextmanager
def probe_rows(mask: Tensor) -> Iterator[None]:
    """Observe only the rows of a batch where `mask` (bool, (B,)) is True, backward included.

    Raises ValueError for a mask that is not one-dimensional and bool.
    """
    if mask.dim() != 1 or mask.dtype != torch.bool:
        raise ValueError(
            f"probe_rows: the mask is {mask.dtype} of shape {tuple(mask.shape)}; want bool (B,), "
            "True for the rows to observe"
        )
    key = (mask.device, mask.shape[0])
    if key not in _BUFFERS:
        _BUFFERS[key] = torch.empty_like(mask)
    _BUFFERS[key].copy_(mask)
    _active.append(_BUFFERS[key])
    try:
        yield
    finally:
        _active.pop()


def wanted(rows: int, device: torch.device) -> Tensor | None:
    """bool (rows,) for a tensor of that many rows on `device`; None: all of them."""
    if not _active:
        return None
    mask = _active[-1]
    count = mask.shape[0]
    if mask.device != device or count == 0 or rows % count:
        return None
    return mask if rows == count else mask.repeat_interleave(rows // count)
