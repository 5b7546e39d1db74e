"""Maxima of plain steps: true values, no node and no kernel more, read on request only."""

from __future__ import annotations

import gc
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import nn

import loka_compile
from loka_compile.ledger import model_entries
from loka_compile.lowering import chain_formulas
from loka_compile.lowering import meters
from loka_compile.lowering import ops  # noqa: F401  (defines ours)
from loka_compile.options import PROBE_STEPS
from loka_compile.probe.plain_steps import Cells

OPTIONS = {
    "mods": "off", "emulate": True, "min_speedup": 0.0, "max_mere": 1e9, "heads": [],
    "libraries": ("torch",), "recipes": ("tensorwise",), "inner": "aot_eager",
    "force": {"*": "torch:tensorwise"},
}  # fmt: skip


_NUMBERS = itertools.count()


class Net(nn.Module):
    """Two linears of names that no other model of the process has; `names`: theirs."""

    def __init__(self) -> None:
        super().__init__()
        number = next(_NUMBERS)
        self.names = (f"plain_steps_{number}_a", f"plain_steps_{number}_b")
        self.add_module(self.names[0], nn.Linear(32, 64, bias=False))
        self.add_module(self.names[1], nn.Linear(64, 32, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return second(torch.relu(first(x)))


def twins() -> tuple[Net, Net]:
    """Two with the same weights."""
    net, same = Net(), Net()
    for one, other in zip(net.parameters(), same.parameters(), strict=True):
        other.data.copy_(one.data)
    return net, same


def compiled(net: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(net, backend="loka", options={**OPTIONS, **options})


def step(run: Any, x: Tensor) -> None:
    run(x).square().mean().backward()


class Seen:
    """True maxima: of each linear's input, and of its output's gradient, by the layer's number."""

    def __init__(self, net: Net) -> None:
        self.x, self.gradient = [0.0, 0.0], [0.0, 0.0]
        for number, name in enumerate(net.names):
            getattr(net, name).register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            def backward(g: Tensor) -> None:
                self.gradient[number] = float(g.abs().max())

            self.x[number] = float(args[0].detach().abs().max())
            out.register_hook(backward)

        return hook


def recorded(net: Net) -> list[dict[str, float] | None]:
    found = loka_compile.plain_metrics()
    return [found.get(name) for name in net.names]


def test_values_are_the_true_ones_and_the_largest_is_kept() -> None:
    net, same = twins()
    run = compiled(net)
    largest = 0.0
    for scale in (1.0, 5.0, 2.0):
        x = scale * torch.randn(24, 32)
        step(run, x)
        largest = max(largest, float(x.abs().max()))
    seen = Seen(same)
    step(same, x)
    got = recorded(net)
    assert got[0]["x_amax"] == seen.x[0]
    assert got[0]["x_amax_most"] == largest > got[0]["x_amax"]
    # Behind a quantised layer values differ by its error.
    assert got[1]["x_amax"] == pytest.approx(seen.x[1], rel=0.1)
    for one, want in zip(got, seen.gradient, strict=True):
        assert one["gradient_amax"] == pytest.approx(want, rel=0.1)
        assert one["x_saturated"] == one["gradient_saturated"] == 0
    loka_compile.plain_metrics(reset=True)
    step(run, x)
    again = recorded(net)[0]
    assert again["x_amax"] == again["x_amax_most"] == seen.x[0]


def test_a_value_that_is_not_finite_shows() -> None:
    net = Net()
    run = compiled(net)
    x = torch.randn(24, 32)
    x[3, 4] = float("inf")
    step(run, x)
    got = recorded(net)[0]
    assert got["x_amax"] == float("inf") and got["x_saturated"] == 1


def test_sites_in_high_precision_and_with_row_scales_have_no_entry() -> None:
    net = Net()
    force = {net.names[0]: "high_precision", net.names[1]: "torch:rowwise"}
    step(compiled(net, force=force, recipes=("rowwise",)), torch.randn(24, 32))
    assert recorded(net) == [None, None]


def test_recording_goes_with_the_probe_and_with_the_model() -> None:
    net = Net()
    step(compiled(net, probe_every=0), torch.randn(24, 32))
    assert recorded(net) == [None, None]
    net = Net()
    names = set(net.names)
    run = compiled(net)
    step(run, torch.randn(24, 32))
    assert names <= set(loka_compile.plain_metrics())
    torch._dynamo.reset()
    del net, run
    gc.collect()
    assert not names & set(loka_compile.plain_metrics())


def test_a_step_that_makes_its_own_plan_records_once_it_has_one() -> None:
    net = Net()
    run = compiled(net, force={})
    for _ in range(PROBE_STEPS + 2):
        step(run, torch.randn(24, 32))
    assert all(e.sites for _, e in model_entries(net))
    fp8 = {n for n, s in loka_compile.plan_of(net).sites.items() if s.choice("fwd").is_fp8}
    assert fp8 and fp8 <= set(loka_compile.plain_metrics())


def kernels(code: str) -> int:
    return len(re.findall(r"^\s+(?:cpp_fused\w*|triton_\w+)(?:\.run)?\(", code, re.M))


def test_inductor_makes_no_kernel_more(device: torch.device) -> None:
    """A forward and a backward product with and without cells: as many kernels and products."""
    from torch._inductor.utils import run_and_get_code

    assert meters.install_lowering()
    x = torch.randn(48, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    gy = torch.randn(48, 32, device=device, dtype=torch.bfloat16)
    kernel = "torch:tensorwise" + ("" if device.type == "cuda" else "+emulated")

    def both(x: Tensor, w: Tensor, gy: Tensor, cells: Tensor | None) -> tuple[Tensor, ...]:
        probe = [] if cells is None else [cells]
        x, gy = torch.relu(x), gy * 0.5
        y = torch.ops.loka.linear(x, w, None, kernel, kernel, kernel, probe, *[None] * 7)
        return y, torch.ops.loka.linear_dgrad(gy, w, kernel, None, None, None, None, cells)

    found = {}
    held = Cells.of(("one",), device)
    for name, cells in (("without", None), ("with", held.values[0, 0])):
        torch._dynamo.reset()
        out, code = run_and_get_code(torch.compile(both), x, w, gy, cells)
        found[name] = (kernels(code[0]), code[0].count("extern_kernels."), out)
    assert found["with"][:2] == found["without"][:2] and found["with"][0] > 0
    # Comments name the ops that a kernel was made of, on some versions.
    lines = [line for line in code[0].splitlines() if not line.lstrip().startswith("#")]
    assert not any("record_amax" in line for line in lines)
    for one, other in zip(found["with"][2], found["without"][2], strict=True):
        assert torch.equal(one, other)
    got = dict(held.read())["one"]
    assert got["x_amax"] == float(x.relu().max()) == got["x_amax_most"]
    assert got["gradient_amax"] == float((gy * 0.5).abs().max())


def test_our_own_backward_kernel_stores_its_maximum() -> None:
    held = Cells.of(("chain",), torch.device("cpu"))
    gy, u = torch.randn(32, 64), torch.randn(32, 64)
    r, tensorwise = torch.rand(32, 1) + 0.5, (False, torch.float8_e5m2) * 2
    args = (gy, u, r, None, 64, "hard_swish", False, *tensorwise)
    plain = torch.ops.loka.fused_chain_backward(*args)
    with_cells = torch.ops.loka.fused_chain_backward(*args, held.values[0, 0])
    for one, other in zip(plain, with_cells, strict=True):
        assert torch.equal(one.float(), other.float())
    gz, _ = chain_formulas.block_norm_act_backward(gy, u, r, None, 64, "hard_swish", False)
    got = dict(held.read())["chain"]
    assert got["gradient_amax"] == got["gradient_amax_most"] == float(gz.abs().max())


@pytest.mark.gpu
def test_replayed_cuda_graphs_record_their_own_step() -> None:
    device = torch.device("cuda")
    net, same = (one.to(device, torch.bfloat16) for one in twins())
    run = compiled(net, mode="reduce-overhead", inner="inductor", emulate=False)
    for scale in (1.0, 1.0, 1.0, 7.0, 3.0):
        x = scale * torch.randn(64, 32, device=device, dtype=torch.bfloat16)
        # Gradients lie in the graphs' memory: torch refuses to add to those of the step before.
        net.zero_grad(set_to_none=True)
        step(run, x)
    seen = Seen(same)
    step(same, x)
    got = recorded(net)[0]
    assert got["x_amax"] == seen.x[0] < got["x_amax_most"]
    assert got["gradient_amax"] == pytest.approx(seen.gradient[0], rel=0.2)
