"""Stable names for GEMM sites: the module path of the weight, never an object id.

Order of sources: the registry filled by `name_layers(model)`; Dynamo's source of the weight's
placeholder (`L['self']._modules['mlp']._modules['0']._parameters['weight']` -> `mlp.0`); a name
made of the weight's shape. The n-th further use of one weight in one graph is `mlp.0#n`.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import weakref
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import fx

from loka_compile import _compat
from loka_compile.passes import graph as g
from loka_compile.passes.matching import transformed

LINEAR = torch._C._nn.linear
TRANSFORMED = (
    "its graph runs a functorch transform (vmap, grad), for which FP8 kernels have no rule: "
    "compile what is outside of it as a graph of its own"
)

_REGISTERED: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
_MODULES: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Site:
    """One linear call in one Dynamo graph. M, K, N are example values; y = x @ w.T."""

    name: str
    #: Placeholder of the weight in the top-level graph; "" when the weight is computed.
    weight: str
    #: Which use of this weight in this graph (0 for the first).
    call: int
    m: int
    k: int
    n: int
    dtype: torch.dtype
    head: bool
    #: The parameter is stored (K, N) and used through a transpose.
    transposed: bool = False
    #: Why the site must stay as written, or "".
    refusal: str = ""

    @property
    def features(self) -> tuple[int, int]:
        """What patterns of shapes look at: K and N."""
        return self.k, self.n


def name_layers(model: torch.nn.Module, prefix: str = "") -> torch.nn.Module:
    """Register `model`'s parameters under their paths; returns `model`.

    Needed when blocks are compiled one by one (`block.compile()`): the backend then sees each
    block as a root and equal blocks as one graph.
    """
    for name, parameter in model.named_parameters(prefix=prefix):
        key = id(parameter)
        _REGISTERED[key] = (
            weakref.ref(parameter, functools.partial(_forget, key)),
            name,
        )
    for name, module in model.named_modules(prefix=prefix):
        _MODULES[module] = name
    return model


def _forget(key: int, _: object) -> None:
    _REGISTERED.pop(key, None)


def registered_name(parameter: torch.Tensor) -> str | None:
    """Its path from the model's root, as `name_layers` or FSDP2 knows it."""
    held = _REGISTERED.get(id(parameter))
    if held is not None and held[0]() is parameter:
        return held[1]
    found = _compat.gathered(parameter)
    return None if found is None else _gathered_name(found)


def _gathered_name(one: _compat.Gathered) -> str | None:
    path = _MODULES.get(one.module)
    return one.path if path is None else f"{path}.{one.name}".removeprefix(".")


def registered_layers() -> dict[str, tuple[int, int]]:
    """Layer path -> (K, N) of everything that `name_layers` was told about, or FSDP2 gathers;
    0 where it has none."""
    known: list[tuple[str, tuple[int, ...]]] = []
    for ref, name in list(_REGISTERED.values()):
        parameter = ref()
        known.append((name, () if parameter is None else tuple(parameter.shape)))
    for one in _compat.gathered_of():
        path = _gathered_name(one)
        known += [] if path is None else [(path, one.shape)]
    found: dict[str, tuple[int, int]] = {}
    for name, shape in known:
        path = layer_path(name)
        found.setdefault(path, (0, 0))
        if len(shape) == 2:
            found[path] = int(shape[1]), int(shape[0])
    return found


def registered_modules() -> list[str]:
    """Paths of its modules, those without parameters too."""
    return list(_MODULES.values())


def parameter_path(source: str | None) -> str | None:
    """Dynamo source -> parameter path from the model's root."""
    if not source:
        return None
    tokens = re.findall(r"\[['\"]([^'\"]+)['\"]\]|\.(\w+)|\[(\d+)\]", source)
    path = [a or b or c for a, b, c in tokens]
    if source.startswith(("L[", "G[")):
        path = path[1:]
    path = [p for p in path if p not in ("_modules", "_parameters", "_buffers")]
    return ".".join(path) or None


def layer_path(parameter: str) -> str:
    """`mlp.0.weight` -> `mlp.0`; a raw parameter keeps its own name."""
    return parameter.removesuffix(".weight") or parameter


def find_sites(
    gm: fx.GraphModule,
    example_inputs: list[torch.Tensor],
    head_patterns: Sequence[str] | None = None,
) -> list[Site]:
    """All linears of a canonical graph and its bodies; each node's meta gets its site name.

    `head_patterns` name the heads; None: the rule of `_head_nodes`.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    real = dict(zip(placeholders, example_inputs, strict=False))
    found: list[Site] = []
    calls: dict[str, int] = {}
    taken: dict[str, int] = {}
    for graph, outer in with_outer(gm):
        why = TRANSFORMED if transformed(graph) else ""
        for node in graph.graph.nodes:
            if not g.is_call(node, LINEAR):
                continue
            site = _site(node, outer, real, calls)
            site = replace(site, refusal=site.refusal or why)
            # Two different weights with one name (a shape name, or two roots): number them too.
            seen = taken.get(site.name, 0)
            taken[site.name] = seen + 1
            if seen:
                site = replace(site, name=f"{site.name}#{seen}")
            node.meta[g.SITE] = site.name
            found.append(site)
    if head_patterns is None:
        heads = {n.meta[g.SITE] for n in _head_nodes(gm)}
    else:
        heads = {
            s.name for s in found if any(fnmatch.fnmatchcase(s.name, p) for p in head_patterns)
        }
    return [replace(s, head=s.name in heads) for s in found]


def with_outer(
    gm: fx.GraphModule,
) -> Iterator[tuple[fx.GraphModule, dict[fx.Node, fx.Node]]]:
    """Every graph with a map from its placeholders to the top-level graph's."""

    def walk(one: fx.GraphModule, outer: dict[fx.Node, fx.Node]):
        yield one, outer
        for call, body in g.bodies(one):
            operands = [a for a in call.args if not _is_body(one, a)]
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            mapping = {}
            for placeholder, operand in zip(inner, operands, strict=False):
                source = g.parameter_of(operand)
                # A weight turned outside its body would lose its orientation: left unmapped.
                if source is not None and source in outer and not g.is_transposed(operand):
                    mapping[placeholder] = outer[source]
            yield from walk(body, mapping)

    top = {n: n for n in gm.graph.nodes if n.op == "placeholder"}
    yield from walk(gm, top)


def _is_body(gm: fx.GraphModule, arg: object) -> bool:
    return (
        isinstance(arg, fx.Node)
        and arg.op == "get_attr"
        and isinstance(getattr(gm, str(arg.target), None), fx.GraphModule)
    )


def _site(
    node: fx.Node,
    outer: dict[fx.Node, fx.Node],
    real: dict[fx.Node, torch.Tensor],
    calls: dict[str, int],
) -> Site:
    y = g.value(node)
    x = g.value(node.args[0])
    w = g.value(node.args[1])
    n, k = (int(s) for s in w.shape)
    m = 1
    for size in x.shape[:-1]:
        m *= _compat.size_hint(size, fallback=1)
    inner = g.parameter_of(node.args[1])
    placeholder = outer.get(inner) if inner is not None else None
    weight, refusal, name = "", "", None
    if placeholder is not None and g.is_parameter(placeholder):
        weight = placeholder.name
        parameter = real.get(placeholder)
        if parameter is not None:
            name = registered_name(parameter)
        name = name or parameter_path(_compat.source_name(placeholder))
        name = layer_path(name) if name else None
    else:
        refusal = "the weight is computed, not a parameter (parametrised or tied through an op)"
        name = f"{g.layer_of(node)}" if node.meta.get("nn_module_stack") else None
    call = 0
    if weight:
        call = calls.get(weight, 0)
        calls[weight] = call + 1
    dtype = y.dtype if isinstance(y, torch.Tensor) else x.dtype
    if not dtype.is_floating_point:
        refusal = f"dtype {dtype} is not floating point"
    elif dtype == torch.float64:
        refusal = "it computes in float64, which is written where FP8 would defeat the purpose"
    name = name or f"linear_{n}x{k}"
    swapped = bool(weight) and g.is_transposed(node.args[1])
    return Site(name, weight, call, m, k, n, dtype, False, swapped, refusal)


_NORMS = (
    torch.nn.functional.layer_norm,
    torch.rms_norm,
    torch.nn.functional.batch_norm,
    torch.nn.functional.group_norm,
)
HEAD_FEATURES = 16


def _head_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Linears with at most 16 outputs that reach the graph's output through no linear, no norm."""
    output = next(n for n in gm.graph.nodes if n.op == "output")
    seen: set[fx.Node] = set()
    heads = []
    stack = list(output.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if g.is_call(node, LINEAR):
            w = g.value(node.args[1])
            if w is not None and int(w.shape[0]) <= HEAD_FEATURES:
                heads.append(node)
            continue
        if g.is_call(node, *_NORMS):
            continue
        stack.extend(node.all_input_nodes)
    return heads
