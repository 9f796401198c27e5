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
from heedful.discovery.paths import ARROW, CIRCLE, NONE, TAIL, Links, Marks, bits, mask_of, mask_rows, uncovered_reach

Sepsets = Mapping[tuple[int, int], Collection[int]]
Bools = NDArray[np.bool_]
Ends = Iterable[tuple[int, int]]


@dataclass
class Oriented:
    """Marks under way. `marks[i, j]` is the mark at j; `conflicts` are the ends that the rules disagreed on."""

    marks: Marks
    conflicts: set[tuple[int, int]] = field(default_factory=set)

    @property
    def links(self) -> Links:
        return Links.of(self.marks)

    @property
    def arrows(self) -> Bools:
        """[u, v]: u -> v."""
        return (self.marks == ARROW) & (self.marks.T == TAIL)

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
        raise InvalidArgument(f"rules are R0 ... R10; got {sorted(unknown)}")
    at = Oriented(marks.copy())

    def close(*names: str) -> bool:
        changes = 0
        while fresh := sum(RULES[name](at, sepsets) for name in names if name not in disable):
            changes += fresh
        return changes > 0

    if "R0" not in disable:
        RULES["R0"](at, sepsets)
    close("R1", "R2", "R3", "R4")
    if complete:
        tails = ("R5", "R6", "R7") if selection_bias else ()
        while close(*tails) | close("R8", "R9", "R10"):
            pass
    at.conflicts |= contradictions(at, sepsets)
    return at


def contradictions(at: Oriented, sepsets: Sepsets) -> set[tuple[int, int]]:
    """Arrowheads that meet at b between nodes which a set with b in it separated: two rules disagreed, and one came first."""
    links = at.links
    return {
        end
        for (a, c), sepset in sepsets.items()
        if sepset and not links.adjacent[a] >> c & 1
        for b in sepset
        if links.into[b] >> a & 1 and links.into[b] >> c & 1
        for end in ((a, b), (c, b))
    }


def _r0(at: Oriented, sepsets: Sepsets) -> bool:
    """a *-* b *-* c, a and c apart, b not in their set: a *-> b <-* c."""
    adjacent = at.links.adjacent
    arrows = [
        end
        for (a, c), sepset in sepsets.items()
        if not adjacent[a] >> c & 1
        for b in bits(adjacent[a] & adjacent[c] & ~mask_of(sepset))
        for end in ((a, b), (c, b))
    ]
    return at.write(arrows)


def _r1(at: Oriented, sepsets: Sepsets) -> bool:
    """a *-> b o-* c, a and c apart: b -> c."""
    head, circle = (at.marks == ARROW), (at.marks == CIRCLE)
    return at.point(_pairs(_some(head.T, _apart(at.marks)) & circle.T))


def _r2(at: Oriented, sepsets: Sepsets) -> bool:
    """a -> b *-> c or a *-> b -> c, and a *-o c: a *-> c."""
    head = at.marks == ARROW
    ends = (_some(at.arrows, head) | _some(head, at.arrows)) & (at.marks == CIRCLE)
    return at.write(_pairs(ends))


def _r3(at: Oriented, sepsets: Sepsets) -> bool:
    """a *-> b <-* c, a *-o d o-* c, a and c apart, d *-o b: d *-> b."""
    links, open_at = at.links, mask_rows((at.marks == CIRCLE).T)
    arrows = []
    for b, heads in enumerate(links.into):
        for d in bits(open_at[b]) if heads & (heads - 1) else ():
            both = heads & open_at[d]
            if any(both & ~links.adjacent[a] & ~(1 << a) for a in bits(both)):
                arrows.append((d, b))
    return at.write(arrows)


def _r4(at: Oriented, sepsets: Sepsets) -> bool:
    """A discriminating path d, ..., a, b, c: b in the set of d and c makes b -> c, else a <-> b <-> c."""
    links, parents = at.links, mask_rows(at.arrows.T)
    # For each v, the nodes whose edge with v has an arrowhead, or a circle, at their end.
    heads, open_from = mask_rows(at.marks == ARROW), mask_rows(at.marks == CIRCLE)
    ends: dict[tuple[int, int], int] = {}
    edges, arrows = [], []
    for c in range(links.n):
        for b in bits(open_from[c]):
            verdicts: dict[bool, list[int]] = {True: [], False: []}
            for a in bits(links.adjacent[b] & parents[c] & heads[b]):
                if (a, c) not in ends:
                    ends[a, c] = _discriminated(a, c, links, parents[c])
                for d in bits(ends[a, c]):
                    sepset = sepsets.get((min(c, d), max(c, d)))
                    if sepset is not None:
                        verdicts[b in sepset].append(a)
            if verdicts[True] and verdicts[False]:
                at.conflicts.add((c, b))
            elif verdicts[True]:
                edges.append((b, c))
            elif verdicts[False] and at.marks[b, c] == TAIL:
                at.conflicts.add((b, c))
            elif verdicts[False]:
                arrows += [(c, b), (b, c), *((a, b) for a in verdicts[False])]
    return at.point(edges, arrows)


def _discriminated(a: int, c: int, links: Links, parents: int) -> int:
    """Every d at the far end of a discriminating path d, ..., a, b, c: inner nodes are colliders and parents of c."""
    ends, seen, front = 0, 1 << a, [a]
    while front:
        v = front.pop()
        ends |= links.into[v] & ~links.adjacent[c] & ~(1 << c)
        fresh = mask_of(u for u in bits(links.into[v] & parents & ~seen) if links.into[u] >> v & 1)
        seen |= fresh
        front += bits(fresh)
    return ends


def _r5(at: Oriented, sepsets: Sepsets) -> bool:
    """a o-o b on a cycle of at least four o-o edges whose every triple is uncovered: a - b."""
    adjacent = at.links.adjacent
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


def _r6(at: Oriented, sepsets: Sepsets) -> bool:
    """a - b o-* c: a tail at b."""
    plain = ((at.marks == TAIL) & (at.marks.T == TAIL)).any(axis=0)
    return at.write(tails=_pairs((at.marks == CIRCLE) & plain[None, :]))


def _r7(at: Oriented, sepsets: Sepsets) -> bool:
    """a -o b o-* c, a and c apart: a tail at b."""
    half = (at.marks == CIRCLE) & (at.marks.T == TAIL)  # [a, b]
    return at.write(tails=_pairs(_some(_apart(at.marks), half) & (at.marks == CIRCLE)))  # [c, b]


def _r8(at: Oriented, sepsets: Sepsets) -> bool:
    """a -> b -> c or a -o b -> c, and a o-> c: a -> c."""
    tail = (at.marks.T == TAIL) & ((at.marks == ARROW) | (at.marks == CIRCLE))
    return at.write(tails=_pairs((_some(tail, at.arrows) & _half_open(at.marks)).T))


def _r9(at: Oriented, sepsets: Sepsets) -> bool:
    """a o-> c and an uncovered possibly directed path a, b, ..., c with b and c apart: a -> c."""
    links, tails = at.links, []
    adjacent, steps = links.adjacent, links.steps
    for a, c in _pairs(_half_open(at.marks)):
        starts = bits(steps[a] & ~adjacent[c] & ~(1 << c))
        if any(uncovered_reach(a, b, steps.__getitem__, adjacent, 1 << c) for b in starts):
            tails.append((c, a))
    return at.write(tails=tails)


def _r10(at: Oriented, sepsets: Sepsets) -> bool:
    """a o-> c, b -> c <- d, uncovered possibly directed paths from a to b and to d whose first nodes differ and are apart: a -> c."""
    links, parents, tails = at.links, mask_rows(at.arrows.T), []
    adjacent, steps = links.adjacent, links.steps
    for a, c in _pairs(_half_open(at.marks)):
        ends = parents[c]
        if not ends & (ends - 1):
            continue
        hits = [
            (first, reached)
            for first in bits(steps[a] & ~(1 << c))
            if (reached := uncovered_reach(a, first, steps.__getitem__, adjacent, ends, avoid=1 << c))
        ]
        # Two different ends: not one and the same node alone on both sides.
        if any(
            not adjacent[m] >> w & 1 and (one | two) & ((one | two) - 1)
            for at_m, (m, one) in enumerate(hits)
            for w, two in hits[at_m + 1 :]
        ):
            tails.append((c, a))
    return at.write(tails=tails)


RULES: dict[str, Callable[[Oriented, Sepsets], bool]] = {
    f"R{at}": rule for at, rule in enumerate((_r0, _r1, _r2, _r3, _r4, _r5, _r6, _r7, _r8, _r9, _r10))
}


def meek(skeleton: Bools, sepsets: Sepsets) -> Oriented:
    """A CPDAG: v-structures, then Meek's rules R1-R3 (Meek 1995); an edge of open direction has tails at both ends.

    An edge that two v-structures would point both ways stays open and counts as a conflict.
    """
    adjacent = mask_rows(skeleton)
    heads = np.zeros_like(skeleton)
    for (a, c), sepset in sepsets.items():
        if not adjacent[a] >> c & 1:
            for b in bits(adjacent[a] & adjacent[c] & ~mask_of(sepset)):
                heads[a, b] = heads[c, b] = True
    conflicts = set(_pairs(heads & heads.T))
    heads &= ~heads.T
    while True:
        plain = skeleton & ~heads & ~heads.T
        apart = _apart(skeleton)
        wanted = _some(heads.T, apart) & plain  # a -> b - c, a and c apart
        wanted |= _some(heads, heads) & plain  # a -> b -> c, a - c
        for a, b in _pairs(plain):  # a - c -> b <- d - a, c and d apart
            both = np.flatnonzero(plain[a] & heads[:, b])
            wanted[a, b] |= bool(apart[np.ix_(both, both)].any())
        conflicts |= set(_pairs(wanted & wanted.T))
        wanted &= ~wanted.T
        if not wanted.any():
            break
        heads |= wanted
    return Oriented(np.where(heads, ARROW, np.where(skeleton, TAIL, NONE)).astype(np.int8), conflicts)


def _some(first: Bools, second: Bools) -> Bools:
    """[i, k]: some j with first[i, j] and second[j, k]."""
    return (first.astype(np.float32) @ second.astype(np.float32)) > 0


def _apart(marks: Marks | Bools) -> Bools:
    return ~marks.astype(bool) & ~np.eye(len(marks), dtype=bool)


def _half_open(marks: Marks) -> Bools:
    """[a, c]: a o-> c."""
    return (marks == ARROW) & (marks.T == CIRCLE)


def _pairs(entries: Bools) -> list[tuple[int, int]]:
    return [(i, j) for i, j in np.argwhere(entries).tolist()]
