"""`ListReranker`: what it learns, what its answers may depend on, and what it refuses."""

from copy import copy, deepcopy

import numpy as np
import pytest
import torch
from sklearn.base import clone

from heedful import InvalidArgument
from heedful._errors import Unsupported
from heedful.bridges.estimator import Estimator
from heedful.lens import observe
from heedful.ranking import ListReranker, k_reciprocal, mean_average_precision, relevance_by_label
from reranked import by_place

QUICK = {
    "candidates": 24,
    "embed_dim": 16,
    "num_heads": 2,
    "dropout": 0.0,
    "drop_path": 0.0,
    "epochs": 6,
    "lr": 3e-3,
    "random_state": 0,
    "device": "cpu",
    "progress": False,
}


def clusters(seed, classes=20, members=9, d=32, noise=1.0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, d)).repeat(members, 0)
    return centres + noise * rng.normal(size=centres.shape), np.arange(classes * members) // members


@pytest.fixture(scope="module")
def trained():
    return ListReranker(**QUICK | {"epochs": 4}).fit(*clusters(0, classes=40))


def first(X, y):
    order = np.argsort(-unit(X) @ unit(X).T, axis=1, kind="stable")
    order = np.stack([row[row != place] for place, row in enumerate(order)])
    return mean_average_precision(order, relevance_by_label(y))


def unit(X):
    return X / np.linalg.norm(X, axis=1, keepdims=True)


def test_it_learns_what_serves_unseen_classes(trained):
    X, y = clusters(1)
    assert trained.score(X, y) > first(X, y) + 0.03
    for measure in ("p@1", "ndcg", "recall@10"):
        assert 0 < trained.score(X, y, measure=measure) <= 1
    assert trained.training_.epochs[-1].loss < trained.training_.epochs[0].loss


def test_no_row_is_wanted_in_its_own_list(trained):
    X, y = clusters(2, classes=6, members=3)
    wanted = mean_average_precision(trained.rerank(None, X), relevance_by_label(y))
    assert trained.score(X, y) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_scores_are_those_of_the_network_on_the_table_of_similarities(trained, weight):
    """And of the cosines, by the weight that these have."""
    X, _ = clusters(1)
    trained = copy(trained).set_params(weight=weight)
    queries, database = unit(X[:5]), unit(X[5:])
    found = trained.rerank(X[:5], X[5:])
    assert found.order.shape == (5, len(X) - 5)
    network = trained.network_.eval()
    for number, query in enumerate(queries):
        near = np.argsort(-database @ query, kind="stable")
        members = np.concatenate((query[None], database[near[:24]]))
        table = torch.from_numpy((members @ members.T).astype(np.float32))[None]
        with torch.no_grad():
            scores = (1 - weight) * network.scores(table)[0].numpy() + weight * (members[1:] @ query)
        order = np.argsort(-scores, kind="stable")
        np.testing.assert_array_equal(found.order[number], np.concatenate((near[:24][order], near[24:])))
        np.testing.assert_allclose(found.scores[number, :24], scores[order], atol=1e-5)
    assert (np.diff(found.scores, axis=1) <= 1e-6).all()
    np.testing.assert_array_equal(trained.rerank(X[:5], X[5:], top=7).order, found.order[:, :7])


def test_nothing_but_similarities_is_seen(trained):
    """Rotated vectors, and vectors of another width, give the same; so do tables alone."""
    X, _ = clusters(1)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0]
    found, turned = trained.rerank(X[:40]), trained.rerank(np.pad(X[:40] @ turn, ((0, 0), (0, 9))))
    np.testing.assert_allclose(found.scores, turned.scores, atol=1e-5)
    members = unit(X[:25])
    lists = trained.rerank_lists((members @ members.T)[None])
    again = trained.rerank(X[:1], X[1:25], candidates=np.arange(24)[None])
    assert lists.order.shape == (1, 24)
    # The order of the anchors is that of the list, so the list must be sorted first.
    near = np.argsort(-members[1:] @ members[0], kind="stable")
    ordered = np.concatenate((members[:1], members[1:][near]))
    lists = trained.rerank_lists((ordered @ ordered.T)[None])
    np.testing.assert_array_equal(near[lists.order[0]], again.order[0])


def test_the_order_of_the_anchors_matters(trained):
    """Ranks are known by the columns of a table alone."""
    X, _ = clusters(1)
    members = unit(X[np.argsort(-unit(X) @ unit(X)[0], kind="stable")[:25]])
    tables = (members @ members.T)[None]
    scores, other = (by_place(trained.rerank_lists(each), 24) for each in (tables, tables[:, :, ::-1]))
    assert np.abs(scores - other).max() > 1e-3


def test_a_copy_of_the_network_follows_its_weights(trained):
    model = deepcopy(trained).set_params(predict_dtype="float64")
    X, _ = clusters(1)
    before = model.rerank(X[:3], X[3:60]).scores
    np.testing.assert_array_equal(before, model.rerank(X[:3], X[3:60]).scores)
    with torch.no_grad():
        model.network_.project.weight.mul_(3)
    after = model.rerank(X[:3], X[3:60]).scores
    assert np.abs(before - after).max() > 1e-3
    np.testing.assert_array_equal(after, deepcopy(model).rerank(X[:3], X[3:60]).scores)


def test_answers_do_not_depend_on_the_other_queries(trained):
    X, _ = clusters(1)
    together = trained.rerank(X[:70], X[70:])
    alone = trained.rerank(X[3:4], X[70:])
    np.testing.assert_array_equal(together.order[3:4], alone.order)
    np.testing.assert_allclose(together.scores[3:4], alone.scores, atol=1e-6)


@pytest.mark.parametrize("affinity", ["diffusion", "jaccard"])
def test_queries_asked_together_are_neighbours_of_jaccard_alone(affinity):
    X, y = clusters(0)
    model = ListReranker(**QUICK | {"affinity": affinity, "epochs": 1}).fit(X, y)
    queries = clusters(0, noise=1.5)[0][:30]
    together, alone = model.rerank(queries, X), model.rerank(queries[3:4], X)
    assert np.array_equal(together.order[3:4], alone.order) == (affinity == "diffusion")


def test_candidates_of_another_search(trained):
    X, _ = clusters(1)
    places = np.argsort(-unit(X[:4]) @ unit(X[4:]).T, axis=1)[:, :30]
    whole = trained.rerank(X[:4], X[4:], candidates=places)
    np.testing.assert_array_equal(whole.order, trained.rerank(X[:4], X[4:], top=30).order)
    holes = places.copy()
    holes[1, ::2] = -1
    found = trained.rerank(X[:4], X[4:], candidates=holes)
    assert set(found.order[1]) == {-1, *places[1, 1::2]}
    assert (found.order[1, 15:] == -1).all()
    np.testing.assert_array_equal(found.order[[0, 2, 3]], whole.order[[0, 2, 3]])
    for wrong in (places[:2], places.astype(float), places + len(X)):
        with pytest.raises(InvalidArgument, match="candidates"):
            trained.rerank(X[:4], X[4:], candidates=wrong)


@pytest.mark.parametrize("affinity", ["jaccard", "diffusion"])
def test_other_similarities(affinity):
    X, y = clusters(0)
    options = {"k1": 8, "k2": 3} if affinity == "jaccard" else {"k": 8}
    model = ListReranker(**QUICK, affinity=affinity, affinity_options=options).fit(X, y)
    seen, labels = clusters(1)
    assert model.score(seen, labels) > first(seen, labels)
    if affinity == "jaccard":
        lists = model.rerank(seen)
        wanted = k_reciprocal(None, seen, k1=8, k2=3, weight=0.0)
        assert [set(row[:24]) for row in lists.order] == [set(row[:24]) for row in wanted.order]


def test_cosines_decide_where_they_have_all_the_weight(trained):
    """Also for other similarities, for candidates of others and for lists of which tables are known."""
    X, _ = clusters(1)
    near = np.argsort(-unit(X[:5]) @ unit(X[5:]).T, axis=1, kind="stable")
    for options in ({}, {"affinity": "jaccard", "affinity_options": {"k1": 8, "k2": 3}}):
        model = copy(trained).set_params(weight=1.0, **options)
        places = model.rerank(X[:5], X[5:], top=24).order
        order = np.argsort(-np.take_along_axis(unit(X[:5]) @ unit(X[5:]).T, places, 1), axis=1, kind="stable")
        np.testing.assert_array_equal(order, np.broadcast_to(np.arange(24), (5, 24)))
        listed = model.rerank(X[:5], X[5:], candidates=np.flip(near[:, :20], 1)).order
        np.testing.assert_array_equal(listed, near[:, :20])
    tables = np.random.default_rng(0).random((3, 8, 8))
    model = copy(trained).set_params(weight=1.0)
    np.testing.assert_array_equal(model.rerank_lists(tables).order, np.argsort(-tables[:, 1:, 0], axis=1))
    cosines = np.random.default_rng(1).random((3, 7))
    np.testing.assert_array_equal(model.rerank_lists(tables, cosines=cosines).order, np.argsort(-cosines, axis=1))
    with pytest.raises(InvalidArgument, match="cosines must be"):
        model.rerank_lists(tables, cosines=cosines[:, 1:])


def test_attention_between_results(trained):
    """The weights that `lens.observe` records on the same table, with the scores of `rerank`."""
    X, _ = clusters(1)
    found = trained.attention_between(X[0], X[5:])
    ranking = trained.rerank(X[:1], X[5:], top=24)
    np.testing.assert_array_equal(found.order, ranking.order[0])
    np.testing.assert_allclose(np.sort(found.scores)[::-1], ranking.scores[0], atol=1e-6)
    members = np.concatenate((unit(X[:1]), unit(X[5:])[found.places]))
    table = torch.from_numpy((members @ members.T).astype(np.float32))[None]
    seen = observe(trained.network_, table)
    for layer in range(2):
        np.testing.assert_allclose(found.weights[layer], seen[layer].weights[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(found.of_query(), found.weights[:, :, 0].mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(found.between(1, 0), found.weights[1, 0], atol=1e-6)
    chosen = trained.attention_between(X[0], X[5:], candidates=np.array([3, -1, 9]))
    assert set(chosen.places) == {3, 9}
    assert chosen.weights.shape == (2, 2, 3, 3)
    for wrong in ({"layer": 2}, {"head": -3}, {"layer": 0.5}):
        with pytest.raises(InvalidArgument, match="whole number"):
            found.between(**wrong)
    with pytest.raises(InvalidArgument, match="one vector"):
        trained.attention_between(X[:2], X[5:])
    model = ListReranker(**QUICK | {"epochs": 1}, attention="none").fit(X, np.arange(len(X)) // 9)
    with pytest.raises(Unsupported, match="no weights"):
        model.attention_between(X[0], X[5:])


def test_a_picture_of_attention(trained):
    pytest.importorskip("matplotlib").use("Agg")
    X, _ = clusters(1)
    found = trained.attention_between(X[0], X[5:])
    ax = found.plot(top=7, layer=1)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["query", *map(str, found.order[:7])]
    new = np.argsort(-found.scores, kind="stable")[:7]
    shown = found.between(1)[np.ix_([0, *(1 + new)], [0, *(1 + new)])]
    np.testing.assert_allclose(ax.images[0].get_array(), shown)
    ax = found.plot(names=[f"name {place}" for place in found.places], top=3)
    assert ax.get_xticklabels()[1].get_text() == f"name {found.order[0]}"
    with pytest.raises(InvalidArgument, match="names must be 24"):
        found.plot(names=["one"])


def test_queries_with_what_is_relevant_to_them():
    """The same lists, said with labels or with places, train the same network."""
    X, y = clusters(0)
    options = QUICK | {"keep": (1.0, 1.0), "epochs": 2}
    relevant = [np.flatnonzero(y[40:] == label) for label in y[:40]]
    by_places = ListReranker(**options).fit(X[:40], database=X[40:], relevant=relevant)
    matrix = np.array([y[40:] == label for label in y[:40]])
    by_matrix = ListReranker(**options).fit(X[:40], database=X[40:], relevant=matrix)
    for one, other in zip(by_places.network_.parameters(), by_matrix.network_.parameters(), strict=True):
        assert torch.equal(one, other)
    assert by_places.rerank(X[:3], X[40:]).order.shape == (3, len(X) - 40)


def test_several_descriptions_of_the_same_items():
    X, y = clusters(0)
    wide = np.concatenate((X, np.random.default_rng(0).normal(size=(len(X), 5))), axis=1)
    model = ListReranker(**QUICK | {"epochs": 2}).fit([X, wide], y)
    steps = -(-2 * len(X) // 64)
    assert len(model.training_.epochs) == 2
    assert model.score(*clusters(1)) > 0.3
    assert steps == 6


def test_classes_are_held_out_whole():
    X, y = clusters(0)
    model = ListReranker(**QUICK, validation_fraction=0.2).fit(X, y)
    assert set(model.training_.measured) == {"loss", "average_precision"}
    assert 0 < model.training_.measured["average_precision"] <= 1


def test_folders_and_clones(trained, tmp_path):
    trained.save_pretrained(tmp_path / "model")
    again = Estimator.from_pretrained(tmp_path / "model")
    X, _ = clusters(1)
    np.testing.assert_array_equal(again.predict(X), trained.predict(X))
    assert clone(trained).get_params() == trained.get_params()


def test_small_databases(trained):
    X, _ = clusters(1)
    assert trained.rerank(X[:3], X[3:5]).order.shape == (3, 2)
    assert trained.rerank(X[:3], X[3:4]).order.tolist() == [[0], [0], [0]]
    lone = trained.rerank(X[:1], X[:30].repeat(2, 0))
    # Equal rows have equal scores, and stay in their order.
    pairs = lone.order[0].reshape(-1, 2)[:12]
    np.testing.assert_array_equal(pairs[:, 0] + 1, pairs[:, 1])


def test_wrong_calls_are_named(trained):
    X, y = clusters(0)
    for wrong, words in (
        ({"temperature": 0.1}, "own=False"),
        ({"affinity": "dot"}, "affinity"),
        ({"keep": (0.9, 0.5)}, "smaller first"),
        ({"keep": 0.5}, "two shares"),
        ({"num_heads": 3}, "embed_dim"),
        ({"candidates": 0}, "candidates"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            ListReranker(**QUICK | wrong).fit(X, y)
    with pytest.raises(InvalidArgument, match="give labels"):
        ListReranker(**QUICK).fit(X)
    with pytest.raises(InvalidArgument, match="as many rows"):
        ListReranker(**QUICK).fit(X, y[:-1])
    with pytest.raises(InvalidArgument, match="nothing to learn"):
        ListReranker(**QUICK).fit(X, np.arange(len(X)))
    with pytest.raises(InvalidArgument, match="give relevant"):
        ListReranker(**QUICK).fit(X, database=X)
    for outside in (5000, -7):
        with pytest.raises(InvalidArgument, match=rf"places from 0 to {len(X) - 1}, .*; query 1 has {outside}"):
            ListReranker(**QUICK).fit(X[:2], database=X, relevant=[[1], [2, outside]])
    with pytest.raises(InvalidArgument, match="label for each"):
        trained.score(X, y[:-1])
    with pytest.raises(InvalidArgument, match="the query first"):
        trained.rerank_lists(np.ones((3, 4)))
    with pytest.raises(InvalidArgument, match="finite"):
        trained.rerank_lists(np.full((1, 3, 3), np.nan))
    X[4, 2] = np.nan
    with pytest.raises(InvalidArgument, match="finite"):
        trained.rerank(X)


def test_a_query_without_candidates_ranks_nothing(trained):
    X, _ = clusters(1)
    found = trained.rerank(X[:2], X[2:], candidates=np.array([[-1, -1], [3, 5]]))
    assert found.order[0].tolist() == [-1, -1]
    assert np.isfinite(found.scores[1]).all()


def test_training_needs_no_more_than_lists(trained):
    """What `fit` worked with is not kept."""
    assert not [name for name in vars(trained) if name in ("_lists_of", "_asked_for", "_learned")]
