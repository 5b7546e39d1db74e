"""Wukong: shapes, what the layers compute, counts, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka_compile.zoo import SCALES
from loka_compile.zoo import EmbeddingCollection
from loka_compile.zoo import Wukong
from loka_compile.zoo import WukongConfig
from loka_compile.zoo.layers import LinearCompression
from loka_compile.zoo.wukong import LADDER
from loka_compile.zoo.wukong import LADDER_FEATURES
from loka_compile.zoo.wukong import FactorizationMachineBlock

CARDINALITIES = (10, 3, 7)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("n_dense", [0, 4])
def test_logits_are_one_per_row(rows: int, n_dense: int) -> None:
    torch.manual_seed(0)
    model = Wukong(WukongConfig.of("tiny"), CARDINALITIES, n_dense)
    ids = torch.stack([torch.randint(c, (rows,)) for c in CARDINALITIES], dim=1)
    assert model(ids, torch.randn(rows, n_dense)).shape == (rows,)


def test_every_parameter_gets_a_gradient_under_autocast() -> None:
    torch.manual_seed(0)
    model = Wukong(WukongConfig.of("tiny"), CARDINALITIES, 4)
    ids = torch.stack([torch.randint(c, (32,)) for c in CARDINALITIES], dim=1)
    embeddings = model.embedding(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.dense(embeddings, torch.randn(32, 4))
    logits.float().square().mean().backward()
    without = [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ]
    assert without == []


def test_linear_compression_mixes_embeddings_not_features() -> None:
    layer = LinearCompression(3, 2)
    x = torch.randn(4, 3, 5)
    torch.testing.assert_close(layer(x), torch.einsum("bnd,nm->bmd", x, layer.weight))


def test_factorization_machine_is_a_low_rank_of_all_pairs() -> None:
    block = FactorizationMachineBlock(3, 2, 5, 2, (8,))
    x = torch.randn(4, 3, 5)
    pairs = torch.einsum("bid,bjd->bij", x, x)
    want = block.mlp(block.norm((pairs @ block.projection).flatten(1))).view(4, 2, 5)
    torch.testing.assert_close(block(x), want)


def test_shared_table_is_the_same_function() -> None:
    apart = EmbeddingCollection(CARDINALITIES, 4)
    shared = EmbeddingCollection(CARDINALITIES, 4, shared_table=True)
    shared.tables[0].weight.data.copy_(torch.cat([t.weight for t in apart.tables]).data)
    ids = torch.stack([torch.randint(c, (9,)) for c in CARDINALITIES], dim=1)
    torch.testing.assert_close(apart(ids), shared(ids))
    assert shared.state_dict().keys() == {"tables.0.weight"}


def test_sparse_tables_give_sparse_gradients() -> None:
    tables = EmbeddingCollection(CARDINALITIES, 4, sparse=True)
    tables(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert all(t.weight.grad is not None and t.weight.grad.is_sparse for t in tables.tables)


@pytest.mark.parametrize("scale", SCALES)
def test_flops_are_those_of_the_formula(scale: str) -> None:
    cfg = WukongConfig.of(scale)
    with torch.device("meta"):
        model = Wukong(cfg, [2] * 36, 48)
    total = sum(2 * m.weight.numel() for m in model.dense.modules() if isinstance(m, nn.Linear))
    for m in model.dense.modules():
        if isinstance(m, LinearCompression):
            total += 2 * cfg.d * m.weight.numel()
        elif isinstance(m, FactorizationMachineBlock):
            # X^T Y and X (X^T Y): the same number of products each.
            total += 4 * cfg.d * m.projection.numel()
    assert model.flops_per_example() == total


@pytest.mark.parametrize("scale", LADDER)
def test_the_published_ladder(scale: str) -> None:
    """Training FLOPs per example and dense parameters against the paper's table.

    Its figures hold a part whose sizes are not published (tables' projections, dense features):
    about 0.7 billion parameters and next to no FLOPs, which is most of the small models.
    """
    cfg, gflop, billions = LADDER[scale]
    with torch.device("meta"):
        model = Wukong(cfg, [2] * LADDER_FEATURES, 0)
    ours = 3 * model.flops_per_example() / 1e9
    assert ours == pytest.approx(gflop, rel=0.35 if gflop < 5 else 0.12)
    dense = model.parameter_counts()["dense"] / 1e9
    assert billions - 0.75 < dense < billions * 1.13
    stack = sum(p.numel() for p in model.dense.layers.parameters()) / 1e9
    known = {"ladder-5.6": 0.79, "ladder-22.2": 3.70, "ladder-61": 9.6, "ladder-108": 19.0}
    if scale in known:
        assert stack == pytest.approx(known[scale], rel=0.01)
    first = model.dense.layers[0].fmb
    assert first.mlp[0].in_features == 720 * cfg.k
    assert first.mlp[-1].out_features == cfg.n_fmb * 160


def test_parameter_counts_and_sizes() -> None:
    model = Wukong(WukongConfig.of("tiny"), CARDINALITIES, 4)
    counts = model.parameter_counts()
    assert counts["embedding"] == sum(CARDINALITIES) * 16
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    base = WukongConfig.of("base")
    assert (base.d, base.layers, base.k, base.n_fmb, base.n_lcb) == (128, 4, 32, 64, 64)
    assert (base.mlp, base.head) == ((2048,) * 3, (2048, 512))


def test_unknown_scale_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="tiny, small, base"):
        WukongConfig.of("huge")
