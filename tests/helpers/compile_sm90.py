"""Compile our Triton kernels for Hopper without a GPU: not all that is interpreted compiles.

    python tests/helpers/compile_sm90.py CASE

Run by tests/kernels/test_compiles.py in a process without TRITON_INTERPRET. Prints one JSON line:
`stack`, the bytes of registers that spilled, where Triton brings a cuobjdump, else null; `casts`,
the casts to FP8 in the code; `ahead`, the reads that run ahead in shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loka_compile.kernels import tiles
from loka_compile.kernels.quantize import FP8_MAX
from loka_compile.kernels.quantize import exponent_split

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def compiled(
    fn: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    capability: int = 90,
):
    """`types`: the run-time arguments; integers and pointers count as multiples of 16."""
    names = fn.arg_names
    signature = {n: types.get(n, "constexpr") for n in names}
    known = {(i,): constants[n] for i, n in enumerate(names) if n not in types}
    sixteen = [[("tt.divisibility"), 16]]
    aligned = {(names.index(n),): sixteen for n, t in types.items() if t[0] == "*" or t == "i32"}
    source = ASTSource(fn=fn, signature=signature, constexprs=known, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def fused(form: str, block: int, **switches: Any):
    """The tile that the rule gives a large batch in this form."""
    from loka_compile.kernels.fused_kernel import fused_kernel

    config = tiles.default_config(8192, 2048, 2048, block, form=form)
    fp8 = form.startswith("y8")
    types = {n: "*bf16" for n in fused_kernel.arg_names if n.endswith("_ptr")}
    types |= {n: "*fp32" for n in types if "scale" in n or n in ("r_ptr", "partial_ptr")}
    types |= {n: "*fp8e4nv" for n in ("y_ptr", "yt_ptr") if fp8}
    types["counter_ptr"] = "*i32"
    types["a_desc"] = f"tensordesc<fp8e4nv[{config.block_m},{config.block_k}]>"
    types["w_desc"] = f"tensordesc<fp8e4nv[{block},{config.block_k}]>"
    types |= dict.fromkeys(("M", "M_UP", "full", "N", "K", "block", "blocks"), "i32")
    types |= dict.fromkeys(("a_outer", "a_inner", "w_outer", "w_inner"), "i32")
    types["eps"] = "fp32"
    constants = {
        "BM": config.block_m, "BN": block, "BK": config.block_k, "SPLIT_K": 1, "TAIL": False,
        "DEVICE": True, "PDL": True, "FLATTEN": False, "IMPRECISE": True, "WHOLE": True,
        "A_ROWS": 1, "W_ROWS": 1, "BIAS": False, "MUL": 0, "ADD": False, "NORM": True,
        "GAIN": True, "ACT": 1, "GATE": False, "SAVE": 0, "FP8": fp8, "TRANSPOSE": False,
        **switches,
    }  # fmt: skip
    return compiled(fused_kernel, types, constants, config.warps, config.stages)


def formats(dtype: torch.dtype, tail: str = "") -> dict[str, Any]:
    exponent, mantissa = exponent_split(dtype)
    return {
        "MAX" + tail: FP8_MAX[dtype],
        "EXPONENT" + tail: exponent,
        "MANTISSA" + tail: mantissa,
    }


def both(kind: int, turned: bool, x: str = "*bf16", dtype_t: torch.dtype = E5M2):
    from loka_compile.kernels.quantize_kernels import quantize_kernel
    from loka_compile.kernels.quantize_words import quantize_words_kernel

    words = kind in (1, 4, 5)
    fn = quantize_words_kernel if words else quantize_kernel
    types = {n: "i32" for n in fn.arg_names if n in ("R", "C", "QR", "QC", "TR", "TC", "stride_r")}
    types |= dict.fromkeys(("outer", "room", "outer_t", "room_t", "parts"), "i32")
    if not words:
        types["zero"] = "i32"
    types |= {"x_ptr": x, "amax_ptr": "*i32", "scale_ptr": "*fp32", "scale_t_ptr": "*fp32"}
    types |= {"q_ptr": "*fp8e4nv", "qt_ptr": "*fp8e5" if dtype_t is E5M2 else "*fp8e4nv"}
    constants = {
        "stride_c": 1, "BR": 128, "BC": 128, "ROUND": 0, "EXACT": False, "PARTS": 512,
        "KIND": kind, "TURNED": turned, "KIND_T": kind, "TURNED_T": turned,
        **({} if words else {"COLUMNS": kind == 2}),
        **formats(E4M3), **formats(dtype_t, "_T"),
    }  # fmt: skip
    return compiled(fn, types, constants, 8, 3)


def amax():
    from loka_compile.kernels.quantize_kernels import amax_kernel as fn

    types = {"x_ptr": "*fp32", "amax_ptr": "*i32", "R": "i32", "C": "i32", "stride_r": "i32"}
    constants = {
        "stride_c": 1, "BR": 128, "BC": 128, "ROUND": 1, "EXACT": False, "WHOLE": True,
        "ROWS": True, "COLUMNS": True,
    }  # fmt: skip
    return compiled(fn, types, constants, 8, 3)


def rows():
    from loka_compile.kernels.quantize_rows import _rows_kernel as fn

    types = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("R", "C", "QC", "stride_r"), "i32")
    constants = {"stride_c": 1, "BR": 1, "BC": 8192, "PDL": True, "EXACT": False, **formats(E4M3)}
    return compiled(fn, types, constants, 8, 3)


def backward(second: bool, gain: bool = True, whole: bool = True, capability: int = 90):
    from loka_compile.kernels.backward_kernels import backward_amax_kernel
    from loka_compile.kernels.backward_kernels import backward_quantize_kernel

    fn = backward_quantize_kernel if second else backward_amax_kernel
    types = dict.fromkeys(("gy_ptr", "u_ptr", "gain_ptr"), "*bf16")
    types |= dict.fromkeys(("r_ptr", "scale_ptr", "scale_t_ptr", "partial_ptr"), "*fp32")
    types |= {"row_ptr": "*i32", "column_ptr": "*i32", "q_ptr": "*fp8e5", "qt_ptr": "*i64"}
    types["cells_ptr"] = "*i32"
    types |= dict.fromkeys(("M", "M_UP", "N", "block", "blocks", "lanes", "parts"), "i32")
    types = {name: kind for name, kind in types.items() if name in fn.arg_names}
    constants = {
        "BM": 16, "LINES": 4, "BN": 256, "WHOLE": whole, "ACT": 1, "GATE": False, "GAIN": gain,
        "ROWS": not whole, "ROWS_T": not whole, "PDL": True, "EXACT": False, "LIKE_T": tl.float8e5,
        "PARTS": 1024, "RECORD": whole, **formats(E5M2), **formats(E5M2, "_T"),
    }  # fmt: skip
    constants |= {"PDL": capability >= 90, "EXACT": capability < 90}
    constants = {name: constants[name] for name in constants if name in fn.arg_names}
    return compiled(fn, types, constants, 4 if second else 8, 3, capability)


def backward_blocks(gain: bool = False, whole: bool = True, capability: int = 90):
    from loka_compile.kernels.backward_blocks_kernel import blocks_kernel as fn

    types = dict.fromkeys(("gy_ptr", "u_ptr", "gain_ptr"), "*bf16")
    types |= dict.fromkeys(("r_ptr", "scale_ptr", "scale_t_ptr", "partial_ptr"), "*fp32")
    types |= {"q_ptr": "*fp8e4nv", "qt_ptr": "*i64"}
    types |= dict.fromkeys(("M", "M_UP", "N", "block", "blocks"), "i32")
    types |= dict.fromkeys(("outer", "room", "outer_t", "room_t"), "i32")
    constants = {
        "BN": 256, "WHOLE": whole, "ACT": 1, "GATE": False, "GAIN": gain, "PDL": True,
        "EXACT": False, "STAGES": 3, "TURNED": True, "LIKE_T": tl.float8e4nv, "TURNED_T": True,
        **formats(E4M3), **formats(E4M3, "_T"),
    }  # fmt: skip
    constants |= {"PDL": capability >= 90, "EXACT": capability < 90}
    return compiled(fn, types, constants, 8 if gain else 4, 3, capability)


def weight_parts():
    from loka_compile.kernels.weight_sizes import _parts_kernel as fn

    types = {"places": "*i64", "part": "*fp64", "W": "i32"}
    constants = {"LIKE": tl.bfloat16, "ALIGNED": True, "PARTS": 256, "BLOCK": 2048}
    return compiled(fn, types, constants, 8, 3)


def weight_record():
    from loka_compile.kernels.weight_sizes import _record_kernel as fn

    types = {"places": "*i64", "part": "*fp64", "state": "*fp64", "W": "i32"}
    return compiled(fn, types, {"WIDTH": 8, "EW": 0.1, "PARTS": 256}, 1, 3)


def weights(second: bool, x: str = "bf16", lines: bool = False, blocks: bool = False):
    from loka_compile.kernels import weights_kernels as k

    fn = k.cast_kernel if second else k.maxima_kernel
    types = {"table": "*i64", "amax_ptr": "*i32", "programs_at": "i32"}
    types |= {"q_ptr": "*fp8e4nv", "qt_ptr": "*fp8e4nv", "scale_ptr": "*fp32"} if second else {}
    constants = {
        "LIKE": tl.bfloat16 if x == "bf16" else tl.float32, "EVEN": 8 if x == "bf16" else 4,
        "ROUND": int(x == "fp32"), "EXACT": False, "WHOLE": True, "LINES": lines,
        "BLOCKS": blocks, "SHARES_UP": 256, "SIZE": 128, "BR": 64, "BC": 128, **formats(E4M3),
        **formats(E4M3, "_T"),
    }  # fmt: skip
    constants = {name: constants[name] for name in constants if name in fn.arg_names}
    return compiled(fn, types, constants, 8, 3)


def observed_columns():
    from loka_compile.kernels.observe import _columns_kernel as fn

    types = {
        "x": "*bf16",
        "good": "*i8",
        "sums": "*fp64",
        "M": "i32",
        "C": "i32",
        "stride_m": "i32",
    }
    types["steps"] = "i32"
    return compiled(fn, types, {"stride_c": 1, "ROWS": 4, "BM": 32, "BC": 128}, 4, 3)


def observed_rows():
    from loka_compile.kernels.observe import _rows_kernel as fn

    types = {"x": "*bf16", "wanted": "*i8", "good": "*i8", "part": "*fp64", "M": "i32", "C": "i32"}
    types |= {"stride_m": "i32", "steps": "i32"}
    return compiled(fn, types, {"stride_c": 1, "MASKED": False, "BM": 8, "BC": 512}, 4, 3)


def chain_value():
    from loka_compile.kernels.chain_values import _activated_kernel as fn

    types = dict.fromkeys(("u", "gain", "y"), "*bf16") | {"M": "i32", "N": "i32"}
    return compiled(fn, types, {"ACT": 1, "GAIN": True, "BM": 8, "BN": 1024}, 8, 3)


def chain_gradient(capability: int = 90):
    from loka_compile.kernels.chain_values import _gradient_kernel as fn

    types = dict.fromkeys(("gy", "u", "gain", "gz"), "*bf16") | {"r": "*fp32"}
    types |= dict.fromkeys(("M", "N", "block", "blocks"), "i32")
    constants = {"ACT": 1, "GATE": False, "GAIN": True, "BM": 16, "BN": 256}
    constants["EXACT"] = capability < 90
    return compiled(fn, types, constants, 8, 3, capability)


def sketch_sizes():
    from loka_compile.kernels.sketch_kernels import _sizes_kernel as fn

    types = {"x": "*bf16", "gw": "*bf16", "tops": "*i32"}
    types |= dict.fromkeys(("lengths", "signal", "energy"), "*fp64")
    types |= dict.fromkeys(("M", "N", "K", "some", "x_m", "gw_n", "some_m", "of_x", "of_gw"), "i32")
    return compiled(fn, types, {"x_k": 1, "gw_k": 1, "BM": 8, "BK": 512, "SIDE": 32}, 4, 3)


CASES = {
    "sketch_sizes": sketch_sizes,
    "chain_value": chain_value,
    "chain_gradient": chain_gradient,
    "weight_parts": weight_parts,
    "weight_record": weight_record,
    "weights_maxima": lambda: weights(second=False, lines=True),
    "weights_cast": lambda: weights(second=True, x="fp32"),
    "weights_cast_all": lambda: weights(second=True, lines=True, blocks=True),
    "observed_columns": observed_columns,
    "observed_rows": observed_rows,
    "fused": lambda: fused("y", 256),
    "fused_train": lambda: fused("y8+u+t", 256, SAVE=1, TRANSPOSE=True),
    "fused_gate": lambda: fused("y+u+m", 256, SAVE=1, ACT=2, GATE=True),
    "fused_groups": lambda: fused("y+g", 256, A_ROWS=2, W_ROWS=2),
    "pointwise": lambda: fused("y+u+p", 128, NORM=False, BIAS=True, ACT=6, SAVE=2),
    "pointwise_cross": lambda: fused(
        "y+u+m+p", 128, NORM=False, BIAS=True, MUL=1, ADD=True, ACT=0, SAVE=2
    ),
    "quantize_tensor": lambda: both(1, False, "*fp32", E4M3),
    "quantize_row": lambda: both(2, False),
    "quantize_1x128": lambda: both(3, True),
    "quantize_128x128": lambda: both(4, False),
    "quantize_static": lambda: both(5, False),
    "amax": amax,
    "quantize_rows": rows,
    "backward_amax": lambda: backward(second=False),
    "backward_quantize": lambda: backward(second=True),
    "backward_quantize_rows": lambda: backward(second=True, whole=False),
    "backward_blocks": backward_blocks,
    "backward_blocks_gain": lambda: backward_blocks(gain=True, whole=False),
    # Before Hopper, without packed bf16.
    "ada_backward_amax": lambda: backward(second=False, capability=89),
    "ada_backward_quantize": lambda: backward(second=True, capability=89),
    "ada_backward_blocks": lambda: backward_blocks(gain=True, whole=False, capability=89),
    "ada_chain_gradient": lambda: chain_gradient(capability=89),
}


def spilled(cubin: bytes) -> int | None:
    """Bytes of stack a thread; None without a cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.findall(r"STACK:(\d+)", done.stdout)
    return max(map(int, found)) if found else None


def casts(ptx: str) -> int:
    """FP8 casts in the code, of two values each."""
    return len(re.findall(r"cvt\.[a-z.]*e[45]m[23]x2", ptx))


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        asm = CASES[name]().asm
        found = {"case": name, "stack": spilled(asm["cubin"]), "casts": casts(asm["ptx"])}
        found["ahead"] = asm["ptx"].count("cp.async.cg.shared")
        print(json.dumps(found), flush=True)
