"""Block quantisers against their FP64 definition, bit for bit, at ragged sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from loka_compile.kernels import quantize_blockwise as qb

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _poisoned(value: float) -> Tensor:
    x = torch.randn(150, 300)
    x[130, 140] = value
    return x


# 150 x 300: two blocks and a ragged one down, two and a ragged one across.
CASES = {
    "normal": lambda: torch.randn(150, 300),
    "heavy": lambda: torch.randn(150, 300) * torch.exp(4 * torch.randn(150, 300)),
    "zero_rows": lambda: torch.randn(150, 300) * (torch.arange(150) % 3 > 0).unsqueeze(1),
    "zeros": lambda: torch.zeros(3, 130),
    "nan": lambda: _poisoned(math.nan),
    "inf": lambda: _poisoned(-math.inf),
    "huge": lambda: 1e38 * torch.randn(5, 129).clamp(-3, 3),
    "tiny": lambda: 1e-38 * torch.randn(5, 127),
    "one_row": lambda: torch.randn(1, 16),
    "whole": lambda: torch.randn(128, 256),
}
KINDS = {
    "groups": (1, qb.quantize_groups, qb.fake_quantize_groups),
    "blocks": (128, qb.quantize_blocks, qb.fake_quantize_blocks),
}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.float().cpu().nan_to_num(nan=12345.0), b.float().cpu().nan_to_num(12345.0))


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("case", list(CASES))
def test_fast_equals_definition(case, kind, fp8, device):
    block_rows, quantise, fake = KINDS[kind]
    x = CASES[case]().to(device)
    got, scale = quantise(x, fp8)
    want, want_scale = qb.quantize_blockwise_ref(x, fp8, block_rows=block_rows)
    assert got.dtype == fp8 and got.shape == x.shape and scale.dtype == torch.float32
    assert scale.shape == (-(-x.shape[0] // block_rows), -(-x.shape[1] // 128))
    assert same(got, want) and same(scale, want_scale)
    emulated, emulated_scale = fake(x, fp8)
    assert same(emulated, got) and same(emulated_scale, scale)


@pytest.mark.parametrize("view", ["t", "step", "slice"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_strides_do_not_matter(kind, view, device):
    _, quantise, _ = KINDS[kind]
    x = torch.randn(300, 290, device=device).bfloat16()
    x = {"t": x.t(), "step": x[:, ::2], "slice": x[3:, 1:]}[view]
    got, scale = quantise(x, E4M3)
    want, want_scale = quantise(x.clone(memory_format=torch.contiguous_format), E4M3)
    assert same(got, want) and same(scale, want_scale)


def test_a_nan_stays_in_its_group_or_block():
    clean = torch.randn(150, 300)
    bad = clean.clone()
    bad[130, 140] = math.nan
    for block_rows, quantise, _ in KINDS.values():
        hit = torch.zeros(150, 300, dtype=torch.bool)
        hit[(130 // block_rows) * block_rows :][:block_rows, 128:256] = True
        got, want = quantise(bad, E4M3)[0].float(), quantise(clean, E4M3)[0].float()
        assert got[hit].isnan().all() and torch.equal(got[~hit], want[~hit])


def test_small_groups_keep_their_resolution():
    """What the recipe is for: a group 2**30 below its neighbour in the same row."""
    x = torch.randn(4, 256)
    x[:, 128:] *= 2.0**-30
    q, scale = qb.quantize_groups(x, E4M3)
    back = q.float() * qb.spread_groups(scale, 256)
    error = (back - x)[:, 128:].norm() / x[:, 128:].norm()
    assert error < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=str)
def test_fill(dtype):
    t = torch.arange(15.0).reshape(3, 5).to(dtype)
    got = qb.fill(t, 4, 16)
    assert got.shape == (4, 16) and got.dtype == dtype
    assert torch.equal(got[:3, :5].float(), t.float())
    assert got.float().sum() == t.float().sum()
    assert qb.fill(t, 1, 5) is t
    assert torch.equal(qb.fill(t.t(), 1, 4).float()[:, :3], t.t().float())


@pytest.mark.slow
def test_inductor_gives_the_same_bytes(device):
    def quantisers(x: Tensor) -> tuple[Tensor, ...]:
        return (
            *qb.quantize_groups(x, E4M3),
            *qb.quantize_groups(x.t(), E4M3),
            *qb.quantize_blocks(x, E4M3),
        )

    compiled = torch.compile(quantisers, fullgraph=True, dynamic=True)
    for shape in ((150, 300), (130, 257)):
        x = torch.randn(shape, device=device).bfloat16()
        for got, want in zip(compiled(x), quantisers(x), strict=True):
            assert same(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_fill_of_a_symbolic_size_asks_nothing_of_it(dtype):
    """Multiples too, which a static size returns as they are."""
    traced = make_fx(lambda t: qb.fill(t, 4, 16), tracing_mode="symbolic")(
        torch.randn(8, 48).to(dtype)
    )
    assert not traced.shape_env.guards
    for rows, columns in ((5, 17), (8, 32), (7, 48), (12, 33), (4, 16), (31, 130), (2, 2)):
        t = torch.randn(rows, columns).to(dtype)
        got = traced(t).float()
        assert got.shape == (-(-rows // 4) * 4, -(-columns // 16) * 16)
        assert torch.equal(got[:rows, :columns], t.float())
        assert not got[rows:].any() and not got[:, columns:].any()
