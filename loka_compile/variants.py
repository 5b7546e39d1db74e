"""The compiled variants of one graph: at most two alive, and a plainer one where one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loka_compile import _compat
from loka_compile import variant
from loka_compile.capture import Source
from loka_compile.options import Options
from loka_compile.passes.observe import StateKey
from loka_compile.passes.records import PassRecord
from loka_compile.variant import Decided

log = logging.getLogger("loka_compile")


@dataclass(frozen=True, eq=False)
class Built:
    """A compiled variant and what the runtime needs of it; the graph itself is not kept."""

    decided: Decided
    fn: Callable[..., Any]
    records: list[PassRecord]
    #: State groups that `fn` takes behind the graph's own inputs, in order.
    states: list[StateKey]
    fused: dict[str, str]


class Variants:
    def __init__(self, source: Source, options: Options, say_once: Callable[[str], None]) -> None:
        self.source = source
        self.options = options
        self.say_once = say_once
        self._held: dict[Decided, Built] = {}

    def get(self, decided: Decided, inputs: list[Any] | None) -> Built:
        """The variant for `decided`; `inputs` are the example inputs in Dynamo's own compile."""
        held = self._held.get(decided)
        if held is not None:
            return held
        try:
            fn, rewritten = variant.build(self.source, decided, self.options, inputs=inputs)
        except _compat.dynamo_control_flow():
            raise
        except Exception as error:
            return self._plainer(decided, inputs, error)
        built = Built(decided, fn, rewritten.records, rewritten.states, rewritten.fused)
        if inputs is None:
            # Swapped out for good: live autograd nodes keep what they still need of it.
            for old in [d for d in self._held if d.mods == decided.mods]:
                del self._held[old]
        self._held[decided] = built
        return built

    def _plainer(self, decided: Decided, inputs: list[Any] | None, error: Exception) -> Built:
        self.say_once(f"variant ({decided.label()}) refused: {type(error).__name__}: {error}")
        log.debug("variant refused", exc_info=error)
        if inputs is None:
            for old, held in self._held.items():
                if old.mods == decided.mods:
                    return held
        if decided.observed:
            return self.get(Decided(decided.mods, decided.kernels), inputs)
        if decided.kernels:
            return self.get(Decided(decided.mods), inputs)
        raise error
