"""The model of pictures and texts: what it computes, what it must not see, how it is saved, its heads."""

import math

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import AutoConfig, AutoModel, AutoProcessor, SwinConfig, SwinModel, ViTConfig, ViTModel

from heedful import InvalidArgument, Unsupported, lens
from heedful.multimodal import (  # fmt: skip
    Shapes,
    VisualParsingClassifier,
    VisualParsingConfig,
    VisualParsingModel,
    VisualParsingProcessor,
    random_mask_tokens,
)
from heedful.multimodal.network import PatchEncoder, line_positions, patches, plane_positions

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "vision_layers": 2, "patch_size": 16}


@pytest.fixture
def model():
    return VisualParsingModel(VisualParsingConfig(**SIZES)).eval()


@pytest.fixture
def inputs():
    ids = torch.randint(5, 49, (5, 11))
    ids[:, 0], ids[:, 7:] = 1, 0
    ids[3, 7:] = 9
    return {"pixel_values": torch.randn(5, 3, 64, 64), "input_ids": ids, "attention_mask": (ids != 0).long()}


def by_hand(model, pixels, ids, there):
    """The model in plain torch, one sequence at a time."""

    def norm(layer, x):
        return nn.functional.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, layer.eps)

    def block(layer, x):
        y = norm(layer.norm1, x)
        q, k, v = (y @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias).chunk(3, -1)
        heads = []
        for q_h, k_h, v_h in zip(*(part.split(part.shape[-1] // 3, -1) for part in (q, k, v)), strict=True):
            heads.append((q_h @ k_h.T / math.sqrt(q_h.shape[-1])).softmax(-1) @ v_h)
        x = x + torch.cat(heads, -1) @ layer.self_attn.out_proj.weight.T + layer.self_attn.out_proj.bias
        inner = nn.functional.gelu(norm(layer.norm2, x) @ layer.linear1.weight.T + layer.linear1.bias)
        return x + inner @ layer.linear2.weight.T + layer.linear2.bias

    size, vision = model.config.patch_size, model.vision
    cut = [pixels[:, a : a + size, b : b + size].flatten() for a in range(0, 64, size) for b in range(0, 64, size)]
    x = torch.stack(cut) @ vision.patch.weight.T + vision.patch.bias + vision.positions
    for layer in vision.encoder.layers:
        x = block(layer, x)
    x = norm(vision.encoder.last_norm, x)
    image = x @ model.image_map.weight.T + model.image_map.bias + model.image_positions + model.kinds[1]
    text = (model.words.weight[ids] + model.text_positions[: len(ids)] + model.kinds[0])[there]
    x = torch.cat((norm(model.text_norm, text), norm(model.image_norm, image)))
    for layer in model.fusion.layers:
        x = block(layer, x)
    return norm(model.fusion.last_norm, x)


def test_it_computes_what_it_says(model, inputs):
    model.double()
    pixels = inputs["pixel_values"].double()
    out = model(**inputs | {"pixel_values": pixels})
    for row in range(5):
        there = inputs["attention_mask"][row].bool()
        wanted = by_hand(model, pixels[row], inputs["input_ids"][row], there)
        found = out.last_hidden_state[row][out.valid[row]]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    logits = out.last_hidden_state[:, 0] @ model.itm_head.weight.T + model.itm_head.bias
    torch.testing.assert_close(out.itm_logits, logits)


def test_padding_changes_nothing_whatever_it_holds(model, inputs):
    ids = inputs["input_ids"][:3, :7]
    whole = model(inputs["pixel_values"][:3], ids)
    padded = torch.cat((ids, torch.full((3, 6), 17)), 1)
    mask = torch.cat((torch.ones(3, 7), torch.zeros(3, 6)), 1)
    more = model(inputs["pixel_values"][:3], padded, mask)
    torch.testing.assert_close(more.itm_logits, whole.itm_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(more.last_hidden_state[:, 13:], whole.last_hidden_state[:, 7:], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        model.words.weight[17] = 1e30
    torch.testing.assert_close(
        model(inputs["pixel_values"][:3], padded, mask).itm_logits, whole.itm_logits, atol=1e-5, rtol=1e-5
    )


def test_hidden_image_tokens_are_not_seen(model, inputs):
    """Their pixels reach fusion by the vision model's other tokens alone; with no mixing before, not at all."""
    features = model.image_tokens(inputs["pixel_values"])
    hidden = random_mask_tokens(5, 16, 4)
    states, _ = model.fuse(features, inputs["input_ids"], inputs["attention_mask"], hidden)
    other = torch.where(hidden[..., None], torch.randn_like(features), features)
    again, _ = model.fuse(other, inputs["input_ids"], inputs["attention_mask"], hidden)
    assert torch.equal(states, again)
    seen, _ = model.fuse(other, inputs["input_ids"], inputs["attention_mask"])
    assert (seen - states).abs().max() > 1e-3


def test_losses_of_a_model_that_knows_nothing():
    torch.manual_seed(3)
    model = VisualParsingModel(VisualParsingConfig(**SIZES | {"hidden_size": 48})).eval()
    ids = torch.randint(5, 49, (64, 9))
    ids[:, 0] = 1
    matched = torch.arange(64) % 2
    out = model(torch.randn(64, 3, 64, 64), ids, labels=ids, matched=matched, mfr=random_mask_tokens(64, 16, 5))
    assert abs(out.itm_loss.item() - math.log(2)) < 0.15
    assert abs(out.mlm_loss.item() - math.log(49)) < 0.4
    assert abs(out.mfr_loss.item() - 1) < 1e-3
    assert out.loss.item() == pytest.approx((out.itm_loss + out.mlm_loss + out.mfr_loss).item(), rel=1e-5)


@pytest.mark.parametrize("target", ["features", "pixels"])
def test_targets_have_no_gradient_and_unit_variance(target, inputs):
    model = VisualParsingModel(VisualParsingConfig(**SIZES, mfr_target=target))
    features = model.image_tokens(inputs["pixel_values"])
    wanted = model.targets(inputs["pixel_values"], features)
    assert wanted.shape == (5, 16, 768 if target == "pixels" else 24)
    assert not wanted.requires_grad
    torch.testing.assert_close(wanted.square().mean(-1), torch.ones(5, 16), atol=1e-3, rtol=1e-3)
    # What is left out of the mask does not count.
    hidden = random_mask_tokens(5, 16, 3)
    poisoned = torch.where(hidden[..., None], wanted, torch.full_like(wanted, torch.nan))
    loss = model(**inputs, mfr=hidden, mfr_targets=wanted).mfr_loss
    same = model(**inputs, mfr=hidden, mfr_targets=poisoned).mfr_loss
    torch.testing.assert_close(same, loss)
    same.backward()
    assert 0 < model.mfr_head[2].bias.grad.abs().sum() < torch.inf


def test_every_parameter_learns(model, inputs):
    nn.init.normal_(model.mfr_head[2].weight)
    out = model(
        **inputs, labels=inputs["input_ids"], matched=torch.tensor([0, 1, 0, 1, 1]), mfr=random_mask_tokens(5, 16, 4)
    )
    out.loss.backward()
    silent = [name for name, part in model.named_parameters() if part.grad is None or not part.grad.abs().sum() > 0]
    assert silent == []


def test_patches_and_positions_are_in_the_same_order():
    pixels = torch.arange(64.0).view(1, 1, 8, 8).repeat_interleave(3, 1)
    cut = patches(pixels, 4)
    assert cut.shape == (1, 4, 48)
    assert cut[0, 1, :4].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert cut[0, 2, 0] == 32.0
    places = plane_positions(3, 5, 16)
    line = line_positions(5, 8)
    assert torch.equal(places[7], torch.cat((line[1], line[2])))
    assert places.square().mean().item() == pytest.approx(1, rel=1e-5)
    assert places[:, 0].tolist()[5] == pytest.approx(math.sqrt(2) * math.sin(1), rel=1e-5)


def test_attention_of_the_last_layer(model):
    pixels = torch.randn(2, 3, 64, 64)
    tokens, weights = model.image_tokens(pixels, attention=True)
    torch.testing.assert_close(tokens, model.image_tokens(pixels))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 16))
    assert not weights.requires_grad
    seen = lens.observe(model.vision, pixels)
    torch.testing.assert_close(weights, seen[-1].weights.mean(1), atol=1e-5, rtol=1e-4)


def test_saved_and_loaded(model, inputs, tmp_path):
    model.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, VisualParsingModel)
    assert AutoConfig.from_pretrained(tmp_path).image_tokens == 16
    assert torch.equal(again(**inputs).mlm_logits, model(**inputs).mlm_logits)
    answering = VisualParsingClassifier.from_pretrained(tmp_path, num_labels=7)
    assert torch.equal(answering.parsing.words.weight, model.words.weight)
    assert answering(**inputs).itm_logits.shape == (5, 7)
    assert 0.01 < answering.classifier[0].weight.std() < 0.5
    # What a file lacks starts as in a new model.
    torch.manual_seed(0)
    assert answering.classifier[2].weight.isfinite().all()


def test_compiled_it_gives_the_same(model, inputs):
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).itm_logits, model(**inputs).itm_logits, atol=1e-4, rtol=1e-4)


def test_heads(inputs):
    config = VisualParsingConfig(**SIZES, num_labels=3)
    entailing = VisualParsingClassifier(config).eval()
    out = entailing(**inputs, labels=torch.tensor([0, 1, 2, 0, 1]))
    assert out.itm_logits.shape == (5, 3)
    assert abs(out.loss.item() - math.log(3)) < 0.4
    two = VisualParsingClassifier(VisualParsingConfig(**SIZES, num_labels=2, images=2)).eval()
    pixels = torch.randn(5, 2, 3, 64, 64)
    found = two(pixels, inputs["input_ids"], inputs["attention_mask"]).itm_logits
    states = [two.parsing.fuse(two.parsing.image_tokens(pixels[:, at]), inputs["input_ids"])[0][:, 0] for at in (0, 1)]
    torch.testing.assert_close(found, two.classifier(torch.cat(states, 1)))
    with torch.no_grad():
        swapped = two(pixels.flip(1), inputs["input_ids"]).itm_logits
    assert (swapped - found).abs().max() > 1e-4


def test_every_picture_with_every_text(model, inputs):
    found = model.similarities(inputs["pixel_values"][:3], inputs["input_ids"], inputs["attention_mask"], batch_size=4)
    assert found.shape == (3, 5)
    for image in range(3):
        for text in range(5):
            pixels, ids = inputs["pixel_values"][image : image + 1], inputs["input_ids"][text : text + 1]
            no, yes = model(pixels, ids).itm_logits[0].tolist()
            assert found[image, text].item() == pytest.approx(yes - no, abs=1e-5)


def test_another_vision_model(inputs, tmp_path):
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    vision = ViTModel(
        ViTConfig(**sizes, image_size=64, patch_size=16, attn_implementation="eager"), add_pooling_layer=False
    )
    config = VisualParsingConfig(**SIZES, image_tokens=17, vision_width=12)
    model = VisualParsingModel(config, vision).eval()
    assert model(**inputs).last_hidden_state.shape == (5, 11 + 17, 24)
    tokens, weights = model.image_tokens(inputs["pixel_values"], attention=True)
    assert tokens.shape == (5, 17, 12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, 17))
    model.save_pretrained(tmp_path)
    fresh = ViTModel(vision.config, add_pooling_layer=False)
    again = VisualParsingModel.from_pretrained(tmp_path, fresh)
    torch.testing.assert_close(again(**inputs).itm_logits, model(**inputs).itm_logits)
    blind = VisualParsingModel(
        config, nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 17 * 12), nn.Unflatten(1, (17, 12)))
    )
    assert blind(**inputs).itm_logits.shape == (5, 2)
    with pytest.raises(Unsupported, match="gives no weights between all 17 image tokens"):
        blind.image_tokens(inputs["pixel_values"], attention=True)


@pytest.mark.parametrize("window", [8, 4])
def test_swin_sees_where_its_last_stage_is_one_window(window, inputs):
    """A map of 8 x 8 tokens in its last stage: with windows of 8 attention there is global, with those of 4 it is not."""
    sizes = {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 3], "window_size": window, "image_size": 64}
    vision = SwinModel(SwinConfig(**sizes, patch_size=4, attn_implementation="eager"), add_pooling_layer=False)
    model = VisualParsingModel(VisualParsingConfig(**SIZES, image_tokens=64, vision_width=24), vision).eval()
    assert model(**inputs).last_hidden_state.shape == (5, 11 + 64, 24)
    if window == 8:
        tokens, weights = model.image_tokens(inputs["pixel_values"], attention=True)
        torch.testing.assert_close(tokens, model.image_tokens(inputs["pixel_values"]))
        torch.testing.assert_close(weights.sum(-1), torch.ones(5, 64))
    else:
        with pytest.raises(Unsupported, match="SwinModel gives no weights between all 64"):
            model.image_tokens(inputs["pixel_values"], attention=True)


def test_flow_knows_its_modalities(model, inputs):
    found = lens.flow(model, inputs)
    assert found.names == ("text", "image")
    assert len(found.per_layer) == 2
    maps = [layer.weights for layer in lens.observe(model, inputs) if layer.weights.shape[-1] == 27]
    assert len(maps) == 2
    modality, valid = model(**inputs).modality, model(**inputs).valid
    for at, weights in enumerate(maps):
        crossing = (modality[:, :, None] != modality[:, None]) & valid[:, :, None] & valid[:, None]
        real = (weights * valid[:, None, :, None]).sum((-2, -1))
        share = (weights * crossing[:, None]).sum((-2, -1)) / real
        assert found.per_layer[at] == pytest.approx(share.mean().item(), abs=1e-5)


def test_processor(tmp_path):
    world = Shapes(size=3)
    processor = VisualParsingProcessor.of()
    model = VisualParsingModel(VisualParsingConfig(**SIZES)).eval()
    texts = [world.caption(i, 1) for i in range(3)]
    inputs = processor(images=[scene.bytes for scene in world], text=texts)
    assert inputs["pixel_values"].shape == (3, 3, 64, 64)
    wanted = (torch.from_numpy(world.scene(1).pixels).permute(2, 0, 1) - 0.12) / 0.14
    assert (inputs["pixel_values"][1] - wanted).abs().max() < 0.02
    assert inputs["input_ids"].shape == (3, 10)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(again, VisualParsingProcessor)
    other = again(images=[scene.bytes for scene in world], text=texts)
    assert torch.equal(other["input_ids"], inputs["input_ids"])
    assert torch.equal(other["pixel_values"], inputs["pixel_values"])
    assert model(**inputs).itm_logits.shape == (3, 2)
    # Grey, another size, channels first, other numbers.
    images = processor.image_processor
    assert images(np.zeros((32, 48), dtype=np.uint8))["pixel_values"].shape == (1, 3, 64, 64)
    assert images(torch.rand(3, 20, 20))["pixel_values"].shape == (1, 3, 64, 64)
    small = torch.full((2, 16, 16, 3), 0.5)
    torch.testing.assert_close(images(small)["pixel_values"], torch.full((2, 3, 64, 64), (0.5 - 0.12) / 0.14))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: model(torch.rand(1, 3, 64, 64), torch.ones(1, 30, dtype=torch.long)), "up to 24 tokens"),
        (lambda model: model(torch.rand(1, 3, 60, 64), torch.ones(1, 3, dtype=torch.long)), "whole patches of 16"),
        (lambda model: model(torch.rand(1, 3, 32, 32), torch.ones(1, 3, dtype=torch.long)), "64 x 64 pixels"),
        (lambda model: VisualParsingConfig(text_positions="large"), "sincos, small, none"),
        (lambda model: VisualParsingConfig(mfr_target="clouds"), "features, ema, pixels"),
        (lambda model: VisualParsingConfig(images=3), "from 1 to 2"),
        (lambda model: PatchEncoder(64, 7), "does not divide"),
        (lambda model: VisualParsingProcessor.of()(), "give images=, text= or both"),
        (lambda model: VisualParsingProcessor.of(("a", "b")), "must begin with"),
        (lambda model: VisualParsingProcessor.of()(images=np.full((8, 8, 3), 200.0)), "numbers of 0..1"),
        (lambda model: VisualParsingProcessor.of()(images=np.zeros((8, 8, 5))), "height, width, 3"),
    ],
)
def test_what_cannot_be_is_refused(model, call, words):
    with pytest.raises(InvalidArgument, match=words):
        call(model)
