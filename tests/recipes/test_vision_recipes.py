"""Recipes of pictures and texts: controls are what they say, quick forms run, figures are read off as they should be."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")
pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")

from experiments import pictures, retrieving, vision_ablation, vision_flow, vision_relations, vision_vqa
from experiments.recipe import Setting, text

from heedful.multimodal import Scenes, Shapes
from heedful.multimodal.worlds import ANSWERS, QUESTIONS
from pictured import answered


def test_pictures_of_the_test_are_numpys():
    images, scenes = pictures.pictures_asked(3, "cpu")
    world = Shapes(seed=1)
    wanted = (world.scene(2).pixels.transpose(2, 0, 1) - 0.12) / 0.14
    assert np.allclose(images[2].numpy(), wanted, atol=1e-5)
    assert scenes.there.sum(1).tolist() == [len(world.things(i)) for i in range(3)]


def test_vision_models_beside_ours_are_of_the_same_size():
    ours = pictures.new_model({}, "transformer", 0)
    other = pictures.new_model({}, "convolution", 0)
    sizes = [sum(part.numel() for part in model.vision.parameters()) for model in (ours, other)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.25
    images = torch.randn(2, 3, 64, 64)
    assert other.image_tokens(images).shape == ours.image_tokens(images).shape == (2, 64, 128)
    scenes = Scenes.draw(4, torch.Generator().manual_seed(0))
    seen = pictures.ObjectTokens.see(scenes)
    assert seen.shape == (4, 3, 24)
    assert seen.sum(-1).tolist() == (5.0 * scenes.there).tolist()
    assert pictures.new_model({}, "objects", 0).image_tokens(seen).shape == (4, 3, 128)


def test_digits_of_the_test_are_by_other_writers(tmp_path):
    learned, other = pictures.digits(tmp_path)
    assert learned.shape[0] == other.shape[0] == 10
    assert learned.shape[2:] == (8, 8)
    assert learned.min() >= 0
    assert learned.max() == 1
    rows = {tuple(row) for row in learned.flatten(2).flatten(0, 1).tolist()}
    assert sum(tuple(row) in rows for row in other.flatten(2).flatten(0, 1).tolist()) <= 1
    assert torch.equal(pictures.digits(tmp_path)[1], other)


def test_the_step_from_which_a_bar_is_held():
    curve = [{"step": 100 * at, "a": a, "b": 1.0} for at, a in enumerate((0.5, 0.95, 0.8, 0.92, 0.99))]
    assert pictures.reached(curve, ("a", "b")) == 300
    assert pictures.reached(curve, ("a",), 0.995) is None


def test_held_out_pairs_are_one_of_each_colour():
    assert sorted(colour for colour, _ in pictures.HELD_OUT) == list(range(8))
    assert len({shape for _, shape in pictures.HELD_OUT}) == 6


def test_relevance_and_what_can_be_had_without_places():
    generator = torch.Generator().manual_seed(0)
    scenes = Scenes.draw(60, generator)
    captions = scenes.captions(generator)
    right, named = retrieving.relevant(captions, scenes), retrieving.named(captions, scenes)
    assert right.diagonal().all()
    assert (named[right] == 2).all()
    assert right.sum() > 60
    assert torch.equal(right[3], captions.true(scenes[torch.full((60,), 3)]))


def test_questions_of_the_test_have_their_answers():
    image, ids, answer, kind = vision_vqa.asked(40)
    world = Shapes(seed=1)
    from heedful.multimodal.worlds import VOCABULARY

    for row in range(len(ids)):
        question = " ".join(VOCABULARY[number] for number in ids[row].tolist() if number > 2)
        assert answered(question, world.things(int(image[row]))) == ANSWERS[answer[row]]
    assert set(kind.tolist()) == set(range(len(QUESTIONS)))


def test_a_dark_ground_is_the_control_of_the_mean():
    images, _ = pictures.pictures_asked(2, "cpu")
    dark = vision_ablation._dark(images * 0.14 + 0.12)
    assert dark.mean() < -0.6
    assert dark.min() >= -1.001


@pytest.mark.parametrize("module", [vision_relations, vision_flow, vision_vqa])
def test_quick_forms_run(module, tmp_path, monkeypatch):
    """Those that the contract leaves out, with fewer trainings."""
    if module is vision_relations:
        monkeypatch.setattr(vision_relations, "CONTROLS", {vision_relations.WEAK: {"image_positions": "small"}})
    work = tmp_path / module.__name__.split("_")[-1]
    work.mkdir()
    setting = Setting(True, "cpu", work, lambda line: None)
    result = module.run(setting)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    shown = text(module, result)
    assert "|---|" in shown
    assert "nan" not in shown.lower().split()
    assert module.run(setting) == result
