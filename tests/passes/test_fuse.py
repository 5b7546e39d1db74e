"""linear -> block_norm -> activation chains that become one op, with the values that they had."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from chain_models import EPS32
from chain_models import LINEAR
from chain_models import Chain
from chain_models import Functional
from chain_models import Grouped
from chain_models import K
from chain_models import N
from chain_models import Spelled
from chain_models import SwishLayerNorm
from chain_models import WrittenRMS
from chain_models import gate_ref
from chain_models import linear_ref
from chain_models import norm_ref
from chain_models import perturb
from chain_models import reference
from torch import nn

from loka_compile.passes import graph as g
from loka_compile.passes.block_norm import BLOCK_NORM
from loka_compile.passes.fuse import FUSED

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


@pytest.mark.parametrize("name", GATES)
def test_gate_form_is_one_op(name, case, capture, agree):
    model = perturb(Chain(nn.Identity(), GATES[name]())).train(case.train)
    captured = capture(model, "mods")
    agree(captured, model, gate_ref, case, K)
    assert captured.count(torch.sigmoid, F.hardsigmoid, LINEAR, BLOCK_NORM) == 0
    (node,) = captured.nodes(FUSED)
    assert node.args[7:9] == ("hard_sigmoid", True)


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


def test_exact_fusion_refuses_a_norm_wider_than_a_block(capture, close):
    model = Chain(nn.RMSNorm(300), features=300, bias=False)
    captured = capture(model, "exact")
    x = torch.randn(4, K)
    close(captured(x), model(x))
    assert captured.count(FUSED) == 0
    assert "block_norm is off" in captured.refusals()
