"""Train a DLRM-like model written with TorchRec, its dense part under backend "loka".

    pip install '.[train,flights]'                     # from the top of the repository
    pip install --no-deps -r examples/torchrec.txt     # TorchRec, without touching your torch
    python examples/train_torchrec.py --rows 61440

The sparse side (`EmbeddingBagCollection` over a `KeyedJaggedTensor`) stays eager: its sizes hang on
the data, and lookups gain nothing from FP8. The dense side (TorchRec's `MLP` with `SwishLayerNorm`)
is what is compiled; each Linear and the norm and gate behind it become one op. Lines that differ
from plain TorchRec are marked (loka). It runs on a GPU or a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec import EmbeddingBagConfig
from torchrec import KeyedJaggedTensor
from torchrec.modules.mlp import MLP
from torchrec.optim import RowWiseAdagrad

import loka_compile
from loka_compile.data import Batch
from loka_compile.data import open_source

DIM = 32


class DensePart(nn.Module):
    """Embeddings ``[B, n, DIM]``, dense ``[B, F]`` -> logits ``[B]``."""

    def __init__(self, n: int, n_dense: int, hidden: int) -> None:
        super().__init__()
        # Its output is one more vector, and a width of a few blocks for the over arch.
        self.dense_arch = MLP(n_dense, [hidden, DIM], activation="swish_layernorm")
        self.register_buffer("pairs", torch.tril_indices(n + 1, n + 1, -1), persistent=False)
        width = (n + 1) * DIM + self.pairs.shape[1]
        self.over_arch = MLP(width, [hidden, hidden], activation="swish_layernorm")
        self.head = nn.Linear(hidden, 1)

    def forward(self, embeddings: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        made = self.dense_arch(dense).unsqueeze(1).to(embeddings.dtype)
        x = torch.cat([embeddings, made], dim=1)
        dots = torch.bmm(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        both = torch.cat([x.flatten(1), dots.to(x.dtype)], dim=1)
        return self.head(self.over_arch(both)).squeeze(-1)


class Model(nn.Module):
    def __init__(self, fields: dict[str, int], n_dense: int, hidden: int, device: Any) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=size, feature_names=[name]
            )
            for name, size in fields.items()
        ]
        self.fields = list(fields)
        self.sparse = EmbeddingBagCollection(tables=tables, device=device)
        self.dense = DensePart(len(fields), n_dense, hidden).to(device)

    def forward(self, ids: KeyedJaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        pooled = self.sparse(ids).values()
        return self.dense(pooled.view(-1, len(self.fields), DIM), dense)


def jagged(fields: list[str], batch: Batch, device: torch.device) -> KeyedJaggedTensor:
    """One id per field and row; bags of other lengths look the same to the dense part."""
    values = batch.categorical.t().reshape(-1).to(device)
    return KeyedJaggedTensor(
        keys=fields, values=values, lengths=torch.ones_like(values, dtype=torch.int32)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="flights", help="flights, synthetic:rows=N, ..")
    parser.add_argument("--rows", type=int, default=30_720, help="stop after this many rows")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", default="inductor", help="aot_eager: starts at once, runs slow")
    parser.add_argument("--out", type=Path, default=Path("torchrec-run"))
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    torch.manual_seed(0)
    source = open_source(args.data)
    fields = {f.name: f.cardinality for f in source.schema.categorical}
    model = Model(fields, len(source.schema.dense), args.hidden, device)
    # (loka) Without FP8 hardware, emulation runs the same plan: same quality, no speed.
    options = {"mods": "on", "emulate": not fp8, "inner": args.inner}
    model.dense.compile(backend="loka", options=options)  # (loka) in place: same state_dict keys
    optimizers = [
        RowWiseAdagrad(model.sparse.parameters(), lr=0.05),
        torch.optim.Adam(model.dense.parameters(), lr=1e-3),
    ]
    losses: list[float] = []
    for batch in source.batches(args.batch, limit=args.rows):
        ids = jagged(model.fields, batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids, batch.dense.to(device))
        label = batch.label.to(device)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            print(f"rows {batch.start + len(batch):>7,}  log loss {sum(losses[-20:]) / 20:.4f}")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), args.out / "checkpoint.pt")
    plan = loka_compile.plan_of(model.dense)  # (loka) beside the checkpoint, to resume and serve
    plan.save(args.out / "plan.json")
    low = sum(site.choice(d).is_fp8 for site in plan.sites.values() for d in site.directions)
    print(f"{len(plan.sites)} linears, {low} of their GEMMs in FP8; saved {args.out}")


if __name__ == "__main__":
    main()
