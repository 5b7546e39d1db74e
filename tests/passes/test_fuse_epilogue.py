"""What `loka::linear_epilogue` takes in: variants 7, 8, 10, 13 and 19, with the values they had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from chain_models import LINEAR
from chain_models import Chain
from chain_models import K
from chain_models import N
from torch import Tensor
from torch import nn
from variant_models import Ops
from variant_models import Variant
from variant_models import linear
from variant_models import reference

from loka_compile.lowering import epilogue_ops as at
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.passes import graph as g
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse import FUSED
from loka_compile.passes.fuse_epilogue import label


def act_before_norm(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", o.silu(o.linear("a", x)))


def act_before_norm_and_behind(o: Ops, x: Tensor) -> Tensor:
    return torch.tanh(o.norm("n", F.gelu(o.linear("a", x), approximate="tanh")))


def relu_before_groups(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", F.relu(o.linear("a", x)).unflatten(-1, (2, N // 2)))


def norm_before(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.linear("a", o.norm("n", x)))


def residual(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.norm("n", o.linear("a", x) + x.repeat_interleave(2, -1)[..., :N]))


def residual_of_one_column(o: Ops, x: Tensor) -> Tensor:
    return o.silu(o.norm("n", x.mean(-1, keepdim=True) + o.linear("a", x)))


def residual_over_groups(o: Ops, x: Tensor) -> Tensor:
    """Wukong's and DHEN's outer norm: a linear's features as n embeddings of width d."""
    shortcut = x.repeat_interleave(2, -1)[..., :N].unflatten(-1, (2, N // 2))
    return o.norm("n", o.linear("a", x).unflatten(-1, (2, N // 2)) + shortcut)


def two_gemms(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", o.linear("a", x) + o.linear("b", x))


def three_gemms(o: Ops, x: Tensor) -> Tensor:
    return o.norm("n", sum((o.linear("b", x), o.linear("c", x)), o.linear("a", x)))


def stacked_ensemble(o: Ops, x: Tensor) -> Tensor:
    stacked = torch.stack(
        [o.linear("a", x), o.linear("b", x), x[..., :1].expand(*x.shape[:-1], N)], -1
    )
    return o.norm("n", (stacked * o.layers["n"].weight[:3].softmax(0)).sum(-1))


def stacked_in_front(o: Ops, x: Tensor) -> Tensor:
    weights = o.layers["n"].weight[:2].softmax(0).view(2, *(1,) * x.dim())
    return o.norm(
        "n", torch.sum(weights * torch.stack([o.linear("a", x), o.linear("b", x)]), dim=0)
    )


def weighted_sum_behind_a_gate(o: Ops, x: Tensor) -> Tensor:
    """DHEN as it was found in production."""
    weights = o.layers["n"].weight[:2].softmax(0)
    y = o.linear("a", x)
    for i, name in enumerate("bc"):
        y = y + weights[i] * o.linear(name, x)
    return y * o.gate(o.norm("n", y))


def se_gate(o: Ops, x: Tensor) -> Tensor:
    return x * torch.sigmoid(o.linear("b", o.silu(o.linear("a", x))))


def masked_block(o: Ops, x: Tensor) -> Tensor:
    """MaskNet: an instance-guided mask on the normalised input, then linear, norm, ReLU."""
    mask = o.linear("b", F.relu(o.linear("a", x)))
    return F.relu(o.norm("m", o.linear("c", o.norm("n", x) * mask)))


def cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) + x


def gated_cross(o: Ops, x: Tensor) -> Tensor:
    return x.flip(-1) * o.linear("a", x) * torch.sigmoid(o.linear("b", x)) + x


Made = tuple[Variant, list[str]]

#: name -> (model, label of each op)
FUSED_AS: dict[str, Callable[[], Made]] = {
    "7-act-before-norm": lambda: (
        Variant(act_before_norm, a=linear(), n=nn.LayerNorm(N)),
        ["hard_swish+block_norm"],
    ),
    "7-gelu-before-norm-then-tanh": lambda: (
        Variant(act_before_norm_and_behind, a=linear(), n=nn.RMSNorm(N)),
        ["gelu_tanh+block_norm+tanh"],
    ),
    "7-relu-before-groups": lambda: (
        Variant(relu_before_groups, a=linear(), n=nn.LayerNorm(N // 2)),
        ["relu+block_norm"],
    ),
    "8-norm-before": lambda: (
        Variant(norm_before, a=linear(), n=nn.LayerNorm(K)),
        ["hard_swish"],
    ),
    "10-residual": lambda: (
        Variant(residual, a=linear(), n=nn.LayerNorm(N)),
        ["addend+block_norm+hard_swish"],
    ),
    "10-residual-of-one-column": lambda: (
        Variant(residual_of_one_column, a=linear(), n=nn.LayerNorm(N)),
        ["addend+block_norm+hard_swish"],
    ),
    "10-residual-over-groups": lambda: (
        Variant(residual_over_groups, a=linear(), n=nn.LayerNorm(N // 2)),
        ["addend+block_norm"],
    ),
    "10-two-gemms": lambda: (
        Variant(two_gemms, a=linear(), b=linear(), n=nn.LayerNorm(N)),
        ["addend+block_norm"],
    ),
    "10-three-gemms": lambda: (
        Variant(three_gemms, a=linear(), b=linear(), c=linear(), n=nn.LayerNorm(N)),
        ["addend", "addend+block_norm"],
    ),
    "10-stacked-ensemble": lambda: (
        Variant(stacked_ensemble, a=linear(), b=linear(), n=nn.LayerNorm(N)),
        ["scale+addend+block_norm", "scale+addend"],
    ),
    "10-stacked-in-front": lambda: (
        Variant(stacked_in_front, a=linear(), b=linear(), n=nn.LayerNorm(N)),
        ["scale+addend+block_norm", "scale"],
    ),
    "10-weighted-sum-behind-a-gate": lambda: (
        Variant(
            weighted_sum_behind_a_gate, a=linear(), b=linear(), c=linear(), n=nn.LayerNorm(N)
        ),
        ["addend+block_norm+hard_sigmoid+gate", "scale+addend", "scale"],
    ),
    "13-se-gate": lambda: (
        Variant(se_gate, a=linear(), b=linear(K, N)),
        ["hard_swish", "sigmoid+factor"],
    ),
    "13-mask": lambda: (
        Variant(
            masked_block,
            a=linear(), b=linear(K, N), c=linear(), n=nn.LayerNorm(K), m=nn.LayerNorm(N),
        ),
        ["relu", "factor", "block_norm"],
    ),
    "13-gated-cross": lambda: (
        Variant(gated_cross, a=linear(K), b=linear(K)),
        ["factor", "sigmoid+factor+residual"],
    ),
    "19-cross": lambda: (Variant(cross, a=linear(K)), ["factor+residual"]),
}  # fmt: skip


def parts_of(node) -> str:
    """What an op has besides its linear. Where our kernel can run it, a norm's op is the other."""
    if g.is_call(node, LINEAR_EPILOGUE):
        return label(node)
    parts = {"addend": node.args[20] is not None, "block_norm": True}
    parts |= {node.args[7]: node.args[7] != "none", "gate": node.args[8]}
    return "+".join(name for name, there in parts.items() if there)


@pytest.mark.parametrize("name", FUSED_AS)
def test_variants_that_fuse(name, pair, capture, agree):
    model, labels = FUSED_AS[name]()
    model.train(pair.train)
    captured = capture(model, "mods")
    agree(captured, model, reference, pair, K)
    assert sorted(map(parts_of, captured.nodes(LINEAR_EPILOGUE, FUSED))) == sorted(labels)
    # 10: of a sum of plain linears one takes the others in; 13: the mask's third has a norm behind.
    left = {"10-two-gemms": 1, "10-three-gemms": 1}.get(name, 0)
    assert captured.count(LINEAR) == left
    assert captured.count(BLOCK_NORM) == (name in ("8-norm-before", "13-mask"))
    assert (
        captured.notes("remarks", "fuse")
        == ["not fused: it is the addend of another linear's fused op"] * left
    )


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
