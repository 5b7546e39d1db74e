"""Which kernels may be chosen for a site, and the user's patterns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka_compile import _compat
from loka_compile.errors import BadOptionError
from loka_compile.errors import PatternMatchesNothingError
from loka_compile.errors import UnknownKernelError
from loka_compile.lowering import select
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options

CPU = torch.device("cpu")
SHAPE = GemmShape(32, 64, 48)
REAL = Options()
EMULATE = Options(emulate=True)


def test_candidates_on_a_cpu_need_emulation():
    names, reasons = select.candidates("fwd", SHAPE, CPU, REAL)
    assert names == [] and any("emulate=True" in r for r in reasons)
    chain = replace(SHAPE, epilogue="block_norm:48:hard_swish")
    names, _ = select.candidates("fwd", chain, CPU, EMULATE)
    # Kernels of other libraries that compute the same are no choice where all is emulated.
    own = ("loka", "torch", "torchao")
    assert names == [k for k in kernel_names() if k.split(":")[0] in own and k != "loka:blockwise"]
    asked = Options(emulate=True, libraries=("deep_gemm",))
    assert select.candidates("fwd", SHAPE, CPU, asked)[0] == ["deep_gemm:blockwise"]


def test_our_own_kernel_is_offered_for_exact_epilogues_where_it_runs(monkeypatch):
    exact = replace(SHAPE, epilogue="pointwise:relu+bias")
    assert not any(k.startswith("loka:") for k in select.candidates("fwd", exact, CPU, EMULATE)[0])
    monkeypatch.setattr(_compat, "why_no_fp8", lambda device: None)
    monkeypatch.setattr(_compat, "why_no_triton", lambda: None)
    real = Options(libraries=("loka",))
    assert select.candidates("fwd", exact, CPU, real)[0] == ["loka:tensorwise", "loka:rowwise"]
    # A recipe that is tried on request alone.
    asked = replace(real, recipes=("blockwise",))
    assert select.candidates("fwd", exact, CPU, asked)[0] == ["loka:blockwise"]
    assert select.candidates("fwd", SHAPE, CPU, real)[0] == []
    assert select.candidates("dgrad", exact, CPU, real)[0] == []


def test_candidates_honour_options_and_shapes():
    only = Options(emulate=True, libraries=("torch",), recipes=("rowwise",))
    assert select.candidates("dgrad", SHAPE, CPU, only)[0] == ["torch:rowwise"]
    names, reasons = select.candidates("fwd", GemmShape(32, 64, 9), CPU, EMULATE)
    assert names == [] and len(reasons) == 1
    assert reasons[0].startswith("N = 9 is not a positive multiple of 16")
    assert select.candidates("fwd", GemmShape(32, 64, 15), CPU, EMULATE)[0]
    names, reasons = select.candidates("wgrad", SHAPE, CPU, EMULATE)
    # A recipe that keeps a direction high is no candidate there, and no reason against the site.
    assert "torchao:rowwise_with_gw_hp" not in names and reasons == []


def test_why_a_site_stays_high():
    options = Options(exclude=("tower.*",))
    assert select.why_high("a", False, "", options) is None
    assert select.why_high("tower.3", False, "", options) == "excluded by option"
    assert "head" in select.why_high("a", True, "", options)
    assert select.why_high("tower.3", True, "shape", options) == "shape"


def test_forced_kernels_by_pattern_and_direction():
    options = Options(force={"a.*": "torch:rowwise", "a.1": {"wgrad": HIGH_PRECISION}})
    assert select.forced("a.0", options) == dict.fromkeys(DIRECTIONS, "torch:rowwise")
    assert select.forced("a.1", options)["wgrad"] == HIGH_PRECISION
    assert select.forced("b", options) == {}
    with pytest.raises(UnknownKernelError):
        select.forced("a", Options(force={"a": "torch:rowwize"}))
    with pytest.raises(BadOptionError, match="fwd, dgrad, wgrad"):
        select.forced("a", Options(force={"a": {"forward": "torch:rowwise"}}))


def test_patterns_of_shapes():
    options = Options(exclude=("K=64,N=3?",), force={"N=48": "torch:rowwise"})
    assert select.why_high("a", False, "", options, (64, 32)) == "excluded by option"
    assert select.why_high("a", False, "", options, (65, 32)) is None
    assert select.why_high("a", False, "", options) is None
    assert set(select.forced("a", options, (7, 48)).values()) == {"torch:rowwise"}
    assert select.forced("a", options, (48, 7)) == {}
    select.check_patterns({"a": (64, 32)}, options, {"b": (8, 48)})
    with pytest.raises(PatternMatchesNothingError, match=r"N=48.*a \(K=64,N=32\)"):
        select.check_patterns({"a": (64, 32)}, options)
    for option, pattern in (("exclude", "M=64"), ("exclude", "K=64,x"), ("heads", "N=1")):
        with pytest.raises(BadOptionError, match=pattern):
            Options.parse({option: [pattern]}, None)


def test_patterns_that_match_nothing():
    for option in ("heads", "exclude"):
        with pytest.raises(PatternMatchesNothingError, match=r"towr\.\*"):
            select.check_patterns({"tower.0": (64, 32)}, Options(**{option: ("towr.*",)}))
    with pytest.raises(PatternMatchesNothingError):
        select.check_patterns({"tower.0": (64, 32)}, Options(force={"towr.*": "torch:rowwise"}))
    select.check_patterns({"tower.0": (64, 32)}, Options(exclude=("tower.*",)))
