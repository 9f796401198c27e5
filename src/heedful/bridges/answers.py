"""Models of transformers that answer: what they are asked, where their answer stands, and how a text becomes tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported
from heedful.bridges import local

__all__ = [
    "KINDS",
    "Reading",
    "is_causal",
    "kind_of",
    "label_of",
    "labels_of",
    "named",
    "open_model",
    "read_text",
    "run",
    "token_of",
]

# What a class of transformers answers, by the end of its name.
KINDS = {
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "mlm",
    "ForCausalLM": "next-token",
    "LMHeadModel": "next-token",
}
AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "mlm": "AutoModelForMaskedLM",
    "next-token": "AutoModelForCausalLM",
}


@dataclass(frozen=True)
class Reading:
    """A text as a model reads it: ids, token strings, the word of each token (None where it has none), special ones."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    special: tuple[bool, ...]


def open_model(folder: str | Path) -> tuple[Any, Any]:
    """A model with the head it was saved with, and its tokenizer; a folder without a head gives the encoder alone.

    Reads this disk alone, as `local.load` does. A head that the config names and the weights lack is an error: transformers
    would answer with a random one.

    >>> model, tokenizer = open_model(local.demo_model_path())
    >>> type(model).__name__
    'BertModel'
    """
    folder = Path(folder)
    local._check_config(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = next(iter(config.get("architectures") or ()), "")
    kind = next((kind for ending, kind in KINDS.items() if str(named).endswith(ending)), None)
    if kind is None:
        return local.load(folder)
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    local._check_weights(folder)
    with local._quietly():
        read = local._read(transformers.AutoConfig, "config", folder)
        tokenizer = local._read(transformers.AutoTokenizer, "tokenizer", folder, config=read)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise CorruptModel(f"{folder} holds no tokenizer; copy tokenizer.json beside config.json")
        options = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        auto = getattr(transformers, AUTO[kind])
        model, report = local._read(auto, "model", folder, config=read, **options)
    local._check_complete(folder, model, report)
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise CorruptModel(
            f"{folder} lacks {missing[0]} of the head that its config.json names ({named}); save the model with it again"
        )
    return model.eval(), tokenizer


def kind_of(model: nn.Module) -> str:
    """What a model answers: `"classification"`, `"mlm"`, `"next-token"`, or `"embedding"` where it has no head.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> tiny = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=17)
    >>> kind_of(BertForMaskedLM(tiny))
    'mlm'
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise Unsupported(f"{name} reads {reads} and no text; give a model that reads tokens")
    if getattr(config, "is_encoder_decoder", False) and getattr(model, "get_encoder", str)() is not model:
        raise Unsupported(
            f"{name} reads with an encoder and answers with a decoder, whose tokens have no one attention matrix together; "
            "give a classifier, a masked or causal language model, or the encoder alone (model.get_encoder())"
        )
    kind = next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)
    if kind == "classification" and getattr(config, "problem_type", None) == "multi_label_classification":
        raise Unsupported(
            f"this {name} gives several labels at once, so that there is no one answer to change; explain a label against its absence: "
            "lens.causes.TextModel(encoder, tokenizer, head=...) with two scores"
        )
    if kind is not None:
        return kind
    if "For" in name or "Head" in name:
        raise Unsupported(
            f"{name} gives no one answer to a text; give a classifier, a masked or causal language model, or an encoder"
        )
    if "Decoder" in name or getattr(config, "model_type", "") in _causal_types():
        raise Unsupported(f"{name} has no head that predicts; load the folder with AutoModelForCausalLM")
    return "embedding"


def _causal_types() -> set[str]:
    """Kinds of models that predict the next token, and no masked one."""
    from transformers.models.auto import modeling_auto

    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - masked


def read_text(model: nn.Module, tokenizer: Any, text: str, extra: int = 0) -> Reading:
    """The text in tokens, checked: not empty, with room for so many more in what the model can read."""
    if not callable(tokenizer):
        raise InvalidArgument(f"tokenizer must be a tokenizer of transformers; got {type(tokenizer).__name__}")
    if not isinstance(text, str) or not text.strip():
        raise InvalidArgument(f"the text must be a string that is not empty; got {text!r:.60}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("the text is not valid Unicode; give it in UTF-8") from None
    encoded = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids = list(encoded["input_ids"])
    limit = _limit(model, tokenizer) - extra
    if len(ids) > limit:
        raise InvalidArgument(f"the text has {len(ids)} tokens, but the model's limit is {limit}; give a shorter text")
    marks = set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}
    special = tuple(bool(mark) or one in marks for mark, one in zip(encoded["special_tokens_mask"], ids, strict=True))
    if all(special) and getattr(tokenizer, "mask_token_id", None) not in ids:
        raise InvalidArgument(f"the tokenizer finds no tokens in {text!r:.60}; give other words")
    # A slow tokenizer does not tell which tokens make a word.
    words = tuple(encoded.word_ids()) if getattr(tokenizer, "is_fast", False) else tuple(range(len(ids)))
    return Reading(tuple(ids), tuple(tokenizer.convert_ids_to_tokens(ids)), words, special)


def token_of(tokenizer: Any, word: str | int, size: int) -> int:
    """The one token that a word is; an error where there is none, or more than one."""
    if isinstance(word, int) and not isinstance(word, bool):
        if not 0 <= word < size:
            raise InvalidArgument(f"target must be a token among 0..{size - 1}; got {word}")
        return word
    if not isinstance(word, str) or not word:
        raise InvalidArgument(f"target must be a word or the number of a token; got {word!r}")
    known = tokenizer.get_vocab()
    if word in known and known[word] < size:
        return int(known[word])
    # After a space it may be another token.
    tries = [tokenizer(form, add_special_tokens=False, verbose=False)["input_ids"] for form in (f" {word}", word)]
    found = next(
        (one[0] for one in tries if len(one) == 1 and one[0] != getattr(tokenizer, "unk_token_id", None)), None
    )
    if found is None:
        pieces = tokenizer.convert_ids_to_tokens(min(tries, key=len))
        raise InvalidArgument(
            f"target {word!r} is not in the model's vocabulary (its pieces are {', '.join(map(str, pieces[:6]))}); name one token"
        )
    return int(found)


def label_of(label: str | int, labels: tuple[str, ...]) -> int:
    """The column of a label, by its name or number."""
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return label
    folded = [name.casefold() for name in labels]
    if isinstance(label, str) and label.casefold() in folded:
        return folded.index(label.casefold())
    # A command line has no numbers.
    if isinstance(label, str) and label.isdecimal() and int(label) < len(labels):
        return int(label)
    raise InvalidArgument(f"target must be one of the labels {', '.join(labels)} or its number; got {label!r}")


def labels_of(model: nn.Module, count: int) -> tuple[str, ...]:
    """The names of a classifier's labels, by its config; numbers where that knows another count."""
    named = getattr(getattr(model, "config", None), "id2label", None) or {}
    named = named if len(named) == count else {}
    return tuple(str(named.get(at, at)) for at in range(count))


def named(model: nn.Module, ids: torch.Tensor, seen: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens `[k, n]` and which of them are seen, as arguments of the model, where it is."""
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    return {"input_ids": ids.to(device), "attention_mask": seen.to(device)}


def run(model: nn.Module, ids: torch.Tensor, seen: torch.Tensor, **more: Any) -> Any:
    """What the model answers to tokens `[k, n]`, of which some may not be seen."""
    return model(**named(model, ids, seen), **more)


def is_causal(model: nn.Module) -> bool:
    """Whether no token sees a later one, by the kind of the model."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_decoder", False)) or getattr(config, "model_type", "") in _causal_types()


def _limit(model: nn.Module, tokenizer: Any) -> int:
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or -1
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding's.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limit: int = getattr(tokenizer, "model_max_length", 10**9)
    return min(limit, positions) if positions > 0 else limit
