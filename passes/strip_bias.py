"""Graph -> graph whose linears and norms have no bias, except in heads and in layers kept.

The parameters stay where they are (placeholders, state_dict, optimizer); they get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from loka_compile.passes.mod import Mod
from loka_compile.passes.pattern_site import Match
from loka_compile.user_patterns import pattern

t = torch.empty
SAYS = "bias removed"
KEPT = "bias kept: the option keep, or the plan, says so"


@pattern(example=lambda: (t(4, 8), t(6, 8), t(6)), says=SAYS)
def linear_bias(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x, w, b)


@linear_bias.replace
def _linear(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x, w)


@linear_bias.when
def _unless_head(match: Match) -> bool | str:
    # A head keeps its bias by design, which is no near miss.
    return "" if match.is_head else _is_parameter(match)


@pattern(
    example=lambda: (t(4, 8), (8,), t(8), t(8), 1e-3),
    free=("shape", "eps"),
    optional="w",
    says=SAYS,
)
def layer_norm_bias(x: Any, shape: Any, w: Any, b: Any, eps: Any) -> Any:
    return F.layer_norm(x, shape, w, b, eps)


@layer_norm_bias.replace
def _layer_norm(x: Any, shape: Any, w: Any, b: Any, eps: Any) -> Any:
    return F.layer_norm(x, shape, w, None, eps)


@layer_norm_bias.when
def _is_parameter(match: Match) -> bool | str:
    if not match.is_parameter("b"):
        return "bias is computed, not a parameter: kept"
    return KEPT if match.kept("no_bias") else True


@pattern(
    example=lambda: (t(4, 8), 2, t(8), t(8), 1e-3), free=("groups", "eps"), optional="w", says=SAYS
)
def group_norm_bias(x: Any, groups: Any, w: Any, b: Any, eps: Any) -> Any:
    return F.group_norm(x, groups, w, b, eps)


@group_norm_bias.replace
def _group_norm(x: Any, groups: Any, w: Any, b: Any, eps: Any) -> Any:
    return F.group_norm(x, groups, w, None, eps)


@group_norm_bias.when
def _over_rows(match: Match) -> bool | str:
    # A group norm over other dimensions stays a group norm, with its bias.
    return _is_parameter(match) if len(match.shape("x")) == 2 else ""


STRIP_BIAS = Mod(
    "strip_bias", linear=linear_bias, layer_norm=layer_norm_bias, group_norm=group_norm_bias
)
