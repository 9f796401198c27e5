"""explain and what it says of effects: the one that is named is the largest, and numbers that differ read differently."""

from __future__ import annotations

import pytest
import torch

from heedful import explain
from heedful.lens.causes import TextModel

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from answering import TEXT, classifier, wordpiece


def answering(logits):
    """A question whose answers score as `logits` says for a set of removed units."""
    task = TextModel(classifier(), wordpiece()).ask(TEXT)
    task.scores = lambda removed: torch.tensor([logits(set(one)) for one in removed], dtype=torch.float64)
    return task


def test_where_the_probability_does_not_fall_the_rank_is_the_effect():
    """Rivals that rise push an answer down a rank, while its own probability rises."""
    ranks = {2: [8.0, 1.2, 1.3], 5: [7.0, 1.6, 1.7]}
    found = explain(answering(lambda one: ranks.get(min(one, default=-1), [9.0, 1.0, 0.5])), target=1, baselines=False)
    assert (found.rank, [one.rank for one in found.sets[:2]]) == (2, [3, 3])
    first = found.sets[0]
    assert first.score > found.before
    said = str(found).replace("\n", " ")
    assert "'fair' then has rank 3 instead of 2, though its probability does not fall" in said
    assert "rank 2 -> 3" in said
    assert found.to_dict()["sets"][0]["rank_after"] == 3
    assert "<th" in found.to_html()
    assert "rank after" in found.to_html()


def test_the_largest_effect_is_the_one_that_is_named():
    """Word 1 lowers the probability most, word 4 the margin; no set changes the answer."""
    effects = {1: [2.0, 0.0, 1.0], 4: [3.0, 2.5, -9.0]}
    odds = {unit: torch.tensor(row).softmax(-1)[0].item() for unit, row in effects.items()}
    least = min(odds, key=odds.get)
    found = explain(
        answering(lambda one: effects[min(one & set(effects))] if one & set(effects) else [9.0, 0.0, 0.0]),
        baselines=False,
        max_size=1,
    )
    assert not found.found
    assert found.indices == (next(one.node for one in found.scores if one.alone.score == pytest.approx(odds[least])),)
    assert found.effect.probability_after == pytest.approx(min(one.alone.score for one in found.scores))


def test_effects_too_small_to_see_are_not_shown_as_numbers_that_are_equal():
    still = explain(answering(lambda one: [6.0, 0.0, 0.0]), baselines=False, max_size=1)
    assert "has a measurable effect: the probability does not fall" in str(still).replace("\n", " ")
    rising = explain(answering(lambda one: [6.0 + 1e-4 * len(one), 0.0, 0.0]), baselines=False, max_size=1)
    slight = explain(answering(lambda one: [6.0 - 4e-3 * (2 in one), 0.0, 0.0]), baselines=False, max_size=1)
    said = str(slight).replace("\n", " ")
    assert "(probability 0.9951)" in said
    assert "is then 0.9950" in said
    for found in (still, rising, slight):
        assert "-0.000" not in str(found) + found.to_html()


def test_one_is_singular():
    found = explain(answering(lambda one: [6.0, 0.0, 0.0]), baselines=False, max_size=1)
    assert "No set of at most 1 word that was tried" in str(found).replace("\n", " ")
    one = explain(TextModel(classifier(), wordpiece()).ask("cat"), baselines=False)
    assert "1 single words" not in str(one) + one.sets_note
    assert "1 sets" not in str(one)
