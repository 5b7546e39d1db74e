"""`loka_compile.quantify`: the error of every kernel at every probed site, per distribution model.

Works on a live model that is being trained or was calibrated, or on saved state. Rows are plain
dicts: one per site x direction x kernel x distribution, with the measures of `probe.quantify`,
their 95 % bootstrap intervals, and latency and speedup where the kernel's hardware is there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import nn

from loka_compile import _compat
from loka_compile.errors import LokaError
from loka_compile.files import write_text
from loka_compile.ledger import model_entries
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import latency_us
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import WEIGHT_MODELS
from loka_compile.probe import models as distributions
from loka_compile.probe import quantify as qt
from loka_compile.probe import saver
from loka_compile.probe import store
from loka_compile.probe.listing import collect
from loka_compile.probe.session import sessions
from loka_compile.probe.statistics import ROWS_SEEN
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.weights import FIELDS

KIND = "loka-quantify"
State = Mapping[tuple[str, str], Statistics]


_ASK_FOR_MODELS = ", of a run with probe_weight_model='matrix_normal'"


class NothingToQuantifyError(LokaError):
    """No probed site, no finite row or no weight to measure with."""


@dataclass(frozen=True)
class Quantified:
    """The result: `rows`, and what they were measured with."""

    rows: list[dict[str, Any]]
    env: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything as JSON; numbers that are not finite become null."""
        body = {"kind": KIND, "version": 1, "env": self.env, "rows": _plain(self.rows)}
        return write_text(path, json.dumps(body, indent=1) + "\n")

    def table(self) -> str:
        """One line per row, as text."""
        lines = [_HEADER]
        for r in self.rows:
            us = "n/a" if r["us"] is None else f"{r['us']:.1f}"
            speedup = "n/a" if r["speedup"] is None else f"{r['speedup']:.2f}"
            lines.append(
                f"{r['site']:<28.28} {r['direction']:<5} {r['kernel']:<28.28} "
                f"{r['distribution']:<15} {r['mere']:>8.3g} {r['mere_clamped']:>7.4f} "
                f"[{r['mere_clamped_lower']:.4f} {r['mere_clamped_upper']:.4f}] "
                f"{100 * r['bad_rows']:>6.2f} {r['sqnr_db']:>6.1f} {us:>7} {speedup:>7}"
            )
        return "\n".join(lines) + "\n"


_HEADER = (
    f"{'site':<28} {'dir':<5} {'kernel':<28} {'distribution':<15} {'MERE':>8} {'clamped':>7} "
    f"{'95 % interval':<15} {'bad %':>6} {'dB':>6} {'us':>7} {'speedup':>7}"
)


@dataclass(frozen=True)
class Probed:
    """One site as it is measured: w (N, K), what it saw, and how that is known."""

    name: str
    w: Tensor
    x: Statistics
    gy: Statistics | None
    dtype: torch.dtype
    weight_source: str


def quantify(
    model: nn.Module | Mapping[str, Tensor] | None = None,
    state: State | store.Loaded | str | os.PathLike[str] | None = None,
    *,
    sites: Sequence[str] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    kernels: Sequence[str] | None = None,
    models: Sequence[str] = distributions.MODELS,
    samples: int = qt.SAMPLES,
    seed: int = 0,
    m: int | None = None,
    time_kernels: bool = True,
    weight_model: str = "actual",
) -> Quantified:
    """Measure every kernel at every probed site.

    model: the (compiled or plain) model, or {parameter name: weight}; None draws each weight from
    N(0, recorded RMS), which needs state that was saved with weights. state: None for what the
    process has probed of `model`, a file, a folder of ranks' files, or statistics. m: rows of the
    timed GEMM (default: those of a probed batch). weight_model: "actual", or "matrix_normal" for
    draws from the distribution that a run with probe_weight_model="matrix_normal" has learnt (sites
    without one have no row). Kernels whose hardware is missing are emulated
    and have no latency.

    Raises NothingToQuantifyError where there is no probed site, ProbeFileError for a bad file.
    """
    if weight_model not in WEIGHT_MODELS:
        raise NothingToQuantifyError(
            f"quantify: weight_model {weight_model!r}: want {' or '.join(WEIGHT_MODELS)}"
        )
    found = list(probed_sites(model, state, weight_model, seed))
    if sites is not None:
        found = [one for one in found if one.name in set(sites)]
    if not found:
        raise NothingToQuantifyError(
            "quantify: no probed site; train a few steps with backend='loka' "
            "first, or name a saved state" + _ASK_FOR_MODELS * (weight_model == "matrix_normal")
        )
    rows = []
    for one in found:
        for direction in directions:
            if direction != "fwd" and (one.gy is None or one.gy.batches == 0):
                continue
            for kernel in kernels or kernel_names():
                for distribution in models:
                    row = _row(one, direction, kernel, distribution, samples, seed, m, time_kernels)
                    if row is not None:
                        rows.append(row)
    device = found[0].w.device
    env = {"torch": torch.__version__, "device": _compat.device_key(device), "samples": samples}
    return Quantified(rows, env)


def _row(
    one: Probed,
    direction: str,
    kernel: str,
    distribution: str,
    samples: int,
    seed: int,
    m: int | None,
    time_kernels: bool,
) -> dict[str, Any] | None:
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    n, k = one.w.shape
    seen = int(float(one.x.scalars[ROWS_SEEN]) / max(one.x.batches, 1))
    shape = GemmShape(m or max(seen, 1), k, n)
    if rule is None or library.why_not(recipe, direction, shape) is not None:
        return None
    real = library.why_unavailable(one.w.device) is None
    name = kernel if real else kernel + EMULATED
    errors = qt.quantify(
        direction, name, one.w, one.x, one.gy, one.dtype, samples, seed, distribution
    )
    us = high = None
    if real and time_kernels:
        us = latency_us(direction, kernel, shape, one.dtype, one.w.device)
        high = latency_us(direction, HIGH_PRECISION, shape, one.dtype, one.w.device)
    return {
        "site": one.name,
        "direction": direction,
        "kernel": kernel,
        "library": library.name,
        "recipe": recipe,
        "fast_accum": rule.fast_accum,
        "a_dtype": str(rule.a.dtype).removeprefix("torch."),
        "b_dtype": str(rule.b.dtype).removeprefix("torch."),
        "distribution": distribution,
        "emulated": not real,
        "M": shape.m,
        "K": k,
        "N": n,
        "weight": one.weight_source,
        **asdict(errors),
        "us": us,
        "speedup": high / us if us and high else None,
    }


def probed_sites(
    model: nn.Module | Mapping[str, Tensor] | None,
    state: State | store.Loaded | str | os.PathLike[str] | None = None,
    weight_model: str = "actual",
    seed: int = 0,
) -> Iterator[Probed]:
    """The sites that `state` (or the process, for `model`) knows, with their weights."""
    numbers: Mapping[str, Tensor] = {}
    learnt = {k: v for one in sessions() for k, v in one.weight_models().items()}
    if state is None:
        if not isinstance(model, nn.Module):
            raise NothingToQuantifyError("quantify: name a saved state, or pass the model")
        statistics: State = collect(entry for _, entry in model_entries(model))
    elif isinstance(state, Mapping):
        statistics = state
    else:
        if isinstance(state, store.Loaded):
            loaded = state
        else:
            path = Path(state)
            loaded = saver.load_folder(path) if path.is_dir() else store.load_all(path)
        statistics, numbers, learnt = loaded.statistics, loaded.weights, loaded.weight_models
    weights = _weights(model)
    if weight_model == "matrix_normal":
        # Drawn weights stand in for the real ones, and nothing else does.
        generator = torch.Generator().manual_seed(seed)
        device = next((x.rows.device for x in statistics.values()), None)
        numbers = {}
        weights = {k: v.sample(generator).float().to(device) for k, v in sorted(learnt.items())}
    for (site, role), x in sorted(statistics.items(), key=lambda item: item[0]):
        if role != "x" or x.batches == 0:
            continue
        gy = statistics.get((site, "g"))
        k = x.features
        n = gy.features if gy is not None else None
        layer = site.partition("#")[0].partition("@")[0]
        w, source = _weight_of(layer, k, n, weights, numbers)
        if w is None:
            continue
        if weight_model == "matrix_normal":
            source = f"matrix-normal of {learnt[layer].updates} updates"
        yield Probed(site, w, x, gy, x.rows.dtype, source)


def _weights(model: nn.Module | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    if model is None:
        return {}
    if isinstance(model, Mapping):
        return dict(model)
    found = {}
    for path, parameter in model.named_parameters():
        found[path.removeprefix("_orig_mod.")] = parameter.detach()
    for _, entry in model_entries(model):
        held = entry.ref()
        if held is not None and entry.name:
            found[entry.name] = held.detach()
    return found


def _weight_of(
    layer: str, k: int, n: int | None, weights: dict[str, Tensor], numbers: Mapping[str, Tensor]
) -> tuple[Tensor | None, str]:
    for name in (layer, f"{layer}.weight"):
        w = weights.get(name)
        if w is None or w.dim() != 2:
            continue
        if w.shape[1] == k and n in (None, w.shape[0]):
            return w, "model"
        if w.shape[0] == k and n in (None, w.shape[1]):
            return w.t(), "model"
    if layer in numbers and n is not None:
        rms = float(numbers[layer][FIELDS.index("rms")])
        generator = torch.Generator().manual_seed(0)
        return rms * torch.randn(
            n, k, generator=generator, dtype=torch.float32
        ), "normal of the recorded RMS"
    return None, ""


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()}
        for r in rows
    ]
