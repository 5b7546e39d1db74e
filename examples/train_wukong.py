"""Train a recommender with backend "loka", save a checkpoint, resume from it.

    pip install '.[train,flights]'                        # from the top of the repository
    python examples/train_wukong.py --rows 30720          # learns from the first 30,720 flights
    python examples/train_wukong.py --rows 61440 --resume # goes on with rows 30,720 to 61,440

It runs on a GPU or a CPU and writes `checkpoint.pt` and `plan.json` into `wukong-run/` (`--out`).
What differs from plain bf16 training is marked (loka): one line to compile, two for the plan. The
plan is made before the ninth step, so give it more rows than eight batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import loka_compile
from loka_compile.data import Batch
from loka_compile.data import open_source
from loka_compile.zoo import WukongConfig
from loka_compile.zoo import WukongDense


class Embeddings(nn.Module):
    """One table per id field; sparse gradients. Stays eager: lookups gain nothing from FP8."""

    def __init__(self, cardinalities: Iterable[int], dim: int) -> None:
        super().__init__()
        tables = [nn.EmbeddingBag(n, dim, mode="sum", sparse=True) for n in cardinalities]
        self.tables = nn.ModuleList(tables)
        for table in tables:
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)]
        return torch.stack(rows, dim=1)


class Trainer:
    #: Attributes whose state makes up a checkpoint.
    parts = ("embeddings", "dense", "optimizer")

    def __init__(self, args: argparse.Namespace) -> None:
        self.source = open_source(args.data)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.folder: Path = args.out
        torch.manual_seed(args.seed)
        cfg = WukongConfig.of(args.scale)
        schema = self.source.schema
        self.embeddings = Embeddings(schema.cardinalities, cfg.d).to(self.device)
        self.dense = WukongDense(cfg, len(schema.cardinalities), len(schema.dense)).to(self.device)
        self.optimizer = torch.optim.Adagrad(
            [*self.embeddings.parameters(), *self.dense.parameters()], lr=args.lr
        )
        self.row = 0
        # "on": the Mods belong to this model whether it starts fresh or from a checkpoint.
        # Without FP8 hardware, emulation runs the same plan: same quality, no speed.
        options: dict[str, Any] = {"mods": "on", "emulate": not _has_fp8(self.device)}
        options["inner"] = args.inner
        if args.resume:
            self.load()
            if self.plan.is_file():
                options["plan"] = str(self.plan)  # (loka) the same kernels as before
        self.forward = torch.compile(self.dense, backend="loka", options=options)  # (loka)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    def step(self, batch: Batch) -> float:
        ids, dense, label = (
            t.to(self.device) for t in (batch.categorical, batch.dense, batch.label)
        )
        embeddings = self.embeddings(ids)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.forward(embeddings, dense)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, batch_size: int, rows: int | None) -> None:
        losses: list[float] = []
        for batch in self.source.batches(batch_size, limit=rows):
            if batch.start < self.row:
                continue
            losses.append(self.step(batch))
            self.row = batch.start + len(batch)
            if len(losses) == 20:
                print(f"rows {self.row:>7,}  log loss {sum(losses) / len(losses):.4f}")
                losses.clear()

    def save(self) -> None:
        """Keys are those of the uncompiled modules, so the checkpoint also loads without loka."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = {name: getattr(self, name).state_dict() for name in self.parts}
        torch.save({"row": self.row, **parts}, self.checkpoint)
        loka_compile.plan_of(self.dense).save(self.plan)  # (loka) beside the checkpoint

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        for name in self.parts:
            getattr(self, name).load_state_dict(state[name])
        self.row = state["row"]


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="flights", help="flights or kuairand:DIR")
    parser.add_argument("--scale", default="tiny", help="tiny, small or base")
    parser.add_argument("--rows", type=int, default=30_720, help="stop after this many rows")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inner", default="inductor", help="aot_eager: starts at once, runs slow")
    parser.add_argument("--out", type=Path, default=Path("wukong-run"))
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    args = parser.parse_args()
    trainer = Trainer(args)
    trainer.train(args.batch, args.rows)
    trainer.save()
    print(f"saved {trainer.checkpoint} and {trainer.plan}; {trainer.source.counts.summary()}")


if __name__ == "__main__":
    main()
