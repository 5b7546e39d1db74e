"""`torch.compile(model, backend="loka")`: the whole pipeline, top to bottom.

    1 copy        capture.py    Dynamo's graph is never edited
    2 canonicalise  passes/     one spelling per op
    3 name        names.py      every GEMM site by module path
    4 rewrite     variant.py    patterns, strip_bias, block_norm, hard_swish, fuse; observers last
    5 dispatch    passes/       each linear is one loka:: op that names three kernels
    6 lower       lowering/     ops are decomposed into aten around one GEMM call; compile_fx
    7 cache key   variant.py    our sources, options, plan are in Inductor's keys
    8 run         runtime.py    binds probe state, picks the variant, swaps in the plan

Registered through the `torch_dynamo_backends` entry point. Nothing here makes torch.compile fail
but a wrong option: whatever else goes wrong, the graph is compiled by Inductor as it was written,
and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from loka_compile import _compat
from loka_compile import variant
from loka_compile.capture import capture
from loka_compile.errors import LokaError
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.options import Environment
from loka_compile.options import Options
from loka_compile.passes import graph as g
from loka_compile.plan import Plan
from loka_compile.report import collect
from loka_compile.runtime import Runtime

log = logging.getLogger("loka_compile")


def loka_backend(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph. `options`: see `options.Options`; `mode`: as in torch.compile."""
    parsed = Options.parse(options, mode)
    parsed.check_names(LIBRARIES, {r for lib in LIBRARIES.values() for r in lib.recipes})
    plan = Plan.of_option(parsed.plan)
    parsed = _as_planned(parsed, plan)
    environment = Environment.read()
    if environment.disable:
        return _plain(gm, example_inputs, parsed)
    try:
        real = _compat.real_inputs(gm, example_inputs)
        source = capture(gm, real, parsed, plan)
        if not source.sites:
            return _plain(gm, example_inputs, parsed)
        runtime = Runtime(source, parsed, plan, environment)
        runtime.prepare(real, example_inputs)
        return runtime
    except LokaError:
        raise
    except _compat.dynamo_control_flow():
        raise
    except Exception as error:
        _say_plain(example_inputs, environment, error)
        # Only copies were edited.
        return _plain(g.own_copy(gm), example_inputs, parsed)


def _as_planned(options: Options, plan: Plan | None) -> Options:
    """What the plan's run said about block and heads, where this call says nothing."""
    if plan is None:
        return options
    block = plan.block if options.block is None else options.block
    heads = plan.heads if options.heads is None else options.heads
    return replace(options, block=block, heads=heads)


def _say_plain(inputs: list[Any], environment: Environment, error: Exception) -> None:
    """In the log and in the report: this graph is not loka's."""
    what = "this graph is compiled as written, by Inductor alone, without Mods: "
    kinds = sorted({type(t).__name__ for t in inputs if is_traceable_wrapper_subclass(t)})
    if kinds:
        what += f"it takes {', '.join(kinds)}, for which loka's ops have no rule"
    else:
        what += f"loka failed on it ({type(error).__name__})"
    log.warning("loka: %s; LOKA_DISABLE=1 silences this", what, exc_info=not kinds)
    log.debug("loka failed on a graph", exc_info=error)
    report = collect.GraphReport("graph compiled as written", [], environment)
    report.note(what)
    collect.seen(report)


def _plain(gm: fx.GraphModule, example_inputs: list[Any], options: Options) -> Callable[..., Any]:
    return variant.compile_inner(gm, example_inputs, options, key="plain")
