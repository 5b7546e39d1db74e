"""Which norms a linear feeds, told from graphs, and what is decided for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile.kernels.block_norm import block_of
from loka_compile.passes import norm_blocks
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.block_norm import BLOCK_NORMS
from loka_compile.passes.canonicalize import Canonicalize
from loka_compile.passes.strip_bias import STRIP_BIAS

PASSES = [Canonicalize(), STRIP_BIAS, BLOCK_NORMS]
W, N = 320, 8


class Ends(nn.Module):
    """`between` the linear, or the input, and a norm of 320 features."""

    def __init__(self, between, linear: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W) if linear else nn.Identity()
        self.matrix = nn.Parameter(torch.randn(W, W) / W**0.5)
        self.between, self.norm = between, nn.LayerNorm(W)

    def forward(self, x):
        return self.norm(self.between(self, x))


FED = {
    "linear": lambda s, x: s.linear(x),
    "bare matrix": lambda s, x: x @ s.matrix,
    "activation, dropout": lambda s, x: F.dropout(F.silu(s.linear(x)), 0.5, True),
    "cast": lambda s, x: s.linear(x).double().float(),
    "view": lambda s, x: s.linear(x).view(-1, 5, 64).transpose(1, 2).flatten(1),
    "residual": lambda s, x: x + s.linear(x),
    "cross": lambda s, x: x * s.linear(x) + x,
    "halves": lambda s, x: torch.cat([x[:, :160], s.linear(x)[:, :160]], 1),
    "chunk": lambda s, x: torch.cat(torch.chunk(s.linear(x), 2, 1)[::-1], 1),
    "ensemble": lambda s, x: torch.stack([x, s.linear(x)]).sum(0),
}
ALONE = {
    "input": lambda s, x: x,
    "activation of the input": lambda s, x: F.silu(x) + x,
    "another norm": lambda s, x: s.norm(s.linear(x)),
    "products": lambda s, x: torch.bmm(
        s.linear(x).view(-1, 20, 16), x.view(-1, 16, 20)[:, :, :16]
    ).flatten(1),
    "softmax": lambda s, x: torch.softmax(s.linear(x), -1),
}


@pytest.mark.parametrize("name", [*FED, *ALONE])
def test_blocks_are_for_norms_that_a_linear_feeds(name: str, capture) -> None:
    model = Ends((FED | ALONE)[name])
    captured = capture(model, PASSES)
    captured(torch.randn(N, W))
    *_, last = captured.nodes(BLOCK_NORM)
    assert last.args[2] == (256 if name in FED else W)


def test_a_body_looks_out_of_itself(capture) -> None:
    """Checkpointed or not, the same norm has the same blocks."""
    model = Ends(lambda s, x: x)

    def forward(x, fed):
        y = model.linear(x) if fed else x
        return checkpoint(model.norm, y, use_reentrant=False)

    for fed, block in ((True, 256), (False, W)):
        captured = capture(lambda x, fed=fed: forward(x, fed), [Canonicalize()])
        captured(torch.randn(N, W))
        (gm,) = captured.after
        decided = norm_blocks.decide(gm, lambda name, width, fed: block_of(width, fed))
        assert list(decided.values()) == [block]


def test_groups_are_never_cut(capture) -> None:
    norm = nn.GroupNorm(2, 2 * W)
    captured = capture(norm, PASSES)
    captured(torch.randn(N, 2 * W))
    assert captured.nodes(BLOCK_NORM)[0].args[2] == W
