"""Diffs, and `emit`: nothing unless asked; then files, log lines and artifacts per variant."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import fx
from torch import nn
from torch._logging._internal import LazyTraceHandler
from torch.nn import functional as F

from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.passes import registry
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.passes.records import Note
from loka_compile.passes.records import PassRecord
from loka_compile.report import dump
from loka_compile.report.collect import GraphReport

OFF = Environment(False, (), None)
LABEL = "training graph of 2 linears (mlp.0, head)"


def site(kernel="torch:rowwise"):
    numbers = {"mere": 0.25, "mere_clamped": 0.0625, "bad_rows": 0.0, "speedup": None}
    choice = {"kernel": kernel, **numbers, "reason": ""}
    row = {"name": "mlp.0", "M": 64, "K": 32, "N": 16, "dtype": "float32", "fused": None}
    return {**row, "count": 1, "directions": dict.fromkeys(("fwd", "dgrad", "wgrad"), choice)}


@pytest.fixture
def replays():
    return []


@pytest.fixture
def graph(replays):
    def replay():
        replays.append(1)
        return [
            PassRecord("strip_bias", before="x = 1\n", after="x = 2\n"),
            PassRecord("my/pattern", before="x = 2\n", after="x = 2\n"),
        ]

    strip = PassRecord("strip_bias", 1.5, 4, 3, changes=[Note("mlp.0", "bias removed", "m.py:3")])
    strip.refusals = [Note("gate", "two readers")]
    return GraphReport(
        LABEL,
        [],
        OFF,
        sites=[site()],
        records=[strip],
        variants=["mods on, 1 FP8 sites"],
        notes=["plan made after 8 probed steps"],
        replay=replay,
    )


@pytest.fixture(autouse=True)
def no_trace(monkeypatch):
    """pytest puts handlers of its own on every logger that does not propagate: torch's trace."""
    monkeypatch.setattr(dump, "_TRACE", logging.Logger("no trace"))


@pytest.fixture
def logger(monkeypatch):
    """The package's logger without handlers, and put back as it was."""
    log = logging.getLogger("loka_compile")
    level = log.level
    monkeypatch.setattr(log, "handlers", [])
    yield log
    log.setLevel(level)


def test_nothing_is_asked_nothing_is_done(graph, replays, caplog):
    dump.emit(graph, OFF, 0)
    assert not replays and not caplog.records


def test_files(graph, tmp_path):
    dump.emit(graph, Environment(False, (), tmp_path), 7)
    (folder,) = tmp_path.iterdir()
    assert folder.name == "07_training_graph_of_2_linears"
    files = {p.name: p.read_text() for p in folder.iterdir()}
    for name, line in (
        ("before.py", "x = 1"),
        ("after.py", "x = 2"),
        ("00.strip_bias.py", "x = 2"),
    ):
        assert line in files.pop(name).splitlines()
    assert files == {
        "00.strip_bias.diff": "--- before strip_bias\n+++ after strip_bias\n"
        "@@ -1 +1 @@\n-x = 1\n+x = 2\n",
        "01.my_pattern.diff": "# my/pattern changed nothing\n",
    }


def test_a_variant_is_told_once_and_the_next_one_in_its_own_folder(graph, replays, tmp_path):
    environment = Environment(False, (), tmp_path)
    dump.emit(graph, environment, 0)
    dump.emit(graph, environment, 0)
    assert len(replays) == 1
    graph.sites = [site("torch:tensorwise")]
    dump.emit(graph, environment, 0)
    names = sorted(p.name for p in tmp_path.iterdir())
    stem = "00_training_graph_of_2_linears"
    assert len(replays) == 2 and names == [stem, f"{stem}_v2"]


def test_diffs_of_an_earlier_run_do_not_stay_among_the_new_ones(graph, tmp_path):
    folder = tmp_path / "03_training_graph_of_2_linears"
    folder.mkdir()
    for name in ("05.old_pass.diff", "notes.diff"):
        (folder / name).write_text("old")
    dump.emit(graph, Environment(False, (), tmp_path), 3)
    names = {p.name for p in folder.iterdir()}
    assert "05.old_pass.diff" not in names and "notes.diff" in names


def test_graphs_are_numbered_when_the_caller_does_not(graph, tmp_path):
    other = GraphReport(LABEL, [], OFF, replay=graph.replay)
    for one in (graph, other):
        dump.emit(one, Environment(False, (), tmp_path))
    first, second = sorted(int(p.name.partition("_")[0]) for p in tmp_path.iterdir())
    assert second == first + 1


def test_a_folder_that_cannot_be_written_is_a_warning(graph, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    dump.emit(graph, Environment(False, (), tmp_path / "file"), 0)
    assert "could not be written" in caplog.text


def test_log_lines_of_each_topic(graph, replays, logger, caplog):
    # Of the capturing handler only: that the logger lets INFO through is what is tested.
    caplog.set_level(logging.INFO, logger="another")
    dump.emit(graph, Environment(False, ("passes", "dispatch", "probe"), None), 0)
    assert {r.levelno for r in caplog.records} == {logging.INFO}
    text = caplog.text
    for said in (
        "strip_bias: 1 matches, 1 refused, 4 -> 3 nodes, 1.50 ms",
        "mlp.0: bias removed (m.py:3)",
        "gate: left alone: two readers",
        "mlp.0  64  32  16  torch:rowwise",
        "plan made after 8 probed steps",
        "mlp.0 dgrad: torch:rowwise, clamped MERE 0.0625, MERE 0.25, bad rows 0 %",
    ):
        assert said in text
    # Log lines need no graph text.
    assert not replays


def test_an_unknown_topic_is_said_with_the_known_ones(graph, logger, caplog):
    dump.emit(graph, Environment(False, ("passez",), None), 0)
    assert "LOKA_LOGS=passez: unknown; want some of passes,dispatch,probe" in caplog.text


def test_lines_are_shown_once_when_logging_is_not_set_up(graph, logger, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    for kernel in ("torch:rowwise", "torch:tensorwise"):
        graph.sites = [site(kernel)]
        dump.emit(graph, Environment(False, ("probe",), None), 0)
    shown = capsys.readouterr().err
    assert len(logger.handlers) == 1
    assert shown.count("mlp.0 fwd: torch:rowwise") == 1
    # The user sets logging up later: theirs prints, ours is silent.
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    logger.info("once more")
    assert capsys.readouterr().err == ""


def test_handlers_of_the_user_are_kept_alone(graph, logger):
    theirs = logging.NullHandler()
    logger.addHandler(theirs)
    dump.emit(graph, Environment(False, ("probe",), None), 0)
    assert logger.handlers == [theirs] and logger.isEnabledFor(logging.INFO)


def test_trace_artifacts_only_under_a_trace(graph, replays, monkeypatch):
    kept, keep = [], logging.Handler()
    keep.emit = lambda record: kept.append((record.metadata, record.payload))
    monkeypatch.setattr(dump, "_TRACE", logging.getLogger("torch.__trace"))
    monkeypatch.setattr(dump._TRACE, "handlers", [keep])
    dump.emit(graph, OFF, 0)
    # The pass that changed nothing leaves no artifact.
    found = {metadata["artifact"]["name"]: payload for metadata, payload in kept}
    names = ("before.py", "after.py", "00.strip_bias.diff", "00.strip_bias.py")
    assert list(found) == [f"loka.{name}" for name in names]
    assert all(metadata["artifact"]["encoding"] == "string" for metadata, _ in kept)
    assert "+x = 2" in found["loka.00.strip_bias.diff"]
    assert replays == [1]


def test_a_handler_without_a_folder_is_no_trace(monkeypatch, tmp_path):
    # torch adds one at import; it removes itself at its first record.
    for folder, active in ((None, False), (str(tmp_path), True)):
        monkeypatch.setattr(dump._TRACE, "handlers", [LazyTraceHandler(folder)])
        assert dump.tracing() is active


def small_graph() -> fx.GraphModule:
    """linear -> layer_norm -> silu, in canonical spelling, with the meta data of Dynamo's nodes."""
    built = fx.Graph()

    def placeholder(name, *shape):
        node = built.placeholder(name)
        node.meta["example_value"] = nn.Parameter(torch.empty(*shape, device="meta"))
        return node

    def call(target, args, name, layer):
        node = built.create_node("call_function", target, args, name=name)
        node.meta["example_value"] = torch.empty(4, 8, device="meta", requires_grad=True)
        node.meta["nn_module_stack"] = {"k": (f"L['self'].{layer}", nn.Module)}
        node.meta["stack_trace"] = f'  File "/somewhere/model.py", line 3, in {layer}\n'
        return node

    x, w, b = placeholder("x", 4, 16), placeholder("w", 8, 16), placeholder("b", 8)
    gain, shift = placeholder("gain", 8), placeholder("shift", 8)
    y = call(torch._C._nn.linear, (x, w, b), "y", "mlp.0")
    n = call(F.layer_norm, (y, (8,), gain, shift, 1e-5), "n", "mlp.1")
    built.output((call(F.silu, (n,), "s", "mlp.2"),))
    return fx.GraphModule(nn.Module(), built)


def test_golden_diffs(golden):
    def diffs():
        passes = registry.with_mods()[:3]
        _, records = run_passes(passes, small_graph(), PassContext(Options()), keep_text=True)
        whole = dump.unified(records[0].before, records[-1].after, "before", "after")
        return {"all": whole, **{r.name: dump.pass_diff(r) for r in records}}

    found = diffs()
    assert found == diffs()
    for name, diff in found.items():
        golden(f"diff_{name}", diff)


def test_an_address_among_the_arguments_is_no_difference():
    assert dump.unified("f(<function g at 0x7f01>)", "f(<function g at 0x7f99>)", "a", "b") == ""
