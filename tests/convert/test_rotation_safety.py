"""rotate_ on models that are not what they seem: quantised, sharing parts, hooked. Right, or refused and untouched."""

import numpy as np
import pytest
import torch
from torch import nn

from heedful import InvalidArgument, Unsupported
from heedful.convert import rotate_
from heedful.lens.symmetry.moves import haar
from heedful.nn import Block, KnowledgeAttention
from turned import encoder_layer, logits, made

F64 = {"dtype": torch.float64}


class Quantised(nn.Module):
    """A linear layer whose weight is whole numbers in a buffer."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("qweight", (linear.weight.detach() * 1000).round().to(torch.int16))

    def forward(self, x):
        return x @ (self.qweight.to(x) / 1000).T


def snapshot(model):
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(t), t.detach().clone()) for name, t in tensors}


def check_untouched(model, before):
    now = snapshot(model)
    assert now.keys() == before.keys()
    assert all(now[name][0] == at and torch.equal(now[name][1], value) for name, (at, value) in before.items())


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize(
    "place", ["model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj", "lm_head", "model.embed_tokens"]
)
def test_weights_that_are_no_parameters_are_refused(place, gains):
    model = made("llama", gains)
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, Quantised(model.get_submodule(place)))
    before = snapshot(model)
    with pytest.raises(Unsupported, match=rf"{place}.*rotate before quantising"):
        rotate_(model)
    check_untouched(model, before)


class Head(nn.Module):
    """A head with a weight, which may do anything with it."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return x @ self.weight.T


def test_a_head_of_another_kind_is_refused():
    model = made("llama")
    model.lm_head = Head(model.lm_head)
    before = snapshot(model)
    with pytest.raises(Unsupported, match=r"lm_head is Head, expected nn\.Linear"):
        rotate_(model)
    check_untouched(model, before)


def test_a_quantised_half_of_a_layer_is_refused():
    layer = encoder_layer()
    layer.linear2 = Quantised(layer.linear2)
    before = snapshot(layer)
    with pytest.raises(Unsupported, match=r"linear2\.weight is no parameter"):
        rotate_(layer)
    check_untouched(layer, before)


@pytest.mark.parametrize("name", ["llama", "llama with a tied head"])
def test_outputs_that_move_bring_everything_back(name):
    """A hook that adds a fixed vector cannot be seen in the parameters; the outputs show it."""
    model = made(name)
    model.model.layers[0].register_forward_hook(lambda m, i, out: out + torch.arange(24.0, **F64))
    before, out = snapshot(model), logits(model)
    settings, ties = model.config.to_dict(), dict(model.all_tied_weights_keys)
    with pytest.raises(Unsupported, match=r"outputs would move by .* All weights are as they were"):
        rotate_(model)
    check_untouched(model, before)
    assert torch.equal(logits(model), out)
    assert (model.config.to_dict(), model.all_tied_weights_keys) == (settings, ties)
    layer = encoder_layer()
    layer.self_attn.register_forward_hook(lambda m, i, out: (out[0] + torch.arange(8.0, **F64), None))
    before = snapshot(layer)
    with pytest.raises(Unsupported, match="outputs would move by"):
        rotate_(layer)
    check_untouched(layer, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_let_pass(dtype):
    for name in ("llama", "qwen2 that classifies"):
        model = made(name).to(dtype)
        assert rotate_(model).checked <= 0.1
    layer = Block(8, 2, norm="rms").to(dtype)
    assert rotate_(layer).checked <= 0.1


def test_a_model_that_does_not_run_is_turned_with_a_warning():
    model = made("llama")
    model.forward = None  # as with attention that the device has not
    with pytest.warns(UserWarning, match="its outputs were not compared"):
        assert rotate_(model).checked is None


def test_layers_that_want_knowledge_are_compared():
    layer = KnowledgeAttention(8, 2, coordinates="knowledge", **F64)
    assert rotate_(layer).checked < 1e-12


def test_vectors_of_a_model_without_head_turn():
    model = made("llama", gains=False).model
    words = torch.arange(6)[None]
    with torch.no_grad():
        before = model(words).last_hidden_state
        q = haar(24, torch.Generator().manual_seed(2))
        assert rotate_(model, q, probe=words).change < 1e-6
        torch.testing.assert_close(model(words).last_hidden_state, before @ q.T, rtol=1e-5, atol=1e-5)


def share_norm(model):
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm


def share_layer(model):
    model.model.layers[1] = model.model.layers[0]


def share_last_norm(model):
    model.model.norm = model.model.layers[0].post_attention_layernorm


@pytest.mark.parametrize("share", [share_norm, share_layer, share_last_norm])
@pytest.mark.parametrize("name", ["llama", "llama with a tied head"])
def test_a_shared_gain_goes_to_all_its_readers(share, name):
    model = made(name)
    share(model)
    before = logits(model)
    rotate_(model)
    assert float((logits(model) - before).abs().max()) <= 1e-6


def test_a_weight_with_two_gains_is_refused():
    model = made("llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    before = snapshot(model)
    with pytest.raises(Unsupported, match=r"self_attn\.q_proj\.weight is read through two gains"):
        rotate_(model)
    check_untouched(model, before)
    plain = made("llama", gains=False)
    plain.model.layers[1].self_attn = plain.model.layers[0].self_attn
    out = logits(plain)
    rotate_(plain)
    assert float((logits(plain) - out).abs().max()) <= 1e-6


def test_a_tensor_with_two_roles_is_refused():
    model = made("llama")
    attention = model.model.layers[0].self_attn
    attention.o_proj.weight = attention.q_proj.weight
    before = snapshot(model)
    with pytest.raises(Unsupported, match="the same tensor"):
        rotate_(model)
    check_untouched(model, before)


def test_one_norm_for_both_halves_of_a_layer():
    layer = encoder_layer()
    layer.norm1 = layer.norm2 = nn.RMSNorm(8, **F64)
    nn.init.normal_(layer.norm1.weight)
    x, q = torch.randn(2, 5, 8, **F64), haar(8, torch.Generator().manual_seed(2))
    layer.train().requires_grad_(False)
    before = layer(x)
    rotate_(layer, q)
    torch.testing.assert_close(layer(x @ q.T), before @ q.T, rtol=1e-9, atol=1e-9)
    with pytest.raises(Unsupported, match=r"two norms.*set_fastpath_enabled\(False\)"):
        rotate_(nn.TransformerEncoderLayer(8, 2))


def test_rotations_as_arrays():
    q = haar(8, torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    first = nn.MultiheadAttention(8, 2, **F64)
    second = nn.MultiheadAttention(8, 2, **F64)
    second.load_state_dict(first.state_dict())
    rotate_(first, q)
    rotate_(second, q.numpy())
    torch.testing.assert_close(first.in_proj_weight, second.in_proj_weight)


@pytest.mark.parametrize("rotation", [[[1.0, 0.0], [0.0, 1.0]], None, 3, np.array([["a"]]), torch.eye(8) * 1j])
def test_what_is_no_rotation_is_refused(rotation):
    with pytest.raises(InvalidArgument, match="rotation must be a matrix of real numbers"):
        rotate_(nn.MultiheadAttention(8, 2), rotation)


@pytest.mark.parametrize("model", [None, torch.relu, "llama"])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(InvalidArgument, match="model must be a torch module"):
        rotate_(model)


def test_inference_tensors_are_refused():
    with torch.inference_mode():
        model = made("llama")
    before = snapshot(model)
    with pytest.raises(Unsupported, match="inference"):
        rotate_(model)
    check_untouched(model, before)
