"""Run the quick part of the test suite on a GPU machine and keep its summary as JSON.

python benchmarks/run_gpu_tests.py --out benchmarks/results/gpu_tests_h200.json [pytest args]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from datetime import datetime
from datetime import timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from loka_compile import _compat


class Summary:
    """A pytest plugin that counts outcomes per file and keeps the failures' names."""

    def __init__(self) -> None:
        self.files: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        self.skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        file = report.nodeid.split("::")[0]
        self.files.setdefault(file, Counter())[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skips[report.longrepr[2]] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args, rest = parser.parse_known_args()
    summary = Summary()
    code = int(pytest.main(["-q", "-m", "not slow", *rest], plugins=[summary]))
    total: Counter[str] = sum(summary.files.values(), Counter())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "env": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _compat.device_key(device),
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
        "exit_code": code,
        "total": dict(total),
        "files": {name: dict(counts) for name, counts in sorted(summary.files.items())},
        "failures": summary.failures,
        "skips": dict(summary.skips.most_common(20)),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
