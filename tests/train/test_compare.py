"""The comparison with stand-ins for the backend: who gets which weights, rows and figures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn

import loka_compile
from loka_compile.data import Schema
from loka_compile.data import Source
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Chunk
from loka_compile.demotion import FAILED
from loka_compile.files import write_text
from loka_compile.train import CompareConfig
from loka_compile.train import CompareResult
from loka_compile.train import TrainError
from loka_compile.train.cache import BatchCache
from loka_compile.train.compare import compare
from loka_compile.train.share import fp8_share
from loka_compile.train.share import given_up
from loka_compile.train.share import is_fp8
from loka_compile.train.summary import eval_from

SITES = [
    {
        "name": "dense.head.0",
        "M": 64,
        "K": 512,
        "N": 256,
        "dtype": "bfloat16",
        "count": 1,
        "fused": None,
        "directions": {
            "fwd": {"kernel": "torch:rowwise", "mere_clamped": 0.03, "speedup": None},
            "dgrad": {"kernel": "torch:rowwise", "mere_clamped": 0.05, "speedup": None},
            "wgrad": {"kernel": "high_precision", "reason": "error 0.31 over 0.2"},
        },
    }
]


class Coins(Source):
    """Label = whether the id is odd, in nine cases of ten."""

    name = "coins"
    schema = Schema((CategoricalField("a", 8), CategoricalField("b", 4)), ("x",), "y")

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.n = rows

    def _chunks(self) -> Iterator[Chunk]:
        r = np.random.default_rng(0)
        ids = np.stack([r.integers(8, size=self.n), r.integers(4, size=self.n)], axis=1)
        label = (ids[:, 0] % 2) ^ (r.random(self.n) < 0.1)
        self.counts.read = self.n
        yield Chunk(ids, r.random((self.n, 1)), label)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Eager stand-ins; the plan becomes active at the ninth forward, as in the real backend."""
    seen = SimpleNamespace(compiled=[], modded=[], weights=[])
    # Not by id: a later arm's module may be given that of one that is gone.
    forwards: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def compile_(module: nn.Module, backend: str, options: Any = None) -> Any:
        seen.compiled.append((backend, options))
        seen.weights.append({k: v.clone() for k, v in module.state_dict().items()})

        def run(*args: torch.Tensor) -> torch.Tensor:
            forwards[module] = forwards.get(module, 0) + 1
            out = module(*args)
            return out * 1.01 if backend == "loka" and forwards[module] > 8 else out

        return run

    def apply_mods(module: nn.Module, **how: Any) -> SimpleNamespace:
        seen.modded.append(module)
        seen.how = how
        return SimpleNamespace(summary=lambda: "3 biases removed")

    def plan_of(module: nn.Module) -> SimpleNamespace:
        return SimpleNamespace(
            active=forwards.get(module, 0) > 8,
            save=lambda path: write_text(Path(path), "{}"),
        )

    @contextlib.contextmanager
    def explain() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            sites=SITES,
            changes=["5 LayerNorm -> BlockNorm"],
            text=lambda: "report",
            save=lambda path: write_text(Path(path), "report"),
        )

    monkeypatch.setattr(torch, "compile", compile_)
    for name, f in (("apply_mods", apply_mods), ("plan_of", plan_of), ("explain", explain)):
        # Not setattr: that would first import the real one.
        monkeypatch.setitem(loka_compile.__dict__, name, f)
    # Matrices this small gain nothing from a second thread, and wait long for one on a busy box.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield seen
    torch.set_num_threads(threads)


def run(rows: int = 1000, **change: Any) -> CompareResult:
    config = CompareConfig(
        **{"batch": 64, "windows": 5, "eval_from": 128, "device": "cpu"} | change
    )
    return compare(Coins(rows), config)


def test_three_arms_from_one_initialisation(backend: SimpleNamespace, tmp_path: Path) -> None:
    result = run(out=tmp_path / "run")
    assert list(result.arms) == ["original", "bf16_mods", "loka"]
    assert [b for b, _ in backend.compiled] == ["inductor", "inductor", "loka"]
    assert backend.compiled[2][1] == {"mods": "on", "emulate": True}
    first, *others = backend.weights
    for other in others:
        assert all(torch.equal(first[k], other[k]) for k in first)
    assert len(backend.modded) == 1  # the loka arm is given the model as written
    # The stand-in of the Mods changes nothing, so these arms agree to the last bit.
    assert result.mods_vs_original_percent == 0.0
    # The plan holds from step 8 (row 512): the headline begins there, not at eval_from.
    assert result.headline_rows == (512, 1000)
    assert result.rll_percent not in (None, 0.0)
    assert [w.plan_active for w in result.windows] == [False, False, False, True, True]
    assert [w.rll_percent == 0.0 for w in result.windows] == [True, True, False, False, False]
    assert result.fp8_share["steps"] == pytest.approx(8 / 16)
    assert result.fp8_share["flops"] == pytest.approx(8 / 16 * 2 / 3)
    assert result.config["eval_from"] == 128
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "plan.json",
        "report.html",
        "report.json",
        "report.txt",
    ]


def test_the_arms_with_mods_have_the_same(backend: SimpleNamespace) -> None:
    given = {"mods": ("hard_swish",), "keep": {"hard_swish": ("a",)}}
    run(options=given, arms=("bf16_mods", "loka"))
    assert backend.how == given
    assert backend.compiled[1][1] == {"emulate": True, **given}


def test_the_json_has_the_agreed_keys(backend: SimpleNamespace, tmp_path: Path) -> None:
    run().save(tmp_path / "deep" / "result.json")
    got = json.loads((tmp_path / "deep" / "result.json").read_text())
    assert {
        "arms",
        "rll_percent",
        "mods_vs_original_percent",
        "windows",
        "fp8_share",
        "sites",
        "env",
        "config",
        "data",
    } <= got.keys()
    assert {"log_loss", "ne", "auc", "examples_per_s"} <= got["arms"]["loka"].keys()
    assert {"start", "end", "plan_active", "rll_percent", "mods_vs_original_percent", "ne"} == got[
        "windows"
    ][0].keys()
    assert set(got["windows"][0]["ne"]) == set(got["arms"])
    assert set(got["fp8_share"]) == {"steps", "flops"}
    assert got["env"]["emulated"] is True
    assert got["data"] | {"rows": 1000, "bad_rows": 0, "unlabelled": 0} == got["data"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["result.json"]


def test_a_seed_repeats_and_another_differs(backend: SimpleNamespace) -> None:
    a, b, c = (run(arms=("original",), seed=s).arms["original"].log_loss for s in (1, 1, 2))
    assert a == b != c


def test_learning_happens(backend: SimpleNamespace) -> None:
    result = run(12_000, arms=("original",))
    ne = [w.ne["original"] for w in result.windows]
    # One label in ten is noise: the best possible NE is 0.47.
    assert ne[-1] < 0.5 < 0.6 < ne[0]


def test_one_arm_alone_leaves_the_comparisons_empty(backend: SimpleNamespace) -> None:
    result = run(arms=("original",))
    assert result.rll_percent is None
    assert result.mods_vs_original_percent is None
    assert result.fp8_share == {"steps": 0.0, "flops": 0.0}
    assert result.headline_rows == (128, 1000)


def test_without_a_step_under_the_plan_there_is_no_rll(backend: SimpleNamespace) -> None:
    result = run(limit=300)
    assert result.rll_percent is None
    assert result.whole_range["rll_percent"] == 0.0
    assert not any(w.plan_active for w in result.windows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ("orginal",)}, "unknown arm 'orginal'; use one of original, bf16_mods, loka"),
        ({"arms": ()}, "name each arm once"),
        ({"arms": ("loka", "loka")}, "name each arm once"),
        ({"scale": "huge"}, "tiny, small, base"),
        ({"model": "dcn"}, "unknown model .dcn.; use one of wukong, dcn_v2"),
        ({"batch": 0}, "batch is 0"),
        ({"plan": Path("absent.json")}, r"absent\.json: no such file"),
        ({"eval_from": 1000}, "there are 1000 rows"),
    ],
)
def test_mistakes_are_named(backend: SimpleNamespace, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        run(**change)


def test_a_cache_that_overflows_reads_again() -> None:
    kept, streamed = BatchCache(Coins(500), 64, None), BatchCache(Coins(500), 64, None, 1000)
    for cache in (kept, streamed):
        cache.fill()
        assert cache.rows == 500
    assert next(iter(kept)) is next(iter(kept))
    assert next(iter(streamed)) is not next(iter(streamed))
    for a, b in zip(kept, streamed, strict=True):
        assert torch.equal(a.categorical, b.categorical)


@pytest.mark.parametrize(
    ("kernel", "fp8"),
    [
        ("torch:rowwise", True),
        ("torchao:rowwise_with_gw_hp", True),
        ("high_precision", False),
        ("bf16", False),
        (None, False),
    ],
)
def test_which_kernels_count_as_fp8(kernel: str | None, fp8: bool) -> None:
    assert is_fp8({"kernel": kernel}) is fp8


def test_kernels_that_failed_on_the_way_are_told() -> None:
    lost = {"kernel": "high_precision", "reason": f"torch:rowwise {FAILED}OutOfMemory: 3 GiB"}
    site = {**SITES[0], "directions": {**SITES[0]["directions"], "dgrad": lost, "wgrad": None}}
    assert given_up(SITES) == []
    assert given_up([site]) == [
        "dense.head.0 dgrad: torch:rowwise failed at run time: OutOfMemory: 3 GiB"
    ]


def test_share_counts_calls_and_only_the_products_that_exist() -> None:
    first = {**SITES[0], "count": 3, "directions": {"fwd": {"kernel": "torch:rowwise"}}}
    plain = {**SITES[0], "directions": {d: {"kernel": "bf16"} for d in ("fwd", "dgrad")}}
    got = fp8_share([first, plain], np.array([False, True, True, True]))
    assert got["flops"] == pytest.approx(0.75 * 3 / 5)
    assert fp8_share([plain], np.ones(4, dtype=bool)) == {"steps": 0.0, "flops": 0.0}


@pytest.mark.parametrize(
    ("asked", "source", "rows", "want"),
    [
        (None, "kuairand", 222_866, 40_000),
        (None, "flights", 327_346, 65_469),
        (None, "flights", 60_000, 20_000),
        (None, "flights", 3_000, 1_000),
        (7, "flights", 60_000, 7),
        (0, "kuairand", 222_866, 0),
    ],
)
def test_where_the_headline_begins(asked: int | None, source: str, rows: int, want: int) -> None:
    assert eval_from(asked, source, rows) == want
