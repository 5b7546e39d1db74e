"""FBGEMM, DeepGEMM and block-scaled scaled_mm through stand-ins that check every argument.

A stand-in computes the product from the scales in the layout that the real kernel documents, so a
scale in the wrong place, or one that is not read, gives a wrong product and not only a wrong type.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental.symbolic_shapes import StatelessSymbolicContext

from loka_compile import _compat
from loka_compile.kernels.quantize_blockwise import spread_blocks
from loka_compile.kernels.quantize_blockwise import spread_groups
from loka_compile.lowering import gemm
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import availability
from loka_compile.lowering.libraries import deep_gemm
from loka_compile.lowering.libraries import fbgemm
from loka_compile.lowering.libraries import optional
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import Granularity
from loka_compile.lowering.select import candidates
from loka_compile.options import Options

CUDA = torch.device("cuda")
FP8 = (torch.float8_e4m3fn,)
FUNCTIONS = {"fwd": gemm.forward, "dgrad": gemm.dgrad, "wgrad": gemm.wgrad}


def groups(n: int) -> int:
    return -(-n // 128)


def check(t: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype=torch.float32) -> None:
    assert (t.dtype, tuple(t.shape), t.stride()) == (dtype, shape, stride)


def operands(a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """Row-major e4m3 with 16-byte rows -> (M, K, N)."""
    (m, k), (n, _) = a.shape, b.shape
    for t in (a, b):
        assert t.dtype in FP8 and t.is_contiguous() and t.shape[1] == k and k % 16 == 0
    assert n % 8 == 0
    return m, k, n


# -- stand-ins ------------------------------------------------------------------------------------

CALLS: list[tuple[object, ...]] = []


class _FakeFBGEMM:
    """In place of `torch.ops.fbgemm`."""

    def f8f8bf16_rowwise(self, a, b, sa, sb, bias=None, use_fast_accum=True):
        m, _, n = operands(a, b)
        check(sa, (m,), (1,))
        check(sb, (n,), (1,))
        CALLS.append(("rowwise", use_fast_accum))
        return ((a.float() * sa[:, None]) @ (b.float() * sb[:, None]).t()).bfloat16()

    def f8f8bf16(self, a, b, scale, use_fast_accum=True):
        operands(a, b)
        check(scale, (), ())
        CALLS.append(("tensorwise", use_fast_accum))
        return (a.float() @ b.float().t() * scale).bfloat16()

    def f8f8bf16_blockwise(self, a, b, sa, sb, block_m, block_n, block_k):
        m, k, n = operands(a, b)
        assert (block_m, block_n, block_k) == (128, 128, 128)
        check(sa, (groups(m), groups(k)), (groups(k), 1))
        check(sb, (groups(n), groups(k)), (groups(k), 1))
        CALLS.append(("blockwise",))
        left, right = spread_blocks(sa, m, k), spread_blocks(sb, n, k)
        return ((a.float() * left) @ (b.float() * right).t()).bfloat16()

    def f8f8bf16_groupwise(self, a, b, sa, sb):
        m, k, n = operands(a, b)
        assert m % 4 == 0, "rows of scales that TMA cannot read"
        check(sa, (groups(k), m), (m, 1))
        check(sb, (groups(k), groups(n)), (groups(n), 1))
        CALLS.append(("groupwise",))
        left, right = spread_groups(sa.t(), k), spread_blocks(sb.t(), n, k)
        return ((a.float() * left) @ (b.float() * right).t()).bfloat16()


def _matmul_fp8_row(a, b, sa, sb, *, fp8_fast_accum, tma_persistent):
    assert tma_persistent is False
    CALLS.append(("triton", fp8_fast_accum))
    m, _, n = operands(a, b)
    check(sa, (m,), (1,))
    check(sb, (n,), (1,))
    return ((a.float() * sa[:, None]) @ (b.float() * sb[:, None]).t()).bfloat16()


def _fp8_gemm_nt(left, right, d, c=None, recipe=None):
    (a, sa), (b, sb) = left, right
    m, k, n = operands(a, b)
    CALLS.append(("deep_gemm", recipe))
    # Rows next to each other, groups 16 bytes or a multiple apart.
    check(sa, (m, groups(k)), (1, -(-m // 4) * 4))
    if recipe == (1, 128, 128):
        assert c is None and d.dtype == torch.bfloat16
        check(sb, (groups(n), groups(k)), (groups(k), 1))
        scale = spread_blocks(sb, n, k)
    else:
        assert recipe == (1, 1, 128) and c is d and d.dtype == torch.float32
        check(sb, (n, groups(k)), (1, -(-n // 4) * 4))
        scale = spread_groups(sb, k)
    product = (a.float() * spread_groups(sa, k)) @ (b.float() * scale).t()
    d.copy_(product if c is None else product + c)


def _scaled_mm(a, b, sa, kind_a, sb, kind_b, *, swizzle_a, swizzle_b, output_dtype):
    kind = torch.nn.functional.ScalingType
    b = b.t()
    m, k, n = operands(a, b)
    assert m % 4 == 0 and kind_a == kind.BlockWise1x128
    CALLS.append(("scaled_mm", kind_b))
    check(sa, (m, groups(k)), (1, m))
    if kind_b == kind.BlockWise128x128:
        padded = -(-groups(k) // 4) * 4
        check(sb, (padded, groups(n)), (1, padded))
        scale = spread_blocks(sb.t()[:, : groups(k)], n, k)
    else:
        check(sb, (n, groups(k)), (1, n))
        scale = spread_groups(sb, k)
    product = (a.float() * spread_groups(sa, k)) @ (b.float() * scale).t()
    return product.to(output_dtype)


@pytest.fixture
def stand_ins(monkeypatch):
    CALLS.clear()
    deep_gemm = types.SimpleNamespace(fp8_gemm_nt=_fp8_gemm_nt)
    modules = {
        "deep_gemm": deep_gemm,
        fbgemm._MODULE: types.SimpleNamespace(),
        fbgemm._TRITON_MODULE: types.SimpleNamespace(matmul_fp8_row=_matmul_fp8_row),
    }
    for place in ("fbgemm", "deep_gemm"):
        module = sys.modules[f"loka_compile.lowering.libraries.{place}"]
        monkeypatch.setattr(module, "load", modules.__getitem__)
    monkeypatch.setattr(fbgemm, "_op", lambda name: getattr(_FakeFBGEMM(), name))
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", _scaled_mm)


KERNELS = [
    f"{name}:{recipe}"
    for name in ("fbgemm", "fbgemm_triton", "deep_gemm")
    for recipe in LIBRARIES[name].recipes
] + ["torch:blockwise"]


def _sources(m: int, k: int, n: int) -> dict[str, tuple[Tensor, Tensor]]:
    def made(rows: int, columns: int) -> Tensor:
        down = torch.exp2((torch.arange(rows) * 7 % 9 - 4).float()).unsqueeze(1)
        across = torch.exp2((torch.arange(columns) // 128 * 5 % 7 - 3).float())
        return (torch.randn(rows, columns) * down * across).bfloat16()

    x, w, gy = made(m, k), made(n, k), made(m, n)
    return {"fwd": (x, w), "dgrad": (gy, w), "wgrad": (gy, x)}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("direction", DIRECTIONS)
# Whole blocks; ragged ones with an odd M; widths that are padded inside.
@pytest.mark.parametrize("shape", [(256, 384, 640), (131, 272, 400), (7, 200, 15)], ids=str)
def test_real_calls_get_their_layouts(kernel, direction, shape, stand_ins):
    a, b = _sources(*shape)[direction]
    got = FUNCTIONS[direction](a, b, kernel)
    want = FUNCTIONS[direction](a, b, kernel + EMULATED)
    assert CALLS and got.shape == want.shape and got.dtype == torch.bfloat16
    error = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1)
    assert float(error.max()) < 0.01


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_scale_is_read(kernel, direction, stand_ins):
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    a, b = torch.randn(130, 272), torch.randn(144, 272)
    qa, sa = library.quantize(recipe, a, rule.a)
    qb, sb = library.quantize(recipe, b, rule.b)
    once = library.gemm(qa, sa, qb, sb, rule, torch.float32)
    for which, scale in enumerate((sa, sb)):
        flat = scale.reshape(-1)
        for i in range(0, flat.numel(), max(1, flat.numel() // 5)):
            changed = flat.clone()
            changed[i] *= 4
            scales = [sa, sb]
            scales[which] = changed.reshape(scale.shape)
            moved = library.gemm(qa, scales[0], qb, scales[1], rule, torch.float32)
            assert not torch.equal(moved, once), (which, i)


def test_accumulation_is_passed_on(stand_ins):
    sources = _sources(32, 64, 48)
    wanted = {"rowwise": (True, False, False), "rowwise_fast": (True,) * 3}
    wanted["rowwise_slow"] = (False,) * 3
    for recipe, flags in wanted.items():
        for direction, fast in zip(DIRECTIONS, flags, strict=True):
            CALLS.clear()
            FUNCTIONS[direction](*sources[direction], f"fbgemm:{recipe}")
            assert [("rowwise", fast)] == CALLS


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_traced_with_a_symbolic_batch(kernel, direction, stand_ins):
    """As a decomposition is traced: the calls have fakes, no layout guards on the batch, and one
    trace serves every batch. Except where 128 rows of the batch share a scale: torch asks whether
    the number of such groups is 1, so one trace serves the batches on the same side of 128."""
    function = FUNCTIONS[direction]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    static = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.STATIC])
    fakes = [
        mode.from_tensor(t, symbolic_context=dynamic if t.shape[0] == 37 else static)
        for t in _sources(37, 144, 272)[direction]
    ]
    assert isinstance(fakes[0].shape[0], torch.SymInt)
    before = len(mode.shape_env.guards)
    with mode:
        graph = make_fx(lambda a, b: function(a, b, kernel), tracing_mode="real")(*fakes)
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    by_batch = rule.a.granularity is Granularity.BLOCK or (direction == "wgrad" and rule.a.blocks)
    if not by_batch:
        assert len(mode.shape_env.guards) == before
    for m in (37, 64):
        a, b = _sources(m, 144, 272)[direction]
        assert torch.equal(graph(a, b), function(a, b, kernel))


# -- reasons --------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """A CUDA device of capability 9.0, as far as the adapters ask."""
    monkeypatch.setattr(_compat, "why_no_fp8", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(_compat, "why_wrong_pairing", lambda distribution, version: None)
    monkeypatch.setenv("CUDA_HOME", "somewhere")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    cached = (optional.load, optional.why_no_import, deep_gemm._why_no_workspace)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def _importing(monkeypatch, error: Exception | None) -> None:
    def import_module(name):
        if error is not None:
            raise error
        found: Any = types.ModuleType(name)
        found.get_num_sms = lambda: 132
        return found

    monkeypatch.setattr(optional.importlib, "import_module", import_module)


@pytest.mark.parametrize("name", ["fbgemm", "fbgemm_triton", "deep_gemm"])
def test_import_reasons(name, hopper, monkeypatch):
    library = LIBRARIES[name]
    top = library.module.split(".")[0]
    for error, says in (
        (ModuleNotFoundError("no", name=top), f"pip install {library.distribution}"),
        (ModuleNotFoundError("no", name="packaging"), "needs packaging"),
        (OSError("undefined symbol: _ZN3c10\nmore"), "OSError: undefined symbol: _ZN3c10"),
        (AssertionError(), "AssertionError"),
    ):
        optional.why_no_import.cache_clear()
        optional.load.cache_clear()
        _importing(monkeypatch, error)
        why = library.why_unavailable(CUDA)
        assert says in why and "\n" not in why
    optional.why_no_import.cache_clear()
    optional.load.cache_clear()
    _importing(monkeypatch, None)
    assert library.why_unavailable(CUDA) is None


def test_a_missing_cuda_home(hopper, monkeypatch):
    _importing(monkeypatch, None)
    module = sys.modules["loka_compile.lowering.libraries.deep_gemm"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.Path, "exists", lambda self: False)
    assert "set CUDA_HOME" in LIBRARIES["deep_gemm"].why_unavailable(CUDA)
    assert LIBRARIES["fbgemm"].why_unavailable(CUDA) is None


def test_what_tunes_itself_is_chosen_by_name_only(hopper, monkeypatch):
    """A plan is made during training: nobody wants to wait minutes for one library's search."""
    monkeypatch.setattr(optional, "why_no_import", lambda module, distribution: None)
    shape = GemmShape(256, 256, 256)

    def libraries(options: Options) -> set[str]:
        names, _ = candidates("fwd", shape, CUDA, options)
        return {name.partition(":")[0] for name in names}

    assert "fbgemm" in libraries(Options()) and "fbgemm_triton" not in libraries(Options())
    assert libraries(Options(libraries=("fbgemm_triton",))) == {"fbgemm_triton"}


def test_deep_gemm_allocates_its_workspace_when_it_is_asked_for(hopper, monkeypatch):
    """Not while a CUDA graph is recorded, to whose memory it would belong."""
    calls = []
    _importing(monkeypatch, None)
    optional.load("deep_gemm").get_num_sms = lambda: calls.append(1)
    assert LIBRARIES["deep_gemm"].why_unavailable(CUDA) is None
    assert LIBRARIES["deep_gemm"].why_unavailable(CUDA) is None
    assert calls == [1]

    def broken():
        raise RuntimeError("no memory")

    deep_gemm._why_no_workspace.cache_clear()
    optional.load("deep_gemm").get_num_sms = broken
    assert "RuntimeError: no memory" in LIBRARIES["deep_gemm"].why_unavailable(CUDA)


def test_other_capabilities(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    for name in ("fbgemm", "fbgemm_triton", "deep_gemm"):
        assert "compute capability 8.9" in LIBRARIES[name].why_unavailable(CUDA)
    torch_library = LIBRARIES["torch"]
    assert torch_library.why_no_recipe("rowwise", CUDA) is None
    assert "9.0" in torch_library.why_no_recipe("blockwise", CUDA)


def test_block_scales_of_torch_need_cuda_12_9(hopper, monkeypatch):
    for cuda, fine in (("13.0", True), ("12.9", True), ("12.8", False), (None, False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        why = LIBRARIES["torch"].why_no_recipe("blockwise", CUDA)
        assert (why is None) is fine


@pytest.mark.parametrize(
    ("distribution", "version", "torch_version", "wanted"),
    [
        ("fbgemm-gpu-genai", "1.6.0", (2, 11), None),
        ("fbgemm-gpu-genai", "1.9.0", (2, 11), "2.14"),
        ("fbgemm-gpu-genai", "1.6.0", (2, 14), "2.11"),
        ("sgl-deep-gemm", "0.1.5.post1", (2, 11), None),
        ("sgl-deep-gemm", "0.1.5.post1", (2, 12), None),
        ("sgl-deep-gemm", "0.1.5.post2", (2, 11), "2.13"),
        ("sgl-deep-gemm", "0.2.5", (2, 11), "2.14"),
        ("sgl-deep-gemm", "0.2.5", (2, 14), None),
        ("sgl-deep-gemm", "9.9", (2, 11), None),
        ("sgl-deep-gemm", "", (2, 11), None),
        ("torchao", "0.18.0", (2, 11), None),
    ],
)
def test_pairings(distribution, version, torch_version, wanted, monkeypatch):
    monkeypatch.setattr(_compat.versions, "TORCH", torch_version)
    why = _compat.why_wrong_pairing(distribution, version)
    assert (why is None) if wanted is None else (f"torch {wanted}" in why)


def test_a_wrong_pairing_shows_without_hardware(monkeypatch):
    monkeypatch.setattr(type(LIBRARIES["deep_gemm"]), "version", lambda self: "0.2.5", raising=True)
    monkeypatch.setattr(_compat.versions, "TORCH", (2, 11))
    row = next(r for r in availability("cpu") if r["library"] == "deep_gemm")
    assert not row["available"]
    assert "no FP8 hardware" in row["reason"] and "is built for torch 2.14" in row["reason"]


def test_nothing_is_imported_with_the_package():
    import subprocess

    code = (
        "import sys, loka_compile, loka_compile.lowering.libraries as l; l.availability('cpu');"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('fbgemm_gpu', 'deep_gemm')];"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
