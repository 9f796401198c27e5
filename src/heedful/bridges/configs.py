"""Hugging Face configurations as sizes, sizes as configurations, and the parameters that one asks for."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from reprlib import Repr
from typing import Any

from heedful._checks import is_whole
from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported

ALIASES = {
    "width": "hidden_size n_embd d_model dim",
    "layers": "num_hidden_layers n_layer num_layers n_layers",
    "heads": "num_attention_heads n_head num_heads n_heads encoder_attention_heads",
    "ffn": "intermediate_size n_inner d_ff ffn_dim hidden_dim encoder_ffn_dim d_inner dff ffn_hidden_size",
    "head_dim": "head_dim d_kv",
    "kv_heads": "num_key_value_heads num_kv_heads",
    "embedding_rank": "embedding_size word_embed_proj_dim",
    "vocab": "vocab_size",
    "context": "max_position_embeddings n_positions n_ctx",
    "experts": "num_local_experts num_experts n_routed_experts",
    "active_experts": "num_experts_per_tok moe_topk top_k_experts",
}
# Sizes that may be nought; the others are one at least, and none is above the largest.
MAY_BE_NONE = {"vocab", "context", "experts", "active_experts"}
LARGEST = 2**31 - 1

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 50, 50

# Where a configuration of several models keeps each, and how deep these are followed.
PARTS = ("text_config", "vision_config", "audio_config", "llm_config", "language_config", "encoder", "decoder")
DEEPEST = 8

# Model types whose direction is known, and what those types do where a configuration is silent.
DECODERS = {
    "gpt2",
    "opt",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "qwen2",
    "qwen3",
}
ENCODERS = {"bert", "roberta", "distilbert", "albert", "vit", "t5", "mt5"}
GATED = ("llama", "mistral", "mixtral", "gemma", "qwen", "mt5")
UNTIED = ("llama", "mistral", "mixtral", "qwen", "gpt_neox")

# Beyond so many layers parameters are estimated, not counted.
MOST_LAYERS = 512

# What `make` can write, and the model that it is for.
KINDS = {"gpt2": "GPT2LMHeadModel", "bert": "BertModel"} | {
    kind.lower(): f"{kind}ForCausalLM" for kind in ("Llama", "Mistral", "Qwen2", "Qwen3")
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
    added up; `part` says where the class has one of them alone.

    >>> gpt2 = sizes({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024})
    >>> gpt2["layers"], gpt2["width"], gpt2["ffn"], gpt2["tied"]
    (12, 768, 3072, True)
    """
    config = _single(config)
    kind = _text(config.get("model_type"))
    width, (layers, cross, part) = _need(config, "width"), _stacks(config, kind)
    heads = _need(config, "heads")
    stored = layers
    if kind == "albert":
        each = _number(config, "inner_group_num", 1)
        stored, layers = _number(config, "num_hidden_groups", 1) * each, layers * each
    elif _flag(config, "add_cross_attention", False) and (kind in ("gpt2", "bert", "roberta") or not _known(kind)):
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
    patch = 0
    if config.get("patch_size") is not None:
        high, wide = _pair(config, "patch_size")
        patch = high * wide * _number(config, "num_channels", 3)
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv,
        "head_dim": head_dim or width // heads,
        "ffn": _number(config, "moe_intermediate_size", 0) or _find(config, "ffn") or 4 * width,
        "gated": _is_gated(config, kind),
        "vocab": 0 if patch else _find(config, "vocab") or 0,
        # A class without an output has no table for it.
        "tied": _flag(config, "tie_word_embeddings", not kind.startswith(UNTIED)) or not _writes(config, kind),
        "context": _find(config, "context") or 0,
        # ALBERT maps the embedding to the width even where they are equal.
        "embedding_rank": None if rank == width and kind != "albert" else rank,
        "stored_layers": stored,
        "experts": experts,
        # A config that a model was given keeps its class's defaults; one written by hand may name experts alone.
        "active_experts": (active or 1) if experts else 0,
        "cross_layers": cross,
        "patch": patch,
        "causal": not patch and (kind in DECODERS if _known(kind) else _says_causal(config)),
        "family": kind,
        "part": part,
    }


def count(config: dict[str, Any]) -> int | None:
    """Every parameter of the class that a configuration names, built by transformers without memory for its numbers.

    Without a class a decoder is a language model, and anything else has nothing on top. None where the extra `hf` is not
    installed, or transformers cannot build it.

    >>> count({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12})
    124439808
    """
    config = _single(config)
    kind, name = _text(config.get("model_type")), _class(config)
    deep = any(is_whole(value) and value > MOST_LAYERS for key, value in config.items() if "layer" in key)
    if not kind or deep or find_spec("transformers") is None:
        return None
    import torch
    import transformers as hf

    from heedful.bridges.reading import quietly

    plain = {key: value for key, value in config.items() if key != "model_type" and value is not None}
    build = getattr(hf, name, None)
    if not name:
        words = hf.AutoModelForSeq2SeqLM if kind in ("t5", "mt5") else hf.AutoModelForCausalLM
        build = (words if _writes(config, kind) else hf.AutoModel).from_config
    elif not (isinstance(build, type) and issubclass(build, hf.PreTrainedModel)):
        return None
    try:
        with quietly(), torch.device("meta"):
            model = build(hf.AutoConfig.for_model(kind, **plain))
    except Exception:  # whatever a configuration makes a model's own code raise
        return None
    return sum(weight.numel() for weight in model.parameters())


def _single(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one model: this one, or the only one that it holds, as in `text_config`."""
    for _ in range(DEEPEST):
        parts = [name for name in PARTS if isinstance(config.get(name), dict) and config[name]]
        both = {"text_config", "vision_config"} <= set(parts)
        if not both and (not parts or _find(config, "width") is not None):
            return config
        if len(parts) > 1:
            ways, many = " or its ".join(parts[:2] if both else parts), "two" if len(parts) == 2 else "several"
            raise InvalidArgument(f"this configuration holds {many} models; give its {ways}")
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


def make(kind: str, shape: dict[str, Any]) -> Any:
    """A configuration object of a kind, from the sizes of a shape; what the kind cannot express is refused."""
    values = keys(kind, shape)
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    return transformers.AutoConfig.for_model(kind, **values)


def keys(kind: str, shape: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of a kind is to hold."""
    if kind not in KINDS:
        raise InvalidArgument(f"no configuration of kind {kind!r}; there are {', '.join(KINDS)}")
    gated, turns = is_gated(kind), kind not in ("gpt2", "bert")
    if shape["gated"] != gated:
        word, other = ("gated", "plain") if gated else ("plain", "gated")
        raise Unsupported(f"{kind} has a {word} feed-forward and this shape a {other} one; plan with gated={gated}")
    if shape["embedding_rank"]:
        raise Unsupported(f"{kind} has no factorised embedding; plan without embedding_rank")
    d, heads, kv = shape["width"], shape["heads"], shape["kv_heads"]
    if turns and shape["head_dim"] % 2:
        raise Unsupported(
            f"{kind} turns pairs of channels and cannot have heads of {shape['head_dim']}; plan with an even head_dim"
        )
    if not turns and heads != kv:
        raise Unsupported(f"{kind} has no key heads of their own ({kv} for {heads}); plan with kv_ratio=1")
    common = {"vocab_size": shape["vocab"], "tie_word_embeddings": shape["tied"]}
    if kind == "gpt2":
        sizes = {"n_embd": d, "n_layer": shape["layers"], "n_head": heads, "n_inner": shape["ffn"]}
        return common | sizes | {"n_positions": shape["context"]}
    common |= {
        "hidden_size": d,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": heads,
        "intermediate_size": shape["ffn"],
        "max_position_embeddings": shape["context"],
    }
    if kind == "bert":
        return common
    return common | {"num_key_value_heads": kv} | ({} if kind == "qwen2" else {"head_dim": shape["head_dim"]})


def is_gated(kind: str) -> bool:
    """Whether models of a type have gated feed-forward layers, where a configuration says nothing else."""
    return kind.startswith(GATED)


def _known(kind: str) -> bool:
    return kind in DECODERS or kind in ENCODERS


def _class(config: dict[str, Any]) -> str:
    """The model class that a configuration was written for; empty where it names none."""
    named = config.get("architectures")
    return _text(named[0] if isinstance(named, list | tuple) and named else named)


def _text(value: Any) -> str:
    """A name of a configuration; empty where it is none."""
    return value if isinstance(value, str) else ""


def _writes(config: dict[str, Any], kind: str) -> bool:
    """Whether the class has an output over words on top."""
    name = _class(config)
    if not name:
        return kind not in ENCODERS or kind in ("t5", "mt5")
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "DoubleHeadsModel"))


def _number(config: dict[str, Any], key: str, default: int, least: int = 1) -> int:
    """A whole number of a configuration; null means the default."""
    value = config.get(key)
    return default if value is None else _whole(key, value, value, least)


def _pair(config: dict[str, Any], key: str) -> tuple[int, int]:
    """A height and a width, which one number may stand for."""
    value = config[key]
    both = value if isinstance(value, list | tuple) else [value] * 2
    if len(both) != 2:
        raise InvalidArgument(
            f"{key} must be a whole number or two of them; got {_shown(value)}; correct the configuration"
        )
    return _whole(key, both[0], value), _whole(key, both[1], value)


def _shown(value: Any) -> str:
    """A value for an error message, short and shallow whatever it holds."""
    return _SHORT.repr(value)[:60]


def _whole(key: str, value: Any, given: Any, least: int = 1) -> int:
    if not is_whole(value) or not least <= value <= LARGEST:
        shown = "a larger one" if is_whole(value) and value > LARGEST else _shown(given)
        raise InvalidArgument(
            f"{key} must be a whole number from {least} to {LARGEST}; got {shown}; correct the configuration"
        )
    return int(value)


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(f"{key} must be true or false; got {_shown(value)}; correct the configuration")
    return default if value is None else value


def _find(config: dict[str, Any], name: str) -> int | None:
    for alias in ALIASES[name].split():
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
            f"the configuration names no {name}: looked for {ALIASES[name].replace(' ', ', ')} among {_keys(config)}"
        )
    return value


def _is_gated(config: dict[str, Any], kind: str) -> bool:
    words = " ".join(_text(config.get(name)) for name in ("feed_forward_proj", "hidden_act", "hidden_activation"))
    gated = "gated" in words or "glu" in words
    if gated or "feed_forward_proj" in config or "is_gated_act" in config:
        return _flag(config, "is_gated_act", gated)
    return is_gated(kind) if _known(kind) else is_gated(kind) or "silu" in words or "swish" in words
