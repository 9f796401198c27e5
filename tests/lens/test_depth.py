"""The depth planner: the law, plans that can be trained, and verdicts on public models."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from heedful import InvalidArgument, Unsupported
from heedful.bridges import configs
from heedful.lens import depth
from heedful.lens.depth.known import CONFIGS
from heedful.lens.depth.section import chart, embedding_rank, section
from heedful.lens.sections import Subject

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

LAW = depth.DepthLaw()
# Budget, depth and width as the sheet recomputed them.
PROJECTIONS = {
    "GPT-3 Small": (23.04, 554),
    "GPT-3 Medium": (31.62, 892),
    "GPT-3 Large": (37.41, 1230),
    "GPT-3 XL": (41.63, 1555),
    "GPT-3 2.7B": (47.12, 2110),
    "GPT-3 6.7B": (54.31, 3144),
    "GPT-3 13B": (59.58, 4212),
    "GPT-3 175B": (80.46, 13422),
    "1T": (94.75, 29657),
}
# The Hugging Face class that holds what a family's count counts.
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "distilbert": "DistilBertModel",
    "albert": "AlbertModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTModel",
    "opt": "OPTForCausalLM",
    "gemma": "GemmaForCausalLM",
}


def on_meta(config):
    with torch.device("meta"):
        return getattr(hf, CLASSES[config.model_type])(config)


def counts(model):
    """(matrices inside layers, all parameters); a layer has a number in its name."""
    named = dict(model.named_parameters())
    inside = [
        p.numel()
        for name, p in named.items()
        if p.dim() >= 2 and any(part.isdigit() for part in name.split(".")) and "relative" not in name
    ]
    return sum(inside), sum(p.numel() for p in named.values())


# Check 1.
@pytest.mark.parametrize(("width", "layers"), [(768, 28.915), (1024, 34.099), (12288, 78.872)])
def test_optimal_depth(width, layers):
    assert LAW.optimal_depth(width) == pytest.approx(layers, abs=1e-3)


@pytest.mark.parametrize(("layers", "width"), [(6, 215.3), (24, 584.6), (48, 2215.0)])
def test_optimal_width(layers, width):
    assert LAW.optimal_width(layers) == pytest.approx(width, abs=0.1)


def test_errors_of_the_law():
    assert LAW.sigma_depth(LAW.optimal_depth(768)) == pytest.approx(0.87, abs=0.005)
    assert LAW.sigma_depth(LAW.optimal_depth(12288)) == pytest.approx(1.9, abs=0.05)
    assert LAW.band(768) == 2 * LAW.sigma_depth(LAW.optimal_depth(768))


# Check 2.
def test_the_published_table_is_recomputed():
    rows = depth.published_table()
    assert [row.name for row in rows] == list(PROJECTIONS)
    for row in rows:
        layers, width = PROJECTIONS[row.name]
        assert row.depth == pytest.approx(layers, abs=0.01)
        assert row.width_at_depth == pytest.approx(width, rel=1e-3)
        assert abs(round(row.depth) - row.printed_depth) <= 1
        assert 12 * row.depth * row.width_at_depth**2 == pytest.approx(row.params)


@pytest.mark.parametrize("name", ["constant_aspect", "depth_delusion"])
def test_rival_laws_solve_and_invert(name):
    law = depth.find_law(name)
    layers, width = law.solve(1e9, 13.0)
    assert 13 * layers * width**2 == pytest.approx(1e9)
    assert law.optimal_width(layers) == pytest.approx(width)
    assert law.sigma_depth(layers) is None


def test_a_function_is_a_law():
    best = depth.plan("100M", law=lambda width: width / 32)
    assert best.width / best.layers == pytest.approx(32, rel=0.1)
    with pytest.raises(InvalidArgument, match="there is no law 'kaplan'"):
        depth.find_law("kaplan")


# Check 3.
@pytest.mark.parametrize("row", depth.published_table()[:-1], ids=lambda row: row.name)
def test_plans_keep_the_budget_and_the_law(row):
    for multiple, off, far in ((8, 0.03, 0.06), (64, 0.08, 0.12)):
        best = depth.plan(row.params, multiple_of=multiple)
        assert best.width % multiple == 0
        assert abs(best.shape.layer_params / row.params - 1) <= off
        assert abs(math.log(best.width) - LAW.a - LAW.b * best.layers) <= far
        assert best.width % best.heads == 0


# Check 4.
@pytest.mark.parametrize("name", [name for name in CONFIGS if "model_type" in CONFIGS[name]])
def test_counts_are_those_of_the_model(name):
    config = hf.AutoConfig.for_model(**CONFIGS[name])
    model = on_meta(config)
    found = depth.audit(name)
    assert (found.shape.layer_params, found.params) == counts(model)
    assert found.exact
    for source in (config, model, config.to_dict()):
        assert depth.audit(source).params == found.params


@pytest.mark.parametrize(
    ("name", "layers", "total"),
    [
        ("gpt2", 84_934_656, 124_439_808),
        ("llama-7b", 6_476_005_376, 6_738_415_616),
        ("mistral-7b", 6_979_321_856, 7_241_732_096),
    ],
)
def test_counts_that_are_known(name, layers, total):
    found = depth.audit(name)
    assert (found.shape.layer_params, found.params) == (layers, total)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "opt", "vocab_size": 97, "ffn_dim": 48, "word_embed_proj_dim": 24, "hidden_size": 24},
        {"model_type": "qwen3", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "head_dim": 16},
        {"model_type": "gemma", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "head_dim": 16},
        {"model_type": "llama", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "attention_bias": True},
    ],
    ids=lambda config: config["model_type"],
)
def test_counts_of_other_families(config):
    more = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 31}
    more |= {"num_key_value_heads": 4} if config["model_type"] == "opt" else {}
    config = hf.AutoConfig.for_model(**config, **more)
    found = depth.audit(config)
    assert (found.shape.layer_params, found.params) == counts(on_meta(config))


# Check 5.
@pytest.mark.parametrize(
    ("name", "flag"),
    [
        *((name, "depth_inefficient") for name in ("gpt2-xl", "llama-2-70b", "gpt3-175b", "96x12288")),
        *((name, "width_inefficient") for name in ("gpt2", "bert-base", "llama-7b")),
        ("28x768", None),
        ("neobert", None),
    ],
)
def test_verdicts(name, flag):
    flags = depth.audit(name).flags
    assert {"depth_inefficient", "width_inefficient"} & set(flags) == ({flag} if flag else set())


def test_a_tiny_model_gets_no_verdict():
    found = depth.audit("5x24")
    assert found.verdict == "too narrow for the law"
    assert not {"depth_inefficient", "width_inefficient"} & set(found.flags)


def test_what_the_law_was_not_fitted_on_is_extrapolated():
    assert "extrapolated" not in depth.audit("gpt2").flags
    for name in ("bert-base", "vit-base", "mixtral-8x7b", "llama-7b", "t5-11b", "96x12288"):
        assert "extrapolated" in depth.audit(name).flags


# Check 10.
def test_bottlenecks_are_flagged():
    assert "vocab_bottleneck" in depth.plan("85M", vocab=256).flags
    assert depth.plan("85M", vocab=256).width > 256
    assert "vocab_bottleneck" in depth.plan("85M", embedding_rank=128).flags
    assert "vocab_bottleneck" not in depth.plan("85M").flags
    albert = depth.audit("albert-xxlarge")
    assert "vocab_bottleneck" in albert.flags
    assert (albert.shape.rank, albert.shape.layers, albert.shape.stored_layers) == (128, 12, 1)
    t5 = depth.audit("t5-11b")
    assert "inner_dim_bottleneck" in t5.flags
    assert (t5.shape.inner, t5.shape.width) == (16384, 1024)
    assert "vocab_bottleneck" in depth.audit("gpt2", vocab_rank=300).flags
    # 16 x 16 pixels of 3 colours are 768 values.
    assert depth.audit("vit-base").shape.rank == 768


def test_a_small_vocabulary_gets_depth_for_width():
    law, low = depth.plan("85M"), depth.plan("85M", vocab=256)
    assert low.width < law.width
    assert low.layers > law.layers
    assert low.shape.layer_params == pytest.approx(8.5e7, rel=0.08)
    assert any("rank 256" in note for note in low.notes)


# Check 12.
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "mistral", "qwen2", "qwen3"])
def test_a_plan_is_a_model_with_the_stated_count(kind):
    gated = configs.is_gated(kind)
    for tied in (True, False):
        best = depth.plan("85M", gated=gated, kv_ratio=3 if gated else 1, seq_len=77, vocab=1009, tied=tied)
        config = best.to_hf(kind)
        assert counts(on_meta(config)) == (best.shape.layer_params, best.params_as(kind))
        assert type(config)(**best.to_config(kind)).to_dict() | {"architectures": None} == config.to_dict() | {
            "architectures": None
        }


def test_a_plan_refuses_what_a_kind_cannot_express():
    with pytest.raises(Unsupported, match="plan with gated=True"):
        depth.plan("85M").to_hf("llama")
    with pytest.raises(Unsupported, match="plan with kv_ratio=1"):
        depth.plan("85M", kv_ratio=3).to_hf("gpt2")
    with pytest.raises(Unsupported, match="plan without embedding_rank"):
        depth.plan("85M", embedding_rank=128).to_hf("gpt2")
    with pytest.raises(InvalidArgument, match="there are gpt2, bert, llama"):
        depth.plan("85M").to_config("mamba")


# Check 11.
def test_a_law_is_recovered_from_noisy_runs():
    source = torch.Generator().manual_seed(3)
    for a, b in ((5.039, 0.0555), (4.3, 0.09)):
        law = depth.DepthLaw(a, b)
        rows = []
        for layers in (6, 12, 18, 24, 36, 48):
            middle = law.optimal_width(layers)
            for width in (round(middle * 2 ** (step / 2)) for step in range(-5, 6)):
                away = math.log(width) - a - b * layers
                loss = 12 * (12 * layers * width**2) ** -0.07 + 0.05 * away**2
                noise = 1e-3 * torch.randn(2, generator=source)
                rows += [(layers, width, loss + float(noise[seed]), seed) for seed in (0, 1)]
        fitted = depth.DepthLaw.from_runs(rows)
        assert fitted.a == pytest.approx(a, abs=0.05)
        assert fitted.b == pytest.approx(b, abs=0.004)
        assert abs(fitted.a - a) < 4 * fitted.a_std
        assert 0 < fitted.b_std < 0.004


def test_runs_that_tell_no_law_are_refused():
    with pytest.raises(InvalidArgument, match="three depths"):
        depth.fit_law([(1, 8, 3.0), (2, 8, 2.0)])
    flat = [(layers, width, 3.0 - layers / 10) for layers in (1, 2, 3) for width in (8, 16, 32)]
    with pytest.raises(InvalidArgument, match="0 of 2 pairs of depths cross"):
        depth.fit_law(flat)
    with pytest.raises(InvalidArgument, match="a run is"):
        depth.fit_law([(1, 8, math.nan)])


def test_budgets_in_other_words():
    assert depth.plan("1.3B").to_dict() == depth.plan(1.3e9).to_dict()
    assert depth.plan(flops=120 * 1e16).budget == pytest.approx(1e8)
    memory = depth.plan(memory="16GB", vocab=1000)
    assert memory.params == pytest.approx(1e9, rel=0.08)
    whole = depth.plan("1B", include_embeddings=True, vocab=250_000, tied=False)
    assert whole.params == pytest.approx(1e9, rel=0.08)
    assert whole.layers < depth.plan("1B").layers
    assert depth.plan(layers=24).width == round(LAW.optimal_width(24) / 64) * 64
    assert depth.plan(width=768).layers == 29
    assert depth.plan("1B", max_depth=16).layers == 16
    assert depth.plan("1B", head_dim=96).shape.head_dim == 96


def test_groups_of_queries_and_gates_enter_the_count():
    best = depth.plan("1B", gated=True, kv_ratio=4)
    assert best.heads % best.shape.kv_heads == 0
    assert best.heads // best.shape.kv_heads == 4
    assert best.shape.kappa == pytest.approx(2 + 2 / 4 + 3 * best.ffn / best.width)
    assert best.shape.kv_cache_bytes(10) == 2 * best.layers * 10 * best.shape.kv_heads * best.shape.head_dim * 2


def test_arithmetic_per_token():
    shape = depth.Shape(3, 64, 2, vocab=100, context=50)
    assert shape.flops_per_token() == 2 * 12 * 3 * 64**2 + 2 * 3 * 50 * 64 + 2 * 100 * 64
    mixture = depth.audit("mixtral-8x7b").shape
    assert mixture.layer_params - mixture.executed_params == 32 * 6 * mixture.ffn_params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": -1}, "params must be a positive number"),
        ({"params": "many"}, "got 'many'"),
        ({}, "got none"),
        ({"params": 1e9, "flops": 1e20}, "got params, flops"),
        ({"params": 1e9, "vocab": 0}, "vocab must be"),
        ({"params": 1e300}, "outside of what the law can answer"),
        ({"layers": 100_000}, "beyond all floats"),
        ({"width": 64}, "give a larger width"),
        ({"params": 1e6, "include_embeddings": True}, "embeddings alone"),
        ({"params": 1e9, "include_embeddings": True, "embedding_rank": 64}, "drop one"),
        ({"width": 640, "head_dim": 96}, "heads of 96 do not divide width 640"),
        ({"params": 1e9, "max_depth": 2.5}, "max_depth must be a whole number"),
    ],
)
def test_budgets_that_make_no_sense(options, message):
    with pytest.raises(InvalidArgument, match=message):
        depth.plan(**options)


def test_configurations_that_tell_no_shape(tmp_path):
    with pytest.raises(InvalidArgument, match=r"no width: looked for hidden_size.*among model_type, n_layer"):
        depth.audit({"model_type": "gpt2", "n_layer": 3})
    with pytest.raises(InvalidArgument, match="names are not downloaded"):
        depth.audit("meta-llama/Llama-3")
    with pytest.raises(InvalidArgument, match="two models"):
        depth.audit(hf.CLIPConfig())
    with pytest.raises(InvalidArgument, match="a Linear has no configuration"):
        depth.audit(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match="5 heads do not divide width 64"):
        depth.Shape(1, 64, 5)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OSError, match="not valid JSON"):
        depth.audit(str(tmp_path))


def test_an_unknown_family_is_estimated(tmp_path):
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 10,
        "model_type": "odd",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, str(tmp_path), str(tmp_path / "config.json")):
        found = depth.audit(source)
        assert not found.exact
        assert found.params == 12 * 2 * 64**2 + 640
    assert "parameters, estimated from its sizes" in " ".join(str(found).split())


def test_bart_adds_up_its_stacks():
    shape = depth.audit(hf.BartConfig(encoder_layers=3, decoder_layers=4, d_model=64, encoder_attention_heads=4)).shape
    assert (shape.layers, shape.cross_layers, shape.causal) == (7, 4, False)


@pytest.mark.parametrize("thing", [depth.plan("350M"), depth.audit("t5-11b"), depth.audit("albert-xxlarge")])
def test_results_are_json_and_fit_a_terminal(thing):
    assert json.loads(json.dumps(thing.to_dict())) == thing.to_dict()
    assert max(map(len, str(thing).splitlines())) <= 80
    assert "Depth runs layer after layer" in str(thing)


def test_plots_have_axes():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    pyplot.switch_backend("agg")
    for ax in (depth.plan("85M").plot(), depth.audit("gpt2").plot(), LAW.plot(), depth.plot_sep_curves((2, 3), 4)):
        assert ax.get_xlabel()
        assert ax.get_title()
        pyplot.close(ax.figure)


def test_the_energy_of_an_embedding():
    table = torch.diag(torch.tensor([9.0, 1.0, 0.1, 0.0]))
    assert embedding_rank(table) == 2  # 81 of 82.01 is less than 99 %
    assert embedding_rank(table, 0.9) == 1
    assert embedding_rank(torch.eye(5)) == 5


@pytest.fixture(scope="module")
def bert():
    sizes = {"hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 3, "intermediate_size": 37}
    return hf.BertModel(hf.BertConfig(vocab_size=41, **sizes))


def test_the_section_of_the_report(bert):
    inputs = {"input_ids": torch.arange(8)[None]}
    found = section(Subject(bert, None, None, "", (), inputs=inputs))
    assert found.data["shape"]["layers"] == 5
    assert len(found.data["without_layer"]) == 5
    assert "Left out alone, layer" in found.summary
    assert "Left out alone" not in section(Subject(bert, None, None, "", ())).summary
    assert 0 < found.data["effective_embedding_rank"] <= 24
    assert json.loads(json.dumps(found.data)) == found.data
    assert max(map(len, found.summary.splitlines())) <= 100
    assert "<svg" in found.html
    assert "http" not in found.html
    assert "currentColor" in chart(depth.audit("gpt3-175b")).svg()


def test_the_section_says_why_it_does_not_apply():
    with pytest.raises(Unsupported, match="which this model has not"):
        section(SimpleNamespace(model=torch.nn.Linear(2, 2)))
    with pytest.raises(Unsupported, match="names no layers"):
        section(SimpleNamespace(model=SimpleNamespace(config={"hidden_size": 3})))
