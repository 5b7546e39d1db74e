"""What can be told of data flow from modules alone: their kinds, and the order of registration.

A forward may do anything, so these are rules of thumb for models that nobody has run yet; what
Dynamo traces from example inputs is exact (`module_flow.py`).
"""

from __future__ import annotations

from torch import nn

_NORMS = (nn.LayerNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """A norm over the last dimension that is, or has become, BlockNorm."""
    if isinstance(module, _NORMS):
        return len(module.normalized_shape) == 1
    return type(module).__name__ == "BlockNorm"


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
