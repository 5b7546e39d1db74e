"""Patterns with a model for each: a cross layer, two linears as one, an ensemble."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import loka_compile

t = torch.randn


def gate(y, x0, x):
    """The user's own function, for which a kernel might stand."""
    return torch.addcmul(x, x0, y)


@loka_compile.pattern(example=lambda: (t(8, 64), t(64, 64), t(64), t(8, 64)), preserves=True)
def cross(x, w, b, x0):
    return x0 * F.linear(x, w, b) + x


@cross.replace
def _(x, w, b, x0):
    return gate(F.linear(x, w, b), x0, x)


@cross.when
def _(match):
    return match.shape("w")[0] % 16 == 0 or "out_features not a multiple of 16"


@loka_compile.pattern(
    example=lambda: (t(8, 64), t(32, 64), t(32), t(16, 64), t(16)), preserves=True
)
def two_linears(x, wa, ba, wb, bb):
    return F.linear(x, wa, ba), F.linear(x, wb, bb)


@two_linears.replace
def _(x, wa, ba, wb, bb):
    wide = F.linear(x, torch.cat([wa, wb]), torch.cat([ba, bb]))
    return wide.split([wa.shape[0], wb.shape[0]], -1)


@loka_compile.pattern(
    example=lambda: (t(8, 32), t(24, 32), t(8, 48), t(24, 48)), preserves=True, before="fuse"
)
def ensemble(a, wa, b, wb):
    return F.linear(a, wa) + F.linear(b, wb)


@ensemble.replace
def _(a, wa, b, wb):
    return F.linear(torch.cat([a, b], -1), torch.cat([wa, wb], 1))


class Cross(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x0):
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 24)

    def forward(self, x):
        return F.relu(self.a(x)).sum(-1) + self.b(x).view(-1, 24).sum(-1).view(x.shape[:-1])


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24, bias=False), nn.Linear(8, 24, bias=False)

    def forward(self, x):
        return torch.tanh(self.b(x[..., :8]) + self.a(x))


EXAMPLES = [(cross, Cross, 32, 2), (two_linears, Two, 16, 1), (ensemble, Ensemble, 16, 1)]


def records(report, name):
    return [r for graph in report.graphs for r in graph.records if r.name == name]
