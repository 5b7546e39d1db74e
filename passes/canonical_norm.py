"""Graph -> graph in which norms have positional arguments, every one of them, and a literal eps.

F.layer_norm(x, shape, weight, bias, eps)
torch.rms_norm(x, shape, weight, eps)
F.group_norm(x, groups, weight, bias, eps)
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

import loka_compile.lowering.ops  # noqa: F401  (defines the ops named below)
from loka_compile.kernels.block_norm import wide_dtype
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes.manager import PassContext


def library_norms(gm: fx.GraphModule, context: PassContext) -> None:
    """Keywords and defaults of layer_norm, rms_norm and group_norm filled in."""
    for node in list(gm.graph.nodes):
        if g.is_call(node, F.layer_norm):
            names = ("input", "normalized_shape", "weight", "bias", "eps")
            args = m.bound(node, names, None, None, 1e-5)
        elif g.is_call(node, torch.layer_norm):
            more = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
            args = m.bound(node, more, None, None, 1e-5, True)
            args = None if args is None else args[:5]
        elif g.is_call(node, F.rms_norm, torch.rms_norm):
            args = m.bound(node, ("input", "normalized_shape", "weight", "eps"), None, None)
        elif g.is_call(node, F.group_norm):
            args = m.bound(node, ("input", "num_groups", "weight", "bias", "eps"), None, None, 1e-5)
            if args is not None:
                node.args, node.kwargs = args, {}
            continue
        else:
            if g.is_call(node, torch.ops.loka.block_norm):
                node.target = torch.ops.loka.block_norm.default
            continue
        if args is None or m.tensor(args[0]) is None or not isinstance(args[1], (list, tuple)):
            context.refused(node, "norm called in an unknown form: left as written")
            continue
        args = (args[0], tuple(args[1]), *args[2:])
        if args[-1] is None:
            # All of torch's implementations take the epsilon of the dtype in which they compute:
            # FP32 for half inputs, with or without autocast. finfo(bfloat16).eps would be 0.008.
            args = (*args[:-1], torch.finfo(wide_dtype(g.value(args[0]).dtype)).eps)
        node.args, node.kwargs = args, {}
        node.target = F.layer_norm if len(args) == 5 else torch.rms_norm
