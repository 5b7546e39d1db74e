"""Graph -> graph with observers: each probed site records its input and its output gradient.

The state is three tensors per observed value, six for a gradient, and four for an input whose
covariance is kept (`probe/statistics.py`, `probe/covariance.py`). They
enter as extra placeholders behind Dynamo's own and are bound at call time by the weight's identity,
so that equal blocks that share one graph keep apart. Observers of inputs are nodes; gradients are
observed inside the registered backward, which gets the state through the op's `probe` argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import AttrSource
from torch._dynamo.source import LocalSource
from torch._guards import detect_fake_mode

from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.passes import graph as g
from loka_compile.passes.manager import PassContext
from loka_compile.probe import coherence  # noqa: F401  (defines the op that the backward calls)
from loka_compile.probe import covariance  # noqa: F401  (defines its op)
from loka_compile.probe.statistics import Statistics

OBSERVE = torch.ops.loka.observe.default
OBSERVE_COVARIANCE = torch.ops.loka.observe_covariance.default
LINEAR = torch.ops.loka.linear.default
FUSED = torch.ops.loka.linear_block_norm_act.default

#: Where `probe` stands in each op's arguments, and the position of x and w.
PROBE_AT = {LINEAR: 6, LINEAR_EPILOGUE: 6, FUSED: 13}


@dataclass(frozen=True)
class StateKey:
    """One state tensor group: which site, input ("x") or output gradient ("g")."""

    site: str
    role: str
    #: Does the group hold a covariance.
    covariance: bool = False

    def tensors(self, held: Statistics) -> tuple[torch.Tensor, ...]:
        """What a graph with this group takes of `held`, which may keep more."""
        return held.tensors if self.covariance or self.role == "g" else held.tensors[:3]


class Observe:
    """Runs after `dispatch`, on `loka::` ops. `keys` lists the state groups, in binding order."""

    name = "observe"

    def __init__(self, sites: frozenset[str], covariances: frozenset[str] = frozenset()) -> None:
        self.sites = sites
        self.covariances = covariances
        self.keys: list[StateKey] = []
        self._top: fx.GraphModule | None = None

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        # The manager visits bodies too; they are handled from the top, where placeholders live.
        if self._top is None:
            self._top = gm
            self._graph(gm, context, [])

    def _graph(
        self,
        gm: fx.GraphModule,
        context: PassContext,
        path: list[tuple[fx.GraphModule, fx.Node, fx.GraphModule]],
    ) -> None:
        for node in list(gm.graph.nodes):
            at = PROBE_AT.get(node.target) if node.op == "call_function" else None
            site = node.meta.get(g.SITE)
            if at is None or site not in self.sites:
                continue
            x = node.args[0]
            w = node.args[3] if node.target is FUSED else node.args[1]
            n, k = (int(s) for s in g.value(w).shape)
            dtype = g.value(x).dtype
            own = StateKey(site, "x", site in self.covariances)
            state_x = self._state(gm, path, own, k, dtype, x)
            state_g = self._state(gm, path, StateKey(site, "g"), n, dtype, x)
            with gm.graph.inserting_before(node):
                if own.covariance:
                    # First: it needs the mean and the count of the batches before this one.
                    gm.graph.call_function(OBSERVE_COVARIANCE, (x, *state_x[1:]))
                gm.graph.call_function(OBSERVE, (x, *state_x[:3]))
            args = list(node.args)
            args[at] = list(state_g)
            node.args = tuple(args)
            context.rewrote(node, "observed: input and output gradient")
        for call, body in list(g.bodies(gm)):
            self._graph(body, context, [*path, (gm, call, body)])
        gm.recompile()

    def _state(
        self,
        gm: fx.GraphModule,
        path: list[tuple[fx.GraphModule, fx.Node, fx.GraphModule]],
        key: StateKey,
        features: int,
        dtype: torch.dtype,
        like: fx.Node,
    ) -> list[fx.Node]:
        assert self._top is not None
        device = g.value(like).device
        gradient = key.role == "g"
        real = Statistics.empty(
            features, dtype, device, gradient=gradient, covariance=key.covariance
        )
        index = len(self.keys)
        self.keys.append(key)
        nodes = []
        further = ("coherence", "sketch", "marks") if gradient else ("scatter",)
        parts = ("rows", "moments", "scalars", *further)
        for part, tensor in zip(parts, real.tensors, strict=False):
            name = f"loka_probe_{index}_{part}"
            fake = _fake(g.value(like), tensor, name)
            node = _placeholder(self._top, name, fake)
            # Thread the state through every body on the way down.
            for _outer, call, body in path:
                call.args = (*call.args, node)
                node = _placeholder(body, name, fake)
            nodes.append(node)
        return nodes


def static_placeholder(
    gm: fx.GraphModule, name: str, tensor: torch.Tensor, beside: torch.Tensor
) -> fx.Node:
    """A placeholder behind the others, for a tensor with the shape and dtype of `tensor` that the
    runtime binds; its fake is made in the mode, and on the device, of the fake `beside`."""
    return _placeholder(gm, name, _fake(beside, tensor.to(beside.device), name))


def _fake(beside: torch.Tensor, tensor: torch.Tensor, name: str) -> Any:
    mode = detect_fake_mode([beside])
    assert mode is not None
    source = AttrSource(LocalSource("__loka"), name)
    return mode.from_tensor(tensor, static_shapes=True, source=source)


def _placeholder(gm: fx.GraphModule, name: str, fake: Any) -> fx.Node:
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    node.meta["example_value"] = fake
    # Static: CUDA graphs must not copy the state in at every replay.
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    node._dynamo_source = AttrSource(LocalSource("__loka"), name)  # type: ignore[attr-defined]
    return node
