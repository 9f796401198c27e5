"""Measures of rankings, beside scikit-learn's and beside plain loops."""

import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, ndcg_score

from heedful import InvalidArgument
from heedful.ranking import Ranking
from heedful.ranking.metrics import (
    average_precision,
    mean_average_precision,
    ndcg,
    precision_at,
    recall_at,
    relevance_by_label,
    revisited,
)


def orders(queries=11, n=37, seed=0):
    rng = np.random.default_rng(seed)
    return rng, np.stack([rng.permutation(n) for _ in range(queries)])


def test_by_hand():
    hits = [True, False, True, False, False, True]
    assert average_precision(hits) == pytest.approx((1 + 2 / 3 + 3 / 6) / 3, abs=1e-15)
    expected = ((1 + 1) / 2 + (1 / 2 + 2 / 3) / 2 + (2 / 5 + 3 / 6) / 2) / 3
    assert average_precision(hits, rule="trapezoid") == pytest.approx(expected, abs=1e-15)
    assert average_precision(hits, total=6) == pytest.approx(average_precision(hits) / 2, abs=1e-15)
    assert average_precision([False, False], total=3) == 0
    assert math.isnan(average_precision([False, False]))


def test_average_precision_is_scikit_learns():
    rng, order = orders()
    relevant = rng.random((11, 37)) < 0.2
    relevant[4] = False
    scores = np.empty((11, 37))
    np.put_along_axis(scores, order, -np.arange(37.0)[None], 1)
    expected = [average_precision_score(good, row) for good, row in zip(relevant, scores, strict=True) if good.any()]
    assert mean_average_precision(order, relevant) == pytest.approx(np.mean(expected), abs=1e-12)
    assert mean_average_precision(Ranking(order, scores), relevant) == mean_average_precision(order, relevant)
    assert mean_average_precision(order, [np.flatnonzero(row) for row in relevant]) == mean_average_precision(
        order, relevant
    )


def test_trapezoid_is_never_more_than_plain():
    rng, order = orders()
    for relevant in (rng.random((11, 37)) < share for share in (0.05, 0.3, 0.9)):
        for row, good in zip(order, relevant, strict=True):
            if good.any():
                assert average_precision(good[row], rule="trapezoid") <= average_precision(good[row])


@pytest.mark.parametrize("k", [1, 5, None])
def test_ndcg_is_scikit_learns(k):
    rng, order = orders()
    gains = rng.integers(0, 4, (11, 37)).astype(float)
    scores = np.empty((11, 37))
    np.put_along_axis(scores, order, -np.arange(37.0)[None], 1)
    assert ndcg(order, gains, k) == pytest.approx(ndcg_score(gains, scores, k=k), abs=1e-12)
    gains[3] = 0
    rest = np.arange(11) != 3
    assert ndcg(order, gains, k) == pytest.approx(ndcg_score(gains[rest], scores[rest], k=k), abs=1e-12)
    listed = [np.flatnonzero(row) for row in gains]
    assert ndcg(order, listed, k) == pytest.approx(ndcg(order, (gains > 0).astype(float), k), abs=1e-12)


def test_missing_items_and_junk():
    order = np.array([[3, 0, 4, -1, -1], [1, 2, -1, -1, -1]])
    relevant = [[0, 4, 2], [2]]
    assert mean_average_precision(order, relevant) == pytest.approx(((1 / 2 + 2 / 3) / 3 + 1 / 2) / 2, abs=1e-15)
    assert mean_average_precision(order, relevant, junk=[[3], []]) == pytest.approx((2 / 3 + 1 / 2) / 2, abs=1e-15)
    assert precision_at(order, relevant, 2) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert precision_at(order, relevant, 4) == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert precision_at(order, relevant, 1, junk=[[3], [1]]) == 1
    assert recall_at(order, relevant, 3) == pytest.approx((2 / 3 + 1) / 2)
    assert recall_at(order, [[0], []], 2) == 1
    assert ndcg(order, relevant, 1) == 0
    assert math.isnan(mean_average_precision(order, [[], []]))
    assert math.isnan(ndcg(order, [[], []]))
    assert math.isnan(precision_at(order, [[], []], 1))


def test_labels():
    assert relevance_by_label([1, 2], [2, 2, 1]).tolist() == [[False, False, True], [True, True, False]]
    same = relevance_by_label(np.array(["a", "a", "b"]))
    assert same.tolist() == [[False, True, False], [True, False, False], [False, False, False]]


def protocol(order, ground, good, bad, at):
    """The published protocol as a loop over the places of one list at a time."""
    precisions, values = [], []
    for row, truth in zip(order, ground, strict=True):
        wanted = {place for key in good for place in truth[key]}
        unwanted = {place for key in bad for place in truth[key]}
        if not wanted:
            continue
        rank, seen, area, ranks = 0, 0, 0.0, []
        for place in row.tolist():
            if place in unwanted:
                continue
            if place in wanted:
                before = seen / rank if rank else 1.0
                area += (before + (seen + 1) / (rank + 1)) / 2 / len(wanted)
                seen += 1
                ranks.append(rank + 1)
            rank += 1
        values.append(area)
        cuts = [min(max(ranks), k) for k in at]
        precisions.append([sum(one <= cut for one in ranks) / cut for cut in cuts])
    if not values:
        return math.nan, [math.nan] * len(at)
    return np.mean(values), np.mean(precisions, axis=0).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_the_revisited_protocol(seed):
    """With queries that have no easy, no hard, or no junk items."""
    rng, order = orders(23, 53, seed)
    ground = []
    for number in range(23):
        kinds = rng.choice(4, 53, p=[0.1, 0.1, 0.1, 0.7])
        kinds[(kinds == number % 3) & (number % 4 == 0)] = 3
        ground.append({key: np.flatnonzero(kinds == kind) for kind, key in enumerate(("easy", "hard", "junk"))})
    assert any(len(one["easy"]) == 0 for one in ground)
    assert any(len(one["hard"]) == 0 for one in ground)
    found = revisited(order, ground, at=(1, 5, 10))
    for name, good, bad in (
        ("easy", ("easy",), ("junk", "hard")),
        ("medium", ("easy", "hard"), ("junk",)),
        ("hard", ("hard",), ("junk", "easy")),
    ):
        value, precisions = protocol(order, ground, good, bad, (1, 5, 10))
        assert getattr(found, name) == pytest.approx(value, abs=1e-12)
        assert list(getattr(found, f"precision_{name}").values()) == pytest.approx(precisions, abs=1e-12)
    assert str(found).startswith("easy: mAP ")
    assert set(found.to_dict()["precision_hard"]) == {"1", "5", "10"}


def test_what_is_junk_is_not_wanted():
    assert mean_average_precision([[0, 1, 2]], [[0, 1]], junk=[[0]]) == 1
    assert recall_at([[0, 1, 2]], [[0, 1]], 1, junk=[[0]]) == 1
    # Missing places may stand in an order more than once.
    assert mean_average_precision([[1, -1, -1]], [[1]]) == 1
    assert math.isnan(mean_average_precision([[0, 1]], [[0]], junk=[[0]]))


def test_a_protocol_without_any_query():
    found = revisited([[0, 1, 2]], [{"easy": [1], "hard": [], "junk": []}])
    assert (found.easy, found.medium) == (0.25, 0.25)
    assert math.isnan(found.hard)
    assert math.isnan(found.precision_hard[5])
    assert found.to_dict()["hard"] is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: average_precision([[True]]), r"one axis; got shape \(1, 1\)"),
        (lambda: average_precision([True, True], total=1), "total=1, but 2 relevant items are in the list"),
        (lambda: average_precision([True], rule="area"), "rule must be one of plain, trapezoid; got 'area'"),
        (lambda: mean_average_precision([0, 1], [[0]]), r"shape \(queries, m\), as Ranking.order; got int64 of shape \(2,\)"),
        (lambda: mean_average_precision([[0.5]], [[0]]), "got float64"),
        (lambda: mean_average_precision([[0, 1]], [[0], [1]]), "relevant must be given for each of the 1 queries; got 2"),
        (lambda: mean_average_precision([[0, 1]], [[-1]]), r"relevant must be lists of places from 0 on, .* got \[-1\]"),
        (lambda: mean_average_precision([[0, 1]], [[0.5]]), r"got \[0.5\]"),
        (lambda: mean_average_precision([[1, 2], [0, 0]], [[0], [0]]), "query 1 has place 0 twice"),
        (lambda: ndcg([[0, 0, 1]], np.array([[1.0, 0.0]])), "query 0 has place 0 twice"),
        (lambda: mean_average_precision([[0, 1]], np.array([[np.nan, 1]])), "relevant must have no NaN"),
        (lambda: recall_at([[0, 1]], [[0]], 1, junk=np.array([[np.nan, 1]])), "junk must have no NaN"),
        (lambda: precision_at([[0]], [[0]], 0), "k must be a whole number from 1 on; got 0"),
        (lambda: ndcg([[0]], np.array([[-1.0]])), "finite numbers from 0 on"),
        (lambda: ndcg([[3]], np.array([[1.0]])), "order names place 3, but relevance has 1 columns"),
        (lambda: ndcg([[0]], np.ones((2, 3))), "for each of the 1 queries; got 2"),
        (lambda: relevance_by_label([[1]]), "labels must have one axis"),
        (lambda: revisited([[0]], [{"easy": [0], "hard": []}]), "query 0 does not"),
    ],
)  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
