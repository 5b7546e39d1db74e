"""Calls of our opaque ops in Inductor's code -> calls of the functions behind them.

After autograd, at run time, the dispatcher has nothing left to decide about an op that is ours: it
takes the arguments apart, looks the function up, and puts the results together: microseconds a
call, and a step that is bound by the host has dozens of them. Inductor's own kernels are called as
plain functions, too.

An op overload gets its functions as attributes, `on_cuda` and `on_cpu`, and the code that Inductor
writes says `torch.ops.loka.<op>.default.on_cuda(...)`. Only while this backend compiles: code of
others may outlive this version in their cache, which knows nothing of our sources. Under
cpp_wrapper, and where Inductor is otherwise than expected, the op is called as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("loka_compile")

#: op overload -> device type -> the function that it runs there.
DIRECT: dict[Any, dict[str, Callable[..., Any]]] = {}


#: Ops whose results are known to be what their fakes say.
_UNCHECKED: set[Any] = set()


def register(name: str, *, checked: bool = True, **functions: Callable[..., Any]) -> None:
    """`loka::name`: functional, without views of its inputs among its results, or one that returns
    nothing. functions: by device type; they take what the schema says, by position or by name.
    checked: whether Inductor's code looks at sizes, strides and alignment of each result, with as
    many calls again. Kernels of our own, which tests hold to their fakes, go without."""
    op = getattr(torch.ops.loka, name).default
    if not checked:
        _UNCHECKED.add(op)
    for device, function in functions.items():
        setattr(op, f"on_{device}", function)
    DIRECT[op] = functions


def install() -> None:
    """Let Inductor's lowerings of our ops pass through here. Any number of times."""
    try:
        from torch._inductor import lowering
        from torch._library.utils import get_layout_constraint_tag

        for op in DIRECT:
            known = lowering.lowerings.get(op)
            if known is None:
                # As Inductor does at the first sight of an op that it does not know.
                tag = get_layout_constraint_tag(op, with_default=True)
                constraint = lowering.tag_to_layout_constraint(tag)
                lowering.make_fallback(op, layout_constraint=constraint, warn=False)
                known = lowering.lowerings[op]
            if not hasattr(known, "_calls_directly"):
                lowering.lowerings[op] = _called_directly(known)
    except Exception as error:
        log.debug("ops of ours are called through the dispatcher: %s", error)


def _in_force() -> bool:
    """Does this backend compile: its pass is in the settings, which also hold for the backward."""
    from torch._inductor import config

    passes = config.joint_custom_pre_pass
    return any(
        getattr(one, "of_loka", False)
        for one in (passes if isinstance(passes, (list, tuple)) else [passes])
    )


def _called_directly(known: Callable[..., Any]) -> Callable[..., Any]:
    def handler(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        before = len(V.graph.operations)
        out = known(*args, **kwargs)
        node = _fallback_of(out, before) if _in_force() else None
        if node is not None:
            device = node.get_device()
            if device is not None and device.type in DIRECT.get(node.op_overload, ()):
                node.python_kernel_name += f".on_{device.type}"
                made = V.graph.operations[before:] if node.op_overload in _UNCHECKED else ()
                for result in made:
                    if hasattr(result, "skip_size_stride_alignment_checks"):
                        result.skip_size_stride_alignment_checks = True
        return out

    handler._is_fallback_handler = True  # type: ignore[attr-defined]
    handler._calls_directly = True  # type: ignore[attr-defined]
    return handler


def _fallback_of(out: Any, before: int) -> Any | None:
    """The call that made these results, in Inductor's IR, or that has none. before: how many
    operations its graph had."""
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.ir import MultiOutput
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper:
        return None
    leaves = torch.utils._pytree.tree_leaves(out)
    if all(leaf is None for leaf in leaves):
        leaves = V.graph.operations[before:]
    for leaf in leaves:
        while not isinstance(leaf, (FallbackKernel, MultiOutput)) and hasattr(leaf, "data"):
            leaf = leaf.data
        if isinstance(leaf, MultiOutput):
            leaf = leaf.inputs[0]
        if isinstance(leaf, FallbackKernel):
            return leaf
    return None
