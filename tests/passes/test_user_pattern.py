"""One user pattern as a pass: what matches, what is refused and why, what comes in its place."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka_compile
from loka_compile.passes import graph as g

LINEAR = torch._C._nn.linear


@loka_compile.pattern(example=lambda: (torch.randn(4, 8),), preserves=True)
def swish(x):
    return F.silu(x)


@swish.replace
def _(x):
    return F.hardswish(x)


@loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)))
def residual(x, w, r):
    return r + torch.tanh(x @ w) * r


@residual.replace
def _(x, w, r):
    return torch.addcmul(r, (x @ w).tanh(), r)


def residual_of(x, w):
    return x + torch.tanh(x @ w) * x


@pytest.mark.parametrize(
    "write",
    [F.silu, lambda x: x * torch.sigmoid(x), lambda x: x.sigmoid() * x, nn.SiLU()],
)
def test_silu_in_every_spelling(write, capture, close):
    captured = capture(lambda x: write(x + 1), [swish.as_pass()])
    x = torch.randn(5, 3, 8)
    close(captured(x), F.hardswish(x + 1))
    assert captured.notes("rewrites", "swish") == ["swish: 1 nodes replaced"]


@pytest.mark.parametrize(
    "write",
    [
        residual_of,
        lambda x, w: torch.tanh(x @ w) * x + x,
        lambda x, w: torch.add(x, other=torch.mul(x, torch.matmul(x, w).tanh())),
        lambda x, w: x.add(torch.matmul(other=w, input=x).tanh().mul(x)),
    ],
)
@pytest.mark.parametrize("parameter", [False, True])
def test_spellings_and_orders(write, parameter, capture, close):
    w = torch.randn(8, 8)
    w = nn.Parameter(w) if parameter else w
    captured = capture(write, [residual.as_pass()])
    x = torch.randn(4, 8)
    close(captured(x, w), residual_of(x, w))
    assert captured.count(torch.addcmul) == 1 and captured.notes("changes", "residual")


def test_one_input_name_binds_one_node(capture):
    captured = capture(lambda x, w, r: x + torch.tanh(x @ w) * r, [residual.as_pass()])
    captured(torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8))
    assert captured.count(torch.addcmul) == 0


def test_shared_intermediate_is_a_near_miss(capture):
    def forward(x, w):
        h = torch.tanh(x @ w)
        return x + h * x, h.sum()

    captured = capture(forward, [residual.as_pass()])
    captured(torch.randn(4, 8), torch.randn(8, 8))
    assert captured.count(torch.addcmul) == 0
    why = captured.refusals("residual")
    assert "is also read by" in why and "test_user_pattern.py:" in why


def test_no_match_across_mutation(capture, close):
    def forward(x, w):
        h = torch.tanh(x @ w)
        x.add_(1)
        return x + h * x

    captured = capture(forward, [residual.as_pass()])
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    want = forward(x.clone(), w)
    close(captured(x, w), want)
    assert "written to in place" in captured.refusals("residual")


def test_literals_must_agree(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def norm(x):
        return F.layer_norm(x, (8,)).relu()

    @norm.replace
    def _(x):
        return F.relu(F.rms_norm(x, (8,)))

    captured = capture(lambda x: F.relu(nn.LayerNorm(16)(x)), [norm.as_pass()])
    captured = capture(lambda x: F.layer_norm(x, [16]).relu(), [norm.as_pass()])
    captured(torch.randn(2, 16))
    assert "has 16 where the pattern has 8" in captured.refusals("norm")
    captured = capture(lambda x: F.layer_norm(x, normalized_shape=[8]).relu(), [norm.as_pass()])
    captured(torch.randn(2, 3, 8))
    assert captured.count(torch.rms_norm) == 1


def test_symbolic_batch(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(4, 8)))
    def both(a, b):
        return a * torch.sin(b)

    @both.replace
    def _(a, b):
        return (a.reshape(a.shape[0], -1) * b.reshape(b.shape[0], -1).sin()).reshape(a.shape)

    captured = capture(lambda a, b: a * torch.sin(b + 1), [both.as_pass()], dynamic=True, aot=True)
    for size in (4, 9):
        a, b = torch.randn(size, 3, 8), torch.randn(size, 3, 8)
        close(captured(a, b), a * torch.sin(b + 1))
    assert len(captured.after) == 1 and captured.notes("changes", "both")


def test_symbolic_width_that_a_weight_fixes(capture, close):
    """dynamic=True marks the features too; the model's own linear has fixed them."""
    captured = capture(residual_of, [residual.as_pass()], dynamic=True)
    w = nn.Parameter(torch.randn(8, 8))
    for size in (4, 9):
        x = torch.randn(size, 8)
        close(captured(x, w), residual_of(x, w))
    assert captured.count(torch.addcmul) == len(captured.after) == 1


def test_branch_on_a_symbolic_size_is_refused(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def sine(a):
        return torch.sin(a)

    @sine.replace
    def _(a):
        return torch.sin(a) if a.shape[0] > 5 else torch.cos(a)

    captured = capture(torch.sin, [sine.as_pass()], dynamic=True)
    x = torch.randn(4, 8)
    close(captured(x), torch.sin(x))
    assert "symbolic size" in captured.refusals("sine")


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside, capture, close):
    def forward(x, w):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return residual_of(x.clone(), w)

    captured = capture(forward if inside else residual_of, [residual.as_pass()])
    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        got, want = captured(x, w), residual_of(x, w)
    if inside:
        want = forward(x, w)
    # addcmul promotes as the written form does.
    close(got, want, torch.bfloat16)
    assert captured.count(torch.addcmul) == 1


def test_another_dtype_at_the_match_is_refused(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def sine(a):
        return torch.sin(a)

    @sine.replace
    def _(a):
        return torch.sin(a.float())

    captured = capture(torch.sin, [sine.as_pass()])
    captured(torch.randn(3, dtype=torch.float64))
    assert "dtype torch.float32, the pattern's torch.float64" in captured.refusals("sine")


def test_vmap_is_left_alone(capture, close):
    captured = capture(lambda x: torch.vmap(F.silu)(x), [swish.as_pass()])
    x = torch.randn(4, 8)
    close(captured(x), F.silu(x))
    assert "functorch" in captured.refusals("swish")


def test_results_that_share_memory_are_copied(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def two(x):
        return torch.sin(x), torch.cos(x)

    @two.replace
    def _(x):
        both = torch.cat([torch.sin(x), torch.cos(x)], -1)
        return both.chunk(2, -1)

    def forward(x):
        a, b = torch.sin(x), torch.cos(x)
        return a.view(-1), b.add_(1)

    captured = capture(forward, [two.as_pass()])
    x = torch.randn(4, 8)
    for got, want in zip(captured(x), forward(x), strict=True):
        close(got, want)
    assert captured.count("clone") == 2 and captured.count(torch.cat) == 1


def test_no_early_reader_of_a_result(capture, close):
    """The second result's input is computed from the first result."""

    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(4, 8)))
    def two(x, y):
        return torch.sin(x), torch.cos(y)

    @two.replace
    def _(x, y):
        return torch.sin(x), torch.cos(y)

    captured = capture(lambda x: torch.cos(torch.sin(x) + 1), [two.as_pass()])
    x = torch.randn(4, 8)
    close(captured(x), torch.cos(torch.sin(x) + 1))
    assert captured.notes("changes", "two") == []


def test_site_goes_with_the_weight(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(6, 8)))
    def squashed(x, w):
        return F.linear(x, w).tanh()

    @squashed.replace
    def _(x, w):
        return F.linear(F.linear(x, torch.eye(8)), w).tanh()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 6, bias=False)

        def forward(self, x):
            return self.up(x).tanh()

    model = Model()
    captured = capture(nn.Sequential(model), [squashed.as_pass()])
    x, w = torch.randn(4, 8), model.up.weight
    close(captured(x), F.linear(x, w).tanh())
    assert [n.meta.get(g.SITE) for n in captured.nodes(LINEAR)] == [None, "0.up"]
    assert [g.layer_of(n) for n in captured.nodes("tanh")] == ["0"]
    assert "no site" in captured.refusals("squashed")


def test_a_result_that_is_an_input_is_copied_where_that_is_written(capture, close):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def doubled(x):
        return x * 1.0

    @doubled.replace
    def _(x):
        return x

    def forward(x):
        y = x * 1.0
        x.add_(1)
        return y + x

    captured = capture(forward, [doubled.as_pass()])
    x = torch.randn(4, 8)
    want = forward(x.clone())
    close(captured(x), want)
    assert captured.count(operator.mul) == 0 and captured.count("clone") == 1
    captured = capture(lambda x: x * 1.0 + 1, [doubled.as_pass()])
    close(captured(x), x + 1)
    assert captured.count(operator.mul) == captured.count("clone") == 0


def test_scalars_of_the_example_are_constants(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), 3.0, 2))
    def powers(x, factor, exponent):
        return factor * x**exponent

    @powers.replace
    def _(x, factor, exponent):
        return torch.square(x) * (factor * exponent / 2)

    for write, count in ((lambda x: x.pow(2) * 3.0, 1), (lambda x: x.pow(2) * 4.0, 0)):
        captured = capture(write, [powers.as_pass()])
        captured(torch.randn(5))
        assert captured.count(torch.square) == count
    assert "has 4.0 where the pattern has 3.0" in captured.refusals("powers")


def tanh_of(function):
    """A pattern that looks for tanh(function(x)) and marks it with a sine."""
    function.__name__ = "tanh_of"
    one = loka_compile.pattern(example=lambda: (torch.randn(4, 8),))(
        lambda x: torch.tanh(function(x))
    )
    one.name = "tanh_of"
    one.replace(lambda x: torch.sin(function(x)))
    return one.as_pass()


SAME = {
    "last-dim": (
        lambda x: x.softmax(-1),
        [lambda x: F.softmax(x, dim=x.dim() - 1), nn.Softmax(-1)],
    ),
    "first-dim": (lambda x: x.softmax(0), [lambda x: torch.softmax(x, -x.dim())]),
    "mean": (
        lambda x: x.mean(-1),
        [lambda x: torch.mean(x, [x.dim() - 1]), lambda x: x.mean((-1,))],
    ),
    "transpose": (
        lambda x: x.transpose(-2, -1),
        [
            lambda x: x.transpose(x.dim() - 1, -2),
            lambda x: torch.transpose(x, x.dim() - 2, -1),
        ],
    ),
    "stack": (lambda x: torch.stack([x, x], -1), [lambda x: torch.stack((x, x), dim=x.dim())]),
    "cat": (lambda x: torch.cat([x, x], 1), [lambda x: torch.cat((x, x), dim=1 - x.dim())]),
    "unsqueeze": (lambda x: x.unsqueeze(-1), [lambda x: torch.unsqueeze(x, x.dim())]),
    "cast": (
        lambda x: x.to(torch.float64),
        [
            lambda x: x.double(),
            lambda x: x.to(dtype=torch.float64),
            lambda x: x.type(torch.float64),
        ],
    ),
}
OTHER = {
    "last-dim": lambda x: x.softmax(0),
    "mean": lambda x: x.mean(0),
    "cast": lambda x: x.to(torch.float16),
    "stack": lambda x: torch.stack([x, x], 0),
}


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
@pytest.mark.parametrize("name", SAME)
def test_dimensions_from_either_end_and_casts(name, shape, capture):
    looked_for, written = SAME[name]
    one = tanh_of(looked_for)
    x = torch.randn(shape)
    for write in (*written, looked_for):
        captured = capture(lambda x, write=write: torch.tanh(write(x)), [one])
        assert torch.allclose(captured(x), torch.sin(write(x)))
        assert captured.count("sin", torch.sin) == 1
    if name in OTHER:
        captured = capture(lambda x: torch.tanh(OTHER[name](x)), [one])
        captured(x)
        assert captured.count("sin", torch.sin) == 0


def test_an_optional_argument_is_none_in_the_pattern_only_where_it_is_none(capture, close):
    """`b=None` in the example: a linear without bias; one that has a bias is another pattern."""

    @loka_compile.pattern(example=lambda: (torch.randn(4, 8), torch.randn(6, 8), None))
    def squash(x, w, b):
        return F.linear(x, w, b).tanh()

    @squash.replace
    def _(x, w, b):
        return F.linear(x, w, b).sin()

    plain, biased = nn.Linear(8, 6, bias=False), nn.Linear(8, 6)
    captured = capture(lambda x: plain(x).tanh() + biased(x).tanh(), [squash.as_pass()])
    x = torch.randn(3, 8)
    close(captured(x), plain(x).sin() + biased(x).tanh())
    assert captured.count("sin") == 1 and captured.count("tanh") == 1


def test_an_input_that_two_matches_share(capture, close):
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def forward(x, w):
        return residual_of(x, w) * (torch.tanh(x @ w) * x + x)

    captured = capture(forward, [residual.as_pass()])
    close(captured(x, w), forward(x, w))
    assert captured.count(torch.addcmul) == 2


@loka_compile.pattern(
    example=lambda: (torch.randn(4, 48), torch.randn(48), 48, 1e-3), free=("n", "eps")
)
def norm_of_any_width(x, w, n, eps):
    return F.layer_norm(x, (n,), w, None, eps).relu()


@norm_of_any_width.replace
def _(x, w, n, eps):
    return F.rms_norm(x, (n,), w, eps).relu() * (n / 2)


@norm_of_any_width.when
def _(match):
    return match.number("n") != 20 or f"{match.layer} is left alone"


@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 10)])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_a_free_number_is_any_number_and_the_replacement_gets_it(shape, eps, capture, close):
    n = shape[-1]
    norm = nn.LayerNorm(n, eps=eps, bias=False)
    captured = capture(lambda x: F.relu(norm(x)), [norm_of_any_width.as_pass()])
    x = torch.randn(shape)
    close(captured(x), F.relu(F.rms_norm(x, (n,), norm.weight, eps)) * (n / 2))


def test_free_numbers_say_what_they_are_to_when(capture):
    model = nn.Sequential(nn.LayerNorm(20, bias=False), nn.ReLU())
    captured = capture(model, [norm_of_any_width.as_pass()])
    captured(torch.randn(2, 20))
    assert captured.count(torch.rms_norm) == 0
    assert captured.refusals("norm_of_any_width") == "1 is left alone"


def test_one_free_number_in_two_places_is_one_number(capture):
    @loka_compile.pattern(example=lambda: (torch.randn(4), 3.0), free="a")
    def shifted(x, a):
        return (x * a).sin() + a

    @shifted.replace
    def _(x, a):
        return torch.cos(x * a)

    for write, count in (
        (lambda x: torch.sin(5.0 * x) + 5.0, 1),
        (lambda x: (x * 5.0).sin() + 4.0, 0),
    ):
        captured = capture(write, [shifted.as_pass()])
        captured(torch.randn(5))
        assert captured.count(torch.cos) == count
    assert "has 4.0 where the pattern has 5.0" in captured.refusals("shifted")


@pytest.mark.parametrize(
    ("free", "why"),
    [
        ("nothing", "free='nothing' is no argument"),
        ("x", "must be an int or a float"),
        (("a", "b"), "'a' and 'b' are both 2.0"),
        ("c", "7.0, free as 'c', is not in the pattern"),
    ],
)
def test_what_cannot_be_free(free, why):
    one = loka_compile.pattern(example=lambda: (torch.randn(4), 2.0, 2.0, 7.0), free=free)(
        lambda x, a, b, c: x * a + b
    )
    one.name = "free"
    one.replace(lambda x, a, b, c: x * a)
    with pytest.raises(loka_compile.errors.PatternError, match=why):
        one.as_pass()
