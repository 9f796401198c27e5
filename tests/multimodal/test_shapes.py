"""The world `shapes`: the published bytes, captions that are true, foils that are false, questions with their answers."""

import hashlib
import pickle

import numpy as np
import pytest

from heedful import InvalidArgument
from heedful.multimodal import Shapes, holds
from heedful.multimodal.worlds import ANSWERS, FOILS, PRESETS, QUESTIONS, SHAPES, VOCABULARY, Thing, encode
from pictured import answered, true_of

HASHES = ("63ef535ed1b5fd3f", "67323f0aace64738", "d21f45f7a82aefb2")
WORLD = Shapes(seed=1)


def test_pictures_are_the_published_ones():
    for i, wanted in enumerate(HASHES):
        assert hashlib.sha256(Shapes().scene(i).bytes.tobytes()).hexdigest()[:16] == wanted
    assert Shapes().caption(0, 0) == "a large blue circle right of a small red cross"
    assert Shapes().caption(0, 1) == "a large blue circle in the top right"
    assert len(VOCABULARY) == 49
    assert len(ANSWERS) == 24


def test_captions_are_true_and_foils_false():
    count = 0
    for i in range(1000):
        things = WORLD.things(i)
        for c in (0, 1):
            caption = WORLD.caption(i, c)
            assert true_of(caption, things)
            assert holds(caption, things)
            for kind in ("colour", "shape", "size", *(("location",) if c else ("relation", "swap"))):
                for f in range(1 if kind in ("relation", "swap") else 2 - (kind == "size")):
                    foil = WORLD.foil(i, c, kind, f)
                    assert foil != caption
                    assert not true_of(foil, things), (caption, foil)
                    assert not holds(foil, things)
                    count += 1
    assert count >= 10_000


def test_what_a_scene_holds():
    for preset, of in PRESETS.items():
        scenes = [Shapes(preset).things(i) for i in range(300)]
        assert {len(things) for things in scenes} == set(range(*of.objects))
        every = [thing for things in scenes for thing in things]
        assert {thing.shape for thing in every} == set(range(of.shapes))
        assert {thing.colour for thing in every} == set(range(of.colours))
        assert {thing.size for thing in every} == ({0, 1} if of.sizes == 2 else {1})
        for things in scenes:
            assert len({(thing.row, thing.column) for thing in things}) == len(things)
            assert len({(thing.colour, thing.shape) for thing in things}) == len(things)


def test_pictures_show_what_is_in_them():
    """The colour of each object stands around the middle of its cell, a ring's beside it."""
    rgb = np.array([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1), (1, 0.5, 0)])
    for i in range(40):
        scene = WORLD.scene(i)
        assert scene.pixels.shape == (64, 64, 3)
        assert scene.pixels.dtype == np.float32
        for thing in scene.things:
            x, y = 16 * thing.column + 8 + thing.jx, 16 * thing.row + 8 + thing.jy
            across = (3, 5)[thing.size] if SHAPES[thing.shape] == "ring" else 0
            assert np.abs(scene.pixels[y, x + across] - rgb[thing.colour]).max() < 0.12, thing
            assert scene.pixels[y - 7 if y > 7 else y + 7, x].max() < 0.32 or len(scene.things) > 1


def test_questions_have_their_answers():
    counts = {}
    for i in range(1500):
        things = WORLD.things(i)
        for kind in QUESTIONS:
            found = WORLD.question(i, kind)
            if found is None:
                assert kind in ("colour", "shape", "relation")
                continue
            assert found[1] == answered(found[0], things), found
            assert found[1] in ANSWERS
            assert len(encode(found[0])) == 16
            counts.setdefault(kind, []).append(found[1])
    for kind in ("exist", "relation"):
        assert abs(np.mean([answer == "yes" for answer in counts[kind]]) - 0.5) < 0.03
    assert all(len(counts[kind]) > 1000 for kind in QUESTIONS)


def test_texts_become_numbers():
    numbers = encode("a large blue circle in the top right")
    assert [VOCABULARY[at] for at in numbers[:10]] == [
        "[CLS]",
        *["a", "large", "blue", "circle", "in", "the", "top", "right"],
        "[SEP]",
    ]
    assert numbers[10:] == [0] * 6
    assert encode("a zebra", 5)[2] == VOCABULARY.index("[UNK]")
    assert max(len(WORLD.caption(i, c).split()) for i in range(200) for c in (0, 1)) + 2 <= 16


def test_a_world_is_the_same_elsewhere():
    again = pickle.loads(pickle.dumps(WORLD))
    assert (again.scene(7).pixels == WORLD.scene(7).pixels).all()
    assert repr(again) == "Shapes('full', seed=1, size=20000)"
    assert [len(scene.things) for scene in Shapes(size=3)] == [len(Shapes().things(i)) for i in range(3)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Shapes("hard"), "full, easy; got 'hard'"),
        (lambda: WORLD.scene(-1), "from 0 on; got -1"),
        (lambda: WORLD.foil(0, 0, "place"), "colour, shape, size, relation, swap, location"),
        (lambda: WORLD.foil(0, 0, "location"), "says a relation"),
        (lambda: WORLD.foil(0, 1, "swap"), "says a place"),
        (lambda: Shapes("easy").foil(0, 0, "size"), "all objects are large"),
        (lambda: WORLD.question(0, "when"), "where"),
        (lambda: holds("a dog barks", [Thing(0, 0, 0, 0, 0)]), "no caption of this world"),
        (lambda: encode("a " * 20), "more than length=16"),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, words):
    with pytest.raises(InvalidArgument, match=words):
        call()
    assert FOILS[3] == "relation"
