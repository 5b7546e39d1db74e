"""docs/results.md says what the files under benchmarks/results/ say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "make_results.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no benchmarks beside the tests")


def test_the_page_is_generated_from_the_files() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda p: p.name
)
def test_every_result_says_where_and_when(path: Path) -> None:
    env = json.loads(path.read_text())["env"]
    assert env["torch"] and env["device"] and env["date"]
