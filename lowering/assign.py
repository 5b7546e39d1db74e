"""Which option each slot takes, over a whole chain: a small integer programme.

A slot is one choice of one site: the kernel of a direction, or how a step that several directions
need is done. What couples slots:
    needs   an option is allowed only beside some options of another slot (a consumer reads e4m3
            only if its producer hands it over)
    Clash   options of several slots that cannot stand together
    Shared  a cost that is paid once, whichever of its users ask for it (a tensor read once to be
            quantised for two GEMMs)
    budget  the sum of all scores is bounded
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass

#: A slot and some of its options.
Part = tuple[int, frozenset[int]]


@dataclass(frozen=True)
class Option:
    """us: its price. score: its share of the loss budget, zero or more.

    needs: of each of these, one must be chosen for this one to be allowed.
    """

    us: float
    score: float = 0.0
    needs: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Shared:
    """`us` is paid once if any of `users` is chosen; not negative."""

    us: float
    users: tuple[Part, ...]


@dataclass(frozen=True)
class Clash:
    """Not all of `parts` may be chosen at once."""

    parts: tuple[Part, ...]


#: A choice is whole within this; the solver's own tolerance is ten times as much.
WHOLE = 1e-7


class InfeasibleError(ValueError):
    """No choice satisfies the couplings and the budget."""


def solve(
    slots: Sequence[Sequence[Option]],
    budget: float | None = None,
    shared: Sequence[Shared] = (),
    clashes: Sequence[Clash] = (),
) -> list[int]:
    """The number of the chosen option per slot, for the least sum of `us` and of what is shared.

    Raises InfeasibleError when nothing fits, which high precision with score 0 in every slot rules
    out.
    """
    if any(not options for options in slots):
        raise InfeasibleError("a slot without options")
    if not slots:
        return []
    chosen = [0] * len(slots)
    # Equal blocks of a model ask the same question.
    answers: dict[object, list[int]] = {}
    for mine in _components(slots, budget is not None, shared, clashes):
        if len(mine) == 1 and budget is None and not any(o.needs for o in slots[mine[0]]):
            own = slots[mine[0]]
            if not _speaks_of(mine[0], shared, clashes):
                chosen[mine[0]] = min(range(len(own)), key=lambda i: (own[i].us, i))
                continue
        part = _restricted(mine, slots, shared, clashes)
        if part not in answers:
            answers[part] = _programme(*part, budget)
        for slot, option in zip(mine, answers[part], strict=True):
            chosen[slot] = option
    return chosen


def total_us(
    slots: Sequence[Sequence[Option]], chosen: Sequence[int], shared: Sequence[Shared] = ()
) -> float:
    own = math.fsum(options[i].us for options, i in zip(slots, chosen, strict=True))
    return own + math.fsum(
        s.us for s in shared if any(chosen[slot] in some for slot, some in s.users)
    )


# -- independent parts ----------------------------------------------------------------------------

Problem = tuple[tuple[tuple[Option, ...], ...], tuple[Shared, ...], tuple[Clash, ...]]


def _couplings(
    slots: Sequence[Sequence[Option]], shared: Sequence[Shared], clashes: Sequence[Clash]
) -> Iterator[list[int]]:
    """Groups of slots that hang together."""
    for slot, options in enumerate(slots):
        for option in options:
            if option.needs:
                yield [slot, *(other for other, _ in option.needs)]
    yield from ([slot for slot, _ in s.users] for s in shared)
    yield from ([slot for slot, _ in c.parts] for c in clashes)


def _speaks_of(slot: int, shared: Sequence[Shared], clashes: Sequence[Clash]) -> bool:
    return any(s == slot for one in shared for s, _ in one.users) or any(
        s == slot for one in clashes for s, _ in one.parts
    )


def _components(
    slots: Sequence[Sequence[Option]],
    everything: bool,
    shared: Sequence[Shared],
    clashes: Sequence[Clash],
) -> list[list[int]]:
    """Slots that couplings connect, directly or not; a budget connects all."""
    if everything:
        return [list(range(len(slots)))]
    root = list(range(len(slots)))

    def find(slot: int) -> int:
        while root[slot] != slot:
            root[slot] = root[root[slot]]
            slot = root[slot]
        return slot

    for first, *rest in _couplings(slots, shared, clashes):
        for other in rest:
            root[find(other)] = find(first)
    found: dict[int, list[int]] = {}
    for slot in range(len(slots)):
        found.setdefault(find(slot), []).append(slot)
    return list(found.values())


def _restricted(
    mine: Sequence[int],
    slots: Sequence[Sequence[Option]],
    shared: Sequence[Shared],
    clashes: Sequence[Clash],
) -> Problem:
    """The problem of some slots alone, renumbered: equal parts of a model give equal problems."""
    number = {slot: i for i, slot in enumerate(mine)}

    def moved(parts: Sequence[Part]) -> tuple[Part, ...]:
        return tuple((number[slot], some) for slot, some in parts)

    own = tuple(tuple(Option(o.us, o.score, moved(o.needs)) for o in slots[s]) for s in mine)
    return (
        own,
        tuple(Shared(s.us, moved(s.users)) for s in shared if s.users[0][0] in number),
        tuple(Clash(moved(c.parts)) for c in clashes if c.parts[0][0] in number),
    )


# -- the programme --------------------------------------------------------------------------------


def _kept(problem: Problem, budget: float | None) -> list[list[int]]:
    """Per slot, the options that may be best: of those that couple alike, the cheapest.

    Dozens of kernels per direction then cost the solver no more than a handful of kinds.
    """
    slots, shared, clashes = problem
    parts = [part for options in slots for o in options for part in o.needs]
    parts += [part for s in shared for part in s.users] + [p for c in clashes for p in c.parts]
    of_slot: dict[int, list[frozenset[int]]] = {}
    for slot, some in dict.fromkeys(parts):
        of_slot.setdefault(slot, []).append(some)
    kept = []
    for slot, options in enumerate(slots):
        best: dict[object, list[int]] = {}
        for i in sorted(range(len(options)), key=lambda i: (options[i].us, i)):
            alike = (options[i].needs, tuple(i in some for some in of_slot.get(slot, ())))
            before = best.setdefault(alike, [])
            # With a budget a dearer option is worth keeping where it scores less.
            if not before or (budget is not None and options[i].score < options[before[-1]].score):
                before.append(i)
        kept.append(sorted(i for some in best.values() for i in some))
    return kept


def _gains(
    pairs: Sequence[int], shared: Sequence[Shared], first: int
) -> Iterator[tuple[Part, list[int]]]:
    """(a user, pairs of which no more than one is gained, and only with that user).

    A user shares with the options of one other slot, of which one is chosen: taken together, what
    it gains of all of them is at most itself, and the solver need not branch to find that out.
    """
    beside: dict[tuple[Part, int], list[tuple[int, frozenset[int]]]] = {}
    for at in pairs:
        one, other = shared[at - first].users
        for user, (slot, some) in ((one, other), (other, one)):
            beside.setdefault((user, slot), []).append((at, some))
    for (user, _), found in beside.items():
        if sum(len(some) for _, some in found) == len(frozenset().union(*(s for _, s in found))):
            yield user, [at for at, _ in found]
        else:
            yield from ((user, [at]) for at, _ in found)


def _programme(
    slots: tuple[tuple[Option, ...], ...],
    shared: tuple[Shared, ...],
    clashes: tuple[Clash, ...],
    budget: float | None,
) -> list[int]:
    import numpy as np
    from scipy.optimize import Bounds
    from scipy.optimize import LinearConstraint
    from scipy.optimize import milp
    from scipy.sparse import coo_matrix

    kept = _kept((slots, shared, clashes), budget)
    column = {
        (slot, i): at
        for at, (slot, i) in enumerate((s, i) for s, some in enumerate(kept) for i in some)
    }
    options = [slots[slot][i] for slot, i in column]
    choices, total = len(column), len(column) + len(shared)
    cost = np.array([o.us for o in options] + [s.us for s in shared])
    pairs = [at for at, one in enumerate(shared, choices) if len(one.users) == 2]
    for at in pairs:
        # Paid by each user, and gained back where both ask: bounds on that are tighter.
        for slot, asking_for_it in shared[at - choices].users:
            for i in asking_for_it.intersection(kept[slot]):
                cost[column[slot, i]] += cost[at]
        cost[at] = -cost[at]
    entries: list[tuple[int, int, float]] = []
    bounds: list[tuple[float, float]] = []

    def row(terms: Sequence[tuple[int, float]], least: float, most: float) -> None:
        entries.extend((len(bounds), at, value) for at, value in terms)
        bounds.append((least, most))

    def columns(part: Part, value: float) -> list[tuple[int, float]]:
        slot, some = part
        return [(column[slot, i], value) for i in kept[slot] if i in some]

    for slot, some in enumerate(kept):
        row(columns((slot, frozenset(some)), 1.0), 1.0, 1.0)
    # Of one slot's options one is chosen: those that need the same share a row, which is tighter.
    needing: dict[tuple[int, Part], list[int]] = {}
    for at, ((slot, _), option) in enumerate(zip(column, options, strict=True)):
        for need in option.needs:
            needing.setdefault((slot, need), []).append(at)
    for (_, need), asking in needing.items():
        row([*((at, 1.0) for at in asking), *columns(need, -1.0)], -np.inf, 0.0)
    for at, one in enumerate(shared, choices):
        for user in one.users if len(one.users) != 2 else ():
            row([*columns(user, 1.0), (at, -1.0)], -np.inf, 0.0)
    for user, gains in _gains(pairs, shared, choices):
        row([*((at, 1.0) for at in gains), *columns(user, -1.0)], -np.inf, 0.0)
    for clash in clashes:
        row([t for part in clash.parts for t in columns(part, 1.0)], -np.inf, len(clash.parts) - 1)
    allowed = np.ones(total)
    if budget is not None:
        # Scaled to 1: scores of 1e-9 would drown in the solver's tolerance.
        scale = budget if budget > 0 else 1.0
        scores = [o.score / scale for o in options]
        # The solver's tolerance is 1e-6; a budget is a promise.
        limit = budget / scale * (1 - 1e-6)
        row([(at, score) for at, score in enumerate(scores) if score], -np.inf, limit)
        allowed[:choices][np.array(scores) > limit] = 0.0
    at_rows, at_columns, values = zip(*entries, strict=True)
    matrix = coo_matrix((values, (at_rows, at_columns)), shape=(len(bounds), total)).tocsr()
    least, most = map(np.array, zip(*bounds, strict=True))
    scaled = cost / max(float(np.abs(cost).max()), 1e-30)
    limits = LinearConstraint(matrix, least, most)
    # What is shared follows from the choices.
    whole = np.concatenate([np.ones(choices), np.zeros(len(shared))])
    # Nearly always whole as it is, without the solver's search for whole numbers: a third of it.
    found = milp(scaled, constraints=limits, bounds=Bounds(0.0, allowed))
    if found.x is None or np.abs(found.x - found.x.round())[:choices].max() > WHOLE:
        found = milp(
            scaled,
            constraints=limits,
            integrality=whole,
            bounds=Bounds(0.0, allowed),
            options={"mip_rel_gap": 0.0},
        )
    if found.x is None:
        raise InfeasibleError(f"no choice fits: {found.message}")
    return [max(some, key=lambda i: found.x[column[slot, i]]) for slot, some in enumerate(kept)]
