"""Models that can be asked: those that read a text, and recommenders that read a history of items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from inspect import signature
from operator import index
from pathlib import Path
from typing import Any
from unicodedata import category

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument, Unsupported
from heedful.bridges import answers
from heedful.bridges.local import demo_model_path
from heedful.lens.causes.questions import Ids, Seen, Task, recorded, unique
from heedful.lens.sections import readable

__all__ = ["KINDS", "REPLACE", "Recommender", "Seen", "Task", "TextModel", "asked", "opened"]

KINDS = ("classification", "mlm", "next-token", "recommendation", "embedding")
REPLACE = ("auto", "mask", "drop", "pad")


class _Text(Ids):
    """A model of transformers, or an encoder with a head of its own, that reads one text."""

    def __init__(self, asked_of: TextModel, text: str, replace: str, merge: str) -> None:
        model, tokenizer, self.kind = asked_of.model, asked_of.tokenizer, asked_of.kind
        self._of, self._tokenizer = asked_of, tokenizer
        reading = answers.read_text(model, tokenizer, text, extra=int(self.kind == "next-token"))
        self._tokens = reading.tokens
        self.replace = _way(tokenizer, replace)
        fill = getattr(tokenizer, f"{self.replace}_token_id", None)
        long = len(reading.ids) if self.kind == "mlm" else 1
        super().__init__(model, reading.ids, fill, long * max(1, len(tokenizer)))
        self._at = self._answer_place(reading)
        self.target = self._target(reading)
        taken = set(self.target) if len(self.target) == 1 else set()
        units = _units(reading, merge, taken, asked_of.causal)
        spoken = [unit for unit in units if _is_spoken(self._said(*(reading.tokens[place] for place in unit)))]
        self.units = tuple(spoken or units)
        if not self.units:
            raise InvalidArgument(
                f"nothing in {text!r:.60} can be taken away without taking the question away; give a longer text"
            )
        self.names = unique([self._said(*(reading.tokens[place] for place in unit)) for unit in self.units])

    def _said(self, *tokens: str) -> str:
        """Tokens as a person would write them, on one line."""
        text = self._tokenizer.convert_tokens_to_string(list(tokens))
        return readable(None, text.strip() or text or "".join(tokens))

    def _answer_place(self, reading: answers.Reading) -> int:
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

    def _target(self, reading: answers.Reading) -> tuple[int, ...]:
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
            found = logits if self.kind == "classification" else logits[:, self._at if self.kind == "mlm" else -1]
            if found.shape[-1] < 2:
                raise Unsupported(f"{type(self.model).__name__} answers with one number; give a model that chooses")
            return found
        pooled = self._pooled(ids, seen)
        if of.head is not None:
            found = of.head(pooled)
            return found if found.shape[-1] > 1 else torch.cat([torch.zeros_like(found), found], -1)
        near = nn.functional.cosine_similarity(pooled, self._whole)
        return torch.stack([near, torch.full_like(near, of.threshold)], -1)

    def _pooled(self, ids: Tensor, seen: Tensor) -> Tensor:
        """`[k, d]`: the state that stands for each text."""
        states: Tensor = answers.run(self.model, ids, seen)[0]
        weights = seen.to(states)[..., None]
        return (states * weights).sum(1) / weights.sum(1) if self._of.pool == "mean" else states[:, self.target[0]]

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
        given, count = self._of.labels, self._count
        if given is not None and len(given) != count:
            raise InvalidArgument(f"there are {count} answers, but {len(given)} labels: {', '.join(given)}")
        return given or answers.labels_of(self.model, count)

    def name(self, column: int) -> str:
        if self.kind == "embedding":
            near = f"a cosine of {self._of.threshold:g}"
            return (f"embedding within {near}", f"embedding moved beyond {near}")[column]
        if self.kind == "classification":
            return self._labels[column]
        token = self._tokenizer.convert_ids_to_tokens([column])[0]
        return str(column) if token is None else self._said(token)

    def observed(self, column: int, layer: int) -> Seen:
        ids, tokens = list(self.ids), list(self._tokens)
        if self.kind in ("mlm", "next-token"):
            place = self.target[0]
            ids[place:], tokens[place:] = [column, *ids[place + 1 :]], [self.name(column), *tokens[place + 1 :]]
        given = torch.tensor([ids])
        return Seen(
            tuple(tokens), recorded(self.model, answers.named(self.model, given, torch.ones_like(given)), layer)
        )


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
    >>> from heedful.bridges.local import demo_model_path, load
    >>> model, tokenizer = load(demo_model_path())
    >>> question = TextModel(model, tokenizer, head=torch.nn.Linear(384, 2), labels=("bad", "good")).ask("A fine film.")
    >>> question.names, question.scores([(), (1,)]).shape
    (('a', 'fine', 'film'), torch.Size([2, 2]))
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
        if kind not in KINDS or kind == "recommendation":
            known = ", ".join(one for one in KINDS if one != "recommendation")
            raise InvalidArgument(f"task must be 'auto' or one of {known} for a model that reads texts; got {kind!r}")
        if pool not in (None, "cls", "mean"):
            raise InvalidArgument(f"pool must be 'cls' or 'mean'; got {pool!r}")
        if not -1 < threshold < 1:
            raise InvalidArgument(f"threshold must be a cosine between -1 and 1; got {threshold!r}")
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
        self.causal = answers.is_causal(model)
        self.keeps = "logits_to_keep" in signature(model.forward).parameters

    def ask(self, text: str, replace: str = "auto", merge: str = "words") -> Task:
        """The question that a text is."""
        return _Text(self, text, replace, merge)


class _Items(Ids):
    """A recommender that reads a history of items."""

    kind = "recommendation"

    def __init__(self, asked_of: Recommender, items: Sequence[int], replace: str) -> None:
        self._of = of = asked_of
        given = items
        try:
            items = [index(item) for item in items]
        except TypeError:
            items = []
        marks = [mark for mark in (of.mask_id, of.pad_id) if mark is not None]
        if not items or set(items) & set(marks):
            none = f", none of them {' or '.join(map(str, marks))}" if marks else ""
            raise InvalidArgument(f"the history must be numbers of items, one or more{none}; got {given!r:.60}")
        # The answer needs a place of its own.
        room = len(items) if of.length is None else of.length - 1
        self._items, self._front = items[-room:], 0 if of.length is None else max(0, room - len(items))
        fills = {"mask": of.mask_id, "pad": of.pad_id}
        way = ("mask" if of.mask_id is not None else "drop") if replace == "auto" else replace
        if way in fills and fills[way] is None:
            raise InvalidArgument(f"replace={way!r} needs {way}_id; give it, or replace='drop'")
        self.replace = way
        super().__init__(of.model, self._whole(self._items), fills.get(way), 1)
        # With no mark to read instead, a history cannot become empty: its first item stays.
        self._stays = int(way == "drop" and not marks)
        self.units = tuple((self._front + at,) for at in range(self._stays, len(self._items)))
        if not self.units:
            raise InvalidArgument("a history of one item cannot become empty; give two items or more, or pad_id")
        self.names = unique([of.names(item) for item in self._items])[self._stays :]
        self.target = (self._front + len(self._items),)

    def _whole(self, items: Sequence[int], answer: int | None = None) -> list[int]:
        """Padding, items, and the place of the answer, where the model reads one."""
        of = self._of
        last = of.mask_id if answer is None else answer
        body = [*items, *([] if last is None else [last])]
        front = 0 if of.length is None else of.length - (0 if last is not None else 1) - len(body)
        return [*([of.pad_id] * max(front, not body) if of.pad_id is not None else []), *body]

    def _changed(self, removed: Sequence[int]) -> tuple[list[int], list[int]]:
        if self.replace != "drop":
            return super()._changed(removed)
        away = {unit + self._stays for unit in removed}
        ids = self._whole([item for at, item in enumerate(self._items) if at not in away])
        return ids, [1] * len(ids)

    def _answers(self, ids: Tensor, seen: Tensor) -> Tensor:
        device = next((x.device for x in self.model.parameters()), torch.device("cpu"))
        found = self.model(ids.to(device))
        found = getattr(found, "logits", found)
        found = found[:, -1] if found.dim() == 3 else found
        # Neither marks nor what the user has had; also not what was taken from the history.
        columns = [one for one in self._hidden if 0 <= one < found.shape[-1]]
        if found.shape[-1] - len(columns) < 2:
            raise InvalidArgument(f"of {found.shape[-1]} items fewer than two are neither excluded nor in the history")
        return found.index_fill(-1, torch.tensor(columns, device=found.device), -math.inf)

    @cached_property
    def _hidden(self) -> set[int]:
        of = self._of
        return {one for one in (*self._items, *of.exclude, of.mask_id, of.pad_id) if one is not None}

    def column(self, answer: Any) -> int:
        count = self.scores([()]).shape[-1]
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < count or answer in self._hidden:
            raise InvalidArgument(
                f"target must be an item among 0..{count - 1} that is neither excluded nor in the history; got {answer!r}"
            )
        return answer

    def name(self, column: int) -> str:
        return self._of.names(column)

    def observed(self, column: int, layer: int) -> Seen:
        ids = self._whole(self._items, column)
        tokens = ["[PAD]"] * self._front + [self._of.names(item) for item in [*self._items, column]]
        device = next((x.device for x in self.model.parameters()), torch.device("cpu"))
        return Seen(tuple(tokens), recorded(self.model, torch.tensor([ids], device=device), layer))


class Recommender:
    """A sequential recommender made ready for questions: `model(ids [k, n])` gives scores `[k, n, items]` or `[k, items]`.

    What is recommended is the best item that is not in the history. Like BERT4Rec it may read a mask where the next item
    goes; without `mask_id` it predicts at its last item, like SASRec.

    Args:
        model: any module whose attention `lens.observe` can see.
        mask_id: the id that stands for the item to be predicted.
        pad_id, length: histories are padded at the front to this length, the answer's place included, and cut to their end.
        names: of items, by id: a mapping or a list; the ids themselves by default.
        exclude: ids that are no items.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mask_id: int | None = None,
        pad_id: int | None = None,
        length: int | None = None,
        names: Any = None,
        exclude: Sequence[int] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InvalidArgument(f"a recommender must be a torch module; got {type(model).__name__}")
        for name, mark in (("mask_id", mask_id), ("pad_id", pad_id)):
            if mark is not None and (isinstance(mark, bool) or not isinstance(mark, int) or mark < 0):
                raise InvalidArgument(f"{name} must be a number from 0 on, or None; got {mark!r}")
        if length is not None and (pad_id is None or length < 2):
            raise InvalidArgument(
                f"length must be 2 or more and needs pad_id; got length={length!r}, pad_id={pad_id!r}"
            )
        self.model, self.mask_id, self.pad_id, self.length = model, mask_id, pad_id, length
        self._names, self.exclude = names, tuple(exclude)

    def names(self, item: int) -> str:
        """An item, for people."""
        try:
            return str(item if self._names is None else self._names[item])
        except (KeyError, IndexError):
            return str(item)

    def ask(self, items: Sequence[int], replace: str = "auto", merge: str = "words") -> Task:
        """The question that a history is."""
        return _Items(self, items, replace)


def opened(model: Any, tokenizer: Any = None, kind: str = "auto") -> Any:
    """What can be asked: something with `ask`, or a `Task` itself, from whatever of the known kinds a model is."""
    if isinstance(model, Task) or hasattr(model, "ask"):
        return model
    if kind == "recommendation":
        raise InvalidArgument("a recommender's marks must be told: explain(Recommender(model, mask_id=...), items)")
    if model is None or isinstance(model, str | Path):
        model, own = answers.open_model(demo_model_path() if model is None else model)
        tokenizer = tokenizer or own
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise InvalidArgument(
            "model must be a Hugging Face folder, a model of transformers with tokenizer=..., a TextModel, a Recommender or "
            f"a Task; got {type(model).__name__}"
        )
    return TextModel(model, tokenizer, kind)


def asked(adapter: Any, text: Any, replace: str = "auto", merge: str = "words") -> Task:
    """The question that an input is to what `opened` gave."""
    if replace not in REPLACE:
        raise InvalidArgument(f"replace must be one of {', '.join(REPLACE)}; got {replace!r}")
    if merge not in ("words", "tokens"):
        raise InvalidArgument(f"merge must be 'words' or 'tokens'; got {merge!r}")
    if not isinstance(adapter, Task):
        return adapter.ask(text, replace, merge)
    if text is not None or replace != "auto":
        raise InvalidArgument("a Task holds its input and its way of taking away already; leave text and replace out")
    return adapter


def _way(tokenizer: Any, replace: str) -> str:
    """How words are taken away: by a mask the model knows, else from its sight."""
    if replace == "auto":
        return "mask" if getattr(tokenizer, "mask_token_id", None) is not None else "drop"
    if replace in ("mask", "pad") and getattr(tokenizer, f"{replace}_token_id", None) is None:
        raise InvalidArgument(f"replace={replace!r}: the tokenizer has no {replace} token; take replace='drop'")
    return replace


def _units(reading: answers.Reading, merge: str, taken: set[int], causal: bool) -> tuple[tuple[int, ...], ...]:
    """Words, or tokens, that can be taken away: no special ones, not the target, not a decoder's sink."""
    groups: dict[Any, list[int]] = {}
    for place, (word, special) in enumerate(zip(reading.words, reading.special, strict=True)):
        # A decoder's first token takes the attention that goes nowhere else, and without it nothing is read.
        if not special and place not in taken and not (causal and place == 0):
            groups.setdefault(word if merge == "words" and word is not None else ("alone", place), []).append(place)
    return tuple(tuple(group) for group in groups.values())


def _is_spoken(word: str) -> bool:
    """Whether there is more than punctuation: a letter, a digit, a sign such as an emoji."""
    return any(category(sign)[0] in "LMNS" for sign in word)
