"""How good an order is: average precision, precision and recall at a place, nDCG, and the revisited protocol of landmark retrieval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from heedful._checks import check_choice, check_whole, shown
from heedful._errors import InvalidArgument
from heedful._result import Result

Rule = Literal["plain", "trapezoid"]
Sets = Sequence[NDArray[np.intp]]


def average_precision(relevant_in_order: Any, total: int | None = None, rule: Rule = "plain") -> float:
    r"""Average precision of one list.

    With relevant items j = 1, 2, ... at the places $r_j$ of the list, from 1 on, and T relevant items in all,

    $$\mathrm{AP} = \frac{1}{T} \sum_j \frac{j}{r_j} \quad\text{(plain)}, \qquad
    \mathrm{AP} = \frac{1}{T} \sum_j \frac12 \Big(\frac{j - 1}{r_j - 1} + \frac{j}{r_j}\Big) \quad\text{(trapezoid)},$$

    where the first fraction of the trapezoid is 1 for $r_j = 1$ (Philbin et al. 2007; Radenovic et al. 2018). NaN without any relevant item.

    Args:
        relevant_in_order: `(m,)`, whether the item at each place is relevant.
        total: T, where relevant items may be missing from the list; those in it by default.

    >>> average_precision([True, False, True])
    0.8333333333333333
    >>> average_precision([True, False, True], rule="trapezoid")
    0.7916666666666666
    """
    check_choice(Rule, rule=rule)
    check_whole(0, optional=True, total=total)
    hits = np.asarray(relevant_in_order)
    if hits.ndim != 1:
        raise InvalidArgument(f"relevant_in_order must have one axis; got shape {hits.shape}")
    ranks = np.flatnonzero(hits)
    count = len(ranks) if total is None else total
    if count < len(ranks):
        raise InvalidArgument(f"total={total}, but {len(ranks)} relevant items are in the list")
    if count == 0:
        return float("nan")
    found = np.arange(len(ranks))
    after = (found + 1) / (ranks + 1)
    if rule == "plain":
        return float(after.sum() / count)
    before = np.divide(found, ranks, out=np.ones(len(ranks)), where=ranks > 0)
    return float((before + after).sum() / 2 / count)


def mean_average_precision(order: Any, relevant: Any, junk: Any = None, rule: Rule = "plain") -> float:
    """The mean of `average_precision` over queries that have relevant items.

    Args:
        order: `(nq, m)`, places in the database, the best first, -1 for none: `Ranking.order`, or a `Ranking`.
        relevant: for each query a list of the places of its relevant items, or an array `(nq, n)` that is not 0 there, as
            `relevance_by_label` gives. Relevant items that are missing from the order count as never found.
        junk: items that are taken out of the order, and of the relevant ones, before it is judged, in the same form.
        rule: `"plain"` or `"trapezoid"`.

    >>> mean_average_precision([[2, 0, 1], [1, 0, 2]], [[2], [0]])
    0.75
    """
    values = [
        average_precision(hits, len(wanted), rule) for hits, wanted in _judged(order, relevant, junk) if len(wanted)
    ]
    return float(np.mean(values)) if values else float("nan")


def precision_at(order: Any, relevant: Any, k: int, junk: Any = None) -> float:
    """The mean share of relevant items among the first k, over queries that have any; a shorter list counts as if filled with others.

    >>> precision_at([[2, 0, 1], [1, 0, 2]], [[2], [0]], 1)
    0.5
    """
    check_whole(k=k)
    values = [hits[:k].sum() / k for hits, wanted in _judged(order, relevant, junk) if len(wanted)]
    return float(np.mean(values)) if values else float("nan")


def recall_at(order: Any, relevant: Any, k: int, junk: Any = None) -> float:
    """The mean share of a query's relevant items that are among its first k, over queries that have any.

    >>> recall_at([[2, 0, 1], [1, 0, 2]], [[2, 1], [0]], 2)
    0.75
    """
    check_whole(k=k)
    values = [hits[:k].sum() / len(wanted) for hits, wanted in _judged(order, relevant, junk) if len(wanted)]
    return float(np.mean(values)) if values else float("nan")


def ndcg(order: Any, relevance: Any, k: int | None = None) -> float:
    r"""Normalised discounted cumulative gain (Jarvelin & Kekalainen 2002), the mean over queries with any gain.

    $$\mathrm{DCG} = \sum_{r=1}^{k} \frac{g_r}{\log_2(r + 1)}, \qquad \mathrm{nDCG} = \mathrm{DCG} / \mathrm{DCG}_\text{best order},$$

    with the gain $g_r$ of the item at place r. That of `sklearn.metrics.ndcg_score`, without ties.

    Args:
        relevance: gains from 0 on, an array `(nq, n)`, or for each query a list of relevant places, which gain 1 each.

    >>> round(ndcg([[1, 0, 2]], np.array([[3.0, 1.0, 0.0]])), 6)
    0.796708
    """
    check_whole(optional=True, k=k)
    places = _order(order)
    values = []
    for row, gains in zip(places, _gains(relevance, places), strict=True):
        best = np.sort(gains)[::-1][:k]
        if best.size and best[0] > 0:
            there = row[row >= 0][:k]
            values.append(_dcg(gains[there]) / _dcg(best))
    return float(np.mean(values)) if values else float("nan")


def relevance_by_label(query_labels: Any, database_labels: Any = None) -> NDArray[np.bool_]:
    """Whether query and item have one label, `(nq, n)`; without `database_labels` the queries are the database, and none is relevant to itself.

    >>> relevance_by_label(["a", "b", "a"]).astype(int).tolist()
    [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    """
    asked = np.asarray(query_labels)
    stored = asked if database_labels is None else np.asarray(database_labels)
    if asked.ndim != 1 or stored.ndim != 1:
        raise InvalidArgument(f"labels must have one axis; got shapes {asked.shape} and {stored.shape}")
    same = asked[:, None] == stored
    if database_labels is None:
        np.fill_diagonal(same, False)
    return same


@dataclass(frozen=True)
class Revisited(Result):
    """mAP and mean precision at some places, of the easy, medium and hard protocol: `revisited` returns it."""

    easy: float
    medium: float
    hard: float
    precision_easy: Mapping[int, float]
    precision_medium: Mapping[int, float]
    precision_hard: Mapping[int, float]

    def __str__(self) -> str:
        lines = []
        for name in ("easy", "medium", "hard"):
            precisions = ", ".join(
                f"mP@{k} {100 * value:.2f}" for k, value in getattr(self, f"precision_{name}").items()
            )
            lines.append(f"{name}: mAP {100 * getattr(self, name):.2f}, {precisions}")
        return "\n".join(lines)


def revisited(order: Any, ground: Sequence[Mapping[str, Any]], at: Sequence[int] = (1, 5, 10)) -> Revisited:
    r"""The protocol of Revisited Oxford and Paris (Radenovic et al. 2018, section 3.3).

    Easy: relevant are the easy items, junk the others that are named. Medium: relevant easy and hard ones. Hard: relevant the hard ones. Junk is
    taken out before the order is judged, by the trapezoid rule. Precision at k counts up to the place of the last relevant item where
    that is lower: $k_q = \min(k, r_\text{last})$. Queries without relevant items are left out of the means; NaN where none is left.

    Args:
        order: `(nq, m)` or a `Ranking`; relevant items that are missing from it count as never found.
        ground: for each query the places of its `"easy"`, `"hard"` and `"junk"` items.

    >>> print(revisited([[0, 1, 2, 3]], [{"easy": [1], "hard": [3], "junk": [0]}], at=(1,)))
    easy: mAP 100.00, mP@1 100.00
    medium: mAP 79.17, mP@1 100.00
    hard: mAP 25.00, mP@1 0.00
    """
    for k in at:
        check_whole(at=k)
    places = _order(order)
    lacking = [number for number, one in enumerate(ground) if not {"easy", "hard", "junk"} <= set(one)]
    if lacking:
        raise InvalidArgument(f"ground must hold 'easy', 'hard' and 'junk' for each query; query {lacking[0]} does not")
    protocols = {
        "easy": (("easy",), ("junk", "hard")),
        "medium": (("easy", "hard"), ("junk",)),
        "hard": (("hard",), ("junk", "easy")),
    }
    found: dict[str, Any] = {}
    for name, (good, bad) in protocols.items():
        relevant, junk = (
            [np.concatenate([np.asarray(one[key], np.intp).ravel() for key in keys]) for one in ground]
            for keys in (good, bad)
        )
        found[name] = mean_average_precision(places, relevant, junk, "trapezoid")
        judged = [(hits, wanted) for hits, wanted in _judged(places, relevant, junk) if len(wanted)]
        found[f"precision_{name}"] = {int(k): _mean([_early(hits, k) for hits, _ in judged]) for k in at}
    return Revisited(**found)


def _early(hits: NDArray[np.bool_], k: int) -> float:
    """Precision at k, or at the last relevant item where that is earlier."""
    ranks = np.flatnonzero(hits)
    if not len(ranks):
        return 0.0
    until = min(k, int(ranks[-1]) + 1)
    return float(hits[:until].sum() / until)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _dcg(gains: NDArray[np.floating]) -> float:
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())


def _order(order: Any) -> NDArray[np.int64]:
    places = np.asarray(getattr(order, "order", order))
    if places.ndim != 2 or not (np.issubdtype(places.dtype, np.integer) or places.size == 0):
        raise InvalidArgument(
            f"order must be whole places of shape (queries, m), as Ranking.order; got {places.dtype} of shape {places.shape}"
        )
    places = places.astype(np.int64)
    rising = np.sort(places, axis=1)
    again = (rising[:, 1:] == rising[:, :-1]) & (rising[:, 1:] >= 0)
    if again.any():
        row, at = np.argwhere(again)[0]
        raise InvalidArgument(
            f"order must name a place once for each query; query {row} has place {rising[row, at]} twice: leave the later one out"
        )
    return places


def _sets(given: Any, count: int, name: str) -> Sets:
    """The places that are meant, for each query: distinct and rising, from a matrix or from lists."""
    matrix = getattr(given, "ndim", 1) == 2
    sets = [_places(row, matrix, name) for row in given]
    if len(sets) != count:
        raise InvalidArgument(f"{name} must be given for each of the {count} queries; got {len(sets)}")
    return sets


def _places(row: Any, is_mask: bool, name: str) -> NDArray[np.intp]:
    values = np.asarray(row).ravel()
    if np.issubdtype(values.dtype, np.inexact) and np.isnan(values).any():
        raise InvalidArgument(f"{name} must have no NaN; got {shown(row)}: give 0 for what is not {name}")
    if is_mask or values.dtype == bool:
        return np.flatnonzero(values)
    if values.size and (not np.issubdtype(values.dtype, np.integer) or values.min() < 0):
        raise InvalidArgument(
            f"{name} must be lists of places from 0 on, or an array (queries, items) that is not 0 where it holds; got {shown(row)}"
        )
    return np.unique(values.astype(np.intp))


def _judged(order: Any, relevant: Any, junk: Any) -> list[tuple[NDArray[np.bool_], NDArray[np.intp]]]:
    """For each query whether each item of its list is relevant, junk and missing ones taken out, and the relevant places."""
    places = _order(order)
    wanted = _sets(relevant, len(places), "relevant")
    unwanted = _sets(junk, len(places), "junk") if junk is not None else [np.empty(0, np.intp)] * len(places)
    judged = []
    for row, good, bad in zip(places, wanted, unwanted, strict=True):
        kept = row[row >= 0]
        # 1 for relevant items, 2 for junk; what is junk is not relevant in any list.
        kinds = np.zeros(1 + max(kept.max(initial=0), good.max(initial=0), bad.max(initial=0)), np.int8)
        kinds[good], kinds[bad] = 1, 2
        found = kinds[kept]
        judged.append((found[found < 2] == 1, good[kinds[good] == 1]))
    return judged


def _gains(relevance: Any, places: NDArray[np.int64]) -> list[NDArray[np.floating]]:
    if getattr(relevance, "ndim", 1) == 2:
        table = np.asarray(relevance, float)
        if (table < 0).any() or not np.isfinite(table).all():
            raise InvalidArgument("relevance must be finite numbers from 0 on")
        gains = list(table)
    else:
        sets = _sets(relevance, len(places), "relevance")
        size = max([int(places.max(initial=-1)), *(int(one.max(initial=-1)) for one in sets)]) + 1
        gains = [np.isin(np.arange(size), one).astype(float) for one in sets]
    if len(gains) != len(places):
        raise InvalidArgument(f"relevance must be given for each of the {len(places)} queries; got {len(gains)}")
    if places.size and len(gains[0]) <= places.max():
        raise InvalidArgument(f"order names place {places.max()}, but relevance has {len(gains[0])} columns")
    return gains
