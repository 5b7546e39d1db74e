"""Launches by the short way are those that Triton makes: same kernels, same parameters, same bits.

Without a GPU what arrives at the driver is compared (`helpers/launch_nowhere.py`), on one the
results; there also under graphs, on other streams and threads, and as addresses change.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from loka_compile import _compat
from loka_compile._compat import launching
from loka_compile.kernels import fused_backward
from loka_compile.kernels import fused_backward_blocks
from loka_compile.kernels import fused_forward
from loka_compile.kernels import interaction
from loka_compile.kernels import quantize_both
from loka_compile.kernels.call import Call
from loka_compile.kernels.launch import Launcher
from loka_compile.kernels.launch import Recipes
from loka_compile.kernels.room import dense
from loka_compile.lowering import chain
from loka_compile.lowering import chain_backward
from loka_compile.lowering import interaction as interactions
from loka_compile.lowering import pointwise
from loka_compile.lowering import weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCRIPT = Path(__file__).parents[1] / "helpers" / "launch_nowhere.py"
MODULES = (fused_forward, fused_backward, fused_backward_blocks, interaction, quantize_both)
#: Python functions of ours in one call of an op: a step has hundreds of calls.
MOST = {"interaction": 8, "quantize_rows": 12, "interaction_backward": 11, "quantize": 11}
MOST |= {"observe_some": 15, "coherence": 17, "quantize_weights": 14}
#: Launches of one call, where it is not one.
LAUNCHES = dict.fromkeys(("backward", "backward_rows", "interaction_backward", "quantize"), 2)
LAUNCHES |= {"observe": 4, "observe_some": 4, "coherence": 4, "quantize_weights": 2}


def tools_are_missing() -> bool:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which("cc") is None or not header.exists()


@pytest.mark.slow
@pytest.mark.skipif(tools_are_missing(), reason="no C compiler, or no headers of Python")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the libcuda here is a real one")
@pytest.mark.skipif(launching._form() is None, reason="no launcher that is known")
def test_the_driver_gets_what_triton_gives_it() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {one["case"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 16
    for name, one in found.items():
        assert one["direct"] == one["new_maps"] == one["by_triton"] and not one["unknown"], one
        assert len(one["direct"]) == LAUNCHES.get(name, 1), one
        assert one["calls"] <= MOST.get(name, 9), one


def test_an_unknown_launcher_is_left_alone(monkeypatch) -> None:
    assert _compat.direct_launch(object(), ()) is None
    import triton

    monkeypatch.setattr(launching, "_form", launching._form.__wrapped__)
    for version in ("3.5.1", "3.9.0", "4.0", "unknown"):
        monkeypatch.setattr(triton, "__version__", version)
        assert launching._form() is None


def test_signatures_have_to_agree() -> None:
    t = torch.zeros(4)
    box = type("Descriptor", (), {"block_shape": [16, 16]})()
    kinds = ("tensordesc<fp8e4nv[64,128]>", "*fp32", "i32", "constexpr", "fp32", "constexpr")
    assert launching._agree(kinds, (box, t, 5, 1, 0.5))
    assert not launching._agree(kinds, (t, t, 5, 1, 0.5))
    assert not launching._agree(kinds, (box, 5, 5, 1, 0.5))
    assert not launching._agree(kinds, (box, t, t, 1, 0.5))
    # A constant more, one less, and one of several that Triton packs.
    assert not launching._agree(kinds, (box, t, 5, 1))
    assert not launching._agree(kinds[:-2], (box, t, 5, 1, 0.5))
    assert not launching._agree((*kinds[:-1], ("i32", "i32")), (box, t, 5, 1, 0.5))


def test_pointers_that_lie_otherwise_are_another_kernel() -> None:
    """Two of them, each unaligned in turn; conftest.py holds launches of one key together."""
    n, k = 64, 64
    torch.manual_seed(0)
    a, w = (torch.randn(33, k).to(E4M3).to(DEVICE), torch.randn(n, k).to(E4M3).to(DEVICE))
    one = torch.ones((), device=DEVICE)
    wide = torch.randn(n + 1, device=DEVICE)
    gain, bias = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
    for args in ((gain, bias), (wide[1:], bias), (gain, wide[1:]), (wide[1:], wide[1:])):
        got = fused_forward.fused_forward(
            a, one, w, one, args[0], bias=args[1], block=64, out_dtype=torch.float32
        )
        want, _, _ = fused_forward.fused_forward_ref(
            a, one, w, one, args[0], bias=args[1], block=64
        )
        assert (got.y.double() - want).norm() < 1e-3 * want.norm()


def test_room_is_that_of_a_contiguous_tensor() -> None:
    for shape in ((), (0,), (5,), (3, 4), (3, 0), (0, 3), (2, 3, 4), (2, 0, 4)):
        sizes, strides, dtype = dense(shape, torch.float16)
        want = torch.empty(shape, dtype=torch.float16)
        assert (sizes, strides, dtype) == (tuple(want.shape), want.stride(), want.dtype)


def operands(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    # Few for the interpreter.
    m, n, k, block, b = (256, 512, 1024, 256, 300) if DEVICE.type == "cuda" else (33, 64, 64, 32, 5)

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    return {
        "block": block,
        "a": made(m, k, dtype=E4M3),
        "w": made(n, k, dtype=E4M3),
        "one": torch.rand((), device=DEVICE),
        "rows": torch.rand(m, 1, device=DEVICE),
        "columns": torch.rand(n, 1, device=DEVICE),
        "gain": made(n),
        "addend": made(m, n),
        "gy": made(m, n),
        "u": made(m, n),
        "r": torch.rand(m, n // block, device=DEVICE),
        "cells": torch.zeros(2, dtype=torch.int64, device=DEVICE),
        "x": made(b, 64, 128),
        "p": made(32, 64).t(),
        "left": made(24, 64),
        "gfm": made(b, 64, 32),
        "gc": made(b, 24, 128),
    }


def forward(o: dict[str, Any], run: Any = chain._fused_chain_cuda) -> Any:
    return run(
        o["a"], o["one"], o["w"], o["one"], None, None, o["block"], 1e-6, True, "hard_swish",
        False, True, torch.bfloat16, None, True, False,
    )  # fmt: skip


def forward_fp8(o: dict[str, Any], run: Any = chain._fused_chain_cuda) -> Any:
    return run(
        o["a"], o["rows"], o["w"], o["columns"], o["addend"], o["gain"], o["block"], 1e-6, True,
        "hard_swish", False, True, torch.bfloat16, o["one"], True, True,
    )  # fmt: skip


def by_values(o: dict[str, Any], run: Any = pointwise._fused_pointwise_cuda) -> Any:
    return run(
        o["a"], o["one"], o["w"], o["one"], o["gain"], o["gy"], o["addend"], "hard_swish", True,
        torch.bfloat16, torch.float32,
    )  # fmt: skip


def backward(o: dict[str, Any], run: Any = chain_backward._fused_chain_backward_cuda) -> Any:
    made = run(
        o["gy"], o["u"], o["r"], o["gain"], o["block"], "hard_swish", False, False, E5M2, False,
        E5M2, o["cells"],
    )  # fmt: skip
    return (*made, o["cells"].clone())


def backward_rows(o: dict[str, Any], run: Any = chain_backward._fused_chain_backward_cuda) -> Any:
    return run(
        o["gy"], o["u"], o["r"], None, o["block"], "hard_swish", False, True, E5M2, True, E4M3
    )


def backward_groups(
    o: dict[str, Any], run: Any = chain_backward._fused_chain_backward_groups_cuda
) -> Any:
    block, r = o["block"], o["r"]
    if block % 128:
        # Groups of 128 must not cross blocks: one for all.
        block, r = o["u"].shape[1], r[:, :1].contiguous()
    return run(o["gy"], o["u"], r, o["gain"], block, "hard_swish", False, E4M3, E4M3)


def interact(o: dict[str, Any], run: Any = interactions._forward_cuda) -> Any:
    return run(o["x"], o["p"], o["left"])


def interact_backward(o: dict[str, Any], run: Any = interactions._backward_cuda) -> Any:
    return run(o["gfm"], o["gc"], o["x"], o["p"], o["left"])


def quantize(o: dict[str, Any], run: Any = weights.quantize_weight) -> Any:
    return run(o["addend"], torch.bfloat16, "loka:tensorwise", "torch:rowwise")


OPS = {
    forward: "fused_chain",
    forward_fp8: "fused_chain",
    by_values: "fused_pointwise",
    backward: "fused_chain_backward",
    backward_rows: "fused_chain_backward",
    backward_groups: "fused_chain_backward_groups",
    interact: "interaction",
    interact_backward: "interaction_backward",
    quantize: "quantize_weight",
}
each_op = pytest.mark.parametrize("op", OPS)


@each_op
def test_results_are_what_the_fake_says(op) -> None:
    """Compiled code takes that for granted. Run by what runs on a GPU, compiled or interpreted."""
    o, through = operands(0), getattr(torch.ops.loka, OPS[op])
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one
            for name, one in o.items()
        }
        said = op(fakes, run=through)
    # On a CPU the op itself is another function.
    for real in (op(o), op(o, run=through)):
        assert len(real) == len(said)
        for mine, theirs in zip(real, said, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert mine.stride() == theirs.stride() or not mine.numel()
            assert mine.device.type == theirs.device.type and mine.data_ptr() % 16 == 0


def forget() -> None:
    for module in MODULES:
        for one in vars(module).values():
            if isinstance(one, Recipes):
                one.clear()


@contextlib.contextmanager
def as_triton_does() -> Iterator[None]:
    """Of all that is compiled by now."""
    launchers = [v for m in MODULES for v in vars(m).values() if isinstance(v, Launcher)]
    held = [(one, one.direct) for by in launchers for one in by._compiled.values()]
    for one, _ in held:
        one.direct = None
    forget()
    try:
        yield
    finally:
        for one, direct in held:
            one.direct = direct
        forget()


@pytest.fixture
def ways(monkeypatch) -> list[bool]:
    """Whether each launch took the short way."""
    found: list[bool] = []
    start = Call.start

    def watched(self: Call, *args: Any) -> bool:
        found.append(start(self, *args))
        return found[-1]

    monkeypatch.setattr(Call, "start", watched)
    return found


def by_triton(op: Callable[..., Any], o: dict[str, Any]) -> list[torch.Tensor]:
    op(o)
    with as_triton_does():
        return [t.clone() for t in op(o)]


def settled(op: Callable[..., Any], o: dict[str, Any]) -> None:
    op(o)
    op(o)


def same(got: Any, want: list[torch.Tensor]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        mine, theirs = mine.contiguous().view(-1), theirs.contiguous().view(-1)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gpu
@each_op
def test_same_bits(op, ways) -> None:
    o = operands(0)
    want = by_triton(op, o)
    settled(op, o)
    ways.clear()
    same(op(o), want)
    assert ways and all(ways), "Triton's launcher is known, and all maps"


@pytest.mark.gpu
@each_op
def test_addresses_change(op) -> None:
    """And come back with other values, as the allocator gives them."""
    want = {seed: by_triton(op, operands(seed)) for seed in range(8)}
    settled(op, operands(0))
    kept = []
    for seed in range(1, 5):
        kept.append(operands(seed))
        same(op(kept[-1]), want[seed])
    kept.clear()
    for seed in range(5, 8):
        same(op(operands(seed)), want[seed])


@pytest.mark.gpu
@each_op
def test_in_a_graph(op) -> None:
    o = operands(0)
    settled(op, o)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(o)
    for seed in range(1, 4):
        for name, new in operands(seed).items():
            if isinstance(new, torch.Tensor):
                o[name].copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        mine = [t.clone() for t in got]
        o["cells"].zero_()
        same(mine, by_triton(op, o))


@pytest.mark.gpu
@each_op
def test_on_another_stream_and_thread(op) -> None:
    o = operands(0)
    want = by_triton(op, o)
    late = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for k, v in o.items()}
    settled(op, late)
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # On any other stream the operands would still be zero.
        torch.cuda._sleep(20_000_000)
        for name, value in o.items():
            if isinstance(value, torch.Tensor) and name != "cells":
                late[name].copy_(value)
        got = op(late)
    side.synchronize()
    same(got, want)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(op(o)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    same(found[0], want)
    assert before == (torch.cuda.current_device(), torch.cuda.current_stream())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_op
def test_on_another_device(op) -> None:
    o = operands(0)
    want = by_triton(op, o)
    there = {k: v.to("cuda:1") if isinstance(v, torch.Tensor) else v for k, v in o.items()}
    with torch.cuda.device(1):
        settled(op, there)
        got = op(there)
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    same([t.to(DEVICE) for t in got], want)


@pytest.mark.gpu
def test_maps_are_made_once_for_an_address() -> None:
    def count() -> int:
        return sum(len(one.maps) for one in fused_forward._launch._compiled.values())

    o = operands(0)
    settled(forward, o)
    forget()
    before = count()
    settled(forward, o)
    assert count() == before + 2
    settled(forward, {**o, "a": o["a"].clone()})
    assert count() == before + 3
    settled(forward, o)
    assert count() == before + 3
    assert all(isinstance(c.maps, Recipes) for c in fused_forward._launch._compiled.values())
