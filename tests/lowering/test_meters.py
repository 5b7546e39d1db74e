"""Maxima of plain steps: what is stored, and that a GPU runs no kernel more for it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka_compile.lowering import meters

SCRIPT = Path(__file__).parents[1] / "helpers" / "cuda_code.py"


def halves(cells: torch.Tensor, at: int) -> torch.Tensor:
    """Newest and largest at `at`."""
    return cells.view(torch.float32)[2 * at : 2 * at + 2]


def test_newest_and_largest_are_kept() -> None:
    cells = torch.zeros(meters.CELLS, dtype=torch.int64)
    for value, largest in ((2.0, 2.0), (1e-40, 2.0), (3e38, 3e38), (math.inf, math.inf)):
        meters.keep(torch.tensor(value), cells, meters.GRADIENT)
        want = torch.tensor([value, largest])
        assert torch.equal(halves(cells, meters.GRADIENT), want)
    assert torch.equal(halves(cells, meters.X), torch.zeros(2))
    for value in (math.nan, 1.0):
        meters.keep(torch.tensor(value), cells, meters.GRADIENT)
        newest, most = halves(cells, meters.GRADIENT).tolist()
        assert math.isnan(most) and (math.isnan(newest) or newest == value)


def test_neighbours_lie_in_different_tensors() -> None:
    for sites in (1, 3, 8, 9, 30):
        tensors, rows, _ = meters.shape_of(sites)
        places = [meters.place_of(index, sites) for index in range(sites)]
        assert len(set(places)) == sites and tensors <= meters.TENSORS
        assert all(number < tensors and row < rows for number, row in places)
        for first in range(sites - tensors + 1):
            assert len({number for number, _ in places[first : first + tensors]}) == tensors


@pytest.mark.slow
def test_a_gpu_runs_no_kernel_more() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["with"] == found["without"] and min(found["with"]) > 0
