"""Which kernels may be chosen for a site at all, and what the user's patterns say."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace

import torch

from loka_compile.errors import BadOptionError
from loka_compile.errors import PatternMatchesNothingError
from loka_compile.lowering.epilogue import is_pointwise
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import check_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.options import Options

#: (K, N) of a site's GEMM.
Features = tuple[int, int]


def matches(pattern: str, name: str, features: Features | None) -> bool:
    """Does a pattern of `exclude` or `force` mean this site: by its name, or by its shape, as
    `K=432`, `N=256` or `K=432,N=256` (see `Options`)."""
    if "=" not in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    if features is None:
        return False
    own = dict(zip(("K", "N"), map(str, features), strict=True))
    parts = (part.partition("=") for part in pattern.split(","))
    return all(fnmatch.fnmatchcase(own.get(k.strip(), ""), v.strip()) for k, _, v in parts)


def why_high(
    name: str, head: bool, refusal: str, options: Options, features: Features | None = None
) -> str | None:
    """Why a site stays in high precision whatever its numbers; None when it may be chosen for."""
    if refusal:
        return refusal
    if any(matches(p, name, features) for p in options.exclude):
        return "excluded by option"
    if head:
        return "a head stays in high precision"
    return None


def candidates(
    direction: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    dtype: torch.dtype | None = None,
) -> tuple[list[str], list[str]]:
    """(kernels that can run here, reasons why the others cannot), in order of preference.

    dtype: in which the layer computes.
    """
    if options.emulate and is_pointwise(shape.epilogue):
        # Only the real kernel differs: emulated, it computes what torch's recipes compute.
        shape = replace(shape, epilogue="")
    names: list[str] = []
    about_shape: list[str] = []
    about_device: dict[str, list[str]] = {}
    for library in LIBRARIES.values():
        if options.libraries is not None and library.name not in options.libraries:
            continue
        if not library.serves(dtype):
            continue
        if options.libraries is None and (
            library.tunes_itself or (options.emulate and library.emulated_elsewhere)
        ):
            continue
        missing = None if options.emulate else library.why_unavailable(device)
        if missing is not None:
            about_device.setdefault(missing, []).append(library.name)
        for recipe in library.recipes:
            if options.recipes is not None and recipe not in options.recipes:
                continue
            if options.recipes is None and recipe in library.on_request:
                continue
            if library.recipes[recipe].gemm(direction) is None:
                # The recipe itself keeps this direction high: no reason against the site.
                continue
            why = library.why_not(recipe, direction, shape)
            if why is None and missing is None and not options.emulate:
                why = library.why_no_recipe(recipe, device)
            if why is not None:
                about_shape.append(why)
            elif missing is None:
                names.append(f"{library.name}:{recipe}")
    if len(about_device) == 1:
        return names, [*about_device, *dict.fromkeys(about_shape)]
    # A shape that no library takes is reason enough; else which library lacks what.
    device_reasons = [f"{', '.join(libs)}: {why}" for why, libs in about_device.items()]
    return names, list(dict.fromkeys(about_shape)) or device_reasons


def forced(name: str, options: Options, features: Features | None = None) -> dict[str, str]:
    """{direction: kernel} that `force` sets for this site."""
    chosen: dict[str, str] = {}
    for pattern, value in options.force.items():
        if not matches(pattern, name, features):
            continue
        per = value if isinstance(value, Mapping) else dict.fromkeys(DIRECTIONS, value)
        for direction, kernel in per.items():
            if direction not in DIRECTIONS:
                raise BadOptionError(
                    "force", direction, "directions out of " + ", ".join(DIRECTIONS)
                )
            chosen[direction] = check_kernel_name(kernel)
    return chosen


def check_patterns(
    sites: Mapping[str, Features], options: Options, elsewhere: Mapping[str, Features] | None = None
) -> None:
    """A pattern that matches nothing is an error: the user believes that it protects something.

    sites: name -> (K, N) of this graph; elsewhere: of the model's other layers, as far as known.
    """
    every = {**(elsewhere or {}), **sites}
    for option in ("heads", "exclude", "force"):
        for pattern in getattr(options, option) or ():
            if not any(matches(pattern, name, features) for name, features in every.items()):
                shown = "=" in pattern
                names = [f"{n} (K={k},N={m})" if shown else n for n, (k, m) in every.items()]
                raise PatternMatchesNothingError(option, pattern, names)
