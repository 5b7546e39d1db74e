"""What version our own kernels are of: the package's, and a digest of the sources that they run.

Their speed changes with every edit, long before the package's version does, so the package's alone
would keep rows of the cost table in force that speak of another kernel. The digest is over the file
of a kernel and over the files of ours that it imports: a change to the backward leaves the rows of
the forward alone. Comment lines and blank ones do not count.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path

#: Part of a step, as `CostKey.direction` has it -> the files that have our kernels for it.
ENTRIES = {
    "fwd": ("fused_forward",),
    "gradient": ("fused_backward", "fused_backward_blocks"),
    "quantise": ("quantize_both",),
}
_FROM_A_FILE = re.compile(r"^\s*from loka_compile\.kernels\.(\w+) import ", re.MULTILINE)
_THE_FILE = re.compile(r"^\s*from loka_compile\.kernels import (\w+)", re.MULTILINE)


@functools.cache
def own_version(direction: str) -> str:
    """`0.1.0+9f3c2a71`: of the kernel that runs this part; of all of them where none does."""
    import loka_compile
    import loka_compile.kernels as kernels

    found = digest(Path(next(iter(kernels.__path__))), ENTRIES.get(direction, ()))
    return f"{loka_compile.__version__}+{found}"


def digest(folder: Path, entries: Sequence[str] = ()) -> str:
    """Eight hex digits over the sources of `entries` and of all that they import from `folder`;
    without entries over all that is there."""
    names = sources(folder, entries or [p.stem for p in folder.glob("*.py")])
    found = hashlib.sha256()
    for name in names:
        found.update(name.encode() + b"\n")
        for line in _lines(folder / f"{name}.py"):
            found.update(line.encode() + b"\n")
    return found.hexdigest()[:8]


def sources(folder: Path, entries: Sequence[str]) -> list[str]:
    """The files (stems) that `entries` are made of, they among them, sorted."""
    seen: set[str] = set()
    open_ = list(entries)
    while open_:
        name = open_.pop()
        if name in seen or not (folder / f"{name}.py").exists():
            continue
        seen.add(name)
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        open_ += _FROM_A_FILE.findall(text) + _THE_FILE.findall(text)
    return sorted(seen)


def _lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        bare = line.strip()
        if bare and not bare.startswith("#"):
            yield line.rstrip()
