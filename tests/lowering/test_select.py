"""The choice per direction, from made-up measurements."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from dataclasses import replace

import pytest
import torch

from loka_compile.errors import BadOptionError
from loka_compile.errors import PatternMatchesNothingError
from loka_compile.errors import UnknownKernelError
from loka_compile.lowering import select
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.lowering.select import Candidate
from loka_compile.options import Options
from loka_compile.probe.quantify import Errors

CPU = torch.device("cpu")
SHAPE = GemmShape(32, 64, 48)
GOOD = Errors(0.1, 0.05, 0.06, 0.0, 0.0, 28.0, 0.04, non_finite=0, samples=8)
BAD = replace(GOOD, mere_clamped=0.5, mere_clamped_upper=0.6)
REAL = Options()
EMULATE = Options(emulate=True)


def candidate(kernel: str, us: float | None = None, errors: Errors = GOOD) -> Candidate:
    return Candidate(kernel, errors, us)


def test_the_fastest_of_those_that_pass():
    found = [
        candidate("torch:tensorwise", 5.0, BAD),
        candidate("torch:rowwise", 8.0),
        candidate("torchao:rowwise", 7.0),
    ]
    choice = select.choose(found, 10.0, REAL, [])
    assert choice.kernel == "torchao:rowwise" and choice.library == "torchao"
    assert choice.recipe == "rowwise" and choice.source == "measured" and choice.reason == ""
    assert choice.us == 7.0 and choice.speedup == pytest.approx(10 / 7)


@pytest.mark.parametrize(("us", "fp8"), [(9.5, True), (9.6, False), (20.0, False)])
def test_minimum_speedup(us, fp8):
    choice = select.choose([candidate("torch:rowwise", us)], 10.0, REAL, [])
    assert choice.is_fp8 is fp8
    if not fp8:
        assert choice.reason.startswith("torch:rowwise: speedup") and choice.us == us


def test_without_times_nothing_is_taken_unless_asked():
    found = [candidate("torch:rowwise")]
    refused = select.choose(found, None, Options(tune="never"), [])
    assert not refused.is_fp8 and "not timed" in refused.reason
    taken = select.choose(found, None, Options(tune="never", min_speedup=0), [])
    assert taken.kernel == "torch:rowwise" and taken.source == "untimed" and taken.speedup is None


def test_emulation_has_no_speed_gate():
    choice = select.choose([candidate("torch:rowwise")], None, EMULATE, [])
    assert choice.source == "emulated" and choice.kernel == "torch:rowwise"
    assert not select.choose([candidate("torch:rowwise", None, BAD)], None, EMULATE, []).is_fp8


def test_without_times_accuracy_then_order_decides():
    better = replace(GOOD, mere_clamped=0.02)
    found = [candidate("torch:tensorwise"), candidate("torch:rowwise", None, better)]
    assert select.choose(found, None, EMULATE, []).kernel == "torch:rowwise"
    # 5 % apart is noise: the first stands.
    near = replace(GOOD, mere_clamped=GOOD.mere_clamped / 1.05)
    found = [candidate("torch:tensorwise"), candidate("torch:rowwise", None, near)]
    assert select.choose(found, None, EMULATE, []).kernel == "torch:tensorwise"


def test_refusals_show_the_best_refused_one():
    worse = replace(BAD, mere_clamped=0.9)
    found = [candidate("torch:tensorwise", 5.0, worse), candidate("torch:rowwise", 5.0, BAD)]
    choice = select.choose(found, 10.0, REAL, [])
    assert choice.kernel == HIGH_PRECISION and choice.library == "torch"
    assert choice.reason.startswith("torch:rowwise: clamped MERE")
    assert choice.mere_clamped == 0.5


def test_no_candidate_says_why():
    assert select.choose([], None, REAL, ["a", "b"]).reason == "a; b"
    assert select.choose([], None, REAL, []).reason == "no kernel offers this"


def test_choices_are_strict_json():
    """inf and NaN are no JSON: a browser would refuse the whole report."""
    errors = replace(BAD, mere=math.inf, mere_clamped=math.nan)
    choice = select.choose([candidate("torch:rowwise", 5.0, errors)], 10.0, REAL, [])
    assert "nan" not in json.dumps(asdict(choice), allow_nan=False).split("reason")[0].lower()


def test_candidates_on_a_cpu_need_emulation():
    names, reasons = select.candidates("fwd", SHAPE, CPU, REAL)
    assert names == [] and any("emulate=True" in r for r in reasons)
    chain = replace(SHAPE, epilogue="block_norm:48:hard_swish")
    names, _ = select.candidates("fwd", chain, CPU, EMULATE)
    # Kernels of other libraries that compute the same are no choice where all is emulated.
    assert names == [k for k in kernel_names() if k.split(":")[0] in ("loka", "torch", "torchao")]
    asked = Options(emulate=True, libraries=("deep_gemm",))
    assert select.candidates("fwd", SHAPE, CPU, asked)[0] == ["deep_gemm:blockwise"]


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


def _never(*_: str) -> None:
    raise AssertionError("a forced direction is not measured")


def test_forced_choice_is_not_measured():
    options = Options(force={"*": "torchao:rowwise"})
    chosen = select.choose_site("a", SHAPE, CPU, options, _never, _never)
    for direction in DIRECTIONS:
        choice = chosen[direction]
        assert (choice.kernel, choice.library, choice.recipe) == (
            "torchao:rowwise",
            "torchao",
            "rowwise",
        )
        assert choice.source == "forced"


def test_forced_on_a_shape_that_cannot_run_stays_high():
    """A head of width 1 under force={"*": ...}: no crash in the kernel, and the reason is said."""
    options = Options(force={"*": "torch:rowwise"})
    chosen = select.choose_site("a", GemmShape(32, 64, 1), CPU, options, _never, _never)
    for direction in DIRECTIONS:
        assert not chosen[direction].is_fp8
        assert "forced torch:rowwise: N = 1" in chosen[direction].reason
    options = Options(force={"*": "torchao:rowwise_with_gw_hp"})
    chosen = select.choose_site("a", SHAPE, CPU, options, _never, _never)
    assert chosen["fwd"].is_fp8 and not chosen["wgrad"].is_fp8
    options = Options(force={"*": HIGH_PRECISION})
    chosen = select.choose_site("a", SHAPE, CPU, options, _never, _never)
    assert {c.library for c in chosen.values()} == {"torch"}


def test_every_direction_is_chosen_on_its_own():
    def quantify(direction: str, kernel: str) -> Errors:
        return BAD if direction == "wgrad" else GOOD

    chosen = select.choose_site("a", SHAPE, CPU, EMULATE, quantify, _never)
    assert chosen["fwd"].is_fp8 and chosen["dgrad"].is_fp8 and not chosen["wgrad"].is_fp8


def test_high_precision_is_timed_once_per_direction():
    timed: list[tuple[str, str]] = []

    def latency(direction: str, kernel: str) -> float:
        timed.append((direction, kernel))
        return 10.0 if kernel == HIGH_PRECISION else 5.0

    # min_speedup as it is, "real" kernels: pretend that the CPU can run them.
    with pytest.MonkeyPatch.context() as patch:
        for library in select.LIBRARIES.values():
            patch.setattr(library, "why_unavailable", lambda device: None, raising=False)
            patch.setattr(library, "why_no_recipe", lambda recipe, device: None, raising=False)
        chosen = select.choose_site("a", SHAPE, CPU, REAL, lambda *_: GOOD, latency)
    assert [d for d, k in timed if k == HIGH_PRECISION] == list(DIRECTIONS)
    assert all(c.speedup == 2.0 and c.source == "measured" for c in chosen.values())


def test_patterns_that_match_nothing():
    for option in ("heads", "exclude"):
        with pytest.raises(PatternMatchesNothingError, match=r"towr\.\*"):
            select.check_patterns(["tower.0"], Options(**{option: ("towr.*",)}))
    with pytest.raises(PatternMatchesNothingError):
        select.check_patterns(["tower.0"], Options(force={"towr.*": "torch:rowwise"}))
    select.check_patterns(["tower.0"], Options(exclude=("tower.*",)))
