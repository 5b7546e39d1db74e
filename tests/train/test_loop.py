"""The training loop: which logits are scored, what the trace says, repeatability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from loka_compile.data import Batch
from loka_compile.train.arms import Arm
from loka_compile.train.loop import WARMUP_STEPS
from loka_compile.train.loop import LoopSettings
from loka_compile.train.loop import Trace
from loka_compile.train.loop import TrainError
from loka_compile.train.loop import run_arm

CPU = torch.device("cpu")


class Tiny(nn.Module):
    """Logit = one embedding + one weight on one dense value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Embedding(4, 1), nn.Flatten())
        self.dense = Dense()

    def inputs(
        self, ids: torch.Tensor, dense: torch.Tensor, history: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        return self.embedding(ids), dense


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return (embeddings + self.linear(dense)).squeeze(-1)


def batches(steps: int, size: int = 8) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    return [
        Batch(
            torch.randint(4, (size, 1), generator=g),
            torch.randn(size, 1, generator=g),
            torch.randint(2, (size,), generator=g).float(),
            i * size,
        )
        for i in range(steps)
    ]


def make(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def test_scored_logits_are_those_before_the_update_in_one_forward() -> None:
    model, data = make(), batches(5)
    calls = 0

    def dense(e: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return model.dense(e, d)

    trace = run_arm(Arm("a", model, dense), data, LoopSettings(CPU, autocast=False))
    assert calls == 5
    # The same by hand: score, then learn.
    want, other = [], make()
    optimizer = torch.optim.Adam(other.parameters(), 1e-3)
    for b in data:
        with torch.no_grad():
            want.append(other.dense(other.embedding(b.categorical), b.dense))
        optimizer.zero_grad()
        loss = nn.BCEWithLogitsLoss()(other.dense(other.embedding(b.categorical), b.dense), b.label)
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(trace.logits, torch.cat(want).numpy(), rtol=1e-6)
    assert not torch.equal(make().dense.linear.weight, model.dense.linear.weight)


def test_autocast_covers_the_dense_part_only() -> None:
    model, seen = make(), []

    def dense(e: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        seen.append((e.dtype, model.dense.linear(d).dtype))
        return model.dense(e, d)

    run_arm(Arm("a", model, dense), batches(1), LoopSettings(CPU))
    assert seen == [(torch.float32, torch.bfloat16)]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_same_seed_same_logits() -> None:
    runs = [
        run_arm(Arm("a", m := make(3), m.dense), batches(6), LoopSettings(CPU)) for _ in range(2)
    ]
    np.testing.assert_array_equal(runs[0].logits, runs[1].logits)


def test_the_trace_follows_the_plan_and_the_odd_last_batch() -> None:
    model, step = make(), iter(range(100))
    data = [*batches(20), Batch(*(t[:3] for t in (_cat(20), _dense(), _label())), start=160)]
    trace = run_arm(
        Arm("a", model, model.dense, plan_active=lambda: next(step) >= 8), data, LoopSettings(CPU)
    )
    assert trace.plan_active.tolist() == [False] * 8 + [True] * 13
    assert trace.swap_row == 64
    assert trace.sizes.tolist() == [8] * 20 + [3]
    assert len(trace.logits) == len(trace.labels) == 163
    assert trace.steady.tolist() == [i in range(WARMUP_STEPS, 20) for i in range(21)]
    assert trace.examples_per_s is not None
    assert trace.examples_per_s > 0


def _cat(n: int) -> torch.Tensor:
    return torch.zeros(n, 1, dtype=torch.int64)


def _dense() -> torch.Tensor:
    return torch.zeros(20, 1)


def _label() -> torch.Tensor:
    return torch.zeros(20)


def trace(active: list[bool], seconds: list[float] | None = None) -> Trace:
    n = len(active)
    return Trace(
        np.zeros(n * 4),
        np.zeros(n * 4),
        np.arange(n) * 4,
        np.full(n, 4),
        np.array(seconds or [1.0] * n),
        np.zeros(n, dtype=bool),
        np.array(active),
    )


@pytest.mark.parametrize(
    ("active", "row"),
    [
        ([False, True, True], 4),
        ([True, True], 0),
        ([False, False], None),
        ([True, False, True], 8),  # a plan that was dropped and came back
        ([True, False], None),
    ],
)
def test_swap_row_is_where_the_plan_begins_to_hold(active: list[bool], row: int | None) -> None:
    assert trace(active).swap_row == row


def test_speed_leaves_out_warm_up_and_compiling_steps() -> None:
    t = trace([False] * 20, [100.0] * WARMUP_STEPS + [2.0] * (20 - WARMUP_STEPS))
    assert t.examples_per_s == pytest.approx(2.0)
    t.seconds[15], t.compiled[15] = 500.0, True
    assert t.examples_per_s == pytest.approx(2.0)
    assert trace([False] * 3).examples_per_s is None


def test_what_cannot_be_trained_is_said() -> None:
    model = make()
    with pytest.raises(TrainError, match="adam or adagrad"):
        run_arm(Arm("a", model, model.dense), batches(1), LoopSettings(CPU, optimizer="sgdd"))
    with pytest.raises(TrainError, match="no labelled rows"):
        run_arm(Arm("a", model, model.dense), [], LoopSettings(CPU))
