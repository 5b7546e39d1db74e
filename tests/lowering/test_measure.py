"""Timing of kernels: nothing on a CPU, positive and cached on a GPU."""

from __future__ import annotations

import pytest
import torch

from loka_compile import _compat
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.measure import latency_us
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION

# Small, so that compiling and not running takes the time; K and N differ.
SHAPE = GemmShape(256, 512, 1024)


@pytest.mark.parametrize("kernel", [HIGH_PRECISION, "torch:rowwise"])
def test_a_cpu_has_nothing_to_time(kernel):
    assert latency_us("fwd", kernel, SHAPE, torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gpu_times_are_positive_and_kept(direction):
    device = torch.device("cuda")
    why = _compat.why_no_fp8(device)
    kernels = [HIGH_PRECISION] + ([] if why else ["torch:rowwise", "torch:tensorwise"])
    for kernel in kernels:
        first = latency_us(direction, kernel, SHAPE, torch.bfloat16, device)
        assert first is not None and 0 < first < 10_000
        assert latency_us(direction, kernel, SHAPE, torch.bfloat16, device) == first


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_times_grow_with_the_work():
    device = torch.device("cuda")
    small = latency_us("fwd", HIGH_PRECISION, SHAPE, torch.bfloat16, device)
    large = latency_us("fwd", HIGH_PRECISION, GemmShape(32768, 4096, 4096), torch.bfloat16, device)
    assert large > 10 * small
