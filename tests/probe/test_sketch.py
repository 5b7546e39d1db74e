"""Columns of whole batches: what is kept, that weighted sums are unbiased, that rings turn."""

from __future__ import annotations

import math

import pytest
import torch

from loka_compile.probe import sketch as sk

CPU = torch.device("cpu")


def record(held: tuple, gy: torch.Tensor, x: torch.Tensor, start: float = 0.5) -> None:
    amax = torch.stack([x.abs().amax(), gy.abs().amax()]).float()
    sk.record_ref(gy, x, torch.tensor(start, dtype=torch.float64), *held, amax)


def test_keeps_all_rows_of_some_columns() -> None:
    held = sk.empty(torch.float32, CPU)
    gy, x = torch.randn(70, 40), torch.randn(70, 50)
    record(held, gy, x)
    (one,) = sk.sketches(*held)
    assert one.gy.shape == (70, sk.GY) and one.x.shape == (70, sk.X)
    for kept, whole in ((one.gy, gy), (one.x, x)):
        same = (kept.t().unsqueeze(1) == whole.t().unsqueeze(0)).all(2)
        assert same.any(1).all()
    assert one.x_amax == x.abs().max() and one.gy_amax == gy.abs().max()
    # Gradient columns are spread evenly: 16 different ones of 40.
    assert len({tuple(c.tolist()) for c in one.gy.t()}) == sk.GY


def test_weighted_sums_are_unbiased_and_follow_the_energy() -> None:
    """sum_k f(x_k) over K = 300 columns of very different sizes, from 32 of them."""
    torch.manual_seed(1)
    x = torch.randn(64, 300) * torch.logspace(-3, 1, 300)
    gy = torch.randn(64, 4)
    true = (gy.t() @ x).square().sum(1)
    found = []
    for number in range(400):
        held = sk.empty(torch.float32, CPU)
        record(held, gy, x, (number + 0.5) / 400)
        (one,) = sk.sketches(*held)
        first = one.gy[:, :: sk.GY // 4]
        found.append(((first.t() @ one.x).square() * one.weights).sum(1))
    mean = torch.stack(found).mean(0)
    torch.testing.assert_close(mean, true.double(), rtol=0.02, atol=0)
    # One draw alone is off by far less than 32 of 300 equally likely columns would be.
    spread = (torch.stack(found) / true).std(0)
    assert (spread < 0.35).all()


@pytest.mark.parametrize("k", [1, 5, 32])
def test_narrow_and_zero_inputs(k: int) -> None:
    held = sk.empty(torch.float32, CPU)
    x = torch.randn(9, k)
    record(held, torch.randn(9, 3), x)
    record(held, torch.randn(9, 3), torch.zeros(9, k))
    some, none = sk.sketches(*held)
    torch.testing.assert_close(some.weights.sum(), torch.tensor(float(k)).double(), rtol=1, atol=0)
    estimate = (some.x.double().square() * some.weights).sum()
    torch.testing.assert_close(estimate, x.double().square().sum(), rtol=0.5, atol=0)
    assert none.x.abs().max() == 0 and torch.isfinite(none.weights).all()


def test_the_ring_turns_and_forgets_what_it_overwrites() -> None:
    held = sk.empty(torch.float32, CPU)
    sizes = [20000, 9000, 8000, 40000, 5]
    for number, m in enumerate(sizes):
        record(held, torch.full((m, 2), float(number)), torch.full((m, 2), float(number)))
        for one in sk.sketches(*held):
            # Every batch held is whole and of one value.
            assert one.gy.unique().numel() == 1 and one.x.unique().numel() == 1
        kept = sorted(int(one.gy[0, 0]) for one in sk.sketches(*held))
        assert kept == [[0], [0, 1], [1, 2], [3], [4]][number]
    lengths = [one.gy.shape[0] for one in sk.sketches(*held)]
    assert lengths == [5]


def test_more_small_batches_than_places() -> None:
    held = sk.empty(torch.float32, CPU)
    for number in range(sk.SLOTS + 7):
        record(held, torch.full((3, 2), float(number)), torch.ones(3, 2))
    kept = sorted(int(one.gy[0, 0]) for one in sk.sketches(*held))
    assert kept == list(range(7, sk.SLOTS + 7))


def test_a_batch_with_a_nan_is_left_out() -> None:
    held = sk.empty(torch.bfloat16, CPU)
    gy = torch.randn(8, 16)
    gy[3, 2] = math.nan
    record(held, gy, torch.randn(8, 16))
    record(held, torch.randn(8, 16), torch.randn(8, 16))
    assert len(list(sk.sketches(*held))) == 1


def test_ranks_merge_alternately() -> None:
    one, other = sk.empty(torch.float32, CPU), sk.empty(torch.float32, CPU)
    for number in range(3):
        record(one, torch.full((12000, 2), 1.0 + number), torch.ones(12000, 2))
        record(other, torch.full((100, 2), 10.0 + number), torch.ones(100, 2))
    got = sk.merged(one, other)
    assert [int(s.gy[0, 0]) for s in sk.sketches(*got)] == [3, 12, 2, 11, 10]
    assert all(s.gy.unique().numel() == 1 for s in sk.sketches(*got))
