"""The README against the package: code compiles, commands and names exist, numbers are measured."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import loka_compile
from loka_compile.cli import app
from loka_compile.options import Options
from loka_compile.report.explain import Report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "train_h200.json"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
#: Wide and plain, so that the help neither wraps nor colours an option's name.
PLAIN = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1", "TERM": "dumb"}


def section(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, flags=re.S)
    assert found is not None, name
    return found[1]


def help_of(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env=PLAIN)
    assert result.exit_code == 0, (command, result.output)
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def commands() -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """(subcommands, the options) of every `loka ...` that stands in code."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", README, flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S))
    for line in [*"\n".join(fenced).splitlines(), *spans]:
        found = re.match(r"\s*loka ((?:[a-z]\S* ?)+)([^#]*)", line)
        if found:
            yield tuple(found[1].split()), re.findall(r"--[a-z][a-z-]*", found[2])


def test_there_is_something_to_check() -> None:
    assert len(BLOCKS) >= 4
    assert {names[0] for names, _ in commands()} == {"train", "env", "bench", "plan"}
    assert any(options for _, options in commands())


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[0])
def test_python_blocks_compile(code: str) -> None:
    ast.parse(code)


def test_commands_and_their_options_exist() -> None:
    for names, options in commands():
        for depth, name in enumerate(names):
            assert re.search(rf"\b{name}\b", help_of(*names[:depth])), names
        known = re.findall(r"--[a-z][a-z-]*", help_of(*names))
        assert set(options) <= set(known), (names, options)


def test_public_names_exist() -> None:
    named = set(re.findall(r"loka_compile\.(\w+)\(", README))
    assert named, "the README calls nothing of the package"
    assert named <= set(loka_compile.__all__)
    assert set(re.findall(r"\breport\.(\w+)\(", README)) <= set(dir(Report))


def test_option_names_in_the_code_exist() -> None:
    calls = (n for code in BLOCKS for n in ast.walk(ast.parse(code)) if isinstance(n, ast.keyword))
    given = [call.value for call in calls if call.arg == "options"]
    assert given
    for value in given:
        Options.parse({**ast.literal_eval(value), "plan": None})


def test_option_defaults_are_those_of_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section("options"), flags=re.M)
    options = Options()
    assert [name for name, _ in rows] == [f.name for f in dataclasses.fields(Options)]
    for name, default in rows:
        assert ast.literal_eval(default) == getattr(options, name), name


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^make (\w+)|`make (\w+)`", README, flags=re.M)):
        assert re.search(rf"^{''.join(target)}:", makefile, flags=re.M), target


def test_results_are_those_of_the_file() -> None:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    directions = [list(site["directions"].values()) for site in found["sites"]]
    fp8 = [[choice["kernel"] != "high_precision" for choice in site] for site in directions]
    want = {
        "some direction": f"{sum(map(any, fp8))} of {len(fp8)}",
        "GEMM directions": f"{sum(map(sum, fp8))} of {sum(map(len, fp8))}",
        "finite": "yes" if found["finite"] else "no",
        "step 1": f"{found['step1_vs_cpu_percent']:.4f} % apart",
        "against BF16": f"{found['late_mean_vs_bf16_percent']:+.3f} %",
    }
    rows = [line.strip("| ").split(" | ") for line in section("results").splitlines()[2:]]
    assert len(rows) == len(want)
    for question, answer in rows:
        assert answer == next(value for key, value in want.items() if key in question), question
    env, config = found["env"], found["config"]
    for part in (env["device"], env["torch"], env["date"], f"`{config['scale']}`", RESULTS.name):
        assert part in README.replace("\n", " "), part
    assert f"{config['steps']} steps of {config['batch']} rows" in README
