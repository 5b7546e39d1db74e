"""The README against the package: code compiles, commands and names exist, numbers are measured."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import loka_compile
from loka_compile.cli import app
from loka_compile.options import Options
from loka_compile.report.explain import Report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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
    assert {names[0] for names, _ in commands()} == {"train", "env", "bench", "plan", "compare"}
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


def test_the_table_says_what_the_files_say() -> None:
    """That it is generated is checked with the page of results; here, one number of each kind."""
    rows = [line.strip("| ").split(" | ") for line in section("results").splitlines()[2:]]
    answers = {question: answer for question, answer, _ in rows}

    def answer(*words: str) -> str:
        return next(a for q, a in answers.items() if all(word in q for word in words))

    steps = json.loads((RESULTS / "dispatch_h200.json").read_text())["rows"]
    one = {
        r["arm"]: r["ms"]
        for r in steps
        if (r["batch"], r["mode"], r["cuda_graphs"], r["params"]) == (4096, "train", False, "bf16")
    }
    assert f"{one['bf16_mods'] / one['dispatch']:.2f}x" in answer("training step", "4096")
    quality = json.loads((RESULTS / "quality_kuairand_dhen.json").read_text())
    assert f"{quality['mean']:+.4f} %" in answer("dhen", "FP8 against bf16")
    assert f"dhen {quality['modelling']['mean']:+.3f} %" in answer("Mods themselves")
    probing = json.loads((RESULTS / "probe_overhead_h200.json").read_text())
    assert f"{probing['overhead_percent']:.2f} %" == answer("probing")
