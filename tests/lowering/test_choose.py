"""The choice of one direction, from made-up measurements."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from dataclasses import replace

import pytest

from loka_compile.lowering import choose
from loka_compile.lowering.choose import Candidate
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.options import Options
from loka_compile.probe.quantify import Errors

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
    choice = choose.choose(found, 10.0, REAL, [])
    assert choice.kernel == "torchao:rowwise" and choice.library == "torchao"
    assert choice.recipe == "rowwise" and choice.source == "measured" and choice.reason == ""
    assert choice.us == 7.0 and choice.speedup == pytest.approx(10 / 7)


@pytest.mark.parametrize(("us", "fp8"), [(9.5, True), (9.6, False), (20.0, False)])
def test_minimum_speedup(us, fp8):
    choice = choose.choose([candidate("torch:rowwise", us)], 10.0, REAL, [])
    assert choice.is_fp8 is fp8
    if not fp8:
        assert choice.reason.startswith("torch:rowwise: speedup") and choice.us == us


def test_without_times_nothing_is_taken_unless_asked():
    found = [candidate("torch:rowwise")]
    refused = choose.choose(found, None, Options(tune="never"), [])
    assert not refused.is_fp8 and "not timed" in refused.reason
    taken = choose.choose(found, None, Options(tune="never", min_speedup=0), [])
    assert taken.kernel == "torch:rowwise" and taken.source == "untimed" and taken.speedup is None


def test_emulation_has_no_speed_gate():
    choice = choose.choose([candidate("torch:rowwise")], None, EMULATE, [])
    assert choice.source == "emulated" and choice.kernel == "torch:rowwise"
    assert not choose.choose([candidate("torch:rowwise", None, BAD)], None, EMULATE, []).is_fp8


def test_without_times_accuracy_then_order_decides():
    better = replace(GOOD, mere_clamped=0.02)
    found = [candidate("torch:tensorwise"), candidate("torch:rowwise", None, better)]
    assert choose.choose(found, None, EMULATE, []).kernel == "torch:rowwise"
    # 5 % apart is noise: the first stands.
    near = replace(GOOD, mere_clamped=GOOD.mere_clamped / 1.05)
    found = [candidate("torch:tensorwise"), candidate("torch:rowwise", None, near)]
    assert choose.choose(found, None, EMULATE, []).kernel == "torch:tensorwise"


def test_refusals_show_the_best_refused_one():
    worse = replace(BAD, mere_clamped=0.9)
    found = [candidate("torch:tensorwise", 5.0, worse), candidate("torch:rowwise", 5.0, BAD)]
    choice = choose.choose(found, 10.0, REAL, [])
    assert choice.kernel == HIGH_PRECISION and choice.library == "torch"
    assert choice.reason.startswith("torch:rowwise: clamped MERE")
    assert choice.mere_clamped == 0.5


def test_no_candidate_says_why():
    assert choose.choose([], None, REAL, ["a", "b"]).reason == "a; b"
    assert choose.choose([], None, REAL, []).reason == "no kernel offers this"


def test_choices_are_strict_json():
    """inf and NaN are no JSON: a browser would refuse the whole report."""
    errors = replace(BAD, mere=math.inf, mere_clamped=math.nan)
    choice = choose.choose([candidate("torch:rowwise", 5.0, errors)], 10.0, REAL, [])
    assert "nan" not in json.dumps(asdict(choice), allow_nan=False).split("reason")[0].lower()


def test_where_a_price_comes_from_is_said():
    table = Candidate("torch:rowwise", GOOD, 5.0, "table")
    assert choose.choose([table], 10.0, REAL, []).source == "table"
    failed = Candidate("torch:rowwise", GOOD, None, "failed", "RuntimeError: no workspace")
    choice = choose.choose([failed], 10.0, REAL, [])
    assert not choice.is_fp8 and "no workspace" in choice.reason
