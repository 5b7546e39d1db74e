"""Steps 4 to 7 of the pipeline: one decision about a graph -> one compiled callable."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any
from typing import cast

import torch
from torch import fx

from loka_compile import _compat
from loka_compile import inner_eager
from loka_compile.cache_key import CacheKey
from loka_compile.cache_key import key_of
from loka_compile.capture import Source
from loka_compile.lowering import direct_calls
from loka_compile.lowering import meters
from loka_compile.lowering import ops
from loka_compile.lowering.epilogue_ops import LINEAR_EPILOGUE
from loka_compile.lowering.recipes import HIGH_PRECISION
from loka_compile.mod_set import ModSet
from loka_compile.options import Options
from loka_compile.passes import fuse_epilogue
from loka_compile.passes import graph as g
from loka_compile.passes import registry
from loka_compile.passes.batched_linear import BatchedLinear
from loka_compile.passes.dispatch import Dispatch
from loka_compile.passes.dispatch import Kernels
from loka_compile.passes.fuse_pointwise import OP as POINTWISE
from loka_compile.passes.fuse_pointwise import FusePointwise
from loka_compile.passes.handover import HandOver
from loka_compile.passes.interaction import Interaction
from loka_compile.passes.manager import PassContext
from loka_compile.passes.manager import run_passes
from loka_compile.passes.neighbours import Chain
from loka_compile.passes.neighbours import chains_of
from loka_compile.passes.observe import Observe
from loka_compile.passes.observe import StateKey
from loka_compile.passes.record import Record
from loka_compile.passes.records import PassRecord
from loka_compile.passes.share_weights import ShareWeights
from loka_compile.passes.store_weights import StoreWeights
from loka_compile.passes.store_weights import WeightKey
from loka_compile.probe import covariance

log = logging.getLogger("loka_compile")


@dataclass(frozen=True)
class Decided:
    """All that shapes the compiled code of a graph."""

    mods: ModSet
    #: (site name, (fwd, dgrad, wgrad)) of sites that leave high precision anywhere.
    kernels: tuple[tuple[str, Kernels], ...] = ()
    #: Names of the sites that are observed.
    observed: frozenset[str] = frozenset()

    def cache_key(self, options: Options) -> str:
        return key_of((self.mods, self.kernels, sorted(self.observed)), options)

    def label(self) -> str:
        parts = [f"mods {self.mods}"]
        bf16 = sum(all(k.startswith(("bf16:", HIGH_PRECISION)) for k in s) for _, s in self.kernels)
        fp8 = len(self.kernels) - bf16
        parts += [f"{n} {what} sites" for n, what in ((fp8, "FP8"), (bf16, "BF16")) if n]
        parts += [] if self.kernels else ["high precision"]
        if self.observed:
            parts.append(f"{len(self.observed)} sites observed")
        return ", ".join(parts)


@dataclass
class Rewritten:
    gm: fx.GraphModule
    records: list[PassRecord]
    #: State groups that the graph takes behind its own inputs, in order.
    states: list[StateKey]
    #: Quantised weights that it takes there, two inputs each; never beside states.
    weights: list[WeightKey]
    #: Sites with cells, in order: a few inputs for all (`meters.place_of`), never beside others.
    cells: list[str]
    #: site name -> fused chain id, for sites that ended in a fused op.
    fused: dict[str, str]
    #: site name -> what its price hangs on besides its GEMM.
    chains: dict[str, Chain] = field(default_factory=dict)
    #: site name -> why its forward stays in high precision, whatever was decided.
    unfit: dict[str, str] = field(default_factory=dict)


def rewrite(
    source: Source,
    decided: Decided,
    options: Options,
    *,
    keep_text: bool = False,
    runs_steps: bool = False,
) -> Rewritten:
    """User patterns, Mods, fusion, dispatch, observers: on a private copy.

    runs_steps: it is what steps will run, whose maxima are recorded in one input more.
    """
    gm = g.own_copy(source.gm)
    heads = frozenset(s.name for s in source.sites if s.head)
    context = PassContext(options, heads, decided.mods)
    built_in = registry.built_in(decided.mods.names)
    dispatch = Dispatch(dict(decided.kernels))
    passes = registry.order(options.patterns, [*built_in, dispatch])
    covariances = _covariances(source, decided, options)
    observe = Observe(decided.observed, covariances, options.probes_in_turn)
    store = StoreWeights()
    record = Record(_fp8_sites(decided))
    if decided.observed:
        passes.append(observe)
    if decided.kernels or not decided.observed:
        # Beside observers too, once the plan leaves sites out of them: they keep off observed ones.
        passes.append(Interaction())
        passes.append(BatchedLinear())
    if not decided.observed or options.probes_in_turn:
        # What observers want of a value that is handed over is made for the few that are asked.
        passes.append(HandOver())
    passes.append(ShareWeights())
    if not decided.observed:
        if options.weight_cache != "off":
            passes.append(store)
        passes.append(FusePointwise())
        if runs_steps and options.probe_every and meters.install_lowering():
            passes.append(record)
    users = [p.name for p in options.patterns]
    # Patterns compute values of new nodes, also in a late compile and when a report replays this.
    with _compat.restore_autocast(source.autocast), torch.set_grad_enabled(source.grad_enabled):
        gm, records = run_passes(passes, gm, context, keep_text=keep_text, optional=users)
    return Rewritten(
        gm,
        records,
        observe.keys,
        store.keys,
        record.sites,
        _fused(gm),
        chains_of(gm),
        dispatch.unfit,
    )


def _fp8_sites(decided: Decided) -> frozenset[str]:
    return frozenset(
        site
        for site, three in decided.kernels
        if not all(k.startswith(("bf16:", HIGH_PRECISION)) for k in three)
    )


def _covariances(source: Source, decided: Decided, options: Options) -> frozenset[str]:
    if options.probe_model != "gaussian":
        return frozenset()
    wide = {s.name: s.k for s in source.sites if s.name in decided.observed}
    return covariance.affordable(wide, source.device)


def replay(source: Source, decided: Decided, options: Options) -> list[PassRecord]:
    """The records of all passes with the graph's text before and after each, for diffs."""
    _, prepared = run_passes(
        list(registry.PREPARE), g.own_copy(source.original), PassContext(options), keep_text=True
    )
    rewritten = rewrite(source, decided, options, keep_text=True, runs_steps=True)
    return [*prepared, *rewritten.records]


def _fused(gm: fx.GraphModule) -> dict[str, str]:
    found = {}
    for one in g.every_graph(gm):
        for node in one.graph.nodes:
            if g.is_call(node, torch.ops.loka.linear_block_norm_act.default):
                act, gate = node.args[7], node.args[8]
                tail = "block_norm" + (f"+{act}" if act != "none" else "")
                name = str(node.meta.get(g.SITE))
                found[name] = f"{name}+{tail}" + ("+gate" if gate else "")
            elif g.is_call(node, LINEAR_EPILOGUE):
                name = str(node.meta.get(g.SITE))
                found[name] = f"{name}+{fuse_epilogue.label(node)}"
            elif g.is_call(node, POINTWISE):
                name = str(node.meta.get(g.SITE))
                act = node.args[5]
                parts = [p for p, n in zip(("mul", "add"), node.args[3:5], strict=True) if n]
                found[name] = "+".join([name, *parts, *([] if act == "none" else [str(act)])])
    return found


def build(
    source: Source,
    decided: Decided,
    options: Options,
    *,
    inputs: Sequence[Any] | None = None,
) -> tuple[Callable[..., Any], Rewritten]:
    """Compile one variant.

    inputs: the example inputs, during Dynamo's own compile; None in a late compile, which runs on
    the placeholders' fakes. Dynamo's guards are frozen by then: a late compile that adds one would
    give code that is valid for some sizes only, and nobody would check, so it is refused.
    """
    with _compat.restore_autocast(source.autocast), torch.set_grad_enabled(source.grad_enabled):
        if inputs is not None:
            return _rewrite_and_compile(source, decided, options, inputs)
        with _compat.late_compile(source.fake_mode), _no_new_guards(source.fake_mode):
            return _rewrite_and_compile(source, decided, options, ())


def _rewrite_and_compile(
    source: Source, decided: Decided, options: Options, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], Rewritten]:
    rewritten = rewrite(source, decided, options, runs_steps=True)
    fakes = [g.value(n) for n in rewritten.gm.graph.nodes if n.op == "placeholder"]
    fakes[: len(inputs)] = inputs
    key = decided.cache_key(options)
    if decided.observed and options.gate == "budget":
        # Its backward runs twice at some steps, and Python looks on while it does.
        plain = {**options.inductor, "triton.cudagraphs": False}
        with _compat.keeping_graphs():
            own = replace(options, inductor=plain)
            return compile_inner(rewritten.gm, fakes, own, key), rewritten
    return compile_inner(rewritten.gm, fakes, options, key), rewritten


class GuardsAddedError(RuntimeError):
    pass


#: Shape environments that hold a guard of a refused variant. A later compile would take it for
#: known and add none, so nothing that is compiled under them can be trusted.
_SPOILT: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def _no_new_guards(fake_mode: Any) -> Iterator[None]:
    shape_env = getattr(fake_mode, "shape_env", None)
    if shape_env is not None and shape_env in _SPOILT:
        raise GuardsAddedError("an earlier late compile added shape guards")
    before = _compat.count_guards(fake_mode)
    try:
        yield
    finally:
        added = _compat.count_guards(fake_mode) - before
        if added:
            _SPOILT.add(shape_env)
    if added:
        raise GuardsAddedError(f"a late compile added {added} shape guards that nobody would check")


# -- the inner compiler ---------------------------------------------------------------------------


def compile_inner(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, key: str
) -> Callable[..., Any]:
    if options.inner == "eager":
        return gm
    if options.inner == "aot_eager":
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(
            fw_compiler=inner_eager.compiler,
            bw_compiler=inner_eager.compiler,
            decompositions=ops.DECOMPOSITIONS,
            keep_inference_input_mutations=True,
        )(gm, list(inputs))
    from torch._inductor.compile_fx import compile_fx

    direct_calls.install()
    compiled = compile_fx(gm, list(inputs), config_patches=config_patches(options, key))
    return cast("Callable[..., Any]", compiled)


def config_patches(options: Options, key: str) -> dict[str, Any]:
    """Inductor settings of a variant: the mode's, the user's, and our cache key.

    They travel as `config_patches` because those also hold while the backward is compiled.
    """
    patches: dict[str, Any] = {}
    if options.mode and options.mode != "default":
        patches.update(torch._inductor.list_mode_options(options.mode))
    patches.update(options.inductor)
    theirs = patches.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
    patches["joint_custom_pre_pass"] = _compat.join_graph_passes(CacheKey(key), theirs)
    return patches
