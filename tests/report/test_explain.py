"""`explain()`: hand-made graphs, and one model end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from loka_compile.errors import LokaError
from loka_compile.ledger import LEDGER
from loka_compile.mod_set import ON
from loka_compile.mods import Decision
from loka_compile.options import Environment
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord
from loka_compile.plans import plan_of
from loka_compile.report import collect
from loka_compile.report.collect import GraphReport
from loka_compile.report.explain import Report
from loka_compile.report.explain import explain

OFF = Environment(False, (), None)
NUMBERS = ("mere", "mere_clamped", "bad_rows", "speedup")
EMPTY = {"kernel": "high_precision", **dict.fromkeys(NUMBERS), "source": "", "reason": ""}
HEAD = {**EMPTY, "reason": "a head stays in high precision"}
MEASURED = {"mere": 0.25, "mere_clamped": 0.0625, "bad_rows": 0.005, "source": "emulated"}
FP8 = {**EMPTY, **MEASURED, "kernel": "torch:rowwise"}


def site(name, fwd, dgrad=None, wgrad=None, **other):
    directions = {"fwd": fwd, "dgrad": dgrad or fwd, "wgrad": wgrad or fwd}
    row = {"name": name, "M": 64, "K": 32, "N": 16, "dtype": "float32", "count": 1, "fused": None}
    return {**row, **other, "directions": directions}


def graph(label="training graph of 2 linears (mlp.0, head)", **other):
    strip = PassRecord("strip_bias", 1.0, 12, 12)
    strip.changes = [Note(f"mlp.{i}", "bias removed", "model.py:7") for i in range(8)]
    swish = PassRecord("hard_swish", 1.0, 12, 12)
    swish.changes = [Note("model", "silu -> hardswish", "model.py:9")] * 3
    swish.refusals = [Note("gate", "the sigmoid has other readers", "model.py:41")]
    fuse = PassRecord("fuse", 1.0, 12, 10, rewrites=[Note("mlp.0", "fused linear + block_norm")])
    dispatch = PassRecord("dispatch", 1.0, 10, 10, rewrites=[Note("mlp.0", "all three: x")])
    refused = {**EMPTY, "mere_clamped": 0.31, "reason": "torch:rowwise: clamped MERE 0.31 >= 0.2"}
    return GraphReport(
        label,
        [PassRecord("canonicalize", 0.5, 12, 12)],
        OFF,
        sites=[site("mlp.0", FP8, FP8, refused, fused="mlp.0+block_norm"), site("head", HEAD)],
        records=[strip, swish, fuse, dispatch],
        variants=["mods on, 1 FP8 sites"],
        notes=["plan made after 8 probed steps", "mlp.0: layers that share this graph differ"],
        mods=Decision(ON, "options say mods='on'"),
        **other,
    )


def report_of(*graphs):
    report = Report()
    for one in graphs:
        report.add(one)
    return report


def test_the_block_gathers_each_graph_once_and_makes_callables_bind_again():
    one, version = graph(), LEDGER.version
    with explain() as report:
        assert LEDGER.version > version
        collect.seen(one)
        collect.seen(one)
        # Equal by value, yet another graph.
        collect.seen(graph())
    collect.seen(graph())
    assert len(report.graphs) == 2


def test_the_block_closes_its_report_when_the_model_raises():
    with pytest.raises(RuntimeError), explain():
        raise RuntimeError("model")
    assert not collect._OPEN


def test_changes_name_kind_count_and_layers_and_eval_graphs_add_nothing():
    report = report_of(graph(), graph("no grad graph of 2 linears (mlp.0, head)"))
    layers = ", ".join(f"mlp.{i}" for i in range(6))
    assert report.changes == [
        f"bias removed: 8 ({layers}, ...)",
        "silu -> hardswish: 3 (model x3)",
    ]
    assert report.rewrites == ["fused linear + block_norm: 1 (mlp.0)"]
    assert report.refusals == ["gate: the sigmoid has other readers (at model.py:41)"]
    assert [s["name"] for s in report.sites] == ["mlp.0", "head"]


def test_a_pass_that_failed_is_among_the_refusals():
    one = graph()
    one.records.append(PassRecord("theirs", error='Traceback\n  File "x.py"\nValueError: no\n'))
    assert report_of(one).refusals[-1] == "pass theirs failed and was undone: ValueError: no"


def test_why_tells_choice_error_reason_fusion_and_changes():
    why = report_of(graph()).why("mlp.0")
    for said in (
        "a linear of M=64, K=32, N=16 in float32",
        "Fused as mlp.0+block_norm.",
        "fwd, dgrad: torch:rowwise (emulated), clamped MERE 0.0625, MERE 0.25, 0.5 % bad rows, "
        "speedup n/a.",
        "wgrad: high precision, because torch:rowwise: clamped MERE 0.31 >= 0.2 "
        "(the refused kernel: clamped MERE 0.31).",
        "Changed there: bias removed (at model.py:7).",
        "Rewritten there: fused linear + block_norm.",
        "mlp.0: layers that share this graph differ.",
    ):
        assert said in why
    assert (
        report_of(graph())
        .why("head")
        .endswith("fwd, dgrad, wgrad: high precision, because a head stays in high precision.")
    )


def test_unknown_names_get_the_nearest_one():
    report = report_of(graph(replay=lambda: [PassRecord("strip_bias", before="a\n", after="b\n")]))
    with pytest.raises(LokaError, match=r"no site 'mpl.0'; did you mean 'mlp.0'"):
        report.why("mpl.0")
    with pytest.raises(LokaError, match="did you mean 'strip_bias'"):
        report.diff("strip_bais")
    with pytest.raises(LokaError, match="no graph 3"):
        report.diff(graph=3)
    with pytest.raises(LokaError, match="call the compiled model in the block"):
        Report().why("mlp.0")
    with pytest.raises(LokaError, match="call the compiled model in the block"):
        report_of(graph()).diff()


def test_text_has_every_section_in_order():
    text = report_of(graph()).text()
    parts = [
        "Graph 0: training graph of 2 linears (mlp.0, head)",
        "Mods: on (options say mods='on')",
        "canonicalize",
        "12 -> 10",
        "note: plan made after 8 probed steps",
        "Model changes (Mods: the function is different)",
        "bias removed: 8",
        "Exact rewrites (the same function)",
        "fused linear + block_norm",
        "Left alone, and why",
        "gate: the sigmoid has other readers (at model.py:41)",
        "GEMM sites",
        "torch:rowwise",
        "coverage: 2 linears found, 1 fused, 1 with FP8 in some direction, 1 in high precision "
        "(1 x a head stays in high precision)",
    ]
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)


def test_summary_is_short_and_an_empty_report_says_how_to_fill_it():
    summary = report_of(graph()).summary()
    assert len(summary.splitlines()) <= 8 and "bias removed: 8" in summary
    assert "no graph was seen" in Report().text()


def test_save_text_and_json(tmp_path):
    one = graph()
    one.sites[0]["directions"]["fwd"] = {**FP8, "mere": math.inf}
    report = report_of(one)
    assert report.save(tmp_path / "deep" / "r.txt").read_text() == report.text()
    body = json.loads(report.save(str(tmp_path / "r.json")).read_text())
    assert body["sites"][0]["directions"]["fwd"]["mere"] == "Infinity"
    assert body["coverage"]["linears"] == 2
    assert body["graphs"][0]["passes"][1]["name"] == "strip_bias"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "r.json"]


@pytest.mark.parametrize("name", ["r.htm", "r"])
def test_an_unknown_file_ending_is_refused_and_writes_nothing(tmp_path, name):
    with pytest.raises(LokaError, match=r"\.txt, \.json or \.html"):
        report_of(graph()).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_kept_text_of_canonicalize_is_part_of_the_whole_diff():
    one = graph(replay=lambda: [PassRecord("strip_bias", before="b\n", after="c\n")])
    one.prepared = [PassRecord("canonicalize", before="a\n", after="b\n")]
    report = report_of(one)
    assert "-a\n+c\n" in report.diff()
    assert "-a\n+b\n" in report.diff("canonicalize")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU())
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.mlp(x))


def compiled_small():
    from loka_compile.backend import loka_backend

    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"inner": "aot_eager", "mods": "on", "emulate": True}
    return torch.compile(Small(), backend=loka_backend, options=options)


def test_end_to_end():
    x = torch.randn(64, 32)
    model = compiled_small()
    for _ in range(10):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    # Compiled long before: the block makes it report all the same.
    with explain() as report:
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
    assert [g.label.split(" graph")[0] for g in report.graphs] == ["training", "no grad"]
    assert "bias removed: 2 (mlp.0, mlp.1)" in report.changes
    assert "silu -> hardswish: 1 (mlp.2)" in report.changes
    assert [s["name"] for s in report.sites] == ["mlp.0", "head"]
    assert "1 fused, 1 with FP8 in some direction" in report.text()
    assert "a head stays in high precision" in report.why("head")
    assert "clamped MERE" in report.why("mlp.0")
    assert "speedup n/a" in report.why("mlp.0")
    whole = report.diff()
    assert "+    linear_block_norm_act_default = loka.linear_block_norm_act" in whole
    assert "0x" not in whole and str(Path.cwd()) not in whole

    other = compiled_small()
    with explain() as again:
        for _ in range(10):
            other(x).sum().backward()
    assert [again.diff(r.name) for r in again.graphs[0].records] == [
        report.diff(r.name) for r in report.graphs[0].records
    ]


def test_a_given_plan_and_the_model_need_not_have_the_same_layers():
    """What only one of them has is reported, and not as being probed."""
    torch._dynamo.reset()
    options = {"inner": "eager", "emulate": True, "mods": "off", "heads": ()}
    first = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48))
    forced = {**options, "force": {"*": "torch:rowwise"}}
    torch.compile(first, backend="loka", options=forced)(torch.randn(16, 32)).sum().backward()
    plan = plan_of(first)
    other = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Tanh(), nn.Linear(64, 48))
    with explain() as report:
        compiled = torch.compile(other, backend="loka", options={**options, "plan": plan})
        compiled(torch.randn(16, 32)).sum().backward()
    same, new = report.sites
    assert same["directions"]["fwd"]["kernel"] == "torch:rowwise"
    assert {c["reason"] for c in new["directions"].values()} == {
        "the given plan has no such layer and shape"
    }
    assert report.unmet == ["2"]
    assert "only in the plan: 1 (2), no graph so far has them" in report.text()
