"""Epilogues as text and back."""

from __future__ import annotations

import pytest

from loka_compile.lowering.epilogue import Epilogue
from loka_compile.lowering.epilogue import Pointwise
from loka_compile.lowering.epilogue import is_pointwise


@pytest.mark.parametrize(
    "text",
    [
        "block_norm:256:hard_swish",
        "block_norm:128:none+gain",
        "block_norm:160:hard_sigmoid+gain+gate",
        "block_norm:64:hard_swish+gain+add",
        "pointwise:relu+bias",
        "pointwise:none+bias+mul+add",
        "pointwise:silu+scale+add",
    ],
)
def test_round_trip(text):
    assert str(Epilogue.parse(text)) == text
    assert Epilogue.parse("") is None


@pytest.mark.parametrize(
    "text", ["x", "block_norm:256:gelu", "block_norm:a:none", "softmax:1:none", "pointwise:tanh"]
)
def test_what_is_no_epilogue(text):
    with pytest.raises(ValueError):
        Epilogue.parse(text)


def test_pointwise_counts_its_operands():
    assert Pointwise("none", mul="mul", add=True).operands == 2
    assert Pointwise("relu", bias=True, mul="scale").operands == 0
    assert is_pointwise("pointwise:relu") and not is_pointwise("block_norm:256:none")
