"""Golden files: texts that people read, as they were when somebody last looked at them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from loka_compile.files import write_text

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """golden(stem, text): equal to the file. LOKA_UPDATE_GOLDEN=1 (`make golden`) writes it."""

    def check(stem: str, text: str) -> None:
        path = GOLDEN / f"{stem}.txt"
        if os.environ.get("LOKA_UPDATE_GOLDEN") == "1":
            write_text(path, text)
        assert text == path.read_text(encoding="utf-8"), path.name
        assert not re.search(r"0x[0-9a-f]{4}|/somewhere", text), "an address or a folder"

    return check
