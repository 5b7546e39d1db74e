"""`merge_ranks` over real processes: gloo, two ranks, unequal batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from loka_compile.probe import store
from loka_compile.probe.statistics import ROWS_SEEN

RANK = r"""
import sys, torch, torch.distributed as dist
from loka_compile.probe import store
from loka_compile.probe.merge import merge_ranks
from loka_compile.probe.statistics import Statistics, update
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
generator = torch.Generator().manual_seed(rank)
x = Statistics.empty(12, torch.float32, torch.device("cpu"), covariance=True)
g = Statistics.empty(6, torch.float32, torch.device("cpu"), gradient=True)
rows = []
for m in ((7, 64, 1), (33, 200))[rank]:
    batch = 1000 + (1 + rank) * torch.randn(m, 12, generator=generator)
    update(batch, x)
    update(batch[:, :6] / 1e6, g)
    rows.append(batch)
merged = merge_ranks({("a", "x"): x, ("a", "g"): g})
store.save(merged, f"{folder}/merged-{rank}.safetensors", rows=True)
torch.save(torch.cat(rows), f"{folder}/rows-{rank}.pt")
# Of a group of its own, a rank gets its own state back.
alone = merge_ranks({("a", "x"): x}, [dist.new_group([r]) for r in range(2)][rank])
assert alone["a", "x"] is x
dist.destroy_process_group()
"""


def test_two_processes_get_the_same_exact_state(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank)])
        for rank in range(2)
    ]
    assert [one.wait(timeout=120) for one in ranks] == [0, 0]
    first, second = (store.load(tmp_path / f"merged-{r}.safetensors") for r in range(2))
    assert set(first) == {("a", "x"), ("a", "g")}
    for key, held in first.items():
        for mine, other in zip(held.tensors, second[key].tensors, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    rows = torch.cat([torch.load(tmp_path / f"rows-{r}.pt") for r in range(2)]).double()
    x, g = first["a", "x"], first["a", "g"]
    assert x.batches == 5 and float(x.scalars[ROWS_SEEN]) == len(rows)
    torch.testing.assert_close(x.mean(), rows.mean(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(x.variance(), rows.var(0), rtol=1e-6, atol=0)
    want = torch.cov(rows.t())
    assert (x.covariance() - want).norm() < 1e-6 * want.norm()
    torch.testing.assert_close(g.variance(), rows[:, :6].var(0) / 1e12, rtol=1e-5, atol=0)
    # Still pairs: slot by slot the gradient is the input's first half, scaled.
    held = min(len(x.drawn()), len(g.drawn()))
    assert held > 90
    torch.testing.assert_close(g.drawn()[:held] * 1e6, x.drawn()[:held, :6], rtol=1e-5, atol=0)
