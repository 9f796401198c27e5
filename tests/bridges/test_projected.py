"""Attention in a model's own code, seen at its linear maps: the weights are those that the model returns."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import seeing
from heedful import Unsupported
from heedful.lens import observe


def returned(name, model, inputs):
    """Every map that the model itself returns, in the order of execution."""
    torch.manual_seed(1)
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    if name != "lxmert":
        return dict(enumerate(out.attentions))
    # Of the crossing maps, those from language to vision alone; places as they run.
    places = {0: out.language_attentions[0], 1: out.vision_attentions[0]}
    return places | {2 + 4 * at: weights for at, weights in enumerate(out.cross_encoder_attentions)}


@pytest.mark.parametrize("name", ["vilt", "visual_bert", "lxmert"])
def test_weights_are_those_that_the_model_returns(name):
    model, inputs = seeing.made(name)
    torch.manual_seed(1)  # ViLT draws the order of its patches
    seen = observe(model, inputs)
    assert seen.unseen == ()
    theirs = returned(name, model, inputs)
    assert len(theirs) == (4 if name == "lxmert" else len(seen))
    for at, weights in theirs.items():
        assert weights.std() > 0.05
        torch.testing.assert_close(seen[at].weights, weights, rtol=0, atol=2e-6)


def test_cross_attention_of_blip():
    model, inputs = seeing.made("blip")
    maps = []
    layer = model.text_encoder.encoder.layer[1].crossattention.self
    hook = layer.register_forward_hook(lambda module, args, output: maps.append(output[1]))
    seen = observe(model, inputs)
    hook.remove()
    assert [record.kind for record in seen] == ["self", "cross", "self", "cross"]
    torch.testing.assert_close(seen[3].weights, maps[0], rtol=0, atol=2e-6)


class Own(nn.Module):
    """Attention by hand; its parts can be changed."""

    def __init__(self, act=torch.softmax, scale=None, rate=0.0):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(10, 10) for _ in range(3))
        self.out_proj = nn.Linear(10, 7)
        self.num_heads, self.act, self.rate = 2, act, rate
        self.scaling = 1 / math.sqrt(5) if scale is None else scale

    def forward(self, x, attention_mask=None):
        q, k, v = (part(x).unflatten(-1, (2, 5)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT * self.scaling
        scores = scores if attention_mask is None else scores + attention_mask
        weights = nn.functional.dropout(self.act(scores, -1), self.rate, self.training)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def test_its_own_scale_and_a_map_of_outputs_inside():
    torch.manual_seed(0)
    model, x = Own(scale=0.9).eval(), 2 * torch.randn(2, 11, 10)
    mask = torch.zeros(2, 1, 1, 11)
    mask[1, ..., 7:] = torch.finfo(torch.float32).min
    # What is hidden must not show, whatever it is.
    x[1, 7:] = 1e30
    record = observe(model, {"x": x, "attention_mask": mask})[0]
    assert record.weights[1, :, :7, 7:].abs().max() == 0
    q, k = (part(x).unflatten(-1, (2, 5)).transpose(1, 2) for part in (model.q_proj, model.k_proj))
    wanted = (q[0] @ k[0].mT * 0.9).softmax(-1)
    torch.testing.assert_close(record.weights[0], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("other", ["relu", "dropout"])
def test_what_is_no_softmax_of_its_maps_is_not_told(other):
    torch.manual_seed(0)
    model = Own(act=lambda scores, axis: scores.relu() / 11) if other == "relu" else Own(rate=0.3)
    model.train(other == "dropout")
    with pytest.raises(Unsupported, match="no call of attention that can be seen"):
        observe(model, torch.randn(2, 11, 10))
