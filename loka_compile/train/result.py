"""What a comparison found, as frozen dataclasses that become JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from loka_compile.files import write_text


@dataclass(frozen=True)
class ArmResult:
    """One arm over the headline rows. ``examples_per_s`` excludes steps that compiled."""

    log_loss: float | None
    ne: float | None
    auc: float | None
    examples_per_s: float | None
    seconds: float  # whole pass, compilation included
    non_finite: int = 0
    #: log loss, NE and AUC over every row, the warm-up included.
    whole_range: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """Rows ``[start, end)``; ``plan_active`` when every one of them ran under the plan."""

    start: int
    end: int
    plan_active: bool
    rll_percent: float | None
    mods_vs_original_percent: float | None
    ne: dict[str, float | None]


@dataclass(frozen=True)
class CompareResult:
    """``rll_percent``: loka against bf16_mods; ``mods_vs_original_percent``: the Mods alone.

    Both over rows from ``config["eval_from"]`` on and after the plan swap; positive is worse.
    """

    arms: dict[str, ArmResult]
    rll_percent: float | None
    mods_vs_original_percent: float | None
    windows: list[Window]
    fp8_share: dict[str, float | None]
    sites: list[dict[str, Any]]
    env: dict[str, Any]
    config: dict[str, Any]
    data: dict[str, Any]
    #: The two percentages over every row, before the swap included.
    whole_range: dict[str, float | None] = field(default_factory=dict)
    headline_rows: tuple[int, int] = (0, 0)
    changes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        return json.dumps(_plain(asdict(self)), indent=2, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write JSON; the file is either the old one or the complete new one."""
        write_text(Path(path), self.as_json())


def _plain(value: Any) -> Any:
    """Only what JSON has: non-finite numbers become null, paths and numpy scalars plain."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
