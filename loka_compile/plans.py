"""`plan_of(model)`: the decisions in force for a model's parameters, as one Plan."""

from __future__ import annotations

import platform

import torch

from loka_compile import _compat
from loka_compile import demotion
from loka_compile.ledger import model_entries
from loka_compile.mod_set import by_mod
from loka_compile.plan import Plan
from loka_compile.plan import SitePlan
from loka_compile.plan import mods_in_force


def plan_of(model: torch.nn.Module) -> Plan:
    """What has been decided for `model` (or for the part of it that was compiled).

    Save it beside the checkpoint: `plan_of(model).save("model.plan.json")`. `plan.active` is False
    until a plan is in force.
    """
    sites: dict[str, SitePlan] = {}
    each: dict[str, tuple[str, ...]] = {}
    kept: set[tuple[str, str]] = set()
    emulated = False
    block = None
    heads = None
    blocks: dict[str, int] = {}
    devices = set()
    replayed = None
    for path, entry in model_entries(model):
        for call, plan in entry.sites.items():
            # A kernel may have failed since: the ledger hears of it when the graph is next called.
            sites[plan.name] = demotion.apply(plan).without_forward(entry.unfit.get(call))
        if entry.mods:
            each[entry.name or path] = entry.mods
            kept |= entry.kept
        emulated = emulated or entry.emulated
        block = entry.block if entry.block is not None else block
        heads = entry.heads if entry.heads is not None else heads
        replayed = entry.replayed_nats if entry.replayed_nats is not None else replayed
        blocks |= entry.blocks if entry.mods else {}
        parameter = entry.ref()
        if parameter is not None:
            devices.add(_compat.device_key(parameter.device))
    return Plan(
        sites=sites,
        **mods_in_force(each),
        kept=by_mod(kept),
        block=block,
        heads=heads,
        blocks=blocks,
        emulated=emulated,
        env={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": ", ".join(sorted(devices)),
        },
        replayed_nats=replayed,
    )
