"""Click and delay logs as time-ordered, streamed batches: ``open_source("flights")``."""

from __future__ import annotations

from loka_compile.data.base import Batch
from loka_compile.data.base import CategoricalField
from loka_compile.data.base import DataError
from loka_compile.data.base import RowCounts
from loka_compile.data.base import Schema
from loka_compile.data.base import Source
from loka_compile.data.registry import open_source
from loka_compile.data.registry import register_source
from loka_compile.data.registry import sources

__all__ = [
    "Batch",
    "CategoricalField",
    "DataError",
    "RowCounts",
    "Schema",
    "Source",
    "open_source",
    "register_source",
    "sources",
]
