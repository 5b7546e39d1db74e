"""The compiled variants of one graph, and a plainer one where one fails."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any

from torch import Tensor

from loka_compile import _compat
from loka_compile import variant
from loka_compile.capture import Source
from loka_compile.mod_set import ModSet
from loka_compile.options import Options
from loka_compile.passes.neighbours import Chain
from loka_compile.passes.observe import StateKey
from loka_compile.passes.records import PassRecord
from loka_compile.passes.store_weights import WeightKey
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
    #: Quantised weights that it takes there, two inputs each.
    weights: list[WeightKey]
    #: Sites whose maxima it records, in one input there.
    cells: list[str]
    fused: dict[str, str]
    #: What the price of a site hangs on besides its GEMM.
    chains: dict[str, Chain] = field(default_factory=dict)
    #: Site name -> why its forward stays in high precision, whatever was decided.
    unfit: dict[str, str] = field(default_factory=dict)
    #: Cells on GPUs that its observers were given, for as long as it can be replayed: a CUDA graph
    #: of it writes to the state that it found, and is told from one of other state by these.
    cells_given: list[Tensor] = field(default_factory=list)


class Variants:
    """The newest variant per Mods setting is kept; older ones live while something runs them."""

    def __init__(self, source: Source, options: Options, say_once: Callable[[str], None]) -> None:
        self.source = source
        self.options = options
        self.say_once = say_once
        self._alive: weakref.WeakValueDictionary[Decided, Built] = weakref.WeakValueDictionary()
        self._newest: dict[ModSet, Built] = {}
        #: Not tried again: a late compile costs seconds.
        self._refused: dict[Decided, str] = {}

    def get(self, decided: Decided, inputs: list[Any] | None) -> Built:
        """The variant for `decided`, or a plainer one where that fails.

        `inputs` are the example inputs in Dynamo's own compile, None in a later one.
        """
        failure: Exception | None = None
        for one in plainer(decided):
            held = self._alive.get(one)
            if held is not None:
                return held
            if one in self._refused:
                continue
            try:
                fn, rewritten = variant.build(self.source, one, self.options, inputs=inputs)
            except _compat.dynamo_control_flow():
                raise
            except Exception as error:
                failure = error
                self._refused[one] = f"{type(error).__name__}: {error}"
                self.say_once(f"variant ({one.label()}) refused: {self._refused[one]}")
                log.debug("variant refused", exc_info=error)
                continue
            return self._keep(_built(one, fn, rewritten))
        if inputs is not None:
            assert failure is not None
            raise failure
        newest = self._newest.get(decided.mods)
        return newest if newest is not None else self._keep(self._eager(decided))

    def get_exactly(self, decided: Decided) -> Built | None:
        """A later variant for `decided` and nothing plainer, or None where it cannot be had.

        It is not what others fall back to: it costs more than the plain one.
        """
        held = self._alive.get(decided)
        if held is not None or decided in self._refused:
            return held
        try:
            fn, rewritten = variant.build(self.source, decided, self.options)
        except _compat.dynamo_control_flow():
            raise
        except Exception as error:
            self._refused[decided] = f"{type(error).__name__}: {error}"
            self.say_once(
                f"no probes after the plan: variant ({decided.label()}) refused: "
                f"{self._refused[decided]}"
            )
            log.debug("variant refused", exc_info=error)
            return None
        built = _built(decided, fn, rewritten)
        self._alive[decided] = built
        return built

    def why_refused(self, decided: Decided) -> str:
        """The error of the first variant with its kernels that did not compile."""
        found = [self._refused[d] for d in plainer(decided) if d.kernels and d in self._refused]
        return found[0] if found else "it was not tried"

    def _keep(self, built: Built) -> Built:
        self._alive[built.decided] = self._newest[built.decided.mods] = built
        return built

    def in_eager(self, decided: Decided) -> Callable[..., Any]:
        """The rewritten graph to be run node by node: for one call, where none can be compiled."""
        return variant.rewrite(self.source, decided, self.options).gm

    def _eager(self, decided: Decided) -> Built:
        """Nothing compiles any more: the rewritten graph runs node by node, in high precision."""
        high = Decided(decided.mods)
        rewritten = variant.rewrite(self.source, high, self.options)
        return replace(_built(high, rewritten.gm, rewritten), states=[])


def _built(decided: Decided, fn: Callable[..., Any], rewritten: variant.Rewritten) -> Built:
    return Built(
        decided,
        fn,
        rewritten.records,
        rewritten.states,
        rewritten.weights,
        rewritten.cells,
        rewritten.fused,
        rewritten.chains,
        rewritten.unfit,
    )


def plainer(decided: Decided) -> list[Decided]:
    """`decided`, then without observers, then in high precision too."""
    steps = [decided, Decided(decided.mods, decided.kernels), Decided(decided.mods)]
    return list(dict.fromkeys(steps))
