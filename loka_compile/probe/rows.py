"""Which rows of a batch the Probe leaves out: padding, masked positions.

    with loka_compile.probe_rows(mask):          # bool (B,), True: a real row
        loss = model(batch).mean()
        loss.backward()

The mask is copied into a buffer that keeps its address, so that a replayed CUDA graph sees the
mask of the step and not the one of its recording; that holds when the step was recorded inside the
`with` too, with a mask of the same length. Lengths up to the same power of two share a buffer: it
may never be freed, and batch sizes may be many. Tensors with more rows than the mask (tokens of a
sample) repeat it; a tensor whose rows are no multiple of it is observed whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: (device, how many masks are active around, rows it holds) -> bool (rows,).
_BUFFERS: dict[tuple[torch.device, int, int], Tensor] = {}
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
    rows = mask.shape[0]
    held = 1 << max(rows - 1, 0).bit_length()
    key = (mask.device, len(_active), held)
    if key not in _BUFFERS:
        with torch.inference_mode(False):
            _BUFFERS[key] = torch.zeros(held, dtype=torch.bool, device=mask.device)
    buffer = _BUFFERS[key][:rows]
    buffer.copy_(mask)
    _active.append(buffer)
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
