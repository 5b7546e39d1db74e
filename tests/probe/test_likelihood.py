"""Which outputs are logits of a log loss, told by their gradients; seeds and divergences."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import binary_cross_entropy
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.functional import cross_entropy
from torch.nn.functional import mse_loss

from loka_compile.probe import likelihood as lh

BCE = binary_cross_entropy_with_logits
B = 400


def labels(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).round()


def kind(output: torch.Tensor, loss) -> str | None:
    leaf = output.detach().requires_grad_()
    loss(leaf).backward()
    return lh.kind_of(leaf.detach(), leaf.grad)


def sound(z: torch.Tensor) -> dict[str, str | None]:
    y = labels(*z.shape)
    p = z.float().sigmoid().clamp(1e-6, 1 - 1e-6)
    return {
        "mean": kind(z, lambda t: BCE(t.float(), y)),
        "sum": kind(z, lambda t: BCE(t.float(), y, reduction="sum")),
        "loss scale": kind(z, lambda t: 1024 * BCE(t.float(), y)),
        "probabilities": kind(p, lambda t: binary_cross_entropy(t, y)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_a_log_loss_is_known_whatever_its_constant(scale: float, dtype: torch.dtype) -> None:
    found = sound((scale * torch.randn(B)).to(dtype))
    assert found.pop("probabilities") == lh.PROBABILITIES
    assert set(found.values()) == {lh.LOGITS}, found


def test_tasks_may_have_weights_of_their_own() -> None:
    y, weights = labels(B, 3), torch.tensor([1.0, 0.1, 7.0])
    z = torch.randn(B, 3)
    assert kind(z, lambda t: (BCE(t, y, reduction="none") * weights).mean()) == lh.LOGITS
    # One of them is read by something else.
    assert kind(z, lambda t: BCE(t[:, :2], y[:, :2]) + t[:, 2].square().mean()) is None
    # One is not read at all.
    assert kind(z, lambda t: BCE(t[:, :2], y[:, :2])) is None


def test_what_is_no_plain_log_loss() -> None:
    y, z = labels(B), torch.randn(B)
    each = torch.rand(B) + 0.5
    other = {
        "mse": kind(z, lambda t: mse_loss(t, y)),
        "weighted": kind(z, lambda t: (BCE(t, y, reduction="none") * each).mean()),
        "positive weight": kind(z, lambda t: BCE(t, y, pos_weight=torch.tensor(3.0))),
        "soft labels": kind(z, lambda t: BCE(t, 0.9 * y + 0.05)),
        "beside another": kind(z, lambda t: BCE(t, y) + 0.1 * t.square().mean()),
        "classes": kind(torch.randn(B, 4), lambda t: cross_entropy(t, torch.arange(B) % 4)),
        "no gradient": lh.kind_of(z, torch.zeros(B)),
        "too few": kind(z[:4], lambda t: BCE(t, y[:4])),
        "not finite": lh.kind_of(torch.full((B,), float("nan")), z),
    }
    assert set(other.values()) == {None}, other


def test_shapes_that_logits_have() -> None:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True) * 2

    assert all(lh.may_be_logits(made(*s)) for s in ((B,), (B, 1), (B, 16)))
    assert not any(lh.may_be_logits(made(*s)) for s in ((), (B, 17), (B, 3, 1), (0,)))
    assert not lh.may_be_logits(torch.randn(B)) and not lh.may_be_logits(None)


@pytest.mark.parametrize("what", [lh.LOGITS, lh.PROBABILITIES])
def test_seeds_give_twice_the_divergence_of_a_small_shift(what: str) -> None:
    z = torch.randn(2000, 3).double()
    shift = 1e-3 * torch.randn(3).double().expand(2000, 3)
    output = z if what == lh.LOGITS else z.sigmoid()
    moved = output + (shift if what == lh.LOGITS else shift * output * (1 - output))
    kl = lh.divergence(what, output, moved)
    assert kl.shape == (2000,)
    generator = torch.Generator().manual_seed(0)
    squares = [
        ((lh.seed(what, output, generator) * (moved - output)).sum(1) ** 2).mean()
        for _ in range(50)
    ]
    assert float(torch.stack(squares).mean()) == pytest.approx(2 * float(kl.mean()), rel=0.1)


def test_divergence_by_hand() -> None:
    a, b = torch.tensor([0.0]), torch.tensor([1.0])
    q = float(b.sigmoid())
    want = 0.5 * torch.log(torch.tensor(0.5 / q)) + 0.5 * torch.log(torch.tensor(0.5 / (1 - q)))
    assert float(lh.divergence(lh.LOGITS, a, b)) == pytest.approx(float(want), rel=1e-6)
    assert float(lh.divergence(lh.LOGITS, a, a)) == 0
    p = torch.tensor([0.0, 1.0, 0.5])
    assert torch.isfinite(lh.divergence(lh.PROBABILITIES, p, p.flip(0))).all()
