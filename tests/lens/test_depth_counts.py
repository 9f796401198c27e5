"""What an audit counts: exactly what the class builds, or an estimate that is called one; and what no model can be."""

import json

import pytest
import torch

from heedful import InvalidArgument, MissingExtra, cli
from heedful.bridges import configs
from heedful.lens import depth
from heedful.lens.depth.known import CONFIGS, PARAMS
from zoo import ZOO

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
KINDS = {
    "t5": STACKS,
    "bert": ENCODER,
    "gpt_neox": ENCODER,
    "roberta": ENCODER,
    "vit": IMAGE,
    "llama": DECODER,
    "gemma": WIDE,
    "qwen3": WIDE,
    "albert": ENCODER | {"embedding_size": 16, "num_hidden_groups": 2},
    "gpt2": {"n_layer": 3, "n_embd": 24, "n_head": 4, "vocab_size": 97, "n_positions": 31},
    "opt": {key: value for key, value in ENCODER.items() if key != "intermediate_size"}
    | {"ffn_dim": 40, "word_embed_proj_dim": 24},
}


# Of the zoo, what holds two models: which of them is audited is for the caller to say.
REFUSED = {"clip", "llava", "paligemma", "colpali", "qwen3_asr", "qwen3_5_moe", "minicpm_ocr"}


def parameters(name, config):
    with torch.device("meta"):
        return sum(weight.numel() for weight in getattr(hf, name)(config).parameters())


def configured(kind, name, **sizes):
    return hf.AutoConfig.for_model(kind, architectures=[name], **sizes)


@pytest.mark.parametrize("name", [name for name in ZOO if name not in REFUSED])
def test_a_configuration_of_the_zoo_is_counted_as_its_class_builds_it(name):
    case = ZOO[name]
    config = getattr(hf, case.config)(**case.sizes)
    report = depth.audit(config.to_dict() | {"architectures": [case.model]})
    assert (report.params, report.exact) == (parameters(case.model, config), True)


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
    config = configured(kind, name, **(KINDS[kind] | change))
    found = depth.audit(config)
    assert (found.params, found.exact) == (parameters(name, config), True)


def test_without_transformers_counts_are_estimates(monkeypatch):
    monkeypatch.setattr(configs, "find_spec", lambda name: None)
    report = depth.audit(dict(CONFIGS["gpt2"]))
    assert depth.audit("gpt2").params == 124_439_808
    assert (report.exact, report.params) == (False, 84_934_656 + 50257 * 768)
    assert "about 123,532,032 parameters, estimated from its sizes" in " ".join(str(report).split())
    with pytest.raises(MissingExtra, match="hf"):
        depth.plan("85M").params_as("gpt2")


def test_what_cannot_be_built_is_estimated():
    for config in (ENCODER | {"model_type": "odd"}, ENCODER | {"model_type": "bert", "num_hidden_layers": 10**6}):
        assert not depth.audit(config).exact


def test_layers_that_run_in_groups():
    shape = depth.audit(configured("albert", "AlbertModel", **KINDS["albert"], inner_group_num=2)).shape
    assert (shape.layers, shape.stored_layers) == (8, 4)


def test_a_model_is_counted_by_its_parameters():
    with torch.device("meta"):
        model = hf.BertForPreTraining(hf.BertConfig(**ENCODER))
    found = depth.audit(model)
    assert (found.params, found.exact) == (sum(weight.numel() for weight in model.parameters()), True)


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
def test_estimates_are_near_the_count(config, name, off):
    assert depth.audit(config).shape.params == pytest.approx(parameters(name, config), rel=off)


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
        assert f"{found.params:,} parameters; {found.shape.layer_params:,} of them" in str(found)


BROKEN = [
    ("t5", {"num_decoder_layers": "x"}, "num_decoder_layers must be a whole number from 0 .* got 'x'"),
    ("vit", {"patch_size": "a"}, "patch_size must be .* got 'a'"),
    ("vit", {"patch_size": [16]}, r"patch_size must be a whole number or two of them; got \[16\]"),
    ("vit", {"patch_size": 0}, "patch_size must be .* got 0"),
    ("albert", {"embedding_size": "128"}, "embedding_size must be .* got '128'"),
    ("albert", {"num_hidden_groups": "1"}, "num_hidden_groups must be .* got '1'"),
    ("odd", {"encoder_layers": "6", "decoder_layers": 6}, "encoder_layers must be .* got '6'"),
    ("odd", {"moe_intermediate_size": "9"}, "moe_intermediate_size must be .* got '9'"),
    ("bert", {"hidden_size": 10**400}, "hidden_size must be .* got a larger one"),
    ("bert", {"hidden_size": 768.0}, r"hidden_size must be .* got 768\.0"),
    ("bert", {"intermediate_size": -4}, "intermediate_size must be .* got -4"),
    ("bert", {"num_attention_heads": 7}, "7 heads do not divide width 24"),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 5}, "5 key heads cannot be shared by 12 query heads"),
]


@pytest.mark.parametrize(("kind", "change", "message"), BROKEN)
def test_numbers_that_no_model_has_are_refused(kind, change, message, tmp_path, monkeypatch, capsys):
    told = KINDS.get(kind, ENCODER) | {"model_type": kind} | change
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


def test_counts_of_known_names_are_those_of_the_classes():
    small = [name for name in PARAMS if PARAMS[name] < 2e9]
    assert PARAMS.keys() == CONFIGS.keys() - {"neobert"}
    assert len(small) > 8
    assert {name: configs.count(CONFIGS[name]) for name in small} == {name: PARAMS[name] for name in small}
