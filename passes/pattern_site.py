"""One match of a pattern, as its `when`, `preserves` and `says` see it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes import matching as m
from loka_compile.passes import mod_layers
from loka_compile.passes.aliases import Facts
from loka_compile.passes.manager import PassContext
from loka_compile.passes.pattern_splice import Found


class Match:
    """What may be asked about one match; `name` is an argument of the pattern."""

    def __init__(self, found: Found, context: PassContext, facts: Callable[[], Facts]) -> None:
        self._found, self._context, self._facts = found, context, facts
        #: What a `when` has given for the replacement; `preserves` and `says` may ask for it.
        self.constants: Mapping[str, Any] = {}

    @property
    def options(self) -> Options:
        """Those of the compile."""
        return self._context.options

    @property
    def is_head(self) -> bool:
        """One of the linears that it replaces counts as a head."""
        return any(n.meta.get(g.SITE) in self._context.heads for n in self._found.calls)

    def kept(self, mod: str) -> bool:
        """The user keeps this layer as it is written, for this Mod."""
        like = next((n for n in self._found.calls if g.SITE in n.meta), self.result)
        return self._context.mods.keeps(mod, mod_layers.layer_of(like))

    @property
    def result(self) -> fx.Node:
        """The graph's node that is the pattern's (first) result."""
        return self._found.outputs[0]

    @property
    def layer(self) -> str:
        """The layer that the match's result belongs to."""
        return g.layer_of(self.result)

    @property
    def line(self) -> str:
        """The user's line that made the match's result."""
        return g.line_of(self.result)

    def given(self, name: str) -> bool:
        """An optional argument is there, not None."""
        return name in self._found.inputs

    def node(self, name: str) -> fx.Node:
        """The graph's node bound to `name`."""
        if name not in self._found.inputs:
            raise KeyError(f"no argument {name!r}; here are {', '.join(self._found.inputs)}")
        return self._found.inputs[name]

    def shape(self, name: str) -> torch.Size:
        """May hold symbolic sizes; a check that branches on one refuses the match."""
        return g.value(self.node(name)).shape

    def dtype(self, name: str) -> torch.dtype:
        return g.value(self.node(name)).dtype

    def is_parameter(self, name: str) -> bool:
        """`name` is an nn.Parameter, maybe transposed or cast, and not computed."""
        return m.parameter(self.node(name)) is not None

    def number(self, name: str) -> Any:
        """What a free argument is at this match: a number, or a tuple of ints."""
        if name not in self._found.literals:
            free = ", ".join(self._found.literals) or "none"
            raise KeyError(f"no free argument {name!r}; free are: {free}")
        return self._found.literals[name]

    def written_later(self, name: str) -> str | None:
        """The op that writes to `name` in place behind the match; None if nothing does.

        For replacements that keep an argument for the backward, which the pattern need not do.
        """
        facts = self._facts()
        writer = facts.written(self.node(name), after=self._found.last(facts))
        return None if writer is None else m.name_of(writer)

    def obstacle(self, first: fx.Node, last: fx.Node, reads: Iterable[Any]) -> str | None:
        """Why `reads` may have another value at `last` than at `first`; None when they may not.

        For a `when` that looks at nodes around the match.
        """
        return self._facts().obstacle(first, last, reads)
