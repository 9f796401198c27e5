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
from heedful.bridges.words import Span, aligned, words_of

__all__ = [
    "KINDS",
    "Reading",
    "beginning",
    "is_causal",
    "kind_of",
    "label_of",
    "kind_named",
    "labels_of",
    "limit_of",
    "named",
    "open_model",
    "part_of",
    "parts_of",
    "read_text",
    "reads_singly",
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
SUPPORTED = (
    "classifiers of whole texts (...ForSequenceClassification), masked and causal language models (...ForMaskedLM, ...ForCausalLM, "
    "...LMHeadModel), and encoders without a head (...Model)"
)
AUTO = {
    "classification": "AutoModelForSequenceClassification",
    "mlm": "AutoModelForMaskedLM",
    "next-token": "AutoModelForCausalLM",
}


@dataclass(frozen=True)
class Reading:
    """A text as a model reads it.

    Attributes:
        text: what was given.
        ids, tokens: the tokens, as numbers and as the tokenizer writes them.
        spans: where each token stands in the text; None for one that does not.
        words: the number of the word of each token; None for one that is of no word.
        special: whether each token is a mark of the tokenizer's.
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    spans: tuple[Span | None, ...]
    words: tuple[int | None, ...]
    special: tuple[bool, ...]


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

    Reads this disk alone, as `local.load` does. A head that the config names and the weights lack is an error: transformers
    would answer with a random one.

    >>> model, tokenizer = open_model(local.demo_model_path())
    >>> type(model).__name__
    'BertModel'
    """
    folder = local.find_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    named = next(iter(config.get("architectures") or ()), "")
    try:
        headless = kind == "embedding" or not named or config.get("is_encoder_decoder")
        known = None if headless else kind_named(str(named))
    except Unsupported as error:
        raise Unsupported(f"{folder}: {error}. task='embedding' explains the encoder below the head") from None
    if known is None:
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
        auto = getattr(transformers, AUTO[known])
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


def read_text(model: nn.Module, tokenizer: Any, text: str, extra: int = 0) -> Reading:
    """The text in tokens, checked: not empty, with room for so many more in what the model can read."""
    reading = _read(tokenizer, text)
    limit = limit_of(model, tokenizer) - extra
    if len(reading.ids) > limit:
        raise InvalidArgument(
            f"the text has {len(reading.ids)} tokens, but the model's limit is {limit}; give a shorter text, read a part of it "
            "with truncate=True, or explain it window by window (explain_windows)"
        )
    if all(reading.special) and getattr(tokenizer, "mask_token_id", None) not in reading.ids:
        raise InvalidArgument(f"the tokenizer finds no tokens in {text!r:.60}; give other words")
    return reading


def _read(tokenizer: Any, text: str) -> Reading:
    if not callable(tokenizer):
        raise InvalidArgument(f"tokenizer must be a tokenizer of transformers; got {type(tokenizer).__name__}")
    if not isinstance(text, str) or not text.strip():
        raise InvalidArgument(f"the text must be a string that is not empty; got {text!r:.60}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("the text is not valid Unicode; give it in UTF-8") from None
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, return_special_tokens_mask=True, return_offsets_mapping=fast, verbose=False)
    ids = list(encoded["input_ids"])
    marks = set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}
    special = tuple(bool(mark) or one in marks for mark, one in zip(encoded["special_tokens_mask"], ids, strict=True))
    tokens = tuple(tokenizer.convert_ids_to_tokens(ids))
    if fast:
        spans = [tuple(span) if span[1] > span[0] else None for span in encoded["offset_mapping"]]
    else:
        spans = aligned(text, [tokenizer.convert_tokens_to_string([token]) for token in tokens])
    return Reading(text, tuple(ids), tokens, tuple(spans), words_of(text, spans), special)


def beginning(tokenizer: Any, text: str, count: int) -> str:
    """The text as far as its first tokens go, special ones counted; whole words where there are any."""
    reading = _read(tokenizer, text)
    if len(reading.ids) <= count:
        return text
    room = count - sum(span is None for span in reading.spans)
    places = [place for place, span in enumerate(reading.spans) if span][: max(1, room)]
    return text[slice(*_fitting(tokenizer, reading, places, max(count, 1)))]


def parts_of(model: nn.Module, tokenizer: Any, text: str, extra: int = 0) -> list[Span]:
    """The text in windows of whole words, one after the other, each as long as the model can read."""
    reading, room = _room(model, tokenizer, text, extra)
    places = [place for place, span in enumerate(reading.spans) if span]
    found: list[Span] = []
    while places:
        part = _fitting(tokenizer, reading, places[:room], limit_of(model, tokenizer) - extra)
        found.append(part)
        places = [place for place in places if (reading.spans[place] or (0, 0))[0] >= part[1]]
    return found


def part_of(model: nn.Module, tokenizer: Any, text: str, extra: int = 0, at: str = "start") -> Span:
    """As much of the text as the model can read: from its start, up to its end, or around its mask."""
    reading, room = _room(model, tokenizer, text, extra)
    places = [place for place, span in enumerate(reading.spans) if span]
    mark = getattr(tokenizer, "mask_token_id", None)
    first = 0
    if at == "end":
        first = max(0, len(places) - room)
    elif at == "mask" and mark in reading.ids and reading.ids.index(mark) in places:
        first = min(max(0, places.index(reading.ids.index(mark)) - room // 2), max(0, len(places) - room))
    return _fitting(tokenizer, reading, places[first : first + room], limit_of(model, tokenizer) - extra)


def _room(model: nn.Module, tokenizer: Any, text: str, extra: int) -> tuple[Reading, int]:
    """The text in tokens, and how many of its own the model can read at once."""
    reading = _read(tokenizer, text)
    room = limit_of(model, tokenizer) - extra - sum(span is None for span in reading.spans)
    if room < 1:
        raise InvalidArgument(f"the model's limit of {limit_of(model, tokenizer)} tokens leaves no room for the text")
    return reading, room


def _fitting(tokenizer: Any, reading: Reading, places: list[int], limit: int) -> Span:
    """The characters of so many tokens in a row, cut back to whole words that fit when they are read alone."""
    words = reading.words

    def torn(inside: int, outside: int) -> bool:
        return 0 <= outside < len(words) and words[inside] is not None and words[inside] == words[outside]

    first, last = 0, len(places)
    while last - first > 1 and torn(places[first], places[first] - 1):
        first += 1
    while True:
        end = last
        while end - first > 1 and torn(places[end - 1], places[end - 1] + 1):
            end -= 1
        # A word that is longer than a window is cut.
        end = end if end - first > 1 or last - first == 1 else last
        spans = [reading.spans[place] or (0, 0) for place in places[first:end]]
        part = spans[0][0], spans[-1][1]
        if last - first == 1 or len(_read(tokenizer, reading.text[slice(*part)]).ids) <= limit:
            return part
        last -= 1


def token_of(tokenizer: Any, word: str | int, size: int) -> int:
    """The one token that a word is; an error where there is none, or more than one.

    A word is first tried as it stands within a text, after a space: to many tokenizers that is another token than at the start.
    The tokenizer's own writing of a token is known too.
    """
    if isinstance(word, int) and not isinstance(word, bool):
        if not 0 <= word < size:
            raise InvalidArgument(f"target must be a token among 0..{size - 1}; got {word}")
        return word
    if not isinstance(word, str) or not word:
        raise InvalidArgument(f"target must be a word or the number of a token; got {word!r}")
    unknown = getattr(tokenizer, "unk_token_id", None)
    tries = [tokenizer(form, add_special_tokens=False, verbose=False)["input_ids"] for form in (f" {word}", word)]
    tries.append([tokenizer.get_vocab()[word]] if word in tokenizer.get_vocab() else [])
    found = next((one[0] for one in tries if len(one) == 1 and one[0] < size and one[0] != unknown), None)
    if found is None:
        pieces = [tokenizer.decode([one]).strip() for one in min(filter(None, tries), key=len, default=[])]
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


def reads_singly(model: nn.Module) -> bool:
    """Whether a classifier takes one text at a time: without a padding token it cannot tell where several end."""
    config: Any = getattr(model, "config", None)
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return is_causal(model) and getattr(inner, "pad_token_id", None) is None


def limit_of(model: nn.Module, tokenizer: Any) -> int:
    """How many tokens a model can read."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or -1
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding's.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limit: int = getattr(tokenizer, "model_max_length", 10**9)
    return min(limit, positions) if positions > 0 else limit
