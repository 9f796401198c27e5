"""Shapes of public models, and the table that Levine et al. printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from heedful._result import Result
from heedful.lens.depth.law import DepthLaw


def _gpt(layers: int, width: int, heads: int, vocab: int = 50257, context: int = 1024) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocab, "n_positions": context}
    return {"model_type": "gpt2", **sizes}


def _bert(layers: int, width: int, heads: int, kind: str = "bert", **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    rest = {"intermediate_size": 4 * width, "vocab_size": 30522, "max_position_embeddings": 512}
    return {"model_type": kind, **sizes, **rest, **more}


def _llama(layers: int, width: int, heads: int, ffn: int, kv: int, kind: str = "llama", **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    rest = {"intermediate_size": ffn, "num_key_value_heads": kv, "vocab_size": 32000, "max_position_embeddings": 4096}
    return {"model_type": kind, **sizes, **rest, **more}


# Configurations as the models' authors published them, what counts for shape and parameters.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, context=2048),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "roberta-base": _bert(12, 768, 12, "roberta", vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
    "distilbert-base": {
        "model_type": "distilbert",
        **{"n_layers": 6, "dim": 768, "n_heads": 12, "hidden_dim": 3072},
        **{"vocab_size": 30522, "max_position_embeddings": 512},
    },
    "albert-xxlarge": _bert(12, 4096, 64, "albert", embedding_size=128, vocab_size=30000, num_hidden_groups=1),
    # Layers as published; its gated feed-forward is not in this reading.
    "neobert": {"num_hidden_layers": 28, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 30522},
    "llama-7b": _llama(32, 4096, 32, 11008, 32, max_position_embeddings=2048),
    "llama-2-70b": _llama(80, 8192, 64, 28672, 8),
    "mistral-7b": _llama(32, 4096, 32, 14336, 8, "mistral", max_position_embeddings=32768),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 14336, 8, "mixtral", num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768
    ),
    "qwen2-0.5b": _llama(
        24, 896, 14, 4864, 2, "qwen2", vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=131072
    ),
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        **{"num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64, "intermediate_size": 24576},
        **{"vocab_size": 50432, "max_position_embeddings": 2048},
    },
    "t5-11b": {
        "model_type": "t5",
        **{"num_layers": 24, "num_decoder_layers": 24, "d_model": 1024, "num_heads": 128, "d_kv": 128},
        **{"d_ff": 65536, "vocab_size": 32128, "feed_forward_proj": "relu", "is_encoder_decoder": True},
    },
    "vit-base": {
        "model_type": "vit",
        **{"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        **{"image_size": 224, "patch_size": 16, "num_channels": 3},
    },
}

# Their parameters, as transformers builds them: to look one up needs neither it nor torch.
PARAMS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "roberta-base": 124_645_632,
    "distilbert-base": 66_362_880,
    "albert-xxlarge": 222_595_584,
    "llama-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "gpt-neox-20b": 20_554_567_680,
    "t5-11b": 11_307_321_344,
    "vit-base": 86_389_248,
}

# Layers and width of public models, as their authors published them.
_PUBLIC = """
    GPT-2 12x768, GPT-2 medium 24x1024, GPT-2 large 36x1280, GPT-2 XL 48x1600, GPT-3 Large 24x1536, GPT-3 13B 40x5140,
    GPT-3 175B 96x12288, BERT-base 12x768, BERT-large 24x1024, DistilBERT 6x768, MiniLM-L6 6x384, MiniLM-L12 12x384,
    NeoBERT 28x768, ModernBERT-base 22x768, ModernBERT-large 28x1024, Pythia-70M 6x512, Pythia-160M 12x768,
    Pythia-410M 24x1024, Pythia-1B 16x2048, Pythia-1.4B 24x2048, Pythia-2.8B 32x2560, Pythia-6.9B 32x4096,
    Pythia-12B 36x5120, OPT-125M 12x768, OPT-1.3B 24x2048, OPT-2.7B 32x2560, OPT-6.7B 32x4096, OPT-13B 40x5120,
    OPT-30B 48x7168, OPT-66B 64x9216, OPT-175B 96x12288, BLOOM-560M 24x1024, BLOOM-1.1B 24x1536, BLOOM-3B 30x2560,
    BLOOM-7.1B 30x4096, BLOOM 70x14336, GPT-J 28x4096, GPT-NeoX-20B 44x6144, Falcon-7B 32x4544, Falcon-40B 60x8192,
    Llama-7B 32x4096, Llama-13B 40x5120, Llama-33B 60x6656, Llama-65B 80x8192, Llama-3.2-1B 16x2048,
    Llama-3.2-3B 28x3072, Llama-3-8B 32x4096, Llama-3-70B 80x8192, Llama-3.1-405B 126x16384, Mistral-7B 32x4096,
    TinyLlama-1.1B 22x2048, DeepSeek-67B 95x8192, Qwen2-0.5B 24x896, Qwen2-1.5B 28x1536, Qwen2-7B 28x3584,
    Qwen2-72B 80x8192, Qwen3-0.6B 28x1024, Qwen3-1.7B 28x2048, Qwen3-4B 36x2560, Qwen3-8B 36x4096, Qwen3-14B 40x5120,
    Qwen3-32B 64x5120, Yi-6B 32x4096, Yi-34B 60x7168, Gemma-2B 18x2048, Gemma-7B 28x3072, Gemma-2-2B 26x2304,
    Gemma-2-9B 42x3584, Gemma-2-27B 46x4608, Phi-1.5 24x2048, Phi-2 32x2560, Phi-3-mini 32x3072, OLMo-1B 16x2048,
    OLMo-7B 32x4096, SmolLM-135M 30x576, SmolLM-360M 32x960, SmolLM-1.7B 24x2048
"""
PUBLIC: dict[str, tuple[int, int]] = {
    name: (int(layers), int(width)) for name, layers, width in re.findall(r"([^,\s][^,]*) (\d+)x(\d+)", _PUBLIC)
}

# Of the same size is what has between half and twice as much in its layers.
SIZE = 2.0


def peers(params: float) -> dict[str, tuple[int, int]]:
    """Public models of about this many parameters in their layers, $12 L d^2$ within a factor of 2, shallowest first.

    >>> list(peers(12 * 48 * 1600**2))[-1]
    'GPT-2 XL'
    """
    near = {
        name: (layers, d) for name, (layers, d) in PUBLIC.items() if 1 / SIZE <= 12 * layers * d**2 / params <= SIZE
    }
    return dict(sorted(near.items(), key=lambda one: one[1]))


@dataclass(frozen=True)
class Projection(Result):
    """A row of the published table: a trained shape, and what the law projects for its budget, printed and recomputed."""

    name: str
    params: float
    layers: int | None
    width: int | None
    printed_depth: int
    printed_width: int
    depth: float
    width_at_depth: float
    depth_for_width: float | None


# name, trained layers and width, printed depth and width
_PRINTED = (
    ("GPT-3 Small", 12, 768, 23, 555),
    ("GPT-3 Medium", 24, 1024, 32, 886),
    ("GPT-3 Large", 24, 1536, 38, 1220),
    ("GPT-3 XL", 24, 2048, 42, 1550),
    ("GPT-3 2.7B", 32, 2560, 47, 2110),
    ("GPT-3 6.7B", 32, 4096, 54, 3150),
    ("GPT-3 13B", 40, 5140, 60, 4200),
    ("GPT-3 175B", 96, 12288, 80, 13500),
)


def published_table(law: DepthLaw | None = None) -> tuple[Projection, ...]:
    """The projections that Levine et al. printed for the GPT-3 models and for $10^{12}$ parameters, beside ours.

    The printed width is the one that keeps $12 L d^2$ after rounding L.

    >>> row = published_table()[-2]
    >>> row.name, row.layers, row.printed_depth, round(row.depth, 2)
    ('GPT-3 175B', 96, 80, 80.46)
    """
    law = law or DepthLaw()
    rows = []
    for name, layers, width, depth, wide in _PRINTED:
        budget = 12.0 * layers * width**2
        rows.append(Projection(name, budget, layers, width, depth, wide, *law.solve(budget), law.optimal_depth(width)))
    rows.append(Projection("1T", 1e12, None, None, 95, 30100, *law.solve(1e12), None))
    return tuple(rows)
