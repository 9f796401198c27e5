"""Summaries of attention weights: hand-computed values, limits, invariances, errors."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

from heedful import InvalidArgument, MissingExtra
from heedful.lens import AttentionSummary, HeadSummary, summarize

TOKENS = ["[CLS]", "the", "cat", "sat", "[SEP]"]
SPECIAL = [True, False, False, False, True]
N = len(TOKENS)
# Long enough for tests of roles to tell.
WORDS = ["[CLS]", "the", "cat", "sat", "on", "a", "red", "mat", "[SEP]"]
MARKS = [True, *[False] * 7, True]
MEASURES = ("entropy", "normalized_entropy", "distance", "first", "special", "itself", "previous", "next")


def random_weights(layers=2, heads=3, n=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(heads, n, n, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(layers)]


def names(n):
    return [f"t{i}" for i in range(n)]


def only(weights, tokens=TOKENS, **options) -> HeadSummary:
    """The summary of a single head."""
    return summarize([torch.as_tensor(weights)[None]], tokens, **options).layers[0][0]


def test_hand_computed_values():
    head = only([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.0, 1.0, 0.0]], ["<s>", "a", "b"], special=[True, False, False])
    first, second = math.log(2), 0.5 * math.log(4) + 0.5 * math.log(2)
    assert head.entropy == pytest.approx((first + second) / 3)
    # The keys that get any weight: two, three and one; the last query has no choice and is left out.
    assert head.normalized_entropy == pytest.approx((first / math.log(2) + second / math.log(3)) / 2)
    assert head.distance == pytest.approx((0.5 + 0.75 + 1.0) / 3)
    assert head.first == head.special == pytest.approx((0.5 + 0.25 + 0.0) / 3)
    assert head.itself == pytest.approx((0.5 + 0.25 + 0.0) / 3)
    assert head.previous == pytest.approx((0.25 + 1.0) / 2)
    assert head.next == pytest.approx((0.5 + 0.5) / 2)
    assert (str(head.strongest), head.strongest.weight) == ("b -> a", 1.0)
    assert (head.strongest.query, head.strongest.key) == (2, 1)


@pytest.mark.parametrize("n", [2, 5, 19])
def test_uniform_attention_has_the_highest_entropy(n):
    head = only(torch.full((n, n), 1 / n), names(n))
    assert head.entropy == pytest.approx(math.log(n))
    assert head.normalized_entropy == pytest.approx(1.0)
    assert head.distance == pytest.approx((n * n - 1) / (3 * n))
    assert head.focus == "broad"


def test_uniform_causal_attention_is_broad_among_what_it_sees():
    causal = torch.ones(N, N).tril()
    head = only(causal / causal.sum(-1, keepdim=True))
    assert head.entropy == pytest.approx(sum(math.log(i) for i in range(1, N + 1)) / N)
    assert head.normalized_entropy == pytest.approx(1.0)
    assert head.next == 0.0


@pytest.mark.parametrize(
    ("weights", "focus"),
    [
        (torch.eye(9), "itself"),
        (torch.eye(9).roll(1, dims=1), "next token"),
        (torch.eye(9).roll(-1, dims=1), "previous token"),
        (torch.eye(9)[0].expand(9, 9), "first token"),
        (torch.eye(9)[-1].expand(9, 9), "special tokens"),
    ],
)
def test_sharp_attention_has_no_entropy_and_a_name(weights, focus):
    head = only(weights, WORDS, special=MARKS, visible=torch.ones(9, 9, dtype=torch.bool))
    assert (head.entropy, head.normalized_entropy, head.focus) == (0.0, 0.0, focus)
    assert head.focus_share == 1.0
    assert [role.name for role in head.roles] == [focus]
    assert str(head).startswith(f"head 0.0: {focus}, 1.00 of its attention; chance 0.")


def test_too_few_tokens_name_no_head():
    head = only(torch.eye(N), special=SPECIAL, visible=torch.ones(N, N, dtype=torch.bool))
    (itself,) = (role for role in head.tests if role.name == "itself")
    assert (itself.score, itself.places, itself.passed) == (1.0, 3, False)
    assert itself.threshold > 1
    assert head.focus == "no role"


def test_strongest_pair_joins_two_different_ordinary_tokens():
    assert only(torch.eye(N), special=SPECIAL).strongest is None
    weights = torch.tensor([[1, 0, 0, 0, 0], [9, 0, 1, 0, 0], [9, 0, 0, 1, 0], [7, 3, 0, 0, 0], [0, 0, 10, 0, 0]])
    strongest = only(weights / weights.sum(-1, keepdim=True), special=SPECIAL).strongest
    assert (str(strongest), strongest.weight) == ("sat -> the", pytest.approx(0.3))


def test_pairs_fall_in_weight_and_come_once():
    summary = summarize([w.repeat(2, 1, 1) for w in random_weights()], names(7))
    pairs = summary.pairs(4, neighbours=True)
    assert len({(pair.query, pair.key) for pair in pairs}) == len(pairs) == 4
    assert [pair.weight for pair in pairs] == sorted((pair.weight for pair in pairs), reverse=True)
    assert pairs[0].weight == max(head.strongest.weight for heads in summary.layers for head in heads)


def test_pairs_leave_neighbours_out_unless_they_are_asked_for():
    weights = torch.tensor([[0.0, 0.9, 0.1], [0.8, 0.1, 0.1], [0.3, 0.7, 0.0]])
    summary = summarize([weights[None]], ["a", "b", "c"])
    assert [str(pair) for pair in summary.pairs()] == ["c -> a"]
    assert [str(pair) for pair in summary.pairs(neighbours=True)] == ["a -> b"]
    assert summarize([torch.eye(2)[None]], ["a", "b"]).pairs() == ()


def test_far_pairs_leave_out_signs_that_unicode_calls_symbols():
    tokens = ["<", "word", "other", "$", "=", "cat", ">", "🙂"]
    weights = torch.full((1, 8, 8), 0.01)
    weights[0, 0, 6] = weights[0, 6, 3] = weights[0, 4, 7] = 0.9
    weights[0, 1, 7] = 0.5
    (pair,) = summarize([weights / weights.sum(-1, keepdim=True)], tokens).pairs(1)
    assert (pair.query_token, pair.key_token) == ("word", "🙂")


def test_permuting_heads_permutes_the_summary():
    (weights,) = random_weights(layers=1, heads=5)
    order = [3, 0, 4, 1, 2]
    straight, permuted = (summarize([w], names(7)).layers[0] for w in (weights, weights[order]))
    for at, head in enumerate(order):
        for name in MEASURES:
            assert getattr(permuted[at], name) == pytest.approx(getattr(straight[head], name))


def test_reversing_the_sentence_swaps_neighbours_and_keeps_the_rest():
    (weights,) = random_weights(layers=1)
    forward, backward = (summarize([w], names(7)).layers[0] for w in (weights, weights.flip(-1, -2)))
    for a, b in zip(forward, backward, strict=True):
        assert (a.previous, a.next) == pytest.approx((b.next, b.previous))
        for name in ("entropy", "normalized_entropy", "distance", "itself"):
            assert getattr(a, name) == pytest.approx(getattr(b, name))


def test_a_query_that_attends_to_nothing_is_left_out():
    weights = torch.full((4, 4), 0.25)
    weights[2] = 0
    head = only(weights, names(4))
    assert head.entropy == pytest.approx(math.log(4))
    assert head.itself == pytest.approx(0.25)
    silent = only(torch.zeros(3, 3), names(3))
    assert all(getattr(silent, name) == 0.0 for name in MEASURES)
    assert silent.strongest is None


def test_one_token():
    head = only([[1.0]], ["a"])
    assert (head.entropy, head.normalized_entropy, head.previous, head.next, head.itself) == (0, 0, 0, 0, 1)


def test_16_bit_weights_are_taken():
    (weights,) = random_weights(layers=1, n=257)
    exact, rounded = (summarize([w], names(257)).layers[0][0] for w in (weights, weights.bfloat16()))
    assert rounded.entropy == pytest.approx(exact.entropy, rel=1e-2)
    assert rounded.distance == pytest.approx(exact.distance, rel=1e-2)


def test_inputs_are_not_changed():
    weights = random_weights()
    before = [w.clone() for w in weights]
    summarize(weights, names(7))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@pytest.mark.parametrize(
    ("weights", "tokens", "options", "message"),
    [
        ([], TOKENS, {}, "one tensor per layer"),
        ([torch.eye(3)[None]], [], {}, "must not be empty"),
        ([torch.eye(3)[None]], TOKENS, {}, r"\(heads, 5, 5\); got \(1, 3, 3\)"),
        ([torch.eye(N)[None], torch.eye(N)[None, None]], TOKENS, {}, "layer 1 must have shape"),
        ([None], TOKENS, {}, "got NoneType"),
        ([2 * torch.eye(N)[None]], TOKENS, {}, "layer 0, head 0, query 0 are no distribution over keys: they sum to 2"),
        ([torch.full((1, N, N), float("nan"))], TOKENS, {}, "no distribution"),
        ([torch.eye(N)[None] - torch.eye(N).roll(1, 1) + torch.eye(N).roll(2, 1)], TOKENS, {}, "the lowest is -1"),
        ([torch.eye(N)[None]], TOKENS, {"special": [True]}, "each of the 5 tokens; got 1"),
        ([torch.eye(N)[None]], TOKENS, {"visible": torch.ones(N, N)}, "visible must be boolean"),
        ([torch.eye(N)[None]], TOKENS, {"visible": torch.zeros(N, N, dtype=torch.bool)}, "that visible hides"),
    ],
)
def test_errors_say_what_was_given_and_expected(weights, tokens, options, message):
    with pytest.raises(InvalidArgument, match=message):
        summarize(weights, tokens, **options)


def test_result_is_frozen_goes_through_json_and_prints():
    summary = summarize(random_weights(), names(7))
    with pytest.raises(FrozenInstanceError):
        summary.tokens = ()
    told = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert told["tokens"] == names(7)
    assert [len(layer["heads"]) for layer in told["layers"]] == [3, 3]
    assert told["layers"][1]["heads"][2]["entropy"] == summary.layers[1][2].entropy
    assert {"focus", "roles", "tests", "strongest", "farther", *MEASURES} <= set(told["layers"][0]["heads"][0])
    lines = str(summary).splitlines()
    assert lines[0].startswith("layer")
    assert all(len(line) <= 80 for line in lines)
    assert f"{summary.mean(0, 'entropy'):.2f}" in lines[1]


def test_table_stays_within_80_columns_with_many_heads():
    heads = torch.cat([torch.eye(9).roll(shift, 1)[None] for shift in (0, 1, -1)] * 40)
    sink = torch.eye(9)[-1].expand(40, 9, 9)
    text = str(summarize([torch.cat((heads, sink))], WORDS, special=MARKS, visible=torch.ones(9, 9, dtype=torch.bool)))
    assert "special tokens: 120 (1.00), 121 (1.00), 38 more" in text
    assert max(map(len, text.splitlines())) <= 80


def test_plot_draws_layers_by_heads():
    matplotlib = pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.axes import Axes

    summary = summarize(random_weights(layers=2, heads=3), names(7))
    ax = summary.plot()
    assert isinstance(ax, Axes)
    (image,) = ax.get_images()
    assert image.get_array().shape == (2, 3)
    assert float(image.get_array()[1, 2]) == pytest.approx(summary.layers[1][2].normalized_entropy)
    own = pyplot.subplots()[1]
    assert summary.plot(own) is own
    pyplot.close("all")


def test_plot_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary = summarize([torch.eye(2)[None]], ["a", "b"])
    assert isinstance(summary, AttentionSummary)
    with pytest.raises(MissingExtra, match=r"heedful\[plot\]"):
        summary.plot()
