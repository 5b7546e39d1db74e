"""Masks of rows: a buffer that stays where it is, for any number of batch sizes."""

from __future__ import annotations

import torch

from loka_compile.probe import rows as user_rows
from loka_compile.probe.rows import probe_rows

CPU = torch.device("cpu")


def test_ten_thousand_batch_sizes_take_a_few_buffers() -> None:
    before = set(user_rows._BUFFERS)
    for count in [*range(1, 300), 8192, 9001, 10_000]:
        mask = torch.arange(count) % 3 == 0
        with probe_rows(mask):
            wanted = user_rows.wanted(count, CPU)
            assert wanted is not None and torch.equal(wanted, mask)
            assert torch.equal(user_rows.wanted(2 * count, CPU), mask.repeat_interleave(2))
    made = [user_rows._BUFFERS[key] for key in user_rows._BUFFERS.keys() - before]
    assert len(made) <= 16 and sum(len(one) for one in made) <= 4 * 10_000


def test_a_length_keeps_its_address() -> None:
    def address(count: int) -> int:
        with probe_rows(torch.ones(count, dtype=torch.bool)):
            return user_rows._active[-1].data_ptr()

    first = address(48)
    for count in (1, 33, 64, 65, 1000):
        address(count)
    assert address(48) == first


def test_a_mask_inside_another_leaves_it_as_it_was() -> None:
    outer, inner = torch.arange(8) % 2 == 0, torch.zeros(8, dtype=torch.bool)
    with torch.inference_mode(), probe_rows(outer):
        with probe_rows(inner):
            assert torch.equal(user_rows.wanted(8, CPU), inner)
        assert torch.equal(user_rows.wanted(8, CPU), outer)
    with probe_rows(outer):
        assert torch.equal(user_rows.wanted(8, CPU), outer)


def test_no_rows() -> None:
    with probe_rows(torch.ones(0, dtype=torch.bool)):
        assert user_rows.wanted(0, CPU) is None
