"""The pattern API: worked examples, registration, scope, order, cache key, and the report."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka_compile
from loka_compile import loka_backend
from loka_compile.errors import PatternError
from loka_compile.mod_set import OFF
from loka_compile.options import Options
from loka_compile.user_patterns import Pattern
from loka_compile.user_patterns import in_force
from loka_compile.variant import Decided

t = torch.randn


def gate(y, x0, x):
    """The user's own function, for which a kernel might stand."""
    return torch.addcmul(x, x0, y)


@loka_compile.pattern(example=lambda: (t(8, 64), t(64, 64), t(64), t(8, 64)), preserves=True)
def cross(x, w, b, x0):
    return x0 * F.linear(x, w, b) + x


@cross.replace
def _(x, w, b, x0):
    return gate(F.linear(x, w, b), x0, x)


@cross.when
def _(match):
    return match.shape("w")[0] % 16 == 0 or "out_features not a multiple of 16"


@loka_compile.pattern(
    example=lambda: (t(8, 64), t(32, 64), t(32), t(16, 64), t(16)), preserves=True
)
def two_linears(x, wa, ba, wb, bb):
    return F.linear(x, wa, ba), F.linear(x, wb, bb)


@two_linears.replace
def _(x, wa, ba, wb, bb):
    wide = F.linear(x, torch.cat([wa, wb]), torch.cat([ba, bb]))
    return wide.split([wa.shape[0], wb.shape[0]], -1)


@loka_compile.pattern(
    example=lambda: (t(8, 32), t(24, 32), t(8, 48), t(24, 48)), preserves=True, before="fuse"
)
def ensemble(a, wa, b, wb):
    return F.linear(a, wa) + F.linear(b, wb)


@ensemble.replace
def _(a, wa, b, wb):
    return F.linear(torch.cat([a, b], -1), torch.cat([wa, wb], 1))


class Cross(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x0):
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 24)

    def forward(self, x):
        return F.relu(self.a(x)).sum(-1) + self.b(x).view(-1, 24).sum(-1).view(x.shape[:-1])


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24, bias=False), nn.Linear(8, 24, bias=False)

    def forward(self, x):
        return torch.tanh(self.b(x[..., :8]) + self.a(x))


EXAMPLES = [(cross, Cross, 32, 2), (two_linears, Two, 16, 1), (ensemble, Ensemble, 16, 1)]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def records(report, name):
    return [r for graph in report.graphs for r in graph.records if r.name == name]


# -- worked examples ------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "model", "width", "count"), EXAMPLES)
def test_example_checks_and_trains(pattern, model, width, count, agrees):
    seen = loka_compile.check_pattern(pattern)
    assert seen.matches == 1 and seen.max_error < 1e-4 and seen.before != seen.after
    with loka_compile.explain() as report:
        agrees(model(), torch.randn(6, 3, width), options={"patterns": [pattern]})
    (record,) = records(report, pattern.name)
    assert len(record.rewrites) == count and not record.error


@pytest.mark.parametrize(("pattern", "model", "width", "count"), EXAMPLES)
def test_example_in_fp8(pattern, model, width, count, agrees):
    """Ten steps: probed, planned, and swapped; merged GEMMs have no site and stay high."""
    agrees(model(), torch.randn(32, width), fp8=True, options={"patterns": [pattern]})


def test_inside_a_checkpoint(agrees):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross = Cross()

        def forward(self, x):
            return checkpoint(self.cross, x, use_reentrant=False)

    with loka_compile.explain() as report:
        agrees(Checkpointed(), torch.randn(6, 32), options={"patterns": [cross]})
    assert records(report, "cross")[0].matches == 2


def test_a_site_that_is_gone_is_told(agrees):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.two = nn.Linear(16, 16), Two()

        def forward(self, x):
            return self.two(self.up(x))

    with loka_compile.explain() as report:
        agrees(Both(), torch.randn(16, 16), fp8=True, options={"patterns": [two_linears]})
    (note,) = records(report, "two_linears")[0].refusals
    assert "(in place of two.a, two.b): no site, high precision" in note.what


def test_examples_of_the_document():
    document = (Path(__file__).parents[1] / "docs" / "patterns.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", document, flags=re.M | re.S)
    found: dict = {}
    for block in blocks:
        if "@loka_compile" in block:
            exec(block, found)
    made = [one for one in found.values() if isinstance(one, Pattern)]
    assert [one.name for one in made] == [
        "cross",
        "layer_norm",
        "grouped",
        "two_linears",
        "ensemble",
    ]
    for one in made:
        assert loka_compile.check_pattern(one).matches == 1


def test_the_documents_first_steps_print_what_they_say(capsys):
    """As a newcomer types them, with a compiler that takes less time."""
    document = (Path(__file__).parents[1] / "docs" / "patterns.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^```python\n(.*?)^```", document, flags=re.M | re.S)[:2]
    found: dict = {}
    exec(first, found)
    assert capsys.readouterr().out == "1\n"
    exec(second.replace('options = {"', 'options = {"inner": "aot_eager", "'), found)
    printed = capsys.readouterr().out.rstrip().splitlines()
    said = re.search(r"among them: (.*)", second)
    assert said is not None
    assert said[1] in printed
    (why,) = [line for line in printed if line.startswith("w.0: a linear of M=32, K=16, N=64")]
    assert "Rewritten there: cross: 3 nodes replaced" in why
    assert sum("torch.addcmul" in line for line in printed if line.startswith("+")) == 3
    assert printed[-1] == "[]"


@pytest.mark.parametrize("mods", ["on", "off"])
def test_dynamic_batch_and_autocast(mods):
    model = Cross()
    options = {"inner": "aot_eager", "mods": mods, "patterns": [cross]}
    compiled = torch.compile(model, backend=loka_backend, options=options, dynamic=True)
    plain = torch.compile(
        model, backend=loka_backend, options={**options, "patterns": []}, dynamic=True
    )
    for size in (4, 7):
        x = torch.randn(size, 32)
        torch.testing.assert_close(compiled(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(x), plain(x), rtol=2e-2, atol=2e-2)


def test_when_is_a_near_miss_with_its_reason():
    options = {"inner": "eager", "mods": "off", "patterns": [cross]}
    compiled = torch.compile(Cross(24), backend=loka_backend, options=options)
    with loka_compile.explain() as report:
        compiled(torch.randn(4, 24))
    (record,) = records(report, "cross")
    assert not record.matches
    assert {n.what for n in record.refusals} == {"out_features not a multiple of 16"}
    assert record.refusals[0].line.startswith("test_patterns.py:")


# -- registration ---------------------------------------------------------------------------------


def make(replacement, function=lambda x: torch.sin(x), name="sine", example=None, **kwargs):
    function.__name__ = name
    pattern = loka_compile.pattern(example=example or (lambda: (torch.randn(4, 8),)), **kwargs)
    one = pattern(function)
    one.replace(replacement)
    return one


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (lambda x: torch.sin(x).sum(), r"result has shape \(\), the pattern's \(4, 8\)"),
        (lambda x: torch.sin(x).double(), "dtype torch.float64, the pattern's torch.float32"),
        (lambda x: torch.sin(x).to("meta"), "device meta, the pattern's cpu"),
        (lambda x: (x.sin(), x.cos()), "number of results is 2, the pattern's 1"),
        (lambda x, y: x.sin(), "2 arguments, but the example gives 1"),
        (lambda x: x.sin().add_(1), "writes in place"),
        (lambda x: x * EXAMPLES[0][1], "cannot be traced"),
        (lambda *x: x[0].sin(), "only plain positional arguments"),
        (torch.cos, "must be a plain Python function"),
    ],
)
def test_replacement_of_another_form(replacement, message):
    with pytest.raises(PatternError, match=message):
        make(replacement).register()
    assert in_force(()) == ()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "calls no torch function|return computed"),
        (lambda x: x.add_(1), "in place"),
        (lambda x: torch.ones(3).sin(), "not used by the pattern"),
    ],
)
def test_unusable_pattern(function, message):
    with pytest.raises(PatternError, match=message):
        make(lambda x: x.cos(), function).register()


def test_pattern_without_replacement():
    pattern = loka_compile.pattern(example=lambda: (torch.randn(2),))(lambda x: x.sin())
    with pytest.raises(PatternError, match="has no replacement"):
        pattern.register()


def test_a_wrong_pattern_fails_its_check():
    wrong = make(lambda x: torch.sin(x) * 1.01, preserves=True)
    with pytest.raises(PatternError, match=r"values differ(.|\n)*the pattern:(.|\n)*replacement"):
        loka_compile.check_pattern(wrong)
    detached = make(lambda x: torch.sin(x.detach()), preserves=True)
    with pytest.raises(PatternError, match="gradients differ"):
        loka_compile.check_pattern(detached)
    assert loka_compile.check_pattern(make(lambda x: torch.sin(x) * 1.01)).max_error > 0
    twice = make(lambda x, y: (x + y).sin(), lambda x, y: x.sin() + y.sin(), example=lambda: (
        torch.randn(3), torch.randn(3)))  # fmt: skip
    assert loka_compile.check_pattern(twice).matches == 1
    never = make(lambda x: x.cos())
    never.when(lambda match: "not today")
    with pytest.raises(PatternError, match="matches its own example 0 times, not once: not today"):
        loka_compile.check_pattern(never)


# -- scope ----------------------------------------------------------------------------------------


def test_scope_and_registration():
    assert in_force(()) == ()
    with loka_compile.patterns(cross, two_linears):
        assert [p.name for p in in_force([ensemble, cross])] == ["cross", "two_linears", "ensemble"]
        other = []
        thread = threading.Thread(target=lambda: other.extend(in_force(())))
        thread.start()
        thread.join()
        assert other == []
    cross.register()
    try:
        cross.register()
        assert [p.name for p in Options.parse({}).patterns] == ["cross"]
        assert [p.name for p in Options.parse(Options()).patterns] == ["cross"]
    finally:
        cross.unregister()
    assert in_force(()) == ()


def test_set_in_force_when_the_backend_is_called():
    options = {"inner": "eager", "mods": "off"}
    x, counts = torch.randn(4, 32), []
    for chosen in ((cross,), ()):
        torch._dynamo.reset()
        compiled = torch.compile(Cross(), backend=loka_backend, options=options)
        with loka_compile.explain() as report, loka_compile.patterns(*chosen):
            compiled(x)
        counts.append(len(records(report, "cross")))
    assert counts == [1, 0]


def test_first_use_inside_the_backend():
    """Not traced before: Dynamo is entered again, from within the compile."""
    fresh = make(
        lambda x, w: F.linear(x, w).tanh(),
        lambda x, w: torch.tanh(F.linear(x, w)),
        example=lambda: (torch.randn(4, 8), torch.randn(8, 8)),
    )
    state = torch.random.get_rng_state()
    options = {"inner": "eager", "mods": "off", "patterns": [fresh]}
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    torch.random.set_rng_state(state)
    with loka_compile.explain() as report:
        torch.compile(model, backend=loka_backend, options=options)(torch.ones(2, 8))
    assert records(report, "sine")[0].matches == 1


def test_a_raising_pattern_is_skipped():
    bad = make(lambda x, w: F.linear(x, w), lambda x, w: F.linear(x, w), name="bad",
               example=lambda: (torch.randn(4, 8), torch.randn(8, 8)))  # fmt: skip
    calls = []

    def when(match):
        calls.append(match.node("x"))
        if len(calls) == 2:
            raise ZeroDivisionError("the user's mistake")
        return True

    bad.when(when)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    options = {"inner": "eager", "mods": "off", "patterns": [bad]}
    x = torch.randn(4, 8)
    with loka_compile.explain() as report:
        torch.testing.assert_close(
            torch.compile(model, backend=loka_backend, options=options)(x), model(x)
        )
    (record,) = records(report, "bad")
    assert "the user's mistake" in record.error and record.matches == 0


@pytest.mark.parametrize("mods", ["off", "on"])
def test_a_pattern_that_changes_the_function_is_loud_once(mods, caplog):
    louder = make(
        lambda x, w: F.linear(x, w).tanh() * 2,
        lambda x, w: F.linear(x, w).tanh(),
        example=lambda: (torch.randn(4, 8), torch.randn(8, 8)),
        name="louder",
    )
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    options = {"inner": "eager", "mods": mods, "patterns": [louder]}
    compiled = torch.compile(model, backend=loka_backend, options=options)
    for size in (4, 5, 6):
        compiled(torch.randn(size, 8))
        with torch.no_grad():
            compiled(torch.randn(size, 8))
    said = [r.getMessage() for r in caplog.records if "patterns changed" in r.getMessage()]
    assert len(said) == 1 and "1 x louder: 2 nodes replaced" in said[0]
    caplog.clear()
    torch._dynamo.reset()
    fine = {**options, "patterns": [cross]}
    torch.compile(Cross(), backend=loka_backend, options=fine)(torch.randn(4, 32))
    assert "patterns changed" not in caplog.text


# -- order ----------------------------------------------------------------------------------------


def test_order_error_reaches_the_user():
    wrong = make(lambda x: x.cos(), before="fusee")
    with pytest.raises(PatternError, match="did you mean 'fuse'"):
        Options.parse({"patterns": [wrong]})


# -- cache key ------------------------------------------------------------------------------------


def test_digest_shapes_the_cache_key():
    def scaled(factor):
        return make(lambda x: torch.sin(x) * factor)

    made = [
        scaled(2.0),
        scaled(3.0),
        make(lambda x: x.sin()),
        make(lambda x: x.sin(), before="fuse"),
        make(lambda x: x.sin(), preserves=True),
    ]
    checked = make(lambda x: x.sin())
    checked.when(lambda match: True)
    keys = [Decided(OFF).cache_key(Options.parse({"patterns": [p]})) for p in (*made, checked)]
    keys.append(Decided(OFF).cache_key(Options.parse({})))
    assert len(set(keys)) == len(keys)
    again = Decided(OFF).cache_key(Options.parse({"patterns": [scaled(2.0)]}))
    assert again == keys[0]
