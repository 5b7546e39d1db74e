"""Sites that a choice couples, and which groups of them ask the same question."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loka_compile.lowering.entries import Kernel


@dataclass(frozen=True)
class Member:
    """A site as the programme takes it; producer and bounded: see `choose_sites.find`."""

    name: str
    kernels: Mapping[str, Sequence[Kernel]]
    prices: Any
    producer: str | None
    bounded: str | None
    trains: bool


def groups(members: Sequence[Member]) -> list[list[Member]]:
    """`members` in groups that nothing couples; their order is kept."""
    root = {one.name: one.name for one in members}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    reader: dict[str, str] = {}
    for one in members:
        if one.producer in root:
            root[find(one.name)] = find(one.producer)
        if one.bounded is not None:
            root[find(one.name)] = find(reader.setdefault(one.bounded, one.name))
    found: dict[str, list[Member]] = {}
    for one in members:
        found.setdefault(find(one.name), []).append(one)
    return list(found.values())


def question(group: Sequence[Member]) -> Hashable:
    """Equal for groups that have the same answer: all but the names. Prices that move say so."""
    at = {one.name: i for i, one in enumerate(group)}
    values = {v: i for i, v in enumerate(dict.fromkeys(one.bounded for one in group))}
    return tuple(
        (
            id(one.prices),
            getattr(one.prices, "state", None),
            tuple((d, *one.kernels[d]) for d in one.kernels),
            at.get(one.producer or ""),
            None if one.bounded is None else values[one.bounded],
            one.trains,
        )
        for one in group
    )
