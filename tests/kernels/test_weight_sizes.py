"""The Triton record of weights against its definition; interpreted where no GPU is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka_compile.kernels import weight_sizes as ws
from loka_compile.probe import weights as wt
from loka_compile.probe.statistics import EW

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def by_definition(steps: list[list[Tensor]]) -> Tensor:
    record = wt.Record(steps[0])
    for weights in steps:
        wt.observe_ref(weights, record.state, record.sizes)
    return record.state


def by_kernels(steps: list[list[Tensor]]) -> Tensor:
    state = wt.Record(steps[0]).state
    for weights in steps:
        assert ws.why_not(weights) is None
        ws.record(ws.Places.of(weights), state, EW)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition(dtype) -> None:
    # More and fewer values than the programs of one weight take at once; one value; stored (K, N).
    shapes = [(300, 250), (7, 3), (1, 1), (40, 64)]
    steps = []
    for number in range(4):
        weights = [torch.randn(*s, device=DEVICE) * 2.0**-number for s in shapes]
        weights[0][::3] = 0
        weights[-1] = torch.randn(64, 40, device=DEVICE).t()
        steps.append([w.to(dtype) for w in weights])
    torch.testing.assert_close(by_kernels(steps), by_definition(steps), rtol=1e-5, atol=0)


def test_what_is_not_finite_is_counted_and_keeps_the_sizes() -> None:
    good = [torch.randn(33, 20, device=DEVICE), torch.randn(5, 5, device=DEVICE)]
    steps = [good]
    for wrong in (math.nan, math.inf, -math.inf, 3e30):
        one = good[0].clone()
        one[7, 3] = wrong
        steps.append([one, 2 * good[1]])
    kernels, ref = by_kernels(steps), by_definition(steps)
    torch.testing.assert_close(kernels, ref, rtol=1e-5, atol=0)
    assert kernels[0, 3] == 4 and kernels[1, 3] == 0
    assert kernels[0, 7] == 1 and kernels[1, 7] == 5


def test_zeros_and_signed_zeros() -> None:
    weights = [torch.tensor([[0.0, -0.0, 1.0, -3.0]], device=DEVICE)]
    state = by_kernels([weights])
    assert state[0, :4].tolist() == [3.0, math.sqrt(2.5), 0.5, 0.0]


def test_an_unaligned_address() -> None:
    base = torch.randn(101, device=DEVICE)
    weights = [base[1:].view(10, 10), torch.randn(4, 4, device=DEVICE)]
    torch.testing.assert_close(by_kernels([weights]), by_definition([weights]), rtol=1e-5, atol=0)


def test_what_cannot_be_read_by_its_address_says_why() -> None:
    whole = torch.randn(8, 8, device=DEVICE)
    assert "dtype" in str(ws.why_not([whole.double()]))
    assert "gaps" in str(ws.why_not([whole[:, ::2]]))
    assert "several" in str(ws.why_not([whole, whole.half()]))
    assert "subclass" in str(ws.why_not([torch.Tensor._make_subclass(_Other, whole)]))
    assert ws.why_not([torch.nn.Parameter(whole)]) is None


class _Other(torch.Tensor):
    pass


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_record_follows_a_weight_that_moves() -> None:
    weights = [torch.randn(64, 32, device=DEVICE), torch.randn(16, 16, device=DEVICE)]
    record = wt.Record(weights)
    record.observe(weights)
    moved = [5 * weights[0], weights[1]]
    record.observe(moved)
    torch.testing.assert_close(record.state, by_definition([weights, moved]), rtol=1e-5, atol=0)
