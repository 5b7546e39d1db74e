"""First use: right kernels pass, wrong, failing and hanging ones get a reason."""

from __future__ import annotations

import pytest
import torch

from loka_compile.lowering import first_use
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.recipes import EMULATED

CPU = torch.device("cpu")
ROW = "torch:rowwise" + EMULATED
PLAIN = GemmShape(64, 128, 128)
ODD = GemmShape(7, 96, 80)


@pytest.fixture(autouse=True)
def _fresh():
    first_use.forget()
    yield
    first_use.forget()


@pytest.mark.parametrize("direction", ["fwd", "dgrad", "wgrad"])
def test_a_right_kernel_passes_and_runs_once(direction, monkeypatch):
    assert first_use.why_failed(ROW, direction, PLAIN, torch.bfloat16, CPU) is None
    monkeypatch.setattr(first_use, "run_and_compare", lambda *_: "run again")
    assert first_use.why_failed(ROW, direction, PLAIN, torch.bfloat16, CPU) is None


def test_what_cannot_run_here_is_not_tried():
    why = first_use.why_failed("torch:rowwise", "fwd", PLAIN, torch.bfloat16, CPU)
    assert why is not None and "no FP8 hardware" in why
    narrow = GemmShape(64, 128, 1)
    assert "N = 1" in str(first_use.why_failed(ROW, "fwd", narrow, torch.bfloat16, CPU))


def test_a_kernel_that_raises(monkeypatch):
    def bad(*_):
        raise RuntimeError("bad launch\nmore")

    monkeypatch.setitem(first_use._FUNCTIONS, "fwd", bad)
    why = first_use.why_failed(ROW, "fwd", PLAIN, torch.bfloat16, CPU)
    assert why == "first use failed: RuntimeError: bad launch"


def test_one_wrong_small_row_is_seen():
    want = torch.randn(8, 16) * torch.logspace(-6, 2, 8).unsqueeze(1)
    assert first_use.why_wrong(want * 1.01, want) is None
    wrong = want.clone()
    wrong[0] *= 2
    assert "differs" in str(first_use.why_wrong(wrong, want))
    assert "shape" in str(first_use.why_wrong(want[:4], want))
    wrong[0] = float("nan")
    assert "non-finite" in str(first_use.why_wrong(wrong, want))


def test_odd_shapes_go_through_a_child_process(monkeypatch):
    asked = []
    real = first_use._in_children
    monkeypatch.setattr(first_use, "_in_children", lambda keys: (asked.extend(keys), real(keys))[1])
    wanted = [(ROW, d, ODD, torch.bfloat16) for d in ("fwd", "wgrad")]
    assert first_use.check(wanted, CPU) == [None, None]
    assert len(asked) == 2


def test_a_child_that_hangs_is_a_reason(monkeypatch):
    """Starting Python takes longer than this limit: a child that does not answer."""
    monkeypatch.setattr(first_use, "LIMIT_SECONDS", 0.05)
    why = first_use.why_failed(ROW, "fwd", ODD, torch.bfloat16, CPU)
    assert why is not None and "did not return within" in why
