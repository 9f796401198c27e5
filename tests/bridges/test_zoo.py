"""A zoo of Hugging Face architectures, tiny and random: `use(Softmax())` and `observe` against what the models compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful import Gaussian, InvalidArgument, Sigmoid, Unsupported
from heedful.bridges.transformers import restore, use, used
from heedful.lens import observe

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

IMAGE_TOKEN = 36
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 19}
TEXT = {**SIZES, "vocab_size": 37}
GROUPED = {**TEXT, **MARKS, "num_attention_heads": 4, "num_key_value_heads": 2}
DECODER = {**GROUPED, "head_dim": 6}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
BOTH = {
    **MARKS,
    "vocab_size": 37,
    "d_model": 24,
    "decoder_start_token_id": 1,
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 3))},
    **{f"{side}_ffn_dim": 19 for side in ("encoder", "decoder")},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
LINEAR = {f"linear_{what}": 2 for what in ("num_key_heads", "num_value_heads")} | {
    f"linear_{what}_head_dim": 6 for what in ("key", "value")
}
WAVES = {
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1}
PALIGEMMA = {
    "text_config": {**DECODER, "model_type": "gemma"},
    "vision_config": SIGLIP,
    "projection_dim": 24,
    "image_token_index": IMAGE_TOKEN,
}
HEARING = {
    "model_type": "qwen3_asr_encoder",
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 19,
    "num_mel_bins": 8,
    "output_dim": 24,
    "downsample_hidden_size": 4,
    "max_source_positions": 20,
}
SEEING = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 19,
    "patch_size": 4,
    "out_hidden_size": 24,
    "num_position_embeddings": 16,
}
HYBRID = {**DECODER, **LINEAR, "num_hidden_layers": 4}
MARKED = {"image_token_id": IMAGE_TOKEN, "video_token_id": 35}


@dataclass(frozen=True)
class Case:
    """One architecture: its classes in transformers, its sizes, what it reads, how many of its layers the run reaches."""

    model: str
    config: str
    sizes: dict[str, Any]
    reads: str = "text"
    layers: int = 2

    def build(self) -> Any:
        if not hasattr(hf, self.model):
            pytest.skip(f"transformers {hf.__version__} has no {self.model}; it runs with one that has it")
        torch.manual_seed(0)
        model = getattr(hf, self.model)(getattr(hf, self.config)(**self.sizes)).double().eval()
        # Weights of the default size would leave attention near uniform, and a wrong mask or scale unseen.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
        if model._can_set_experts_implementation():
            # Grouped products of matrices are there for 32 and 16 bits alone.
            model.set_experts_implementation("eager")
        return model


ZOO = {
    # text: encoders
    "bert": Case("BertModel", "BertConfig", TEXT),
    "roberta": Case("RobertaModel", "RobertaConfig", {**TEXT, "max_position_embeddings": 40}),
    "albert": Case("AlbertModel", "AlbertConfig", {**TEXT, "embedding_size": 8}),
    "electra": Case("ElectraModel", "ElectraConfig", {**TEXT, "embedding_size": 8}),
    "modernbert": Case(
        "ModernBertModel",
        "ModernBertConfig",
        {**TEXT, **MARKS, "num_hidden_layers": 3, "local_attention": 4, "cls_token_id": 3, "sep_token_id": 4},
        layers=3,
    ),
    "neomme": Case(  # a part of each attention is called attention, and calls nothing
        "NeoMMEModel",
        "NeoMMEConfig",
        {
            **DECODER,
            "head_dim": 16,
            "embedding_rank": 8,
            "sliding_window": 4,
            "image_token_id": 35,
            "document_token_id": 34,
        },
    ),
    # text: decoders
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 37, "n_embd": 24, "n_layer": 2, "n_head": 3, **MARKS}),
    "gpt_neox": Case("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **MARKS, "num_attention_heads": 4}),
    "opt": Case("OPTForCausalLM", "OPTConfig", {**TEXT, **MARKS, "ffn_dim": 19, "word_embed_proj_dim": 24}),
    "llama": Case("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": Case("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 4}),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**DECODER, **EXPERTS}),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": Case("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "olmo2": Case("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "minicpm3": Case(
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        {
            **GROUPED,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
    # text: encoders with decoders
    "t5": Case(
        "T5Model",
        "T5Config",
        {**MARKS, "vocab_size": 37, "d_model": 24, "d_kv": 6, "d_ff": 19, "num_layers": 2, "num_heads": 3},
        "text and text",
        layers=6,
    ),
    "bart": Case("BartModel", "BartConfig", {**BOTH, "max_position_embeddings": 40}, "text and text", layers=6),
    "m2m_100": Case("M2M100Model", "M2M100Config", {**BOTH, "max_position_embeddings": 40}, "text and text", layers=6),
    # images
    "vit": Case("ViTModel", "ViTConfig", VISION, "image"),
    "dinov2": Case("Dinov2Model", "Dinov2Config", {**VISION, "mlp_ratio": 2}, "image"),
    "siglip": Case("SiglipVisionModel", "SiglipVisionConfig", {**VISION, "vision_use_head": False}, "image"),
    # sound
    "wav2vec2": Case("Wav2Vec2Model", "Wav2Vec2Config", {**TEXT, **WAVES}, "wave"),
    "hubert": Case("HubertModel", "HubertConfig", {**TEXT, **WAVES}, "wave"),
    "ast": Case(
        "ASTModel",
        "ASTConfig",
        {**SIZES, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
        "spectrogram",
    ),
    "whisper": Case(
        "WhisperModel",
        "WhisperConfig",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20},
        "sound and text",
        layers=6,
    ),
    # several at once
    "clip": Case(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**TEXT, **MARKS}, "vision_config": VISION, "projection_dim": 12},
        "image and text",
        layers=4,
    ),
    "llava": Case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**DECODER, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
        },
        "image in text",
        layers=4,
    ),
    "paligemma": Case("PaliGemmaForConditionalGeneration", "PaliGemmaConfig", PALIGEMMA, "image in text", layers=4),
    "colpali": Case(
        "ColPaliForRetrieval",
        "ColPaliConfig",
        {"vlm_config": {**PALIGEMMA, "model_type": "paligemma"}, "embedding_dim": 8},
        "image in text",
        layers=4,
    ),
    "qwen3_asr": Case(
        "Qwen3ASRForConditionalGeneration",
        "Qwen3ASRConfig",
        {
            "text_config": {**DECODER, "model_type": "qwen3"},
            "audio_config": HEARING,
            "audio_token_id": IMAGE_TOKEN,
            "timestamp_token_id": 35,
            "pad_token_id": 0,
            "eos_token_id": (2, 5),
        },
    ),
    # attention beside layers of another kind
    "qwen3_5_moe": Case(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {
            "text_config": {
                **{name: size for name, size in HYBRID.items() if name != "intermediate_size"},
                **EXPERTS,
                "shared_expert_intermediate_size": 11,
            },
            "vision_config": SEEING,
            **MARKED,
        },
        layers=1,
    ),
    "qwen3_next": Case(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 11},
        layers=1,
    ),
    "minicpm_ocr": Case(
        "MiniCPMOcrForConditionalGeneration",
        "MiniCPMOcrConfig",
        {
            "text_config": {**HYBRID, "model_type": "qwen3_5_text"},
            "vision_config": {**VISION, "image_size": 16},
            "insert_layer_id": 0,
            **MARKED,
        },
        layers=1,
    ),
    "granitemoehybrid": Case(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **GROUPED,
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 19,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
        layers=1,
    ),
    "lfm2": Case("Lfm2ForCausalLM", "Lfm2Config", {**GROUPED, "layer_types": ["conv", "full_attention"]}, layers=1),
}
# Eager and SDPA attention of transformers itself disagree here.
STREAMING = Case(
    "NemotronAsrStreamingEncoder",
    "NemotronAsrStreamingEncoderConfig",
    {
        **SIZES,
        "num_attention_heads": 2,
        "num_mel_bins": 8,
        "subsampling_factor": 2,
        "subsampling_conv_channels": 4,
        "sliding_window": 4,
        "default_num_lookahead_tokens": 2,
        "conv_kernel_size": 3,
    },
    "padded sound",
)
# Eager attention alone, with a sink that takes a share of every row.
SINK = Case("GraniteSWAForCausalLM", "GraniteSWAConfig", {**DECODER, "sliding_window": 4})


def given(reads: str) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    ids = torch.randint(6, 33, (2, 7), generator=source)
    text = {"input_ids": ids, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5]])).long()}
    image = {"pixel_values": random(2, 3, 8, 8)}
    ahead = {"input_ids": torch.full((2, 4), IMAGE_TOKEN), "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    return {
        "text": text,
        "text and text": {**text, "decoder_input_ids": ids[:, :5]},
        "image": image,
        "image and text": text | image,
        "image in text": {name: torch.cat((ahead[name], text[name]), 1) for name in text} | image,
        "wave": {"input_values": random(2, 60)},
        "spectrogram": {"input_values": random(2, 16, 8)},
        "sound and text": {"input_features": random(2, 8, 20), "decoder_input_ids": ids[:, :5]},
        "padded sound": {
            "input_features": random(2, 22, 8),
            "attention_mask": torch.arange(22) < torch.tensor([[22], [15]]),
        },
    }[reads]


def run(model: Any, inputs: dict[str, Tensor], implementation: str | None = None, **options: Any) -> Any:
    if implementation is not None:
        model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, **options)


def main(output: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the model says, zero where a token is padding."""
    names = ("logits", "last_hidden_state", "logits_per_image", "embeddings")
    said = next(output[name] for name in names if name in output)
    kept = inputs.get("attention_mask")
    return said * kept[..., None] if kept is not None and kept.shape == said.shape[:2] and said.dim() == 3 else said


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def attentions(output: Any) -> Iterator[Tensor]:
    """All weights that a model returned, also in the outputs of its parts."""
    for name, value in output.items():
        if hasattr(value, "items"):
            yield from attentions(value)
        elif name.endswith("attentions"):
            yield from (one for one in value or () if one is not None)


def compare_weights(seen: Any, returned: list[Tensor]) -> None:
    """Each returned tensor is one record's, for queries that see anything."""
    records = [record.weights for record in seen]
    for weights in returned:
        alike = [
            ours
            for ours in records
            if ours.shape == weights.shape and torch.allclose(ours, weights * ours.any(-1, keepdim=True), atol=1e-5)
        ]
        assert alike, f"no record has these weights, {tuple(weights.shape)}"
        records = [ours for ours in records if ours is not alike[0]]


@pytest.mark.parametrize("name", ZOO)
def test_softmax_and_observe_are_what_the_model_computes(name):
    case = ZOO[name]
    model, inputs = case.build(), given(case.reads)
    eager, sdpa = (main(run(model, inputs, which), inputs) for which in ("eager", "sdpa"))
    # Most eager attention takes its softmax in float32.
    assert distance(sdpa, eager) < 1e-5
    placement = use(model)
    assert distance(main(run(model, inputs), inputs), sdpa) < 1e-10
    assert distance(main(run(use(model, Gaussian(1.3)), inputs), inputs), sdpa) > 1e-3
    assert len(placement.changed) + len(placement.left) >= 1
    restore(model)
    assert torch.equal(main(run(model, inputs), inputs), sdpa)

    seen = observe(model, inputs, keep=("weights",))
    assert (len(seen), seen.unseen) == (case.layers, ())
    # A layer that runs twice, as ALBERT's, has one name.
    assert {record.name for record in seen} <= set(placement.changed)
    returned = list(attentions(run(model, inputs, "eager", output_attentions=True)))
    assert returned
    compare_weights(seen, returned)
    again = observe(model, inputs, keep=("weights",))
    compare_weights(again, returned)
    assert [record.name for record in again] == [record.name for record in seen]


@pytest.mark.parametrize("name", ["paligemma", "colpali", "nemotron_asr_streaming"])
def test_where_eager_and_sdpa_disagree_use_follows_sdpa(name):
    """PaliGemma and ColPali without padding: eager sees all, SDPA is causal. Streaming Nemotron: eager hides what SDPA shows."""
    case = ZOO.get(name, STREAMING)
    model, inputs = case.build(), given(case.reads)
    if name != "nemotron_asr_streaming":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    eager, sdpa = (main(run(model, inputs, which), inputs) for which in ("eager", "sdpa"))
    assert distance(eager, sdpa) > 0.1
    assert distance(main(run(use(model), inputs), inputs), sdpa) < 1e-10
    restore(model)
    for which in ("eager", "sdpa"):
        model.set_attn_implementation(which)
        assert len(observe(model, inputs)) == case.layers


def test_a_sink_is_recorded_with_its_share():
    """GraniteSWA returns weights before its sink takes a share, so they do not give its output; ours do."""
    model, inputs = SINK.build(), given("text")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_()
    returned = list(attentions(run(model, inputs, "eager", output_attentions=True)))
    seen = observe(model, inputs)
    assert len(seen) == len(returned) == 2
    for record, weights in zip(seen, returned, strict=True):
        ours = record.weights
        share = ours.sum(-1, keepdim=True)
        sees = share > 0
        assert share[sees].mean() < 0.95
        torch.testing.assert_close(torch.where(sees, ours / share, 0.0), weights * sees, atol=1e-5, rtol=0)
        values = record.values.repeat_interleave(2, dim=1)
        torch.testing.assert_close(ours @ values, record.outputs * sees, atol=1e-5, rtol=0)
    with pytest.raises(Unsupported, match="GraniteSWAAttention passes s_aux"):
        run(use(model), inputs)


def test_several_end_marks_are_all_special():
    model, inputs = ZOO["qwen3_asr"].build(), given("text")
    inputs["input_ids"][:, :3] = torch.tensor([2, 5, 7])
    assert observe(model, inputs).special[:, :3].tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize(
    ("name", "text", "others"),
    [
        ("qwen3_5_moe", "model.language_model.layers.3.self_attn", "model.visual.blocks"),
        ("minicpm_ocr", "model.language_model.layers.3.self_attn", "model.vision_tower"),
    ],
)
def test_numbers_count_the_layers_of_the_text_model(name, text, others):
    model, inputs = ZOO[name].build(), given("text")
    before = main(run(model, inputs), inputs)
    with pytest.raises(InvalidArgument, match=r"0 means model.language_model.layers.0.linear_attn \(.*cannot replace"):
        use(model, Sigmoid(), layers=[0])
    with pytest.raises(InvalidArgument, match=rf"no layer 7; .* can replace 3\. Give others by name: {others}"):
        use(model, Sigmoid(), layers=[3, 7])
    assert used(model) is None
    assert torch.equal(main(run(model, inputs), inputs), before)
    placement = use(model, Sigmoid(), layers=[3])
    assert placement.changed == (text,)
    assert {f"model.language_model.layers.{at}.linear_attn" for at in range(3)} <= set(placement.left)
    assert any(left.startswith(others) for left in placement.left)
    assert distance(main(run(placement, inputs), inputs), before) > 1e-3
    seeing = use(model, Sigmoid(), layers=f"{others}.*")
    assert seeing.changed
    assert all(changed.startswith(others) for changed in seeing.changed)
    assert text in seeing.left


def test_numbers_of_models_of_several_parts():
    clip = use(ZOO["clip"].build(), layers=[0])
    assert clip.changed == ("text_model.encoder.layers.0.self_attn",)
    assert "vision_model.encoder.layers.0.self_attn" in clip.left
    assert use(ZOO["vit"].build(), layers=[1]).changed == ("layers.1.attention",)
    whisper = use(ZOO["whisper"].build(), layers=[1])
    assert whisper.changed == tuple(
        f"{side}.layers.1.{what}"
        for side, what in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn"))
    )
