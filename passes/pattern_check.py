"""One user pattern -> how its replacement does on the pattern's own example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from loka_compile.errors import PatternError
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes.graph_text import text_of
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_pass
from loka_compile.passes.pattern_trace import no_autocast
from loka_compile.passes.pattern_trace import stand_ins_of
from loka_compile.passes.pattern_trace import trace
from loka_compile.passes.user_pattern import UserPattern

#: Relative tolerances; the absolute one is that of the tensor's largest value.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def check(one: UserPattern) -> tuple[int, float, float, str, str]:
    """(matches, error of values, error of gradients, text before, text after)."""
    context = PassContext(Options())
    with no_autocast(), torch.enable_grad():
        gm, inputs = trace(one.pattern, one.example).copy(stand_ins_of(one.example))
        old, before = g.own_copy(gm), text_of(gm)
        record = run_pass(one, gm, context)
        after = text_of(gm)
        if record.matches != 1:
            reasons = "; ".join(n.what for n in record.refusals) or "no reason was given"
            why = f"matches its own example {record.matches} times, not once: {reasons}"
            raise PatternError(one.name, f"{why}\n{before}")
        positions = [position for position, _ in inputs.values()]
        seeds = [_direction(v) for v in _run(old, one.example, positions)[0]]
        want = _run(old, one.example, positions, seeds)
        got = _run(gm, one.example, positions, seeds)
    errors = []
    for at, what in enumerate(("values", "gradients")):
        ours, theirs = got[at], want[at]
        worst = 0.0
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            error, allowed = _error(a, b)
            worst = max(worst, error)
            if record.rewrites and not error <= allowed:
                says = f"{what} differ: {error:.3g} in number {i}, allowed {allowed:.3g}"
                texts = f"the pattern:\n{before}\nwith the replacement:\n{after}"
                raise PatternError(one.name, f"preserves=True, but {says}\n{texts}")
        errors.append(worst)
    return record.matches, errors[0], errors[1], before, after


def _direction(y: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(y.numel())
    return torch.randn(y.shape, generator=generator).to(y)


def _run(
    gm: fx.GraphModule,
    example: Sequence[Any],
    positions: Sequence[int],
    seeds: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    leaves = [
        v.detach().clone().requires_grad_(v.is_floating_point())
        for v in (example[i] for i in positions)
    ]
    out = gm(*leaves)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    if not seeds:
        return outs, []
    pairs = [(y, s) for y, s in zip(outs, seeds, strict=True) if y.requires_grad]
    wanted = [v for v in leaves if v.requires_grad]
    if not pairs or not wanted:
        return outs, [None] * len(wanted)
    ys, directions = zip(*pairs, strict=True)
    return outs, list(torch.autograd.grad(ys, wanted, directions, allow_unused=True))


def _error(got: torch.Tensor | None, want: torch.Tensor | None) -> tuple[float, float]:
    """(largest error, allowed). A gradient that is None counts as zeros."""
    if got is None or want is None:
        one = got if got is not None else want
        return (0.0 if one is None else float(one.abs().max())), 0.0
    if not want.numel():
        return 0.0, 0.0
    scale = float(want.detach().double().abs().max())
    error = float((got.detach().double() - want.detach().double()).abs().max())
    return error, _TOLERANCE.get(want.dtype, 0.0) * scale
