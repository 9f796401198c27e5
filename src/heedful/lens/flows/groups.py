"""Groups of tokens of a text: question and context, the roles of a chat, passages that were retrieved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument
from heedful.bridges.reading import Reading, check_text, inputs_of, limit_of, read_text
from heedful.bridges.words import Span

# Tokens of the text that are in no group, and marks of the tokenizer where these are kept.
REST, SPECIAL = "rest", "special"


@dataclass(frozen=True)
class Groups:
    """A text that is ready to be read: inputs of the model, and the group of each token."""

    text: str
    names: tuple[str, ...]
    inputs: Mapping[str, Tensor]
    ids: Tensor  # [1, n]
    special: Tensor  # [1, n]
    tokens: tuple[str, ...]


def grouped(model: nn.Module, tokenizer: Any, groups: Any, text: Any = None, special: str = "exclude") -> list[Groups]:
    """Texts with the group of each token, one after the other; they share the names of groups.

    Marks of the tokenizer are left out, or with `special="keep"` a group of their own.

    >>> from heedful.bridges.reading import demo_model_path, load
    >>> one = grouped(*load(demo_model_path()), {"question": "Who sat?", "context": "The cat sat."})[0]
    >>> one.text, one.names
    ('Who sat? The cat sat.', ('question', 'context'))
    >>> one.ids.tolist()[0], one.special.tolist()[0][:2]  # [CLS] who sat ? the cat sat . [SEP]
    ([-1, 0, 0, 0, 1, 1, 1, 1, -1], [True, False])
    """
    if tokenizer is None:
        raise InvalidArgument("groups are parts of a text, which needs a tokenizer to be read; give tokenizer=...")
    several = isinstance(groups, list | tuple) and bool(groups) and not all(map(_is_message, groups))
    if several and not all(isinstance(one, Mapping | list | tuple) for one in groups):
        raise InvalidArgument(
            "groups must be a mapping from names to parts of the text, or messages with role and content; got "
            f"{type(groups).__name__} of {type(groups[0]).__name__}"
        )
    texts = text if several and isinstance(text, list | tuple) else [text] * (len(groups) if several else 1)
    if several and len(texts) != len(groups):
        raise InvalidArgument(f"groups are for {len(groups)} texts, but inputs are {len(texts)}; give one for each")
    placed = [_placed(tokenizer, one, own) for one, own in zip(groups if several else [groups], texts, strict=True)]
    names = list(dict.fromkeys(name for _, spans in placed for name, _ in spans))
    readings = [(read, spans) for whole, spans in placed for read in [_read(model, tokenizer, whole)]]
    found = [_names(read, spans, SPECIAL if special == "keep" else None) for read, spans in readings]
    every = {name for own in found for name in own}
    names = list(dict.fromkeys((*names, *(name for name in (REST, SPECIAL) if name in every))))
    if len(names) < 2:
        raise InvalidArgument(
            f"groups hold nothing but {names[0]!r}, so that no attention goes between kinds; give at least two groups"
        )
    return [
        Groups(
            read.text,
            tuple(names),
            inputs_of(model, tokenizer, read.text),
            torch.tensor([[names.index(name) if name is not None else -1 for name in own]]),
            torch.tensor([read.special]),
            read.tokens,
        )
        for (read, _), own in zip(readings, found, strict=True)
    ]


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and set(one) >= {"role", "content"}


def _placed(tokenizer: Any, groups: Any, text: Any) -> tuple[str, list[tuple[str, Span]]]:
    """The text, and where each part of a group stands in it."""
    if isinstance(groups, list | tuple) and groups and all(map(_is_message, groups)):
        if text is not None:
            raise InvalidArgument("messages are a text by themselves; leave inputs out")
        parts = [(str(one["role"]), str(one["content"])) for one in groups]
        return _found(_chat(tokenizer, groups), parts)
    if not isinstance(groups, Mapping) or not groups:
        raise InvalidArgument(
            f"groups must be a mapping from names to parts of the text, or messages with role and content; got {groups!r:.80}"
        )
    several = {name: [part] if isinstance(part, str) else part for name, part in groups.items()}
    for name, pieces in several.items():
        if not isinstance(pieces, list | tuple) or not all(isinstance(one, str) and one.strip() for one in pieces):
            raise InvalidArgument(
                f"group {name!r} must be a text or a list of texts that are not empty; got {pieces!r:.80}"
            )
    parts = [(str(name), part.strip()) for name, pieces in several.items() for part in pieces]
    if text is None:
        return _found(" ".join(part for _, part in parts), parts)
    check_text(text)
    return text, [_within(text, name, part) for name, part in parts]


def _chat(tokenizer: Any, messages: Sequence[Any]) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidArgument(
            "this tokenizer has no chat template, so that messages are no text to it; give groups as a mapping from names to parts of the text"
        )
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False))


def _found(text: str, parts: Sequence[tuple[str, str]]) -> tuple[str, list[tuple[str, Span]]]:
    """Parts that stand in a text in this order."""
    spans: list[tuple[str, Span]] = []
    cursor = 0
    for name, part in parts:
        at = text.find(part.strip(), cursor)
        if at < 0:
            raise InvalidArgument(f"the part {part!r:.60} of {name!r} is not in the text, in the order of the groups")
        cursor = at + len(part.strip())
        spans.append((name, (at, cursor)))
    return text, spans


def _within(text: str, name: str, part: str) -> tuple[str, Span]:
    """The one place of a part, which begins and ends with its words."""
    edges = ["(?<!\\w)" * part[0].isalnum(), "(?!\\w)" * part[-1].isalnum()]
    places = list(re.finditer(f"{edges[0]}{re.escape(part)}{edges[1]}", text))
    if not places:
        raise InvalidArgument(f"the part {part!r:.60} of {name!r} is not in the text; give it as it stands there")
    if len(places) > 1:
        raise InvalidArgument(f"the part {part!r:.60} of {name!r} stands more than once in the text; give more of it")
    return name, places[0].span()


def _read(model: nn.Module, tokenizer: Any, text: str) -> Reading:
    try:
        return read_text(model, tokenizer, text)
    except InvalidArgument as error:
        if "model's limit" not in str(error):
            raise
        raise InvalidArgument(
            f"the groups together are longer than the model's limit of {limit_of(model, tokenizer)} tokens; shorten one of them"
        ) from None


def _names(read: Reading, spans: Sequence[tuple[str, Span]], special: str | None) -> list[str | None]:
    """The group of each token, and what marks of the tokenizer are called; None for one that is left out."""
    names: list[str | None] = []
    for mark, span in zip(read.special, read.spans, strict=True):
        inside = [name for name, (start, end) in spans if span and span[0] < end and start < span[1]]
        names.append(special if mark else inside[0] if inside else REST)
    return names
