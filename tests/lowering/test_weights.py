"""A weight quantised once for forward and dgrad: the values that each would have made itself."""

from __future__ import annotations

import pytest
import torch

from loka_compile.lowering import chain
from loka_compile.lowering import gemm
from loka_compile.lowering import weights
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH

T, R, B = "torch:tensorwise", "torch:rowwise", "torch:blockwise"
OWN = "loka:tensorwise"


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("fwd", "dgrad"), [(T, T), (R, R), (T, R), (B, B), (OWN, T), (R, B)])
# No multiple of 16; more than one 128 x 128 block.
@pytest.mark.parametrize(("n", "k"), [(24, 32), (20, 40), (136, 144)])
def test_values_are_those_of_the_formulas(fwd: str, dgrad: str, n: int, k: int, device) -> None:
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    w8, scale, w8t, scale_t = torch.ops.loka.quantize_weight(w, w.dtype, fwd, dgrad)
    rule_f, rule_d = chain.rule_of(fwd, "fwd").b, chain.rule_of(dgrad, "dgrad").b
    q, s = gemm.operand(w, rule_f, fwd)
    qt, st = gemm.operand(w.t(), rule_d, dgrad)
    assert torch.equal(bytes_of(w8[:n, :k]), bytes_of(q)) and torch.equal(scale, s)
    assert torch.equal(bytes_of(w8t[:k, :n]), bytes_of(qt)) and torch.equal(scale_t, st)
    assert w8.shape[0] == (n if fwd == OWN else -(-n // 16) * 16)
    assert w8.shape[1] % 16 == 0 and all(s % 16 == 0 for s in w8t.shape)


def test_the_fake_says_what_comes(device) -> None:
    w = torch.randn(20, 40, device=device)
    args = (w, torch.bfloat16, T, R)
    torch.library.opcheck(
        torch.ops.loka.quantize_weight.default, args, test_utils=("test_schema", "test_faketensor")
    )


def test_a_master_weight_is_rounded_on_the_way(device) -> None:
    w = torch.randn(32, 48, device=device)
    got = torch.ops.loka.quantize_weight(w, torch.bfloat16, R, R)
    want = torch.ops.loka.quantize_weight(w.bfloat16(), torch.bfloat16, R, R)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(bytes_of(mine), bytes_of(theirs))


@pytest.mark.parametrize("kernel", [HIGH, T + "+emulated", "torchao:rowwise"])
def test_who_quantises_for_itself(kernel: str) -> None:
    assert weights.scale_of(kernel, "fwd") is None
