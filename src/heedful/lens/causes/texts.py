"""Models that read a text, and the question that a text is to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number
from heedful._errors import InvalidArgument, Unsupported
from heedful._text import printable
from heedful.bridges import answers
from heedful.bridges.reading import Reading, part_of, parts_of, read_text
from heedful.bridges.words import sign_end
from heedful.lens.causes.questions import PUNCTUATION, Ids, Seen, Task, recorded, unique

KINDS = ("classification", "mlm", "next-token", "embedding")
READ_THERE = (
    "the answer is read at its place, where hiding it from attention does not remove it; replace='mask' or 'pad' does"
)
# What a text that is too long is cut to: the end is what a next token follows.
CUT = {"next-token": "end", "mlm": "mask"}


class _Text(Ids):
    """A model of transformers, or an encoder with a head of its own, that reads one text."""

    def __init__(self, of: TextModel, text: str, replace: str, merge: str, part: str = "") -> None:
        model, tokenizer, self.kind = of.model, of.tokenizer, of.kind
        self._of, self._tokenizer, self.text, self.part = of, tokenizer, text, part
        reading = read_text(model, tokenizer, text, extra=of.extra)
        self._tokens = reading.tokens
        self.replace = _way(tokenizer, replace)
        # A decoder reads the text without the word; hidden from attention alone, the first and the last would still be read.
        self._cuts = self.replace == "drop" and of.causal
        fill = getattr(tokenizer, f"{self.replace}_token_id", None)
        long = len(reading.ids) if self.kind == "mlm" else 1
        super().__init__(model, reading.ids, fill, long * max(1, len(tokenizer)))
        if self.kind == "classification" and of.head is None and answers.reads_singly(model):
            self.room = 1
        self._at = self._answer_place(reading)
        self.target = self._target(reading)
        groups = _groups(reading, merge)
        spoken = [group for group in groups if any(reading.words[place] is not None for place in group)] or groups
        # What is hidden from attention is still read where the answer is.
        stays = {self.target[0]} if self.replace == "drop" and not self._cuts and len(self.target) == 1 else set()
        self.units = tuple(group for group in spoken if not stays.intersection(group))
        if not self.units:
            raise InvalidArgument(
                f"nothing in {text!r:.60} can be taken away without taking the question away; give a longer text"
            )
        self.spans = tuple(_span(reading, unit) for unit in self.units)
        self.target_span = _span(reading, self.target) if self.kind == "mlm" else None
        self.names = unique([self._named(reading, unit) for unit in self.units])
        kept = [(group, READ_THERE if group in spoken else PUNCTUATION) for group in groups if group not in self.units]
        special = [at for at, one in enumerate(reading.special) if one and (self.kind, at) != ("mlm", self._at)]
        kept += [((place,), "a special token of the tokenizer's") for place in special if reading.spans[place]]
        self.left_out = tuple(
            (self._named(reading, group), why) for group, why in kept if not _is_blank(reading, group)
        )
        marks = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "cls", "eos", "sep", "pad", "unk")]
        # What is read where every token was cut out; without any such mark the last token stays.
        self._nothing = next((mark for mark in marks if mark is not None), reading.ids[-1])

    def _changed(self, removed: Sequence[int]) -> tuple[list[int], list[int]]:
        if not self._cuts:
            return super()._changed(removed)
        away = {place for unit in removed for place in self.units[unit]}
        ids = [one for place, one in enumerate(self.ids) if place not in away] or [self._nothing]
        return ids, [1] * len(ids)

    def _named(self, reading: Reading, places: Sequence[int]) -> str:
        """What the user wrote at these places, on one line."""
        span = _span(reading, places)
        own = "" if span is None else reading.text[slice(*span)].strip()
        return printable(own) if own else self._written(*(reading.tokens[place] for place in places))

    def _written(self, *tokens: str) -> str:
        """Tokens as a person would write them, on one line."""
        text = self._tokenizer.convert_tokens_to_string(list(tokens))
        # Tokenizers without a decoder leave the marks of spaces in.
        return printable(text.strip().lstrip("\u0120\u2581") or text.strip() or text or "".join(tokens))

    def _answer_place(self, reading: Reading) -> int:
        if self.kind != "mlm":
            return len(reading.ids) - 1
        mark = self._tokenizer.mask_token_id
        places = [place for place, one in enumerate(reading.ids) if one == mark]
        if mark is None or len(places) != 1:
            raise InvalidArgument(
                f"the text must hold {self._tokenizer.mask_token or 'a mask token'} once, for the word to be predicted; "
                f"it does {len(places)} times"
            )
        return places[0]

    def _target(self, reading: Reading) -> tuple[int, ...]:
        last = len(reading.ids) - 1
        if self.kind == "mlm":
            return (self._at,)
        if self.kind == "next-token":
            return (last + 1,)
        if self._of.pool == "mean":
            return tuple(range(last + 1))
        if self._of.causal:
            return (last,)
        mark = getattr(self._tokenizer, "cls_token_id", None)
        return (reading.ids.index(mark),) if mark in reading.ids else (0,)

    def _answers(self, ids: Tensor, seen: Tensor) -> Tensor:
        of = self._of
        if self.kind in ("mlm", "next-token") or (self.kind == "classification" and of.head is None):
            more = {"logits_to_keep": 1} if self.kind == "next-token" and of.keeps else {}
            logits = answers.run(self.model, ids, seen, **more).logits
            scores = logits if self.kind == "classification" else logits[:, self._at if self.kind == "mlm" else -1]
            if scores.shape[-1] < 2:
                raise Unsupported(f"{type(self.model).__name__} answers with one number; give a model that chooses")
            return scores
        pooled = self._pooled(ids, seen)
        if of.head is not None:
            scores = of.head(pooled)
            return scores if scores.shape[-1] > 1 else torch.cat([torch.zeros_like(scores), scores], -1)
        near = nn.functional.cosine_similarity(pooled, self._whole)
        return torch.stack([near, torch.full_like(near, of.threshold)], -1)

    def _pooled(self, ids: Tensor, seen: Tensor) -> Tensor:
        """`[k, d]`: the state that stands for each text."""
        states: Tensor = answers.run(self.model, ids, seen)[0]
        weights = seen.to(states)[..., None]
        if self._of.pool == "mean":
            return (states * weights).sum(1) / weights.sum(1)
        return states[:, -1 if self._of.causal else self.target[0]]

    @cached_property
    def _whole(self) -> Tensor:
        """The embedding of the whole text."""
        ids = torch.tensor([self.ids])
        return self._pooled(ids, torch.ones_like(ids))

    def gradient(self, column: int) -> list[float] | None:
        # The whole text is as near to itself as can be: there is no slope.
        return None if self.kind == "embedding" else super().gradient(column)

    def column(self, answer: Any) -> int:
        if self.kind == "embedding":
            raise InvalidArgument("an encoder without a head has no answers to choose from; leave target out")
        if self.kind == "classification":
            return answers.label_of(answer, self._labels)
        return answers.token_of(self._tokenizer, answer, self._count)

    @cached_property
    def _count(self) -> int:
        """How many answers there are."""
        return self.scores([()]).shape[-1]

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        labels, count = self._of.labels, self._count
        if labels is not None and len(labels) != count:
            raise InvalidArgument(f"there are {count} answers, but {len(labels)} labels: {', '.join(labels)}")
        return labels or answers.labels_of(self.model, count)

    def name(self, column: int) -> str:
        if self.kind == "embedding":
            near = f"a cosine of {self._of.threshold:g}"
            return (f"embedding within {near}", f"embedding moved beyond {near}")[column]
        if self.kind == "classification":
            return self._labels[column]
        token = self._tokenizer.convert_ids_to_tokens([column])[0]
        return str(column) if token is None else self._written(token)

    def observed(self, column: int, layer: int) -> Seen:
        ids, tokens = list(self.ids), list(self._tokens)
        if self.kind in ("mlm", "next-token"):
            place = slice(self.target[0], self.target[0] + 1)
            ids[place], tokens[place] = [column], [self.name(column)]
        batch = torch.tensor([ids])
        inputs = answers.named(self.model, batch, torch.ones_like(batch))
        return Seen(tuple(tokens), recorded(self.model, inputs, layer))


class TextModel:
    """A model that reads a text, made ready for questions.

    Args:
        model: a classifier, masked or causal language model of transformers, or an encoder.
        tokenizer: of the model.
        kind: what it answers; by its class where it is `"auto"`.
        head: for an encoder: what makes scores `[k, answers]` from its pooled states `[k, d]`. One score counts as that of
            the second of two answers.
        pool: `"cls"` or `"mean"`, for an encoder: the state of its first token, or the mean of all. `"mean"` by default where
            there is no head, as sentence encoders do, else `"cls"`.
        labels: names of the answers.
        threshold: for an encoder without a head, which predicts nothing: its embedding counts as moved once its cosine with
            that of the whole text falls below this. At 0.7 two texts are commonly taken to say the same.

    >>> import torch
    >>> from heedful.bridges.reading import demo_model_path, load
    >>> model, tokenizer = load(demo_model_path())
    >>> question = TextModel(model, tokenizer, head=torch.nn.Linear(384, 2), labels=("bad", "good")).ask("A fine film.")
    >>> question.names, question.scores([(), (1,)]).shape
    (('A', 'fine', 'film'), torch.Size([2, 2]))
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        kind: str = "auto",
        *,
        head: Callable[[Tensor], Tensor] | None = None,
        pool: str | None = None,
        labels: Sequence[str] | None = None,
        threshold: float = 0.7,
    ) -> None:
        kind = ("classification" if head is not None else answers.kind_of(model)) if kind == "auto" else kind
        if tokenizer is None:
            raise InvalidArgument("a model that reads texts needs its tokenizer; give tokenizer=...")
        check_choice(("auto", *KINDS), task=kind)
        check_choice(("cls", "mean"), optional=True, pool=pool)
        check_number(-1, 1, threshold=threshold)
        if head is not None and type(model).__name__.endswith(tuple(answers.KINDS)):
            raise InvalidArgument(
                f"{type(model).__name__} has a head of its own; leave head out, or give model.base_model"
            )
        if kind == "embedding":
            model = getattr(model, "base_model", model)
        elif head is None and answers.kind_of(model) != kind:
            raise InvalidArgument(
                f"task={kind!r} does not fit {type(model).__name__}, which gives {answers.kind_of(model)}"
            )
        self.model, self.tokenizer, self.kind, self.head = model, tokenizer, kind, head
        # The state of one token stands for the text where a head of transformers says so.
        self.pool = pool or ("mean" if kind == "embedding" else "cls")
        self.labels, self.threshold = None if labels is None else tuple(labels), float(threshold)
        self.causal = kind == "next-token" or answers.is_causal(model)
        self.keeps = "logits_to_keep" in signature(model.forward).parameters
        # The answer needs a place of its own.
        self.extra = int(kind == "next-token")

    def ask(self, text: str, replace: str = "auto", merge: str = "words", truncate: bool = False) -> Task:
        """The question that a text is, or with `truncate` as much of it as the model can read."""
        if not truncate:
            return _Text(self, text, replace, merge)
        start, end = part_of(self.model, self.tokenizer, text, self.extra, CUT.get(self.kind, "start"))
        return _Text(self, text[start:end], replace, merge, _part(start, end, text))

    def windows(self, text: str, replace: str = "auto", merge: str = "words") -> list[Task]:
        """A question for each window of a text that may be longer than the model can read: its whole words, each once."""
        if self.kind in CUT:
            raise InvalidArgument(
                f"windows are for classifiers and encoders; a model that gives {self.kind} answers at one place of the text: "
                f"truncate it instead, which keeps {'the end' if CUT[self.kind] == 'end' else 'the part around that place'}"
            )
        parts = parts_of(self.model, self.tokenizer, text, self.extra)
        windows = [f"window {at} of {len(parts)}: " if parts[1:] else "" for at in range(1, len(parts) + 1)]
        return [
            _Text(self, text[start:end], replace, merge, _part(start, end, text, window))
            for (start, end), window in zip(parts, windows, strict=True)
        ]


def _part(start: int, end: int, text: str, window: str = "") -> str:
    """How much of a text was read; nothing where all of it was."""
    if not window and not text[:start].strip() and not text[end:].strip(" .,;:!?\n"):
        return ""
    return f"{window}characters {start + 1} to {end} of {len(text)} were read"


def _way(tokenizer: Any, replace: str) -> str:
    """How words are taken away: by a mask the model knows, else from its sight."""
    if replace == "auto":
        return "mask" if getattr(tokenizer, "mask_token_id", None) is not None else "drop"
    if replace in ("mask", "pad") and getattr(tokenizer, f"{replace}_token_id", None) is None:
        raise InvalidArgument(f"replace={replace!r}: the tokenizer has no {replace} token; take replace='drop'")
    return replace


def _groups(reading: Reading, merge: str) -> list[tuple[int, ...]]:
    """The places of each word, or token, of the text, in order; no special ones."""
    groups: dict[Any, list[int]] = {}
    for place, (word, special) in enumerate(zip(reading.words, reading.special, strict=True)):
        if not special:
            groups.setdefault(word if merge == "words" and word is not None else ("alone", place), []).append(place)
    return [tuple(group) for group in groups.values()]


def _is_blank(reading: Reading, places: Sequence[int]) -> bool:
    """Whether these tokens are space and nothing else."""
    spans = [span for place in places if (span := reading.spans[place])]
    return bool(spans) and not any(reading.text[slice(*span)].strip() for span in spans)


def _span(reading: Reading, places: Sequence[int]) -> tuple[int, int] | None:
    """The characters of the text that these tokens are of, without the space around them."""
    spans = [span for place in places if (span := reading.spans[place])]
    if not spans:
        return None
    start, end = min(span[0] for span in spans), sign_end(reading.text, max(span[1] for span in spans))
    own = reading.text[start:end]
    return (start + len(own) - len(own.lstrip()), end - len(own) + len(own.rstrip())) if own.strip() else (start, end)
