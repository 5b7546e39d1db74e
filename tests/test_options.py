"""Options: validated once, with errors that name the option and the nearest right one."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from loka_compile.errors import BadOptionError
from loka_compile.errors import UnknownOptionError
from loka_compile.mod_set import EVERY
from loka_compile.options import Options

README = Path(__file__).parents[1] / "README.md"


def test_unknown_option_names_it_and_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match=r"'min_sped'.*did you mean 'min_speedup'"):
        Options.parse({"min_sped": 1.2})


def test_unknown_option_far_from_all_lists_them() -> None:
    with pytest.raises(UnknownOptionError, match=r"known options: .*weight_cache"):
        Options.parse({"zzzzzz": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mods", "yes"),
        ("gate", "strict"),
        ("inner", "onnx"),
        ("tune", True),
        ("block", 0),
        ("max_mere", 0),
        ("loss_budget", 0),
        ("min_speedup", -1),
        ("probe_every", -1),
        ("probe_rows_on_disk", True),
        ("probe_model", "normal"),
        ("probe_weight_model", "matrix_normal"),
        ("force", ["a"]),
    ],
)
def test_bad_value_names_the_option(name: str, value: object) -> None:
    with pytest.raises(BadOptionError, match=f"option '{name}'"):
        Options.parse({name: value})


def test_a_lone_string_is_a_list_of_one() -> None:
    assert Options.parse({"exclude": "head*"}).exclude == ("head*",)


def test_fingerprint_moves_with_every_option_that_shapes_code() -> None:
    base = Options.parse({}).fingerprint()
    changed = {"mods": "on", "block": 64, "emulate": True, "max_mere": 0.1, "exclude": ["a"]}
    for name, value in changed.items():
        assert Options.parse({name: value}).fingerprint() != base, name


def test_the_page_on_mods_names_each_and_its_options_are_taken() -> None:
    page = README.parent / "docs" / "mods.md"
    if not page.exists():
        pytest.skip("no docs beside the tests")
    text = page.read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, flags=re.M)) == EVERY
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    dicts = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Dict)]
    given = [d for d in map(ast.literal_eval, dicts) if "mods" in d]
    assert [Options.parse(one).mods for one in given] == ["on", ("block_norm", "hard_swish"), "on"]


def test_readme_lists_exactly_these_options() -> None:
    if not README.exists():
        pytest.skip("no README beside the tests")
    table = README.read_text().partition("<!-- options -->")[2].partition("<!-- /options -->")[0]
    named = set(re.findall(r"^\| `(\w+)`", table, flags=re.M))
    assert named == {f.name for f in dataclasses.fields(Options)}
