"""Tiny models and layers whose embedding can be turned."""

import pytest
import torch
from torch import nn

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

F64 = {"dtype": torch.float64}
SIZES = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
WORDS = torch.randint(31, (2, 11), generator=torch.Generator().manual_seed(1))
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama with grouped heads and biases": (
        "LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama with a tied head": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 2}),
    "qwen2 that classifies": ("Qwen2ForSequenceClassification", "Qwen2Config", {"num_key_value_heads": 4, "pad_token_id": 0}),
}  # fmt: skip


def made(name, gains=True):
    """A tiny model in float64 with gains and biases far from one and zero."""
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, kind)(getattr(hf, config)(**SIZES, **options)).double().eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias") or (gains and "norm" in key):
            nn.init.normal_(parameter, mean=float("norm" in key), std=0.5)
    return model


def logits(model):
    with torch.no_grad():
        return model(WORDS).logits


def encoder_layer(norm_first=True):
    layer = nn.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first, dropout=0.0, batch_first=True, **F64)
    layer.norm1, layer.norm2 = nn.RMSNorm(8, **F64), nn.RMSNorm(8, **F64)
    return layer
