"""Hugging Face configurations as sizes, and sizes as configurations; transformers is needed for the second alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported

__all__ = ["FAMILIES", "KINDS", "Family", "extra_params", "keys", "make", "read", "sizes"]

ALIASES = {
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim"),
    "head_dim": ("head_dim", "d_kv"),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "moe_topk", "top_k_experts"),
}


@dataclass(frozen=True)
class Family:
    """What a model type adds to the matrices of its layers: norms, biases and tables; `None` defaults are read off the config.

    `norm` is the number of parameters of a norm per channel (2 with a bias), `norms` the norms in a layer.
    """

    causal: bool = True
    gated: bool = False
    tied: bool = True
    norm: int = 2
    norms: int = 2
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    qk_norm: bool = False
    learned_positions: int | None = 0  # added to the context; None where positions are no parameters
    embedding_norm: bool = False
    final_norm: bool = True
    pooler: bool = False


_ENCODER = Family(causal=False, embedding_norm=True, final_norm=False, pooler=True)
_LLAMA = Family(gated=True, tied=False, norm=1, qkv_bias=False, out_bias=False, ffn_bias=False, learned_positions=None)
FAMILIES = {
    "gpt2": Family(),
    "opt": Family(learned_positions=2),
    "gpt_neox": Family(tied=False, learned_positions=None),
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "distilbert": Family(causal=False, embedding_norm=True, final_norm=False),
    "albert": _ENCODER,
    "vit": Family(causal=False, pooler=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "gemma": Family(**{**vars(_LLAMA), "tied": True}),
    "qwen2": Family(**{**vars(_LLAMA), "qkv_bias": True}),
    "qwen3": Family(**{**vars(_LLAMA), "qk_norm": True}),
    "t5": Family(causal=False, norm=1, qkv_bias=False, out_bias=False, ffn_bias=False, learned_positions=None),
}
FAMILIES["mt5"] = FAMILIES["t5"]

# What `make` can write: the class of the configuration and of the model it is for.
KINDS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "bert": ("BertConfig", "BertModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def read(source: Any) -> dict[str, Any]:
    """The keys of a configuration: a `PretrainedConfig`, a model that has one, a mapping, a folder or a config.json.

    >>> read({"model_type": "gpt2", "n_layer": 2})["n_layer"]
    2
    """
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    config = getattr(source, "config", source)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, dict):
        raise InvalidArgument(
            f"a {type(source).__name__} has no configuration; give a Hugging Face config, model or folder, a dict or '48x1600'"
        )
    return config


def _read_file(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"{file} does not exist; give a folder with config.json, or the file") from None
    except (ValueError, IsADirectoryError) as error:
        raise CorruptModel(f"{file} is not valid JSON ({error}); copy it again") from None
    if not isinstance(config, dict):
        raise CorruptModel(f"{file} holds no JSON object; give a Hugging Face config.json")
    return config


def sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes in a configuration, under the names of `heedful.lens.depth.Shape`, whatever its family calls them.

    Aliases as Hugging Face uses them: width is hidden_size, n_embd, d_model or dim, and so on. Encoder and decoder layers are
    added up. `extra` counts norms, biases and small tables where the family is known, and is None where it is not.

    >>> found = sizes({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024})
    >>> found["layers"], found["width"], found["ffn"], found["tied"]
    (12, 768, 3072, True)
    """
    if "text_config" in config and "vision_config" in config:
        raise InvalidArgument("this configuration holds two models; give its text_config or its vision_config")
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    width, layers, heads = (_need(config, name) for name in ("width", "layers", "heads"))
    decoder = config.get("num_decoder_layers", layers) if kind in ("t5", "mt5") else 0
    if "decoder_layers" in config and "encoder_layers" in config:
        layers, decoder = int(config["encoder_layers"]), int(config["decoder_layers"])
    head_dim = _find(config, "head_dim") or width // heads
    found = {
        "layers": layers + decoder,
        "width": width,
        "heads": heads,
        "kv_heads": _find(config, "kv_heads") or heads,
        "head_dim": head_dim,
        "ffn": config.get("moe_intermediate_size") or _find(config, "ffn") or 4 * width,
        "gated": _is_gated(config, family),
        "vocab": _find(config, "vocab") or 0,
        "tied": bool(config.get("tie_word_embeddings", family.tied if family else True)),
        "context": _find(config, "context") or 0,
        "embedding_rank": config.get("embedding_size"),
        "stored_layers": config.get("num_hidden_groups", layers + decoder) if kind == "albert" else None,
        "experts": _find(config, "experts") or 0,
        "active_experts": _find(config, "active_experts") or 0,
        "cross_layers": decoder,
        "causal": family.causal if family else not config.get("is_encoder_decoder", False),
        "family": kind,
    }
    if "patch_size" in config:
        patch = config["patch_size"]
        pixels = patch**2 if isinstance(patch, int) else patch[0] * patch[1]
        found |= {"patch": pixels * int(config.get("num_channels", 3)), "vocab": 0, "causal": False}
    if found["embedding_rank"] == width:
        found["embedding_rank"] = None
    # A config that a model was given keeps its class's defaults; one written by hand may name experts alone.
    if found["experts"] and not found["active_experts"]:
        found["active_experts"] = 1
    return found | {"extra": extra_params(found, config) if family else None}


def extra_params(found: dict[str, Any], config: dict[str, Any] | None = None) -> int:
    """Parameters beside matrices and token embeddings: norms, biases, positions, types, pooler."""
    config = config or {}
    kind = found["family"]
    family = FAMILIES[kind]
    d, ffn, heads, kv = (found[name] for name in ("width", "ffn", "heads", "kv_heads"))
    stored = found["stored_layers"] or found["layers"]
    head_dim, norm = found["head_dim"], family.norm * d
    bias = bool(config.get("attention_bias", False)) if kind == "llama" else False
    each = family.norms * norm + family.qk_norm * 2 * head_dim
    each += (family.qkv_bias or bias) * (heads + 2 * kv) * head_dim + (family.out_bias or bias) * d
    each += family.ffn_bias * (ffn * (2 if found["gated"] else 1) + d)
    total = int(stored * each + found["cross_layers"] * norm)
    # T5 has one final norm and one table of relative positions for each of its two stacks.
    stacks = 2 if found["cross_layers"] else 1
    total += family.final_norm * norm * stacks
    if kind in ("t5", "mt5"):
        total += stacks * int(config.get("relative_attention_num_buckets", 32)) * heads
    inner = found["embedding_rank"] or d
    if found.get("patch"):
        image, patch = config.get("image_size", 224), config["patch_size"]
        total += (image // patch) ** 2 * d + 3 * d  # positions, the class token with its own, the bias of the patches
    elif family.learned_positions is not None:
        total += (found["context"] + family.learned_positions) * inner
    if family.embedding_norm:
        total += 2 * inner + int(config.get("type_vocab_size", 2) if kind != "distilbert" else 0) * inner
    if found["embedding_rank"]:
        total += d  # the bias of the map from the factorised size
    return total + family.pooler * (d * d + d)


def make(kind: str, found: dict[str, Any]) -> Any:
    """A configuration object of a kind, from the sizes of a shape; what the kind cannot express is refused."""
    if kind not in KINDS:
        raise InvalidArgument(f"no configuration of kind {kind!r}; there are {', '.join(KINDS)}")
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    return getattr(transformers, KINDS[kind][0])(**keys(kind, found))


def keys(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of a kind is to hold."""
    if kind not in KINDS:
        raise InvalidArgument(f"no configuration of kind {kind!r}; there are {', '.join(KINDS)}")
    family = FAMILIES[kind]
    if found["gated"] != family.gated:
        word, other = ("gated", "plain") if family.gated else ("plain", "gated")
        raise Unsupported(
            f"{kind} has a {word} feed-forward and this shape a {other} one; plan with gated={family.gated}"
        )
    if found["embedding_rank"]:
        raise Unsupported(f"{kind} has no factorised embedding; plan without embedding_rank")
    d, heads, kv = found["width"], found["heads"], found["kv_heads"]
    if kind == "gpt2":
        _refuse_groups(kind, heads, kv)
        plain = {"n_embd": d, "n_layer": found["layers"], "n_head": heads, "n_inner": found["ffn"]}
        return plain | {"vocab_size": found["vocab"], "n_positions": found["context"]} | _ties(found)
    common = {
        "vocab_size": found["vocab"],
        "hidden_size": d,
        "num_hidden_layers": found["layers"],
        "num_attention_heads": heads,
        "intermediate_size": found["ffn"],
        "max_position_embeddings": found["context"],
        **_ties(found),
    }
    if kind == "bert":
        _refuse_groups(kind, heads, kv)
        return common
    more = {} if kind == "qwen2" else {"head_dim": found["head_dim"]}
    return common | {"num_key_value_heads": kv} | more


def _ties(found: dict[str, Any]) -> dict[str, bool]:
    return {"tie_word_embeddings": found["tied"]}


def _refuse_groups(kind: str, heads: int, kv: int) -> None:
    if heads != kv:
        raise Unsupported(f"{kind} has no key heads of their own ({kv} for {heads}); plan with kv_ratio=1")


def _find(config: dict[str, Any], name: str) -> int | None:
    for alias in ALIASES[name]:
        value = config.get(alias)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _need(config: dict[str, Any], name: str) -> int:
    value = _find(config, name)
    if value is None and name == "layers":
        value = config.get("encoder_layers")
    if not isinstance(value, int) or value < 1:
        raise InvalidArgument(
            f"the configuration names no {name}: looked for {', '.join(ALIASES[name])} among {', '.join(sorted(config)) or 'no keys'}"
        )
    return value


def _is_gated(config: dict[str, Any], family: Family | None) -> bool:
    told = " ".join(str(config.get(name, "")) for name in ("feed_forward_proj", "hidden_act", "hidden_activation"))
    if "gated" in told or "glu" in told:
        return True
    if family is not None:
        return family.gated
    return "silu" in told or "swish" in told
