"""What can be told of data flow from modules alone: their kinds, and the order of registration.

A forward may do anything, so these are rules of thumb for models that nobody has run yet; what
Dynamo traces from example inputs is exact (`module_flow.py`).
"""

from __future__ import annotations

from torch import nn

from loka_compile.names import HEAD_FEATURES

_NORMS = (nn.LayerNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """A norm over the last dimension that is, or has become, BlockNorm."""
    if isinstance(module, _NORMS):
        return len(module.normalized_shape) == 1
    return type(module).__name__ == "BlockNorm"


def heads(model: nn.Module) -> set[str]:
    """Names of the Linears that seem to be heads: at most 16 outputs and nothing behind them.

    Behind a module is what was registered after it: a wider Linear, or a norm. What belongs to a
    tower beside its own (`_beside`) does not count, so that each of several tasks keeps its head.
    """
    order = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) or is_norm(m)]
    found = set()
    for i, (name, module) in enumerate(order):
        if isinstance(module, nn.Linear) and module.out_features <= HEAD_FEATURES:
            behind = (n for n, m in order[i + 1 :] if not _is_narrow(m))
            if all(_beside(model, name, other) for other in behind):
                found.add(name)
    return found


def _is_narrow(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features <= HEAD_FEATURES


def _beside(model: nn.Module, name: str, other: str) -> bool:
    """`name` ends a tower, and `other` is in one like it: as many inputs, and as narrow an end."""
    one, two = name.split("."), other.split(".")
    shared = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    towers = [model.get_submodule(".".join(p[: shared + 1])) for p in (one, two)]
    linears = [[m for m in t.modules() if isinstance(m, nn.Linear)] for t in towers]
    ends = [_last_with_weights(t) for t in towers]
    return (
        all(len(mine) > 1 for mine in linears)
        and ends[0] is model.get_submodule(name)
        and all(isinstance(e, nn.Linear) and _is_narrow(e) for e in ends)
        and linears[0][0].in_features == linears[1][0].in_features
    )


def norms_behind_no_linear(model: nn.Module) -> set[str]:
    """Names of the norms that no matrix product with a weight seems to feed.

    What was registered last before the norm feeds it, in the innermost parent that holds anything
    but norms: `SwishLayerNorm` behind a Linear is behind that Linear, while a norm that comes first
    in a block with linears of its own reads the block's input.
    """
    return {
        name
        for name, module in model.named_modules()
        if is_norm(module) and not _fed_by_a_linear(model, name)
    }


def _fed_by_a_linear(model: nn.Module, name: str) -> bool:
    path = name
    while path:
        parent_path, _, child = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        siblings = list(parent._modules)
        for before in reversed(siblings[: siblings.index(child)]):
            last = _last_with_weights(parent._modules[before])
            if last is not None:
                return _multiplies(last)
        if not all(is_norm(m) for m in parent.modules() if _has_weights(m)):
            return False
        path = parent_path
    return False


def _last_with_weights(module: nn.Module | None) -> nn.Module | None:
    found = None
    for one in module.modules() if module is not None else ():
        if _has_weights(one) or is_norm(one):
            found = one
    return found


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _multiplies(module: nn.Module) -> bool:
    """A Linear, or a module with a matrix of its own that is no table."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return False
    return any(p.dim() >= 2 for p in module.parameters(recurse=False))
