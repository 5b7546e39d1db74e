"""linear -> block_norm -> activation chains: what fuses, what must not, and that values agree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.kernels.block_norm import block_of
from loka_compile.passes import graph as g
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse import FUSED

K, N = 6, 10
LINEAR = torch._C._nn.linear


def perturb(model: nn.Module) -> nn.Module:
    """Gains and biases away from 1 and 0, so that a lost one shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return model


class Chain(nn.Module):
    """Linear -> norm -> act, with a function between and one after."""

    def __init__(self, norm=None, act=None, between=None, features=N, **linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(K, features, **linear)
        self.norm = nn.LayerNorm(features) if norm is None else norm
        self.act = nn.Identity() if act is None else act
        self.between = nn.Identity() if between is None else between
        perturb(self)

    def forward(self, x):
        return self.act(self.norm(self.between(self.linear(x))))


class Spelled(nn.Module):
    """x * sigmoid(x) as an activation."""

    def forward(self, x):
        return x * torch.sigmoid(x)


class Functional(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


class SwishLayerNorm(nn.Module):
    """y * sigmoid(norm(y)), optionally in FP32 between casts."""

    def __init__(self, norm, wide=False) -> None:
        super().__init__()
        self.sequential = nn.Sequential(norm, nn.Sigmoid())
        self.wide = wide

    def forward(self, y):
        if not self.wide:
            return y * self.sequential(y)
        y32 = y.float()
        return (self.sequential(y32) * y32).to(y.dtype)


class WrittenRMS(nn.Module):
    """RMSNorm as LLaMA-style code has it."""

    def __init__(self, features=N, eps=1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


def linear_ref(model, x):
    return F.linear(x, model.linear.weight)


def norm_ref(z, norm, eps=None):
    n = z.shape[-1]
    eps = norm.eps if eps is None else eps
    return block_norm_ref(z, getattr(norm, "weight", None), block_of(n), eps)


def reference(act=lambda v: v, eps=None):
    return lambda model, x: act(norm_ref(linear_ref(model, x), model.norm, eps))


EPS32 = torch.finfo(torch.float32).eps

SWISH = {
    "1-module": (lambda: Chain(act=nn.SiLU()), reference(F.hardswish)),
    "1-inplace": (lambda: Chain(act=nn.SiLU(inplace=True)), reference(F.hardswish)),
    "1-functional": (lambda: Chain(act=Functional(F.silu)), reference(F.hardswish)),
    "1-spelled": (lambda: Chain(act=Spelled()), reference(F.hardswish)),
    "6-rms": (lambda: Chain(nn.RMSNorm(N), nn.SiLU()), reference(F.hardswish, EPS32)),
    "6-written": (lambda: Chain(WrittenRMS(), nn.SiLU()), reference(F.hardswish)),
    "9-zero": (
        lambda: Chain(act=nn.SiLU(), between=nn.Dropout(0.0)),
        reference(F.hardswish),
    ),
    "15-no-affine": (
        lambda: Chain(nn.LayerNorm(N, elementwise_affine=False), nn.SiLU()),
        reference(F.hardswish),
    ),
    "16-no-bias": (lambda: Chain(act=nn.SiLU(), bias=False), reference(F.hardswish)),
    "17-hardswish": (lambda: Chain(act=nn.Hardswish()), reference(F.hardswish)),
    "ragged": (
        lambda: Chain(nn.LayerNorm(300), nn.SiLU(), features=300),
        reference(F.hardswish),
    ),
    "wide": (lambda: Chain(nn.LayerNorm(512), nn.SiLU(), features=512), reference(F.hardswish)),
}


@pytest.mark.parametrize("name", SWISH)
def test_swish_chain_is_one_op(name, case, capture, agree):
    make, ref = SWISH[name]
    model = make().train(case.train)
    captured = capture(model, "mods")
    agree(captured, model, ref, case, K)
    assert captured.count(LINEAR, before=True) == 1
    assert captured.count(FUSED) == 1
    assert captured.count(LINEAR, BLOCK_NORM, F.silu, F.hardswish, F.layer_norm) == 0
    (node,) = captured.nodes(FUSED)
    assert node.args[7:9] == ("hard_swish", False)
    assert node.meta[g.SITE] == "linear"


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu-tanh": nn.GELU(approximate="tanh"),
    "leaky": nn.LeakyReLU(0.1),
    "tanh": nn.Tanh(),
    "identity": nn.Identity(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_other_activations_stay_behind_the_fused_norm(name, quick, capture, agree):
    act = ACTIVATIONS[name]
    model = Chain(act=act).train(quick.train)
    captured = capture(model, "mods")
    agree(captured, model, reference(act), quick, K)
    (node,) = captured.nodes(FUSED)
    assert node.args[7:9] == ("none", False)


GATES = {
    "3-torchrec": lambda: SwishLayerNorm(nn.LayerNorm(N)),
    "4-fp32": lambda: SwishLayerNorm(nn.LayerNorm(N), wide=True),
    "5-rms": lambda: SwishLayerNorm(nn.RMSNorm(N, eps=1e-5)),
}


def gate_ref(model, x):
    z = linear_ref(model, x)
    v = norm_ref(z, model.act.sequential[0])
    if v.dtype == torch.float64:
        # F.hardsigmoid has an FP32 1/6 in its FP64 gradient.
        return z * (v + 3).clamp(0, 6) / 6
    return z * F.hardsigmoid(v)


@pytest.mark.parametrize("name", GATES)
def test_gate_form_is_one_op(name, case, capture, agree):
    model = perturb(Chain(nn.Identity(), GATES[name]())).train(case.train)
    captured = capture(model, "mods")
    agree(captured, model, gate_ref, case, K)
    assert captured.count(torch.sigmoid, F.hardsigmoid, LINEAR, BLOCK_NORM) == 0
    (node,) = captured.nodes(FUSED)
    assert node.args[7:9] == ("hard_sigmoid", True)


class Grouped(nn.Module):
    """Variant 11: a norm over each group of d features."""

    def __init__(self, n=3, d=8, act=None, how="view") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(K, n * d)
        self.norm = nn.LayerNorm(d)
        self.act = act or nn.Identity()
        self.n, self.d, self.how = n, d, how
        perturb(self)

    def forward(self, x):
        y = self.linear(x)
        if self.how == "view":
            y = y.view(*x.shape[:-1], self.n, self.d)
        elif self.how == "reshape":
            y = torch.reshape(y, (-1, self.n, self.d))
        else:
            y = y.unflatten(-1, (self.n, self.d))
        return self.act(self.norm(y))


@pytest.mark.parametrize("how", ["view", "reshape", "unflatten"])
def test_norm_over_groups(how, quick, capture, agree):
    model = Grouped(act=nn.SiLU(), how=how).train(quick.train)

    def ref(model, x):
        z = linear_ref(model, x)
        lead = (-1,) if how == "reshape" else x.shape[:-1]
        z = z.reshape(*lead, model.n, model.d)
        return F.hardswish(norm_ref(z, model.norm))

    captured = capture(model, "mods")
    agree(captured, model, ref, quick, K)
    (node,) = captured.nodes(FUSED)
    assert node.args[5] == 8
    assert captured.count(LINEAR, BLOCK_NORM) == 0


def test_gate_over_groups(capture, agree, quick):
    model = Grouped(act=None)
    model.norm, model.act = nn.Identity(), SwishLayerNorm(nn.LayerNorm(8))
    model = perturb(model).train(quick.train)

    def ref(model, x):
        z = linear_ref(model, x).reshape(*x.shape[:-1], model.n, model.d)
        return z * F.hardsigmoid(norm_ref(z, model.act.sequential[0]))

    captured = capture(model, "mods")
    agree(captured, model, ref, quick, K)
    assert captured.count(FUSED) == 1


def test_block_that_does_not_divide_a_group_is_refused(capture):
    captured = capture(Grouped(n=2, d=300), "mods")
    captured(torch.randn(4, K))
    assert captured.count(FUSED) == 0
    assert "block 256 does not divide the 300 features" in captured.refusals("fuse")


def test_block_option_is_capped_and_used(capture):
    captured = capture(Chain(act=nn.SiLU()), "mods", block=4)
    captured(torch.randn(4, K))
    assert captured.nodes(FUSED)[0].args[5] == 4
    captured = capture(Chain(act=nn.SiLU()), "mods", block=64)
    captured(torch.randn(4, K))
    assert captured.nodes(FUSED)[0].args[5] == N


class Stored(nn.Module):
    """Variant 16: weights stored either way, bias added by hand."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        transposed = how in ("at", "matmul", "addmm")
        self.weight = nn.Parameter(torch.randn(*((K, N) if transposed else (N, K))) / 3)
        self.bias = nn.Parameter(torch.randn(N))
        self.norm = nn.LayerNorm(N)
        self.how = how
        perturb(self)

    def forward(self, x):
        w, b = (
            self.weight,
            self.bias.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else self.bias,
        )
        if self.how == "at":
            y = x @ w + b
        elif self.how == "at-t":
            y = b + x @ w.t()
        elif self.how == "at-T":
            y = torch.add(x @ w.T, b)
        elif self.how == "transpose":
            y = x.matmul(w.transpose(-1, 0)) + b
        elif self.how == "matmul":
            y = torch.matmul(x, w).add(b)
        else:
            y = torch.addmm(b, x.flatten(0, -2), w)
        return F.silu(self.norm(y))


@pytest.mark.parametrize("how", ["at", "at-t", "at-T", "transpose", "matmul", "addmm"])
def test_weight_stored_either_way(how, quick, capture, agree):
    model = Stored(how).train(quick.train)

    def ref(model, x):
        w = model.weight if model.weight.shape == (N, K) else model.weight.t()
        z = F.linear(x.flatten(0, -2) if how == "addmm" else x, w)
        return F.hardswish(norm_ref(z, model.norm))

    captured = capture(model, "mods")
    agree(captured, model, ref, quick, K)
    assert captured.count(FUSED) == 1


@pytest.mark.parametrize("gate", [False, True])
def test_fp64_gradients_are_exact(gate, capture, agree, quick):
    quick = type(quick)(quick.shape, "fp64", True)
    if gate:
        model = Chain(nn.Identity(), SwishLayerNorm(nn.LayerNorm(N)))
        ref = gate_ref
    else:
        model, ref = Chain(act=nn.SiLU()), reference(F.hardswish)
    model = perturb(model).double()
    captured = capture(model, "mods")
    agree(captured, model, ref, quick, K)
    assert captured.count(FUSED) == 1
    x = torch.randn(*quick.shape, K, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(captured.run, (x,))


@pytest.mark.parametrize("eps", [1e-2, 1e-5, None])
@pytest.mark.parametrize("mods", ["mods", "exact"])
def test_eps_is_the_norms_own(eps, mods, capture, close):
    model = Chain(nn.RMSNorm(N, eps=eps), bias=False)
    x = 1e-3 * torch.randn(8, K)
    captured = capture(model, mods)
    got = captured(x)
    close(got, model(x))
    assert captured.nodes(FUSED)[0].args[6] == (EPS32 if eps is None else eps)


# -- exact fusion, Mods off -----------------------------------------------------------------------


def test_exact_fusion_changes_nothing(quick, capture, agree):
    model = Chain(nn.RMSNorm(N), nn.Hardswish(), bias=False).train(quick.train)
    captured = capture(model, "exact")
    agree(captured, model, lambda model, x: model(x), quick, K)
    assert captured.count(FUSED) == 1
    assert captured.notes("changes") == []


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Chain(nn.RMSNorm(N)), "keeps its bias"),
        (Chain(nn.RMSNorm(300), features=300, bias=False), "Mods are off"),
    ],
)
def test_exact_fusion_refuses(model, why, capture, close):
    captured = capture(model, "exact")
    x = torch.randn(4, K)
    close(captured(x), model(x))
    assert captured.count(FUSED) == 0
    assert why in captured.refusals()


# -- refusals -------------------------------------------------------------------------------------


def test_active_dropout_between(capture):
    captured = capture(Chain(act=nn.SiLU(), between=nn.Dropout(0.5)).train(), "mods")
    captured(torch.randn(4, K))
    assert captured.count(FUSED) == 0
    assert captured.count(F.dropout) == 1
    assert "active dropout" in captured.refusals("fuse")


def test_dropout_vanishes_in_eval(capture, agree, quick):
    quick = type(quick)(quick.shape, quick.precision, False)
    model = Chain(act=nn.SiLU(), between=nn.Dropout(0.5)).eval()
    captured = capture(model, "mods")
    agree(captured, model, reference(F.hardswish), quick, K)
    assert captured.count(FUSED) == 1
    assert captured.count(F.dropout) == 0


def test_batch_norm_in_training_is_left(capture, close):
    model = Chain(nn.BatchNorm1d(N), nn.ReLU()).train()
    eager = Chain(nn.BatchNorm1d(N), nn.ReLU()).train()
    captured = capture(model, "mods")
    x = torch.randn(16, K)
    # Batch statistics subtract the linear's bias again, so stripping it changes no value.
    close(captured(x), eager(x))
    assert captured.count(FUSED, BLOCK_NORM) == 0
    assert captured.count(F.batch_norm) == 1
    assert "statistics of the batch" in captured.refusals("fuse")


class Dice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(N)
        self.alpha = nn.Parameter(torch.zeros(N))

    def forward(self, x):
        p = torch.sigmoid(self.bn(x))
        return p * x + (1 - p) * self.alpha * x


@pytest.mark.parametrize(("act", "why"), [(nn.PReLU(), "PReLU"), (Dice(), "batch_norm")])
def test_activations_with_state_stay(act, why, capture):
    captured = capture(Chain(nn.Identity(), act).train(), "mods")
    captured(torch.randn(8, K))
    assert captured.count(FUSED) == 0
    assert why in captured.refusals("fuse")


def test_prelu_behind_a_norm_stays_an_op(capture, agree, quick):
    act = nn.PReLU()
    model = Chain(act=act).train(quick.train)
    captured = capture(model, "mods")
    agree(captured, model, reference(act), quick, K)
    assert captured.count(FUSED) == 1
    assert "PReLU" in captured.refusals("fuse")


def test_weight_norm_is_refused(capture):
    model = Chain(act=nn.SiLU())
    nn.utils.parametrizations.weight_norm(model.linear)
    captured = capture(model, "mods")
    captured(torch.randn(4, K))
    assert captured.count(FUSED) == 0
    assert captured.count(BLOCK_NORM) == 1
    assert "weight is computed" in captured.refusals("fuse")


def test_residual_between_is_refused(capture):
    model = Chain(act=nn.SiLU())
    captured = capture(lambda x, r: model.norm(model.linear(x) + r), "mods")
    captured(torch.randn(4, K), torch.randn(4, N))
    assert captured.count(FUSED) == 0
    assert "a sum" in captured.refusals("fuse")


def test_heads_are_never_fused(capture):
    captured = capture(Chain(act=nn.SiLU()), "mods", heads=["linear"])
    captured(torch.randn(4, K))
    assert captured.count(FUSED) == 0
    assert captured.nodes(LINEAR)[0].args[2] is not None
    assert "head" in captured.refusals("fuse")


def test_other_readers_of_the_inner_value(capture, close):
    model = Chain(act=nn.Hardswish(), norm=nn.RMSNorm(N), bias=False)

    def forward(x):
        h = model.linear(x)
        return model.act(model.norm(h)), h.sum()

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    for got, want in zip(captured(x), forward(x), strict=True):
        close(got, want)
    assert captured.count(FUSED) == 0
    assert "other readers" in captured.refusals("fuse")


def test_norm_result_with_other_readers_fuses_without_the_activation(capture, close):
    model = Chain(act=nn.Hardswish(), norm=nn.RMSNorm(N), bias=False)

    def forward(x):
        h = model.norm(model.linear(x))
        return model.act(h), h.sum()

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    for got, want in zip(captured(x), forward(x), strict=True):
        close(got, want)
    assert captured.nodes(FUSED)[0].args[7] == "none"


def test_one_linear_called_twice(capture, close):
    """Fusion acts on call sites: only the second call of a shared layer has a norm behind it."""
    torch.manual_seed(0)
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        h = linear(x)
        h = linear(h)
        return F.hardswish(norm(h))

    captured = capture(forward, "mods")
    x = torch.randn(4, N)
    close(captured(x), forward(x))
    assert (captured.count(LINEAR), captured.count(FUSED)) == (1, 1)


def test_write_to_the_input_in_between(capture, close):
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        h = linear(x)
        x.mul_(2)
        return norm(h) + x

    captured = capture(forward, "mods")
    mine, theirs = torch.randn(4, N), None
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    close(mine, theirs)
    assert captured.count(FUSED) == 0
    assert "written to in place" in captured.refusals("fuse")


def test_write_through_a_view_in_between(capture, close):
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        h = linear(x)
        x.view(-1)[3:9].zero_()
        return norm(h) + x

    captured = capture(forward, "mods")
    mine = torch.randn(4, N)
    theirs = mine.clone()
    close(captured(mine), forward(theirs))
    assert captured.count(FUSED) == 0


def test_gradient_mode_between(capture, close):
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)

    def forward(x):
        with torch.no_grad():
            h = linear(x)
        return norm(h)

    captured = capture(forward, "mods")
    x = torch.randn(4, N, requires_grad=True)
    captured(x).sum().backward()
    assert x.grad is None
    assert linear.weight.grad is None
    assert norm.weight.grad is not None
    assert captured.count(FUSED) == 0


def test_rounding_cast_between_is_kept(capture, close):
    model = Chain(nn.RMSNorm(N), bias=False)

    def forward(x):
        return model.norm(model.linear(x).to(torch.bfloat16).to(torch.float32))

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    close(captured(x), forward(x))
    assert captured.count(FUSED) == 0
    assert "rounds" in captured.refusals("fuse")


def test_rounding_cast_behind_is_kept(capture, close):
    model = Chain(nn.RMSNorm(N), nn.Hardswish(), bias=False)

    def forward(x):
        return model.act(model.norm(model.linear(x)).to(torch.bfloat16))

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    assert torch.equal(captured(x), forward(x))
    assert captured.nodes(FUSED)[0].args[7] == "none"
    assert captured.count(F.hardswish) == 1


def test_frozen_and_tied_weights(capture, close):
    torch.manual_seed(0)
    linear, norm = nn.Linear(N, N, bias=False), nn.RMSNorm(N)
    linear.weight.requires_grad_(False)
    other = nn.Linear(N, N, bias=False)
    other.weight = linear.weight

    def forward(x):
        return F.hardswish(norm(other(F.hardswish(norm(linear(x))))))

    captured = capture(forward, "mods")
    x = torch.randn(4, N, requires_grad=True)
    got, want = captured(x), forward(x)
    close(got, want)
    (mine,) = torch.autograd.grad(got.square().sum(), x)
    (theirs,) = torch.autograd.grad(want.square().sum(), x)
    close(mine, theirs)
    assert captured.count(FUSED) == 2


def test_gain_that_is_computed_late(capture, close):
    """The op stands behind its last input, not where the linear stood."""
    linear = nn.Linear(K, N, bias=False)

    def forward(x, s):
        h = linear(x)
        gain = torch.ones(N) * s.exp().sum()
        return F.rms_norm(h, (N,), gain, 1e-5)

    captured = capture(forward, "mods")
    args = torch.randn(4, K), torch.randn(3)
    close(captured(*args), forward(*args))
    assert captured.count(FUSED) == 1


def test_checkpointed_body(capture, agree, quick):
    model = Chain(act=nn.SiLU()).train(quick.train)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    captured = capture(Checkpointed(), "mods")
    agree(captured, model, reference(F.hardswish), quick, K)
    assert captured.count(FUSED) == 1
    assert captured.count(LINEAR, F.layer_norm, F.silu) == 0


def test_dynamic_batch(capture, close):
    model = Grouped(act=nn.SiLU())
    model.norm = nn.RMSNorm(8)
    captured = capture(model, "mods", dynamic=True)
    for batch in (3, 5, 9):
        x = torch.randn(batch, K)
        z = linear_ref(model, x).view(batch, 3, 8)
        close(captured(x), F.hardswish(norm_ref(z, model.norm, EPS32)))
    assert len(captured.after) == 1
    assert captured.count(FUSED) == 1


def test_autocast_inside_the_graph(capture, close):
    model = Chain(act=nn.SiLU())

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = model.linear(x)
        return model.act(model.norm(h.float()))

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    z = F.linear(x.bfloat16(), model.linear.weight.bfloat16()).float()
    want = F.hardswish(norm_ref(z, model.norm))
    close(captured(x), want, torch.bfloat16)
    assert captured.count(FUSED) == 1


def test_vmap_is_left_alone(capture, close):
    model = Chain(nn.RMSNorm(N), bias=False)

    def forward(x):
        return torch.vmap(lambda row: model.norm(model.linear(row)))(x)

    captured = capture(forward, "mods")
    x = torch.randn(4, K)
    close(captured(x), forward(x))
    assert captured.count(FUSED, BLOCK_NORM) == 0
