"""The arms of a comparison: the same model, run in several ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka_compile.mod_set import EVERY
from loka_compile.zoo.recommender import Recommender

#: The three of `loka train`.
ARMS = ("original", "bf16_mods", "loka")
#: Uniform FP8: the recipe, and the smallest side of a linear that gets it (the paper's Figure 3).
UNIFORM_KERNEL = "torchao:tensorwise"
UNIFORM_SIDE = 128


@dataclass(eq=False)
class Arm:
    """A model ready to train. ``model`` owns the state; ``dense`` is ``model.dense``, compiled."""

    name: str
    model: Recommender
    dense: Callable[..., torch.Tensor]
    plan_active: Callable[[], bool] = lambda: False
    recording: Callable[[], AbstractContextManager[Any]] = nullcontext
    notes: list[str] = field(default_factory=list)


def build(name: str, model: Recommender, options: dict[str, Any]) -> Arm:
    """Arm ``name`` on a deep copy of ``model``; ``options`` go to the backend "loka"."""
    own = copy.deepcopy(model)
    return _BUILDERS[name](own, options)


def _original(model: Recommender, options: dict[str, Any]) -> Arm:
    return Arm("original", model, torch.compile(model.dense, backend="inductor"))


def _bf16_mods(model: Recommender, options: dict[str, Any]) -> Arm:
    import loka_compile

    how = {name: options[name] for name in ("mods", "keep", "block") if options.get(name)}
    changes = loka_compile.apply_mods(model.dense, **how)
    compiled = torch.compile(model.dense, backend="inductor")
    return Arm("bf16_mods", model, compiled, notes=changes.summary().splitlines())


def _one_mod(mod: str) -> Callable[[Recommender, dict[str, Any]], Arm]:
    """BF16 with one Mod alone."""

    def make(model: Recommender, options: dict[str, Any]) -> Arm:
        import loka_compile

        loka_compile.apply_mods(model.dense, mods=(mod,), block=options.get("block"))
        return Arm(f"bf16_{mod}", model, torch.compile(model.dense, backend="inductor"))

    return make


def _control(model: Recommender, options: dict[str, Any]) -> Arm:
    """A/A: ``bf16_mods`` from weights that differ in the seventh digit.

    What such a change does to the loss is the noise floor of every comparison between roundings.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.dense.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.device)
            p.mul_(1.0 + 1e-6 * noise)
    arm = _bf16_mods(model, options)
    arm.name = "control"
    return arm


def _mods_where_no_linear_feeds(
    name: str, width: Callable[[int], int]
) -> Callable[[Recommender, dict[str, Any]], Arm]:
    """``bf16_mods`` with blocks of ``width(features)`` in the norms that no linear feeds.

    The others, whose blocks a GEMM's epilogue needs, keep the default block in each of these arms.
    """

    def make(model: Recommender, options: dict[str, Any]) -> Arm:
        import loka_compile
        from loka_compile.module_order import norms_behind_no_linear

        alone = norms_behind_no_linear(model.dense)
        arm = _bf16_mods(model, {})
        for path, module in model.dense.named_modules():
            if isinstance(module, loka_compile.BlockNorm):
                rule = width if path in alone else _default_block
                module.block = rule(module.features)
        arm.name = name
        return arm

    return make


def _default_block(features: int) -> int:
    from loka_compile.kernels.block_norm import block_of

    return block_of(features)


def even_block(features: int) -> int:
    """Blocks of equal width, at most 256, as few as possible; the whole row where none is."""
    for count in range(-(-features // 256), features // 64 + 1):
        if features % count == 0:
            return features // count
    return features


def _loka(model: Recommender, options: dict[str, Any]) -> Arm:
    return _with_backend("loka", model, options)


def _with_backend(name: str, model: Recommender, options: dict[str, Any]) -> Arm:
    import loka_compile

    dense = model.dense
    return Arm(
        name,
        model,
        torch.compile(dense, backend="loka", options=options),
        plan_active=lambda: bool(loka_compile.plan_of(dense).active),
        recording=loka_compile.explain,
    )


def wide_linears(model: nn.Module, side: int = UNIFORM_SIDE) -> list[str]:
    """Names of the linears whose two sides are both at least ``side`` features."""
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and min(m.in_features, m.out_features) >= side
    ]


def _uniform(*parts: str) -> Callable[[Recommender, dict[str, Any]], Arm]:
    """FP8 by one recipe on every wide linear, no gate; some of the Mods baked in."""
    name = "_".join(("fp8", *parts)) if len(parts) < len(EVERY) else "fp8_all_mods"

    def make(model: Recommender, options: dict[str, Any]) -> Arm:
        import loka_compile

        loka_compile.apply_mods(model.dense, mods=parts, block=options.get("block"))
        own = {k: v for k, v in options.items() if k in ("emulate", "inner", "inductor")}
        # Later patterns win: the rest, weights that are no linear's included, stays high.
        force = {"*": "high_precision", **dict.fromkeys(wide_linears(model.dense), UNIFORM_KERNEL)}
        own |= {"mods": "off", "force": force, "tune": "never"}
        return _with_backend(name, model, own)

    return make


_BUILDERS: dict[str, Callable[[Recommender, dict[str, Any]], Arm]] = {
    "original": _original,
    "bf16_mods": _bf16_mods,
    "control": _control,
    **{f"bf16_{mod}": _one_mod(mod) for mod in EVERY},
    "mods_blocks": _mods_where_no_linear_feeds("mods_blocks", _default_block),
    "mods_even": _mods_where_no_linear_feeds("mods_even", even_block),
    "mods_rows": _mods_where_no_linear_feeds("mods_rows", lambda features: features),
    "loka": _loka,
    "fp8": _uniform(),
    "fp8_no_bias": _uniform("no_bias"),
    "fp8_block_norm": _uniform("block_norm"),
    "fp8_hard_swish": _uniform("hard_swish"),
    "fp8_all_mods": _uniform(*EVERY),
}
EVERY_ARM = tuple(_BUILDERS)


def loka_options(emulate: bool, plan: Path | None) -> dict[str, Any]:
    """Options of the loka arm. Mods are forced on: the arm is compared against ``bf16_mods``."""
    options: dict[str, Any] = {"mods": "on", "emulate": emulate}
    if plan is not None:
        options["plan"] = str(plan)
    return options


def has_fp8(device: torch.device) -> bool:
    """Whether ``device`` multiplies FP8 in hardware: sm89 and later, or MI300 and later."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (8, 9)
