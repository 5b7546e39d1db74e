"""Inductor's caches across processes: warm when nothing changed, cold when anything did.

Each case is a process of its own over one shared cache folder; real Inductor compiles, so the model
is one fused block and a head.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loka_compile.kernels
import loka_compile.lowering
import loka_compile.passes

SCRIPT = r"""
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters

options, pattern = json.loads(sys.argv[1]), sys.argv[2]
if pattern:
    class Nothing:
        name = "nothing"
        def __init__(self, word): self.word = word
        def __call__(self, gm, context): pass
    options["patterns"] = [Nothing(pattern)]
if sys.argv[3] == "plain first":
    # Freezes Inductor's decomposition table before loka is imported.
    torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 1))
compiled = torch.compile(model, backend="loka", options=options)
x = torch.randn(16, 32)
counters.clear()
y = compiled(x)
y.sum().backward()
if sys.argv[3] == "then evaluates":
    with torch.no_grad():
        compiled(x)
aot, fx = counters["aot_autograd"], counters["inductor"]
print(json.dumps({
    "y": y.sum().item(),
    "grad": model[0].weight.grad.abs().sum().item(),
    "aot_hit": aot["autograd_cache_hit"], "aot_miss": aot["autograd_cache_miss"],
    "fx_hit": fx["fxgraph_cache_hit"], "fx_miss": fx["fxgraph_cache_miss"],
}))
"""

OPTIONS = {"mods": "on", "emulate": True, "force": {"0": "torch:rowwise"}}


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "run.py"
        self.script.write_text(SCRIPT)

    def __call__(
        self, options: dict, pattern: str = "", before: str = "", path: Path | None = None
    ) -> dict:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}
        env.pop("PYTHONPATH", None)
        if path is not None:
            env["PYTHONPATH"] = str(path)
        done = subprocess.run(
            [sys.executable, str(self.script), json.dumps(options), pattern, before],
            capture_output=True,
            text=True,
            env=env,
            cwd=self.folder,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


def changed_package(folder: Path) -> Path:
    """A copy of the package whose Hard Swish divides by 5 instead of 6."""
    target = folder / "changed"
    root = target / "loka_compile"
    source = Path(loka_compile.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, root, ignore=ignore)
    for package in (loka_compile.kernels, loka_compile.lowering, loka_compile.passes):
        place = root / package.__name__.rsplit(".", 1)[1]
        if not place.exists():
            shutil.copytree(next(iter(package.__path__)), place, ignore=ignore)
    file = root / "kernels" / "hard_swish.py"
    text = file.read_text()
    assert "clamp(0, 6) / 6" in text
    file.write_text(text.replace("clamp(0, 6) / 6", "clamp(0, 6) / 5"))
    return target


@pytest.mark.slow
def test_caches_hit_when_they_may_and_miss_when_they_must(tmp_path: Path) -> None:
    run = Runs(tmp_path)
    cold = run(OPTIONS)
    assert cold["aot_miss"] >= 1 and cold["aot_hit"] == 0

    warm = run(OPTIONS)
    assert warm["aot_hit"] >= 1 and warm["aot_miss"] == 0 and warm["fx_miss"] == 0, warm
    assert (warm["y"], warm["grad"]) == (cold["y"], cold["grad"])

    # A graph without gradients is one entry more in each, and hits the same.
    assert run(OPTIONS, before="then evaluates")["aot_miss"] == 1
    evaluated = run(OPTIONS, before="then evaluates")
    assert (evaluated["aot_hit"], evaluated["aot_miss"], evaluated["fx_miss"]) == (2, 0, 0)
    assert evaluated["fx_hit"] == warm["fx_hit"] + 1, evaluated

    # Lowering is in force, and the caches hit, also behind a plain compile.
    after_plain = run(OPTIONS, before="plain first")
    assert after_plain["aot_miss"] == 0, after_plain
    assert after_plain["y"] == cold["y"]

    option = run({**OPTIONS, "block": 16})
    assert option["aot_hit"] == 0 and option["y"] != cold["y"], option

    with_pattern = run(OPTIONS, pattern="a")
    assert with_pattern["aot_hit"] == 0, with_pattern
    assert run(OPTIONS, pattern="a")["aot_miss"] == 0
    assert run(OPTIONS, pattern="b")["aot_hit"] == 0

    formula = run(OPTIONS, path=changed_package(tmp_path))
    assert formula["aot_hit"] == 0 and formula["y"] != cold["y"], formula
