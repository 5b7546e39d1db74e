"""The built-in passes, in the order in which the backend runs them.

To add one: write `passes/<stem>.py` with a class that has `name` and `__call__(gm, context)`, edits
the one graph that it is given in place, and tells `context` what it changed, rewrote or refused
(the manager visits bodies, times, lints and diffs); put its test into
`tests/passes/test_<stem>.py`; name it here at its place.

After `PREPARE` a pass may rely on the spellings that `canonicalize` lists. Between `PREPARE` and
the lists below every linear gets its site name, in `node.meta[graph.SITE]`: a pass that replaces a
linear hands it on with `graph.inherit`.

A pass that changes the model's function belongs into `with_mods` only.
"""

from __future__ import annotations

from loka_compile.passes.block_norm import BlockNorm
from loka_compile.passes.block_norm import ExactBlockNorm
from loka_compile.passes.canonicalize import Canonicalize
from loka_compile.passes.fuse import Fuse
from loka_compile.passes.hard_swish import HardSwish
from loka_compile.passes.manager import Pass
from loka_compile.passes.strip_bias import StripBias

#: Before sites are named; always.
PREPARE: tuple[Pass, ...] = (Canonicalize(),)


def with_mods() -> list[Pass]:
    """The model's function changes: no bias, BlockNorm, Hard Swish; then they are fused."""
    return [StripBias(), BlockNorm(), HardSwish(), Fuse()]


def without_mods() -> list[Pass]:
    """The same function: only fusions that are exact."""
    return [ExactBlockNorm(), Fuse()]
