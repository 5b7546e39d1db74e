"""Every kernel of ours that the interpreter runs is also code that compiles, for Hopper, anywhere.

One process for all, since each needs Triton without its interpreter; about 1.5 s a kernel, and
nothing where Triton's cache has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "helpers" / "compile_sm90.py"
#: Bytes a thread that may spill: a few scalars, never a part of the accumulator.
MOST = 64
#: Values of a tile (of a step of it, where it is worked off in a loop) and threads that share them,
#: where it is stored as it lies and transposed.
CAST_TWICE = {
    "fused_train": (128 * 256, 256),
    "quantize_tensor": (128 * 128, 256),
    "quantize_row": (128 * 128, 256),
    "weights_cast": (128 * 128, 256),
    "weights_cast_all": (128 * 128, 256),
    "backward_quantize": (4 * 4 * 256, 128),
    "backward_quantize_rows": (4 * 4 * 256, 128),
}


@pytest.mark.slow
def test_kernels_compile_for_hopper_and_stay_in_registers() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["case"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 28
    for one in found.values():
        assert one["stack"] is None or one["stack"] <= MOST, one
    # Both orientations of a tile are cast apart (`fp8.apart`, `words`): two values a cast, twice.
    for case, (values, threads) in CAST_TWICE.items():
        assert found[case]["casts"] == 2 * values / 2 / threads, found[case]
    # Triton pipelines a loop or leaves it, and does not say which.
    for case in ("backward_blocks", "backward_blocks_gain"):
        assert found[case]["ahead"] > 0, found[case]
