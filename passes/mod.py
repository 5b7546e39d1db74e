"""A built-in Mod: patterns like a user's (`loka_compile.pattern`), one name and one record."""

from __future__ import annotations

from torch import fx

from loka_compile.passes import matching as m
from loka_compile.passes.manager import PassContext
from loka_compile.passes.user_pattern import apply
from loka_compile.user_patterns import Pattern


class Mod:
    """A pass over all of its patterns at once: `op=pattern` by the name of the op that it is for.

    A pattern is traced once per process, when a graph first has such an op.
    """

    def __init__(self, name: str, **patterns: Pattern) -> None:
        self.name, self.patterns = name, patterns

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        ops = {m.name_of(n) for n in gm.graph.nodes if n.op == "call_function"}
        apply([p.as_pass(tried=False) for op, p in self.patterns.items() if op in ops], gm, context)
