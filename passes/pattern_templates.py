"""A pattern's function and its example -> the graphs that are looked for. Raises PatternError."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.nn import functional as F

from loka_compile.errors import PatternError
from loka_compile.passes import matching as m
from loka_compile.passes import pattern_splice
from loka_compile.passes.graph_text import text_of
from loka_compile.passes.pattern_match import Template
from loka_compile.passes.pattern_match import literal_key
from loka_compile.passes.pattern_spelling import arguments
from loka_compile.passes.pattern_spelling import key_of
from loka_compile.passes.pattern_trace import NotTraceableError
from loka_compile.passes.pattern_trace import Traced
from loka_compile.passes.pattern_trace import names_of
from loka_compile.passes.pattern_trace import recorded
from loka_compile.passes.pattern_trace import stand_ins_of
from loka_compile.passes.pattern_trace import trace


@dataclass(frozen=True)
class Looked:
    """What one pattern looks for. names: of its arguments; text: of the graphs."""

    names: tuple[str, ...]
    templates: list[Template]
    text: str


def look_for(
    name: str,
    pattern: Callable[..., Any],
    example: Sequence[Any],
    free: Sequence[str],
    optional: Sequence[str],
) -> Looked:
    """`name` is the pattern's, for errors. Traces under the modes in force."""
    try:
        names = names_of(pattern)
        traced = _traced(pattern, example)
    except NotTraceableError as error:
        raise PatternError(name, f"the pattern {error}") from error
    switch = next((n for n in traced.gm.graph.nodes if pattern_splice.is_switch(n)), None)
    if switch is not None:
        why = f"the pattern switches grad or autocast modes ({m.name_of(switch)})"
        raise PatternError(name, f"{why}: only a replacement may")
    given = dict(zip(names, example, strict=True))
    for one in optional:
        _check_optional(name, one, pattern, given, traced)
    templates: list[Template] = []
    texts: list[str] = []
    # Canonical spellings depend on what is a parameter (x @ w, a bias added by hand).
    for parameters in (False,) if _is_canonical(traced) else (False, True):
        gm, _ = traced.copy(stand_ins_of(example, parameters=parameters))
        text = text_of(gm)
        if text not in texts:
            templates.append(_template(name, gm, traced, given, free, optional))
            texts.append(text)
    return Looked(names, templates, "".join(texts))


#: Alone, they are spelled one way whatever their arguments are.
_CANONICAL = {F.layer_norm, F.group_norm, F.silu, F.hardswish, m.LINEAR, "rms_norm", "sigmoid"}


def _is_canonical(traced: Traced) -> bool:
    calls = [n for n in traced.gm.graph.nodes if n.op not in ("placeholder", "output")]
    return len(calls) == 1 and key_of(calls[0]) in _CANONICAL


def _traced(pattern: Callable[..., Any], example: Sequence[Any]) -> Traced:
    return recorded(pattern, example) or trace(pattern, example)


def _check_optional(
    name: str, one: str, pattern: Callable[..., Any], given: Mapping[str, Any], traced: Traced
) -> None:
    """None must make no other difference than to stand where the argument stood."""
    if not isinstance(given.get(one), torch.Tensor):
        raise PatternError(name, f"optional={one!r} is no tensor argument with an example")
    try:
        without = _traced(pattern, list({**given, one: None}.values()))
    except NotTraceableError as error:
        raise PatternError(name, f"with {one}=None, the pattern {error}") from error
    if _calls(traced, tuple(given).index(one)) != _calls(without):
        why = "the pattern must pass it on to one op as it is; write two patterns"
        raise PatternError(name, f"optional={one!r}: {why}")


def _calls(traced: Traced, left_out: int | None = None) -> list[Any]:
    """Calls of a raw graph with their arguments; `left_out`, by its position, reads None."""
    numbers: dict[fx.Node, Any] = {}
    found: list[Any] = []
    for node in traced.gm.graph.nodes:
        if node.op == "placeholder":
            source = traced.sources[node.name]
            numbers[node] = None if source[0] == left_out else ("argument", *source)
            continue
        numbers[node] = ("call", len(found))
        args, kwargs = map_aggregate((node.args, node.kwargs), lambda a: _number(a, numbers))  # type: ignore[misc]
        # A keyword of None may be written or left out.
        found.append((node.op, node.target, args, {k: v for k, v in kwargs.items() if v}))
    return found


def _number(argument: Any, numbers: Mapping[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return numbers[argument] and str(numbers[argument])
    return None if argument is None else repr(argument)


def _template(
    name: str,
    gm: fx.GraphModule,
    traced: Traced,
    given: Mapping[str, Any],
    free: Sequence[str],
    optional: Sequence[str],
) -> Template:
    names = tuple(given)
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = {names[traced.sources[n.name][0]]: n for n in nodes}
    for one, value in given.items():
        unused = one not in inputs or not inputs[one].users
        if isinstance(value, torch.Tensor) and unused:
            raise PatternError(name, f"argument {one!r} is not used by the pattern")
    outputs = pattern_splice.results(gm)
    if not outputs or any(n.op == "placeholder" or m.tensor(n) is None for n in outputs):
        raise PatternError(name, "the pattern must return computed tensors")
    may_miss = frozenset(inputs[one] for one in optional)
    return Template(gm, inputs, tuple(outputs), _free(name, gm, given, free), may_miss)


def _free(
    name: str, gm: fx.GraphModule, given: Mapping[str, Any], free: Sequence[str]
) -> dict[Any, str]:
    found: dict[Any, str] = {}
    for one in free:
        if one not in given:
            raise PatternError(name, f"free={one!r} is no argument of the pattern")
        value = given[one]
        key = None if isinstance(value, bool) else literal_key(value)
        if key is None:
            kinds = "an int or a float, or a tuple of ints"
            raise PatternError(name, f"free argument {one!r} must be {kinds}")
        if key in found:
            why = f"free arguments {found[key]!r} and {one!r} are both {value!r}"
            raise PatternError(name, f"{why} in the example: make them differ")
        if key not in _literals_of(gm):
            raise PatternError(name, f"{value!r}, free as {one!r}, is not in the pattern")
        found[key] = one
    return found


def _literals_of(gm: fx.GraphModule) -> set[Any]:
    """Keys of every literal in the arguments of a graph's calls."""
    found: set[Any] = set()

    def look(value: Any) -> None:
        found.add(literal_key(value))
        if isinstance(value, (list, tuple)):
            for one in value:
                look(one)

    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            look(arguments(node))
    return found
