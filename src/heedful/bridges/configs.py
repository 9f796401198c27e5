"""Hugging Face configurations as sizes, and sizes as configurations; transformers is needed for the second alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import Repr
from typing import Any

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported

__all__ = ["FAMILIES", "KINDS", "Family", "extra_params", "keys", "make", "read", "sizes"]

ALIASES = {
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
    "ffn": (
        "intermediate_size",
        "n_inner",
        "d_ff",
        "ffn_dim",
        "hidden_dim",
        "encoder_ffn_dim",
        "d_inner",
        "dff",
        "ffn_hidden_size",
    ),
    "head_dim": ("head_dim", "d_kv"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "embedding_rank": ("embedding_size", "word_embed_proj_dim"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "n_ctx"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "moe_topk", "top_k_experts"),
}
# Sizes that may be nought; the others are one at least, and none is above the largest.
MAY_BE_NONE = {"vocab", "context", "experts", "active_experts"}
LARGEST = 2**31 - 1

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 50, 50

# Where a configuration of several models keeps each, and how deep these are followed.
PARTS = ("text_config", "vision_config", "audio_config", "llm_config", "language_config", "encoder", "decoder")
DEEPEST = 8

# How a class's name ends: whether a language model's output is in it, or labels, or neither.
HEADS = {
    **dict.fromkeys(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"), "words"),
    "ForImageClassification": "labels",
    "Model": "",
}


@dataclass(frozen=True)
class Family:
    """What a model type adds to the matrices of its layers: norms, biases and tables.

    `norm` is the number of parameters of a norm per channel (2 with a bias), `norms` the norms in a layer. `keys` names what a
    configuration may change: key -> the fields that it sets. The count holds where `usual` keys have these values and `needs`
    are among the sizes; elsewhere it is an estimate.
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
    types: bool = False
    final_norm: bool = True
    pooler: bool = False
    crosses: bool = False  # reads add_cross_attention
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    usual: Mapping[str, object] = field(default_factory=dict)
    needs: tuple[str, ...] = ("vocab", "ffn")


_ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "out_bias")}
_ENCODER = Family(causal=False, embedding_norm=True, types=True, final_norm=False, pooler=True)
_LLAMA = Family(gated=True, tied=False, norm=1, qkv_bias=False, out_bias=False, ffn_bias=False, learned_positions=None)
_GROUPED = replace(_LLAMA, needs=("vocab", "ffn", "kv_heads"))
_GEMMA = replace(_LLAMA, tied=True, keys=_ATTENTION_BIAS, needs=("vocab", "ffn", "kv_heads", "head_dim"))
FAMILIES = {
    "gpt2": Family(crosses=True, needs=("vocab",)),
    "opt": Family(
        learned_positions=2,
        keys={"enable_bias": ("qkv_bias", "out_bias", "ffn_bias"), "do_layer_norm_before": ("final_norm",)},
        usual={"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
    ),
    "gpt_neox": Family(tied=False, learned_positions=None, keys=_ATTENTION_BIAS),
    "bert": replace(_ENCODER, crosses=True),
    "roberta": replace(_ENCODER, crosses=True),
    "distilbert": replace(_ENCODER, types=False, pooler=False),
    "albert": replace(_ENCODER, needs=("vocab", "ffn", "embedding_rank")),
    "vit": Family(causal=False, pooler=True, keys={"qkv_bias": ("qkv_bias",)}, needs=("ffn",)),
    "llama": replace(_LLAMA, keys=_ATTENTION_BIAS | {"mlp_bias": ("ffn_bias",)}),
    "mistral": _GROUPED,
    "mixtral": replace(_GROUPED, needs=(*_GROUPED.needs, "experts")),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3_text": replace(_GEMMA, norms=4, qk_norm=True),
    "qwen2": replace(_GROUPED, qkv_bias=True),
    "qwen3": replace(_GEMMA, tied=False, qk_norm=True),
    # Whether an output table of its own is made where the configuration asks for one depends on the version.
    "t5": replace(
        _LLAMA,
        causal=False,
        gated=False,
        tied=True,
        usual={"tie_word_embeddings": True, "is_decoder": False},
        needs=("vocab", "ffn", "head_dim"),
    ),
}
FAMILIES["mt5"] = replace(FAMILIES["t5"], gated=True)

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
    except RecursionError:
        raise CorruptModel(f"{file} is nested too deep for a configuration; give a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise CorruptModel(f"{file} holds no JSON object; give a Hugging Face config.json")
    return config


def sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes in a configuration, under the names of `heedful.lens.depth.Shape`, whatever its family calls them.

    Aliases as Hugging Face uses them: width is hidden_size, n_embd, d_model or dim, and so on. Encoder and decoder layers are
    added up; `part` says where the class has one of them alone. `extra` counts norms, biases, small tables and the head of the
    class in `architectures`, and is None where that is not known.

    >>> found = sizes({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024})
    >>> found["layers"], found["width"], found["ffn"], found["tied"]
    (12, 768, 3072, True)
    """
    config = _single(config)
    kind = _text(config.get("model_type"))
    family = FAMILIES.get(kind)
    width = _need(config, "width")
    layers, cross, part = _stacks(config, kind)
    heads = _need(config, "heads")
    shared = {}
    if kind == "albert":
        each = _number(config, "inner_group_num", 1)
        shared, layers = {"stored_layers": _number(config, "num_hidden_groups", 1) * each}, layers * each
    elif _flag(config, "add_cross_attention", False) and (family is None or family.crosses):
        cross = layers
    kv = _find(config, "kv_heads") or heads
    if _flag(config, "multi_query", False) and not _flag(config, "new_decoder_architecture", False):
        kv = 1
    head_dim, rank = _find(config, "head_dim"), _find(config, "embedding_rank")
    if head_dim is None and width % heads:
        raise InvalidArgument(
            f"{heads} heads do not divide width {width}; correct the configuration or name a head_dim"
        )
    experts, active = _find(config, "experts") or 0, _find(config, "active_experts") or 0
    if experts and active > experts:
        raise InvalidArgument(f"{active} experts for each token, of {experts} in all; correct the configuration")
    found = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv,
        "head_dim": head_dim or width // heads,
        "ffn": _number(config, "moe_intermediate_size", 0) or _find(config, "ffn") or 4 * width,
        "gated": _is_gated(config, kind, family),
        "vocab": _find(config, "vocab") or 0,
        # A class without an output has no table for it.
        "tied": _flag(config, "tie_word_embeddings", family.tied if family else True) or _head(config) != "words",
        "context": _find(config, "context") or 0,
        # ALBERT maps the embedding to the width even where they are equal.
        "embedding_rank": None if rank == width and kind != "albert" else rank,
        "experts": experts,
        # A config that a model was given keeps its class's defaults; one written by hand may name experts alone.
        "active_experts": (active or 1) if experts else 0,
        "cross_layers": cross,
        "causal": family.causal if family else _says_causal(config),
        "family": kind,
        "part": part,
    }
    if config.get("patch_size") is not None:
        high, wide = _pair(config, "patch_size")
        found |= {"patch": high * wide * _number(config, "num_channels", 3), "vocab": 0, "causal": False}
    found |= shared
    return found | {"extra": extra_params(found, config)}


def _single(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one model: this one, or the only one that it holds, as in `text_config`."""
    for _ in range(DEEPEST):
        parts = [name for name in PARTS if isinstance(config.get(name), dict) and config[name]]
        both = {"text_config", "vision_config"} <= set(parts)
        if not both and (not parts or _find(config, "width") is not None):
            return config
        if len(parts) > 1:
            ways = " or its ".join(parts[:2] if both else parts)
            count = "two" if len(parts) == 2 else "several"
            raise InvalidArgument(f"this configuration holds {count} models; give its {ways}")
        config = config[parts[0]]
    raise InvalidArgument(
        f"this configuration holds another, and so on for more than {DEEPEST} times; give the innermost"
    )


def _says_causal(config: dict[str, Any]) -> bool:
    """Whether the configuration of a family that is not known says that it is a decoder; silence says nothing."""
    if _flag(config, "is_encoder_decoder", False):
        return False
    return _flag(config, "is_decoder", False) or _class(config).endswith(("ForCausalLM", "LMHeadModel"))


def _stacks(config: dict[str, Any], kind: str) -> tuple[int, int, str]:
    """Layers, how many of them attend to an encoder, and which part of an encoder and a decoder this is, if not both."""
    if "decoder_layers" in config and "encoder_layers" in config:
        encoder, decoder = _number(config, "encoder_layers", 0, 0), _number(config, "decoder_layers", 0, 0)
    elif "num_decoder_layers" in config or kind in ("t5", "mt5"):
        encoder = _need(config, "layers")
        decoder = _number(config, "num_decoder_layers", encoder, 0)
    else:
        return _need(config, "layers"), 0, ""
    if _flag(config, "is_encoder_decoder", True) and not _class(config).endswith("EncoderModel"):
        return encoder + decoder, decoder, ""
    return (decoder, decoder, "decoder") if _flag(config, "is_decoder", False) else (encoder, 0, "encoder")


def extra_params(found: dict[str, Any], config: dict[str, Any] | None = None) -> int | None:
    """Parameters beside matrices and token embeddings: norms, biases, positions, types, pooler, head; None if not all are known."""
    config = config or {}
    kind = found["family"]
    family, head = FAMILIES.get(kind), _head(config)
    if family is None or head is None or any(_find(config, name) is None for name in family.needs):
        return None
    if any(config.get(key, value) != value for key, value in family.usual.items()):
        return None
    if found["part"] and not _class(config).endswith("EncoderModel"):
        return None
    if family.learned_positions is not None and not (found.get("patch") or found["context"]):
        return None
    told = {name: _flag(config, key, getattr(family, name)) for key, names in family.keys.items() for name in names}
    family = replace(family, **told)  # type: ignore[arg-type]
    d, ffn, heads, kv, head_dim = (found[name] for name in ("width", "ffn", "heads", "kv_heads", "head_dim"))
    inner, norm = found["embedding_rank"] or d, family.norm * d
    attention = family.qkv_bias * (heads + 2 * kv) * head_dim + family.out_bias * d
    each = family.norms * norm + family.qk_norm * 2 * head_dim + attention
    each += family.ffn_bias * (ffn * (2 if found["gated"] else 1) + d)
    total = found.get("stored_layers", found["layers"]) * each + found["cross_layers"] * (norm + attention)
    # T5 has one final norm and one table of relative positions for each of its two stacks.
    stacks = 2 if 0 < found["cross_layers"] < found["layers"] else 1
    total += family.final_norm * norm * stacks
    if kind in ("t5", "mt5"):
        total += stacks * _number(config, "relative_attention_num_buckets", 32) * heads
    if found.get("patch"):
        (high, wide), (tall, broad) = _pair(config, "patch_size"), _pair(config, "image_size", 224)
        # positions, the class token with its own, the bias of the patches
        total += (tall // high) * (broad // wide) * d + 3 * d
    elif family.learned_positions is not None:
        total += (found["context"] + family.learned_positions) * (d if kind == "opt" else inner)
    total += family.embedding_norm * 2 * inner
    total += family.types * _number(config, "type_vocab_size", 2, 0) * inner
    if found["embedding_rank"]:
        # OPT maps back to the factorised size as well, without a bias.
        total += d * inner if kind == "opt" else d
    if head == "" and family.pooler:
        out = _number(config, "pooler_output_size", d) if kind == "vit" else d
        total += d * out + out
    elif head == "labels":
        total += (d + 1) * _labels(config)
    elif head == "words" and family.embedding_norm:
        if not found["tied"]:
            return None
        # An encoder guesses words through a layer of its own.
        total += d * inner + 3 * inner + found["vocab"]
    return int(total)


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
    if family.learned_positions is None and found["head_dim"] % 2:
        raise Unsupported(
            f"{kind} turns pairs of channels and cannot have heads of {found['head_dim']}; plan with an even head_dim"
        )
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


def _class(config: dict[str, Any]) -> str:
    """The model class that a configuration was written for; empty where it names none."""
    named = config.get("architectures")
    return _text(named[0] if isinstance(named, list | tuple) and named else named)


def _text(value: Any) -> str:
    """A name of a configuration; empty where it is none."""
    return value if isinstance(value, str) else ""


def _head(config: dict[str, Any]) -> str | None:
    """`words`, `labels` or nothing on top of the layers, by the class; None where the class is not known.

    Without a class, a decoder is a language model and an encoder has nothing on top.
    """
    kind, name = _text(config.get("model_type")), _class(config)
    family = FAMILIES.get(kind)
    if not name:
        return "words" if family is None or family.causal or kind in ("t5", "mt5") else ""
    stem = kind.replace("_", "")
    if kind in ("t5", "mt5") and name.lower() == f"{stem}encodermodel":
        return ""
    for ending, head in HEADS.items():
        if name.endswith(ending) and name.removesuffix(ending).lower() in (stem, stem.removesuffix("text")):
            return head
    return None if family else "words"


def _labels(config: dict[str, Any]) -> int:
    named = config.get("id2label")
    return len(named) if isinstance(named, dict) else _number(config, "num_labels", 2, 0)


def _number(config: dict[str, Any], key: str, default: int, least: int = 1) -> int:
    """A whole number of a configuration; null means the default."""
    value = config.get(key)
    return default if value is None else _whole(key, value, value, least)


def _pair(config: dict[str, Any], key: str, default: int = 0) -> tuple[int, int]:
    """A height and a width, which one number may stand for."""
    value = config.get(key)
    both = value if isinstance(value, list | tuple) else [default if value is None else value] * 2
    if len(both) != 2:
        raise InvalidArgument(
            f"{key} must be a whole number or two of them; got {_shown(value)}; correct the configuration"
        )
    return _whole(key, both[0], value), _whole(key, both[1], value)


def _shown(value: Any) -> str:
    """A value for an error message, short and shallow whatever it holds."""
    return _SHORT.repr(value)[:60]


def _whole(key: str, value: Any, given: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        shown = "a larger one" if isinstance(value, int) and value > LARGEST else _shown(given)
        raise InvalidArgument(
            f"{key} must be a whole number from {least} to {LARGEST}; got {shown}; correct the configuration"
        )
    return value


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"{key} must be true or false; got {_shown(value)}; correct the configuration")
    return default if value is None else value


def _find(config: dict[str, Any], name: str) -> int | None:
    for alias in ALIASES[name]:
        if config.get(alias) is not None:
            return _number(config, alias, 0, 0 if name in MAY_BE_NONE else 1)
    return None


def _keys(config: dict[str, Any]) -> str:
    names = sorted(_shown(name).strip("'") for name in config)
    return ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "") or "no keys"


def _need(config: dict[str, Any], name: str) -> int:
    value = _find(config, name)
    if value is None and name == "layers":
        value = _number(config, "encoder_layers", 0) or None
    if value is None:
        raise InvalidArgument(
            f"the configuration names no {name}: looked for {', '.join(ALIASES[name])} among {_keys(config)}"
        )
    return value


def _is_gated(config: dict[str, Any], kind: str, family: Family | None) -> bool:
    told = " ".join(_text(config.get(name)) for name in ("feed_forward_proj", "hidden_act", "hidden_activation"))
    gated = "gated" in told or "glu" in told
    if gated or "feed_forward_proj" in config or "is_gated_act" in config:
        return _flag(config, "is_gated_act", gated)
    if family is not None:
        return family.gated
    return "silu" in told or "swish" in told or "gemma" in kind
