"""Keys, buckets, staleness, and the JSON form of the cost table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from loka_compile import _compat
from loka_compile.errors import CostTableError
from loka_compile.lowering import cost_table
from loka_compile.lowering.cost_table import CostKey
from loka_compile.lowering.cost_table import CostRow
from loka_compile.lowering.cost_table import bucket
from loka_compile.lowering.recipes import HIGH_PRECISION

CPU = torch.device("cpu")


def key(kernel: str = "torch:rowwise", direction: str = "fwd", m: int = 1000) -> CostKey:
    return CostKey.of(kernel, direction, m, 64, 128, torch.bfloat16, CPU)


def test_buckets_are_four_per_octave_and_never_below():
    assert [bucket(m) for m in (0, 1, 16, 17, 33, 1000, 1024, 1025)] == [
        16, 16, 16, 20, 40, 1024, 1024, 1280,
    ]  # fmt: skip
    for m in range(1, 5000):
        b = bucket(m)
        assert m <= b and bucket(b) == b and (b <= 16 or b <= 1.25 * m)
    assert len({bucket(m) for m in range(1025, 2049)}) == 4


def test_a_key_knows_what_is_installed():
    one = key()
    assert (one.m, one.library, one.recipe, one.kernel) == (
        1024, "torch", "rowwise", "torch:rowwise",
    )  # fmt: skip
    assert one.version == one.torch == torch.__version__
    high = key(HIGH_PRECISION)
    assert high.kernel == HIGH_PRECISION and high.library == "torch"
    assert key() == key(m=1024) != key(m=1025)


def test_tf32_is_another_price(monkeypatch):
    monkeypatch.setattr(_compat, "tf32_allowed", lambda: True)
    assert cost_table.dtype_name(torch.float32) == "tf32"
    monkeypatch.setattr(_compat, "tf32_allowed", lambda: False)
    assert cost_table.dtype_name(torch.float32) == "float32"
    assert cost_table.dtype_name(torch.bfloat16) == "bfloat16"


def test_a_row_goes_stale_with_the_library_and_with_torch():
    row = CostRow(key(), 3.0, "2026-01-01")
    assert row.why_stale() is None
    old = replace(row, key=replace(row.key, torch="2.3.0"))
    assert "torch 2.3.0" in str(old.why_stale())
    other = replace(row, key=replace(row.key, library="torchao", version="0.0.1"))
    assert "torchao 0.0.1" in str(other.why_stale())


def test_export_and_import_round_trip(tmp_path):
    rows = [
        CostRow(key(), 3.0, "2026-01-01"),
        CostRow(replace(key(), epilogue="block_norm:256:silu", handed=True), 2.5, "2026-01-01"),
    ]
    path = cost_table.export_rows(rows, tmp_path / "costs.json")
    assert sorted(cost_table.import_rows(path), key=lambda r: r.us) == rows[::-1]
    # Stable text: the same rows in another order are the same file.
    again = cost_table.export_rows(rows[::-1], tmp_path / "again.json")
    assert path.read_text() == again.read_text()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "not a cost table"),
        ('{"kind": "loka-plan"}', "not a cost table"),
        ('{"kind": "loka-costs", "version": 99, "rows": []}', "version 99"),
        ('{"kind": "loka-costs", "version": 1, "rows": [{}]}', "damaged"),
    ],
)
def test_a_bad_file_is_one_clear_error_and_stays(tmp_path, text, why):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match=why):
        list(cost_table.import_rows(path))
    with pytest.raises(CostTableError):
        cost_table.export_rows([], path)
    assert path.read_text() == text


@pytest.mark.parametrize("change", [{"us": -1}, {"us": "x"}, {"color": 1}])
def test_a_row_that_is_none_is_refused(tmp_path, change):
    row = {**CostRow(key(), 3.0, "2026-01-01").to_dict(), **change}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"kind": "loka-costs", "version": 1, "rows": [row]}))
    with pytest.raises(CostTableError, match="damaged"):
        list(cost_table.import_rows(path))


def test_shipped_rows_are_readable():
    for row in cost_table.shipped_rows():
        assert row.origin == "shipped" and row.us > 0
