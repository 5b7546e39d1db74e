"""Which patterns are in force: mistakes, registration, scope, order, and the cache key."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from worked_patterns import EXAMPLES
from worked_patterns import Cross
from worked_patterns import cross
from worked_patterns import ensemble
from worked_patterns import records
from worked_patterns import two_linears

import loka_compile
from loka_compile import loka_backend
from loka_compile.errors import PatternError
from loka_compile.mod_set import OFF
from loka_compile.options import Options
from loka_compile.user_patterns import in_force
from loka_compile.variant import Decided


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


def test_order_error_reaches_the_user():
    wrong = make(lambda x: x.cos(), before="fusee")
    with pytest.raises(PatternError, match="did you mean 'fuse'"):
        Options.parse({"patterns": [wrong]})


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
