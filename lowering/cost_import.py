"""`gemm_h200.json` and `backward_h200.json` of `benchmarks/results` -> cost rows.

Rows of the first: `library, recipe, direction, M, K, N, total_us` (quantise and layout included),
optionally `gemm_us` (without), `dtype`, `available`. Of the second: `M, N, block, fused_us,
fused_rows_us`, the gradient of a chain by our kernel. Versions and device come from `env`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka_compile.errors import CostTableError
from loka_compile.lowering.cost_table import OWN
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.cost_table import bucket
from loka_compile.lowering.cost_table import version_of
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.parts import GEMM
from loka_compile.lowering.parts import GRADIENT
from loka_compile.lowering.recipes import HIGH_PRECISION

#: High precision goes by the name of its arithmetic there.
_HIGH = {
    HIGH_PRECISION: None,
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "tf32": "tf32",
    "fp32": "float32",
}


def rows_of_benchmark(
    path: str | os.PathLike[str], *, kernels_alone: bool = False
) -> list[CostRow]:
    """Rows that were measured; those marked unavailable, or without a time, are left out.

    kernels_alone: of the kernels on operands that are quantised and laid out (`parts.GEMM`), by
    `gemm_us`; else of whole directions, by `total_us`.

    Raises CostTableError for a file of another form.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        env = data["env"]
        column = "gemm_us" if kernels_alone else "total_us"
        epilogue = {"epilogue": GEMM} if kernels_alone else {}
        measured = [r for r in data["rows"] if r.get("available", True) and r.get(column)]
        rows = [
            CostRow(_key({**one, **epilogue}, env), float(one[column]), str(env["date"]), "shipped")
            for one in measured
        ]
    except FileNotFoundError:
        raise CostTableError(path, "no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CostTableError(
            path, f"no benchmark of GEMMs ({type(error).__name__}: {error})"
        ) from error
    # Two sizes of one bucket: the one nearest to the bucket's own M stands for it.
    nearest: dict[CostKey, tuple[int, CostRow]] = {}
    for one, row in zip(measured, rows, strict=True):
        off = row.key.m - int(one["M"])
        if row.key not in nearest or off < nearest[row.key][0]:
            nearest[row.key] = (off, row)
    return [row for _, row in nearest.values()]


#: Column of `backward_h200.json` -> how both readers of dL/dz take it, as `parts.spell_pair` says.
_BACKWARD = {
    "fused_us": "tensor.e5m2-tensor.e5m2",
    "fused_rows_us": "row.e4m3-row.e4m3",
}


def rows_of_backward(path: str | os.PathLike[str]) -> list[CostRow]:
    """Gradients of BlockNorm + Hard Swish by our kernel, of bf16, quantised for both readers.

    Raises CostTableError for a file of another form.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        env = data["env"]
        return [
            CostRow(
                CostKey(
                    device=str(env["device"]),
                    direction=GRADIENT,
                    m=bucket(int(one["M"])),
                    k=0,
                    n=int(one["N"]),
                    dtype="bfloat16",
                    library=OWN,
                    recipe=recipe,
                    version=str(env["own"]),
                    torch=str(env["torch"]),
                    epilogue=f"block_norm:{int(one['block'])}:hard_swish",
                ),
                float(one[column]),
                str(env["date"]),
                "shipped",
            )
            for one in data["rows"]
            for column, recipe in _BACKWARD.items()
        ]
    except FileNotFoundError:
        raise CostTableError(path, "no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CostTableError(
            path, f"no benchmark of the backward ({type(error).__name__}: {error})"
        ) from error


def stamped(rows: Iterable[CostRow]) -> list[CostRow]:
    """Rows of our own kernels as if they had been measured with the kernels that are here.

    For a change to the sources that cannot have changed a kernel's speed; `loka bench --stamp`.
    """
    found = []
    for row in rows:
        if row.key.library == OWN:
            here = version_of(OWN, row.key.direction)
            row = replace(row, key=replace(row.key, version=here))
        found.append(row)
    return found


def _key(one: Mapping[str, Any], env: Mapping[str, Any]) -> CostKey:
    library, recipe = str(one["library"]), str(one["recipe"])
    dtype = str(one.get("dtype") or env.get("dtype") or "bfloat16").removeprefix("torch.")
    if recipe in _HIGH:
        library, recipe, dtype = "torch", HIGH_PRECISION, _HIGH[recipe] or dtype
    return CostKey(
        device=str(env["device"]),
        direction=str(one["direction"]),
        m=bucket(int(one["M"])),
        k=int(one["K"]),
        n=int(one["N"]),
        dtype=dtype,
        library=library,
        recipe=recipe,
        version=_version(library, env),
        torch=str(env["torch"]),
        epilogue=str(one.get("epilogue") or ""),
        handed=bool(one.get("handed", False)),
    )


def _version(library: str, env: Mapping[str, Any]) -> str:
    """By the library's own name or its distribution's, either spelling, beside `env` or in it."""
    held = {**env, **(env.get("versions") or {}), **(env.get("libraries") or {})}
    names = [library, library.replace("_", "-")]
    if library in LIBRARIES:
        distribution = LIBRARIES[library].distribution
        names += [distribution, distribution.replace("-", "_")]
    return next((str(held[name]) for name in names if held.get(name)), "")
