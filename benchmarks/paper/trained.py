"""Models trained on KuaiRand in high precision, and what their linears then see: for the Probe's
benchmarks.

Training runs eagerly with the Mods baked in; recording runs the same weights through the backend's
observers, every site in high precision, one batch per step.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from datetime import timezone
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import loka_compile
from loka_compile import _compat
from loka_compile.data.kuairand import KuaiRand
from loka_compile.ledger import model_entries
from loka_compile.probe import coherence
from loka_compile.probe import statistics
from loka_compile.probe import turns
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update
from loka_compile.zoo import build_model

#: (model, form of the counts) of the studies.
CASES = (("wukong", "log"), ("wukong", "raw"), ("dcn_v2", "log"), ("dcn_v2", "raw"))


@dataclass(frozen=True)
class Site:
    """One linear: w (N, K); per batch x (M, K), gy (M, N), of one order of rows."""

    name: str
    w: Tensor
    x: list[Tensor]
    gy: list[Tensor]


@dataclass(frozen=True)
class Trained:
    name: str
    model: Any
    #: Batches behind the training ones.
    later: list[Any]


def train(
    kind: str, counts: str, scale: str, data: str, steps: int, later: int, batch: int = 512
) -> Trained:
    source = KuaiRand(data, dense_form=counts)
    batches = list(source.batches(batch, limit=batch * (steps + later)))
    torch.manual_seed(0)
    model = build_model(kind, scale, source.schema, sparse=False)
    own = copy.deepcopy(model)
    loka_compile.apply_mods(own.dense)
    optimizer = torch.optim.Adam(own.parameters(), lr=1e-3)
    for one in batches[:steps]:
        optimizer.zero_grad(set_to_none=True)
        loss(own, own.dense, one).backward()
        optimizer.step()
    model.load_state_dict(own.state_dict(), strict=False)
    return Trained(f"{kind}-{scale}-{counts}", model, batches[steps:])


def logits(model: Any, dense: Any, batch: Any) -> Tensor:
    device = next(model.parameters()).device
    inputs = model.inputs(batch.categorical.to(device), batch.dense.to(device))
    with torch.autocast(device.type, torch.bfloat16):
        return dense(*inputs).float().reshape(len(batch))


def loss(model: Any, dense: Any, batch: Any) -> Tensor:
    out = logits(model, dense, batch)
    return binary_cross_entropy_with_logits(out, batch.label.to(out.device))


def in_high_precision(model: Any, **options: Any) -> Any:
    """The dense part, compiled with the Mods, every site observed and none in FP8."""
    torch._dynamo.reset()
    chosen = {
        "mods": "on",
        "emulate": True,
        "inner": "eager",
        # No kernel passes; a forced site would not be observed. One candidate is soon refused.
        "max_mere": 1e-9,
        "libraries": ("torch",),
        "recipes": ("rowwise",),
        "probe_every": 1,
    }
    return torch.compile(model.dense, backend="loka", options={**chosen, **options})


@contextmanager
def recorder() -> Iterator[dict[int, list[Tensor]]]:
    """Whole observed batches, by the address of the state that they went into (CPU only)."""
    seen: dict[int, list[Tensor]] = defaultdict(list)
    keep = statistics.keep_rows

    def keep_all(x: Tensor, rows: Tensor, number: Tensor, first: Tensor, **how: Any) -> None:
        seen[rows.data_ptr()].append(x.to(rows.dtype))
        keep(x, rows, number, first, **how)

    statistics.keep_rows = keep_all
    # Every site at every step, not a few in turn.
    sites, turns.SITES = turns.SITES, sys.maxsize
    try:
        yield seen
    finally:
        statistics.keep_rows = keep
        turns.SITES = sites


def record(trained: Trained, batches: list[Any], *, of_logits: bool = False) -> list[Site]:
    """What every site sees on `batches`. of_logits: gradients of the sum of the logits."""
    found: dict[str, Site] = {}
    for sites in record_each(trained, batches, of_logits=of_logits):
        for site in sites:
            held = found.setdefault(site.name, Site(site.name, site.w, [], []))
            held.x.extend(site.x)
            held.gy.extend(site.gy)
    return list(found.values())


def record_each(
    trained: Trained, batches: Iterable[Any], *, of_logits: bool = False
) -> Iterator[list[Site]]:
    """As `record`, batch by batch: sites that hold one batch each."""
    dense = in_high_precision(trained.model)
    for _, entry in model_entries(trained.model.dense):
        entry.statistics.clear()
        entry.sites.clear()
    with recorder() as seen:
        for one in batches:
            seen.clear()
            if of_logits:
                logits(trained.model, dense, one).sum().backward()
            else:
                loss(trained.model, dense, one).backward()
            trained.model.zero_grad(set_to_none=True)
            yield list(_sites(trained, seen))


def _sites(trained: Trained, seen: dict[int, list[Tensor]]) -> Iterator[Site]:
    for _, entry in model_entries(trained.model.dense):
        for (call, role), held in sorted(entry.statistics.items()):
            if role != "x":
                continue
            xs = seen[held.rows.data_ptr()]
            gs = seen[entry.statistics[(call, "g")].rows.data_ptr()]
            weight = entry.ref().detach()
            if weight.shape[1] != xs[0].shape[1] or weight.shape[0] != gs[0].shape[1]:
                weight = weight.t()
            yield Site(entry.name + (f"#{call}" if call else ""), weight, xs, gs)


def recorded_statistics(trained: Trained) -> dict[str, tuple[Statistics, Statistics]]:
    """site -> what the observers made of its input and gradient in the last recording."""
    return {
        entry.name + (f"#{call}" if call else ""): (held, entry.statistics[call, "g"])
        for _, entry in model_entries(trained.model.dense)
        for (call, role), held in entry.statistics.items()
        if role == "x"
    }


def statistics_of(site: Site, batches: list[int]) -> tuple[Statistics, Statistics]:
    """Probe state of (input, gradient) after the recorded batches of these numbers."""
    dtype, device = site.x[0].dtype, site.x[0].device
    x = Statistics.empty(site.x[0].shape[1], dtype, device)
    gy = Statistics.empty(site.gy[0].shape[1], dtype, device, gradient=True)
    for i in batches:
        update(site.x[i], x)
        update(site.gy[i], gy)
        gw = site.gy[i].float().t() @ site.x[i].float()
        coherence.update(gw, site.gy[i], site.x[i], gy)
    return x, gy


def environment(device: str = "cpu") -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": _compat.device_key(torch.device(device)),
        "real_fp8": _compat.why_no_fp8(torch.device(device)) is None,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
