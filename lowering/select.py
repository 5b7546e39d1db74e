"""The choice: for one site, per direction, the fastest kernel that is accurate enough."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from loka_compile.errors import BadOptionError
from loka_compile.errors import PatternMatchesNothingError
from loka_compile.lowering import gate
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import check_kernel_name
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.plan import Choice

#: Without times, a kernel is taken over a more accurate one when its error is within this factor:
#: differences below it are sampling noise, and the order of the libraries decides.
AS_GOOD = 1.1


@dataclass(frozen=True)
class Candidate:
    kernel: str
    errors: Any
    us: float | None


def why_high(name: str, head: bool, refusal: str, options: Options) -> str | None:
    """Why a site stays in high precision whatever its numbers; None when it may be chosen for."""
    if refusal:
        return refusal
    if any(fnmatch.fnmatchcase(name, p) for p in options.exclude):
        return "excluded by option"
    if head:
        return "a head stays in high precision"
    return None


def candidates(
    direction: str, shape: GemmShape, device: torch.device, options: Options
) -> tuple[list[str], list[str]]:
    """(kernels that can run here, reasons why the others cannot), in order of preference."""
    names: list[str] = []
    about_shape: list[str] = []
    about_device: dict[str, list[str]] = {}
    for library in LIBRARIES.values():
        if options.libraries is not None and library.name not in options.libraries:
            continue
        if options.emulate and options.libraries is None and library.emulated_elsewhere:
            continue
        missing = None if options.emulate else library.why_unavailable(device)
        if missing is not None:
            about_device.setdefault(missing, []).append(library.name)
        for recipe in library.recipes:
            if options.recipes is not None and recipe not in options.recipes:
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


def forced(name: str, options: Options) -> dict[str, str]:
    """{direction: kernel} that `force` sets for this site."""
    chosen: dict[str, str] = {}
    for pattern, value in options.force.items():
        if not fnmatch.fnmatchcase(name, pattern):
            continue
        per = value if isinstance(value, Mapping) else dict.fromkeys(DIRECTIONS, value)
        for direction, kernel in per.items():
            if direction not in DIRECTIONS:
                raise BadOptionError(
                    "force", direction, "directions out of " + ", ".join(DIRECTIONS)
                )
            chosen[direction] = check_kernel_name(kernel)
    return chosen


def check_patterns(names: Iterable[str], options: Options) -> None:
    """A pattern that matches nothing is an error: the user believes that it protects something."""
    names = list(names)
    for option in ("heads", "exclude", "force"):
        for pattern in getattr(options, option) or ():
            if not any(fnmatch.fnmatchcase(n, pattern) for n in names):
                raise PatternMatchesNothingError(option, pattern, names)


def choose(
    found: Iterable[Candidate], high_us: float | None, options: Options, reasons: Iterable[str]
) -> Choice:
    """Pick from measured candidates of one direction."""
    refused: list[tuple[Candidate, str]] = []
    passed: list[tuple[Candidate, float | None]] = []
    for one in found:
        why = gate.why_refused(one.errors, options.gate, options.max_mere)
        speedup = high_us / one.us if one.us and high_us else None
        if why is None and not options.emulate and options.min_speedup > 0:
            if speedup is None:
                why = f"not timed (tune={options.tune!r}); min_speedup=0 takes it untimed"
            elif speedup < options.min_speedup:
                why = f"speedup {speedup:.2f} < {options.min_speedup:g}"
        if why is None:
            passed.append((one, speedup))
        else:
            refused.append((one, why))
    if passed:
        one, speedup = _best(passed)
        source = "emulated" if options.emulate else ("measured" if one.us else "untimed")
        return _choice(one, speedup, source)
    if refused:
        one, why = min(refused, key=lambda r: r[0].errors.mere_clamped)
        kept = _choice(one, high_us / one.us if one.us and high_us else None, "")
        return replace(
            kept,
            kernel=HIGH_PRECISION,
            library="torch",
            recipe=HIGH_PRECISION,
            reason=f"{one.kernel}: {why}",
        )
    return Choice(reason="; ".join(reasons) or "no kernel offers this")


def _best(passed: list[tuple[Candidate, float | None]]) -> tuple[Candidate, float | None]:
    if all(one.us is not None for one, _ in passed):
        return min(passed, key=lambda p: p[0].us or 0.0)
    least = min(one.errors.mere_clamped for one, _ in passed)
    return next(p for p in passed if p[0].errors.mere_clamped <= AS_GOOD * least)


def _number(value: float) -> float | None:
    """JSON has no inf and no NaN; the reason says in words what was wrong."""
    return value if math.isfinite(value) else None


def _choice(one: Candidate, speedup: float | None, source: str) -> Choice:
    library, recipe, _ = split_kernel_name(one.kernel)
    return Choice(
        kernel=one.kernel,
        library=library.name,
        recipe=recipe,
        mere=_number(one.errors.mere),
        mere_clamped=_number(one.errors.mere_clamped),
        bad_rows=_number(one.errors.bad_rows),
        us=one.us,
        speedup=speedup,
        source=source,
    )


def _forced_choice(kernel: str, direction: str, shape: GemmShape) -> Choice:
    """No measurement stands against the user's word, but a shape that cannot run does."""
    if kernel == HIGH_PRECISION:
        return Choice(source="forced", reason="forced by option")
    library, recipe, _ = split_kernel_name(kernel)
    why = library.why_not(recipe, direction, shape)
    if why is not None:
        return Choice(source="forced", reason=f"forced {kernel}: {why}")
    return Choice(
        kernel=kernel,
        library=library.name,
        recipe=recipe,
        source="forced",
        reason="forced by option",
    )


Quantify = Callable[[str, str], Any]


def choose_site(
    name: str,
    shape: GemmShape,
    device: torch.device,
    options: Options,
    quantify: Quantify,
    latency: Callable[[str, str], float | None],
) -> dict[str, Choice]:
    """Direction -> Choice for one site. `quantify` and `latency` take (direction, kernel)."""
    fixed = forced(name, options)
    result: dict[str, Choice] = {}
    for direction in DIRECTIONS:
        if direction in fixed:
            result[direction] = _forced_choice(fixed[direction], direction, shape)
            continue
        names, reasons = candidates(direction, shape, device, options)
        timed = options.tune == "auto" and not options.emulate
        high_us = latency(direction, HIGH_PRECISION) if timed and names else None
        found = [
            Candidate(k, quantify(direction, k), latency(direction, k) if timed else None)
            for k in names
        ]
        result[direction] = choose(found, high_us, options, reasons)
    return result
