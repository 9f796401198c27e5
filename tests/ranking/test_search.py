"""Exact search: who is nearest, in which order equal ones come, and what is refused."""

import sys
import types
import warnings

import numpy as np
import pytest
import torch

from heedful import InvalidArgument, MissingExtra
from heedful.ranking import search
from heedful.ranking.result import Ranking
from heedful.ranking.search import nearest, stable_top


def rows(n, d=7, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def unit(X):
    return X / np.linalg.norm(X, axis=1, keepdims=True)


def brute(queries, database, k, exclude=None):
    """Python's own sort, by falling cosine and rising place."""
    cosines = unit(queries) @ unit(database).T
    lists = []
    for number, row in enumerate(cosines):
        places = [place for place in range(len(database)) if exclude is None or place != exclude[number]]
        lists.append(sorted(places, key=lambda place: (-row[place], place))[:k])
    return np.array(lists)


@pytest.mark.parametrize("cells", [2**23, 101])
@pytest.mark.parametrize("k", [1, 5, 97])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_nearest_are_found(k, dtype, cells, monkeypatch):
    """In one product, and in blocks of queries and of the database."""
    monkeypatch.setattr(search, "CELLS", cells)
    monkeypatch.setattr(search, "WIDTH", 2**14 if cells > 101 else 23)
    Q, X = rows(13).astype(dtype), rows(97, seed=1).astype(dtype)
    exclude = np.arange(13) * 7
    scores, places = nearest(Q, X, k)
    assert places.tolist() == brute(Q, X, k).tolist()
    assert scores.dtype == torch.from_numpy(Q).dtype
    expected = np.take_along_axis(unit(Q) @ unit(X).T, places.numpy(), 1)
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-6 if dtype == np.float32 else 1e-14)
    assert nearest(Q, X, k, exclude=exclude)[1].tolist() == brute(Q, X, k, exclude).tolist()


@pytest.mark.parametrize("cells", [2**23, 211])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [7, 67])
def test_equal_rows_come_by_their_places(n, dtype, cells, monkeypatch):
    monkeypatch.setattr(search, "CELLS", cells)
    monkeypatch.setattr(search, "WIDTH", 2**14 if cells > 211 else 29)
    X = rows(n, 5).astype(dtype)
    source = np.random.default_rng(3).permutation(np.repeat(np.arange(n), 3))
    for k in (1, 2, 4, 3 * n):
        scores, places = (part.numpy() for part in nearest(rows(11, 5, seed=2), X[source], k))
        first = brute(rows(11, 5, seed=2), X, n)
        for found, values, order in zip(places, scores, first, strict=True):
            expected = np.concatenate([np.flatnonzero(source == one) for one in order])
            assert found.tolist() == expected[:k].tolist()
            assert (np.diff(values) <= 0).all()


def test_a_tie_across_the_border_goes_to_the_larger_second_score():
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    second = torch.tensor([[0.0, 1.0, 5.0, 2.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0]])
    assert stable_top(scores, 3)[1].tolist() == [[0, 1, 2]]
    assert stable_top(scores, 3, second)[1].tolist() == [[0, 2, 4]]
    assert stable_top(scores, 6, second)[1].tolist() == [[0, 2, 4, 3, 1, 12]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seconds", [False, True])
def test_the_largest_by_pythons_sort(dtype, seconds):
    """Ties, signed zeros, infinities and the smallest numbers there are, in rows as they lie and in columns."""
    rng = np.random.default_rng(5)
    numbers = [-np.inf, -3e38, -2, -1e-45, -0.0, 0.0, 1e-45, 0.25, 3e38, np.inf]
    for length in (1, 2, 7, 23, 41):
        scores = torch.from_numpy(rng.choice(numbers, size=(length, 5))).to(dtype).T
        second = torch.from_numpy(rng.choice([-1.0, 0.0, 0.5], size=(5, length))).to(dtype) if seconds else None
        for k in {0, 1, length // 5, length}:
            values, places = stable_top(scores, k, second)
            for number, row in enumerate(scores.tolist()):
                by = second[number].tolist() if seconds else [0.0] * length
                best = sorted(range(length), key=lambda at, row=row, by=by: (-row[at], -by[at], at))
                assert places[number].tolist() == best[:k]
            assert torch.equal(values, scores.gather(1, places))


def test_numbers_that_are_none_come_first_whatever_their_sign():
    scores = torch.tensor([[1.0, torch.nan, 2.0, -torch.nan]])
    assert stable_top(scores, 4)[1].tolist() == scores.sort(dim=1, descending=True, stable=True)[1].tolist()


def test_more_than_there_are():
    scores, places = nearest(rows(3), rows(5, seed=1), 100)
    assert places.shape == (3, 5)
    assert nearest(rows(5), rows(5), 100, exclude=np.arange(5))[1].shape == (5, 4)
    one = rows(1)
    assert nearest(one, one, 3)[1].tolist() == [[0]]
    assert nearest(one, one, 3, exclude=[0])[1].shape == (1, 0)
    # Where some queries exclude nothing, the others' lists have an end.
    scores, places = nearest(rows(2), rows(2, seed=1), 2, exclude=[-1, 1])
    assert places[1].tolist() == [0, -1]
    assert scores[1, 1] == -torch.inf


def test_kinds_of_input():
    Q, X = rows(3), rows(11, seed=1)
    expected = nearest(Q, X, 4)[1].tolist()
    assert nearest(Q.tolist(), torch.from_numpy(X), 4)[1].tolist() == expected
    assert nearest(torch.from_numpy(Q).float(), X, 4)[0].dtype == torch.float64
    assert nearest(torch.from_numpy(Q).requires_grad_(), X, 4)[0].requires_grad is False
    assert nearest(np.eye(3, dtype=int), np.eye(3, dtype=int), 1)[0].dtype == torch.float32
    assert nearest(np.eye(3, dtype=np.float16), np.eye(3), 1)[1].tolist() == [[0], [1], [2]]
    X.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nearest(Q, X, 4)[1].tolist() == expected
    assert nearest(unit(Q), unit(X), 4, normalize=False)[1].tolist() == expected
    assert nearest([[1.0, 0.0]], [[1.0, 0.0], [5.0, 5.0]], 1, normalize=False)[1].tolist() == [[1]]
    # A row of zeros resembles nothing.
    assert nearest([[0.0, 0.0]], [[1.0, 0.0], [5.0, 5.0]], 2)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be a whole number from 1 on; got 0"),
        ({"queries": [[1.0, np.nan]]}, "queries holds NaN or infinite numbers"),
        ({"database": [[np.inf, 1.0]]}, "database holds NaN or infinite numbers"),
        ({"queries": [[1.0, 2.0, 3.0]]}, "queries have 3 dimensions and the database 2"),
        ({"queries": [1.0, 2.0]}, r"queries must be rows of numbers, .* got shape \(2,\)"),
        ({"database": np.empty((0, 2))}, r"got shape \(0, 2\)"),
        ({"database": [["a", "b"]]}, "database cannot be read as numbers"),
        ({"database": [[1.0, 2.0], [1.0]]}, "database cannot be read as numbers"),
        ({"exclude": [0, 1]}, r"one whole number per query, shape \(1,\); got torch.int64 of shape \(2,\)"),
        ({"exclude": [0.5]}, "got torch.float32"),
        ({"exclude": [3]}, r"exclude must lie between -1 and 2; got \[3\]"),
        ({"index": 7}, "index must be None, 'faiss' or a function"),
        ({"index": lambda Q, k: (np.zeros((1, k)), np.zeros((2, k), int))}, "must return scores and whole places"),
        ({"index": lambda Q, k: (np.zeros((1, k)), np.full((1, k), 9))}, "it was built for another database"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        nearest(**{"queries": [[1.0, 2.0]], "database": [[1.0, 2.0], [2.0, 1.0], [0.0, 1.0]], "k": 2} | arguments)


def flat(X):
    """An index of somebody else's, in any order among equals, which misses what lies at negative cosines."""

    def find(Q, k):
        cosines = np.asarray(Q) @ unit(X).T
        places = np.argsort(-cosines, axis=1)[:, :k]
        scores = np.take_along_axis(cosines, places, 1)
        return np.where(scores > 0, scores, -1e30), np.where(scores > 0, places, -1)

    return find


def test_an_index_of_the_users_own():
    Q, X = rows(5), rows(31, seed=1)
    exclude = brute(Q, X, 1)[:, 0]
    scores, places = nearest(Q, X, 23, index=flat(X), exclude=exclude)
    own_scores, own = nearest(Q, X, 23, exclude=exclude)
    assert places.shape == (5, 23)
    assert (places == -1).any()
    there = places >= 0
    assert torch.equal(there, own_scores > 0)
    assert torch.equal(places[there], own[there])
    torch.testing.assert_close(scores[there], own_scores[there])
    assert (scores[~there] == -torch.inf).all()
    few = nearest(Q, X, 23, index=lambda queries, k: tuple(part[:, :2] for part in flat(X)(queries, k)))[1]
    assert few.shape == (5, 23)
    assert (few[:, 2:] == -1).all()


def test_faiss_is_asked_where_it_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtra, match=r"heedful\[ranking\]"):
        nearest(rows(2), rows(3), 1, index="faiss")

    class IndexFlatIP:
        def __init__(self, d):
            assert d == 7

        def add(self, X):
            assert X.dtype == np.float32
            self.search = flat(X)

    monkeypatch.setitem(sys.modules, "faiss", types.SimpleNamespace(IndexFlatIP=IndexFlatIP))
    Q, X = rows(5), rows(31, seed=1)
    assert nearest(Q, X, 3, index="faiss")[1].tolist() == nearest(Q, X, 3)[1].tolist()


def test_a_ranking_says_itself():
    ranking = Ranking(np.tile(np.arange(7), (12, 1)), np.tile(np.linspace(1, 0.4, 7), (12, 1)))
    lines = str(ranking).splitlines()
    assert len(ranking) == 12
    assert lines[0] == "12 queries, up to 7 items each"
    assert lines[1] == "query 0: 0 (1.000), 1 (0.900), 2 (0.800), 3 (0.700), 4 (0.600), and 2 more"
    assert lines[-1] == "and 2 more queries"
    assert str(Ranking(np.empty((1, 0), int), np.empty((1, 0)))).endswith("query 0: nothing")
    assert ranking.to_dict()["order"][0] == list(range(7))
