"""A question to a model: parts that can be taken from it, an answer, and the attention behind that answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from heedful._errors import HeedfulError, Unsupported
from heedful._runtime import after_calls, eval_mode
from heedful.lens._record import LayerRecord
from heedful.lens.observation import observe

# Why a sign is never taken away.
PUNCTUATION = "punctuation"
# Scores that one batch may hold: 256 MiB of float32.
SCORES = 2**26


class Seen(NamedTuple):
    """The pass in which the model reads its own answer: token strings, and the layer that was asked for."""

    tokens: tuple[str, ...]
    record: LayerRecord


@runtime_checkable
class Task(Protocol):
    """One question to a model. Whatever has these can be explained, whether it reads words, items or something else.

    Attributes:
        kind: what the answer is: one of `texts.KINDS`, `"recommendation"`, or a name of your own.
        units: what can be taken away, each as the places it fills in the sequence; in order.
        names: of the units, for people.
        target: the places where the answer stands once it was put in; the mean of their rows is the target's node.
        replace: how a unit is taken away.

    A task may also have `text` with `spans` (where each unit stands in it) and `target_span`, `left_out` (pairs of what cannot be taken away and
    the reason), and `part` (a sentence on how much of the text was read).
    """

    kind: str
    units: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    target: tuple[int, ...]
    replace: str

    def scores(self, removed: Sequence[Sequence[int]]) -> Tensor:
        """`[k, answers]`: the score of each answer when the units of each set are away."""
        ...

    def column(self, answer: Any) -> int:
        """The column of `scores` that a user's name for an answer means."""
        ...

    def name(self, column: int) -> str:
        """An answer, for people."""
        ...

    def observed(self, column: int, layer: int) -> Seen:
        """Abduction: the pass with this answer put into the input, at its place."""
        ...

    def gradient(self, column: int) -> list[float] | None:
        """Gradient times input of the answer's margin, by unit; None where there is none."""
        ...


class Ids:
    """A task on a sequence of ids, whose units are replaced by an id, hidden from attention, or cut out."""

    kind: str
    units: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    target: tuple[int, ...]
    replace: str

    def __init__(self, model: nn.Module, ids: Sequence[int], fill: int | None, width: int) -> None:
        self.model, self.ids, self._fill = model, list(ids), fill
        # How many inputs may be answered at once.
        self.room = max(1, SCORES // max(1, width))

    def _answers(self, ids: Tensor, seen: Tensor) -> Tensor:
        raise NotImplementedError

    def _changed(self, removed: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids and which of them are seen, without these units."""
        ids, seen = list(self.ids), [1] * len(self.ids)
        for place in (place for unit in removed for place in self.units[unit]):
            if self.replace == "drop":
                seen[place] = 0
            else:
                assert self._fill is not None
                ids[place] = self._fill
        return ids, seen

    def scores(self, removed: Sequence[Sequence[int]]) -> Tensor:
        inputs = [self._changed(one) for one in removed]
        rows: dict[int, Tensor] = {}
        by_length: dict[int, list[int]] = {}
        for at, (ids, _) in enumerate(inputs):
            by_length.setdefault(len(ids), []).append(at)
        with torch.no_grad(), eval_mode(self.model), _failing(self.model):
            for places in by_length.values():
                for start in range(0, len(places), self.room):
                    part = places[start : start + self.room]
                    batch = (torch.tensor([inputs[at][side] for at in part]) for side in (0, 1))
                    rows |= zip(part, self._answers(*batch).double().cpu(), strict=True)
        return torch.stack([rows[at] for at in range(len(inputs))])

    def gradient(self, column: int) -> list[float] | None:
        held: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if held or not args or not isinstance(args[0], Tensor) or args[0].shape != (1, len(self.ids)):
                return output
            held.append(output.detach().requires_grad_(True))
            # Some models go on to change what an embedding gave, which a leaf forbids.
            return held[0].clone()

        tables = [one for one in self.model.modules() if isinstance(one, nn.Embedding)]
        try:
            with torch.enable_grad(), eval_mode(self.model), after_calls(tables, keep):
                row = self._answers(torch.tensor([self.ids]), torch.ones(1, len(self.ids), dtype=torch.long))[0]
                if not held or not row.requires_grad:
                    return None
                others = torch.cat([row[:column], row[column + 1 :]])
                (slope,) = torch.autograd.grad(row[column] - others.max(), held[0], allow_unused=True)
        # A step that has no derivative, or tensors of inference mode.
        except RuntimeError:
            return None
        if slope is None:
            return None
        by_place = (slope * held[0]).sum(-1)[0].double().tolist()
        return [sum(by_place[place] for place in unit) for unit in self.units]


def recorded(model: nn.Module, inputs: Any, layer: int) -> LayerRecord:
    """One layer of self-attention, as `observe` sees it."""
    with eval_mode(model), _failing(model):
        record = observe(model, inputs, layers=[layer], keep=("weights", "queries", "keys", "values"))[0]
    if record.kind != "self" or record.queries_len != record.keys_len:
        raise Unsupported(
            f"layer {record.index} ({record.name}) attends elsewhere than to its own tokens; choose another"
        )
    return record


@contextmanager
def _failing(model: Any) -> Iterator[None]:
    """Models fail by every class there is; here by one."""
    try:
        yield
    except HeedfulError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unsupported(f"{type(model).__name__} fails on this input: {reason:.300}") from error


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Names that tell repeated ones apart.

    >>> unique(["the", "cat", "the"])
    ('the', 'cat', 'the (2)')
    """
    count: dict[str, int] = {}
    labels: list[str] = []
    for name in names:
        label = name
        while label in labels or name not in count:
            count[name] = count.get(name, 0) + 1
            label = name if count[name] == 1 else f"{name} ({count[name]})"
        labels.append(label)
    return tuple(labels)
