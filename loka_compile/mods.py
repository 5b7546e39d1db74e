"""The Mods policy: which are on for this model (`modules.apply_mods` bakes them in instead).

Mods change the model's function (`mod_set`). So the decision is made once per model, sticks to its
parameters, and is said once, at WARNING.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import Tensor

from loka_compile.errors import UnreadableParametersError
from loka_compile.ledger import LEDGER
from loka_compile.ledger import Entry
from loka_compile.ledger import parameters_of
from loka_compile.mod_set import EVERY
from loka_compile.mod_set import OFF
from loka_compile.mod_set import ON
from loka_compile.mod_set import ModSet
from loka_compile.mod_set import by_mod
from loka_compile.mod_set import check_keep
from loka_compile.mod_set import matches
from loka_compile.mod_set import missing
from loka_compile.mod_set import names_of
from loka_compile.mod_set import parse_keep
from loka_compile.mod_set import parse_mods
from loka_compile.names import layer_path
from loka_compile.names import registered_name

log = logging.getLogger("loka_compile")

#: (Mod, layer) pairs, layers by their names from the model's root.
Layers = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Judged:
    """One parameter of a graph that tells a fresh model from a trained one."""

    name: str
    parameter: Tensor
    #: "gain", "norm bias" or "linear bias".
    role: str
    #: Input features of the linear a bias belongs to.
    fan_in: int = 0


@dataclass(frozen=True)
class Decision:
    mods: ModSet
    why: str
    #: True when a later look at the values may still change it.
    provisional: bool = False
    #: True when nothing was left alone that the user should hear of.
    quiet: bool = False
    #: The first backward makes it stick to the parameters.
    sticks: bool = True
    #: What it is about: all that the Mods would change in the graph.
    layers: Layers = frozenset()

    @property
    def on(self) -> bool:
        return bool(self.mods)


def looks_fresh(judged: Sequence[Judged]) -> Decision:
    """Freshly initialised: gains 1, norm biases 0, linear biases within +-1/sqrt(K).

    A model with nothing to judge counts as not fresh: silence is no proof.
    """
    if not judged:
        return Decision(OFF, "there is no gain and no bias to judge the model by")
    for one in judged:
        readable = _readable(one)
        if one.role == "gain":
            ok = bool((readable == 1).all())
        elif one.role == "norm bias":
            ok = bool((readable == 0).all())
        else:
            # The default initialisation is uniform in this interval; rounding may touch its end.
            bound = 1.0 / math.sqrt(max(one.fan_in, 1)) * (1 + 1e-3)
            ok = bool((readable.abs() <= bound).all())
        if not ok:
            return Decision(OFF, f"{one.name} ({one.role}) is not at its initial value")
    return Decision(ON, "the model looks freshly initialised")


def _readable(one: Judged) -> Tensor:
    parameter = one.parameter.detach()
    kind = type(parameter).__name__
    if parameter.is_meta or kind in ("FakeTensor", "FunctionalTensor"):
        raise UnreadableParametersError(one.name, kind)
    if hasattr(parameter, "to_local") or kind == "DTensor":
        raise UnreadableParametersError(one.name, "sharded DTensor")
    return parameter


_version_of = operator.attrgetter("_version")


class Stamp:
    """Tells when one of the judged parameters was written or got new storage: a late checkpoint.

    Read at every call while a decision is provisional, which in a program that only evaluates is
    for ever. Writes move a version and are seen at once. New storage under an old parameter
    (`p.data = ...`) moves none: of many parameters each call looks at some addresses, spread over
    all, and at every one within `TURNS` calls.
    """

    TURNS = 8

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._counted = not any(p.is_inference() for p in parameters)
        self._versions = sum(map(_version_of, parameters)) if self._counted else 0
        self._addresses = list(map(Tensor.data_ptr, parameters))
        # Inference tensors have no version counter: their addresses are all that there is.
        self._turns = self.TURNS if self._counted and len(parameters) > 2 * self.TURNS else 1
        self._turn = 0

    def moved(self, parameters: Sequence[Tensor]) -> bool:
        """`parameters`: the same ones, as a call brings them."""
        # Versions only grow, so their sum moves when one does.
        if self._counted and sum(map(_version_of, parameters)) != self._versions:
            return True
        self._turn = (self._turn + 1) % self._turns
        some = slice(self._turn, None, self._turns)
        return list(map(Tensor.data_ptr, parameters[some])) != self._addresses[some]


def decide(
    option: str | tuple[str, ...],
    planned: tuple[str, ...] | None,
    parameters: Sequence[Tensor],
    judged: Sequence[Judged],
) -> Decision:
    """Which Mods are on for a graph with these parameters; what is kept is not asked here.

    option: `Options.mods`; names of Mods mean on, and only these. planned: what a plan says, None
    when it does not name them. "auto" itself turns all on or none.
    """
    if option != "auto":
        return Decision(ModSet.of(names_of(option)), f"options say mods={option!r}")
    if planned is not None:
        return Decision(ModSet.of(planned), "the plan says so")
    entries = [e for e in map(LEDGER.find, parameters) if e is not None]
    known = decided_before(entries)
    if len(known) == 1:
        return Decision(ModSet.of(known.pop()), "decided before for these parameters")
    if any(e.baked for e in entries):
        why = "apply_mods made this model: compiled equals eager"
        return Decision(OFF, why, quiet=True, sticks=False)
    if known:
        return Decision(OFF, "the graph mixes parameters with different Mods", sticks=False)
    return replace(looks_fresh(judged), provisional=True)


def decided_before(entries: Sequence[Entry]) -> set[tuple[str, ...]]:
    """What stuck to these parameters."""
    return {e.mods for e in entries if e.settled and e.mods is not None}


def note(entries: Iterable[Entry], mods: ModSet, layers: Layers) -> None:
    """Write down `mods` for these parameters; of what is kept, nothing but `layers` changes.

    layers: what `mods` was decided about, (Mod, layer) pairs: parameters may be in more graphs.
    """
    for entry in entries:
        entry.mods = mods.names
        entry.kept = (entry.kept - layers).union(mods.kept)


def settled(entry: Entry, mods: ModSet, layers: Layers) -> bool:
    """`mods` is what sticks to this parameter already."""
    stands = entry.mods == mods.names and entry.kept & layers == set(mods.kept)
    return entry.settled and stands


def settle(entries: Sequence[Entry], mods: ModSet, layers: Layers = frozenset()) -> None:
    """A backward ran: what was decided for these parameters sticks."""
    new = [e for e in entries if not settled(e, mods, layers)]
    note(new, mods, layers)
    for entry in new:
        entry.settled = True
    if new:
        LEDGER.touch()


def mark_modded(
    model: torch.nn.Module,
    on: bool | str | Collection[str] = True,
    *,
    keep: Mapping[str, Sequence[str]] | None = None,
) -> torch.nn.Module:
    """Say that `model` (an EMA or deep copy, say) was trained with the Mods on; returns it.

    on: False, or the names of the Mods that were on; keep: the option of that name. `model` is what
    is compiled: names of layers count from it. Raises BadOptionError, PatternMatchesNothingError.
    """
    word = ("on" if on else "off") if isinstance(on, bool) else on
    names = names_of(parse_mods(word, ("on", "off"), "on"))
    parsed = parse_keep(keep) or {}
    layers = {path for path, _ in model.named_modules()}
    parameters = parameters_of(model)
    layers |= {layer_path(registered_name(p) or path) for path, p in parameters}
    check_keep(parsed, dict.fromkeys(EVERY, sorted(layers)))
    kept = {(mod, x) for mod in names for x in layers if matches(x, parsed.get(mod, ()))}
    entries = [LEDGER.entry(p) for _, p in parameters]
    for entry in entries:
        entry.kept = set()
    settle(entries, ModSet.of(names, kept), frozenset(kept))
    LEDGER.touch()
    return model


# -- what is said ---------------------------------------------------------------------------------


def say_changes(where: str, counts: dict[str, int], decision: Decision) -> None:
    """The one loud line about what changed in the model's function."""
    if not counts:
        return
    listed = ", ".join(f"{n} x {what}" for what, n in sorted(counts.items()))
    log.warning(
        "loka: Mods are ON for %s (%s). The model's function changed: %s.%s "
        "Say options={'mods': 'off'} to keep the model as written, or name the Mods that you want, "
        "out of %s.",
        where,
        decision.why,
        listed,
        left_off(decision.mods),
        ", ".join(EVERY),
    )


def left_off(mods: ModSet) -> str:
    """Which Mods were left off, and where others left a layer as written; "" for none."""
    off = missing(mods.names)
    text = f" Left off: {', '.join(off)}." if off else ""
    for mod, layers in by_mod(mods.kept).items():
        text += f" Kept as written for {mod} (option keep): {', '.join(layers)}."
    return text


def disagreement(decision: Decision, said: ModSet, who: str) -> str | None:
    """What to say where a plan, or the run so far, had other Mods than `decision`."""
    if said == decision.mods:
        return None
    return (
        f"{who} with Mods {said.text(99)}; here they are {decision.mods.text(99)} "
        f"({decision.why}): another function of the same parameters"
    )


def say_left_alone(where: str, counts: dict[str, int], decision: Decision) -> None:
    """The one loud line about Mods that auto left off."""
    if not counts:
        return
    listed = ", ".join(f"{n} x {what}" for what, n in sorted(counts.items()))
    log.warning(
        "loka: Mods are OFF for %s: %s. Left as written: %s. If this model was trained with the "
        "Mods on, its predictions differ here: pass options={'plan': ...} with the plan saved "
        "beside the checkpoint, or call loka_compile.mark_modded(model) (deep copies and EMA "
        "copies are new parameters and need it). options={'mods': 'on'} forces the Mods, "
        "'off' silences this.",
        where,
        decision.why,
        listed,
    )
