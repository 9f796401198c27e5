"""Scenes as tensors beside numpy's world: the same pictures, the same truth."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from heedful import InvalidArgument
from heedful.multimodal import Scenes, Shapes, Vocabulary, holds
from heedful.multimodal.questions import questions
from heedful.multimodal.scenes import KINDS
from heedful.multimodal.worlds import ANSWERS, COLOURS, FOILS, QUESTIONS, SHAPES, VOCABULARY, Thing, encode, painted
from pictured import answered


def things_of(scenes, at):
    return [
        Thing(*row) for row, there in zip(scenes.things[at].tolist(), scenes.there[at].tolist(), strict=True) if there
    ]


def text_of(row):
    return " ".join(VOCABULARY[number] for number in row.tolist() if number > 2)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def test_pictures_are_numpys():
    worlds = [Shapes(preset, seed=1) for preset in ("full", "easy")]
    lists = [world.things(i) for world in worlds for i in range(60)]
    drawn = Scenes.of(lists).render(noise=0).permute(0, 2, 3, 1).numpy()
    wanted = np.stack([painted(things, 0.0) for things in lists])
    assert np.array_equal(drawn, wanted.astype(np.float32))


def test_objects_follow_the_same_laws(generator):
    scenes = Scenes.draw(4000, generator)
    counts = scenes.there.sum(1)
    assert set(counts.tolist()) == {2, 3}
    assert abs((counts == 2).float().mean() - 0.5) < 0.03
    for column, size in enumerate((2, 8, 6, 4, 4)):
        shares = scenes.things[..., column][scenes.there].bincount(minlength=size) / counts.sum()
        assert len(shares) == size
        assert (shares - 1 / size).abs().max() < 0.02
    cells = 4 * scenes.things[..., 3] + scenes.things[..., 4]
    pairs = 6 * scenes.things[..., 1] + scenes.things[..., 2]
    for of in (cells, pairs):
        assert all(len(set(row)) == 3 for row in of.tolist())
    assert set(scenes.jitter.unique().tolist()) == {-1, 0, 1}
    pictures = scenes[:7].render(generator)
    assert pictures.shape == (7, 3, 64, 64)
    assert pictures.min() >= 0
    assert pictures.max() <= 1


def test_scenes_are_drawn_as_asked(generator):
    away = [(0, 0), (3, 5)]
    scenes = Scenes.draw(500, generator, objects=(5, 7), held_out=away)
    assert set(scenes.there.sum(1).tolist()) == {5, 6, 7}
    seen = {(thing.colour, thing.shape) for at in range(500) for thing in things_of(scenes, at)}
    assert len(seen) == 46
    assert not seen & set(away)
    easy = Scenes.draw(50, generator, preset="easy")
    assert easy.things[..., 1].max() == 3
    assert easy.things[..., 0].min() == 1
    with pytest.raises(InvalidArgument, match="2 to 16 objects"):
        Scenes.draw(2, generator, objects=(3, 17))


def test_captions_and_foils_have_the_truth_of_numpy(generator):
    scenes = Scenes.draw(700, generator, objects=(2, 5))
    for weights in ((1, 0, 0, 0), (0, 1, 0, 0)):
        captions = scenes.captions(generator, weights)
        for kind in ("", *FOILS):
            texts = captions.foils(kind, generator) if kind else captions
            true, tokens = texts.true(scenes), texts.tokens()
            for at in range(len(scenes)):
                text = text_of(tokens[at])
                assert holds(text, things_of(scenes, at)) == true[at].item(), text
                assert encode(text) == tokens[at].tolist()
            if not kind:
                assert true.all()


def two_relations(text, things):
    """Captions of two relations, taken apart into those of one."""
    words = text.split()
    if len(words) > 12:  # in a row
        ends = [at for at, word in enumerate(words) if word == "a"]
        first, second, third = (" ".join(words[at : at + 4]) for at in ends)
        between = [" ".join(words[a + 4 : b]) for a, b in pairwise(ends)]
        return any(
            holds(f"a {one} {between[0]} a {two}", [one, two]) and holds(f"a {two} {between[1]} a {three}", [two, three])
            for one in things if f"a {one}" == first
            for two in things if f"a {two}" == second
            for three in things if f"a {three}" == third
        )  # fmt: skip
    first, second = " ".join(words[:4]), " ".join(words[-4:])
    return all(holds(f"{first} {word} {second}", things) for word in (words[4], f"{words[5]} of"))


@pytest.mark.parametrize("kind", ["both", "chain"])
def test_captions_of_two_relations(kind, generator):
    scenes = Scenes.draw(500, generator, objects=(3, 4))
    captions = scenes.captions(generator, [float(name == kind) for name in KINDS])
    assert captions.true(scenes).all()
    chosen = captions.kind == KINDS.index(kind)
    assert chosen.float().mean() > 0.5
    for texts in (captions, captions.foils("relation", generator), captions.foils("swap", generator)):
        true, tokens = texts.true(scenes), texts.tokens(length=20)
        assert tokens[:, -1].max() <= 2
        for at in chosen.nonzero()[:, 0].tolist():
            assert two_relations(text_of(tokens[at]), things_of(scenes, at)) == true[at].item()
    assert not captions.foils("relation", generator).true(scenes).any()


def test_a_caption_can_be_about_some_objects(generator):
    scenes = Scenes.draw(300, generator)
    red = (scenes.things[..., 1] == 0) & scenes.there
    rows = red.any(1)
    captions = scenes[rows].captions(generator, about=red[rows])
    assert (captions.numbers[:, 2] == 0).all()
    assert captions.true(scenes[rows]).all()
    pairs = torch.zeros(8, 6, dtype=torch.bool)
    pairs[0] = True
    assert captions.names(pairs).all()
    assert not captions.names(~pairs)[captions.located].any()


def test_foils_of_few_words(generator):
    scenes = Scenes.draw(300, generator, preset="easy")
    for kind in ("colour", "shape"):
        foils = scenes.captions(generator).foils(kind, generator, (1, 4, 4))
        assert foils.numbers[:, [2, 5]].max() <= 3
        assert foils.numbers[:, [3, 6]].max() <= 3


def test_small_pictures_in_place_of_shapes(generator):
    scenes = Scenes.draw(30, generator, shapes=10)
    assert scenes.things[..., 2].max() > 5
    glyphs = torch.zeros(10, 2, 8, 8)
    glyphs[:, :, :, :4] = 1.0  # the left half
    pictures = scenes.render(noise=0, glyphs=glyphs)
    for at in range(30):
        for thing, (jx, jy) in zip(things_of(scenes, at), scenes.jitter[at].tolist(), strict=False):
            x, y = 16 * thing.column + 8 + jx, 16 * thing.row + 8 + jy
            assert pictures[at, :, y, x - 3].max() == 1.0
            assert pictures[at, :, y, x + 3].max() < 0.3
    words = Vocabulary(tuple("0123456789"))
    assert words.words[:49] == VOCABULARY
    tokens = scenes.captions(generator).tokens(words)
    assert tokens.max() == 54
    assert {words.words[number] for number in tokens.unique().tolist()} >= set("0123456789")


def test_questions_have_the_answers_of_their_words(generator):
    scenes = Scenes.draw(2500, generator)
    found = questions(scenes, generator)
    for at in range(len(scenes)):
        text = text_of(found.input_ids[at])
        assert ANSWERS[found.answers[at]] == answered(text, things_of(scenes, at)), text
    shares = found.kinds.bincount(minlength=6) / 2500
    assert len(shares) == len(QUESTIONS)
    assert shares.min() > 0.1
    for kind in ("exist", "relation"):
        yes = found.answers[found.kinds == QUESTIONS.index(kind)] == ANSWERS.index("yes")
        assert abs(yes.float().mean() - 0.5) < 0.06
    assert (questions(scenes, generator, weights=(0, 0, 1, 0, 0, 0)).kinds == 2).all()
    assert len(COLOURS) + len(SHAPES) == 14
