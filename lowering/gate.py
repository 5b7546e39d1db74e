"""Accuracy gates: may this kernel run at this site."""

from __future__ import annotations

from typing import Protocol

MAX_BAD_ROWS = 0.01


class Measured(Protocol):
    """What a gate reads; `probe.quantify.Errors` has it."""

    mere: float
    mere_clamped_upper: float
    bad_rows_upper: float
    non_finite: int
    samples: int
    missing: str


def why_refused(errors: Measured, gate: str, max_mere: float) -> str | None:
    """None when `errors` pass, else the reason, with the number that failed.

    robust: upper bounds of the clamped MERE and of the share of bad rows. paper: the plain MERE,
    literally; healthy e4m3 products with outputs centred on zero fail it by its own definition.
    """
    if not errors.samples:
        return errors.missing or "no finite row of this site was seen while probing"
    if errors.non_finite:
        return f"{errors.non_finite} non-finite results"
    if gate == "paper":
        if errors.mere < max_mere:
            return None
        return f"MERE {errors.mere:.3g} >= {max_mere:g}"
    if not errors.mere_clamped_upper < max_mere:
        return f"clamped MERE {errors.mere_clamped_upper:.3g} >= {max_mere:g}"
    if not errors.bad_rows_upper < MAX_BAD_ROWS:
        return f"{100 * errors.bad_rows_upper:.2g} % of rows off by more than 10 %"
    return None
