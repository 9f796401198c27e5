"""What a fitted model of rows is asked: answers by stored rows, filled cells, the rows an answer relied on, and tests of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole, is_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful.bridges.estimator import device_of, dtype_of, placed, seed_of
from heedful.bridges.frames import is_frame
from heedful.bridges.samples import Samples, check_is_fitted
from heedful.tables._columns import is_missing, mended, without_target
from heedful.tables._training import Learning
from heedful.tables.network import Answers, Members, Rows, TableNetwork
from heedful.tables.results import Corruption, Deletion, RowExplanation

STORED = 10_000
"""Rows that an answer looks at by default, at most."""

ASKED = 1024
"""Rows that are answered at once."""

DISTANCES = 2**24
"""Distances to stored rows that are looked at together."""

# Keys and values of stored rows, by network: an estimator must look the same before and after an answer.
_MEMORIES: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()


class Looking(Learning):
    """Answers that attend to stored rows, `context_cells_` with `context_target_`, which are the rows `context_rows_` of the table of `fit`."""

    context_cells_: np.ndarray
    context_target_: np.ndarray
    context_rows_: np.ndarray

    def _keep(self, samples: Samples) -> None:
        known = self._known(samples)
        assert samples.target is not None
        self.context_cells_, self.context_target_ = samples.inputs[0][known], samples.target[known]
        self.context_rows_ = np.arange(len(known)) if self._chosen is None else self._chosen

    def impute(self, X: Any) -> Any:
        """X with its missing cells filled in: numbers by their prediction, categories by their likeliest level; a frame for a frame, else an array.

        All other cells stay as they are, levels that `fit` never saw among them.
        """
        check_is_fitted(self, "network_")
        X, _ = without_target(X, None, self.target, fitting=False)
        cells = self._read(X).inputs[0]
        missing = np.isnan(cells) & is_missing(X)
        filled = cells.copy()
        rows = np.flatnonzero(missing.any(1))
        if len(rows):
            filled[rows] = np.where(missing[rows], self._features(cells[rows]), cells[rows])
        if not is_frame(X) and all(levels is None for levels in self.columns_.levels):
            return filled
        shown = self.columns_.shown(filled)
        if not is_frame(X):
            result = np.array(X, dtype=object)
            for place, name in enumerate(self.columns_.names):
                result[missing[:, place], place] = shown[name][missing[:, place]]
            return result
        result = X.copy()
        for place, name in enumerate(self.columns_.names):
            if missing[:, place].any():
                result[X.columns[place]] = mended(X.iloc[:, place], missing[:, place], shown[name])
        return result

    def embedding(self, X: Any) -> np.ndarray:
        """Each row as a vector, `(rows, members * width)`: what attention between rows and columns made of it."""
        answers = self._answered(self._asked(X))
        return torch.cat([part.row[0] for part in answers], dim=-1).double().cpu().numpy()

    def row_attention(self, X: Any, *, layer: int = -1, head: int | None = None, context: Any = "train") -> np.ndarray:
        """How much each row of X takes of each stored row in a layer, `(rows, stored rows)`; rows sum to 1. The mean over members and, without `head`, over heads. Where rows vote
        (preset `"fast"`), the last layer is that of the votes.

        Attention says where a network looks, not what its answer would be without it: `explain_row` measures that.
        """
        self._check_looks(context=context)
        asked = self._asked(X)
        layers, heads = self._setting("layers") + self._votes, self._setting("num_heads")
        if not is_whole(layer) or not -layers <= layer < layers:
            raise InvalidArgument(f"layer must be a whole number from {-layers} to {layers - 1}; got {layer!r}")
        if head is not None and (not is_whole(head) or not 0 <= head < heads):
            raise InvalidArgument(f"head must be a whole number from 0 to {heads - 1}, or None; got {head!r}")
        if self.context_size is None:
            return self._attention(asked, self._context(context), layer, head, isinstance(context, str))
        cells, target = self._given(context, nearest=True)
        shares = np.zeros((asked.values.shape[1], len(cells)))
        for row in range(len(shares)):
            alone = asked.take(torch.tensor([row]))
            places = self._nearest(alone, cells, target)
            shares[row, places] = self._attention(alone, self._rows(cells[places], target[places]), layer, head)[0]
        return shares

    def _attention(self, asked: Rows, stored: Rows, layer: int, head: int | None, is_own: bool = False) -> np.ndarray:
        total: Any = 0.0
        with torch.no_grad():
            for member, memory in self._memories(stored, is_own):
                weights = member.coefficients(asked, memory=memory, layer=layer)[0]
                total = total + (weights.mean(0) if head is None else weights[head % len(weights)]).double()
        return (total / self._setting("members")).cpu().numpy()

    def _nearest(self, asked: Rows, cells: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Places of the rows that the answer for one row looks at."""
        if self.context_size is None or self.context_size >= len(cells):
            return np.arange(len(cells))
        distances = self._distances(asked, self._rows(cells, target))[0]
        return np.sort(distances.topk(self.context_size, largest=False).indices.cpu().numpy())

    def explain_row(self, x: Any, top: int = 10, *, context: Any = "train") -> RowExplanation:
        """The stored rows that the prediction for one row relied on: the `top` most attended ones, each with its values, its share of the votes or, where there are none, of the attention (mean over layers, heads and
        members) and its effect, the change of the prediction when this row is taken out of the table.

        The prediction is the probability of the predicted class, or the number.
        """
        check_whole(top=top)
        asked = self._asked(x)
        if asked.values.shape[1] != 1:
            raise InvalidArgument(f"explain_row takes one row, as X[3:4]; got {asked.values.shape[1]} rows")
        self._check_looks(context=context)
        near = self.context_size is not None
        cells, target = self._given(context, near)
        seen = self._nearest(asked, cells, target)
        cells, target = cells[seen], target[seen]
        stored = self._rows(cells, target)
        layers = [-1] if self._votes else range(self._setting("layers"))
        is_own = isinstance(context, str) and not near
        shares = np.mean([self._attention(asked, stored, layer, None, is_own)[0] for layer in layers], axis=0)
        places = np.argsort(-shares, kind="stable")[:top]
        hidden = torch.zeros(1 + len(places), stored.values.shape[1], dtype=torch.bool, device=stored.values.device)
        hidden[torch.arange(1, 1 + len(places)), torch.from_numpy(places.copy())] = True
        values = self._without(asked, stored, hidden)
        return RowExplanation(
            answer=self._named(self._combined([part[:1] for part in values]))[0],
            prediction=float(values_of := self._quantity(values, values)[0]),
            rows=tuple(self._rows_named(context, near)[seen][places].tolist()),
            shares=tuple(shares[places].tolist()),
            effects=tuple((float(values_of) - self._quantity(values, values)[1:]).tolist()),
            values=self.columns_.shown(cells[places]),
            targets=tuple(self._target_shown(target[places])),
            row=self.columns_.shown(self._read(x).inputs[0]),
            stored=stored.values.shape[1],
            share_of="votes" if self._votes else "attention",
        )

    def _rows_named(self, context: Any, nearest: bool = False) -> np.ndarray:
        """Places in the table of `fit`, or of the context that was given, of the rows that answers look at."""
        places = self._stored_places(context, nearest)
        return self.context_rows_[places] if isinstance(context, str) else places

    def corruption_test(self, X: Any, y: Any, n_repeats: int = 1, *, random_state: Any = 0) -> Corruption:
        """What is left of the score when the stored rows are scrambled: every column, and the target, is permuted by itself, so that each keeps its law and rows
        mean nothing (Kossen et al. 2021, algorithm 1). A model that does not look at other rows loses nothing.

        The rows asked for are no part of the table, so one scrambled table serves all of them; the authors need a forward pass for each.
        """
        self._check_looks(needs_weights=False)
        check_whole(n_repeats=n_repeats)
        asked, stored = self._asked(X), self._context("train", self.context_size is not None)
        generator = np.random.default_rng(seed_of(random_state))
        clean = self._scores(self._combined(self._targets(asked, stored)), y)
        corrupted = []
        for _ in range(n_repeats):
            rows = Rows(*(part.clone() for part in stored))
            for place in range(stored.values.shape[2]):
                order = torch.from_numpy(generator.permutation(stored.values.shape[1]))
                rows.values[0, :, place] = stored.values[0, order, place]
                rows.missing[0, :, place] = stored.missing[0, order, place]
            order = torch.from_numpy(generator.permutation(stored.values.shape[1]))
            rows = rows._replace(target=stored.target[:, order])
            corrupted.append(self._scores(self._combined(self._targets(asked, rows)), y))
        # Equal scores have exactly their mean.
        means = {
            name: value + float(np.mean([part[name] - value for part in corrupted])) for name, value in clean.items()
        }
        return Corruption(clean, means, n_repeats, asked.values.shape[1], stored.values.shape[1])

    def deletion_test(
        self,
        X: Any,
        *,
        tolerance: float = 0.1,
        first: float = 0.01,
        retries: int = 50,
        least_share: float = 0.02,
        random_state: Any = 0,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> Deletion:
        """Which stored rows the predictions for the rows of X need: others are deleted, one by one at random, as long as the prediction stays
        (Kossen et al. 2021, algorithm 2); and whether those that are kept lie nearer, by a one-sided Wilcoxon test against as many random rows.

        A deletion is taken where the prediction p stays within `first` of the first one, $|p - p_0| / (|p_0| + 10^{-12})$; after `retries` refusals in a row that bound grows by a
        tenth, until it is `tolerance` or fewer than the share `least_share` of rows is left. Deletions are tried many at a time.
        """
        self._check_looks(needs_weights=False)
        if self.context_size is not None:
            raise Unsupported("each answer looks at rows of its own here; deletion_test is for context_size=None")
        check_number(0, 1, tolerance=tolerance, first=first, least_share=least_share)
        check_whole(retries=retries)
        asked, stored = self._asked(X), self._context("train")
        generator = np.random.default_rng(seed_of(random_state))
        kept = []
        for place in range(asked.values.shape[1]):
            kept.append(
                self._needed(
                    asked.take(torch.tensor([place])), stored, tolerance, first, retries, least_share, generator
                )
            )
            if progress is not None:
                progress(place + 1, asked.values.shape[1], "rows")
        distances = self._distances(asked, stored).cpu().numpy()
        return Deletion.of(kept, distances, self._rows_named("train"), generator)

    def _needed(
        self,
        asked: Rows,
        stored: Rows,
        tolerance: float,
        first: float,
        retries: int,
        least: float,
        generator: np.random.Generator,
        at_once: int = 32,
    ) -> np.ndarray:
        """Places of the rows that stay."""
        count, bound, refused = stored.values.shape[1], first, 0
        gone = np.zeros(count, dtype=bool)
        start = self._without(asked, stored, torch.zeros(1, count, dtype=torch.bool))
        before = self._quantity(start, start)[0]
        least_rows = max(1, least * count)
        # Rows are taken out together while that goes well, else each by itself; those that could go by themselves are then taken out together.
        together, could = True, None
        while bound <= tolerance and (~gone).sum() > least_rows:
            there = generator.permutation(np.flatnonzero(~gone))
            left = there[:retries]
            if together:
                left = (there if could is None else could)[: min(at_once, max(1, int(len(there) - least_rows)))]
            masks = np.tile(gone, (len(left), 1))
            for number, place in enumerate(left):
                masks[number : None if together else number + 1, place] = True
            values = self._without(asked, stored, torch.from_numpy(masks))
            changes = np.abs(self._quantity(values, start) - before) / (abs(before) + 1e-12)
            fits = changes < bound
            if together:
                accepted = len(left) if fits.all() else int(fits.argmin())
                gone[left[:accepted]] = True
                refused = 1 if accepted < len(left) else 0
                together, could = accepted == len(left) or (could is None and accepted > 1), None
            elif fits.any():
                together, could = True, left[fits]
            elif len(left) < len(there):
                refused += len(left)
            else:
                # All were refused: until the bound lets one of them pass, it would be the same again.
                refused = 0
                while bound <= min(tolerance, changes.min()):
                    bound *= 1.1
            if refused >= retries:
                bound, refused = bound * 1.1, 0
        return np.flatnonzero(~gone)

    # What the answers are made of

    def _asked(self, X: Any) -> Rows:
        check_is_fitted(self, "network_")
        return self._rows(self._read(X).inputs[0], None)

    def _rows(self, cells: np.ndarray, target: np.ndarray | None) -> Rows:
        device = device_of(self.device)
        values, missing = self._tensors(Samples((cells,)))
        filler = np.zeros(len(cells), dtype=self.context_target_.dtype)
        codes = self._codes(filler if target is None else target)[None]
        hidden = torch.full(codes.shape, target is None or self._setting("p_target") >= 1)
        dtype = dtype_of(self.predict_dtype, device)
        codes = codes.to(dtype) if codes.is_floating_point() else codes
        return Rows(*(part.to(device) for part in (values.to(dtype), missing, codes, hidden)))

    def _stored_places(self, context: Any, nearest: bool = False) -> np.ndarray:
        """Which rows of a context answers look at: all, or so many drawn by the seed of `fit`; the nearest ones are among all."""
        count = len(self.context_cells_) if isinstance(context, str) else len(context[0])
        if nearest or count <= STORED:
            return np.arange(count)
        return np.sort(np.random.default_rng(self.seed_).permutation(count)[:STORED])

    def _context(self, context: Any, nearest: bool = False) -> Rows:
        return self._rows(*self._given(context, nearest))

    def _given(self, context: Any, nearest: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Cells and targets, as they were given, of the rows that answers look at."""
        if isinstance(context, str):
            check_choice(("train", "batch"), context=context)
            cells, target = self.context_cells_, self.context_target_
        elif isinstance(context, tuple) and len(context) == 2:
            cells = self._read(context[0]).inputs[0]
            target = self._as_target(np.asarray(context[1]))
            if len(cells) != len(target):
                raise InvalidArgument(f"context has {len(cells)} rows and {len(target)} targets; give one for each")
        else:
            raise InvalidArgument(
                f"context must be 'train', 'batch' or rows with their targets (X, y); got {context!r:.80}"
            )
        places = self._stored_places(context, nearest)
        return cells[places], target[places]

    def _members(self) -> Members:
        device = device_of(self.device)
        members = placed(self.network_, device, dtype_of(self.predict_dtype, device))
        assert isinstance(members, Members)
        return members

    def _memories(self, stored: Rows, is_own: bool) -> list[tuple[TableNetwork, Any]]:
        """Each member with keys and values of the stored rows; those of `fit` are kept between calls."""
        key = (str(stored.values.device), stored.values.dtype, len(self.context_cells_))
        shelf = _MEMORIES.setdefault(self.network_, {}) if is_own else {}
        if key not in shelf:
            shelf.clear()
            with torch.no_grad():
                shelf[key] = [(member, member.remember(stored)) for member in self._members()]
        return shelf[key]

    def _answered(self, asked: Rows, context: Any = "train", context_size: int | None = None) -> list[Answers]:
        """What each member says of the rows."""
        size = self.context_size if context_size is None else context_size
        check_whole(optional=True, context_size=size)
        if isinstance(context, str) and context == "batch":
            return self._together(asked, self._context(context))
        if size is not None:
            stored = self._context(context, nearest=True)
            if size < stored.values.shape[1]:
                return self._nearby(asked, stored, size)
        stored = self._context(context)
        with torch.no_grad():
            return [
                _joined([member(part, memory=memory) for part in _split(asked)])
                for member, memory in self._memories(stored, isinstance(context, str))
            ]

    def _together(self, asked: Rows, stored: Rows) -> list[Answers]:
        """Rows that are asked are part of the table: all look at all."""
        both = Rows(*(torch.cat(parts, dim=1) for parts in zip(stored, asked, strict=True)))
        count = stored.values.shape[1]
        with torch.no_grad():
            return [Answers(*(part[:, count:] for part in member(both))) for member in self._members()]

    def _nearby(self, asked: Rows, stored: Rows, size: int) -> list[Answers]:
        """Each row with a table of its own: the stored rows nearest to it."""
        parts = _split(asked, max(1, DISTANCES // stored.values.shape[1]))
        nearest = torch.cat([self._distances(part, stored).topk(size, largest=False).indices for part in parts])
        answers = []
        with torch.no_grad():
            for member in self._members():
                parts = []
                step = max(1, 2**16 // size)
                for start in range(0, len(nearest), step):
                    at = nearest[start : start + step]
                    tables = Rows(*(part[0][at] for part in stored))
                    alone = Rows(*(part[0, start : start + step, None] for part in asked))
                    parts.append(member(alone, memory=member.remember(tables)))
                answers.append(Answers(*(torch.cat([one[n][:, 0] for one in parts])[None] for n in range(3))))
        return answers

    def _distances(self, asked: Rows, stored: Rows) -> Tensor:
        """Euclidean, of standardised numbers and levels as 0 and 1; missing cells count as zeros."""
        member = next(iter(self._members()))
        first, second = (member.embedding.dense(part.values, part.missing)[0] for part in (asked, stored))
        return torch.cdist(first, second)

    def _targets(self, asked: Rows, stored: Rows) -> list[Tensor]:
        """What each member says of the rows, looking at these, or at the nearest of them: `(rows, outputs)`."""
        if self.context_size is not None and self.context_size < stored.values.shape[1]:
            return [part.target[0] for part in self._nearby(asked, stored, self.context_size)]
        with torch.no_grad():
            return [
                torch.cat([member(part, memory=memory).target[0] for part in _split(asked)])
                for member, memory in self._memories(stored, False)
            ]

    def _without(self, asked: Rows, stored: Rows, hidden: Tensor) -> list[Tensor]:
        """What each member says of one row where some stored rows are taken out, one table for each row of `hidden`: `(tables, outputs)`."""
        answers = []
        with torch.no_grad():
            for member in self._members():
                parts = []
                for mask in hidden.to(stored.values.device).split(32):
                    tables = Rows(*(part.expand(len(mask), *part.shape[1:]) for part in stored))
                    alone = Rows(*(part.expand(len(mask), *part.shape[1:]) for part in asked))
                    parts.append(member(alone, memory=member.remember(tables, mask)).target[:, 0])
                answers.append(torch.cat(parts))
        return answers

    def _features(self, cells: np.ndarray) -> np.ndarray:
        """Every cell as the model would fill it, as raw cells."""
        parts = self._answered(self._rows(cells, None))
        member = next(iter(self._members()))
        filled = np.empty(cells.shape)
        at = 0
        for place, size in zip(member.order, member.sizes, strict=True):
            answers = [part.features[0, :, at : at + size].double().cpu() for part in parts]
            if member.levels[place]:
                filled[:, place] = torch.stack([part.softmax(-1) for part in answers]).mean(0).argmax(-1)
            else:
                filled[:, place] = torch.stack(answers).mean(0)[:, 0]
            at += size
        return self.columns_.raw(filled)

    def _check_looks(self, needs_weights: bool = True, context: Any = "train") -> None:
        check_is_fitted(self, "network_")
        if self.mode == "transductive" or (isinstance(context, str) and context == "batch"):
            raise Unsupported(
                "rows that are asked for together are part of the table of mode='transductive' and context='batch'; what an answer relied on is "
                "known for mode='inductive' with stored rows alone"
            )
        if not self.between_rows and needs_weights:
            raise Unsupported("this model was fitted with between_rows=False: its rows look at no others")
        if self.inducing is not None and needs_weights:
            raise Unsupported("rows look at inducing rows here, not at one another; fit with inducing=None")

    def _combined(self, answers: Sequence[Tensor]) -> np.ndarray:
        """One answer of all members: `(rows, outputs)`."""
        raise NotImplementedError

    def _quantity(self, answers: Sequence[Tensor], start: Sequence[Tensor]) -> np.ndarray:
        """The number that tests of rows compare: of classes the probability of what `start` predicts first."""
        raise NotImplementedError

    def _named(self, combined: np.ndarray) -> list[Any]:
        raise NotImplementedError

    def _target_shown(self, target: np.ndarray) -> list[Any]:
        raise NotImplementedError

    def _as_target(self, y: np.ndarray) -> np.ndarray:
        """Targets of a context as `fit` kept its own."""
        raise NotImplementedError

    def _scores(self, combined: np.ndarray, y: Any) -> dict[str, float]:
        raise NotImplementedError


def _split(rows: Rows, most: int = ASKED) -> list[Rows]:
    return [Rows(*parts) for parts in zip(*(part.split(min(most, ASKED), dim=1) for part in rows), strict=True)]


def _joined(parts: Sequence[Answers]) -> Answers:
    return Answers(*(torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True)))
