"""Which Mods are in force sticks to parameters, goes into the plan, and other Mods are told."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from torch import nn

import loka_compile
from loka_compile import loka_backend
from loka_compile.errors import BadOptionError
from loka_compile.errors import PatternMatchesNothingError
from loka_compile.errors import PlanFileError
from loka_compile.mod_set import EVERY
from loka_compile.mod_set import ModSet
from loka_compile.model_sites import look_at
from loka_compile.options import Options
from loka_compile.plan import Plan
from loka_compile.plan_diff import diff
from loka_compile.report.saved import load
from loka_compile.variant import Decided

SOME = ("block_norm", "hard_swish")
KEEP = {"no_bias": ["0"]}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 24), nn.Linear(24, 2)
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


def compile_(model: nn.Module, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend=loka_backend, options={"inner": "eager", **options})


def step(compiled: nn.Module) -> None:
    """One training step, after which nothing looks fresh."""
    compiled(torch.randn(8, 16)).square().mean().backward()
    with torch.no_grad():
        for p in compiled.parameters():
            p.add_(torch.randn_like(p))


def result(model: nn.Module, **options) -> torch.Tensor:
    with torch.no_grad():
        return compile_(model, **options)(torch.ones(3, 16))


@pytest.mark.parametrize(
    "options", [{"mods": SOME}, {"mods": "on", "keep": KEEP}, {"mods": "auto", "keep": KEEP}]
)
def test_train_eval_resume_and_serve_agree(options, caplog) -> None:
    model = Net()
    step(compile_(model, **options))
    plan = loka_compile.plan_of(model)
    assert plan.mods == (SOME if options["mods"] == SOME else EVERY)
    assert plan.kept == ({} if "keep" not in options else {"no_bias": ("0",)})
    baked = copy.deepcopy(model)
    loka_compile.apply_mods(baked, mods=plan.mods, keep=plan.kept)
    want = baked(torch.ones(3, 16)).detach()
    assert not torch.allclose(want, result(copy.deepcopy(model), mods="on"))
    caplog.clear()
    # Evaluation in the same process, without a word about Mods: what was trained is in force.
    torch.testing.assert_close(result(model), want)
    # Another process has the plan, or says so.
    resumed = copy.deepcopy(model)
    torch.testing.assert_close(result(resumed, plan=json.loads(json.dumps(plan.to_dict()))), want)
    served = copy.deepcopy(model)
    loka_compile.mark_modded(served, plan.mods, keep=plan.kept)
    torch.testing.assert_close(result(served), want)
    assert "another function" not in caplog.text


@pytest.mark.parametrize("given", [{"mods": "on"}, {"mods": SOME, "keep": {"block_norm": ["1"]}}])
def test_other_mods_than_the_plan_or_the_run_are_told(given, caplog) -> None:
    model = Net()
    step(compile_(model, mods=SOME))
    plan = loka_compile.plan_of(model)
    with caplog.at_level(logging.WARNING):
        result(copy.deepcopy(model), plan=plan, **given)
    assert "the plan was made with Mods on (block_norm, hard_swish)" in caplog.text
    assert "another function of the same parameters" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result(model, **given)
    assert "these parameters ran with Mods on (block_norm, hard_swish)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result(copy.deepcopy(model), plan=plan)
    assert "another function" not in caplog.text


def test_a_change_names_what_is_on_and_what_was_left_off(caplog) -> None:
    with caplog.at_level(logging.WARNING), loka_compile.explain() as seen:
        step(compile_(Net(), mods=("hard_swish", "no_bias"), keep=KEEP))
    assert "Left off: block_norm." in caplog.text
    assert "Kept as written for no_bias (option keep): 0." in caplog.text
    said = "on (options say mods=('no_bias', 'hard_swish')); on: no_bias, hard_swish; left off:"
    assert said in seen.text()


def test_a_saved_report_says_the_same(tmp_path) -> None:
    with loka_compile.explain() as seen:
        step(compile_(Net(), mods=("hard_swish", "no_bias"), keep=KEEP))
    path = seen.save(tmp_path / "report.json")
    assert load(path).summary() == seen.summary()
    body = json.loads(path.read_text())
    for decision in (graph["mods"] for graph in body["graphs"]):
        # As reports of before Mods had names.
        del decision["names"], decision["kept"]
    path.write_text(json.dumps(body))
    assert "Mods on (options say" in load(path).summary()


def test_a_site_says_what_a_switch_costs_it() -> None:
    with loka_compile.explain() as seen:
        step(compile_(Net(), mods=SOME))
    assert "bias kept, so the norm is not fused into this GEMM" in seen.why("0")
    with loka_compile.explain() as seen:
        step(compile_(Net(), mods=("no_bias",)))
    assert "Not fused: the layer_norm behind it is no block_norm" in seen.why("0")


def test_blocks_that_share_a_graph_may_keep_their_own() -> None:
    torch._dynamo.reset()
    blocks = nn.ModuleList(Block() for _ in range(3))
    with torch.no_grad():
        for p in blocks.parameters():
            p.add_(torch.randn_like(p))
    modded = copy.deepcopy(blocks)
    keep = {"no_bias": ["1.fc"], "block_norm": ["2.norm"]}
    loka_compile.apply_mods(modded, keep=keep, heads=())
    loka_compile.name_layers(blocks)
    x = torch.randn(4, 8)
    for block, want in zip(blocks, modded, strict=True):
        options = {"inner": "eager", "mods": "on", "keep": keep, "heads": ()}
        block.compile(backend=loka_backend, options=options)
        torch.testing.assert_close(block(x), want(x))
    kept = {m: set(layers) for m, layers in loka_compile.plan_of(blocks).kept.items()}
    assert kept == {"no_bias": {"1.fc"}, "block_norm": {"2.norm"}}


def test_parts_of_a_model_may_have_other_mods() -> None:
    model = nn.ModuleDict({"a": Net(), "b": Net(), "c": Net()})
    loka_compile.name_layers(model)
    for name, mods in (("a", "on"), ("b", SOME), ("c", "off")):
        step(compile_(model[name], mods=mods))
    plan = loka_compile.plan_of(model)
    assert [plan.mods_of([f"{name}.0"]) for name in "abc"] == [EVERY, SOME, None]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    apart = [loka_compile.plan_of(model[name]) for name in "abc"]
    merged = apart[0].merge(apart[1]).merge(apart[2])
    assert (merged.mods, merged.fewer, merged.parameters) == (
        plan.mods, plan.fewer, plan.parameters
    )  # fmt: skip


def test_a_look_without_running_has_the_same() -> None:
    options = Options.parse({"mods": SOME, "keep": {"block_norm": ["1"]}})
    seen = look_at(Net(), [torch.randn(4, 16)], torch.device("cpu"), options)
    assert seen.kept == {"block_norm": ("1",)}
    assert all("block_norm" not in (one.fused or "") for one in seen.found)
    whole = look_at(Net(), [torch.randn(4, 16)], torch.device("cpu"))
    assert next(one.fused for one in whole.found) == "0+block_norm+hard_swish"


# -- files, keys, mistakes ------------------------------------------------------------------------


def test_plans_of_before_mods_had_names() -> None:
    body = {**Plan().to_dict(), "version": 1}
    del body["fewer"], body["kept"]
    for old, new in ((True, EVERY), (False, ())):
        assert Plan.from_dict({**body, "mods": old}).mods == new
    with pytest.raises(PlanFileError, match=r"unknown Mod 'no_bais'; known: no_bias, block_norm"):
        Plan.from_dict({**Plan().to_dict(), "mods": ["no_bais"]})
    plans = Plan(mods=EVERY), Plan(mods=SOME, kept={"block_norm": ("1",)})
    assert list(diff(*plans)) == [
        "mods: on -> on (block_norm, hard_swish)",
        "kept: {} -> {'block_norm': ('1',)}",
    ]
    assert plans[0].digest() != plans[1].digest()


def test_cache_keys_differ_with_what_is_in_force() -> None:
    sets = [ModSet(), ModSet(EVERY), ModSet(SOME), ModSet(SOME, (("block_norm", "1"),))]
    assert len({Decided(mods).cache_key(Options()) for mods in sets}) == len(sets)


def test_what_may_be_said() -> None:
    said = {"auto": "auto", "on": "on", EVERY: "on", (): "off", "hard_swish": ("hard_swish",)}
    for given, want in said.items():
        assert Options.parse({"mods": given}).mods == want
    assert Options.parse({"mods": {"hard_swish", "no_bias"}}).mods == ("no_bias", "hard_swish")
    assert Options.parse({"keep": {"no_bias": "mlp.*"}}).keep == {"no_bias": ("mlp.*",)}


@pytest.mark.parametrize("mods", [["no_bais"], "strip", 3, {"no_bias": True}, None])
def test_a_wrong_name_lists_the_names(mods) -> None:
    for call in (
        lambda: Options.parse({"mods": mods}),
        lambda: loka_compile.apply_mods(Net(), mods=mods),
        lambda: loka_compile.mark_modded(Net(), mods),
    ):
        with pytest.raises(BadOptionError, match="no_bias, block_norm, hard_swish"):
            call()


@pytest.mark.parametrize("keep", [["0"], {"bias": ["0"]}, {"no_bias": 3}, {"no_bias": [3]}])
def test_a_wrong_keep_is_named(keep) -> None:
    with pytest.raises(BadOptionError, match="option 'keep'"):
        Options.parse({"keep": keep})


def test_a_pattern_that_keeps_nothing_is_an_error() -> None:
    keep = {"no_bias": ["0", "mlp.*"]}
    for call in (
        lambda: loka_compile.apply_mods(Net(), keep=keep),
        lambda: loka_compile.mark_modded(Net(), keep=keep),
        lambda: result(Net(), mods="on", keep=keep),
    ):
        with pytest.raises(Exception, match=r"keep\['no_bias'\].*'mlp\.\*' matches no layer") as e:
            call()
        causes = (e.value, e.value.__cause__, getattr(e.value, "inner_exception", None))
        assert any(isinstance(one, PatternMatchesNothingError) for one in causes)
