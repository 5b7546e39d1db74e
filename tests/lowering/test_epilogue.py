"""Epilogues as text and back."""

from __future__ import annotations

import pytest

from loka_compile.lowering.epilogue import Epilogue


@pytest.mark.parametrize(
    "text",
    [
        "block_norm:256:hard_swish",
        "block_norm:128:none+gain",
        "block_norm:160:hard_sigmoid+gain+gate",
    ],
)
def test_round_trip(text):
    assert str(Epilogue.parse(text)) == text
    assert Epilogue.parse("") is None


@pytest.mark.parametrize(
    "text", ["x", "block_norm:256:gelu", "block_norm:a:none", "softmax:1:none"]
)
def test_what_is_no_epilogue(text):
    with pytest.raises(ValueError):
        Epilogue.parse(text)
