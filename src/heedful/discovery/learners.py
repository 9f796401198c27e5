"""Learning a graph from independences: ICD, ordered ICD, FCI and PC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from inspect import signature
from itertools import chain
from operator import or_
from typing import Any
from warnings import warn

import numpy as np
from numpy.typing import ArrayLike

from heedful._checks import check_choice
from heedful._errors import InvalidArgument
from heedful._progress import Progress
from heedful.discovery.graph import PAG
from heedful.discovery.independence import FisherZ, Floats, IndependenceTest, correlation, indefiniteness, table
from heedful.discovery.orientation import Oriented, meek, open_marks
from heedful.discovery.paths import Marks, bits, mask_of, reachable_sets
from heedful.discovery.questions import BLOCK, OutOfBudget, Pair, Questions, Sets, check_nodes, subsets
from heedful.discovery.state import State

# Near-complete graphs of 100 nodes have 10^7 tests with sets of two and 10^11 with sets of five.
MAX_TESTS = 2_000_000
# Sets of one pair held at once while they are grown.
_HELD = 500_000


def icd(
    test: IndependenceTest,
    nodes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    *,
    order: Sequence[int | str] | None = None,
    selection_bias: bool = False,
    max_cond_size: int | None = None,
    max_tests: int | None = MAX_TESTS,
    stable: bool = False,
    progress: Progress | None = None,
) -> PAG:
    """Iterative causal discovery (Rohekar et al., NeurIPS 2021), and with an order its form for decoders (ICML 2025).

    Pass r = 0, 1, 2, ... tests every remaining edge (i, j) with every ICD-Sep set: r nodes that are possible ancestors of i or j and that
    possible-d-sep paths through members of the set reach, all from i or all from j. Sets near the pair come first; the first that
    separates removes the edge. After each pass R0-R4 orient what is left. The graph after pass r is right for independences given up to
    r variables, so it may stop early: `reach` says how far it got.

    With `order` (earlier is never caused by later) every edge starts as `i o-> j`, and sets are taken around the later node from those before it.

    Args:
        test: answers independence questions: `FisherZ`, `DSeparation`, or anything with the same `run`.
        nodes: the variables to use, all by default; `names`, `order` and the result are in terms of these.
        names: of the nodes.
        order: a permutation of the nodes, by their numbers or names, causes first.
        selection_bias: whether the sample may have been selected by its values (rules R5-R7). Off unless asked, other than in the authors' code.
        max_cond_size: no larger sets are tested.
        max_tests: a pass that would exceed this total is undone, and `stopped` says so; None for no limit.
        stable: ours: edges go at the end of a pass, and the rules count what any separating set of that size holds as in the set, so
            that numbering the nodes otherwise changes nothing. More tests are executed.
        progress: called with the pairs done and to do in the pass under way, and what that is.

    >>> from heedful.discovery import DSeparation, icd
    >>> icd(DSeparation([[], [], [0, 1], [2]]))
    PAG(4 nodes, 3 edges, learner='icd': x0 o-> x2, x1 o-> x2, x2 --> x3)
    """
    state = State(Questions(test, nodes, max_cond_size, max_tests, progress), names, order)

    def one(size: int) -> None:
        pairs = state.pairs()
        if stable:
            state.remove_best((pair, _near_sets(state, pair, size)) for pair in state.ask.counted(pairs))
        elif size == 1:
            state.ask.singles(pairs, state.beside, state.remove)
        else:
            for pair in state.ask.counted(pairs):
                sepset = state.ask.first(pair, _near_sets(state, pair, size))
                if sepset is not None:
                    state.remove(pair, sepset)

    # Arrowheads alone, by R0-R4.
    state.passes(range(state.ask.n - 1), one, lambda: state.orient(complete=False))
    state.orient(selection_bias=selection_bias)
    return state.result("icd" if order is None else "ordered icd", selection_bias)


def _near_sets(state: State, pair: Pair, size: int) -> Iterator[Sets]:
    """The ICD-Sep sets of a pair: nearest first, then by index."""
    links, ends = state.links, mask_of(pair)
    roots: tuple[int, ...] = pair
    within = -1
    if state.order is not None:
        base = max(pair, key=state.rank.__getitem__)
        roots, within = (base,), mask_of(state.order[: state.rank[base]])
    if size == 1:
        yield from subsets(np.flatnonzero(state.beside(pair)).tolist(), 1)
        return
    pool = links.possible_ancestors(ends) & within & ~ends
    if pool.bit_count() < size:
        return
    # All of the pool beside one root: every subset is reached, and all are equally near.
    if any(not pool & ~links.adjacent[root] for root in roots):
        yield from subsets(bits(pool), size)
        return
    families = []
    for root in roots:
        family = reachable_sets(links, root, pool, size, min(state.ask.left, _HELD))
        if family is None:
            raise OutOfBudget
        families.append(family)
    nearest = dict.fromkeys(chain(*families), 0)
    if len(nearest) > 1:
        for root, family in zip(roots, families, strict=True):
            depth = links.depths(root, within, reduce(or_, family, 0))
            for each in family:
                distance = sum(depth[v] for v in bits(each))
                nearest[each] = min(distance, nearest[each] or distance)
    rows = sorted((distance, *bits(each)) for each, distance in nearest.items())
    for at in range(0, len(rows), BLOCK):
        yield np.array(rows[at : at + BLOCK], np.int32)[:, 1:]


def fci(
    test: IndependenceTest,
    nodes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    *,
    selection_bias: bool = False,
    max_cond_size: int | None = None,
    max_tests: int | None = MAX_TESTS,
    progress: Progress | None = None,
) -> PAG:
    """Fast causal inference (Spirtes et al. 2000; rules of Zhang 2008), for comparison with `icd`.

    The skeleton of PC, R0, then for every remaining edge the subsets of possible-d-sep of each end by growing size, then R0-R10.
    Ours: of possible-d-sep only possible ancestors of the pair are used, for which R0 is held to lemma 3.1 of Colombo et al. 2012 (the
    definition alone asks millions of tests at 60 nodes, and loses edges to chance); neighbours are frozen within a size, the set with
    the largest p-value is kept, and the rules count what any separating set of that size holds as in the set, so that the numbering of
    the nodes does not matter. Arguments as for `icd`.

    >>> from heedful.discovery import DSeparation, fci
    >>> fci(DSeparation([[], [], [0, 1], [2]]))
    PAG(4 nodes, 3 edges, learner='fci': x0 o-> x2, x1 o-> x2, x2 --> x3)
    """
    state = State(Questions(test, nodes, max_cond_size, max_tests, progress), names)
    _skeleton(state)
    stopped, reach = state.stopped, state.reach
    state.take(Oriented(_sure_colliders(state)))
    first, known = state.links.copy(), list(state.links.adjacent)
    around = [first.reached_through(v, -1, -1) for v in range(state.ask.n)]

    pools = {
        (i, j): [around[v] & first.possible_ancestors(1 << i | 1 << j) & ~(1 << i | 1 << j) for v in (i, j)]
        for i, j in state.pairs()
    }
    largest = max((pool.bit_count() for both in pools.values() for pool in both), default=0)

    def one(size: int) -> None:
        _take_out(state, size, lambda i, j: pools[i, j], known)

    # Smaller sets, and those of neighbours alone, were tested with the skeleton.
    state.passes(range(2, (largest if reach is None else min(largest, reach)) + 1), one, gaps=True)
    if reach is not None:
        state.stopped, state.reach = stopped or state.stopped, reach if state.reach is None else min(state.reach, reach)
    state.orient(selection_bias=selection_bias)
    return state.result("fci", selection_bias)


def _sure_colliders(state: State) -> Marks:
    """The arrowheads of R0 that are right even while false edges are left.

    a *-> b <-* c needs, beside b outside the set S that separated a and c, that S separates neither a and b nor b and c
    (Colombo et al. 2012, lemma 3.1). True edges pass, so possible-d-sep misses nothing, and ancestors can be read off these marks.
    """
    near = state.links.adjacent
    triples = [
        (a, b, c, state.sepsets[a, c])
        for (a, c), members in state.members.items()
        for b in bits(near[a] & near[c] & ~mask_of(members))
    ]
    apart = state.ask.separated([((b, v), sepset) for a, b, c, sepset in triples for v in (a, c)])
    at = Oriented(open_marks(state.skeleton))
    at.write(
        end
        for place, (a, b, c, _) in enumerate(triples)
        if not apart[2 * place : 2 * place + 2].any()
        for end in ((a, b), (c, b))
    )
    return at.marks


def pc(
    test: IndependenceTest,
    nodes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    *,
    max_cond_size: int | None = None,
    max_tests: int | None = MAX_TESTS,
    progress: Progress | None = None,
) -> PAG:
    """The PC algorithm (Spirtes & Glymour 1991) in its order-independent form, for comparison: it assumes that nothing is latent.

    The result is a CPDAG in the marks of a PAG: `a --> b` directed, `a --- b` an edge whose direction is open. Arguments as for `icd`.

    >>> from heedful.discovery import DSeparation, pc
    >>> pc(DSeparation([[], [], [0, 1], [2]]))
    PAG(4 nodes, 3 edges, learner='pc': x0 --> x2, x1 --> x2, x2 --> x3)
    """
    state = State(Questions(test, nodes, max_cond_size, max_tests, progress), names)
    _skeleton(state)
    state.take(meek(state.skeleton, state.members))
    return state.result("pc")


def _skeleton(state: State) -> None:
    def one(size: int) -> None:
        near = list(state.links.adjacent)
        _take_out(state, size, lambda i, j: [near[i], near[j]])

    state.passes(range(state.ask.n - 1), one)


def _take_out(state: State, size: int, around: Callable[[int, int], list[int]], known: list[int] | None = None) -> None:
    """Removes every pair that a subset of `around(pair)` separates, end by end; subsets of `known[end]` were tested before."""
    n = state.ask.n

    def sets(i: int, j: int) -> Iterator[Sets]:
        ends, seen = 1 << i | 1 << j, [known[i], known[j]] if known else []
        for each in around(i, j):
            pool = each & ~ends
            if pool.bit_count() < size:
                continue
            # Only a set that shares `size` nodes with what was tested can have been tested.
            tested = [one for one in seen if (one & pool).bit_count() >= size]
            if pool not in [pool & one for one in tested]:
                masks = [_member(one, n) for one in tested]
                for block in subsets(bits(pool), size):
                    for member in masks:
                        block = block[~member[block].all(axis=1)]
                    if len(block):
                        yield block
            # What the first end has given is not asked again.
            seen = [*seen, pool]

    state.remove_best((pair, sets(*pair)) for pair in state.ask.counted(state.pairs()))


def _member(mask: int, n: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    raw = np.frombuffer(mask.to_bytes((n + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=n, bitorder="little").astype(bool)


LEARNERS = {"icd": icd, "fci": fci, "pc": pc}


def discover(
    covariance: ArrayLike | None = None,
    samples: int | None = None,
    alpha: float = 0.01,
    learner: str = "icd",
    *,
    data: ArrayLike | None = None,
    **options: Any,
) -> PAG:
    """Learns a causal graph from a covariance matrix, or from data, with Fisher's z test.

    Args:
        covariance: `[n, n]` covariance or correlation.
        samples: how many draws the covariance was computed from.
        alpha: level of the test, in (0, 1).
        learner: `"icd"`, `"fci"` or `"pc"`.
        data: `[samples, n]` instead of a covariance; a data frame's column names are used.
        options: for the learner: `nodes`, `names`, `max_cond_size`, `max_tests`, `progress`; `selection_bias` of `icd` and `fci`;
            `order` and `stable` of `icd` alone.

    A matrix that no data can have is refused. A variable that does not vary, or a matrix that rounding or pairwise deletion made slightly
    indefinite, gives a warning, and `trust()` says so.

    >>> import numpy as np
    >>> from heedful.discovery import discover
    >>> noise = np.random.default_rng(0).standard_normal((1000, 3))
    >>> noise[:, 2] += noise[:, 0] + noise[:, 1]
    >>> discover(data=noise)
    PAG(3 nodes, 2 edges, learner='icd', alpha=0.01, samples=1000: x0 o-> x2, x1 o-> x2)
    """
    check_choice(LEARNERS, learner=learner)
    if (covariance is None) == (data is None):
        raise InvalidArgument("give either a covariance with samples=..., or data=...")
    _check_options(learner, options)
    if (data is None) == (samples is None):
        raise InvalidArgument(
            "samples are counted from the rows of data; leave samples out"
            if samples is not None
            else "a covariance needs samples=..., the number of samples it was computed from; the samples themselves are for data=..."
        )
    columns = [str(name) for name in getattr(covariance if data is None else data, "columns", ())]
    rows = None if data is None else table(data, "data")
    C = table(covariance, "covariance") if rows is None else _scatter(rows)
    if options.get("names") is None and columns:
        nodes = options.get("nodes")
        options["names"] = columns if nodes is None else [columns[v] for v in check_nodes(len(columns), nodes)]
    test = FisherZ(C, samples if rows is None else len(rows), alpha)  # type: ignore[arg-type]
    graph = LEARNERS[learner](test, **options)
    notes = _oddities(C, check_nodes(test.n, options.get("nodes")), graph.names)
    if rows is not None and len(rows) == rows.shape[1] > 1 and rows.any() and np.allclose(rows, rows.T):
        notes += (
            "The table is square and symmetric, as a covariance is and data hardly ever are: if it is one, give it as a covariance with its "
            "number of samples.",
        )
    for note in notes:
        warn(note, stacklevel=2)
    return replace(graph, notes=notes)


def _check_options(learner: str, options: dict[str, Any]) -> None:
    """Refuses what this learner does not take, by name; a switch that is off asks for nothing."""
    known = {name: [*signature(function).parameters][1:] for name, function in LEARNERS.items()}
    for option in [name for name in options if name not in known[learner]]:
        able = [name for name, names in known.items() if option in names]
        if not able:
            raise InvalidArgument(f"there is no option {option!r}; {learner} takes {', '.join(known[learner])}")
        value = options.pop(option)
        if value is not None and value is not False:
            raise InvalidArgument(
                f"learner={learner!r} does not take {option}; leave it out, or take "
                + " or ".join(f"learner={name!r}" for name in able)
            )


def _oddities(covariance: Floats, nodes: list[int], names: Sequence[str]) -> tuple[str, ...]:
    """What is wrong with a covariance, if not so wrong that it is refused."""
    notes = []
    still = [name for node, name in zip(nodes, names, strict=True) if not covariance[node, node] > 0]
    if still:
        one = len(still) == 1
        notes.append(
            f"{', '.join(map(repr, still))} {'does' if one else 'do'} not vary: a constant is independent of everything, so "
            f"{'it has' if one else 'they have'} no edges, and nothing is learned about {'it' if one else 'them'}."
        )
    least = indefiniteness(correlation(covariance))
    if least:
        notes.append(
            f"The covariance is not positive semidefinite (smallest eigenvalue of the correlation {least:.2g}): no data has exactly this "
            "matrix, so partial correlations are only approximate. Rounded numbers or pairwise deletion of missing values cause this."
        )
    return tuple(notes)


def discover_data(data: ArrayLike, alpha: float = 0.01, learner: str = "icd", **options: Any) -> PAG:
    """`discover(data=data, ...)`."""
    return discover(data=data, alpha=alpha, learner=learner, **options)


def _scatter(rows: Floats) -> Floats:
    """A multiple of the covariance of data `[samples, n]`, each column scaled by its largest value."""
    if len(rows) < 4:
        raise InvalidArgument(
            f"data must have at least 4 rows, one for each sample (Fisher's z divides by N - 3); got {len(rows)}"
        )
    centred = rows - rows.mean(axis=0)
    # Scaled first: squares of very large or small values leave the range.
    largest = np.abs(centred).max(axis=0, initial=0.0)
    # What rounding leaves of a constant is no variance.
    centred[:, largest <= 1e-13 * np.abs(rows).max(axis=0, initial=0.0)] = 0.0
    centred /= np.where(largest > 0, largest, 1.0)
    return np.asarray(centred.T @ centred)
