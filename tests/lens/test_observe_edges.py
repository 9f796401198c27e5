"""observe where models, masks and machines are not what one expects."""

from __future__ import annotations

import json
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import multi_head_attention_forward as whole_attention
from torch.nn.functional import scaled_dot_product_attention as imported_attention
from torch.nn.utils import parametrizations, prune

from heedful import CorruptModel, InvalidArgument, Sigmoid, Unsupported, attend
from heedful.bridges.transformers import use
from heedful.lens import Observation, observe

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

TINY = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
IDS = torch.arange(14).view(2, 7) + 3


def bert(**options):
    torch.manual_seed(0)
    return hf.BertModel(hf.BertConfig(**TINY, initializer_range=0.5, **options)).eval()


def test_threads_that_attend_do_not_enter_the_record():
    torch.manual_seed(0)
    stop = threading.Event()
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False)
    model.eval()
    x, other = torch.randn(1, 5, 8), torch.randn(1, 2, 9, 4)

    def attending():
        while not stop.is_set():
            attend(other, other, other)

    def observing(length, found):
        for _ in range(25):
            found += [[(record.queries_len, len(seen)) for record in seen] for seen in [observe(model, x[:, :length])]]

    noise = threading.Thread(target=attending)
    noise.start()
    found = {length: [] for length in (3, 4, 5)}
    threads = [threading.Thread(target=observing, args=item) for item in found.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    noise.join()
    for length, all_seen in found.items():
        assert all_seen == [[(length, 3)] * 3] * 25


@pytest.mark.parametrize("way", ["pruned", "parametrised"])
@torch.no_grad()
def test_weights_that_are_no_parameters(way):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True, bias=False).eval(), torch.randn(1, 4, 8)
    if way == "pruned":
        prune.random_unstructured(layer, "in_proj_weight", 0.5)
    else:
        parametrizations.weight_norm(layer, "in_proj_weight")
    expected = layer(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(observe(layer, (x, x, x))[0].weights, expected)


class Doubled(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(2 * query, key, value, **options)


@torch.no_grad()
def test_a_subclass_that_does_something_else_is_named_and_not_told_wrongly():
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8)
    model = nn.ModuleDict({"a": Doubled(8, 2, batch_first=True), "b": nn.MultiheadAttention(8, 2, batch_first=True)})

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["b"](self.parts["a"](x, x, x)[0], x, x)[0]

    seen = observe(Both().eval(), x)
    assert [record.name for record in seen] == ["parts.b"]
    assert seen.unseen == ("parts.a",)


def sigmoid_attention(module, query, key, value, mask, scaling=None, **options):
    weights = torch.sigmoid(query @ key.mT * scaling)
    return (weights @ value).transpose(1, 2).contiguous(), weights if options.get("told") else None


def told_attention(*args, **options):
    return sigmoid_attention(*args, **options, told=True)


def causal_attention(module, query, key, value, mask, scaling=None, **options):
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def registered():
    functions = {"told_one": told_attention, "untold_one": sigmoid_attention, "causal_one": causal_attention}
    for name, function in functions.items():
        hf.AttentionInterface.register(name, function)
    yield
    for name in functions:
        del hf.AttentionInterface._global_mapping[name]


@torch.no_grad()
def test_attention_functions_of_others(registered):
    model, x = bert(), {"input_ids": IDS}
    model.set_attn_implementation("told_one")
    record = observe(model, x)[0]
    torch.testing.assert_close(record.weights @ record.values, record.outputs)
    assert record.weights.sum(-1).max() > 1.01
    model.set_attn_implementation("causal_one")
    record = observe(model, x)[0]
    assert record.causal
    torch.testing.assert_close(record.weights @ record.values, record.outputs)
    model.set_attn_implementation("untold_one")
    with pytest.raises(
        Unsupported, match=r"attends by 'untold_one', which is not softmax .*no weights; set_attn.*'eager'"
    ):
        observe(model, x)


@torch.no_grad()
def test_a_model_in_eager_is_not_sent_to_eager(monkeypatch):
    from transformers.models.bert import modeling_bert

    def doubled(*args, plain=modeling_bert.eager_attention_forward, **options):
        output, weights = plain(*args, **options)
        return 2 * output, weights

    model = bert()
    model.set_attn_implementation("eager")
    monkeypatch.setattr(modeling_bert, "eager_attention_forward", doubled)
    with pytest.raises(Unsupported, match=r"attends by 'eager', .*returns weights that do not give its output$"):
        observe(model, {"input_ids": IDS})


@pytest.mark.parametrize(
    "marks", [(5, 7), [5, 7], {5, 7}, torch.tensor([5, 7]), [5, None, 7], range(5, 8, 2)], ids=repr
)
def test_marks_in_any_collection_are_special(marks):
    model = bert()
    model.config.__dict__["eos_token_id"] = marks
    special = observe(model, {"input_ids": torch.tensor([[5, 6, 7, 8]])}).special
    assert special.tolist() == [[True, False, True, False]]


@torch.no_grad()
def test_what_use_returns_is_observed():
    seen = observe(use(bert(), Sigmoid()), {"input_ids": IDS})
    assert isinstance(seen[0].kernel, Sigmoid)


class Imported(nn.Module):
    """Attention under a name that its author imported, in a class that is not called so."""

    def forward(self, x):
        return imported_attention(x, x, x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        own = self.inner
        weights = (own.in_proj_weight, own.in_proj_bias, None, None, False, 0.0, own.out_proj.weight, own.out_proj.bias)
        return whole_attention(x, x, x, 8, 2, *weights, training=False)[0]


@torch.no_grad()
def test_attention_under_an_imported_name():
    x = torch.randn(2, 5, 8)
    model = nn.Sequential(Imported(), Imported())
    before = imported_attention
    seen = observe(model, x)
    assert [record.name for record in seen] == ["0", "1"]
    assert (seen[0].batch, seen[0].heads) == (2, 1)
    torch.testing.assert_close((seen[0].weights @ seen[0].values)[:, 0], model[0](x))
    assert imported_attention is before
    assert observe(nn.Sequential(Imported(), Whole()), x).unseen == ("1",)


def test_a_record_outlives_its_observation():
    record = observe(bert(), {"input_ids": IDS}, memory=0)[-1]
    assert record.weights.shape == (2, 3, 7, 7)


class Reused(nn.Module):
    """One buffer for two masks."""

    def forward(self, x):
        mask = torch.zeros(5, 5)
        x = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        mask.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@torch.no_grad()
def test_a_mask_that_is_written_over():
    x = torch.randn(1, 2, 5, 4)
    first, second = observe(Reused(), x)
    assert (first.causal, second.causal) == (False, True)
    torch.testing.assert_close(second.weights @ second.values, Reused()(x))


def test_padding_given_by_position():
    mask = torch.ones_like(IDS)
    mask[1, 4:] = 0
    assert torch.equal(observe(bert(), (IDS, mask)).valid, mask.bool())


@torch.no_grad()
def test_a_cache_from_before():
    torch.manual_seed(0)
    model = hf.LlamaModel(hf.LlamaConfig(**TINY)).eval()
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    past = model(IDS[:, :5], attention_mask=mask[:, :5]).past_key_values
    seen = observe(model, {"input_ids": IDS[:, 5:], "attention_mask": mask, "past_key_values": past})
    record = seen[0]
    assert (record.queries_len, record.keys_len) == (2, 7)
    assert seen.valid.all()
    assert torch.equal(seen.key_tokens(record).valid, mask.bool())
    assert seen.key_tokens(record).strings[1] == ("0", "1", "2", "3", "4", *map(str, IDS[1, 5:].tolist()))
    assert not record.weights[1, :, :, :3].any()
    assert Observation is type(seen)


@torch.no_grad()
def test_sides_are_not_mixed_up():
    model = nn.Transformer(12, 2, 1, 1, 17, batch_first=True).eval()
    padding = torch.zeros(1, 5, dtype=torch.bool)
    padding[:, 3:] = True
    inputs = {"src": torch.randn(1, 5, 12), "tgt": torch.randn(1, 5, 12), "src_key_padding_mask": padding}
    seen = observe(model, {**inputs, "memory_key_padding_mask": padding})
    assert [record.side for record in seen] == ["input", "decoder", "decoder"]
    assert torch.equal(seen.valid, ~padding)
    assert seen.query_tokens(seen[1]).valid.all()
    assert torch.equal(seen.key_tokens(seen[2]).valid, ~padding)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
    config = hf.CLIPConfig(
        text_config={**sizes, "vocab_size": 31, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=12,
    )
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    pixels = {"input_ids": IDS[:1, :5], "attention_mask": mask, "pixel_values": torch.randn(1, 3, 8, 8)}
    seen = observe(hf.CLIPModel(config).eval(), pixels)
    by_side = {record.side: record for record in seen}
    assert set(by_side) == {"input", "image"}
    assert seen.query_tokens(by_side["image"]).valid.all()
    assert seen.query_tokens(by_side["input"]).valid.sum() == 3


class Biased(nn.Module):
    """A bias of its own in every layer, as UMT5 has."""

    def forward(self, x):
        for _ in range(6):
            x = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.randn(1, 4, 64, 64))
        return x


def test_memory_bounds_the_biases_too(tmp_path):
    seen = observe(Biased(), torch.randn(1, 4, 64, 8), memory=1000)
    assert not any(isinstance(seen[at]._tensors.place("bias"), torch.Tensor) for at in range(6))
    folder = seen.to_disk(tmp_path / "seen")
    assert len(list(folder.glob("mask-*"))) == 6
    read = Observation.from_disk(folder)
    assert all(torch.equal(one.weights, other.weights) for one, other in zip(read, seen, strict=True))
    held = observe(bert(), {"input_ids": IDS, "attention_mask": (IDS > 5).long()}, memory=2**20)
    assert len(list(held.to_disk(tmp_path / "shared").glob("mask-*"))) == 1


def test_rows_of_nothing_are_zero_under_a_soft_cap():
    torch.manual_seed(0)
    model = hf.Gemma2Model(hf.Gemma2Config(**TINY, num_key_value_heads=3, head_dim=4)).eval()
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    record = observe(model, {"input_ids": IDS, "attention_mask": mask})[0]
    assert not record.weights[1, :, :3].any()
    torch.testing.assert_close(record.weights[1, :, 3:].sum(-1), torch.ones(3, 4))


def test_clear_refusals_of_what_cannot_be(tmp_path):
    model, inputs = bert(), {"input_ids": IDS}
    with pytest.raises(Unsupported, match="meta device"):
        observe(hf.BertModel(hf.BertConfig(**TINY)).to("meta"), inputs)
    with pytest.raises(Unsupported, match="compiled"):
        observe(nn.Sequential(torch.compile(nn.MultiheadAttention(8, 2))), torch.randn(2, 8))
    for memory in ("1G", None, -1, True):
        with pytest.raises(InvalidArgument, match="memory must be a number of bytes"):
            observe(model, inputs, memory=memory)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="cannot write to"):
        observe(model, inputs, disk=tmp_path / "file" / "below")
    assert [record.index for record in observe(model, inputs, layers=numpy.arange(1))] == [0]
    folder = observe(model, inputs).to_disk(tmp_path / "seen")
    told = json.loads((folder / "observation.json").read_text())
    told["layers"][0]["heads"] = 5
    (folder / "observation.json").write_text(json.dumps(told))
    with pytest.raises(CorruptModel, match="disagree"):
        Observation.from_disk(folder)


def test_an_encoder_decoder_reads_a_text_without_being_told_how_to_start():
    class Words:
        all_special_ids = (0,)

        def __call__(self, texts, return_tensors, padding, **options):
            return {"input_ids": IDS[:1]}

        def convert_ids_to_tokens(self, ids):
            return [f"w{one}" for one in ids]

    sizes = {"vocab_size": 31, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 1, "num_heads": 3}
    config = hf.T5Config(**sizes, pad_token_id=0)
    config.decoder_start_token_id = None
    seen = observe(hf.T5Model(config).eval(), "text", tokenizer=Words())
    assert seen.tokens[0][0] == "w3"
    assert seen.query_tokens(seen[1]).strings == (("w0",),)


def test_equal_inputs_are_self_attention():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 4, 8)
    assert observe(layer, (x + 0, x, x))[0].kind == "self"
    assert observe(layer, (x + 1, x, x))[0].kind == "cross"


class Biased4(nn.Module):
    """torch's own causal masks, which look at the name of the function that is called."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, query, key):
        mask = self.make(query.shape[-2], key.shape[-2])
        return nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@torch.no_grad()
def test_masks_that_are_classes_of_torch(make):
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    model = Biased4(make)
    plain = model(query, key)
    seen = observe(model, (query, key))
    assert torch.equal(seen.output, plain)
    torch.testing.assert_close(seen[0].weights @ seen[0].values, plain)


class Twice(nn.TransformerEncoderLayer):
    def forward(self, x, *others, **more):
        return 2 * x


class Own(nn.TransformerEncoderLayer):
    """A layer that computes its attention by itself, from the module's weights."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        own = self.self_attn
        q, k, v = (
            nn.functional.linear(src, own.in_proj_weight, own.in_proj_bias)
            .unflatten(-1, (3, 2, 4))
            .permute(2, 0, 3, 1, 4)
        )
        return nn.functional.scaled_dot_product_attention(-q, k, v).transpose(1, 2).flatten(-2)


@torch.no_grad()
def test_subclasses_of_torch_layers_get_no_invented_record():
    x = torch.randn(1, 5, 8)
    model = nn.Sequential(Own(8, 2, 16, batch_first=True), Twice(8, 2, 16, batch_first=True)).eval()
    seen = observe(model, x)
    assert [record.name for record in seen] == ["0"]
    assert seen.unseen == ("1",)
    torch.testing.assert_close((seen[0].weights @ seen[0].values).transpose(1, 2).flatten(-2), model[0](x))


class Overwriting(nn.Module):
    """Writes over its mask, its result and its keys after attention has read or given them."""

    def forward(self, x):
        mask, key = torch.ones(6, 6, dtype=torch.bool), x.clone()
        first = nn.functional.scaled_dot_product_attention(x, key, key, attn_mask=mask)
        given = first.clone()
        first.mul_(3).add_(1)
        mask.tril_()
        key.zero_()
        return given


@torch.no_grad()
def test_what_is_written_over_later_was_recorded_before():
    seen = observe(Overwriting(), torch.randn(2, 3, 6, 4))
    torch.testing.assert_close(seen[0].outputs, seen.output)
    torch.testing.assert_close(seen[0].weights @ seen[0].values, seen.output)
    assert not seen[0].causal


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
@torch.no_grad()
def test_rows_that_see_nothing_raise_no_alarm(lowest):
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 6, 8)
    padding = torch.zeros(2, 6)
    padding[1] = lowest
    seen = observe(layer, {"query": x, "key": x, "value": x, "key_padding_mask": padding})
    assert seen.unseen == ()
    assert not seen[0].weights[1].any()
    torch.testing.assert_close(seen[0].weights[0], layer(x, x, x, average_attn_weights=False)[1][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_large_activations_in_16_bit_raise_no_alarm(dtype):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(64, 4, batch_first=True, dtype=dtype).eval(), 100 * torch.randn(2, 9, 64).to(dtype)
    assert len(observe(layer, (x, x, x))) == 1


def test_a_module_imported_meanwhile_is_left_with_torchs_own(tmp_path, monkeypatch):
    (tmp_path / "late_import.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as attention\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    class Late(nn.Module):
        def forward(self, x):
            import late_import

            return late_import.attention(x, x, x)

    assert len(observe(Late(), torch.randn(1, 2, 5, 4))) == 1
    import late_import

    assert late_import.attention is imported_attention is nn.functional.scaled_dot_product_attention


class Five(nn.Module):
    def forward(self, x, mask):
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("shape", [(6, 6), (3, 1, 6, 6), (3, 5, 6, 6), (2, 1, 1, 6, 6)])
@torch.no_grad()
def test_five_axes_and_any_mask(shape):
    x, mask = torch.randn(2, 3, 5, 6, 4), torch.randn(shape)
    record = observe(Five(), (x, mask))[0]
    assert record.batch == 6
    torch.testing.assert_close(record.weights @ record.values, Five()(x, mask).flatten(0, 1))


def test_files_stay_found_and_readable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = observe(bert(), {"input_ids": IDS}, disk="here")
    monkeypatch.chdir("/")
    assert seen[0].weights.shape == (2, 3, 7, 7)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "here").iterdir()} == {0o644}


def test_models_compiled_in_place_are_refused():
    model = nn.MultiheadAttention(8, 2)
    model.compile(backend="eager")
    with pytest.raises(Unsupported, match="compiled"):
        observe(nn.Sequential(model), torch.randn(2, 8))
