"""gate="budget": the loss of a whole assignment, on rows that no probe saw."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile import eligibility
from loka_compile import variant
from loka_compile.capture import Source
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.mod_set import ModSet
from loka_compile.options import Options
from loka_compile.passes.dispatch import Kernels
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.probe import likelihood
from loka_compile.probe import rows as user_rows

#: Bytes from which a tensor without gradient is taken for a frozen table.
_TABLE = 1 << 28


def replay(
    source: Source,
    options: Options,
    mods: ModSet,
    plans: Mapping[str, SitePlan],
    args: Sequence[Any],
    kinds: Mapping[int, str],
) -> float | None:
    """Loss of a whole assignment on one batch, nats per sample; None without logits.

    plans: by the graph's own site names; only their forwards matter, since nothing runs backwards.
    Both graphs run node by node: compiling them for one batch would cost more than it tells.
    """
    if not kinds:
        return None
    # No cached weights: their inputs are the runtime's to bind.
    plain = replace(options, weight_cache="off")
    kernels: list[tuple[str, Kernels]] = []
    for name, one in plans.items():
        forward = eligibility.runnable(one.choice("fwd").kernel, source.device, options)
        kernels.append((name, (forward, HIGH_PRECISION, HIGH_PRECISION)))
    high = variant.rewrite(source, variant.Decided(mods), plain).gm
    low = variant.rewrite(source, variant.Decided(mods, tuple(kernels)), plain).gm
    with _compat.restore_autocast(source.autocast):
        return divergence(high, low, args, kinds)


def sentence(plans: Mapping[str, SitePlan], replayed: float | None, budget: float) -> str:
    """What the report says of the budget."""
    total = Plan(sites=plans).predicted_nats or 0.0
    count = sum(p.choice("fwd").is_fp8 for p in plans.values())
    after = "not replayed" if replayed is None else f"{replayed:.2g} in a replay on unseen rows"
    return (
        f"loss budget {budget:g} nats per sample: {count} forwards in FP8, predicted loss "
        f"{total:.2g}, {after}"
    )


@torch.no_grad()
def divergence(
    reference: Callable[..., Any],
    other: Callable[..., Any],
    args: Sequence[Any],
    kinds: Mapping[int, str],
) -> float:
    """mean KL(reference || other), nats per sample, of two forms of one graph on `args`.

    Buffers that a forward updates (and the random state) are left as they are.
    """
    results = []
    for graph in (reference, other):
        devices = {a.device.index for a in args if isinstance(a, Tensor) and a.is_cuda}
        with torch.random.fork_rng(devices=[d for d in devices if d is not None]):
            torch.manual_seed(0)
            out = graph(*[_own(a) for a in args])
        outputs = out if isinstance(out, (list, tuple)) else (out,)
        results.append([outputs[i] for i in kinds])
    each = torch.zeros((), dtype=torch.float64)
    for kind, a, b in zip(kinds.values(), *results, strict=True):
        kl = likelihood.divergence(kind, a, b)
        wanted = user_rows.wanted(kl.shape[0], kl.device)
        each = each + (kl if wanted is None else kl[wanted]).mean().cpu()
    return float(each)


def _own(value: Any) -> Any:
    """A copy of what a forward may write to: buffers, not parameters, nor frozen tables."""
    if isinstance(value, Tensor) and not value.requires_grad and value.nbytes < _TABLE:
        return value.clone()
    return value
