r"""What our passes take: the part of `bench_startup.py` that needs neither device nor compiler."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FP8 = ("loka:rowwise", "torch:rowwise", "torch:rowwise")


def layers(count: int, width: int = 256, *, modded: bool = False) -> nn.Sequential:
    """`count` linears in chains of three: two fused, one bare behind a residual-free ReLU.

    modded: with the Mods made by hand, of torch's own modules (here a block is the whole width).
    """
    found: list[nn.Module] = []
    for i in range(count):
        found.append(nn.Linear(width, width, bias=not modded))
        if i % 3 == 2:
            found.append(nn.ReLU())
        elif modded:
            found += [nn.RMSNorm(width, elementwise_affine=False), nn.Hardswish()]
        else:
            found += [nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*found)


# -- passes ---------------------------------------------------------------------------------------


def passes(linears: int, repeats: int = 3) -> dict[str, Any]:
    """Seconds of our own work on one graph, the least of `repeats`, and milliseconds per pass."""
    from loka_compile import variant
    from loka_compile.capture import capture
    from loka_compile.mod_set import ON
    from loka_compile.options import Options

    options = Options(mods="on")
    best: dict[str, Any] = {}

    def timed(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        begun, worked = time.perf_counter(), time.process_time()
        source = capture(gm, inputs, options)
        captured = time.perf_counter()
        kernels = tuple((s.name, FP8) for s in source.sites)
        rewritten = variant.rewrite(source, variant.Decided(ON, kernels), options)
        ended, worked = time.perf_counter(), time.process_time() - worked
        records = [*source.records, *rewritten.records]
        if not best or ended - begun < best["seconds"]:
            best.update(
                linears=len(source.sites),
                seconds=ended - begun,
                cpu_s=worked,
                capture_s=captured - begun,
                rewrite_s=ended - captured,
                pass_ms={r.name: round(r.ms, 2) for r in records},
                fused=len(rewritten.fused),
            )
        return gm

    with torch.device("meta"):
        model = layers(linears).bfloat16()
        x = torch.randn(512, 256, dtype=torch.bfloat16)
    for _ in range(repeats):
        torch._dynamo.reset()
        torch.compile(model, backend=timed, dynamic=False)(x)
    torch._dynamo.reset()
    return best


# -- patterns -------------------------------------------------------------------------------------


def patterns(linears: int, widths: int) -> dict[str, Any]:
    """Milliseconds of CPU per pass: the first graph of a process, and the same graph again."""
    import loka_compile
    from loka_compile.capture import capture
    from loka_compile.options import Options
    from loka_compile.passes import graph as g
    from loka_compile.passes.hard_swish import HARD_SWISH
    from loka_compile.passes.manager import PassContext
    from loka_compile.passes.manager import run_pass

    @loka_compile.pattern(example=lambda: (torch.randn(4, 8),))
    def swish(x: Any) -> Any:
        return F.silu(x)

    swish.replace(lambda x: F.hardswish(x))
    tensors = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)

    @loka_compile.pattern(example=lambda: tensors)
    def linear_relu(x: Any, w: Any, b: Any) -> Any:
        return F.relu(F.linear(x, w, b))

    linear_relu.replace(lambda x, w, b: F.relu6(F.linear(x, w, b)))
    sizes = [64 + 8 * i for i in range(widths + 1)]
    with torch.device("meta"):
        tapered = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        cases: dict[str, tuple[Any, nn.Module, int]] = {
            "mod": (HARD_SWISH, layers(linears), 256),
            "swish": (swish, layers(linears), 256),
            "linear_relu_of_all_widths": (linear_relu, nn.Sequential(*tapered), sizes[0]),
        }
    found: dict[str, Any] = {}
    for name, (given, model, width) in cases.items():

        def timed(
            gm: torch.fx.GraphModule, inputs: list[Any], name: str = name, given: Any = given
        ) -> Any:
            options = Options()
            source = capture(gm, inputs, options)
            begun = time.process_time()
            one = given.as_pass() if hasattr(given, "as_pass") else given
            spent = {"made_ms": (time.process_time() - begun) * 1e3}
            for when in ("first_ms", "again_ms"):
                mine, context = g.own_copy(source.gm), PassContext(options)
                begun = time.process_time()
                record = run_pass(one, mine, context, recompile=False)
                spent[when] = (time.process_time() - begun) * 1e3
            rounded = {k: round(v, 2) for k, v in spent.items()}
            found[name] = {"matches": record.matches, **rounded}
            return gm

        torch._dynamo.reset()
        x = torch.randn(512, width, device="meta")
        torch.compile(model, backend=timed, dynamic=False)(x)
    torch._dynamo.reset()
    return found
