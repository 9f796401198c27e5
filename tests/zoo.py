"""A zoo of Hugging Face architectures, tiny and random, with inputs for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

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
