"""Exact epilogues: Mods off, symbolic batches, dtypes, what is left and why, and FP8 end to end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from chain_models import Chain
from chain_models import K
from chain_models import N
from torch import Tensor
from torch import nn
from variant_models import Ops
from variant_models import Variant
from variant_models import linear

import loka_compile
from loka_compile.lowering import epilogue_ops as at
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.passes import graph as g
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse_epilogue import label


def two_gemms(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", o.linear("a", x) + o.linear("b", x))


def se_gate(o: Ops, x: Tensor) -> Tensor:
    return x * torch.sigmoid(o.linear("b", o.silu(o.linear("a", x))))


def cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) + x


def gated_cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) * torch.sigmoid(o.linear("b", x)) + x


EXACT = {
    "cross": lambda: (Variant(cross, a=linear(K)), ["bias+factor+residual"]),
    "se-gate": lambda: (
        Variant(se_gate, a=linear(), b=linear(K, N)),
        ["bias+silu", "bias+sigmoid+factor"],
    ),
    "norm-behind-a-bias": lambda: (Chain(nn.RMSNorm(N), nn.SiLU()), ["bias+block_norm+silu"]),
    "rms-gate": lambda: (
        Variant(lambda o, x: (lambda y: y * o.gate(o.norm("n", y)))(o.linear("a", x)),
                a=linear(), n=nn.RMSNorm(N)),
        ["bias+block_norm+sigmoid+gate"],
    ),
    "two-gemms": lambda: (
        Variant(two_gemms, a=linear(), b=linear(), n=nn.RMSNorm(N)),
        ["bias+addend+block_norm"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_with_mods_off_the_function_is_kept_and_so_is_the_bias(name, pair, capture, agree):
    model, labels = EXACT[name]()
    model.train(pair.train)
    captured = capture(model, "exact")
    agree(captured, model, lambda model, x: model(x), pair, K)
    assert list(map(label, captured.nodes(LINEAR_EPILOGUE))) == labels
    assert captured.notes("changes") == []


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_symbolic_batch(precision, capture, close):
    model = Variant(gated_cross, a=linear(K), b=linear(K))
    captured = capture(model, "exact", dynamic=True, aot=True)
    dtype = torch.bfloat16 if precision == "autocast" else torch.float32
    for rows in (4, 9):
        x = torch.randn(rows, K)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            close(captured(x), model(x), dtype)
    assert len(captured.after) == 1 and captured.count(LINEAR_EPILOGUE) == 2


def test_the_site_goes_with_the_op_and_its_result_has_the_dtype_that_it_had(capture):
    model = Variant(cross, a=linear(K))
    captured = capture(model, "exact")
    with torch.autocast("cpu", torch.bfloat16):
        assert captured(torch.randn(4, K)).dtype == torch.float32
    (node,) = captured.nodes(LINEAR_EPILOGUE)
    assert node.meta[g.SITE] == "layers.a" and node.args[at.DTYPE] is torch.float32
    assert g.value(node.args[0]).dtype == torch.bfloat16


# -- what stays as it is --------------------------------------------------------------------------


def left(capture, close, forward, *inputs, why="", fused=0):
    captured = capture(forward, "exact")
    want = forward(*(t.clone() for t in inputs))
    close(captured(*inputs), want)
    assert captured.count(LINEAR_EPILOGUE) == fused
    told = "\n".join([captured.refusals("fuse"), *captured.notes("remarks", "fuse")])
    assert why in told
    return captured


def test_a_factor_that_is_written_to_later(capture, close):
    lin = linear(K)

    def forward(x, f):
        y = lin(x) * f
        f.add_(1)
        return y + f

    with torch.no_grad():
        left(capture, close, forward, torch.randn(4, K), torch.randn(4, K), why="written to later")


def test_a_residual_that_is_written_to_in_between(capture, close):
    lin = linear(K)

    def forward(x, f, r):
        h = lin(x)
        x.mul_(2)
        return h * f + r

    inputs = [torch.randn(4, K) for _ in range(3)]
    with torch.no_grad():
        left(capture, close, forward, *inputs, why="written to in place in between")


def test_operands_that_would_make_the_result_larger(capture, close):
    gate = linear(1)
    x = torch.randn(4, K)
    left(capture, close, lambda x: torch.sigmoid(gate(x)) * x, x, fused=1)
    left(capture, close, lambda x: gate(x) * x, x, why="in a shape or with an operand")


def test_a_product_with_itself_and_with_numbers(capture, close):
    lin = linear(K)

    def square(x):
        y = lin(x)
        return y * y

    left(capture, close, square, torch.randn(4, K))
    left(capture, close, lambda x: lin(x) * 2.0 + 1, torch.randn(4, K))


def test_a_result_in_the_layout_of_another_tensor(capture, close):
    """The sum follows its first operand's strides, and so does the user's code behind it."""
    lin = linear(4)

    def forward(x, r):
        y = r.t() + lin(x)
        return y.as_strided((4, 4), (4, 1))

    left(capture, close, forward, torch.randn(4, K), torch.randn(4, 4), why="strides of another")


def test_a_second_reader_takes_the_longest_form_before_it(capture, close):
    lin = linear(K)

    def forward(x):
        y = F.silu(lin(x))
        return y * x + y.mean()

    captured = left(capture, close, forward, torch.randn(4, K), fused=1)
    assert label(captured.nodes(LINEAR_EPILOGUE)[0]) == "bias+silu"


def test_heads_and_computed_weights_stay(capture, close):
    lin = linear(K)
    captured = capture(lambda x: torch.sigmoid(lin(x)), "exact", heads=["model"])
    captured(torch.randn(4, K))
    assert captured.count(LINEAR_EPILOGUE) == 0
    normed = nn.utils.parametrizations.weight_norm(linear(K))
    left(capture, close, lambda x: F.relu(normed(x)), torch.randn(4, K))


def test_a_transposed_input_is_left_for_the_batched_product(capture, close):
    w = nn.Parameter(torch.randn(3, 3))

    def forward(x):
        return F.relu(x.permute(0, 2, 1) @ w)

    left(capture, close, forward, torch.randn(2, 3, K), why="as a batched product")


def test_a_norm_that_is_read_twice_stays_with_its_reason(capture, close):
    lin, norm = linear(), nn.RMSNorm(N)

    def forward(x):
        y = F.silu(lin(x))
        return norm(y) + y

    captured = left(capture, close, forward, torch.randn(4, K), fused=1)
    assert captured.count(BLOCK_NORM) == 1
    assert "stands in between" in captured.refusals("fuse")


# -- through the backend --------------------------------------------------------------------------


class Gated(nn.Module):
    """Cross, gate and a norm behind an activation, and a head: all forms, 32 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.squeeze, self.open = (nn.Linear(32, 32) for _ in range(3))
        self.act_first, self.norm = nn.Linear(32, 48), nn.RMSNorm(48)
        self.head = nn.Linear(48, 1)

    def forward(self, x):
        x = x * self.cross(x) + x
        x = x * torch.sigmoid(self.open(F.silu(self.squeeze(x))))
        return self.head(self.norm(F.gelu(self.act_first(x)))).squeeze(-1)


def test_in_fp8_after_probing_the_model_is_that_of_eager(agrees):
    """Ten steps: observed, planned, swapped. Every site but none of its epilogues is quantised."""
    with loka_compile.explain() as report:
        agrees(Gated(), torch.randn(32, 32, requires_grad=True), fp8=True)
    fused = {s["name"]: s["fused"] for s in report.sites}
    assert fused == {
        "cross": "cross+bias+factor+residual",
        "squeeze": "squeeze+bias+silu",
        "open": "open+bias+sigmoid+factor",
        "act_first": "act_first+bias+gelu+block_norm",
        "head": None,
    }
    for site in report.sites:
        kernels = {c["kernel"] for c in site["directions"].values()}
        assert kernels == {"high_precision" if site["name"] == "head" else "torch:rowwise"}


@pytest.mark.slow
def test_under_inductor_values_and_gradients_are_those_of_eager():
    torch._dynamo.reset()
    model, x = Gated(), torch.randn(16, 32)
    compiled = torch.compile(model, backend="loka", options={"mods": "off"})
    got, want = compiled(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    parameters = list(model.parameters())
    pairs = (torch.autograd.grad(y.square().sum(), parameters) for y in (got, want))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
