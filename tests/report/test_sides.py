"""Side-by-side diffs: pairs, folds, the shared pool of lines."""

from __future__ import annotations

from loka_compile.report.sides import Pool
from loka_compile.report.sides import side_by_side

TEXT = "".join(f"line_{i} = f({i})\n" for i in range(60))


def test_sides_pair_lines_fold_and_mark_words():
    pool = Pool()
    after = TEXT.replace("f(30)", "g(30)").replace("line_31 = f(31)\n", "")
    diff = side_by_side(TEXT, after, pool)
    assert [r.kind for r in diff.rows if r.kind != "same"] == ["fold", "change", "remove", "fold"]
    assert (diff.added, diff.removed) == (1, 2)
    change = next(r for r in diff.rows if r.kind == "change")
    assert change.left.number == change.right.number == 31
    assert [text for text, marked in change.right.parts if marked] == ["g"]
    # Three lines of context on both sides; the pool has the rest, once.
    assert diff.rows[0].count == 27 and diff.rows[-1].count == 25
    side_by_side(TEXT, after, pool)
    assert len(pool.numbers) == 52 and diff.rows[0].pool == "0-26"
    assert side_by_side(TEXT, TEXT, pool).rows == []
