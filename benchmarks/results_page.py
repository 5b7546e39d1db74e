"""What the sections of docs/results.md share: reading result files, tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
MODS = ROOT / "docs" / "mods.md"
README = ROOT / "README.md"


def read(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    header = list(header)
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return lines


def where(env: dict[str, Any]) -> str:
    parts = [env.get("device", ""), f"torch {env['torch']}"]
    if "triton" in env:
        parts.append(f"triton {env['triton']}")
    return ", ".join([*parts, env["date"]])


def with_section(page: Path, name: str, lines: list[str]) -> str:
    """The text of a page that is written by hand, with what is between its two marks made anew."""
    before, _, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, _, after = rest.partition(f"<!-- /{name} -->")
    return "\n".join([f"{before}<!-- {name} -->", *lines, f"<!-- /{name} -->{after}"])
