"""A kernel that fails while a step runs: the step runs again in high precision, and without it on.

A forward that raises is run again as it is. A backward is not ours to call again: it is entered by
autograd, and has used up what its forward saved. So each forward leaves, on its autograd node, the
parameters and weak references to the other inputs; when the compiled backward raises, the graph is
run again from those in high precision, node by node, and differentiated. Where an input is gone, or
the graph's results are not plainly its outputs, the error stands, and only the kernel is given up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile import demotion
from loka_compile.binding import Args
from loka_compile.binding import Binding
from loka_compile.capture import Source
from loka_compile.decisions import Decisions
from loka_compile.failure_board import PENDING
from loka_compile.ledger import LEDGER
from loka_compile.mod_set import ModSet
from loka_compile.passes import graph as g
from loka_compile.telling import Teller
from loka_compile.variant import Decided
from loka_compile.variants import Variants

_BACKWARD = ("dgrad", "wgrad")


class Recovery:
    def __init__(
        self,
        source: Source,
        variants: Variants,
        decisions: Decisions,
        teller: Teller,
        lock: threading.RLock,
    ) -> None:
        self.source = source
        self.variants = variants
        self.decisions = decisions
        self.teller = teller
        self._lock = lock
        placeholders = [n for n in source.gm.graph.nodes if n.op == "placeholder"]
        #: Inputs that live no longer than a step.
        self._passing = [
            i
            for i, (node, fake) in enumerate(zip(placeholders, source.fakes, strict=True))
            if isinstance(fake, Tensor) and not g.is_parameter(node)
        ]

    # -- forward ----------------------------------------------------------------------------------

    def forward(self, binding: Binding, args: Args, error: Exception) -> Any:
        """The results of a failed forward in high precision; what fails there too is raised."""
        with self._lock:
            high = self.variants.get(Decided(binding.built.decided.mods), None)
        try:
            out = high.fn(*args)
        except Exception:
            raise error from None
        self._demote(binding, ("fwd",), error, "a forward kernel failed")
        # A checkpoint that runs this forward again inside the backward must get the same.
        binding.built, binding.extra = high, ()
        self.guard(out, binding, args)
        return out

    # -- backward ---------------------------------------------------------------------------------

    def guards(self, kernels: Sequence[tuple[str, tuple[str, str, str]]]) -> bool:
        """Could a backward of this variant fail by a kernel of ours, or a checkpoint's second
        forward in it be another than the first, since a kernel failed somewhere."""
        return self.source.training and bool(kernels)

    def guard(self, out: Any, binding: Binding, args: Args) -> None:
        """Stand by for the backward of a forward that just ran. Host cost: a few microseconds."""
        node: Any = None
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            node = (tensor.grad_fn if isinstance(tensor, Tensor) else None) or node
            if node is not None and _compat.guard_backward(node, _on_failure, _on_end):
                held: list[Any] = list(args)
                for i in self._passing:
                    held[i] = weakref.ref(held[i])
                node.loka_step = Step(self, binding, held)
                return
        if node is not None:
            demotion.BOARD.blind = True

    def backward(
        self, step: Step, grads: Sequence[Any], needed: Sequence[bool], error: Exception
    ) -> tuple[Any, ...]:
        """Gradients of the graph's inputs where its compiled backward raised `error`."""
        inputs = step.inputs()
        found = None
        if inputs is not None and len(inputs) <= len(needed):
            found = self._again(inputs, grads, step.binding.built.decided.mods)
        how = "a backward kernel failed"
        if found is None:
            self._demote(step.binding, _BACKWARD, error, how, "the step could not be saved")
            raise error
        self._demote(step.binding, _BACKWARD, error, how)
        # Behind the graph's own inputs stands probe state, which has no gradient.
        return (*found, *[None] * (len(needed) - len(found)))

    def _again(self, inputs: list[Any], grads: Sequence[Any], mods: ModSet) -> list[Any] | None:
        leaves = [
            # What the graph writes to in place it has written to already.
            one.detach().requires_grad_() if one.requires_grad else one.clone()
            for one in inputs
            if isinstance(one, Tensor)
        ]
        rest = iter(leaves)
        args = [next(rest) if isinstance(one, Tensor) else one for one in inputs]
        with self._lock:
            function = self.variants.in_eager(Decided(mods))
        try:
            with torch.enable_grad(), _compat.restore_autocast(self.source.autocast):
                out = function(*args)
            outs = list(out) if isinstance(out, (list, tuple)) else [out]
            if len(outs) != len(grads):
                # Beside the results the compiled graph returns what it wrote to, or bases of views.
                return None
            pairs = [
                (o, one)
                for o, one in zip(outs, grads, strict=True)
                if isinstance(o, Tensor) and o.requires_grad and isinstance(one, Tensor)
            ]
            if any(o.shape != one.shape for o, one in pairs):
                return None
            wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
            ends, starts = [o for o, _ in pairs], [one for _, one in pairs]
            made = iter(torch.autograd.grad(ends, wanted, starts, allow_unused=True))
        except Exception:
            return None
        return [next(made) if isinstance(a, Tensor) and a.requires_grad else None for a in args]

    # -- both -------------------------------------------------------------------------------------

    def _demote(
        self,
        binding: Binding,
        directions: Sequence[str],
        error: Exception,
        what: str,
        outcome: str = "this step ran again in high precision",
    ) -> None:
        with self._lock:
            fp8 = dict(binding.built.decided.kernels)
            if not fp8:
                return  # What failed was high precision.
            plans = [p for name, p in binding.site_plans.items() if name in fp8]
            guilty = demotion.guilty(plans, directions, self.source.device, self.decisions.options)
            names = demotion.demote(guilty, error)
            self.teller.say_once(
                f"{what} ({type(error).__name__}: {error}); {outcome}, and these will from now on: "
                f"{', '.join(names)}"
            )
            self.decisions.forget()
            LEDGER.touch()


@dataclass(eq=False)
class Step:
    """What a forward leaves behind for its backward. `held`: inputs, the passing ones weakly.

    Pending until the backward has run, or until nobody can call it any more.
    """

    recovery: Recovery
    binding: Binding
    held: list[Any]

    def __post_init__(self) -> None:
        PENDING.add(id(self))

    def end(self, discard: Callable[[int], None] = PENDING.discard) -> None:
        discard(id(self))

    # Bound above: at the end of the process globals may be gone.
    __del__ = end

    def inputs(self) -> list[Any] | None:
        """The inputs again; None where one of them is gone."""
        found = [one() if isinstance(one, weakref.ref) else one for one in self.held]
        gone = any(
            a is None and isinstance(b, weakref.ref) for a, b in zip(found, self.held, strict=True)
        )
        return None if gone else found


def _on_end(node: Any) -> None:
    step = getattr(node, "loka_step", None)
    if step is not None:
        step.end()


def _on_failure(node: Any, grads: Sequence[Any], error: Exception) -> tuple[Any, ...]:
    step = getattr(node, "loka_step", None)
    if step is None or not demotion.may_be_a_kernel(error):
        raise error
    return step.recovery.backward(step, grads, node.needs_input_grad, error)
