"""Graph -> graph with `loka::block_norm` for every norm over the last dimension.

These are layer_norm, rms_norm, and group_norm of a matrix (rows, features), whose groups are its
blocks. A gain stays a per-feature multiply, the mean goes. On rms_norm no wider than one block this
is the same function; `EXACT_BLOCK_NORM` does only that, for models whose function must not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

import loka_compile.lowering.ops  # noqa: F401  (defines the ops named below)
from loka_compile.kernels.block_norm import block_of
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes import norm_blocks
from loka_compile.passes.mod import Mod
from loka_compile.passes.pattern_site import Match
from loka_compile.user_patterns import pattern

BLOCK_NORM = torch.ops.loka.block_norm.default
KEPT = "norm kept: the option keep, or the plan, says so"

t = torch.empty


def _says(match: Match) -> str:
    node, block = match.result, match.constants["block"]
    features, width = norm_blocks.features(node), norm_blocks.width(node)
    groups = "" if width == features else f" in groups of {width}"
    return f"{m.name_of(node)} over {features} features{groups} -> block_norm of {block}"


def _is_exact(match: Match) -> bool:
    return match.constants["block"] == norm_blocks.features(match.result)


# -- the three norms ------------------------------------------------------------------------------


@pattern(
    example=lambda: (t(4, 8), (8,), t(8), 1e-3),
    free=("shape", "eps"),
    optional="w",
    preserves=_is_exact,
    says=_says,
)
def rms_norm(x: Any, shape: Any, w: Any, eps: Any) -> Any:
    return torch.rms_norm(x, shape, w, eps)


@rms_norm.replace
def _of_rms(x: Any, shape: Any, w: Any, eps: Any, *, block: Any, dtype: Any) -> Any:
    y = BLOCK_NORM(x, w, block, eps)[0]
    return y if dtype is None else y.to(dtype)


@pattern(
    example=lambda: (t(4, 8), (8,), t(8), t(8), 1e-3),
    free=("shape", "eps"),
    optional=("w", "b"),
    says=_says,
)
def layer_norm(x: Any, shape: Any, w: Any, b: Any, eps: Any) -> Any:
    return F.layer_norm(x, shape, w, b, eps)


@layer_norm.replace
def _of_layer(x: Any, shape: Any, w: Any, b: Any, eps: Any, *, block: Any, dtype: Any) -> Any:
    y = BLOCK_NORM(x, w, block, eps)[0]
    y = y if b is None else y + b
    return y if dtype is None else y.to(dtype)


@pattern(
    example=lambda: (t(4, 8), 2, t(8), t(8), 1e-3),
    free=("groups", "eps"),
    optional=("w", "b"),
    says=_says,
)
def group_norm(x: Any, groups: Any, w: Any, b: Any, eps: Any) -> Any:
    return F.group_norm(x, groups, w, b, eps)


@group_norm.replace
def _of_group(x: Any, groups: Any, w: Any, b: Any, eps: Any, *, block: Any, dtype: Any) -> Any:
    y = BLOCK_NORM(x, w, block, eps)[0]
    y = y if b is None else y + b
    return y if dtype is None else y.to(dtype)


@rms_norm.when
@layer_norm.when
@group_norm.when
def _over_last(match: Match) -> dict[str, Any] | str:
    why = _why_not(match)
    if why is not None:
        return f"{m.name_of(match.result)} left as written: {why}"
    node = match.result
    features, width = norm_blocks.features(node), norm_blocks.width(node)
    if match.kept("block_norm"):
        # An RMSNorm no wider than one block computes the same, whatever its name.
        same = g.is_call(node, torch.rms_norm) and block_of(width) == width
        return _constants(match, width) if same else KEPT
    block = min(match.options.block or norm_blocks.block_for(node), width)
    if width % block and width != features:
        # A ragged last block would run into the next group.
        block = width
    return _constants(match, block)


def _why_not(match: Match) -> str | None:
    node = match.result
    x, y = g.value(match.node("x")), g.value(node)
    if g.is_call(node, F.group_norm):
        if x.dim() != 2:
            return "it does not run over the last dimension"
    elif len(match.number("shape")) != 1:
        return f"it runs over {len(match.number('shape'))} dimensions"
    if not isinstance(norm_blocks.width(node), int) or norm_blocks.width(node) < 1:
        return "its width is not a number"
    if not x.is_floating_point() or not y.is_floating_point():
        return "its input is not a floating-point tensor"
    # Our op saves its input for the backward, which torch's own need not do.
    writer = match.written_later("x")
    return None if writer is None else f"its input is written to in place later ({writer})"


def _constants(match: Match, block: int) -> dict[str, Any]:
    # Autocast on CUDA computes norms in FP32 and returns that; our op keeps x's dtype.
    dtype = g.value(match.result).dtype
    return {"block": block, "dtype": None if dtype == match.dtype("x") else dtype}


BLOCK_NORMS = Mod("block_norm", rms_norm=rms_norm, layer_norm=layer_norm, group_norm=group_norm)


# -- with this Mod off ----------------------------------------------------------------------------


@pattern(example=rms_norm.example, free=rms_norm.free, optional="w", preserves=True, says=_says)
def exact_rms_norm(x: Any, shape: Any, w: Any, eps: Any) -> Any:
    return torch.rms_norm(x, shape, w, eps)


exact_rms_norm.replace(_of_rms)


@exact_rms_norm.when
def _if_the_same(match: Match) -> dict[str, Any] | str:
    width = norm_blocks.width(match.result)
    why = _why_not(match)
    if why is None and block_of(width) != width:
        why = f"over {width} features it equals block_norm no more, and the Mod block_norm is off"
    return _constants(match, width) if why is None else f"rms_norm left as written: {why}"


EXACT_BLOCK_NORM = Mod("exact_block_norm", rms_norm=exact_rms_norm)
