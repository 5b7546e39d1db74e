"""What reports say of sites that nothing was decided for."""

from __future__ import annotations

import torch
from torch import nn

import loka_compile


def test_a_fused_linear_is_not_told_that_it_is_not_fused():
    """On a CPU without emulation our own kernel is no candidate; the chain is not to blame."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 48))
    options = {"inner": "eager", "mods": "on"}
    with loka_compile.explain() as report:
        torch.compile(model, backend="loka", options=options)(torch.randn(8, 64)).sum().backward()
    fused, last = report.sites
    assert fused["fused"] and not last["fused"]
    reasons = {c["reason"] for c in fused["directions"].values()}
    assert all("no FP8 hardware on cpu" in reason for reason in reasons)
    assert not any("not part of a fused chain" in reason for reason in reasons)
