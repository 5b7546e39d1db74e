"""Error of a kernel on a site's real distribution, against an FP32 product of the same operands.

Samples come from a distribution model (`probe/models.py`): by default real rows, and for an operand
with one scale per tensor a recorded batch maximum as its amax. The weight sample is the weight
itself.

The gradient of the weight is a sum over the batch, and its relative error hangs on how coherent the
summands are, which no model of rows knows. So the error is measured on half of the rows held, drawn
without replacement (a row that stood twice would add up to itself), and each row of the reference
gets the norm that a recorded batch gave it (`probe/coherence.py`). The errors of its rows, and what
share of them is bad, are those of whole batches (`probe/wgrad_error.py`), one value per batch. What
is measured: `probe/measures.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loka_compile.lowering import gemm
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.probe import models
from loka_compile.probe import wgrad_error
from loka_compile.probe.measures import BAD_ROW
from loka_compile.probe.measures import MEASURES
from loka_compile.probe.measures import interval
from loka_compile.probe.measures import measures
from loka_compile.probe.measures import ratio
from loka_compile.probe.measures import upper_bound
from loka_compile.probe.pairing import unpaired
from loka_compile.probe.statistics import Statistics

__all__ = ["HIGH_PRECISION", "Errors", "Sample", "draw", "quantify", "run"]

SAMPLES = 8
ROWS = 256


@dataclass(frozen=True)
class Errors:
    """Means over the samples (of the rows of wgrad: over the recorded batches); `*_upper`: 97.5 %
    bootstrap bound of that mean."""

    mere: float
    mere_clamped: float
    mere_clamped_upper: float
    bad_rows: float
    bad_rows_upper: float
    sqnr_db: float
    centred: float
    non_finite: int
    samples: int
    median_row: float = float("nan")
    mere_clamped_lower: float = float("nan")
    bad_rows_lower: float = float("nan")
    median_row_lower: float = float("nan")
    median_row_upper: float = float("nan")
    #: 10th and 90th percentile of the plain MERE over the samples: its mean does not exist.
    mere_p10: float = float("nan")
    mere_p90: float = float("nan")
    #: Why there is no sample, where it is not for want of a finite row.
    missing: str = ""


@dataclass(frozen=True)
class Sample:
    """Operands of one synthetic batch: x (R, K), gy (R, N) and their recorded batch maxima."""

    x: Tensor
    gy: Tensor | None
    x_amax: Tensor
    gy_amax: Tensor | None
    #: (N,) recorded coherence of the weight's gradient; None: that of the sample itself.
    coherence: Tensor | None = None


def draw(
    x: Statistics,
    gy: Statistics | None,
    dtype: torch.dtype,
    samples: int = SAMPLES,
    seed: int = 0,
    model: str = "reservoir",
    *,
    distinct: bool = False,
) -> Iterator[Sample]:
    """`samples` batches of ROWS rows; x and gy share the row draw, so that they stay paired.

    distinct: half of the rows held, each once, as a sum over the batch needs it. None at all where
    no row is finite (in both), but for models that need no rows. Models other than the reservoir
    bring their own batch maximum, which is what they are blind to.
    """
    rows_x, rows_g = _paired(x, gy, dtype)
    maxima_x = x.batch_maxima()
    maxima_g = gy.batch_maxima() if gy is not None else None
    generator = torch.Generator().manual_seed(seed)
    held = rows_x.shape[0]
    wanting = [x] if gy is None else [x, gy]
    if held == 0 and any(models.needs_rows(model, one) or not one.batches for one in wanting):
        return
    recorded = models.uses_recorded_maxima(model)
    coherence = None if gy is None or not recorded else gy.recorded_coherence()
    for number in range(samples):
        if held == 0:
            pick = torch.arange(ROWS)
        elif distinct:
            pick = torch.randperm(held, generator=generator)[: max(held // 2, 1)]
        else:
            pick = torch.randint(held, (ROWS,), generator=generator)
        pick = pick.to(rows_x.device)
        one = int(torch.randint(maxima_x.numel(), (), generator=generator).item())
        own = 2 * (seed * samples + number)
        drawn_g = None
        if rows_g is not None and gy is not None:
            drawn_g = models.rows(model, rows_g, gy, pick, own + 1)
        yield Sample(
            models.rows(model, rows_x, x, pick, own),
            drawn_g,
            maxima_x[one] if recorded else maxima_x.new_zeros(()),
            None
            if maxima_g is None
            else (maxima_g[one % maxima_g.numel()] if recorded else maxima_g.new_zeros(())),
            coherence[one % coherence.shape[0]] if coherence is not None and distinct else None,
        )


def why_unpaired(gy: Statistics | None) -> str | None:
    """Why rows of gy do not belong to those of its input beside them; None where they do."""
    if gy is None or gy.pairing is None or not gy.pairing.mixed:
        return None
    return "rows of its input and of its gradient were recorded in different orders"


def _paired(
    x: Statistics, gy: Statistics | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The rows held, in `dtype`, without the slots in which either side is non-finite."""
    rows_x = x.drawn().to(dtype)
    finite = torch.isfinite(rows_x).all(dim=1)
    if gy is None:
        return rows_x[finite], None
    rows_g = gy.drawn().to(dtype)
    held = min(rows_x.shape[0], rows_g.shape[0])
    finite = finite[:held] & torch.isfinite(rows_g[:held]).all(dim=1)
    waiting = unpaired(x, gy)
    if waiting is not None:
        finite[waiting[waiting < held]] = False
    return rows_x[:held][finite], rows_g[:held][finite]


def run(
    direction: str,
    sample: Sample,
    w: Tensor,
    kernel: str,
    quantised: gemm.Quantized | None = None,
) -> tuple[Tensor, Tensor]:
    """(kernel's result, FP32 reference) of one direction, in 2-D. quantised: w, see `weight_of`."""
    x, gy = sample.x, sample.gy
    if direction == "fwd":
        out = gemm.forward(x, w, kernel, amax=(sample.x_amax, None), ready=(None, quantised))
        return out, x.float() @ w.float().t()
    assert gy is not None
    if direction == "dgrad":
        out = gemm.dgrad(gy, w, kernel, amax=(sample.gy_amax, None), ready=(None, quantised))
        return out, gy.float() @ w.float()
    out = gemm.wgrad(gy, x, kernel, amax=(sample.gy_amax, sample.x_amax))
    ref = gy.float().t() @ x.float()
    if sample.coherence is None:
        return out, ref
    return _with_coherence(out, ref, gy, x, sample.coherence)


def weight_of(direction: str, w: Tensor, kernel: str) -> gemm.Quantized | None:
    """w (N, K) as `kernel` reads it: the same in every sample. None where it reads none, or has
    nothing to find first."""
    if direction == "wgrad" or kernel == HIGH_PRECISION:
        return None
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None or not rule.b.scaled:
        return None
    return gemm.operand(w if direction == "fwd" else w.t(), rule.b, kernel)


def _with_coherence(
    out: Tensor, ref: Tensor, gy: Tensor, x: Tensor, coherence: Tensor
) -> tuple[Tensor, Tensor]:
    """The error of `out` on reference rows of the recorded norm, relative to the noise they carry.

    A row that was zero in the recorded batch (a unit that no sample woke) is zero, without error;
    one whose own sum is zero, or that was not recorded, keeps its norm.
    """
    error = out.float() - ref
    lengths = x.float().norm(dim=1, keepdim=True)
    spread = (gy.float() * lengths).norm(dim=0)
    own = ref.norm(dim=1)
    coherence = coherence.to(ref.device)
    factor = coherence * spread / own
    factor = torch.where(torch.isfinite(factor), factor, 1.0)
    alive = (coherence != 0).unsqueeze(1)
    ref = torch.where(alive, ref * factor.unsqueeze(1), 0.0)
    return ref + torch.where(alive, error, 0.0), ref


def quantify(
    direction: str,
    kernel: str,
    w: Tensor,
    x: Statistics,
    gy: Statistics | None,
    dtype: torch.dtype,
    samples: int = SAMPLES,
    seed: int = 0,
    model: str = "reservoir",
) -> Errors:
    """Error of `kernel` at a site: w (N, K), statistics of x (K features) and gy (N features).

    model: the distribution that rows are drawn from, one of `probe.models.MODELS`.
    """
    with torch.no_grad(), torch.amp.autocast(w.device.type, enabled=False):
        w = w.detach().to(dtype)
        rows = []
        if direction == "fwd" and model != "reservoir":
            # Only real rows are paired; an input that can be drawn must not want for the other's.
            gy = None
        distinct = direction == "wgrad"
        batches, excess = None, []
        missing = why_unpaired(gy) if distinct and model == "reservoir" else None
        if missing is not None:
            return _nothing(missing)
        if distinct and gy is not None and models.uses_recorded_maxima(model):
            batches = wgrad_error.row_errors(_emulated(kernel), gy, dtype, seed)
        quantised = weight_of(direction, w, kernel)
        for sample in draw(x, gy, dtype, samples, seed, model, distinct=distinct):
            out, ref = run(direction, sample, w, kernel, quantised)
            rows.append(measures(out, ref))
            if batches is not None and kernel != _emulated(kernel):
                same, _ = run(direction, sample, w, _emulated(kernel))
                excess.append(ratio((out.float() - ref).norm(), (same.float() - ref).norm()))
    if not rows:
        return _nothing()
    # One transfer for all samples.
    columns = dict(zip(MEASURES, torch.stack(rows).t().cpu().numpy(), strict=True))
    if batches is not None:
        # Sketches are run by the recipe's arithmetic; what the kernel itself adds shows on rows.
        more = float(torch.stack(excess).mean()) if excess else 1.0
        columns |= _of_batches(batches * more)
    relative = columns["relative"].mean()
    return Errors(
        mere=float(columns["mere"].mean()),
        mere_clamped=float(columns["mere_clamped"].mean()),
        mere_clamped_upper=upper_bound(columns["mere_clamped"]),
        bad_rows=float(columns["bad_rows"].mean()),
        bad_rows_upper=upper_bound(columns["bad_rows"]),
        median_row=float(columns["median_row"].mean()),
        sqnr_db=float("inf") if relative == 0 else float(-20 * np.log10(relative)),
        centred=float(columns["centred"].mean()),
        non_finite=int(columns["non_finite"].sum()),
        samples=len(rows),
        mere_clamped_lower=interval(columns["mere_clamped"])[0],
        bad_rows_lower=interval(columns["bad_rows"])[0],
        median_row_lower=interval(columns["median_row"])[0],
        median_row_upper=interval(columns["median_row"])[1],
        mere_p10=_percentile(columns["mere"], 10),
        mere_p90=_percentile(columns["mere"], 90),
    )


def _nothing(why: str = "") -> Errors:
    nan = float("nan")
    return Errors(nan, nan, nan, nan, nan, nan, nan, non_finite=0, samples=0, missing=why)


def _emulated(kernel: str) -> str:
    plain = kernel == HIGH_PRECISION or kernel.endswith(EMULATED)
    return kernel if plain else kernel + EMULATED


def _of_batches(errors: Tensor) -> dict[str, np.ndarray]:
    """Relative errors (batches, N), NaN for rows that are zero -> measures, one per batch."""
    median = errors.nanmedian(dim=1).values
    return {
        "bad_rows": (errors > BAD_ROW).double().mean(1).cpu().numpy(),
        "median_row": torch.where(torch.isnan(median), 0.0, median).cpu().numpy(),
    }


def _percentile(values: np.ndarray, which: int) -> float:
    return float(np.percentile(values, which, method="nearest"))
