"""The words of a user's own text, and the tokens that each of them became."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import category

from heedful._text import printable

Span = tuple[int, int]

# Scripts that put no space between words: there each sign is a word, unless a token holds several.
SPACELESS = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)  # fmt: skip
JOINERS = "\u200c\u200d"
APOSTROPHES = "'\u2019"


def segments(text: str) -> list[Span]:
    """Where each word of a text begins and ends: runs of letters and digits, or of signs such as emoji; no punctuation.

    An apostrophe between letters, and a point or comma between digits, belong to their word.

    >>> text = "Don't pay 3.50 \U0001f600!"
    >>> [text[start:end] for start, end in segments(text)]
    ["Don't", 'pay', '3.50', '\U0001f600']
    """
    spans: list[Span] = []
    before = ""
    for at, sign in enumerate(text):
        kind = _kind(sign)
        # A mark or a joiner belongs to what it follows.
        follows = bool(before) and kind == "mark"
        if follows or (kind == "" and 0 < at < len(text) - 1 and _binds(text[at - 1], sign, text[at + 1])):
            kind = before
            spans[-1] = (spans[-1][0], at + 1)
        elif kind and kind == before != "alone":
            spans[-1] = (spans[-1][0], at + 1)
        elif kind:
            kind = "letter" if kind == "mark" else kind
            spans.append((at, at + 1))
        before = kind
    return spans


def _kind(sign: str) -> str:
    if sign in JOINERS:
        return "mark"
    group = category(sign)
    if group[0] == "M":
        return "mark"
    if any(first <= ord(sign) <= last for first, last in SPACELESS) and group[0] == "L":
        return "alone"
    return "letter" if group[0] in "LN" or sign == "_" else "symbol" if group[0] == "S" else ""


def sign_end(text: str, end: int) -> int:
    """Where a sign ends that has its last letter before `end`: behind the marks that follow, which tokenizers may leave out.

    >>> sign_end("\u2764\ufe0f!", 1)
    2
    """
    while 0 < end < len(text) and _kind(text[end]) == "mark" and _kind(text[end - 1]):
        end += 1
    return end


def _binds(before: str, sign: str, after: str) -> bool:
    """Whether a sign of punctuation holds a word together."""
    if sign in APOSTROPHES:
        return _kind(before) == _kind(after) == "letter"
    return sign in ".," and before.isdigit() and after.isdigit()


def words_of(text: str, spans: Sequence[Span | None]) -> tuple[int | None, ...]:
    """The number of the word that each token is of, by where it stands in the text; None for one that is of no word.

    Words that share a token are one.

    >>> words_of("unhappy, he ran", [(0, 2), (2, 7), (7, 8), (9, 15)])
    (0, 0, None, 1)
    """
    words = segments(text)
    owner: list[int | None] = [None] * len(text)
    for number, (start, end) in enumerate(words):
        owner[start:end] = [number] * (end - start)
    first = list(range(len(words)))
    for span in spans:
        mine = sorted({one for one in owner[slice(*span)] if one is not None}) if span else []
        for number in mine[1:]:
            first[number] = min(first[number], first[mine[0]])
    for number, other in enumerate(first):
        first[number] = first[other]
    numbers = [
        next((first[one] for one in owner[slice(*span)] if one is not None), None) if span else None for span in spans
    ]
    order = {number: at for at, number in enumerate(dict.fromkeys(one for one in numbers if one is not None))}
    return tuple(None if one is None else order[one] for one in numbers)


def aligned(text: str, pieces: Sequence[str]) -> list[Span | None]:
    """Where pieces of a text stand in it, for tokenizers that do not tell; None for one that is not found.

    >>> aligned("The cat", ["[CLS]", "the", "cat"])
    [None, (0, 3), (4, 7)]
    """
    folded = "".join(sign.lower() if len(sign.lower()) == 1 else sign for sign in text)
    spans: list[Span | None] = []
    cursor = 0
    for piece in pieces:
        plain = piece.strip().lower()
        at = folded.find(plain, cursor) if plain else -1
        # One that is not the text's own would be found far behind.
        if at < 0 or at > cursor + 40:
            spans.append(None)
            continue
        cursor = at + len(plain)
        spans.append((at, cursor))
    return spans


def token_text(tokenizer: Any, token: str) -> str:
    """A token as a person would write it, on one line: no marks of the tokenizer, nothing that is not printable."""
    return printable(tokenizer.convert_tokens_to_string([token]).strip() or token if tokenizer is not None else token)
