"""Every model of the zoo: shapes, gradients, the backend against eager, what is covered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import loka_compile
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import HistoryField
from loka_compile.data.base import Schema
from loka_compile.zoo import MODELS
from loka_compile.zoo import History
from loka_compile.zoo import Recommender
from loka_compile.zoo import build_model

SCHEMA = Schema(
    tuple(CategoricalField(f"c{i}", 5 + i) for i in range(12)),
    tuple(f"x{i}" for i in range(7)),
    "y",
    HistoryField("c2", 6),
)
#: (model, scale): the tiny scale of each, and the variants that have other layers.
CASES = [*((name, "tiny") for name in MODELS), ("dcn_v2", "tiny-lowrank"), ("dcn_v2", "research")]


def make(name: str, scale: str = "tiny") -> Recommender:
    torch.manual_seed(0)
    return build_model(name, scale, SCHEMA)


def ids(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    columns = [torch.randint(c, (rows,)) for c in SCHEMA.cardinalities]
    history = torch.randint(SCHEMA.cardinalities[2], (rows, 6))
    history[: rows // 2, :4] = 0
    return torch.stack(columns, dim=1), history


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("name", "scale"), CASES)
def test_one_logit_per_row_and_head(name: str, scale: str, rows: int) -> None:
    categorical, history = ids(rows)
    out = make(name, scale)(categorical, torch.randn(rows, 7), history)
    assert out.shape == ((rows, 2) if name == "elfm" else (rows,))
    assert out.isfinite().all()


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_every_parameter_gets_a_gradient_under_autocast(name: str, scale: str) -> None:
    model = make(name, scale)
    categorical, history = ids(16)
    inputs = model.inputs(categorical, torch.randn(16, 7), history)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.dense(*inputs)
    logits.float().square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.to_dense().isfinite().all() for p in model.parameters())
    assert all(t.weight.grad.is_sparse for t in model.embedding.tables)


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_without_dense_features(name: str, scale: str) -> None:
    kind = MODELS[name]
    model = kind(kind.scales[scale], [4] * 6, 0, history=History(1, 5))
    out = model(torch.ones(3, 6, dtype=torch.int64), torch.empty(3, 0), torch.zeros(3, 5).long())
    assert out.isfinite().all()


def doubled(model: Recommender, rows: int) -> tuple[torch.Tensor, ...]:
    made = model.example_inputs(rows)
    return tuple(t if t.dtype == torch.bool else t.double() for t in made)


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_the_backend_agrees_with_eager_in_fp64(
    agrees: Callable[..., Any], name: str, scale: str
) -> None:
    model = make(name, scale)
    inputs = doubled(model, 6)
    inputs[0].requires_grad_()
    agrees(model.dense.double(), *inputs)


@pytest.mark.parametrize("name", ["dcn_v2", "dlrm", "elfm"])
def test_fp8_on_every_linear_stays_close(agrees: Callable[..., Any], name: str) -> None:
    model = make(name)
    x, *rest = model.example_inputs(48)
    agrees(model.dense, x.requires_grad_(), *rest, fp8=True, options={"inner": "eager"})


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_both_ways_to_the_mods_agree_in_fp64(name: str, scale: str) -> None:
    """The Mods as modules, in eager, against the Mods as graph passes."""
    model = make(name, scale).double()
    inputs = doubled(model, 5)
    torch._dynamo.reset()
    compiled = torch.compile(
        model.dense, backend="loka", options={"mods": "on", "inner": "aot_eager"}
    )
    got = compiled(*inputs)
    got.sum().backward()
    # The same weights; what the Mods take away is not in the modules any more.
    gradients = {n: p.grad for n, p in model.dense.named_parameters()}
    model.zero_grad()
    report = loka_compile.apply_mods(model.dense)
    assert report.changes
    want = model.dense(*inputs)
    # BlockNorm computes its statistics in FP32, whatever its input is.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    want.sum().backward()
    for n, p in model.dense.named_parameters():
        torch.testing.assert_close(gradients[n], p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_every_linear_is_covered_or_refused_with_a_reason(name: str, scale: str) -> None:
    """Sites hold all FLOPs but those of batched products of two activations."""
    model = make(name, scale)
    rows = 32
    inputs = model.example_inputs(rows)
    torch._dynamo.reset()
    # "eager" traces nothing: what is tested is the planner.
    options = {"emulate": True, "inner": "eager", "mods": "off"}
    compiled = torch.compile(model.dense, backend="loka", options=options)
    with loka_compile.explain() as report:
        for _ in range(10):
            compiled(*inputs).sum().backward()
    sites = {s["name"].partition("#")[0]: s for s in report.sites}
    missing = [
        n for n, m in model.dense.named_modules() if isinstance(m, nn.Linear) and n not in sites
    ]
    assert missing == []
    for site in report.sites:
        for choice in filter(None, site["directions"].values()):
            assert choice["kernel"]
            assert choice["kernel"] != "high_precision" or choice["reason"], site
    with FlopCounterMode(display=False) as counter:
        model.dense(*inputs)
    by_op = counter.get_flop_counts()["Global"]
    products = sum(v for op, v in by_op.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    covered = sum(2 * s["M"] * s["K"] * s["N"] * (s["count"] or 1) for s in report.sites)
    assert covered >= products
    assert covered <= counter.get_total_flops()


def test_the_production_layer_has_the_published_shapes() -> None:
    kind = MODELS["dhen"]
    with torch.device("meta"):
        dense = kind(kind.scales["production"], [2] * 128, 13).dense
    first, second = dense.layers
    shapes = [(m.in_features, m.out_features) for m in first.modules() if isinstance(m, nn.Linear)]
    assert sorted(shapes) == sorted([(8256, 2048)] * 4 + [(2048, 1024), (1024, 2048)])
    assert first.dots.outputs == 8256
    assert second.input_projection.in_features == 2048


def test_mlperf_shape() -> None:
    kind = MODELS["dcn_v2"]
    with torch.device("meta"):
        dense = kind(kind.scales["mlperf"], [2] * 26, 13).dense
    shapes = [(m.in_features, m.out_features) for m in dense.modules() if isinstance(m, nn.Linear)]
    bottom = [(13, 512), (512, 256), (256, 128)]
    over = [(3456, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert shapes == [*bottom, *[(3456, 512), (512, 3456)] * 3, *over]


def test_a_masked_history_does_not_reach_the_logit() -> None:
    model = make("interformer").double()
    x, f, s, _ = doubled(model, 4)
    mask = torch.tensor([[False] * 4 + [True] * 2] * 4)
    # `inputs` gives zero rows where there is nothing.
    padded = s * mask.unsqueeze(-1)
    base = model.dense(x, f, padded, mask)
    other = padded.clone()
    other[:, :4] = 7.0
    torch.testing.assert_close(model.dense(x, f, other, mask), base)
    other = padded.clone()
    other[:, 5] += 1.0
    assert not torch.allclose(model.dense(x, f, other, mask), base)


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("wukon", "tiny", "unknown model 'wukon'; use one of wukong"),
        ("dcn_v2", "huge", "unknown scale 'huge'; use one of tiny, tiny-lowrank"),
    ],
)
def test_mistakes_are_named(name: str, scale: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, scale, SCHEMA)


def test_a_model_that_reads_a_history_needs_one() -> None:
    schema = Schema(SCHEMA.categorical, SCHEMA.dense, "y")
    with pytest.raises(ValueError, match="reads a history"):
        build_model("interformer", "tiny", schema)
