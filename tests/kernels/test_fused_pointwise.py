"""Exact epilogues of the fused GEMM against FP64: bias, activation, residual, ensemble sum, cross.

On a GPU compiled, elsewhere in Triton's interpreter; shapes as in test_fused_forward.
"""

from __future__ import annotations

import pytest
import torch
from fused_cases import DEVICE
from fused_cases import E4M3
from fused_cases import SMALL
from fused_cases import TOLERANCE
from fused_cases import needs_descriptors
from fused_cases import operands
from fused_cases import relative
from fused_cases import split

from loka_compile.kernels.fused_forward import fused_forward
from loka_compile.kernels.fused_forward import fused_forward_ref

pytestmark = needs_descriptors
ACTS = ("none", "relu", "silu", "gelu")


def extras(form: str, m: int, n: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    parts = {
        "b": ("bias", torch.randn(n)),
        "m": ("mul", torch.randn(m, n)),
        "s": ("mul", torch.tensor(0.3)),
        "a": ("addend", torch.randn(m, n)),
    }
    return {name: t.to(DEVICE, dtype) for name, t in (parts[p] for p in form)}


# linear + bias; residual; ensemble's weighted sum; DCN-V2's cross, with and without bias.
@pytest.mark.parametrize("form", ["b", "a", "ba", "bsa", "bma", "ma"])
@pytest.mark.parametrize("act", ACTS)
def test_forms(form: str, act: str) -> None:
    m, k, n = 33, 80, 100
    args = operands(m, k, n, rows=True)
    more = extras(form, m, n)
    got = fused_forward(
        *args, block=64, norm=False, act=act, out_dtype=torch.float32,
        save_dtype=torch.float32, config=SMALL, **more,
    )  # fmt: skip
    y, t, _ = fused_forward_ref(*args, block=64, norm=False, act=act, **more)
    assert relative(got.y, y) < TOLERANCE
    assert relative(got.u, t) < TOLERANCE
    assert got.r is None


@pytest.mark.parametrize("splits", [1, 4])
def test_split_and_single_row(splits: int) -> None:
    for m in (33, 1):
        args = operands(m, 256, 64)
        more = extras("bma", m, 64)
        got = fused_forward(
            *args, block=64, norm=False, act="silu", out_dtype=torch.float32, transposed=True,
            config=split(splits), **more,
        )  # fmt: skip
        y, _, _ = fused_forward_ref(*args, block=64, norm=False, act="silu", **more)
        assert relative(got.y, y) < TOLERANCE
        assert torch.equal(got.yt[:, :m].t(), got.y) and (got.yt[:, m:] == 0).all()


@pytest.mark.parametrize("block", [16, 48])
def test_norm_of_groups_behind_a_residual(block: int) -> None:
    """Variants 10 and 11: a norm over each d features of `linear(x) + residual`."""
    m, n = 20, 96
    args = operands(m, 64, n)
    gain = torch.rand(n, device=DEVICE) + 0.5
    more = extras("ba", m, n)
    got = fused_forward(
        *args, gain, block=block, act="silu", out_dtype=torch.float32,
        save_dtype=torch.float32, config=SMALL, **more,
    )  # fmt: skip
    y, u, r = fused_forward_ref(*args, gain, block=block, act="silu", **more)
    for mine, theirs in ((got.y, y), (got.u, u), (got.r, r)):
        assert relative(mine, theirs) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_operands(dtype: torch.dtype) -> None:
    args = operands(17, 64, 32)
    more = extras("bma", 17, 32, dtype)
    got = fused_forward(
        *args, block=32, norm=False, act="none", out_dtype=dtype, config=SMALL, **more
    )
    y, _, _ = fused_forward_ref(*args, block=32, norm=False, act="none", **more)
    assert got.y.dtype == dtype
    assert relative(got.y, y) < 8e-3


@pytest.mark.parametrize("act", [*ACTS, "hard_swish", "hard_sigmoid", "sigmoid"])
def test_zero_huge_and_nan_rows(act: str) -> None:
    a, _, w, _ = operands(32, 64, 64)
    one = torch.ones((), device=DEVICE)
    a = a.float()
    a[3] = 0
    a = a.to(E4M3)
    a_scale = torch.ones(32, 1, device=DEVICE)
    a_scale[5] = 1e30
    a_scale[7] = float("nan")
    more = extras("ba", 32, 64)
    more["addend"][9, 2] = float("nan")
    call = {"block": 64, "norm": False, "act": act, **more}
    got = fused_forward(a, a_scale, w, one, out_dtype=torch.float32, config=SMALL, **call).y
    want, _, _ = fused_forward_ref(a, a_scale, w, one, **call)
    assert got[7].isnan().all()
    assert got[9].isnan().nonzero().flatten().tolist() == [2]
    rest = [i for i in range(32) if i not in (5, 7, 9)]
    assert relative(got[rest], want[rest]) < TOLERANCE
    assert not got[5].isnan().any()
