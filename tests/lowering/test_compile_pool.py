"""Which launches compile to the same code, and the processes that compile them."""

from __future__ import annotations

import math
import time

import pytest
import torch

pytest.importorskip("triton")

from loka_compile.kernels.tiles import Config
from loka_compile.lowering import compile_pool
from loka_compile.lowering import tune
from loka_compile.lowering.compile_pool import distinct
from loka_compile.lowering.compile_pool import run_all

CPU = torch.device("cpu")
TILE = Config(64, 128, 1, 4, 3)


def test_sizes_that_triton_does_not_tell_apart_compile_once() -> None:
    jobs = [(1024, k, n, "y", TILE) for k, n in ((4096, 2048), (2048, 2560), (256, 7680))]
    assert len(distinct(jobs, CPU)) == 1
    # One block is a constant, sixteen a multiple of 16; forms, tiles and ragged blocks differ.
    more = [(1024, 4096, n, "y", TILE) for n in (256, 4096)] + [(1024, 4096, 2048, "y8", TILE)]
    more += [(1024, 4096, 2048, "y", Config(128, 128, 1, 8, 3)), (1024, 4096, 2049, "y", TILE)]
    assert len(distinct(jobs + more, CPU)) == 6


def test_a_tail_that_is_split_is_other_code(monkeypatch) -> None:
    monkeypatch.setattr(compile_pool, "programs_of", lambda device: 132)
    tile = Config(64, 128, 2, 4, 3)
    jobs = [(m, 4096, 256, "y", tile) for m in (64 * 64, 64 * 140)]
    assert len(distinct(jobs, CPU)) == 2


def test_jobs_are_what_is_tuned() -> None:
    jobs = tune.jobs([(1000, 512, 512)], CPU, ["y", "y8"])
    assert {job[:4] for job in jobs} == {(1024, 512, 512, form) for form in ("y", "y8")}


def test_calls_run_in_processes_and_a_failure_costs_no_other() -> None:
    assert run_all(math.sqrt, [(4.0,), (-1.0,), (9.0,)]) == 2


def test_time_is_bounded() -> None:
    begun = time.monotonic()
    # Those that had begun are waited for, the others never begin.
    assert run_all(time.sleep, [(1.0,)] * 60, seconds=0.5) < 60
    assert time.monotonic() - begun < 30
