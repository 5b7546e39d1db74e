"""linear_pointwise against the steps that it stands for: values, gradients, dtypes, odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loka_compile.errors import DoubleBackwardError
from loka_compile.lowering import pointwise
from loka_compile.lowering import pointwise_autograd  # noqa: F401  (defines the op)
from loka_compile.lowering.recipes import EMULATED

T = "torch:tensorwise"
FORMS = ["", "b", "a", "ba", "bsa", "bma", "ma", "bm"]


def make(form: str, lead=(6,), k=32, n=48, device="cpu", dtype=torch.float32) -> dict[str, Tensor]:
    parts = {"x": torch.randn(*lead, k), "w": torch.randn(n, k) / k**0.5}
    extras = {
        "b": ("bias", torch.randn(n)),
        "m": ("mul", torch.randn(*lead, n)),
        "s": ("mul", torch.tensor(0.7)),
        "a": ("addend", torch.randn(*lead, n)),
    }
    parts |= dict(extras[f] for f in form)
    return {name: t.to(device, dtype).requires_grad_() for name, t in parts.items()}


def call(parts: dict[str, Tensor], act="none", kernel="loka:tensorwise", save=True):
    x, w, *rest = (parts.get(name) for name in ("x", "w", "bias", "mul", "addend"))
    return torch.ops.loka.linear_pointwise(
        x, w, *rest, act, kernel, T, T, *((None,) * 7), save
    )  # fmt: skip


def steps(parts: dict[str, Tensor], act: str) -> Tensor:
    y = F.linear(parts["x"], parts["w"], parts.get("bias"))
    y = y * parts["mul"] if "mul" in parts else y
    y = y + parts["addend"] if "addend" in parts else y
    acts = {"none": lambda t: t, "relu": torch.relu, "silu": F.silu, "gelu": F.gelu}
    return acts[act](y)


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("act", pointwise.ACTS)
def test_values_and_gradients(form: str, act: str, device) -> None:
    parts = make(form, device=device)
    y, _ = call(parts, act)
    gy = torch.randn_like(y)
    y.backward(gy)
    got = {name: t.grad for name, t in parts.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in parts.items()}
    want = steps(exact, act)
    want.backward(gy.double())
    # FP8 operands in three GEMMs; relu's slope flips where FP8 moved t across zero.
    assert relative(y, want) < 0.06
    for name, gradient in got.items():
        assert gradient.dtype == parts[name].dtype and gradient.shape == parts[name].shape
        assert relative(gradient, exact[name].grad) < (0.5 if act == "relu" else 0.15), name


@pytest.mark.parametrize("form", ["bma", "bsa", "ba"])
@pytest.mark.parametrize("act", pointwise.ACTS)
def test_the_epilogue_itself_is_exact(form: str, act: str) -> None:
    """Everything but the GEMM, in FP64: the gradient of the steps, from the same t."""
    parts = make(form, dtype=torch.float64)
    t = torch.randn(6, 48, dtype=torch.float64).requires_grad_()
    mul, addend = parts.get("mul"), parts["addend"]
    p = t if mul is None else t * mul
    y = {"none": lambda v: v, "relu": torch.relu, "silu": F.silu, "gelu": F.gelu}[act](p + addend)
    gy = torch.randn_like(y)
    y.backward(gy)
    plain = [None if v is None else v.detach() for v in (y, t, mul, addend)]
    gp, gt, gmul = pointwise.pointwise_backward(gy, *plain, act, torch.float64)
    gp = gy if act == "none" else gp
    torch.testing.assert_close(gp, addend.grad)
    torch.testing.assert_close(gp if mul is None else gt, t.grad)
    if mul is not None:
        torch.testing.assert_close(gmul, mul.grad)


def test_promotes_as_the_steps_do(device) -> None:
    """Under autocast the linear is bf16 and what is added may be FP32; a scalar never promotes."""
    parts = make("bma", device=device, dtype=torch.bfloat16)
    parts["addend"] = parts["addend"].detach().float().requires_grad_()
    y, t = call(parts, "silu")
    assert y.dtype == steps(parts, "silu").dtype == torch.float32 and t.dtype == torch.bfloat16
    y.sum().backward()
    assert all(p.grad.dtype == p.dtype for p in parts.values())
    scalar = make("bsa", device=device, dtype=torch.bfloat16)
    scalar["mul"] = torch.tensor(0.3, device=device, requires_grad=True)
    y, _ = call(scalar)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert scalar["mul"].grad.dtype == torch.float32 and scalar["mul"].grad.shape == ()


@pytest.mark.parametrize("lead", [(), (1,), (0,), (3, 5), (2, 0, 4)])
def test_any_leading_dimensions(lead: tuple[int, ...], device) -> None:
    parts = make("bma", lead, device=device)
    y, _ = call(parts, "silu", "loka:tensorwise")
    assert y.shape == (*lead, 48)
    y.sum().backward()
    assert all(p.grad.shape == p.shape for p in parts.values())
    if y.numel():
        assert relative(y, steps(parts, "silu")) < 0.1


def test_keeps_only_what_the_backward_reads(device) -> None:
    assert call(make("ba", device=device), "relu")[1].numel() == 0
    assert call(make("a", device=device))[1].numel() == 0
    assert call(make("b", device=device), "silu")[1].shape == (6, 48)
    assert call(make("b", device=device), "silu", save=False)[1].numel() == 0
    assert call(make("bma", device=device))[1].shape == (6, 48)


@pytest.mark.parametrize("form", ["b", "bma", "bsa"])
def test_fakes_schemas_and_autograd(form: str) -> None:
    parts = make(form, k=16, n=16)
    x, w, *rest = (parts.get(name) for name in ("x", "w", "bias", "mul", "addend"))
    args = (
        x,
        w,
        *rest,
        "silu",
        "loka:tensorwise",
        T + EMULATED,
        T + EMULATED,
        *((None,) * 7),
        True,
    )
    torch.library.opcheck(torch.ops.loka.linear_pointwise.default, args)


def test_second_order_is_refused(device) -> None:
    parts = make("bma", device=device)
    y, _ = call(parts, "silu")
    (g,) = torch.autograd.grad(y.square().sum(), parts["mul"], create_graph=True)
    with pytest.raises(DoubleBackwardError):
        g.sum().backward()
