"""`--mods` and `--keep`: what they say reaches every arm that has Mods, and the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from loka_compile import dry_run
from loka_compile.cli import app
from loka_compile.commands.mods_flags import options_of
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import Schema
from loka_compile.plan import Plan
from loka_compile.train import arms
from loka_compile.zoo import build_model

RUNNER = CliRunner()
DATA = ["--data", "synthetic:rows=512,fields=4,dense=3"]


def test_what_they_say() -> None:
    assert options_of(None, None) == options_of(None, []) == {}
    assert options_of("hard_swish, no_bias", None) == {"mods": ("no_bias", "hard_swish")}
    assert options_of("off", ["no_bias=a.*", "no_bias=b", "hard_swish=c"]) == {
        "mods": "off",
        "keep": {"no_bias": ("a.*", "b"), "hard_swish": ("c",)},
    }


@pytest.mark.parametrize("command", ["train", "compare", "plan make"])
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            ["--mods", "bias"],
            "names out of no_bias, block_norm, hard_swish (did you mean 'no_bias'",
        ),
        (["--keep", "mlp.0"], "want MOD=LAYER, for instance no_bias=mlp.0"),
        (["--keep", "bias=mlp.0"], "want keys out of no_bias, block_norm, hard_swish"),
    ],
)
def test_a_mistake_is_one_line(command: str, flag: list[str], message: str, tmp_path: Path) -> None:
    where = [] if command.startswith("plan") else DATA
    out = ["--out", str(tmp_path / "out")]
    got = RUNNER.invoke(app, [*command.split(), *where, *out, *flag])
    assert got.exit_code == 2
    assert message in got.stderr and got.stderr.count("\n") == 1


def test_arms_follow() -> None:
    fields = tuple(CategoricalField(name, 7) for name in "abcd")
    model = build_model("dhen", "tiny", Schema(fields, ("x",), "y"), shared_table=True)

    def biases(name: str, options: dict) -> tuple[int, int]:
        kinds = (nn.Linear, nn.LayerNorm)
        held = list(arms.build(name, model, options).model.dense.modules())
        some = [m for m in held if isinstance(m, kinds) and getattr(m, "bias", None) is not None]
        return len(some), sum(isinstance(m, nn.LayerNorm) for m in held)

    whole, norms = biases("original", {})
    assert biases("bf16_mods", {"mods": "on"})[1] == 0
    some = {"mods": ("block_norm", "hard_swish")}
    assert biases("bf16_mods", some) == biases("control", some)
    assert biases("bf16_mods", some)[1] == 0 and biases("bf16_block_norm", {})[1] == 0
    assert biases("bf16_no_bias", {})[1] == norms > 0
    kept = biases("bf16_mods", {"mods": "on", "keep": {"no_bias": ("*.dlrm.mlp.*",)}})[0]
    assert biases("bf16_mods", {"mods": "on"})[0] < kept < whole


def test_a_plan_is_made_and_shown_with_them(tmp_path: Path, monkeypatch) -> None:
    def make(model: nn.Module, inputs: object, *, options: dict) -> Plan:
        return Plan(mods=options["mods"], kept=options["keep"])

    monkeypatch.setattr(dry_run, "make_plan", make)
    out = tmp_path / "plan.json"
    flags = ["--mods", "no_bias,block_norm", "--keep", "no_bias=bottom.0", "--model", "dlrm"]
    got = RUNNER.invoke(app, ["plan", "make", *flags, "--out", str(out)])
    assert got.exit_code == 0, got.output
    assert json.loads(out.read_text())["mods"] == ["no_bias", "block_norm"]
    shown = " ".join(RUNNER.invoke(app, ["plan", "show", str(out)]).output.split())
    assert "Mods: on (no_bias, block_norm); no_bias keeps bottom.0" in shown
