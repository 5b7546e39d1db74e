"""Running statistics and the reservoir against closed forms, on awkward batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from loka_compile.probe import merge as mg
from loka_compile.probe import statistics as st
from loka_compile.probe.statistics import Statistics
from loka_compile.probe.statistics import update

C = 12


def observe(state: Statistics, *batches: Tensor) -> Statistics:
    for batch in batches:
        update(batch, state)
    return state


def fresh(features: int = C, dtype: torch.dtype = torch.float32, device="cpu") -> Statistics:
    return Statistics.empty(features, dtype, torch.device(device))


def _batches(device, sizes=(7, 64, 1, 33, 200)) -> list[Tensor]:
    # Mean far from zero: a one-pass sum of squares in FP32 would lose the variance.
    return [(1000 + torch.randn(m, C, device=device)) for m in sizes]


def assert_moments(state: Statistics, rows: Tensor) -> None:
    """Those of rows (M, C), FP64. A mean is as good as it is beside the spread: on a GPU a few rows
    are summed in FP32 before FP64, about the first row, and one near zero keeps no more digits."""
    assert ((state.mean() - rows.mean(0)).abs() <= 1e-6 * rows.std(0)).all()
    torch.testing.assert_close(state.variance(), rows.var(0), rtol=1e-6, atol=1e-9)


def test_mean_and_variance_equal_the_closed_form(device):
    batches = _batches(device)
    state = observe(fresh(device=device), *batches)
    rows = torch.cat(batches).double()
    torch.testing.assert_close(state.mean(), rows.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(state.variance(), rows.var(0), rtol=1e-6, atol=0)
    assert state.summary()["rows"] == len(rows) and state.batches == len(batches)


def test_variance_where_the_mean_dwarfs_the_spread(device):
    """FP32 steps are 1/16 at 1e6: a mean rounded to FP32 is off by a share of the spread."""
    x = 1e6 + torch.randn(512, C, device=device)
    state = observe(fresh(device=device), x)
    torch.testing.assert_close(state.variance(), x.double().var(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_half_and_double_input(dtype, device):
    """Doubles count as what FP32 makes of them: a linear of doubles is never a candidate for FP8,
    and what decides about a kernel is coarser by far."""
    x = torch.randn(64, C, device=device).to(dtype)
    if dtype == torch.float64:
        x += 1e-9 * torch.randn_like(x)
    state = observe(fresh(dtype=dtype, device=device), x)
    assert_moments(state, x.double())
    assert state.rows.dtype == (torch.float32 if dtype == torch.float64 else dtype)


def test_merge_is_exact(device):
    batches = _batches(device)
    parts = observe(fresh(device=device), *batches[:2]), observe(fresh(device=device), *batches[2:])
    merged = mg.merge(*parts)
    whole = torch.cat(batches).double()
    torch.testing.assert_close(merged.mean(), whole.mean(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(merged.variance(), whole.var(0), rtol=1e-6, atol=0)
    assert merged.summary()["rows"] == len(whole)
    assert sorted(merged.batch_maxima().tolist()) == sorted(float(b.abs().max()) for b in batches)
    # Merging reads its inputs only.
    assert parts[0].batches == 2 and parts[1].batches == 3


def test_merge_with_nothing(device):
    full = observe(fresh(device=device), *_batches(device))
    for merged in (mg.merge(full, fresh(device=device)), mg.merge(fresh(device=device), full)):
        torch.testing.assert_close(merged.variance(), full.variance())
        torch.testing.assert_close(merged.moments[3:], full.moments[3:])
        torch.testing.assert_close(merged.reservoir(), full.reservoir())
    nothing = mg.merge(fresh(device=device), fresh(device=device))
    assert nothing.batches == 0 and nothing.reservoir().shape == (0, C)


def test_merge_keeps_both_ranks_large_batches():
    """Both rings full: the maxima of the first rank must not vanish."""
    small, large = fresh(), fresh()
    for _ in range(st.RING):
        observe(small, torch.ones(2, C))
        observe(large, torch.full((2, C), 50.0))
    for merged in (mg.merge(small, large), mg.merge(large, small)):
        maxima = merged.batch_maxima()
        assert maxima.numel() == st.RING
        assert (maxima == 50).sum() == (maxima == 1).sum() == st.RING // 2
        assert len(merged.reservoir()) == 4 * st.RING
        assert (merged.reservoir()[:, 0] == 50).sum() == 2 * st.RING


def test_non_finite_rows_are_counted_and_left_out(device):
    x = torch.randn(40, C, device=device)
    bad = x.clone()
    bad[3, 0] = math.nan
    bad[17, 1:3] = math.inf
    keep = [i for i in range(40) if i not in (3, 17)]
    state = observe(fresh(device=device), bad)
    assert_moments(state, x[keep].double())
    assert state.summary()["non_finite"] == 3
    assert state.batch_maxima().item() == float(x[keep].abs().max())
    assert torch.isfinite(state.reservoir()).all()
    # No row of zeros in place of the bad ones: a zero row would hide errors.
    assert (state.reservoir() != 0).any(1).all()


def test_only_non_finite_rows(device):
    state = observe(fresh(device=device), torch.full((5, C), math.nan, device=device))
    assert state.reservoir().shape == (0, C) and state.summary()["non_finite"] == 5 * C
    assert (state.moments == 0).all()
    # The first finite batch sets the weighted mean; it is no tenth of it.
    observe(state, torch.full((5, C), 3.0, device=device))
    torch.testing.assert_close(state.moments[3], torch.full((C,), 3.0).double().to(device))


def test_empty_batch_changes_nothing(device):
    state = observe(fresh(device=device), *_batches(device))
    before = [t.clone() for t in state.tensors]
    observe(state, torch.zeros(0, C, device=device), torch.zeros(2, 0, C, device=device))
    for a, b in zip(state.tensors, before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_one_row_constant_input_and_one_feature(device):
    state = observe(fresh(device=device), torch.full((1, C), 0.1, device=device))
    assert (state.variance() == 0).all()
    observe(state, *[torch.full((9, C), 0.1, device=device)] * 5)
    assert (state.variance().abs() < 1e-16).all()
    one = observe(fresh(1, device=device), torch.tensor([[1.0], [3.0]], device=device))
    assert one.mean().item() == 2 and one.variance().item() == 2
    # A vector counts as one row.
    assert observe(fresh(device=device), torch.ones(C, device=device)).summary()["rows"] == 1


def test_share_of_exact_zeros(device):
    x = torch.randn(50, C, device=device)
    x[:10, 2] = 0
    x[0, 5] = math.nan  # this row is out, zero and all
    state = observe(fresh(device=device), x)
    want = torch.zeros(C).double()
    want[2] = 9 / 49
    torch.testing.assert_close(state.zero_share().cpu(), want)


def test_weighted_statistics(device):
    batches = _batches(device, sizes=(32,) * 5)
    state = observe(fresh(device=device), *batches)
    mean, second = batches[0].double().mean(0), batches[0].double().pow(2).mean(0)
    for batch in batches[1:]:
        mean = (1 - st.EW) * mean + st.EW * batch.double().mean(0)
        second = (1 - st.EW) * second + st.EW * batch.double().pow(2).mean(0)
    torch.testing.assert_close(state.moments[3], mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(state.moments[4], second, rtol=1e-9, atol=0)


def test_ring_of_maxima_holds_the_last(device):
    state = fresh(device=device)
    for i in range(st.RING + 5):
        observe(state, torch.full((2, C), -float(i), device=device))
    assert sorted(state.batch_maxima().tolist()) == [float(i) for i in range(5, st.RING + 5)]


def test_update_never_reads_a_value_on_the_host():
    """Fake tensors have no values: any `.item()`, mask indexing or branch on one raises."""
    with FakeTensorMode():
        state = fresh()
        update(torch.randn(40, C), state)
        update(torch.randn(2, 20, C, dtype=torch.bfloat16), state)
        with pytest.raises(Exception, match=r"item|data-dependent|scalar|local_scalar"):
            _ = state.batches  # the check itself works: this one does read


def test_state_does_not_grow_and_wide_layers_are_bounded(device):
    """ao 3946: K = 20000. 257 kept rows, five FP64 moments; nothing quadratic."""
    k = 20000
    state = fresh(k, torch.bfloat16, device)
    size = sum(t.numel() * t.element_size() for t in state.tensors)
    assert size < 257 * k * 2 + 5 * k * 8 + 2000
    pointers = [t.data_ptr() for t in state.tensors]
    for _ in range(3):
        observe(state, torch.randn(8, k, device=device).bfloat16())
    assert [t.data_ptr() for t in state.tensors] == pointers
    assert state.reservoir().shape == (24, k)


def test_update_in_place_follows_a_reset(device):
    """pytorch 115774: a reset by assignment of values takes effect."""
    state = observe(fresh(device=device), *_batches(device))
    for tensor in state.tensors:
        tensor.zero_()
    x = torch.randn(16, C, device=device)
    observe(state, x)
    torch.testing.assert_close(state.mean(), x.double().mean(0), rtol=1e-6, atol=1e-9)
