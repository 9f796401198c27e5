"""Pictures and texts on a CUDA device: the same scenes, training, and a compiled model."""

import math

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from heedful import lens
from heedful.multimodal import (  # fmt: skip
    SceneCaptions,
    Scenes,
    VisualParsingConfig,
    VisualParsingModel,
    VLPretrainer,
    foil_accuracy,
    pixel_values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run where there is one"),
]


def moved(scenes, device):
    return Scenes(*(part.to(device) for part in (scenes.things, scenes.there, scenes.jitter, scenes.background)))


def test_scenes_and_truth_are_the_same():
    scenes = Scenes.draw(200, torch.Generator().manual_seed(0), objects=(2, 5))
    captions = scenes.captions(torch.Generator().manual_seed(1), (1, 1, 1, 1))
    there = moved(scenes, "cuda")
    assert torch.equal(there.render(noise=0).cpu(), scenes.render(noise=0))
    tokens = there.captions(torch.Generator("cuda").manual_seed(1)).tokens()
    assert tokens.device.type == "cuda"
    assert type(captions)(captions.numbers.cuda()).true(there).all()


@pytest.mark.parametrize("target", ["features", "ema", "pixels"])
def test_it_trains(target):
    torch.manual_seed(0)
    model = VisualParsingModel(VisualParsingConfig(mfr_target=target))
    trainer = VLPretrainer(model, steps=30, batch_size=64, progress=False).fit(SceneCaptions())
    assert all(math.isfinite(loss) for loss in trainer.losses_.values())
    assert trainer.losses_["mlm"] < 3.8
    scenes = Scenes.draw(100, torch.Generator("cuda").manual_seed(0))
    images = pixel_values(scenes.render())
    found = foil_accuracy(model.cuda(), images, scenes)
    assert set(found) == {"colour", "shape", "size", "relation", "swap", "location"}
    flow = lens.flow(model, {"pixel_values": images, "input_ids": scenes.captions().tokens()})
    assert len(flow.per_layer) == 4


def test_compiled_it_gives_the_same():
    model = VisualParsingModel(VisualParsingConfig()).cuda().eval()
    scenes = Scenes.draw(16, torch.Generator("cuda").manual_seed(0))
    images, ids = pixel_values(scenes.render()), scenes.captions().tokens()
    with torch.no_grad():
        wanted = model(images, ids)
        found = torch.compile(model, fullgraph=True)(images, ids)
    torch.testing.assert_close(found.itm_logits, wanted.itm_logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.mlm_logits, wanted.mlm_logits, atol=1e-4, rtol=1e-4)
