"""Inter-modality flow: identities of the measure, and every adapter against the maps that the model itself returns."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import seeing
from heedful import InvalidArgument, Unsupported, attend
from heedful.bridges.transformers import use
from heedful.kernels import Cosine, Gaussian
from heedful.lens import Flow, flow, observe

KINDS = {"text": 0, "image": 1}


def by_hand(maps, kinds, valid=None, allowed=None, exclude=()):
    """IMF and chance of each sample and head by going through the tokens, `[L, B, H]` each: the definition, word by word."""
    own, even = [], []
    for weights in maps:
        weights = torch.as_tensor(weights).double()
        batch, heads, n, _ = weights.shape
        rows = torch.zeros(2, batch, heads, dtype=torch.float64)
        for b in range(batch):
            real = [j for j in range(n) if valid is None or valid[b][j]]
            counted = [j for j in real if j not in exclude]
            for h in range(heads):
                sums = {"own": [0.0, 0.0], "even": [0.0, 0.0]}
                for i in counted:
                    total = sum(float(weights[b, h, i, j]) for j in real)
                    seen = [j for j in real if allowed is None or allowed[b][i][j]]
                    for j in counted:
                        between = kinds[b][i] != kinds[b][j]
                        for name, part in (
                            ("own", float(weights[b, h, i, j]) / total if total else 0.0),
                            ("even", (j in seen) / max(1, len(seen))),
                        ):
                            sums[name][0] += between * part
                            sums[name][1] += part
                rows[0, b, h], rows[1, b, h] = (part[0] / part[1] if part[1] else 0.0 for part in sums.values())
        own.append(rows[0])
        even.append(rows[1])
    return own, even


def softmax(*shape, sharp=2.0, seed=0):
    return (sharp * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)


def check_close(one, other, atol=1e-12):
    one, other = (torch.as_tensor(x, dtype=torch.float64) for x in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


# The measure


def test_it_is_the_definition():
    maps = [softmax(2, 3, 11, 11, seed=at) for at in range(2)]
    kinds = [[0, 1, 1, 0, 2, 0, 0, 1, 1, 2, 0], [1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2]]
    own, even = by_hand(maps, kinds)
    found = flow(maps, modality=torch.tensor(kinds), names=["text", "image", "sound"])
    for at in range(2):
        check_close(found.layers[at].imf, own[at])
        check_close(found.layers[at].chance.expand(2, 3), even[at])
    check_close(found.per_layer, [float(one.mean()) for one in own])
    assert found.names == ("text", "image", "sound")
    assert found.counts.tolist() == [[5, 4, 2], [4, 4, 3]]
    check_close(found.mass.sum(-1), torch.ones(2, 2, 3, 3))
    # Arrays of numpy and maps without heads too.
    check_close(flow([one.numpy() for one in maps], modality=np.array(kinds)).per_layer, found.per_layer)
    check_close(flow([one.mean(1) for one in maps], modality=torch.tensor(kinds)).per_layer, found.per_layer)


def test_uniform_attention_is_chance_and_blocks_are_the_ends():
    text, image = 5, 8
    n = text + image
    kinds = torch.tensor([0] * text + [1] * image)
    even = torch.full((2, 3, n, n), 1 / n, dtype=torch.float64)
    found = flow([even], modality=kinds)
    check_close(found.per_layer[0], 2 * text * image / n**2)
    check_close(found.chance[0], 2 * text * image / n**2)
    check_close(found.lift[0], 1.0)
    same = (kinds[:, None] == kinds).double()
    for blocks, wanted in ((same, 0.0), (1 - same, 1.0)):
        weights = blocks / blocks.sum(-1, keepdim=True)
        one = flow([weights.expand(1, 2, n, n)], modality=kinds, allowed=torch.ones(n, n))
        check_close(one.per_layer[0], wanted)
        check_close(one.chance[0], 2 * text * image / n**2)
    causal = torch.tril(torch.ones(n, n, dtype=torch.float64))
    causal = causal / causal.sum(-1, keepdim=True)
    one = flow([causal.expand(1, 1, n, n)], modality=kinds)
    check_close(one.per_layer[0], one.chance[0])
    check_close(one.chance[0], sum(text / (i + 1) for i in range(text, n)) / n)


def test_one_kind_alone_is_zero_and_no_crash():
    found = flow([softmax(1, 2, 5, 5)], modality=torch.zeros(5, dtype=torch.long), names=["text", "image"])
    assert found.per_layer == (0.0,)
    assert found.chance == (0.0,)
    assert math.isnan(found.lift[0])
    assert "nothing can go between kinds" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_labels_may_be_swapped_and_tokens_moved():
    maps = [softmax(2, 3, 11, 11)]
    kinds = torch.tensor([0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1])
    found, swapped = flow(maps, modality=kinds), flow(maps, modality=1 - kinds)
    check_close(found.per_layer, swapped.per_layer)
    check_close(found.direction("kind 0", "kind 1"), swapped.direction("kind 1", "kind 0"))
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    moved = flow([maps[0][:, :, order][..., order]], modality=kinds[order])
    check_close(moved.layers[0].sums, found.layers[0].sums)


def test_padding_changes_nothing():
    maps = softmax(2, 3, 7, 7)
    kinds = torch.tensor([0, 0, 1, 0, 1, 1, 1])
    found = flow([maps], modality=kinds)
    # A model may leave weight on padding; garbage stands in the rows of padding.
    wide = torch.zeros(2, 3, 11, 11, dtype=torch.float64)
    wide[:, :, :7, :7] = 0.9 * maps
    wide[:, :, :7, 7:] = 0.025
    wide[:, :, 7:] = softmax(2, 3, 4, 11, seed=5)
    valid = torch.arange(11) < 7
    padded = flow([wide], modality=torch.cat((kinds, torch.tensor([1, 0, 1, 1]))), valid=valid.expand(2, 11))
    check_close(padded.per_layer, found.per_layer)
    check_close(padded.chance, found.chance)
    check_close(padded.mass, found.mass)


def test_special_tokens_are_left_out_as_queries_and_as_keys():
    maps = [softmax(1, 2, 9, 9)]
    kinds = [[0, 0, 0, 0, 1, 1, 1, 1, 1]]
    left = {0, 3}
    own, even = by_hand(maps, kinds, exclude=left)
    marked = torch.tensor([[-1 if at in left else kind for at, kind in enumerate(kinds[0])]])
    found = flow(maps, modality=marked, names=["text", "image"])
    check_close(found.layers[0].imf, own[0])
    check_close(found.layers[0].chance.expand(1, 2), even[0])
    rows = [i for i in range(9) if i not in left]
    check_close(found.layers[0].outside, maps[0][:, :, rows][..., sorted(left)].sum(-1).mean(-1))
    assert "left out" in str(found)


def test_micro_sums_first():
    maps = [softmax(2, 3, 11, 11)]
    kinds = torch.tensor([[0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1], [0] * 10 + [1]])
    sums = flow(maps, modality=kinds).layers[0].sums
    between = sums[..., 0, 1] + sums[..., 1, 0]
    check_close(flow(maps, modality=kinds, reduce="micro").per_layer[0], between.sum() / sums.sum())
    assert flow(maps, modality=kinds, reduce="micro").intervals[0] is not None


def test_intervals_come_from_samples():
    maps = [softmax(40, 2, 7, 7)]
    found = flow(maps, modality=torch.tensor([0, 0, 1, 0, 1, 1, 1]))
    low, high = found.intervals[0]
    samples = found.layers[0].imf.mean(1)
    error = float(samples.std() / math.sqrt(40))
    assert low < found.per_layer[0] < high
    assert 2.5 * error < high - low < 5.5 * error
    assert flow([maps[0][:1]], modality=torch.tensor([0, 0, 1, 0, 1, 1, 1])).intervals == (None,)


# Flow through layers


def chained(maps, kinds, valid, rho, start):
    """What goes between kinds in each layer, by products of matrices."""
    here, between, sums = start.double(), [], []
    for weights in reversed(maps):
        shown = weights.double() * valid[:, None, None]
        mean = (shown / shown.sum(-1, keepdim=True)).mean(1)
        tilde = (1 - rho) * mean + rho * torch.eye(mean.shape[-1], dtype=torch.float64)
        edges = here[..., None] * tilde
        differ = kinds[:, :, None] != kinds[:, None]
        between.append((edges * differ).sum((1, 2)) / edges.sum((1, 2)))
        here = edges.sum(1)
        sums.append(here.sum(-1))
    return torch.stack(between[::-1]), torch.stack(sums)


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_flow_is_the_product_of_layers(rho):
    maps = [softmax(2, 3, 11, 11, seed=at) for at in range(4)]
    kinds = torch.tensor([[0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1]]).expand(2, -1)
    valid = torch.arange(11) < torch.tensor([[11], [8]])
    start = valid / valid.sum(1, keepdim=True)
    wanted, totals = chained(maps, kinds, valid.double(), rho, start)
    check_close(totals, torch.ones(4, 2), 1e-6)
    found = flow(maps, modality=kinds, valid=valid, mode="flow", rho=rho)
    check_close(torch.stack([one.imf[:, 0] for one in found.layers]), wanted, 1e-6)
    check_close(torch.stack([one.sums.sum((-3, -2, -1)) for one in found.layers]), torch.ones(4, 2), 1e-6)
    one_hot = torch.zeros(2, 11)
    one_hot[0, 10] = one_hot[1, 7] = 1.0
    wanted, _ = chained(maps, kinds, valid.double(), rho, one_hot)
    last = flow(maps, modality=kinds, valid=valid, mode="flow", rho=rho, start="last")
    check_close(torch.stack([one.imf[:, 0] for one in last.layers]), wanted, 1e-6)


def test_ends_of_the_flow():
    maps, kinds = [softmax(2, 3, 11, 11, seed=at) for at in range(3)], torch.tensor([0] * 4 + [1] * 7)
    assert flow(maps, modality=kinds, mode="flow", rho=1.0).per_layer == (0.0, 0.0, 0.0)
    found = flow(maps, modality=kinds, mode="flow")
    check_close(found.per_layer[-1], flow([maps[-1].mean(1)], modality=kinds).per_layer[0], 1e-6)
    even = flow([torch.full((1, 2, 11, 11), 1 / 11)] * 3, modality=kinds, mode="flow")
    check_close(even.per_layer, [2 * 4 * 7 / 121] * 3, 1e-6)
    with pytest.raises(Unsupported, match="averages heads"):
        found.heads()


# Models


def eager_maps(name, inputs):
    """The maps that a model with eager attention returns, of the layers that mix kinds."""
    model, _ = seeing.made(name, "eager")
    torch.manual_seed(1)
    with torch.no_grad():
        return [one.double() for one in model(**inputs, output_attentions=True).attentions]


def kinds_of(name, inputs, length):
    ids = inputs["input_ids"]
    if name in ("vilt", "visual_bert"):
        return torch.cat((torch.zeros_like(ids), torch.ones(2, length - ids.shape[1], dtype=torch.long)), 1)
    return (ids == seeing.IMAGE).long()


def real_of(name, inputs, length):
    mask = inputs["attention_mask"].bool()
    rest = inputs.get("visual_attention_mask", torch.ones(2, length - mask.shape[1]))
    return torch.cat((mask, rest.bool()), 1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "heedful"])
@pytest.mark.parametrize("name", seeing.JOINT)
def test_every_adapter_equals_the_maps(name, implementation):
    model, inputs = seeing.made(name, "sdpa" if implementation == "heedful" else implementation)
    if implementation == "heedful":
        if name in ("vilt", "visual_bert"):
            pytest.skip("its attention is its own code and cannot be replaced")
        use(model)
    maps = eager_maps(name, inputs)
    n = maps[0].shape[-1]
    kinds, valid = kinds_of(name, inputs, n), real_of(name, inputs, n)
    allowed = (maps[0] > 0).any(1) & valid[:, None]
    own, even = by_hand(maps, kinds.tolist(), valid, allowed)
    torch.manual_seed(1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = flow(model, inputs)
    assert found.names == ("text", "image")
    assert len(found.layers) == len(maps)
    assert found.counts.tolist() == [[int(((kinds[b] == at) & valid[b]).sum()) for at in range(2)] for b in range(2)]
    for at, layer in enumerate(found.layers):
        assert layer.imf.std() > 0.01
        assert (layer.imf < 0.99).all()
        check_close(layer.imf, own[at], 1e-5)
        check_close(layer.chance.expand_as(layer.imf), even[at], 1e-6)
    traced = flow(maps, modality=kinds, valid=valid, mode="flow", rho=0.2)
    torch.manual_seed(1)
    check_close(flow(model, inputs, mode="flow", rho=0.2).per_layer, traced.per_layer, 1e-5)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


@pytest.mark.parametrize("name", ["visual_bert", "llava"])
def test_norms_weigh_what_is_handed_over(name):
    model, inputs = seeing.made(name, "sdpa")
    seen = observe(model, inputs)
    records = [one for one in seen if one.queries_len > 9]
    kinds, valid = kinds_of(name, inputs, records[0].queries_len), real_of(name, inputs, records[0].queries_len)
    found = flow(model, inputs, mode="norm")
    for at, record in enumerate(records):
        layer = (
            model.encoder.layer[at].attention.output.dense
            if name == "visual_bert"
            else model.model.language_model.layers[at].self_attn.o_proj
        )
        size = record.values.shape[-1]
        for b in range(2):
            for h in range(record.heads):
                value = record.values[b, h * record.key_heads // record.heads]
                norm = (value @ layer.weight[:, h * size : (h + 1) * size].T).norm(dim=-1).detach()
                weighed = record.weights[b, h] * norm * valid[b] * valid[b][:, None]
                between = (weighed * (kinds[b][:, None] != kinds[b])).sum() / weighed.sum()
                check_close(found.layers[at].imf[b, h], between, 1e-5)


def updates(model, names, inputs):
    """What modules gave, in the order of their calls."""
    gave = []
    hooks = [
        dict(model.named_modules())[name].register_forward_hook(lambda m, a, out, name=name: gave.append((name, out)))
        for name in names
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return gave


CROSSED = {
    "lxmert": ("encoder.x_layers.{}.visual_attention.output.dense", "encoder.x_layers.{}.lang_self_att.output.dense"),
    "blip": (
        "text_encoder.encoder.layer.{}.crossattention.output.dense",
        "text_encoder.encoder.layer.{}.attention.output.dense",
    ),
    "whisper": ("model.decoder.layers.{}.encoder_attn.out_proj", "model.decoder.layers.{}.self_attn.out_proj"),
}


@pytest.mark.parametrize("name", seeing.APART)
def test_cross_attention_is_told_by_its_share_of_the_update(name):
    model, inputs = seeing.made(name, "sdpa")
    found = flow(model, inputs)
    assert found.layers == ()
    pairs = {
        "lxmert": ["text -> image", "image -> text"] * 2,
        "blip": ["text -> image"] * 2,
        "whisper": ["text -> audio"] * 2,
    }
    assert [f"{one.queries} -> {one.keys}" for one in found.crossings] == pairs[name]
    valid = torch.ones(2, 7) if name == "whisper" else inputs["attention_mask"]
    for at in range(2):
        gave = updates(model, [place.format(at) for place in CROSSED[name]], inputs)
        cross, own = (
            next(out for place, out in gave if place == wanted.format(at)).norm(dim=-1) for wanted in CROSSED[name]
        )
        share = ((cross / (cross + own)) * valid).sum(1) / valid.sum(1)
        mine = [one for one in found.crossings if one.queries == "text"][at]
        assert 0.05 < mine.mean < 0.95
        check_close(mine.cross_share, share, 1e-5)
    assert found.counts.tolist()[1][0] == int(valid[1].sum())
    with pytest.raises(Unsupported, match="crossings"):
        _ = found.mass
    json.dumps(found.to_dict(), allow_nan=False)


def test_batches_of_one_and_left_padding_give_the_same():
    model, inputs = seeing.made("llava", "sdpa")
    whole = flow(model, inputs)
    ids, mask, pixels = (inputs[name] for name in ("input_ids", "attention_mask", "pixel_values"))
    parts = [{"input_ids": ids[at : at + 1, : mask[at].sum()], "pixel_values": pixels[at : at + 1]} for at in range(2)]
    apart = flow(model, parts)
    assert apart.counts.tolist() == whole.counts.tolist()
    # The second sample shifted to the right, padding ahead of it.
    left = ids.clone(), mask.clone()
    for one in left:
        one[1] = one[1].roll(2)
    left = flow(model, {"input_ids": left[0], "attention_mask": left[1], "pixel_values": pixels})
    for at in range(2):
        check_close(apart.layers[at].imf, whole.layers[at].imf, 1e-5)
        check_close(left.layers[at].imf, whole.layers[at].imf, 1e-5)
        check_close(left.layers[at].chance, whole.layers[at].chance, 1e-6)


def test_an_observation_says_the_same():
    model, inputs = seeing.made("llava", "sdpa")
    kinds = kinds_of("llava", inputs, 11)
    seen = observe(model, inputs)
    found = flow(seen, modality=kinds, valid=inputs["attention_mask"].bool(), names=["text", "image"])
    check_close(found.per_layer, flow(model, inputs).per_layer, 1e-6)
    with pytest.raises(Unsupported, match="give the model and its inputs"):
        flow(seen, modality=kinds, mode="norm")


class Own(nn.Module):
    """A model that says of what kind its tokens are, as those of ours do."""

    modalities = ("word", "patch")

    def __init__(self, kernel=None):
        super().__init__()
        self.mix, self.kernel = nn.Linear(10, 30), kernel

    def forward(self, x, padding=None):
        q, k, v = (part.unflatten(-1, (2, 5)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        mask = None if padding is None else ~padding[:, None, None]
        out = attend(q, k, v, mask, kernel=self.kernel).transpose(1, 2).flatten(2)
        return {"x": out, "modality": torch.tensor([[0] * 4 + [1] * (x.shape[1] - 4)]).expand(len(x), -1)}


def test_a_model_that_states_its_kinds():
    torch.manual_seed(0)
    model, x = Own(), 2 * torch.randn(2, 13, 10)
    padding = torch.arange(13) >= torch.tensor([[13], [9]])
    # What is hidden must not show, whatever it is.
    hidden = torch.where(padding[..., None], math.nan, x)
    found = flow(model, {"x": hidden, "padding": padding})
    assert found.names == ("word", "patch")
    assert found.counts.tolist() == [[4, 9], [4, 5]]
    for at, length in enumerate((13, 9)):
        alone = flow(model, {"x": x[at : at + 1, :length]})
        check_close(found.layers[0].imf[at], alone.layers[0].imf[0], 1e-6)
        check_close(found.layers[0].chance[at], alone.layers[0].chance[0], 1e-6)
    normed = Own()
    normed.modalities = ("word",)
    with pytest.raises(InvalidArgument, match="numbers of the 1 names"):
        flow(normed, {"x": x})


def test_other_kernels_are_shares_too_where_they_have_a_sign_only():
    torch.manual_seed(0)
    x = torch.randn(1, 13, 10)
    model = Own(Gaussian(2.0, normalize=False))
    weights = observe(model, {"x": x})[0].weights
    wanted = flow([weights / weights.sum(-1, keepdim=True)], modality=[0] * 4 + [1] * 9)
    check_close(flow(model, {"x": x}).layers[0].imf, wanted.layers[0].imf, 1e-6)
    with pytest.raises(Unsupported, match="may be negative"):
        flow(Own(Cosine()), {"x": x})


def test_no_map_of_pairs_is_written():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, torch.Tensor):
                    Largest.most = max(Largest.most, one.untyped_storage().nbytes())
            return out

    n = 2048
    model = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    x, kinds = torch.randn(1, n, 16), torch.arange(n) % 3
    for mode in ("fraction", "flow", "norm"):
        with Largest():
            flow(model, x, modality=kinds, mode=mode)
    assert 0 < Largest.most < n * n / 4


def test_generation_with_a_cache_counts_all_keys():
    model, inputs = seeing.made("llava", "sdpa")
    with torch.no_grad():
        start = {name: value[:1, :10] if value.dim() == 2 else value[:1] for name, value in inputs.items()}
        past = model(**start, use_cache=True).past_key_values
    step = {
        "input_ids": inputs["input_ids"][:1, 10:],
        "past_key_values": past,
        "attention_mask": torch.ones(1, 11).long(),
    }
    kinds = kinds_of("llava", inputs, 11)[:1]
    found = flow(model, step, modality=kinds)
    whole = flow(model, {name: value[:1] for name, value in inputs.items()})
    last = observe(model, {name: value[:1] for name, value in inputs.items()})[2].weights[0, :, -1]
    check_close(found.layers[0].imf[0], last[:, kinds[0] == 1].sum(-1), 1e-5)
    assert found.counts.tolist() == whole.counts.tolist()


def test_encoder_decoders_of_text_and_segments():
    import transformers as hf

    torch.manual_seed(0)
    t5 = hf.T5Model(hf.T5Config(vocab_size=37, d_model=24, d_kv=8, d_ff=19, num_layers=2, num_heads=3)).eval()
    found = flow(
        t5, {"input_ids": seeing.words()["input_ids"], "decoder_input_ids": seeing.words()["input_ids"][:, :4]}
    )
    assert [f"{one.queries} -> {one.keys}" for one in found.crossings] == ["target -> source"] * 2
    bert = hf.BertModel(hf.BertConfig(**seeing.TEXT)).eval()
    segments = (torch.arange(7) > 3).long().expand(2, -1)
    found = flow(bert, {**seeing.words(), "token_type_ids": segments})
    assert found.names == ("segment 0", "segment 1")
    with pytest.raises(Unsupported, match="name groups of them"):
        flow(bert, seeing.words())


def test_other_models_with_a_sequence_for_each_kind():
    import transformers as hf

    torch.manual_seed(0)
    writer = {"vocab_size": 37, "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 3, "decoder_ffn_dim": 19}
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**seeing.VISION), hf.TrOCRConfig(**writer, cross_attention_hidden_size=24)
    )
    words = {"decoder_input_ids": seeing.words()["input_ids"]}
    found = flow(hf.VisionEncoderDecoderModel(config).eval(), {"pixel_values": seeing.picture(), **words})
    assert [f"{one.queries} -> {one.keys}" for one in found.crossings] == ["text -> image"] * 2
    assert found.counts.tolist() == [[7, 5]] * 2
    # A layer of cross-attention alone stands beside the self-attention before it.
    rope = {"rope_type": "default", "rope_theta": 1e4}
    tiles = {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]], "num_global_layers": 1, "attention_heads": 3}
    config = hf.MllamaConfig(
        vision_config={**seeing.VISION, **tiles, "vision_output_dim": 72, "intermediate_layers_indices": [0, 1]},
        text_config={**seeing.GROUPED, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": rope},
        image_token_index=seeing.IMAGE,
    )
    ids = seeing.words()["input_ids"][:1].clone()
    ids[0, 0] = seeing.IMAGE
    tiled = {"pixel_values": seeing.picture()[:1, None, None], "aspect_ratio_ids": torch.ones(1, 1).long()}
    tiled |= {"aspect_ratio_mask": torch.ones(1, 1, 1).long(), "cross_attention_mask": torch.ones(1, 7, 1, 1).long()}
    found = flow(hf.MllamaForConditionalGeneration(config).eval(), {"input_ids": ids, **tiled})
    assert [(one.layer, one.queries, one.keys) for one in found.crossings] == [
        ("model.language_model.layers.1", "text", "image")
    ]


# What people see, and what they do wrong


def test_words_and_tables():
    model, inputs = seeing.made("llava", "sdpa")
    found = flow(model, inputs)
    text = str(found)
    assert "text -> image" in text
    assert max(map(len, text.splitlines())) <= 100
    best = found.heads(2)
    assert best[0].lift >= best[1].lift
    assert len(found.heads()) == 8
    table = found.to_pandas()
    assert len(table) == 2 * 2 * 4 * 4
    check_close(table.groupby(["layer", "sample", "head", "queries"]).mass.sum().tolist(), np.ones(32), 1e-9)
    pytest.importorskip("matplotlib").use("Agg")
    assert found.plot().get_ylabel() == "share of attention"
    assert found.plot_heads().get_xlabel() == "head"
    assert flow(*seeing.made("lxmert")).plot().get_ylabel() == "share of the update"
    assert isinstance(found, Flow)
    assert json.loads(json.dumps(found.to_dict()))["names"] == ["text", "image"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda w: ([None], {"modality": [0, 1]}), "fused attention returns none"),
        (lambda w: ([], {"modality": [0, 1]}), "fused attention returns none"),
        (lambda w: ([w], {}), "give modality"),
        (lambda w: ([0.9 * w], {"modality": [0] * 3 + [1] * 4}), "sums to 0.9"),
        (lambda w: ([w[..., :5]], {"modality": [0] * 3 + [1] * 4}), "from one sequence to another"),
        (lambda w: ([w], {"modality": [0] * 3 + [1] * 5}), "no call of attention over the sequence of 8 tokens"),
        (lambda w: ([w], {"modality": torch.rand(7)}), "modality must be integers"),
        (lambda w: ([w], {"modality": [0, 0, 0, 1, 1, 1, -2]}), "-1 for a token that is left out"),
        (lambda w: ([w], {"modality": ["a"] * 7, "names": ["b"]}), "holds 'a'"),
        (lambda w: ([w], {"modality": torch.zeros(3, 7).long()}), "3 sequences"),
        (lambda w: ([w], {"modality": [0] * 3 + [1] * 4, "mode": "share"}), "mode must be"),
        (lambda w: ([w], {"modality": [0] * 3 + [1] * 4, "rho": 2}), "rho must be"),
        (lambda w: ([w.long()], {"modality": [0] * 7}), "must be \\(batch, heads"),
        (lambda w: (nn.Linear(2, 2), {}), "needs inputs"),
        (lambda w: ([w], {"modality": [0] * 7, "groups": {"a": "b"}}), "give one of them"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    source, options = arguments(softmax(2, 3, 7, 7))
    with pytest.raises((InvalidArgument, Unsupported), match=message):
        flow(source, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter, which runs where there is no GPU")
@pytest.mark.parametrize("name", ["visual_bert", "llava"])
def test_fused_kernels_give_the_same(name, monkeypatch):
    from functools import partial

    from heedful.lens.flows import _masses

    model, inputs = seeing.made(name, "sdpa")
    wanted = [flow(model, inputs, mode=mode) for mode in ("fraction", "flow", "norm")]
    monkeypatch.setattr(_masses, "attend", partial(attend, impl="triton"))
    for found, mode in zip(wanted, ("fraction", "flow", "norm"), strict=True):
        fused = flow(model, inputs, mode=mode)
        for one, other in zip(fused.layers, found.layers, strict=True):
            check_close(one.imf, other.imf, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", seeing.JOINT)
def test_on_a_device(name, dtype):
    model, inputs = seeing.made(name, "sdpa")
    model = model.to("cuda", dtype)
    inputs = {key: value.cuda() for key, value in inputs.items()}
    inputs |= {key: inputs[key].to(dtype) for key in ("pixel_values", "visual_embeds") if key in inputs}
    torch.manual_seed(1)
    seen = observe(model, inputs)
    n = seen[-1].queries_len
    maps = [
        one.weights.double()
        for one in seen
        if one.queries_len == n and "vision" not in one.name and "visual." not in one.name
    ]
    maps = [one / one.sum(-1, keepdim=True).clamp_min(1e-9) for one in maps]
    here = {key: value.cpu() for key, value in inputs.items()}
    wanted = flow(maps, modality=kinds_of(name, here, n), valid=real_of(name, here, n))
    torch.manual_seed(1)
    found = flow(model, inputs)
    for mine, theirs in zip(found.layers, wanted.layers, strict=True):
        check_close(mine.imf, theirs.imf, 1e-5 if dtype == torch.float32 else 1e-2)
    traced = flow(model, inputs, mode="flow")
    check_close(
        [float(one.sums.sum() / len(one.sums)) for one in traced.layers],
        [1.0] * len(traced.layers),
        1e-5 if dtype == torch.float32 else 3e-2,
    )


@pytest.mark.parametrize("right", [True, False])
def test_calls_taken_on_trust_are_looked_at_where_one_was_wrong(right, monkeypatch):
    """On a device nobody waits for it in each layer: a run whose calls do not agree in the end is made again, each call looked at."""
    from heedful.bridges import calls

    model, inputs = seeing.made("llava", "sdpa")
    wanted = flow(model, inputs)
    looked, plain = [], calls.Memory.trusts

    def trusts(memory, call):
        looked.append(memory.doubts is None)
        if memory.doubts is None:
            return plain(memory, call)
        memory.doubts.append(calls.Compared(torch.ones(2, 3), torch.full((2, 3), 1.0 if right else 2.0), None, None))
        return True

    monkeypatch.setattr(calls.Memory, "trusts", trusts)
    found = flow(model, inputs)
    assert looked.count(False) > 0
    assert any(looked) != right
    assert found.per_layer == wanted.per_layer


def test_calls_are_compared_together_where_they_have_one_form():
    """Rows that see nothing and numbers that are not finite in the model do not count; one call that is off is found among others."""
    from heedful.bridges.calls import Compared, agree

    ours = torch.randn(2, 3, 3, 5, generator=torch.Generator().manual_seed(0))
    theirs, sees = ours.clone(), torch.ones(2, 3, 3, 1, dtype=torch.bool)
    sees[0, 1, 2], theirs[0, 1, 2], theirs[1, 2, 0, 3] = False, 7.0, torch.nan
    right = [
        Compared(ours, ours, None, None),
        Compared(ours, theirs, sees, None),
        Compared(ours[:1], ours[:1], None, None),
    ]
    assert agree(right)
    assert agree([])
    assert not agree([*right, Compared(ours, theirs, None, None)])
    assert not agree([*right, Compared(ours, 1.1 * ours, None, None)])
    assert not agree([*right, Compared(torch.full_like(ours, torch.nan), ours, None, None)])
    # Large scores in 16 bit allow for more, each call by its own.
    low, off = ours.bfloat16(), (1.3 * ours).bfloat16()
    small, large = torch.tensor(1.0), torch.tensor(100.0)
    assert agree([Compared(off, low, None, large), Compared(low, low, None, small)])
    assert not agree([Compared(off, low, None, small), Compared(low, low, None, large)])


@pytest.mark.parametrize("axes", [2, 4])
def test_masks_of_few_axes_are_compared_with_those_of_other_layers(axes):
    from heedful.bridges.calls import Memory, Watched, _compared, agree
    from heedful.kernels import Softmax

    query, key, value = torch.randn(3, 2, 3, 7, 5, generator=torch.Generator().manual_seed(0)).unbind()
    mask = torch.ones(7, 7, dtype=torch.bool).tril(-1)[(None,) * (axes - 2)]
    shown = nn.functional.scaled_dot_product_attention(query, key, value, mask)
    call = Watched("", query, key, value, shown, Softmax(), mask)
    compared = _compared(call)
    assert compared.sees.flatten().tolist() == [False, True, True]
    assert Memory().trusts(call)
    assert agree([compared] * 5)
    assert not agree([compared] * 5 + [compared._replace(ours=compared.ours.roll(1, 1))])


@pytest.mark.parametrize("mode", ["fraction", "norm"])
def test_layers_are_summed_up_together_or_one_by_one(mode, monkeypatch):
    from heedful.lens.flows import _meter

    model, inputs = seeing.made("llava", "sdpa")
    together = flow(model, inputs, mode=mode)
    monkeypatch.setattr(_meter, "HELD", 0)
    apart = flow(model, inputs, mode=mode)
    assert [one.layer for one in together.layers] == list(range(len(together.layers)))
    assert len(together.layers) == len(apart.layers) > 1
    for one, other in zip(together.layers, apart.layers, strict=True):
        assert (one.layer, one.name) == (other.layer, other.name)
        check_close(one.sums, other.sums, 1e-12)
        check_close(one.uniform, other.uniform, 1e-12)
        check_close(one.outside, other.outside, 1e-12)
