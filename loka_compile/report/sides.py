"""Two graph texts -> rows of a side-by-side diff; unchanged stretches fold into references.

A fold holds no text: it points into one pool of lines that all diffs of a page share.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from itertools import zip_longest

CONTEXT = 3
#: Shorter stretches are shown: a fold would take as much room.
_FOLD_FROM = 4
#: Text, and does it differ from the other side.
Part = tuple[str, bool]


@dataclass(frozen=True)
class Side:
    number: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Row:
    #: "same", "change", "remove", "add" or "fold".
    kind: str
    left: Side | None = None
    right: Side | None = None
    #: Of a fold: how many lines, and where they are in the pool, as `3-17,20`.
    count: int = 0
    pool: str = ""


@dataclass
class Pool:
    """Lines, each once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, lines: Sequence[str]) -> str:
        """Where the lines are, as ranges."""
        ranges: list[list[int]] = []
        for line in lines:
            n = self.numbers.setdefault(line, len(self.numbers))
            if ranges and ranges[-1][1] + 1 == n:
                ranges[-1][1] = n
            else:
                ranges.append([n, n])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


@dataclass(frozen=True)
class Diff:
    rows: list[Row]
    added: int
    removed: int


def side_by_side(before: str, after: str, pool: Pool) -> Diff:
    """No rows when nothing changed."""
    a, b = before.splitlines(), after.splitlines()
    if a == b:
        return Diff([], 0, 0)
    codes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    rows: list[Row] = []
    for index, (tag, i1, i2, j1, j2) in enumerate(codes):
        if tag == "equal":
            first, last = index == 0, index == len(codes) - 1
            rows += _unchanged(a[i1:i2], i1, j1, first, last, pool)
        else:
            rows += _changed(a[i1:i2], b[j1:j2], i1, j1)
    kinds = [r.kind for r in rows]
    changed = kinds.count("change")
    return Diff(rows, changed + kinds.count("add"), changed + kinds.count("remove"))


def _unchanged(
    lines: list[str], i: int, j: int, first: bool, last: bool, pool: Pool
) -> Iterator[Row]:
    head, tail = 0 if first else CONTEXT, 0 if last else CONTEXT
    hidden = len(lines) - head - tail
    if hidden < _FOLD_FROM:
        head, hidden = len(lines), 0
    for k, line in enumerate(lines):
        if head <= k < head + hidden:
            if k == head:
                where = pool.add(lines[head : head + hidden])
                yield Row("fold", _side(i + k, ""), _side(j + k, ""), hidden, where)
            continue
        yield Row("same", _side(i + k, line), _side(j + k, line))


def _changed(a: list[str], b: list[str], i: int, j: int) -> Iterator[Row]:
    """Lines that assign the same name stand beside each other; the rest as they come."""
    left, right = [_assigned(x) for x in a], [_assigned(x) for x in b]
    codes = difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    for tag, i1, i2, j1, j2 in codes:
        for di, dj in zip_longest(range(i1, i2), range(j1, j2)):
            if di is None:
                yield Row("add", None, _side(j + dj, b[dj]))
            elif dj is None:
                yield Row("remove", _side(i + di, a[di]), None)
            elif tag == "equal":
                old, new = _marked(a[di], b[dj])
                yield Row("change", Side(i + di + 1, old), Side(j + dj + 1, new))
            else:
                yield Row("change", _side(i + di, a[di]), _side(j + dj, b[dj]))


def _side(index: int, line: str) -> Side:
    return Side(index + 1, ((line, False),))


def _assigned(line: str) -> str:
    return line.split(" = ", 1)[0].strip()


def _marked(old: str, new: str) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Word by word: what both have is plain."""
    a, b = re.findall(r"\w+|\W", old), re.findall(r"\w+|\W", new)
    left: list[Part] = []
    right: list[Part] = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for parts, text in ((left, "".join(a[i1:i2])), (right, "".join(b[j1:j2]))):
            if text:
                parts.append((text, tag != "equal"))
    return tuple(left), tuple(right)
