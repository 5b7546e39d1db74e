"""Golden texts of a whole report: summary, text, and what `why` tells of each site.

The records are those that the passes leave behind on a small graph; decisions are written by hand,
so that no library, device or clock shows.
"""

from __future__ import annotations

import torch
from torch import fx
from torch import nn
from torch.nn import functional as F

from loka_compile.mod_set import ON
from loka_compile.mods import Decision
from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.passes import registry
from loka_compile.passes.dispatch import Dispatch
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.report.collect import GraphReport
from loka_compile.report.coverage import Linear
from loka_compile.report.explain import Report

ROWS, WIDTH = 64, 32
TOWER, CROSS, GATE, HEAD = "tower.0", "cross.w", "gate.0", "head"
NONE = {"mere": None, "mere_clamped": None, "bad_rows": None, "us": None, "speedup": None}
HIGH = {"kernel": "high_precision", **NONE, "source": "", "reason": ""}
FP8 = {**HIGH, "kernel": "torch:rowwise", "mere": 0.21, "mere_clamped": 0.043, "bad_rows": 0.001}
FP8 |= {"us": 12.5, "speedup": 1.42, "source": "measured"}
SLOW = {**HIGH, "mere_clamped": 0.041, "us": 9.0, "speedup": 0.97, "source": "measured"}
SLOW |= {"reason": "torch:rowwise: speedup 0.97 < 1.05"}
WRONG = {**HIGH, "mere_clamped": 0.31, "bad_rows": 0.4, "us": 9.0, "speedup": 1.3}
WRONG |= {"reason": "torch:tensorwise: clamped MERE 0.31 >= 0.2"}


def site(name: str, fwd: dict, dgrad: dict, wgrad: dict, n: int = WIDTH, fused=None) -> dict:
    directions = {"fwd": fwd, "dgrad": dgrad, "wgrad": wgrad}
    row = {"name": name, "M": ROWS, "K": WIDTH, "N": n, "dtype": "bfloat16", "count": 1}
    return {**row, "fused": fused, "directions": directions}


def graph_of_four_linears() -> fx.GraphModule:
    """tower: linear, norm, swish. cross: x0 * linear + x. gate: read twice. head: one output."""
    built = fx.Graph()
    values: dict[fx.Node, torch.Tensor] = {}

    def value(node, tensor):
        values[node] = node.meta["example_value"] = tensor
        return node

    def parameter(name, *shape):
        tensor = nn.Parameter(torch.empty(*shape, device="meta"))
        return value(built.placeholder(name), tensor)

    def call(target, args, name, layer, line):
        node = built.create_node("call_function", target, args, name=name)
        node.meta["nn_module_stack"] = {"k": (f"L['self'].{layer}", nn.Module)}
        node.meta["stack_trace"] = f'  File "/somewhere/model.py", line {line}, in forward\n'
        return value(node, target(*fx.map_arg(args, values.__getitem__)))

    def linear(x, name, layer, line, n=WIDTH):
        w, b = parameter(f"{name}_w", n, WIDTH), parameter(f"{name}_b", n)
        node = call(torch._C._nn.linear, (x, w, b), name, layer, line)
        node.meta[g.SITE] = layer
        return node

    with torch.device("meta"):
        x = value(built.placeholder("x"), torch.empty(ROWS, WIDTH))
        gain, shift = parameter("gain", WIDTH), parameter("shift", WIDTH)
        h = linear(x, "h", TOWER, 11)
        n = call(F.layer_norm, (h, (WIDTH,), gain, shift, 1e-5), "n", "tower.1", 11)
        s = call(F.silu, (n,), "s", "tower.2", 11)
        product = call(torch.mul, (s, linear(s, "c", CROSS, 12)), "product", "cross", 12)
        crossed = call(torch.add, (product, s), "crossed", "cross", 12)
        y = linear(crossed, "y", GATE, 13)
        gated = call(
            torch.mul, (y, call(torch.sigmoid, (y,), "open", "gate.1", 14)), "gated", "gate", 14
        )
        built.output((linear(gated, "logit", HEAD, 15, n=1),))
    return fx.GraphModule(nn.Module(), built)


def report() -> Report:
    context = PassContext(Options(), frozenset([HEAD]))
    kernels = {
        TOWER: ("torch:rowwise",) * 3,
        CROSS: ("torch:rowwise", "high_precision", "torch:rowwise"),
    }
    passes = [*registry.with_mods(), Dispatch(kernels)]
    _, records = run_passes(passes, graph_of_four_linears(), context, keep_text=True)
    for record in records:
        record.ms = 0.0
    head = {**HIGH, "reason": "a head stays in high precision"}
    made = Report()
    made.expected = [Linear("aside", 8, 24)]
    made.ran = {"torch": "2"}
    made.add(
        GraphReport(
            f"training graph of 4 linears ({TOWER}, {CROSS}, {GATE}, ...)",
            [],
            Environment(False, (), None),
            sites=[
                site(TOWER, FP8, FP8, FP8, fused=f"{TOWER}+block_norm+hard_swish"),
                site(CROSS, FP8, SLOW, FP8, fused=f"{CROSS}+factor+residual"),
                site(GATE, WRONG, SLOW, WRONG),
                site(HEAD, head, head, head, n=1),
            ],
            records=records,
            variants=["mods on, high precision, 3 sites observed", "mods on, 2 FP8 sites"],
            notes=["plan made after 8 probed steps"],
            mods=Decision(ON, "options say mods='on'"),
            replay=lambda: records,
        )
    )
    return made


def test_summary_and_text(golden):
    one = report()
    golden("report_summary", one.summary())
    golden("report_text", one.text())


def test_why(golden):
    one = report()
    names = [*(s["name"] for s in one.sites), "aside"]
    golden("report_why", "\n".join(map(one.why, names)) + "\n")
