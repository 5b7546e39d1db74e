"""`loka::linear_epilogue`: gradients, fakes, dtypes, and its parts against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loka_compile.errors import DoubleBackwardError
from loka_compile.kernels.block_norm import block_norm_ref
from loka_compile.lowering import epilogue_ops
from loka_compile.lowering import ops
from loka_compile.lowering.activations import ACTIVATIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION as HIGH
from loka_compile.probe import coherence  # noqa: F401  (defines the op that the backward calls)
from loka_compile.probe.places import Places
from loka_compile.probe.statistics import Statistics
from tests.helpers.observed import probe_of

EPS = 1e-5
# One block of 4 and a ragged one of 2: gradcheck costs two forwards per element.
M, K, N, BLOCK = 3, 5, 6, 4
PARTS = ("bias", "scale", "addend", "gain", "factor", "residual")
TORCH = {
    "none": lambda v: v,
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "hard_swish": F.hardswish,
    # F.hardsigmoid has an FP32 1/6 in its FP64 gradient.
    "hard_sigmoid": lambda v: (v + 3).clamp(0, 6) / 6,
}
FORMS = {
    "bias-act": {"bias": 1, "act": "silu"},
    "act-norm": {"pre": "silu", "block": BLOCK, "gain": 1},
    "add-norm-act": {"addend": 1, "block": BLOCK, "gain": 1, "act": "hard_swish"},
    "scaled-add-norm": {"scale": 1, "addend": 1, "block": N, "gain": 1},
    "scaled": {"scale": 1, "act": "tanh"},
    "add-gate": {"addend": 1, "block": BLOCK, "gain": 1, "act": "hard_sigmoid", "gate": True},
    "act-mul": {"bias": 1, "act": "sigmoid", "factor": 1},
    "cross": {"bias": 1, "factor": 1, "residual": 1},
    "add": {"addend": 1},
    "all": {**dict.fromkeys(PARTS, 1), "pre": "gelu", "block": BLOCK, "act": "tanh"},
}


def make(form, dtype=torch.float64, lead=(M,), grad=True):
    """(x, w, parts by name)."""
    shapes = {"bias": (N,), "scale": (), "gain": (N,)}
    x, w = torch.randn(*lead, K, dtype=dtype), torch.randn(N, K, dtype=dtype) / K**0.5
    parts = {p: torch.randn(shapes.get(p, (*lead, N)), dtype=dtype) for p in PARTS if p in form}
    for t in (x, w, *parts.values()):
        t.requires_grad_(grad)
    return x, w, parts


def call(form, x, w, parts, kernels=(HIGH,) * 3, probe=(), dtype=None):
    one = parts.get
    return torch.ops.loka.linear_epilogue(
        x, w, one("bias"), *kernels, list(probe), *((None,) * 7), one("scale"), one("addend"),
        form.get("pre", "none"), form.get("block", 0), EPS, one("gain"), form.get("act", "none"),
        form.get("gate", False), one("factor"), one("residual"), dtype or x.dtype,
    )  # fmt: skip


def reference(form, x, w, parts):
    v = F.linear(x, w, parts.get("bias"))
    v = v * parts.get("scale", 1)
    v = v + parts.get("addend", 0)
    n = TORCH[form.get("pre", "none")](v)
    if form.get("block"):
        n = block_norm_ref(n, None, form["block"], EPS)
    t = TORCH[form.get("act", "none")](n * parts.get("gain", 1))
    t = t * (v if form.get("gate") else parts.get("factor", 1))
    return t + parts.get("residual", 0)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("lead", [(M,), (2, M), ()], ids=["2d", "3d", "1d"])
def test_values_and_gradients_are_those_of_plain_torch(name, lead):
    form = FORMS[name]
    x, w, parts = make(form, lead=lead)
    y, want = call(form, x, w, parts)[0], reference(form, x, w, parts)
    torch.testing.assert_close(y, want)
    leaves = [x, w, *parts.values()]
    seed = torch.randn_like(y)
    got, wanted = (torch.autograd.grad(t, leaves, seed) for t in (y, want))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_are_torchs_at_kinks_and_for_nan(act):
    v = torch.tensor([-30.0, -3, -1, 0, 1, 3, 30, float("nan"), float("inf")], dtype=torch.float64)
    v.requires_grad_()
    ours, theirs = ACTIVATIONS[act], TORCH[act](v)
    torch.testing.assert_close(ours.of(v), theirs, equal_nan=True)
    g = torch.randn(9, dtype=torch.float64)
    got, want = ours.backward(g, v.detach()), torch.autograd.grad(theirs, v, g)[0]
    # Through clamp, autograd gives half of the kinks a gradient; F.hardsigmoid gives them none.
    keep = torch.tensor([act != "hard_sigmoid" or abs(t) != 3 for t in v.tolist()])
    if act == "hard_swish":
        # NaN stays NaN; F.hardswish's CPU gradient lets it through as 1.
        assert got.isnan().tolist() == v.isnan().tolist()
        keep &= ~v.isnan()
    torch.testing.assert_close(got[keep], want[keep], equal_nan=True)


@pytest.mark.parametrize("name", FORMS)
def test_opcheck(name):
    form = FORMS[name]
    x, w, parts = make(form, torch.float32)
    torch.library.opcheck(
        epilogue_ops.LINEAR_EPILOGUE,
        (x, w, parts.get("bias"), HIGH, HIGH, HIGH, [], *((None,) * 7), parts.get("scale"),
         parts.get("addend"), form.get("pre", "none"), form.get("block", 0), EPS,
         parts.get("gain"), form.get("act", "none"), form.get("gate", False),
         parts.get("factor"), parts.get("residual"), torch.float32),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


def test_mixed_dtypes_as_autocast_makes_them():
    """A bf16 GEMM and FP32 neighbours: the result is FP32, each gradient has its own dtype."""
    form = FORMS["all"]
    x, w, parts = make(form, torch.float32)
    narrow = {
        k: t.detach().to(torch.bfloat16 if k == "bias" else t.dtype) for k, t in parts.items()
    }
    leaves = [x.detach().bfloat16(), w.detach().bfloat16(), *narrow.values()]
    for t in leaves:
        t.requires_grad_()
    y, kept, r = call(form, leaves[0], leaves[1], narrow, dtype=torch.float32)
    assert (y.dtype, kept.dtype, r.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    for t, g in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert g.dtype == t.dtype and g.shape == t.shape


@pytest.mark.parametrize("form", [{"bias": 1, "act": "relu"}, {"addend": 1, "act": "relu"}])
def test_relu_keeps_its_result_and_nothing_else(form):
    x, w, parts = make(form)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = call(form, x, w, parts)[0]
    wide = [t for t in kept if t.shape == y.shape]
    assert [t.data_ptr() for t in wide] == [y.data_ptr()]
    leaves = [x, w, *parts.values()]
    seed, want = torch.randn_like(y), reference(form, x, w, parts)
    got, wanted = (torch.autograd.grad(t, leaves, seed) for t in (y, want))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_no_rows():
    form = FORMS["all"]
    x, w, parts = make(form, lead=(0,))
    y = call(form, x, w, parts)[0]
    y.sum().backward()
    assert y.shape == (0, N) and not w.grad.any() and x.grad.shape == (0, K)


def test_factor_and_residual_of_other_strides_give_a_dense_result():
    form = FORMS["cross"]
    x, w, parts = make(form, torch.float32, grad=False)
    parts = {k: t.t().contiguous().t() for k, t in parts.items()}
    y = call(form, x, w, parts)[0]
    assert y.is_contiguous()
    torch.testing.assert_close(y, reference(form, x, w, parts))


def test_fp8_runs_in_the_three_directions():
    kernels = ("torch:rowwise" + EMULATED,) * 3
    form = {"bias": 1, "act": "silu", "factor": 1}
    torch.manual_seed(0)
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    parts = {"bias": torch.randn(48), "factor": torch.randn(32, 48)}
    results = []
    for k in (kernels, (HIGH,) * 3):
        y = call(form, x, w, parts, k)[0]
        results.append((y, *torch.autograd.grad(y.sum(), (x, w))))
    for got, want in zip(*results, strict=True):
        error = (got - want).norm() / want.norm()
        assert 1e-3 < error < 0.1


def test_probes_see_the_gradient_behind_the_epilogue():
    form = FORMS["act-mul"]
    x, w, parts = make(form, torch.float32)
    state = Statistics.empty(N, torch.float32, torch.device("cpu"), gradient=True)
    places = Places([state], torch.device("cpu"))
    y = call(form, x, w, parts, probe=probe_of(places))[0]
    y.sum().backward()
    z = F.linear(x, w, parts["bias"]).detach().requires_grad_()
    (torch.sigmoid(z) * parts["factor"]).sum().backward()
    torch.testing.assert_close(state.mean().float(), z.grad.mean(0), rtol=1e-4, atol=1e-6)


def test_second_order_is_refused_and_unknown_activations_are_named():
    x, w, parts = make(FORMS["bias-act"])
    y = call(FORMS["bias-act"], x, w, parts)[0]
    (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        gx.sum().backward()
    with pytest.raises(ValueError, match="activation 'swash'"), torch.device("meta"):
        call({"act": "swash"}, torch.ones(2, 2), torch.ones(2, 2), {})


def test_inductor_would_lower_it():
    assert ops.DECOMPOSITIONS[epilogue_ops.LINEAR_EPILOGUE]
    from loka_compile import _compat

    assert _compat.missing_decompositions(ops.DECOMPOSITIONS) == []
