"""Layers left out in turn: what the output loses, and that the model is left alone."""

import pytest
import torch
from torch import nn

from heedful import InvalidArgument, Unsupported
from heedful.lens.depth import skip_layers

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
SIZES = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 17}
T5 = {"vocab_size": 31, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3}
IDS = torch.arange(14).view(2, 7)


def models():
    yield hf.BertModel(hf.BertConfig(**SIZES)), {"input_ids": IDS}, "encoder.layer.{}", 3
    yield hf.LlamaModel(hf.LlamaConfig(**SIZES)), {"input_ids": IDS}, "layers.{}", 3
    gpt2 = hf.GPT2Config(vocab_size=31, n_embd=12, n_layer=3, n_head=3)
    yield hf.GPT2Model(gpt2), {"input_ids": IDS}, "h.{}", 3
    yield hf.T5EncoderModel(hf.T5Config(**T5)), {"input_ids": IDS}, "encoder.block.{}", 2


@pytest.mark.parametrize("case", list(models()), ids=lambda case: type(case[0]).__name__)
@torch.no_grad()
def test_a_layer_left_out_is_a_model_without_it(case):
    model, inputs, name, count = case
    model.eval()
    whole = model(**inputs).last_hidden_state
    used = skip_layers(model, inputs)
    assert [one.name for one in used.layers] == [name.format(at) for at in range(count)]
    assert torch.equal(model(**inputs).last_hidden_state, whole)
    assert not any(module._forward_hooks for module in model.modules())
    last = model.get_submodule(name.format(count - 1).rpartition(".")[0])
    kept = last[count - 1]
    del last[count - 1]
    expected = (model(**inputs).last_hidden_state - whole).norm() / whole.norm()
    last.append(kept)
    assert used.layers[-1].change == pytest.approx(float(expected), rel=1e-5)
    assert used.layers[-1].change > 1e-3


def test_the_loss_rises_where_labels_are_given():
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=31, n_embd=12, n_layer=2, n_head=3)).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    inputs = {"input_ids": IDS, "labels": IDS}
    for _ in range(30):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    used = skip_layers(model.eval(), inputs)
    assert used.loss == pytest.approx(model(**inputs).loss.item(), rel=1e-5)
    assert max(one.loss_rise for one in used.layers) > 0
    assert "loss rises by" in str(used)
    assert used.to_dict()["layers"][1]["layer"] == 1


def test_layers_are_left_in_after_an_exception():
    model = hf.BertModel(hf.BertConfig(**SIZES)).eval()
    with pytest.raises(IndexError):
        skip_layers(model, {"input_ids": IDS + 30})
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(Unsupported, match="no list of layers"):
        skip_layers(nn.Linear(2, 2), {"input": torch.randn(1, 2)})
    with pytest.raises(InvalidArgument, match="inputs must be a mapping"):
        skip_layers(model, IDS)


def test_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    model = hf.BertModel(hf.BertConfig(**SIZES)).eval()
    assert len(skip_layers(model, {"input_ids": IDS}).plot().patches) == 3
    pyplot.close("all")
