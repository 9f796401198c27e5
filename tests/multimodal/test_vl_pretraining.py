"""Pre-training: it learns to see, says when it stops seeing, goes on after a stop; figures of merit by hand."""

import math
import warnings

import pytest
import torch
from torch.utils.data import TensorDataset

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from heedful import InvalidArgument
from heedful.multimodal import (  # fmt: skip
    Collapse,
    SceneCaptions,
    Scenes,
    Shapes,
    VisualParsingConfig,
    VisualParsingModel,
    VLPretrainer,
    Vocabulary,
    foil_accuracy,
    pair_accuracy,
    pixel_values,
    retrieval,
)
from heedful.multimodal.pretraining import match_loss

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vision_layers": 1, "patch_size": 16}


def small(**more):
    torch.manual_seed(0)
    return VisualParsingModel(VisualParsingConfig(**SIZES | more))


def trained(model, data=None, **options):
    how = {"steps": 3, "batch_size": 8, "device": "cpu", "progress": False, "mfr_tokens": 4}
    return VLPretrainer(model, **how | options).fit(SceneCaptions(preset="easy") if data is None else data)


def test_it_learns_to_see():
    """The small form of the recipe `vision-smoke`: colours, in half a minute."""
    model = small(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    data = SceneCaptions(preset="easy", rivals="one", length=10, weights=(1, 0, 0, 0))
    trainer = trained(model, data, steps=450, batch_size=32, lr=2e-3, mfr_after=0.6)
    world = Shapes("easy", seed=1)
    pictures = torch.stack([torch.from_numpy(world.scene(i).pixels).permute(2, 0, 1) for i in range(200)])
    scenes = Scenes.of([world.things(i) for i in range(200)])
    found = foil_accuracy(
        model, pixel_values(pictures), scenes, kinds=("colour",), weights={"colour": (1, 0, 0, 0)}, counts=(1, 4, 4)
    )
    assert found["colour"] > 0.7
    assert trainer.losses_["itm"] < 0.65
    assert trainer.losses_["mlm"] < 0.8
    assert trainer.spread_ > 0.2


@pytest.mark.parametrize("target", ["features", "ema", "pixels"])
@pytest.mark.parametrize("mask", ["attention", "random"])
def test_every_target_and_mask_runs(target, mask):
    model = small(mfr_target=target)
    before = {name: part.clone() for name, part in model.named_parameters()}
    trainer = trained(model, mfr_mask=mask)
    assert all(math.isfinite(value) for value in trainer.losses_.values())
    assert trainer.losses_["mfr"] == pytest.approx(1, abs=0.1)
    assert all(not torch.equal(part, before[name]) for name, part in model.named_parameters())
    assert not model.training


@pytest.mark.parametrize("target", ["features", "ema", "pixels"])
def test_in_sixteen_bits(target):
    trainer = trained(small(mfr_target=target), precision="bfloat16")
    assert all(math.isfinite(value) for value in trainer.losses_.values())
    assert trainer.losses_["mfr"] == pytest.approx(1, abs=0.1)
    assert {part.dtype for part in trainer.model.parameters()} == {torch.float32}


def test_a_task_alone():
    for task in ("mlm", "itm", "mfr"):
        trainer = trained(small(), tasks=(task,))
        others = {name: value for name, value in trainer.losses_.items() if name != task}
        assert set(others.values()) == {0.0}
        assert trainer.losses_[task] > 0
    trainer = trained(small(), mfr_after=1.0)
    assert trainer.losses_["mfr"] == 0


def test_it_says_when_it_stops_seeing():
    model = small()
    with torch.no_grad():
        model.vision.patch.weight.zero_()
        model.vision.positions.zero_()
    with pytest.warns(Collapse, match="sees nothing.*mfr_target"):
        assert trained(model, steps=1).spread_ < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error", Collapse)
        assert trained(small(), steps=1).spread_ > 0.05


def test_a_stopped_training_goes_on(tmp_path):
    class Stop(Exception):
        pass

    def stop(done):
        if done == 2:
            raise Stop

    def fit(model, **options):
        how = {"steps": 6, "batch_size": 4, "device": "cpu", "progress": False, "mfr_tokens": 4}
        return VLPretrainer(model, **how).fit(SceneCaptions(preset="easy"), rounds=3, **options)

    whole, part = small(), small()
    rounds = []
    fit(whole, after=rounds.append)
    assert rounds == [1, 2, 3]
    with pytest.raises(Stop):
        fit(part, checkpoint=tmp_path / "state.ckpt", after=stop)
    part = small()
    trainer = fit(part, checkpoint=tmp_path / "state.ckpt")
    assert trainer.training_.resumed >= 1
    for one, other in zip(whole.parameters(), part.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_worlds_and_datasets_are_trained_on():
    trained(small(), Shapes("easy", size=10))
    ids = torch.randint(5, 49, (10, 6))
    ids[:, 0] = 1
    trainer = trained(small(), TensorDataset(torch.randn(10, 3, 64, 64), ids), steps=3, batch_size=4)
    assert len(trainer.training_.epochs) == 2
    several = torch.stack((ids, ids.roll(1, 0), ids.roll(2, 0)), 1)
    away = torch.zeros(10, 3, dtype=torch.bool)
    trained(small(), TensorDataset(torch.randn(10, 3, 64, 64), several, away), steps=1, batch_size=4)


def test_the_loss_of_matching_by_hand():
    scores = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]], dtype=torch.float64)
    away = torch.tensor([[False, False, True], [False, False, False]])
    rivals = [math.log1p(math.exp(score)) for score in (-2.0, 3.0, 1.0)]
    each = ((math.log1p(math.exp(-1.0)) + math.log(2)) / 2 + sum(rivals) / 3) / 2
    among = (math.log(1 + math.exp(-3.0)) + math.log(1 + math.exp(3.0) + math.e)) / 2
    assert match_loss(scores, away).item() == pytest.approx((each + among) / 2)
    scores[0, 2] = 1e30
    assert match_loss(scores, away).item() == pytest.approx((each + among) / 2)


def test_rivals_are_false_and_of_the_kinds_they_should_be():
    generator = torch.Generator().manual_seed(0)
    pairs = [(0, 0), (1, 1), (2, 2)]
    for rivals, count in (("set", 4), ("one", 2)):
        data = SceneCaptions(held_out=pairs, rivals=rivals)
        scenes = data.draw(400, generator)
        texts, away = data.rivals(scenes, scenes.captions(generator), generator)
        rows = torch.arange(400).repeat_interleave(count)
        false = ~texts.true(scenes[rows]).view(400, count)
        assert not false[:, 0].any()
        assert false[:, 1:][~away[:, 1:]].all()
        assert not away[:, 0].any()
        named = {(n[2], n[3]) for n in texts.numbers[~away.flatten()].tolist()}
        assert not named & set(pairs)
        assert away[:, 1:].float().mean() < 0.2
    kinds = texts.kind.view(400, 2)
    same = (texts.numbers.view(400, 2, -1)[:, 0] == texts.numbers.view(400, 2, -1)[:, 1]).sum(1)
    assert 0.3 < ((same >= 11) & (kinds[:, 0] == kinds[:, 1])).float().mean() < 0.8


def test_batches_are_the_same_again():
    data = SceneCaptions(preset="easy")
    first, again = (data.stream(12, seed, torch.device("cpu")).collate([0, 1, 2, 3]) for seed in (5, 5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    stream = data.stream(12, 5, torch.device("cpu"))
    assert not torch.equal(stream.collate([4, 5, 6, 7])[0], first[0])
    assert len(stream) == len(list(stream)) == 12


def test_batches_drawn_ahead_are_parts_of_one_draw():
    data = SceneCaptions(preset="easy")
    whole = data.stream(12, 5, torch.device("cpu")).collate(list(range(12)))
    stream = data.stream(12, 5, torch.device("cpu"))
    stream.ahead = 3
    parts = [stream.collate(list(range(at, at + 4))) for at in (0, 4, 8)]
    assert all(torch.equal(torch.cat(part), one) for part, one in zip(zip(*parts, strict=True), whole, strict=True))
    # A smaller last batch, and a new epoch, are drawn anew.
    stream.collate([0, 1, 2, 3])
    assert len(stream.collate([4, 5])[0]) == 2
    first = stream.collate([0, 1, 2, 3])
    stream.set_epoch(1)
    assert not torch.equal(stream.collate([0, 1, 2, 3])[0], first[0])
    stream.set_epoch(0)
    assert torch.equal(stream.collate([0, 1, 2, 3])[0], first[0])


def test_figures_of_merit_by_hand():
    assert pair_accuracy(torch.tensor([3.0, 1.0, 1.0, 0.0]), torch.tensor([2.0, 1.0, 2.0, -1.0])) == 0.625
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.8, 0.7, 0.6]])
    right = torch.tensor([[True, False, False], [False, True, False]])
    found = retrieval(scores, right, at=(1, 2))
    # The third text is true of no picture.
    assert found == {
        "text to image R@1": 1.0,
        "text to image R@2": 1.0,
        "image to text R@1": 0.5,
        "image to text R@2": 1.0,
    }


class Knowing(VisualParsingModel):
    """Scores by a formula instead of a network: the word for the first colour, less that of the first object of its picture."""

    def image_tokens(self, pixel_values, attention=False):
        return pixel_values

    def fuse(self, image_tokens, input_ids, attention_mask=None, hidden=None):
        return -(input_ids[:, 3] - image_tokens).abs()[:, None], None

    def score(self, states):
        return states[:, 0].float()


def test_foils_are_told_from_captions_by_who_knows():
    scenes = Scenes.draw(400, torch.Generator().manual_seed(0))
    colours = scenes.things[:, 0, 1] + Vocabulary().number("red")
    about = torch.zeros_like(scenes.there)
    about[:, 0] = True
    model = Knowing(VisualParsingConfig(**SIZES))
    found = foil_accuracy(model, colours, scenes, about=about)
    # It knows one colour: all else is a tie.
    assert found["size"] == found["shape"] == found["relation"] == found["location"] == 0.5
    assert 0.7 < found["colour"] < 1
    located = foil_accuracy(model, colours, scenes, about=about, kinds=("colour",), weights={"colour": (1, 0, 0, 0)})
    assert located["colour"] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ("mlm", "clip")}, "some of mlm, itm, mfr"),
        ({"tasks": ()}, "some of mlm, itm, mfr"),
        ({"mfr_mask": "none"}, "attention, random"),
        ({"mfr_tokens": 17}, "from 1 to 16; got 17"),
        ({"mlm_probability": 2}, "mlm_probability"),
        ({"steps": 0}, "steps"),
    ],
)
def test_refused_before_it_starts(options, words):
    with pytest.raises(InvalidArgument, match=words):
        VLPretrainer(small(), **options)
    with pytest.raises(InvalidArgument, match="must be a VisualParsingModel"):
        VLPretrainer(torch.nn.Linear(2, 3))
