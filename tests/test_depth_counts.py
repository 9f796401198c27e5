"""What an audit counts: exactly what the class builds, or an estimate that is called one; and what no model can be."""

import json

import pytest
import torch

from heedful import InvalidArgument, cli
from heedful.bridges import configs
from heedful.lens import depth

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

ENCODER = {
    **{"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40},
    **{"vocab_size": 97, "max_position_embeddings": 31},
}
DECODER = ENCODER | {"num_key_value_heads": 2}
WIDE = DECODER | {"head_dim": 16}
STACKS = {
    **{"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4},
    "vocab_size": 97,
}
IMAGE = {key: value for key, value in ENCODER.items() if key not in ("vocab_size", "max_position_embeddings")}
IMAGE |= {"image_size": 32, "patch_size": 8}
# Family -> its sizes, the classes that are counted exactly, and one that is not.
FAMILIES = {
    "gpt2": (
        {"n_layer": 3, "n_embd": 24, "n_head": 4, "vocab_size": 97, "n_positions": 31},
        ("GPT2LMHeadModel", "GPT2Model"),
        "GPT2DoubleHeadsModel",
    ),
    "opt": (
        {key: value for key, value in ENCODER.items() if key != "intermediate_size"}
        | {"ffn_dim": 40, "word_embed_proj_dim": 24},
        ("OPTForCausalLM", "OPTModel"),
        "OPTForSequenceClassification",
    ),
    "gpt_neox": (ENCODER, ("GPTNeoXForCausalLM", "GPTNeoXModel"), "GPTNeoXForQuestionAnswering"),
    "bert": (ENCODER, ("BertModel", "BertForMaskedLM", "BertLMHeadModel"), "BertForPreTraining"),
    "roberta": (
        ENCODER,
        ("RobertaModel", "RobertaForMaskedLM", "RobertaForCausalLM"),
        "RobertaForSequenceClassification",
    ),
    "distilbert": (
        {"dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 40, "vocab_size": 97, "max_position_embeddings": 31},
        ("DistilBertModel", "DistilBertForMaskedLM"),
        "DistilBertForQuestionAnswering",
    ),
    "albert": (
        ENCODER | {"embedding_size": 16, "num_hidden_groups": 2},
        ("AlbertModel", "AlbertForMaskedLM"),
        "AlbertForPreTraining",
    ),
    "vit": (IMAGE, ("ViTModel", "ViTForImageClassification"), "ViTForMaskedImageModeling"),
    "llama": (DECODER, ("LlamaForCausalLM", "LlamaModel"), "LlamaForSequenceClassification"),
    "mistral": (DECODER, ("MistralForCausalLM", "MistralModel"), "MistralForSequenceClassification"),
    "mixtral": (
        DECODER | {"num_local_experts": 3},
        ("MixtralForCausalLM", "MixtralModel"),
        "MixtralForSequenceClassification",
    ),
    "qwen2": (DECODER, ("Qwen2ForCausalLM", "Qwen2Model"), "Qwen2ForSequenceClassification"),
    "qwen3": (WIDE, ("Qwen3ForCausalLM", "Qwen3Model"), "Qwen3ForSequenceClassification"),
    "gemma": (WIDE, ("GemmaForCausalLM", "GemmaModel"), "GemmaForSequenceClassification"),
    "gemma2": (WIDE, ("Gemma2ForCausalLM", "Gemma2Model"), "Gemma2ForSequenceClassification"),
    "gemma3_text": (WIDE, ("Gemma3ForCausalLM", "Gemma3TextModel"), "Gemma3TextForSequenceClassification"),
    "t5": (STACKS, ("T5ForConditionalGeneration", "T5Model", "T5EncoderModel"), "T5ForTokenClassification"),
    "mt5": (STACKS, ("MT5ForConditionalGeneration", "MT5Model", "MT5EncoderModel"), "MT5ForTokenClassification"),
}


def parameters(name, config):
    with torch.device("meta"):
        return sum(weight.numel() for weight in getattr(hf, name)(config).parameters())


def configured(kind, name, **sizes):
    return hf.AutoConfig.for_model(kind, architectures=[name], **sizes)


def test_every_family_is_here():
    assert set(FAMILIES) == set(configs.FAMILIES)


@pytest.mark.parametrize("kind", FAMILIES)
def test_known_classes_are_exact_and_others_are_not(kind):
    sizes, names, other = FAMILIES[kind]
    for name in names:
        config = configured(kind, name, **sizes)
        for source in (config, config.to_dict(), sizes | {"model_type": kind, "architectures": [name]}):
            found = depth.audit(source)
            assert (found.params, found.exact) == (parameters(name, config), True), name
    found = depth.audit(configured(kind, other, **sizes))
    assert not found.exact
    assert "estimated: not all of its parts are known" in " ".join(str(found).split())


def variants(config):
    """A configuration with one value changed, for each of its keys in turn."""
    for key, value in config.items():
        if isinstance(value, bool):
            yield {key: not value}
        elif isinstance(value, int) and not key.endswith("_token_id"):
            yield from ({key: 2 * value}, {key: 1}, {key: value + 8})
        elif value is None and not key.endswith("_token_id"):
            yield {key: 16}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_called_exact_is_exact_whatever_a_key_says(kind):
    sizes, names, _ = FAMILIES[kind]
    compared = 0
    for change in variants(hf.AutoConfig.for_model(kind, **sizes).to_dict()):
        for name in names:
            try:
                config = configured(kind, name, **(sizes | change))
                count = parameters(name, config)
                found = depth.audit(config)
            except Exception:  # what transformers cannot build, and what we refuse
                continue
            compared += 1
            assert not found.exact or found.params == count, (name, change, found.params, count)
    assert compared > 20


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("t5", "T5EncoderModel", {}),
        ("albert", "AlbertModel", {"inner_group_num": 2}),
        ("albert", "AlbertModel", {"embedding_size": 24}),
        ("gpt2", "GPT2LMHeadModel", {"add_cross_attention": True}),
        ("vit", "ViTForImageClassification", {"id2label": {str(at): "x" for at in range(7)}}),
        ("vit", "ViTModel", {"qkv_bias": False}),
        ("opt", "OPTForCausalLM", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
        ("opt", "OPTForCausalLM", {"enable_bias": False}),
        ("llama", "LlamaForCausalLM", {"mlp_bias": True}),
        ("gemma", "GemmaForCausalLM", {"attention_bias": True}),
        ("qwen3", "Qwen3ForCausalLM", {"attention_bias": True}),
        ("gpt_neox", "GPTNeoXForCausalLM", {"attention_bias": False}),
        ("bert", "BertForMaskedLM", {}),
    ],
)
def test_keys_that_change_the_count_are_read(kind, name, change):
    config = configured(kind, name, **(FAMILIES[kind][0] | change))
    found = depth.audit(config)
    assert (found.params, found.exact) == (parameters(name, config), True)


def test_what_is_not_modelled_is_not_called_exact():
    sizes = FAMILIES["opt"][0]
    assert not depth.audit(configured("opt", "OPTForCausalLM", **sizes, layer_norm_elementwise_affine=False)).exact
    # What a file leaves out has its class's default, which a count from sizes does not know.
    for left_out in ("vocab_size", "num_key_value_heads", "head_dim", "intermediate_size"):
        told = {key: value for key, value in WIDE.items() if key != left_out} | {"model_type": "gemma"}
        assert not depth.audit(told).exact, left_out


def test_layers_that_run_in_groups():
    shape = depth.audit(configured("albert", "AlbertModel", **FAMILIES["albert"][0], inner_group_num=2)).shape
    assert (shape.layers, shape.stored_layers) == (8, 4)


def test_a_model_is_counted_by_its_parameters():
    with torch.device("meta"):
        model = hf.BertForPreTraining(hf.BertConfig(**ENCODER))
    found = depth.audit(model)
    assert (found.params, found.exact) == (sum(weight.numel() for weight in model.parameters()), True)


# Families that are not known: matrices and tables are right, norms and the like are left out.
@pytest.mark.parametrize(
    ("config", "name", "off"),
    [
        (hf.FalconConfig(), "FalconForCausalLM", 0.001),
        (hf.FalconConfig(new_decoder_architecture=True, num_kv_heads=1), "FalconForCausalLM", 0.001),
        (hf.CTRLConfig(), "CTRLLMHeadModel", 0.001),
        (hf.UMT5Config(), "UMT5ForConditionalGeneration", 0.001),
        (hf.XLNetConfig(), "XLNetLMHeadModel", 0.08),  # positions have a matrix in each layer
        (hf.WhisperConfig(), "WhisperForConditionalGeneration", 0.05),
        (hf.HeliumConfig(), "HeliumForCausalLM", 0.001),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_families_are_estimated(config, name, off):
    found = depth.audit(config)
    assert not found.exact
    assert found.params == pytest.approx(parameters(name, config), rel=off)
    told = " ".join(str(found).split())
    assert f"about {found.params:,} parameters, estimated: this family is not known" in told
    assert "without norms" not in told


def test_stacks_of_any_family_add_up():
    umt5 = depth.audit(hf.UMT5Config(num_layers=3, num_decoder_layers=4)).shape
    assert (umt5.layers, umt5.cross_layers) == (7, 4)
    crossed = depth.audit(hf.GPT2Config(add_cross_attention=True))
    assert (crossed.shape.layers, crossed.shape.cross_layers) == (12, 12)
    assert "every layer attends to an encoder as well, which is not counted" in crossed.notes
    encoder = depth.audit(configured("t5", "T5EncoderModel", **STACKS))
    assert (encoder.shape.layers, encoder.shape.part, encoder.name) == (3, "encoder", "t5 encoder")


@pytest.mark.parametrize("build", [hf.T5Config, hf.BartConfig], ids=["t5", "bart"])
def test_a_part_of_a_model_is_audited_as_that_part(build):
    sizes = {"d_model": 32, "vocab_size": 50}
    more = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    stacks = {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 8, "d_ff": 48}
    config = build(**sizes, **(more if build is hf.BartConfig else stacks))
    whole = hf.AutoModel.from_config(config)
    assert depth.audit(whole).shape.layers == 5
    for part, layers in (("encoder", 2), ("decoder", 3)):
        model = getattr(whole, f"get_{part}")()
        found = depth.audit(model)
        assert (found.shape.layers, found.shape.part) == (layers, part)
        assert found.params == sum(weight.numel() for weight in model.parameters())
        assert f"of an encoder and a decoder this is the {part} alone" in found.notes
        rough = "" if build is hf.T5Config else "about "
        assert f"{found.params:,} parameters; {rough}{found.shape.layer_params:,} of them" in str(found)


BROKEN = [
    ("t5", {"num_decoder_layers": "x"}, "num_decoder_layers must be a whole number from 0 .* got 'x'"),
    ("roberta", {"type_vocab_size": [2]}, r"type_vocab_size must be .* got \[2\]"),
    ("vit", {"patch_size": "a"}, "patch_size must be .* got 'a'"),
    ("vit", {"patch_size": [16]}, r"patch_size must be a whole number or two of them; got \[16\]"),
    ("vit", {"patch_size": 0}, "patch_size must be .* got 0"),
    ("vit", {"image_size": [224, "b"]}, "image_size must be"),
    ("albert", {"embedding_size": "128"}, "embedding_size must be .* got '128'"),
    ("albert", {"num_hidden_groups": "1"}, "num_hidden_groups must be .* got '1'"),
    ("odd", {"encoder_layers": "6", "decoder_layers": 6}, "encoder_layers must be .* got '6'"),
    ("odd", {"moe_intermediate_size": "9"}, "moe_intermediate_size must be .* got '9'"),
    ("bert", {"hidden_size": 10**400}, "hidden_size must be .* got a larger one"),
    ("bert", {"hidden_size": 768.0}, r"hidden_size must be .* got 768\.0"),
    ("bert", {"intermediate_size": -4}, "intermediate_size must be .* got -4"),
    ("bert", {"num_attention_heads": 7}, "7 heads do not divide width 24"),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 5}, "5 key heads cannot be shared by 12 query heads"),
    ("llama", {"mlp_bias": "yes"}, "mlp_bias must be true or false; got 'yes'"),
]


@pytest.mark.parametrize(("kind", "change", "message"), BROKEN)
def test_numbers_that_no_model_has_are_refused(kind, change, message, tmp_path, monkeypatch, capsys):
    told = FAMILIES.get(kind, (ENCODER,))[0] | {"model_type": kind} | change
    with pytest.raises(InvalidArgument, match=message):
        depth.audit(told)
    (tmp_path / "config.json").write_text(json.dumps(told))
    monkeypatch.setattr("sys.argv", ["heedful", "plan", "--audit", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)


def test_null_means_the_default():
    t5 = depth.audit(STACKS | {"model_type": "t5", "num_decoder_layers": None}).shape
    assert (t5.layers, t5.cross_layers) == (6, 3)
    told = ENCODER | {"model_type": "roberta"}
    assert depth.audit(told | {"type_vocab_size": None}).params == depth.audit(told).params


def test_images_may_have_two_sides():
    square, pair = (
        {"model_type": "vit", **IMAGE, "image_size": a, "patch_size": b} for a, b in ((32, 8), ([32, 32], [8, 8]))
    )
    assert depth.audit(square).params == depth.audit(pair).params
    oblong = hf.ViTConfig(**IMAGE | {"image_size": [32, 48], "patch_size": [8, 16]})
    assert (depth.audit(oblong).params, depth.audit(oblong).exact) == (parameters("ViTModel", oblong), True)
