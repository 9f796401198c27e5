"""Methods of re-ranking: their values beside plain loops in float64, and what all of them have in common."""

import numpy as np
import pytest
import torch

from heedful import InvalidArgument
from heedful.ranking import (
    METHODS,
    affinity,
    alpha_query_expansion,
    average_query_expansion,
    cosine,
    database_augmentation,
    diffusing,
    diffusion,
    listwise,
    rerank,
    super_global,
)
from heedful.ranking.methods import AUTO, AUTO_OPTIONS
from reranked import by_place, nearest, spread, starts, unit

every = pytest.mark.parametrize("method", list(METHODS))
# Those that look at a list alone, not at the whole database.
LISTS = ("super-global", "affinity")


def groups(n=53, d=11, seed=0):
    """Unit rows in seven loose groups."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(7, d))
    return unit(centres[rng.integers(0, 7, n)] + 0.7 * rng.normal(size=(n, d)))


def expanded(q, X, n, weigh, own=None):
    near = nearest(X @ q, n, own)
    return unit(q + sum(weigh(rank, X[j] @ q) * X[j] for rank, j in enumerate(near)))


def power(alpha):
    return lambda rank, cosine: max(cosine, 0) ** alpha


def check_scores(ranking, expected, own=False, atol=1e-10):
    """The scores are these, and the order follows them."""
    if own:
        expected = expected.copy()
        np.fill_diagonal(expected, np.nan)
    found = by_place(ranking, expected.shape[1])
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)
    assert (np.diff(ranking.scores, axis=1) <= 0).all()


Q, X = groups(13, seed=1), groups()
N = len(X)


@pytest.mark.parametrize("among", [False, True])
def test_expansions(among):
    queries = X if among else Q
    own = [number if among else None for number in range(len(queries))]

    def all_by(n, weigh, queries=queries, rows=X):
        return np.stack([expanded(q, rows, n, weigh, me) for q, me in zip(queries, own, strict=True)]) @ rows.T

    given = None if among else Q
    check_scores(cosine(given, X), queries @ X.T, among)
    check_scores(average_query_expansion(given, X, n=5), all_by(5, lambda rank, cosine: 1), among)
    falling = all_by(5, lambda rank, cosine: (5 - rank) / 5)
    check_scores(average_query_expansion(given, X, n=5, decay=True), falling, among)
    check_scores(METHODS["aqe-decay"](given, X, n=5), falling, among)
    check_scores(alpha_query_expansion(given, X, n=7, alpha=2.5), all_by(7, power(2.5)), among)
    rows = np.stack([expanded(x, X, 3, power(1), place) for place, x in enumerate(X)])
    sought = rows if among else Q
    check_scores(database_augmentation(given, X, n=3, alpha=1, expand=False), sought @ rows.T, among)
    check_scores(database_augmentation(given, X, n=3, alpha=1), all_by(3, power(1), sought, rows), among)


def test_neighbours_behind_have_no_weight():
    """Where the n nearest reach to negative cosines, a power of 0 does not bring them back."""
    rows = unit(np.array([[1.0, 0.1], [-1.0, 0.2], [-0.9, -0.5]]))
    q = np.array([[1.0, 0.0]])
    expected = unit(q + rows[:1]) @ rows.T
    check_scores(alpha_query_expansion(q, rows, n=3, alpha=0), expected)


@pytest.mark.parametrize("dense", [5000, 0])
@pytest.mark.parametrize(("k", "alpha"), [(5, 0.99), (3, 0.5), (100, 0.9)])
def test_diffusion(k, alpha, dense, monkeypatch):
    """By the inverse and by conjugate gradients."""
    monkeypatch.setattr(diffusing, "DENSE", dense)
    inverse = spread(X, k, 3.0, alpha)
    atol = 1e-12 if dense else 1e-6
    check_scores(diffusion(None, X, k=k, alpha=alpha), inverse, True, atol * inverse.max())
    expected = starts(Q, X, 4, 3.0) @ inverse
    check_scores(diffusion(Q, X, k=k, alpha=alpha, k_query=4), expected, atol=atol * expected.max())
    expected = starts(Q, X, 4, 1.5) @ spread(X, k, 1.5, alpha)
    check_scores(diffusion(Q, X, k=k, alpha=alpha, k_query=4, gamma=1.5), expected, atol=atol * expected.max())


def test_diffusion_to_a_few_queries_takes_no_inverse(monkeypatch):
    monkeypatch.setattr(torch, "cholesky_inverse", None)
    expected = starts(Q[:1], X, 10, 3.0) @ spread(X, 5, 3.0, 0.9)
    check_scores(diffusion(Q[:1], X, k=5, alpha=0.9), expected, atol=1e-6 * expected.max())


def test_what_diffusion_does_not_reach_is_ordered_by_cosine():
    rows = unit(np.array([[1.0, 0, 0], [1, 0.1, 0], [-1, 0, 0.1], [-0.2, 0, 1], [-0.5, 0, 1], [-1, 0, 0.2]]))
    ranking = diffusion(None, rows, k=1, alpha=0.9)
    assert ranking.scores[0].tolist()[1:] == [0, 0, 0, 0]
    assert ranking.order[0].tolist() == [1, 3, 4, 5, 2]


def refined(q, rows, k, beta):
    """SuperGlobal for one list."""
    new = []
    for i, x in enumerate(rows):
        fellows = nearest(rows @ x, k, i)
        weights = [beta * (rows[j] @ x) for j in fellows]
        new.append((x + sum(w * rows[j] for w, j in zip(weights, fellows, strict=True))) / (1 + sum(weights)))
    new = np.array(new)
    peak = new[nearest(new @ q, k + 1)].max(axis=0)
    return (new @ q + new @ peak) / 2


def affine(q, rows, anchors):
    columns = np.concatenate((q[None], rows[: anchors - 1]))
    return unit(rows @ columns.T) @ unit(columns @ q)


@pytest.mark.parametrize("cells", [2**23, 1])
@pytest.mark.parametrize("count", [100, 17])
def test_methods_of_lists(count, cells, monkeypatch):
    monkeypatch.setattr(listwise, "CELLS", cells)
    for method, score in (
        (lambda *a, **o: super_global(*a, k=3, beta=0.2, candidates_count=count, **o), lambda q, rows, all_: refined(q, rows, 3, 0.2)),
        (lambda *a, **o: affinity(*a, anchors=7, candidates_count=count, **o), lambda q, rows, all_: affine(q, rows, 7)),
        (lambda *a, **o: affinity(*a, anchors=23, candidates_count=count, **o), lambda q, rows, all_: _by_more(q, rows, all_, 23)),
    ):  # fmt: skip
        for given in (Q, None):
            queries = X if given is None else Q
            ranking = method(given, X)
            for number, q in enumerate(queries):
                places = nearest(X @ q, N, number if given is None else None)
                first = places[:count]
                scores = score(q, X[first], X[places])
                order = [first[at] for at in np.argsort(-scores, kind="stable")] + places[count:]
                assert ranking.order[number].tolist() == order
                np.testing.assert_allclose(ranking.scores[number, : len(first)], np.sort(scores)[::-1], atol=1e-12)
            assert (np.diff(ranking.scores, axis=1) <= 1e-12).all()


def _by_more(q, rows, everyone, anchors):
    """More anchors than results that are scored."""
    columns = np.concatenate((q[None], everyone[: anchors - 1]))
    return unit(rows @ columns.T) @ unit(columns @ q)


@every
def test_every_row_asks_the_others(method):
    ranking = METHODS[method](None, X)
    assert ranking.order.shape == ranking.scores.shape == (N, N - 1)
    for number, places in enumerate(ranking.order):
        assert sorted(places) == [place for place in range(N) if place != number]
    assert (np.diff(ranking.scores, axis=1) <= 0).all()
    assert ranking.order.dtype == np.int64


@every
@pytest.mark.parametrize("given", [True, False])
def test_top_cuts_the_lists(method, given):
    queries = Q if given else None
    whole = METHODS[method](queries, X)
    for top in (1, 7, 1000):
        part = METHODS[method](queries, X, top=top)
        assert part.order.tolist() == whole.order[:, :top].tolist()
        np.testing.assert_allclose(part.scores, whole.scores[:, :top], atol=1e-12)


@every
@pytest.mark.parametrize("given", [True, False])
def test_candidates_alone_are_ordered(method, given):
    """As they are in the whole order, missing ones last, itself never; a method of lists looks at them alone."""
    queries = Q if given else None
    rng = np.random.default_rng(5)
    count = len(Q) if given else N
    chosen = np.stack([rng.permutation(N)[:19] for _ in range(count)])
    if not given:
        chosen[:, 3] = np.where((chosen == np.arange(N)[:, None]).any(1), chosen[:, 3], np.arange(N))
    chosen[rng.random(chosen.shape) < 0.2] = -1
    chosen[2] = -1
    ranking = METHODS[method](queries, X, candidates=chosen)
    whole = METHODS[method](queries, X)
    assert ranking.order.shape == (count, 19)
    for number, (found, places) in enumerate(zip(ranking.order, chosen, strict=True)):
        wanted = {place for place in places.tolist() if place >= 0 and (given or place != number)}
        assert set(found[: len(wanted)].tolist()) == wanted
        assert (found[len(wanted) :] == -1).all()
        assert (ranking.scores[number][found == -1] == -np.inf).all()
        assert np.isfinite(ranking.scores[number][found >= 0]).all()
        if method not in LISTS:
            assert found[: len(wanted)].tolist() == [place for place in whole.order[number] if place in wanted]
    assert (
        METHODS[method](queries, X, candidates=torch.from_numpy(chosen), top=5).order.tolist()
        == ranking.order[:, :5].tolist()
    )


@every
def test_a_list_of_all_is_the_whole(method):
    everyone = np.tile(np.arange(N)[::-1], (len(Q), 1))
    listed, whole = METHODS[method](Q, X, candidates=everyone), METHODS[method](Q, X)
    assert listed.order.tolist() == whole.order.tolist()
    np.testing.assert_allclose(listed.scores, whole.scores, atol=1e-12)


@pytest.mark.parametrize("method", LISTS)
def test_a_list_with_gaps_is_the_shorter_list(method):
    options = {"candidates_count": 11} | ({"anchors": 5} if method == "affinity" else {"k": 3})
    places = np.tile(np.arange(3, 3 + 29), (len(Q), 1))
    gaps = np.full((len(Q), 41), -1)
    gaps[:, ::2][:, :17], gaps[:, 1::2][:, :12] = places[:, :17], places[:, 17:]
    assert METHODS[method](Q, X, candidates=gaps, **options).order[:, :29].tolist() == (
        METHODS[method](Q, X, candidates=places, **options).order.tolist()
    )
    alone = METHODS[method](Q, X[3 : 3 + 29], **options)
    assert METHODS[method](Q, X, candidates=places, **options).order.tolist() == (alone.order + 3).tolist()


@every
def test_small_and_plain_databases(method):
    """Fewer rows than neighbours wanted, one row, equal rows, two groups of equal rows."""
    few = METHODS[method](Q[:3], X[:5])
    assert np.sort(few.order, axis=1).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert np.isfinite(few.scores).all()
    assert METHODS[method](Q[:3], X[:1]).order.tolist() == [[0]] * 3
    alone = METHODS[method](None, X[:1])
    assert alone.order.shape == alone.scores.shape == (1, 0)
    assert METHODS[method](None, X[:2]).order.tolist() == [[1], [0]]
    same = METHODS[method](None, np.ones((7, 3)))
    assert np.isfinite(same.scores).all()
    assert [sorted(row) for row in same.order.tolist()] == [[j for j in range(7) if j != i] for i in range(7)]
    pairs = np.repeat(X[:2], 30, axis=0)
    ranking = METHODS[method](None, pairs)
    assert np.isfinite(ranking.scores).all()
    assert ((ranking.order[:, :29] < 30) == (np.arange(60) < 30)[:, None]).all()
    # Opposite rows and a row of zeros.
    odd = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.5, 0.5]])
    assert np.isfinite(METHODS[method](None, odd).scores).all()


@every
def test_kinds_of_input(method):
    expected = METHODS[method](Q, X)
    for queries, database in (
        (torch.from_numpy(Q), torch.from_numpy(X)),
        (Q.tolist(), X.tolist()),
        (3 * Q, 0.2 * X),
        (Q, torch.from_numpy(X).requires_grad_()),
    ):
        found = METHODS[method](queries, database, device="cpu")
        assert found.order.tolist() == expected.order.tolist()
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-12)
    trusted = METHODS[method](Q, X, normalize=False)
    np.testing.assert_allclose(trusted.scores, expected.scores, atol=1e-12)
    single = METHODS[method](Q.astype(np.float32), torch.from_numpy(X).float())
    np.testing.assert_allclose(single.scores, expected.scores, rtol=1e-4, atol=1e-5)
    assert isinstance(expected.order, np.ndarray)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_on_a_gpu(method):
    expected = METHODS[method](None, X, device="cpu")
    found = METHODS[method](None, torch.from_numpy(X).cuda(), device="cuda")
    np.testing.assert_allclose(by_place(found, N), by_place(expected, N), atol=1e-9)


@every
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": np.full((2, 11), np.nan)}, "queries holds NaN"),
        ({"database": np.full((2, 11), np.inf)}, "database holds NaN or infinite"),
        ({"queries": None, "database": np.full((2, 11), np.inf)}, "database holds NaN or infinite"),
        ({"queries": Q[:, :5]}, "queries have 5 dimensions and the database 11"),
        ({"queries": Q[0]}, r"got shape \(11,\)"),
        ({"database": X[:0]}, r"got shape \(0, 11\)"),
        ({"top": 0}, "top must be a whole number from 1 on, or None; got 0"),
        ({"candidates": [[0, 1]]}, r"shape \(13 queries, m\), as the places that faiss returns; got int64 of shape \(1, 2\)"),
        ({"candidates": np.zeros((13, 2))}, "got float64"),
        ({"candidates": np.full((13, 1), 53)}, "places from 0 to 52, or -1 for none; got 53 to 53"),
        ({"candidates": np.full((13, 2), 4)}, "must differ; query 0 has 4 twice"),
        ({"device": "abacus"}, "device must be"),
    ],
)  # fmt: skip
def test_what_is_refused(method, arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        METHODS[method](**{"queries": Q, "database": X} | arguments)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("aqe", {"n": 0}, "n must be"),
        ("alpha-qe", {"alpha": -1}, "alpha must be"),
        ("alpha-dba", {"n": 0}, "n must be"),
        ("k-reciprocal", {"k1": 0}, "k1 must be"),
        ("k-reciprocal", {"weight": 1.5}, "weight must be a number from 0 to 1; got 1.5"),
        ("diffusion", {"alpha": 1.0}, "alpha must be a number from 0 on, below 1; got 1.0"),
        ("diffusion", {"k_query": 0}, "k_query must be"),
        ("diffusion", {"gamma": -1}, "gamma must be"),
        ("super-global", {"k": 0}, "k must be"),
        ("super-global", {"beta": -0.1}, "beta must be"),
        ("affinity", {"anchors": 0}, "anchors must be"),
        ("page-rank", {}, "method must be one of auto, cosine, aqe"),
    ],
)
def test_options_that_are_refused(method, options, message):
    with pytest.raises(InvalidArgument, match=message):
        rerank(Q, X, method, **options)


def test_auto_is_one_of_them():
    expected = METHODS[AUTO](Q, X, **AUTO_OPTIONS)
    assert rerank(Q, X).order.tolist() == expected.order.tolist()
    assert rerank(Q, X, top=3).order.tolist() == expected.order[:, :3].tolist()
