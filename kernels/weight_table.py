"""The table that the kernels of `quantize_weights` find their matrices in; see `weights_kernels`.

Made on the host for each set of addresses, and kept on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

import torch
from torch import Tensor

from loka_compile.kernels import captured
from loka_compile.kernels import weights_kernels as k
from loka_compile.kernels.room import lasting
from loka_compile.kernels.weight_group import Asked
from loka_compile.kernels.weight_group import Layout

KINDS = {"tensor": 1, "row": 2, "128x128": 4}
#: Of a tile, which a program casts.
SIZE = 128
#: Tiles that a program looks for a maximum in, unless the matrix would then have too many programs.
_TILES, MOST_SHARES = 2, 256
#: Sets of addresses that are known at a time, per group.
_MOST = 256


@dataclass(eq=False)
class Places:
    """table (int64) on the device, and its address. even: rows are of 16 bytes, all of them."""

    table: Tensor
    address: int
    even: bool


@dataclass
class Plan:
    """Of some matrices, each with its two results: all but the addresses.

    programs, tiles: of the two launches; programs_at, tiles_at: where the table says whose they
    are. lines: places for the maxima of rows and columns, behind those of the programs. even: the
    matrices' columns and strides are multiples of 16 bytes.
    """

    rows: list[list[int]] = field(default_factory=list)
    programs: int = 0
    tiles: int = 0
    lines: int = 0
    even: bool = True
    kinds: frozenset[str] = frozenset()
    _known: dict[tuple[int, ...], Places] = field(default_factory=dict)

    @property
    def programs_at(self) -> int:
        return len(self.rows) * k.FIELDS.value

    @property
    def tiles_at(self) -> int:
        return self.programs_at + self.programs

    def known(self, addresses: tuple[int, ...]) -> Places | None:
        return self._known.get(addresses)

    def place(self, addresses: tuple[int, ...], device: torch.device) -> Places:
        """Make a table for matrices that are there. The host waits for its copy alone."""
        if len(self._known) >= _MOST:
            forget(self._known, device)
        captured.sweep(device)
        made = self._table(addresses)
        table = lasting(lambda: made.to(device), device)
        even = self.even and all(at % 16 == 0 for at in addresses)
        # Of two threads that came at once, the first one's: a kernel of its may be under way.
        return self._known.setdefault(addresses, Places(table, table.data_ptr(), even))

    def _table(self, addresses: Sequence[int]) -> Tensor:
        rows = [[at, *row[1:]] for at, row in zip(addresses, self.rows, strict=True)]
        table = [number for row in rows for number in row]
        for first, many in ((k.FIRST, self.programs), (k.FIRST_TILE, self.tiles)):
            starts = [row[first.value] for row in self.rows] + [many]
            for one in range(len(rows)):
                table += [one] * (starts[one + 1] - starts[one])
        # While a CUDA graph is warmed up its device is the default.
        return torch.tensor(table, dtype=torch.int64, device="cpu")


def capturing(device: torch.device) -> bool:
    """A CUDA graph, which would have to hold the copying of a table too."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def forget(known: dict, device: torch.device) -> None:
    """Empty a dict of what holds tables, which kernels under way may still read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    known.clear()


def plan(matrices: Sequence[Tensor], asked: Sequence[Asked], held: Layout, turned: bool) -> Plan:
    """Of matrices (R, C) with neighbouring columns. turned: they are w.t(), so that what lies
    straight is w8t."""
    made = Plan()
    kinds = set()
    for x, one, (p8, ps, pt, pts) in zip(matrices, asked, held.places, strict=True):
        r, c = x.shape
        straight = (p8, KINDS[one.straight.kind], ps)
        other = (pt, KINDS[one.turned.kind], pts)
        (q, kind, scale), (t, kind_t, scale_t) = (other, straight) if turned else (straight, other)
        tiles = -(-r // SIZE) * -(-c // SIZE)
        names = {one.straight.kind, one.turned.kind}
        shares = 0 if names == {"128x128"} else min(-(-tiles // _TILES), MOST_SHARES)
        row = [0] * k.FIELDS.value
        for at, number in (
            (k.ROWS, r), (k.COLUMNS, c), (k.STRIDE, x.stride(0)),
            (k.Q_ROWS, q.shape[0]), (k.T_ROWS, t.shape[0]), (k.KIND, kind), (k.KIND_T, kind_t),
            (k.Q_AT, q.offset), (k.T_AT, t.offset),
            (k.SCALE_AT, scale.offset), (k.SCALE_T_AT, scale_t.offset),
            (k.BY_ROW, made.lines), (k.BY_COLUMN, made.lines + (r if kind == 2 else 0)),
            (k.FIRST, made.programs), (k.SHARES, shares), (k.FIRST_TILE, made.tiles),
        ):  # fmt: skip
            row[at.value] = number
        made.rows.append(row)
        made.lines += (r if kind == 2 else 0) + (c if kind_t == 2 else 0)
        made.programs += shares
        made.tiles += tiles
        bytes_ = x.element_size()
        made.even &= c * bytes_ % 16 == 0 and x.stride(0) * bytes_ % 16 == 0
        kinds |= names
    for row in made.rows:
        row[k.BY_ROW.value] += made.programs
        row[k.BY_COLUMN.value] += made.programs
    made.kinds = frozenset(kinds)
    return made
