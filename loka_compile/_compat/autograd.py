"""Autograd and autocast: what a compiled step may ask of, and do to, the step around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch


def set_versions_to_zero(tensors: tuple[torch.Tensor, ...]) -> None:
    """Make autograd forget that `tensors` were written to in place since they were saved.

    Torch 2.11 to 2.14 have this only under `_C`. Remove when a saved tensor can opt out of the
    check.
    """
    torch._C._autograd._unsafe_set_version_counter(tensors, (0,) * len(tensors))


def saved_tensors_are_hooked() -> bool:
    """Is something (a checkpoint, offloading) packing what autograd saves here.

    Torch 2.11 to 2.14 have this only under `_C`.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensors_unhooked() -> contextlib.AbstractContextManager[Any]:
    """What is computed inside is none of the step's: a checkpoint around it must not count it."""
    if not saved_tensors_are_hooked():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """What is computed inside, no dispatch mode of the step sees: a selective checkpoint counts the
    ops of its forward, keeps results of some, and hands them to the same ops of its second one.

    Torch 2.11 to 2.14 have this only as a private name.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    if torch._C._len_torch_dispatch_stack() == 0:
        yield
        return
    with _disable_current_modes():
        yield


def keeping_graphs() -> Any:
    """A compile whose backward may run twice, or the first of its two backwards.

    Torch 2.11 to 2.14: AOTAutograd decides when it traces, by a global setting, whether a backward
    may take over the forward's buffers, and looks at the setting once more when it runs.
    """
    return torch._functorch.config.patch(donated_buffer=False)


def is_compiled_backward(node: Any) -> bool:
    """A node of autograd's graph that runs a compiled backward of AOTAutograd's, and nothing else.

    Torch 2.11 to 2.14 make one autograd.Function per compiled graph.
    """
    return hasattr(getattr(type(node), "_forward_cls", None), "compiled_bw")


def compiles_backwards() -> bool:
    """Compiled autograd is on for all that Dynamo compiles.

    Torch 2.11 to 2.14: a setting of Dynamo's.
    """
    return bool(torch._dynamo.config.compiled_autograd)


def guard_backward(
    node: Any, on_failure: Callable[..., Any], on_end: Callable[[Any], None]
) -> bool:
    """Let `on_failure(node, gradients, error)` answer where the backward of AOTAutograd's `node`
    raises, and tell `on_end(node)` when it is over; False where `node` is none of its.

    Torch 2.11 to 2.14 make one autograd.Function per compiled graph; from 2.13 on its gradients
    come in a list that it empties. Remove when compiled backwards can be wrapped by a hook.
    """
    if not is_compiled_backward(node):
        return False
    function = type(node)._forward_cls
    if not hasattr(function, "loka_guarded"):
        backward = function.backward

        def guarded(ctx: Any, *given: Any) -> Any:
            boxed = getattr(function, "boxed_grads_call", False)
            grads = list(given[0]) if boxed else list(given)
            try:
                return backward(ctx, *given)
            except Exception as error:
                return on_failure(ctx, grads, error)
            finally:
                on_end(ctx)

        function.loka_guarded = True
        function.backward = staticmethod(guarded)
    return True


def in_backward() -> bool:
    """True inside autograd's backward, where a checkpoint calls its forward again."""
    return backward_number() != -1


def backward_number() -> int:
    """Of the backward that runs, another for each; -1 outside of any."""
    return torch._C._current_graph_task_id()


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@contextlib.contextmanager
def restore_autocast(state: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """A late compile must trace under the autocast state of the first one."""
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in state:
            if kind == "cuda" and not torch.cuda.is_available():
                continue
            stack.enter_context(torch.amp.autocast(kind, dtype=dtype, enabled=enabled))
        yield


def in_functorch() -> bool:
    """Inside a transform of torch.func (vmap, grad, jvp) that runs as it is, not under Dynamo."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None
