"""Wukong: shapes, what the layers compute, counts, gradients."""

from __future__ import annotations

import pytest
import torch

from loka_compile.zoo import SCALES
from loka_compile.zoo import EmbeddingCollection
from loka_compile.zoo import Wukong
from loka_compile.zoo import WukongConfig
from loka_compile.zoo import WukongDense
from loka_compile.zoo.wukong import FactorizationMachineBlock
from loka_compile.zoo.wukong import LinearCompression

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
def test_flops_are_those_that_torch_counts(scale: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        dense = WukongDense(WukongConfig.of(scale), 36, 48)
        x, f = torch.empty(2, 36, dense.cfg.d), torch.empty(2, 48)
    with FlopCounterMode(display=False) as counter:
        dense(x, f)
    assert dense.flops_per_example() * 2 == counter.get_total_flops()


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
