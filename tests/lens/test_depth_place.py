"""Plans that their own law approves and transformers accepts, configurations of every make, and where a model lies."""

import json
import re
import sys

import pytest
import torch

from heedful import CorruptModel, InvalidArgument, Unsupported, cli
from heedful.bridges import configs
from heedful.lens import depth
from heedful.lens.depth.known import PUBLIC, peers
from heedful.lens.depth.law import LAWS
from heedful.lens.depth.section import section
from heedful.lens.depth.shape import parse_count
from heedful.lens.sections import Subject

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

BUDGETS = ("12M", "60.26M", "85M", "350M", "1.21B", "7B", "70B", "500B")


@pytest.mark.parametrize("law", [*LAWS, lambda width: width / 90], ids=[*LAWS, "own"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_first_shape_lies_within_its_own_law(law, budget):
    for multiple in (8, 64):
        best = depth.plan(budget, law=law, multiple_of=multiple)
        # Nothing that the law likes clearly better stands behind.
        assert best.choices[0].distance <= min(choice.distance for choice in best.choices) + 0.5
        if multiple == 8 or parse_count(budget, "params") > 1e8:
            assert not {"depth_inefficient", "width_inefficient"} & set(best.flags)
            assert best.choices[0].distance <= 2


def test_a_law_without_an_error_counts_in_shares_of_the_depth():
    law = depth.find_law("depth_delusion")
    star = law.optimal_depth(9472)
    assert law.distance(1.1 * star, 9472) == pytest.approx(2.0)
    assert depth.DepthLaw().distance(28.915 + 0.87, 768) == pytest.approx(1.0, abs=0.01)
    found = depth.plan("70B", law="depth_delusion")
    assert abs(found.layers - law.optimal_depth(found.width)) < 0.1 * found.layers
    assert " %  " in str(found)


@pytest.mark.parametrize("kind", list(configs.KINDS))
def test_transformers_accepts_what_is_written(kind):
    gated = configs.is_gated(kind)
    for budget in BUDGETS[:5]:
        for multiple in (1, 8, 24, 64):
            best = depth.plan(budget, gated=gated, multiple_of=multiple)
            assert best.shape.head_dim % 8 == 0
            assert 32 <= best.shape.head_dim <= 128
            assert best.width % multiple == 0
    for multiple in (8, 64):
        best = depth.plan("60.26M", gated=gated, multiple_of=multiple)
        config = hf.AutoConfig.for_model(**best.to_config(kind))
        config.num_hidden_layers = 1
        with torch.device("meta"):
            model = hf.AutoModel.from_config(config)
            model(input_ids=torch.zeros(1, 5, dtype=torch.long))


def test_head_sizes_can_be_chosen():
    assert depth.plan("60M", multiple_of=8, head_multiple_of=16).shape.head_dim % 16 == 0
    assert depth.plan(width=770).shape.head_dim % 2 == 0
    with pytest.raises(InvalidArgument, match="no even head size divides width 771"):
        depth.plan(width=771)
    with pytest.raises(InvalidArgument, match=r"head_multiple_of must be even.*got 3"):
        depth.plan("60M", head_multiple_of=3)
    odd = depth.plan(width=61 * 16, head_dim=61, gated=True)
    with pytest.raises(Unsupported, match="llama turns pairs of channels and cannot have heads of 61"):
        odd.to_config("llama")
    assert depth.plan(width=61 * 16, head_dim=61).to_config("gpt2")["n_head"] == 16


@pytest.mark.parametrize(
    ("text", "count"),
    [("1,300,000,000", 1.3e9), ("1,300M", 1.3e9), ("1_300_000_000", 1.3e9), ("1.3 B", 1.3e9), ("12,345.5", 12345.5)],
)
def test_counts_with_commas(text, count):
    assert parse_count(text, "params") == pytest.approx(count)


@pytest.mark.parametrize("text", ["1,3B", "1,30,000", ",300", "1,,300", "1,3000"])
def test_commas_that_stand_elsewhere_are_refused(text):
    with pytest.raises(InvalidArgument, match="params must be a positive number"):
        parse_count(text, "params")


@pytest.mark.parametrize("text", ["12X768", "12x768", "12 × 768", " 12 x 768 ", "12*768"])  # noqa: RUF001
def test_shapes_in_words(text):
    assert depth.audit(text).shape == depth.audit("12x768").shape


PLAIN = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 1000}


def nested(levels, innermost):
    for _ in range(levels):
        innermost = {"text_config": innermost}
    return innermost


def test_a_configuration_inside_another_is_read():
    inner = {"model_type": "llama", **PLAIN, "intermediate_size": 2048}
    for levels in (1, 2, 5):
        assert depth.audit(nested(levels, inner)).shape == depth.audit(inner).shape
    assert depth.audit({"model_type": "outer", "llm_config": inner}).shape.width == 768
    # Sizes of its own come first; null is nothing.
    assert depth.audit(PLAIN | {"text_config": {"hidden_size": 5}}).shape.width == 768
    assert depth.audit(PLAIN | {"text_config": None, "vision_config": None}).shape.width == 768
    assert depth.audit(hf.CLIPConfig().to_dict()["text_config"]).shape.width == 512
    with pytest.raises(InvalidArgument, match="holds two models; give its encoder or its decoder"):
        depth.audit({"encoder": inner, "decoder": inner})
    with pytest.raises(InvalidArgument, match="two models; give its text_config or its vision_config"):
        depth.audit(hf.LlavaConfig())


LIST: list = []
for _ in range(3000):
    LIST = [LIST]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (nested(1000, PLAIN), "more than 8 times; give the innermost"),
        (PLAIN | {"hidden_size": LIST}, "hidden_size must be a whole number"),
        (PLAIN | {"patch_size": LIST}, "patch_size must be"),
        (PLAIN | {"num_experts": 4, "num_experts_per_tok": 8}, "8 experts for each token, of 4 in all"),
        (PLAIN | {"n_routed_experts": 1, "num_experts_per_tok": 2}, "correct the configuration"),
        ({str(at): 0 for at in range(900)}, "and 860 more"),
        ({1: 2, "a": 3}, "names no width"),
        ({"text_config": "llama"}, "names no width"),
    ],
)
def test_odd_configurations_are_refused_in_one_line(config, told):
    with pytest.raises(InvalidArgument, match=told) as error:
        depth.audit(config)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_odd_values_that_say_nothing_are_passed_over():
    for more in ({"model_type": LIST}, {"architectures": LIST}, {"hidden_act": LIST}, {"num_experts_per_tok": 2}):
        assert depth.audit(PLAIN | more).shape.active_experts == 0


def test_a_file_nested_deep_is_refused(tmp_path):
    for levels in (1000, 100_000):
        (tmp_path / "config.json").write_text('{"text_config":' * levels + "{}" + "}" * levels)
        with pytest.raises((CorruptModel, InvalidArgument), match=r"nested too deep|more than 8 times"):
            depth.audit(tmp_path)


def test_only_what_says_that_it_decodes_is_inside_the_law():
    """The law was fitted on GPT-type models: an encoder is outside, and so is a family that does not say what it is."""
    for config in (
        PLAIN | {"model_type": "odd"},
        PLAIN | {"model_type": "odd", "architectures": ["OddForMaskedLM"]},
        PLAIN | {"model_type": "odd", "architectures": ["OddModel"]},
        PLAIN | {"model_type": "odd", "is_encoder_decoder": True, "architectures": ["OddForCausalLM"]},
        hf.MPNetConfig(),
        hf.ElectraConfig(),
        hf.DebertaV2Config(),
    ):
        assert "extrapolated" in depth.audit(config).flags
    for more in ({"architectures": ["OddForCausalLM"]}, {"is_decoder": True}):
        assert "extrapolated" not in depth.audit(PLAIN | {"model_type": "odd"} | more).flags


def test_extrapolation_names_its_own_reason():
    def reason(found):
        text = " ".join(str(found).split())
        return text.split("outside of what the law was fitted on (")[1].split(")")[0]

    decoders = "levine2020 was fitted on plain GPT-type decoders"
    assert reason(depth.plan("1B", law="depth_delusion")) == "depth_delusion states no sizes it was fitted on"
    assert (
        reason(depth.plan("1B", law="depth_delusion", gated=True)) == "depth_delusion states no sizes it was fitted on"
    )
    for options in ({"params": "1B"}, {"params": "60.26M", "multiple_of": 8}):
        assert reason(depth.plan(gated=True, **options)) == f"gated feed-forward layers, and {decoders}"
    assert reason(depth.audit(PLAIN | {"model_type": "odd"})) == f"odd is not known as a decoder, and {decoders}"
    assert reason(depth.audit("bert-base")) == f"no decoder, and {decoders}"
    assert reason(depth.audit("96x1600")) == "96 layers, and levine2020 was fitted on 6 to 48"
    assert reason(depth.audit("12x8192")) == "width 8192, and levine2020 was fitted on widths 215 to 2215"
    assert reason(depth.audit("24x1024", law=depth.DepthLaw(l_range=(2, 8), name="mine"))).startswith(
        "24 layers, and mine"
    )
    assert depth.audit("96x1600").to_dict()["extrapolated"] == ["96 layers, and levine2020 was fitted on 6 to 48"]
    assert "fitted on" not in str(depth.audit("gpt2"))


def test_the_table_says_what_ranks_its_rows():
    for law, step in (("levine2020", "half a σ"), ("depth_delusion", "2.5 %")):  # noqa: RUF001
        found = depth.plan("1B", law=law)
        assert f"ranked by distance from the law in steps of {step}, then" in " ".join(str(found).split())
        steps = [int(2 * choice.distance) for choice in found.choices]
        assert steps == sorted(steps)
    cut = depth.plan("1B", vocab=256)
    assert re.search(r"ranked by distance from \d+ layers, then", " ".join(str(cut).split()))
    assert "ranked" not in str(depth.plan(layers=24))


def test_an_audit_opens_with_the_place_of_the_model():
    found = depth.audit("gpt2")
    lines = " ".join(str(found).split())
    assert lines.startswith("gpt2: 12 layers x 768 ")
    models, laws, verdict = (
        lines.index(text)
        for text in ("public models of its size", "rival laws for width 768", "verdict by levine2020 alone")
    )
    assert 0 < models < laws < verdict
    assert "12.0 to 28.9 layers" in lines
    assert "12 is within that span" in lines
    for law in LAWS:
        assert law in lines[laws:verdict]
    near = peers(found.shape.executed_params)
    shallower, deeper = (sum(sign * (layers - 12) > 0 for layers, _ in near.values()) for sign in (-1, 1))
    assert f"{shallower} shallower, {len(near) - shallower - deeper} as deep, {deeper} deeper" in lines
    told = found.to_dict()
    assert told["span"] == pytest.approx([12.0, 28.915], abs=1e-2)
    assert told["peers"]["GPT-2"] == [12, 768]
    assert list(told["place"]) == list(found.place)
    assert "is above that span" in str(depth.audit("200x768")).replace("\n  ", " ")
    assert "is below that span" in str(depth.audit("2x768")).replace("\n  ", " ")


def test_public_models_are_many_and_sorted():
    assert len(PUBLIC) >= 60
    near = peers(12 * 32 * 4096**2)
    assert list(near.values()) == sorted(near.values())
    assert {"Llama-7B", "Mistral-7B", "Pythia-6.9B"} <= set(near)
    assert peers(1000) == {}
    # What somebody else holds as a configuration has the same shape here.
    for name, config in (
        ("GPT-2 XL", "gpt2-xl"),
        ("Llama-7B", "llama-7b"),
        ("Qwen2-0.5B", "qwen2-0.5b"),
        ("NeoBERT", "neobert"),
    ):
        shape = depth.audit(config).shape
        assert PUBLIC[name] == (shape.layers, shape.width)


def test_the_section_opens_with_it_too():
    config = hf.GPT2Config(vocab_size=41, n_embd=24, n_layer=2, n_head=3)
    found = section(Subject(hf.GPT2Model(config), None, None, "", ()))
    first, *rest = found.summary.splitlines()
    assert first == "2 layers of width 24: no public model of its size is listed"
    assert rest[0].startswith("rival laws for width 24: ")
    assert found.html.index("Rival laws for width 24") < found.html.index("<strong>")
    assert max(map(len, found.summary.splitlines())) <= 100


def test_the_command_answers_odd_words(monkeypatch, capsys, tmp_path):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["heedful", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        told = capsys.readouterr()
        return stopped.value.code, told.out, told.err

    code, out, err = run("1,300,000,000")
    assert (code, err) == (0, "")
    assert out.startswith("42 layers x 1600")
    assert run("--audit", "12X768")[0] == 0
    code, out, _ = run("60.26M", "--gated", "--multiple-of", 8, "--hf", "llama", "--out", tmp_path / "model")
    assert code == 0
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["head_dim"] % 8 == 0
    assert hf.AutoConfig.from_pretrained(tmp_path / "model").head_dim == written["head_dim"]
    code, out, err = run("60M", "--head-multiple-of", 3)
    assert (code, out, err.count("\n")) == (2, "", 1)
    (tmp_path / "config.json").write_text("[" * 100_000)
    code, out, err = run("--audit", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
