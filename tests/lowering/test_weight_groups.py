"""Weights of a group: the values that each would have got on its own."""

from __future__ import annotations

import pytest
import torch

from loka_compile.lowering import weight_groups

T, R, B = "torch:tensorwise", "torch:rowwise", "torch:blockwise"
OWN = "loka:tensorwise"
FWD, DGRAD = [T, R, OWN, B, T], [T, R, T, B, R]
SHAPES = [(24, 32), (20, 40), (20, 40), (136, 144), (1, 16)]


def sizes_of(ws):
    return [size for w in ws for size in (*w.shape, *w.stride())]


def test_values_are_those_of_each(device) -> None:
    ws = [torch.randn(s, device=device, dtype=torch.bfloat16) for s in SHAPES]
    q, qt, scales = torch.ops.loka.quantize_weights(ws, ws[0].dtype, FWD, DGRAD, sizes_of(ws))
    for w, fwd, dgrad, four in zip(
        ws, FWD, DGRAD, weight_groups.places(SHAPES, FWD, DGRAD), strict=True
    ):
        want = torch.ops.loka.quantize_weight(w, w.dtype, fwd, dgrad)
        for place, result, theirs in zip(four, (q, scales, qt, scales), want, strict=True):
            mine = place.of(result)
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert mine.is_contiguous() and torch.equal(mine.float(), theirs.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fake_says_what_comes(device, dtype) -> None:
    ws = [torch.randn(s, device=device) for s in SHAPES]
    args = (ws, dtype, FWD, DGRAD, sizes_of(ws))
    torch.library.opcheck(
        torch.ops.loka.quantize_weights.default, args, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
def test_other_sizes_than_said_are_refused() -> None:
    ws = [torch.randn(s, device="cuda") for s in SHAPES]
    with pytest.raises(ValueError, match="other sizes"):
        said = sizes_of([w.t() for w in ws])
        torch.ops.loka.quantize_weights(ws, ws[0].dtype, FWD, DGRAD, said)
