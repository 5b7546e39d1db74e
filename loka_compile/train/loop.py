"""One arm, one pass: progressive validation from the training forward's own logits.

A row is scored by the logits that were computed before the model was updated on it, so every row
is a test row and no second forward is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import binary_cross_entropy_with_logits

from loka_compile.data.base import Batch
from loka_compile.train.arms import Arm
from loka_compile.train.optimizers import TrainError
from loka_compile.train.optimizers import make_optimizers

#: The first steps compile, probe and swap; speed is taken after them in every arm alike.
WARMUP_STEPS = 12


@dataclass(frozen=True)
class LoopSettings:
    device: torch.device
    lr: float = 1e-3
    optimizer: str = "adam"
    #: Of the tables that have sparse gradients; their optimizer is row-wise Adagrad.
    table_lr: float = 0.05
    autocast: bool = True


@dataclass(frozen=True, eq=False)
class Trace:
    """What one pass left: logits float32 ``[rows]``, and per step ``[steps]`` arrays."""

    logits: np.ndarray
    labels: np.ndarray  # float32 [rows]
    starts: np.ndarray  # int64: first row of each step
    sizes: np.ndarray  # int64
    seconds: np.ndarray  # float64
    compiled: np.ndarray  # bool: something was compiled during the step
    plan_active: np.ndarray  # bool: the step's forward ran the plan
    truth: np.ndarray | None = None  # float32 [rows]: probabilities the labels were drawn with

    @property
    def swap_row(self) -> int | None:
        """First row from which on every step ran the plan; None when the last step did not."""
        off = np.flatnonzero(~self.plan_active)
        if len(off) == 0:
            return 0
        after = int(off[-1]) + 1
        return int(self.starts[after]) if after < len(self.starts) else None

    @property
    def steady(self) -> np.ndarray:
        """bool ``[steps]``: full batches after the warm-up during which nothing was compiled."""
        late = np.arange(len(self.sizes)) >= WARMUP_STEPS
        swapped = np.append(False, self.plan_active[1:] != self.plan_active[:-1])
        return late & (self.sizes == self.sizes[0]) & ~self.compiled & ~swapped

    @property
    def examples_per_s(self) -> float | None:
        """Rows per second over the steady steps; None when the run was too short to have any."""
        steady = self.steady
        if not steady.any():
            return None
        return float(self.sizes[steady].sum() / self.seconds[steady].sum())


def run_arm(
    arm: Arm,
    batches: Iterable[Batch],
    settings: LoopSettings,
    on_rows: Callable[[int], None] = lambda n: None,
) -> Trace:
    """Train ``arm`` once over ``batches``. ``on_rows`` hears the size of every finished batch.

    FP32 parameters; bf16 autocast around the dense forward only; the loss in FP32.
    """
    device = settings.device
    optimizers = make_optimizers(arm.model, settings.optimizer, settings.lr, settings.table_lr)
    arm.model.train()
    clock = _Clock(device)
    logits: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    truth: list[torch.Tensor] = []
    starts: list[int] = []
    compiled: list[bool] = []
    active: list[bool] = []
    for batch in batches:
        compiles = _compiles()
        clock.tick()
        here = batch.to(device)
        inputs = arm.model.inputs(here.categorical, here.dense, here.history)
        with (
            attention(device),
            torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast),
        ):
            out = arm.dense(*inputs)
        active.append(arm.plan_active())
        out = out.float()
        heads = out.unsqueeze(1) if out.dim() == 1 else out
        # Without a teacher, every further head learns the label too.
        target = here.label.unsqueeze(1).expand_as(heads)
        loss = binary_cross_entropy_with_logits(heads, target)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        out = heads[:, 0]
        logits.append(out.detach())
        labels.append(batch.label)
        if batch.truth is not None:
            truth.append(batch.truth)
        starts.append(batch.start)
        compiled.append(_compiles() != compiles)
        on_rows(len(batch))
    if not logits:
        raise TrainError("the data source gave no labelled rows; check the source and --limit")
    return Trace(
        torch.cat(logits).cpu().numpy(),
        torch.cat(labels).cpu().numpy(),
        np.array(starts, dtype=np.int64),
        np.array([len(x) for x in labels], dtype=np.int64),
        clock.seconds(),
        np.array(compiled, dtype=bool),
        np.array(active, dtype=bool),
        torch.cat(truth).cpu().numpy() if truth else None,
    )


def attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """On a CPU as products and a softmax: there most of an InterFormer's step would be the backward
    of flash attention."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


class _Clock:
    """Seconds between ticks, without making the host wait for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> np.ndarray:
        """float64 ``[steps]``."""
        self.tick()
        if not self._cuda:
            return np.diff(np.array(self._times))
        torch.cuda.synchronize()
        pairs = itertools.pairwise(self._events)
        return np.array([a.elapsed_time(b) / 1e3 for a, b in pairs])


def _compiles() -> int:
    """How many graphs Dynamo and AOTAutograd have taken so far in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"] + counters["aot_autograd"]["total"]
