"""Which torch runs, and which releases of other packages load beside it."""

from __future__ import annotations

import re

import torch

TORCH = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])


def _release(version: str) -> tuple[int, ...]:
    """'0.1.5.post1' -> (0, 1, 5, 1): enough to order the releases of one package."""
    numbers = re.match(r"(\d+)\.(\d+)\.?(\d*)(?:\.post(\d+))?", version)
    return tuple(int(n or 0) for n in numbers.groups()) if numbers else ()


#: Package -> [(first release, last release, torch versions that its binaries load into)]. None of
#: these packages declares the torch it was built for. Releases not listed are simply tried.
_PAIRS: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], set[tuple[int, int]]]]] = {
    "fbgemm-gpu-genai": [
        ((0,), (1, 5, 99), {(2, 10)}),
        ((1, 6), (1, 6, 99), {(2, 11)}),
        ((1, 7), (1, 7, 99), {(2, 12)}),
        ((1, 8), (1, 8, 99), {(2, 13)}),
        ((1, 9), (1, 9, 99), {(2, 14)}),
    ],
    "sgl-deep-gemm": [
        ((0, 0, 1), (0, 1, 5, 1), {(2, 11), (2, 12)}),
        ((0, 1, 5, 2), (0, 2, 0, 99), {(2, 13)}),
        ((0, 2, 1, 1), (0, 2, 5, 99), {(2, 14)}),
    ],
}


def why_wrong_pairing(distribution: str, version: str) -> str | None:
    """Why the installed `version` cannot be loaded beside this torch, where that is known."""
    release = _release(version)
    for first, last, torches in _PAIRS.get(distribution, []):
        if release and first <= release <= last and TORCH not in torches:
            wanted = " or ".join(".".join(map(str, t)) for t in sorted(torches))
            return f"{distribution} {version} is built for torch {wanted}, not {torch.__version__}"
    return None
