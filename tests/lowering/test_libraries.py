"""Library adapters: names, availability, what they refuse."""

from __future__ import annotations

import pytest
import torch

from loka_compile.errors import UnknownKernelError
from loka_compile.lowering import libraries
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.base import Library
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.recipes import ROWWISE
from loka_compile.lowering.recipes import TENSORWISE

CPU = torch.device("cpu")
SHAPE = GemmShape(17, 64, 32)


def test_kernel_names():
    assert libraries.kernel_names() == [
        "loka:tensorwise",
        "loka:rowwise",
        "loka:blockwise",
        "torch:tensorwise",
        "torch:rowwise",
        "torch:blockwise",
        "torchao:tensorwise",
        "torchao:rowwise",
        "torchao:rowwise_with_gw_hp",
        "fbgemm:rowwise",
        "fbgemm:rowwise_fast",
        "fbgemm:rowwise_slow",
        "fbgemm:tensorwise_e4m3",
        "fbgemm:groupwise",
        "fbgemm:blockwise_128x128",
        "fbgemm_triton:rowwise",
        "fbgemm_triton:rowwise_fast",
        "deep_gemm:blockwise",
        "bf16:plain",
    ]


def test_names_split_and_check():
    for name in libraries.kernel_names():
        library, recipe, emulated = libraries.split_kernel_name(name)
        assert f"{library.name}:{recipe}" == name and not emulated
        assert libraries.split_kernel_name(name + EMULATED) == (library, recipe, True)
        assert libraries.check_kernel_name(name + EMULATED) == name + EMULATED
    assert libraries.check_kernel_name(HIGH_PRECISION) == HIGH_PRECISION


@pytest.mark.parametrize(
    "wrong", ["torch:rowise", "torch", "rowwise", "", "torch:rowwise_with_gw_hp", "x:rowwise"]
)
def test_unknown_names_get_the_nearest(wrong):
    for function in (libraries.check_kernel_name, libraries.split_kernel_name):
        with pytest.raises(UnknownKernelError) as caught:
            function(wrong)
        assert repr(wrong) in str(caught.value)
    if wrong == "torch:rowise":
        assert "did you mean 'torch:rowwise'" in str(caught.value)


def test_nothing_but_high_precision_is_available_on_a_cpu():
    rows = libraries.availability("cpu")
    assert [r["kernel"] for r in rows] == [HIGH_PRECISION, *libraries.kernel_names()]
    assert rows[0]["available"] and not any(r["available"] for r in rows[1:])
    assert all(r["reason"] for r in rows[1:])
    assert all(set(r) == {"library", "kernel", "available", "reason", "version"} for r in rows)


@pytest.mark.gpu
def test_availability_on_a_gpu_agrees_with_its_capability():
    able = torch.cuda.get_device_capability() >= (8, 9)
    row = next(r for r in libraries.availability("cuda") if r["kernel"] == "torch:rowwise")
    assert row["available"] is able and bool(row["reason"]) is not able


def test_a_missing_library_is_named_with_its_remedy(monkeypatch):
    library = libraries.LIBRARIES["torchao"]
    monkeypatch.setattr(library, "distribution", "no-such-distribution", raising=False)
    assert library.version() == ""
    assert "pip install" in library.why_unavailable(torch.device("cuda"))
    row = next(r for r in libraries.availability("cpu") if r["library"] == "torchao")
    assert not row["available"] and "not installed" in row["reason"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("shape", "letter"),
    [
        (GemmShape(32, 12, 32), "K"),
        (GemmShape(32, 32, 1), "N"),
        (GemmShape(32, 17, 896), "K"),
        (GemmShape(32, 0, 32), "K"),
        (GemmShape(32, 64, 0), "N"),
    ],
)
def test_sizes_that_kernels_refuse(direction, shape, letter):
    """ao 1268, TE 1571: both K and N count, not the input width alone."""
    why = libraries.LIBRARIES["torch"].why_not("rowwise", direction, shape)
    assert why.startswith(f"{letter} = ")


@pytest.mark.parametrize("shape", [(32, 15, 32), (32, 712, 896), (32, 64, 2050), (32, 40, 13)])
def test_sizes_that_are_padded_inside(shape):
    for library in libraries.LIBRARIES.values():
        if library.name == "loka":
            continue
        for recipe, rules in library.recipes.items():
            for direction in DIRECTIONS:
                few = library.name == "deep_gemm" and direction == "wgrad" and shape[2] <= 32
                if rules.gemm(direction) is not None and not few:
                    assert library.why_not(recipe, direction, GemmShape(*shape)) is None


def test_deep_gemm_has_no_wgrad_of_few_rows():
    refused = libraries.LIBRARIES["deep_gemm"].why_not
    for n in (16, 32):
        assert f"N = {n}" in (refused("blockwise", "wgrad", GemmShape(4096, 128, n)) or "")
    assert refused("blockwise", "wgrad", GemmShape(4096, 128, 48)) is None
    assert refused("blockwise", "wgrad", GemmShape(16, 128, 256)) is None
    # Those of its other kernel may be few.
    assert refused("blockwise", "fwd", GemmShape(16, 128, 16)) is None
    assert refused("blockwise", "dgrad", GemmShape(16, 16, 128)) is None


@pytest.mark.parametrize("m", [0, 1, 7, 8352, 10**7])
def test_m_is_never_a_reason(m):
    for library in libraries.LIBRARIES.values():
        for recipe, rules in library.recipes.items():
            for direction in DIRECTIONS:
                if rules.gemm(direction) is not None:
                    shape = GemmShape(m, 64, 64, "block_norm:64:hard_swish")
                    assert library.why_not(recipe, direction, shape) is None


def test_our_own_kernel_wants_a_chain_that_fits_a_tile():
    own = libraries.LIBRARIES["loka"]
    assert "not part of a fused chain" in own.why_not("rowwise", "fwd", SHAPE)
    assert "keeps dgrad" in own.why_not("rowwise", "dgrad", SHAPE)
    wide = GemmShape(17, 64, 512, "block_norm:512:none")
    assert "wider than the 256" in own.why_not("rowwise", "fwd", wide)


def test_a_direction_that_a_recipe_keeps_high():
    library = libraries.LIBRARIES["torchao"]
    assert "keeps wgrad" in library.why_not("rowwise_with_gw_hp", "wgrad", SHAPE)
    assert library.why_not("rowwise_with_gw_hp", "fwd", SHAPE) is None


def test_real_kernels_write_what_they_can():
    """Row scales give bf16; FP64 models get an FP32 product, not an error."""
    torch_library = libraries.LIBRARIES["torch"]
    assert torch_library.kernel_dtype(ROWWISE.fwd, torch.float32) is torch.bfloat16
    for name in ("torch", "torchao"):
        library = libraries.LIBRARIES[name]
        assert library.kernel_dtype(TENSORWISE.fwd, torch.float64) is torch.float32
        assert library.kernel_dtype(TENSORWISE.fwd, torch.float16) is torch.float16


def test_flops():
    assert GemmShape(3, 5, 7).flops() == 210


def test_the_base_class_promises_nothing():
    with pytest.raises(NotImplementedError):
        Library().why_unavailable(CPU)
    with pytest.raises(NotImplementedError):
        Library().gemm(*[torch.zeros(1)] * 4, ROWWISE.fwd, torch.float32)
