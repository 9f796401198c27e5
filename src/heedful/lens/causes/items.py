"""Recommenders that read a history of items, and the question that a history is to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from heedful._checks import check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful.lens.causes.questions import Ids, Seen, Task, recorded, unique


class _Items(Ids):
    """A recommender that reads a history of items."""

    kind = "recommendation"

    def __init__(self, of: Recommender, items: Sequence[int], replace: str) -> None:
        self._of = of
        history = [int(item) for item in items] if hasattr(items, "__iter__") and all(map(is_whole, items)) else []
        marks = [mark for mark in (of.mask_id, of.pad_id) if mark is not None]
        if not history or set(history) & set(marks):
            none = f", none of them {' or '.join(map(str, marks))}" if marks else ""
            raise InvalidArgument(f"the history must be numbers of items, one or more{none}; got {items!r:.60}")
        # The answer needs a place of its own.
        room = len(history) if of.length is None else of.length - 1
        self._items, self._front = history[-room:], 0 if of.length is None else max(0, room - len(history))
        fills = {"mask": of.mask_id, "pad": of.pad_id}
        way = ("mask" if of.mask_id is not None else "drop") if replace == "auto" else replace
        if way in fills and fills[way] is None:
            raise InvalidArgument(f"replace={way!r} needs {way}_id; give it, or replace='drop'")
        self.replace = way
        super().__init__(of.model, self._whole(self._items), fills.get(way), 1)
        if way == "drop" and not marks and len(self._items) == 1:
            raise InvalidArgument("a history of one item cannot become empty; give two items or more, or pad_id")
        self.units = tuple((self._front + at,) for at in range(len(self._items)))
        self.names = unique([of.names(item) for item in self._items])
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
        left = [item for at, item in enumerate(self._items) if at not in set(removed)]
        # With no mark to read instead, a history cannot become empty: its last item stays.
        ids = self._whole(left) or self._items[-1:]
        return ids, [1] * len(ids)

    def _answers(self, ids: Tensor, seen: Tensor) -> Tensor:
        output = self.model(ids.to(self._device))
        scores = getattr(output, "logits", output)
        scores = scores[:, -1] if scores.dim() == 3 else scores
        # Neither marks nor what the user has had; also not what was taken from the history.
        columns = [one for one in self._hidden if 0 <= one < scores.shape[-1]]
        if scores.shape[-1] - len(columns) < 2:
            raise InvalidArgument(f"of {scores.shape[-1]} items fewer than two are neither excluded nor in the history")
        return scores.index_fill(-1, torch.tensor(columns, device=scores.device), -math.inf)

    @property
    def _device(self) -> torch.device:
        return next((x.device for x in self.model.parameters()), torch.device("cpu"))

    @cached_property
    def _hidden(self) -> set[int]:
        of = self._of
        return {one for one in (*self._items, *of.exclude, of.mask_id, of.pad_id) if one is not None}

    def column(self, answer: Any) -> int:
        count = self.scores([()]).shape[-1]
        if not is_whole(answer) or not 0 <= answer < count or answer in self._hidden:
            raise InvalidArgument(
                f"target must be an item among 0..{count - 1} that is neither excluded nor in the history; got {answer!r}"
            )
        return answer

    def name(self, column: int) -> str:
        return self._of.names(column)

    def observed(self, column: int, layer: int) -> Seen:
        ids = self._whole(self._items, column)
        tokens = ["[PAD]"] * self._front + [self._of.names(item) for item in [*self._items, column]]
        return Seen(tuple(tokens), recorded(self.model, torch.tensor([ids], device=self._device), layer))


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
        check_whole(0, optional=True, mask_id=mask_id, pad_id=pad_id)
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
