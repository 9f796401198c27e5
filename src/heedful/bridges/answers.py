"""Models of transformers that answer: what they are asked, and where their answer stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heedful._checks import is_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful.bridges import reading

# What a class of transformers answers, by the end of its name.
KINDS = {
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "mlm",
    "ForCausalLM": "next-token",
    "LMHeadModel": "next-token",
}
SUPPORTED = (
    "classifiers of whole texts (...ForSequenceClassification), masked and causal language models (...ForMaskedLM, ...ForCausalLM, "
    "...LMHeadModel), and encoders without a head (...Model)"
)
AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "mlm": "AutoModelForMaskedLM",
    "next-token": "AutoModelForCausalLM",
}


def kind_named(*names: str) -> str | None:
    """What a model answers by the names of its class and the classes that it extends; None for an encoder without a head.

    >>> kind_named("GPT2LMHeadModel"), kind_named("BertModel")
    ('next-token', None)
    """
    for name in names:
        kind = next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)
        if kind is not None:
            return kind
        if "For" in name or "Head" in name:
            raise Unsupported(f"{name} gives no one answer to a text that can be explained. Supported are {SUPPORTED}")
        # The parts of transformers that read and predict nothing.
        if name.endswith(("Model", "Encoder", "Stack")) and not name.endswith("PreTrainedModel"):
            return None
    raise Unsupported(f"what {names[0]} answers is not known. Supported are {SUPPORTED}")


def open_model(folder: str | Path, kind: str = "auto") -> tuple[Any, Any]:
    """A model with the head it was saved with, and its tokenizer; a folder without a head gives the encoder alone.

    With `kind="embedding"` the head is left out, whatever it is; otherwise one that is not known is an error.

    Reads this disk alone, as `reading.load` does. A head that the config names and the weights lack is an error: transformers
    would answer with a random one.

    >>> model, tokenizer = open_model(reading.demo_model_path())
    >>> type(model).__name__
    'BertModel'
    """
    folder = reading.find_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str(next(iter(config.get("architectures") or ()), ""))
    try:
        headless = kind == "embedding" or not name or config.get("is_encoder_decoder")
        known = None if headless else kind_named(name)
    except Unsupported as error:
        raise Unsupported(f"{folder}: {error}. task='embedding' explains the encoder below the head") from None
    return reading.load(folder, *(() if known is None else (AUTO[known], name)))


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
    # A class of the user's own is known by what it extends; none of the frameworks' bases says anything.
    bases = [base.__name__ for base in type(model).__mro__ if base.__module__.split(".")[0] != "torch"]
    kind = kind_named(*bases[: bases.index("PreTrainedModel") if "PreTrainedModel" in bases[1:] else 1])
    if kind == "classification" and getattr(config, "problem_type", None) == "multi_label_classification":
        raise Unsupported(
            f"this {name} gives several labels at once, so that there is no one answer to change; explain a label against its absence: "
            "lens.causes.TextModel(encoder, tokenizer, head=...) with two scores"
        )
    if kind is not None:
        return kind
    if "Decoder" in name or getattr(config, "model_type", "") in _causal_types():
        raise Unsupported(f"{name} has no head that predicts; load the folder with AutoModelForCausalLM")
    return "embedding"


def _causal_types() -> set[str]:
    """Kinds of models that predict the next token, and no masked one."""
    from transformers.models.auto import modeling_auto

    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - masked


def token_of(tokenizer: Any, word: str | int, size: int) -> int:
    """The one token that a word is; an error where there is none, or more than one.

    A word is first tried as it stands within a text, after a space: to many tokenizers that is another token than at the start.
    The tokenizer's own writing of a token is known too.
    """
    if is_whole(word):
        if not 0 <= word < size:
            raise InvalidArgument(f"target must be a token among 0..{size - 1}; got {word}")
        return int(word)
    if not isinstance(word, str) or not word:
        raise InvalidArgument(f"target must be a word or the number of a token; got {word!r}")
    unknown = getattr(tokenizer, "unk_token_id", None)
    tries = [tokenizer(form, add_special_tokens=False, verbose=False)["input_ids"] for form in (f" {word}", word)]
    tries.append([tokenizer.get_vocab()[word]] if word in tokenizer.get_vocab() else [])
    token = next((one[0] for one in tries if len(one) == 1 and one[0] < size and one[0] != unknown), None)
    if token is None:
        pieces = [tokenizer.decode([one]).strip() for one in min(filter(None, tries), key=len, default=[])]
        raise InvalidArgument(
            f"target {word!r} is not in the model's vocabulary (its pieces are {', '.join(map(str, pieces[:6]))}); name one token"
        )
    return int(token)


def label_of(label: str | int, labels: tuple[str, ...]) -> int:
    """The column of a label, by its name or number."""
    if is_whole(label) and 0 <= label < len(labels):
        return int(label)
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


def reads_singly(model: nn.Module) -> bool:
    """Whether a classifier takes one text at a time: without a padding token it cannot tell where several end."""
    config: Any = getattr(model, "config", None)
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return is_causal(model) and getattr(inner, "pad_token_id", None) is None
