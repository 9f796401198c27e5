"""The orientation rules R0-R10 of FCI (Zhang 2008, Artificial Intelligence 172) and Meek's rules, on a matrix of marks.

Each rule reads the marks as they stand and says which circles it would turn into arrowheads and which into tails; all of them are
written at once. Where two applications disagree the circle stays and a conflict is counted, so the result depends on no order of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heedful._errors import InvalidArgument
from heedful.discovery.paths import ARROW, CIRCLE, NONE, TAIL, Marks, bits, mask_of, mask_rows, uncovered_reach

__all__ = ["RULES", "Oriented", "meek", "open_marks", "orient"]

Sepsets = Mapping[tuple[int, int], Collection[int]]
Bools = NDArray[np.bool_]
Ends = Iterable[tuple[int, int]]

RULES = tuple(f"R{at}" for at in range(11))


@dataclass
class Oriented:
    """Marks under way. `marks[i, j]` is the mark at j; `conflicts` are the ends that the rules disagreed on."""

    marks: Marks
    conflicts: set[tuple[int, int]] = field(default_factory=set)

    @property
    def adjacent(self) -> list[int]:
        return mask_rows(self.marks != NONE)

    def at(self, mark: int) -> list[int]:
        """For each v, the nodes u whose edge has this mark at v."""
        return mask_rows((self.marks == mark).T)

    @property
    def parents(self) -> list[int]:
        """For each v, the nodes u with u -> v."""
        return mask_rows(((self.marks == ARROW) & (self.marks.T == TAIL)).T)

    def write(self, arrows: Ends = (), tails: Ends = ()) -> bool:
        """Turns circles into what is asked for; ends are pairs (i, j), the mark at j. Whether anything changed."""
        heads, shafts = set(arrows), set(tails)
        self.conflicts |= heads & shafts
        changed = False
        for wanted, mark in ((heads - shafts, ARROW), (shafts - heads, TAIL)):
            for end in wanted:
                if self.marks[end] == CIRCLE:
                    self.marks[end] = mark
                    changed = True
                elif self.marks[end] != mark:
                    self.conflicts.add(end)
        return changed

    def point(self, edges: Ends, arrows: Ends = ()) -> bool:
        """Makes edges i -> j, both ends or neither: not where an end says otherwise already."""
        heads, tails = set(arrows), set()
        for i, j in edges:
            if self.marks[i, j] == TAIL or self.marks[j, i] == ARROW:
                self.conflicts.add((i, j) if self.marks[i, j] == TAIL else (j, i))
                continue
            heads.add((i, j))
            tails.add((j, i))
        return self.write(heads, tails)


def open_marks(skeleton: Bools, order: Sequence[int] | None = None) -> Marks:
    """Circles on every edge; with an order, `i o-> j` for i before j: later is never a cause of earlier."""
    marks = np.where(skeleton, CIRCLE, NONE).astype(np.int8)
    if order is not None:
        place = np.empty(len(order), int)
        place[list(order)] = np.arange(len(order))
        marks[skeleton & (place[:, None] < place[None, :])] = ARROW
    return marks


def orient(
    marks: Marks,
    sepsets: Sepsets,
    *,
    selection_bias: bool = False,
    complete: bool = True,
    disable: Collection[str] = (),
) -> Oriented:
    """Applies R0, closes R1-R4, then alternates R5-R7 (with selection bias) and R8-R10 until nothing changes.

    Args:
        marks: the start, as `open_marks` gives it.
        sepsets: for pairs i < j without an edge, the set that separated them.
        selection_bias: whether undirected edges are possible.
        complete: False stops after R1-R4, where all arrowheads are found.
        disable: names of rules to leave out, to see what they do.
    """
    unknown = set(disable) - set(RULES)
    if unknown:
        raise InvalidArgument(f"rules are {RULES[0]} ... {RULES[-1]}; got {sorted(unknown)}")
    at = Oriented(marks.copy())
    rules: dict[str, Callable[[Oriented], bool]] = {
        "R1": _r1,
        "R2": _r2,
        "R3": _r3,
        "R4": lambda now: _r4(now, sepsets),
        "R5": _r5,
        "R6": _r6,
        "R7": _r7,
        "R8": _r8,
        "R9": _r9,
        "R10": _r10,
    }

    def close(*names: str) -> bool:
        changed = 0
        while found := sum(rules[name](at) for name in names if name not in disable):
            changed += found
        return changed > 0

    if "R0" not in disable:
        _r0(at, sepsets)
    close("R1", "R2", "R3", "R4")
    if complete:
        tails = ("R5", "R6", "R7") if selection_bias else ()
        while close(*tails) | close("R8", "R9", "R10"):
            pass
    at.conflicts |= _against(at, sepsets)
    return at


def _against(at: Oriented, sepsets: Sepsets) -> set[tuple[int, int]]:
    """Arrowheads that meet at b between nodes which a set with b in it separated: two rules disagreed, and one came first."""
    adjacent, into = at.adjacent, at.at(ARROW)
    return {
        end
        for (a, c), given in sepsets.items()
        if given and not adjacent[a] >> c & 1
        for b in given
        if into[b] >> a & 1 and into[b] >> c & 1
        for end in ((a, b), (c, b))
    }


def _r0(at: Oriented, sepsets: Sepsets) -> bool:
    """a *-* b *-* c, a and c apart, b not in their set: a *-> b <-* c."""
    adjacent = at.adjacent
    arrows = [
        end
        for (a, c), given in sepsets.items()
        if not adjacent[a] >> c & 1
        for b in bits(adjacent[a] & adjacent[c] & ~mask_of(given))
        for end in ((a, b), (c, b))
    ]
    return at.write(arrows)


def _r1(at: Oriented) -> bool:
    """a *-> b o-* c, a and c apart: b -> c."""
    head, circle = (at.marks == ARROW), (at.marks == CIRCLE)
    b, c = np.nonzero(_some(head.T, _apart(at.marks)) & circle.T)
    return at.point(_pairs(b, c))


def _r2(at: Oriented) -> bool:
    """a -> b *-> c or a *-> b -> c, and a *-o c: a *-> c."""
    head = at.marks == ARROW
    arrow = head & (at.marks.T == TAIL)
    found = (_some(arrow, head) | _some(head, arrow)) & (at.marks == CIRCLE)
    return at.write(_pairs(*np.nonzero(found)))


def _r3(at: Oriented) -> bool:
    """a *-> b <-* c, a *-o d o-* c, a and c apart, d *-o b: d *-> b."""
    adjacent, into, open_at = at.adjacent, at.at(ARROW), at.at(CIRCLE)
    arrows = []
    for b, heads in enumerate(into):
        for d in bits(open_at[b]) if heads & (heads - 1) else ():
            both = heads & open_at[d]
            if any(both & ~adjacent[a] & ~(1 << a) for a in bits(both)):
                arrows.append((d, b))
    return at.write(arrows)


def _r4(at: Oriented, sepsets: Sepsets) -> bool:
    """A discriminating path d, ..., a, b, c: b in the set of d and c makes b -> c, else a <-> b <-> c."""
    adjacent, into, parents = at.adjacent, at.at(ARROW), at.parents
    # For each v, the nodes whose edge with v has an arrowhead, or a circle, at their end.
    heads, open_from = mask_rows(at.marks == ARROW), mask_rows(at.marks == CIRCLE)
    ends: dict[tuple[int, int], int] = {}
    edges, arrows = [], []
    for c in range(len(adjacent)):
        for b in bits(open_from[c]):
            verdicts: dict[bool, list[int]] = {True: [], False: []}
            for a in bits(adjacent[b] & parents[c] & heads[b]):
                if (a, c) not in ends:
                    ends[a, c] = _discriminated(a, c, adjacent, into, parents[c])
                for d in bits(ends[a, c]):
                    given = sepsets.get((min(c, d), max(c, d)))
                    if given is not None:
                        verdicts[b in given].append(a)
            if verdicts[True] and verdicts[False]:
                at.conflicts.add((c, b))
            elif verdicts[True]:
                edges.append((b, c))
            elif verdicts[False] and at.marks[b, c] == TAIL:
                at.conflicts.add((b, c))
            elif verdicts[False]:
                arrows += [(c, b), (b, c), *((a, b) for a in verdicts[False])]
    return at.point(edges, arrows)


def _discriminated(a: int, c: int, adjacent: list[int], into: list[int], parents: int) -> int:
    """Every d at the far end of a discriminating path d, ..., a, b, c: inner nodes are colliders and parents of c."""
    found, seen, front = 0, 1 << a, [a]
    while front:
        v = front.pop()
        found |= into[v] & ~adjacent[c] & ~(1 << c)
        fresh = 0
        for u in bits(into[v] & parents & ~seen):
            if into[u] >> v & 1:
                fresh |= 1 << u
        seen |= fresh
        front += bits(fresh)
    return found


def _r5(at: Oriented) -> bool:
    """a o-o b on a cycle of at least four o-o edges whose every triple is uncovered: a - b."""
    adjacent = at.adjacent
    circles = mask_rows((at.marks == CIRCLE) & (at.marks.T == CIRCLE))
    tails = []
    for a, near in enumerate(circles):
        for b in bits(near >> (a + 1) << (a + 1)):

            def onward(v: int, a: int = a, b: int = b) -> int:
                # The node before b must be apart from a.
                return circles[v] & ~(1 << b) if adjacent[a] >> v & 1 else circles[v]

            starts = bits(near & ~adjacent[b] & ~(1 << b))
            if any(uncovered_reach(a, g, onward, adjacent, 1 << b) for g in starts):
                tails += [(a, b), (b, a)]
    return at.write(tails=tails)


def _r6(at: Oriented) -> bool:
    """a - b o-* c: a tail at b."""
    plain = ((at.marks == TAIL) & (at.marks.T == TAIL)).any(axis=0)
    return at.write(tails=_pairs(*np.nonzero((at.marks == CIRCLE) & plain[None, :])))


def _r7(at: Oriented) -> bool:
    """a -o b o-* c, a and c apart: a tail at b."""
    half = (at.marks == CIRCLE) & (at.marks.T == TAIL)  # [a, b]
    found = _some(_apart(at.marks), half) & (at.marks == CIRCLE)  # [c, b]
    return at.write(tails=_pairs(*np.nonzero(found)))


def _r8(at: Oriented) -> bool:
    """a -> b -> c or a -o b -> c, and a o-> c: a -> c."""
    tail = (at.marks.T == TAIL) & ((at.marks == ARROW) | (at.marks == CIRCLE))
    arrow = (at.marks == ARROW) & (at.marks.T == TAIL)
    a, c = np.nonzero(_some(tail, arrow) & _half_open(at.marks))
    return at.write(tails=_pairs(c, a))


def _r9(at: Oriented) -> bool:
    """a o-> c and an uncovered possibly directed path a, b, ..., c with b and c apart: a -> c."""
    adjacent, steps = at.adjacent, _steps(at.marks)
    tails = []
    for a, c in _pairs(*np.nonzero(_half_open(at.marks))):
        starts = bits(steps[a] & ~adjacent[c] & ~(1 << c))
        if any(uncovered_reach(a, b, steps.__getitem__, adjacent, 1 << c) for b in starts):
            tails.append((c, a))
    return at.write(tails=tails)


def _r10(at: Oriented) -> bool:
    """a o-> c, b -> c <- d, uncovered possibly directed paths from a to b and to d whose first nodes differ and are apart: a -> c."""
    adjacent, steps, parents = at.adjacent, _steps(at.marks), at.parents
    tails = []
    for a, c in _pairs(*np.nonzero(_half_open(at.marks))):
        ends = parents[c]
        if not ends & (ends - 1):
            continue
        hits = [
            (first, found)
            for first in bits(steps[a] & ~(1 << c))
            if (found := uncovered_reach(a, first, steps.__getitem__, adjacent, ends, avoid=1 << c))
        ]
        # Two different ends: not one and the same node alone on both sides.
        if any(
            not adjacent[m] >> w & 1 and (one | two) & ((one | two) - 1)
            for at_m, (m, one) in enumerate(hits)
            for w, two in hits[at_m + 1 :]
        ):
            tails.append((c, a))
    return at.write(tails=tails)


def meek(skeleton: Bools, sepsets: Sepsets) -> Oriented:
    """A CPDAG: v-structures, then Meek's rules R1-R3 (Meek 1995); an edge of open direction has tails at both ends.

    An edge that two v-structures would point both ways stays open and counts as a conflict.
    """
    adjacent = mask_rows(skeleton)
    heads = np.zeros_like(skeleton)
    for (a, c), given in sepsets.items():
        if not adjacent[a] >> c & 1:
            for b in bits(adjacent[a] & adjacent[c] & ~mask_of(given)):
                heads[a, b] = heads[c, b] = True
    conflicts = {(int(i), int(j)) for i, j in zip(*np.nonzero(heads & heads.T), strict=True)}
    heads &= ~heads.T
    while True:
        plain = skeleton & ~heads & ~heads.T
        apart = ~skeleton & ~np.eye(len(skeleton), dtype=bool)
        wanted = _some(heads.T, apart) & plain  # a -> b - c, a and c apart
        wanted |= _some(heads, heads) & plain  # a -> b -> c, a - c
        for a, b in _pairs(*np.nonzero(plain)):  # a - c -> b <- d - a, c and d apart
            both = np.flatnonzero(plain[a] & heads[:, b])
            wanted[a, b] |= bool(apart[np.ix_(both, both)].any())
        conflicts |= {(int(i), int(j)) for i, j in zip(*np.nonzero(wanted & wanted.T), strict=True)}
        wanted &= ~wanted.T
        if not wanted.any():
            break
        heads |= wanted
    return Oriented(np.where(heads, ARROW, np.where(skeleton, TAIL, NONE)).astype(np.int8), conflicts)


def _some(first: Bools, second: Bools) -> Bools:
    """[i, k]: some j with first[i, j] and second[j, k]."""
    return (first.astype(np.float32) @ second.astype(np.float32)) > 0


def _apart(marks: Marks) -> Bools:
    return (marks == NONE) & ~np.eye(len(marks), dtype=bool)


def _half_open(marks: Marks) -> Bools:
    """[a, c]: a o-> c."""
    return (marks == ARROW) & (marks.T == CIRCLE)


def _steps(marks: Marks) -> list[int]:
    """For each u, the nodes v that can follow it on a possibly directed path."""
    return mask_rows((marks != NONE) & (marks != TAIL) & (marks.T != ARROW))


def _pairs(first: NDArray[np.intp], second: NDArray[np.intp]) -> list[tuple[int, int]]:
    return list(zip(first.tolist(), second.tolist(), strict=True))
