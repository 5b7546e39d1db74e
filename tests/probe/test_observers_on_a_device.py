"""What observers do on a device: nothing made elsewhere and copied, nothing awaited, bounded work.

On the meta device, in plain torch: the ops of a probed step must all stay on it. A tensor made on
the host would be a copy that waits, and an error while a CUDA graph is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka_compile.probe import coherence as co
from loka_compile.probe import statistics as st
from loka_compile.probe import weights as wt
from loka_compile.probe.estimate import clamped_error
from loka_compile.probe.statistics import Statistics

META = torch.device("meta")
aten = torch.ops.aten


#: Make a tensor of Python values, which lie on the host, or wait for the device.
FORBIDDEN = (
    torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor, Tensor.item, Tensor.tolist,
    Tensor.cpu, Tensor.cuda, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
)  # fmt: skip


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in FORBIDDEN, f"{func}: the host is asked"
        return func(*args, **(kwargs or {}))


class OnOneDevice(TorchDispatchMode):
    """Raises on a tensor that is not on `device`; keeps the most bytes that one op made."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.most, self.calls = device, 0, _Calls()

    def __enter__(self) -> OnOneDevice:
        self.calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.calls.__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (aten._local_scalar_dense.default, aten.nonzero.default), func
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                assert one.device.type == self.device.type, f"{func} made a tensor on {one.device}"
                made = one.numel() * one.element_size()
                self.most = max(self.most, 0 if func.is_view else made)
        return out


def test_the_mode_sees_what_it_is_for() -> None:
    one = torch.zeros(4, device=META)
    number = torch.zeros((), dtype=torch.int64, device=META)
    for wrong in (
        lambda: one.new_tensor(3.0),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: torch.zeros(3),
        lambda: one[number],
        lambda: bool(number),
    ):
        with pytest.raises(AssertionError), OnOneDevice(META):
            wrong()


@pytest.fixture
def operands() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    m, n, k = 4096, 512, 2048
    make = {"device": META, "dtype": torch.bfloat16}
    yield torch.empty(m, n, **make), torch.empty(m, k, **make), torch.empty(n, k, **make)


def test_a_probed_step_stays_on_the_device(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    gy, x, gw = operands
    x_held = Statistics.empty(x.shape[1], x.dtype, META, covariance=True)
    g_held = Statistics.empty(gy.shape[1], gy.dtype, META, gradient=True)
    record = wt.Record([gw])
    with OnOneDevice(META) as seen:
        st.update(x, x_held)
        st.update(gy, g_held)
        co.update(gw, gy, x, g_held)
        record.observe([gw])
    # A copy of the input in FP64 is the most, or the covariance itself.
    assert seen.most <= 8 * max(x.numel(), x.shape[1] ** 2)


def test_the_estimate_between_probes_stays_on_the_device() -> None:
    x_held = Statistics.empty(256, torch.bfloat16, META)
    w = torch.empty(128, 256, device=META, dtype=torch.bfloat16)
    with OnOneDevice(META):
        clamped_error("torch:tensorwise+emulated", w, x_held)


def test_a_sketch_is_small_beside_its_batch(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    """Beside maxima and lengths, which read x and gy once, only chosen columns are touched."""
    from loka_compile.probe import sketch as sk

    gy, x, _ = operands
    ring, marks = sk.empty(torch.bfloat16, META)
    amax = torch.zeros(2, device=META)
    start = torch.zeros((), dtype=torch.float64, device=META)
    with OnOneDevice(META) as seen:
        sk.record_ref(gy, x, start, ring, marks, amax)
    most = max(8 * sk.ENERGY_ROWS * x.shape[1], ring.numel() * ring.element_size())
    assert seen.most <= most
