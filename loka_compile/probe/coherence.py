"""How coherent a batch's gradient of a weight is: what no model of single rows can know.

    gw_n = sum_m gy_mn x_m          |gw_n|          norm of row n of the weight's gradient
                                    s_n = sqrt(sum_m gy_mn^2 |x_m|^2)
                                    coherence_n = |gw_n| / s_n,  in [0, sqrt(M)]

Quantisation noise of the summands adds up like s_n; the signal adds up to |gw_n|. The relative
error of row n is therefore c_n / coherence_n, where c_n, the noise over s_n, depends on single rows
and on sketches (`sketch.py`), and the coherence is recorded per probed batch. It costs two norms
and a product per site, since the backward has gw anyway. The same op keeps the sketch of a batch:
nothing else sees a site's input and gradient together.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from loka_compile.probe import sketch as sk
from loka_compile.probe.statistics import BATCHES
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import _uniform
from loka_compile.probe.statistics import flat

log = logging.getLogger("loka_compile")


def coherence(gw: Tensor, gy: Tensor, x: Tensor) -> Tensor:
    """gw (N, K), gy (M, N), x (M, K) -> (N,) fp32; 0 where a row of gw is zero."""
    # Norms are scaled by powers inside vector_norm's FP32; FP64 keeps gradients of 1e-30 alive.
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    spread = torch.linalg.vector_norm(gy.to(torch.float32) * lengths, dim=0, dtype=torch.float64)
    signal = torch.linalg.vector_norm(gw, dim=1, dtype=torch.float64)
    return torch.where(signal == 0, 0.0, signal / spread).to(torch.float32)


#: Why our kernels do not run, once they have failed to compile or to start.
_FAILED: list[str] = []


def update(gw: Tensor, gy: Tensor, x: Tensor, held: Statistics) -> None:
    """Record the weight's gradient gw (N, K) of gy (..., N) and x (..., K); held: that of gy, which
    has recorded gy already. Nothing where it keeps no coherence."""
    if held.coherence is None or held.sketch is None or held.marks is None:
        return
    gw, gy, x = flat(gw), flat(gy), flat(x)
    if x.shape[0] == 0:
        return
    state = (held.scalars, held.coherence, held.sketch, held.marks)
    if x.is_cuda and not _FAILED:
        try:
            return record_kernels(gw, gy, x, *state)
        except Exception as error:
            # Watching is not worth a step: plain torch does it too, in more launches.
            _FAILED.append(f"{type(error).__name__}: {error}")
            log.warning("loka: a weight's gradient is recorded by plain torch: %s", _FAILED[0])
    with torch.no_grad():
        record_ref(gw, gy, x, *[t.data for t in state])


def record_ref(
    gw: Tensor, gy: Tensor, x: Tensor, scalars: Tensor, held: Tensor, sketch: Tensor, marks: Tensor
) -> None:
    """gw (N, K), gy (M, N), x (M, K). Updates the last three, for M > 0; scalars are gy's."""
    if x.shape[0] == 0:
        return
    # The gradient itself was observed just before: this is the number of its batch.
    number = (scalars[BATCHES].long() - 1).clamp(min=0)
    slot = (number % held.shape[0]).reshape(1)
    held.index_copy_(0, slot, coherence(gw, gy, x).unsqueeze(0))
    amax = torch.stack([x.abs().amax(), gy.abs().amax()]).float()
    sk.record_ref(gy, x, _uniform(number), sketch, marks, amax)


def record_kernels(
    gw: Tensor, gy: Tensor, x: Tensor, scalars: Tensor, held: Tensor, sketch: Tensor, marks: Tensor
) -> None:
    """The same in a few launches."""
    from loka_compile.kernels.sketch import sketch as run

    run(
        gw,
        gy,
        x,
        scalars,
        held,
        sketch,
        marks,
        columns_gy=sk.GY,
        columns_x=sk.X,
        first_weight=sk.WEIGHTS,
        energy_rows=sk.ENERGY_ROWS,
        even=sk.EVEN,
    )
