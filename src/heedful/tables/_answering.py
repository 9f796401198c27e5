"""What estimators that need no training share: the rows they keep, the ways in which a table is said, and what is asked of a network of this package."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import resources
from typing import Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._runtime import beside_one_another
from heedful._savable import encode
from heedful._text import quantity
from heedful.bridges.estimator import Estimator, device_of, placed, seed_of
from heedful.bridges.samples import Samples, check_is_fitted
from heedful.tables._columns import Columns, read_rows, without_target
from heedful.tables._variants import Variants
from heedful.tables.in_context import Context, InContextNetwork
from heedful.tables.results import RowExplanation

COLUMNS = 50
"""Columns that a variant sees, at most: as many as the synthetic tables had."""

KEPT = 2**30
"""Bytes that a context's keys and values may take to be kept between calls."""


class Kept(NamedTuple):
    """Some variants with what they know of their rows, at the places `rows (M, n)` of the table."""

    variants: Variants
    context: Context
    rows: Tensor


# By estimator, which must look the same before and after an answer.
_CONTEXTS: WeakKeyDictionary[Any, tuple[Any, list[Kept]]] = WeakKeyDictionary()


@cache
def pretrained(kind: str) -> InContextNetwork:
    """The network of this package for `"classes"` or `"numbers"`. Files that were damaged or exchanged are refused: their checksum does not fit.

    >>> pretrained("classes").classes
    10
    """
    check_choice(("classes", "numbers"), kind=kind)
    with resources.as_file(resources.files("heedful.tables") / "weights" / kind) as folder:
        network = InContextNetwork.from_pretrained(folder)
    return network.float().requires_grad_(False)


class InContext(Estimator):
    """What both estimators share."""

    _kind_of_target: ClassVar[str]
    _arrays: ClassVar[tuple[str, ...]] = ("context_cells_", "context_target_")
    _optional: ClassVar[tuple[str, ...]] = ("feature_names_in_", "network_arguments_")
    network_: InContextNetwork
    network_arguments_: dict[str, Any]
    columns_: Columns
    context_cells_: np.ndarray
    context_target_: np.ndarray
    seed_: int

    def __init__(
        self,
        *,
        target: str | None = None,
        categorical: str | Sequence[Any] = "auto",
        variants: int = 8,
        context_size: int = 1000,
        precision: str = "auto",
        random_state: int | np.random.RandomState | None = 0,
        device: str = "auto",
    ) -> None:
        self.target = target
        self.categorical = categorical
        self.variants = variants
        self.context_size = context_size
        self.precision = precision
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any = None) -> Self:  # type: ignore[override]
        """Keeps the rows of X and their targets; y may be a column of the frame X: `target` names it."""
        self._check()
        samples = self._labelled(self._read(X, y, fitting=True))
        assert samples.target is not None
        self.seed_ = seed_of(self.random_state)
        self.context_cells_, self.context_target_ = samples.inputs[0], samples.target
        self.network_ = pretrained(self._kind_of_target)
        _CONTEXTS.pop(self, None)
        self._tell()
        return self

    def _check(self) -> None:
        check_whole(variants=self.variants)
        check_whole(2, context_size=self.context_size)
        check_choice(("auto", "bfloat16", "float32", "float64"), precision=self.precision)
        device_of(self.device)
        if self.random_state is not None and not isinstance(self.random_state, np.random.RandomState):
            seed_of(self.random_state)

    def _tell(self) -> None:
        """Warns where a table is larger than what the network was trained on."""
        rows, columns = self.context_cells_.shape
        said = quantity(self.variants, "variant")
        if rows > self.context_size:
            warnings.warn(
                f"{rows} rows are more than context_size={self.context_size}: each of {said} looks at so many drawn ones; boosted trees may do better on a table of this size",
                stacklevel=3,
            )
        if columns > COLUMNS:
            warnings.warn(
                f"{columns} columns are more than the {COLUMNS} that the network has seen: each of {said} looks at so many drawn ones",
                stacklevel=3,
            )

    def _read(self, X: Any, y: Any = None, *_: Any, fitting: bool = False) -> Samples:
        cells, y = read_rows(self, X, y, fitting=fitting)
        return Samples((cells,), y)

    # What answers are made of

    def _asked(self, X: Any) -> Tensor:
        check_is_fitted(self, "network_")
        return self._values(self._read(X).inputs[0])

    def _values(self, cells: np.ndarray) -> Tensor:
        """Cells as the network takes them, which standardises them by itself: numbers are only brought into the range of its dtype."""
        scaled = torch.from_numpy(self.columns_.centred(cells, self.context_cells_))
        return scaled.to(device_of(self.device), self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """Of weights and cells; what is multiplied may be in bfloat16."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def _codes(self, target: np.ndarray) -> Tensor:
        """Targets as the network takes them."""
        raise NotImplementedError

    def _as_target(self, y: np.ndarray) -> np.ndarray:
        """Targets of a context as `fit` kept its own."""
        raise NotImplementedError

    @property
    def _count(self) -> int:
        """Classes, none of numbers."""
        raise NotImplementedError

    def _given(self, context: Any) -> tuple[np.ndarray, np.ndarray]:
        """Cells and targets of the rows that answers look at."""
        check_is_fitted(self, "network_")
        if _is_own(context):
            return self.context_cells_, self.context_target_
        if not isinstance(context, tuple) or len(context) != 2:
            raise InvalidArgument(f"context must be 'train' or rows with their targets (X, y); got {context!r:.80}")
        cells, target = self._read(context[0]).inputs[0], self._as_target(np.asarray(context[1]))
        if len(cells) != len(target) or not len(cells):
            raise InvalidArgument(
                f"context has {len(cells)} rows and {len(target)} targets; give one for each, and a row at least"
            )
        return cells, target

    def _kept(self, context: Any) -> Iterator[Kept]:
        """Variants with what they know of the context; of the rows of `fit` this is kept between calls where it is not too large."""
        own = _is_own(context)
        device = device_of(self.device)
        key = (str(device), self.precision, self.variants, self.context_size, self.seed_)
        if own and self in _CONTEXTS and _CONTEXTS[self][0] == key:
            yield from _CONTEXTS[self][1]
            return
        cells, target = self._given(context)
        found, size = [], 0
        for kept in self._remembered(self._values(cells), self._codes(target).to(device)):
            size += sum(part.nbytes for part in kept.context.layers)
            if own and size <= KEPT:
                found.append(kept)
            yield kept
        if own and size <= KEPT:
            _CONTEXTS[self] = key, found

    def _remembered(self, values: Tensor, target: Tensor) -> Iterator[Kept]:
        network = self._network_here(values.device)
        levels = [0 if part is None else len(part) for part in self.columns_.levels]
        said = Variants.draw(self.variants, levels, self._count, network.identity, self.seed_, COLUMNS)
        said = said.to(values.device, values.dtype)
        rows = self._rows(len(values), target.cpu().numpy()).to(values.device)
        # On a CPU each variant by itself: what it needs then fits into the caches.
        at_once = 1 if values.device.type == "cpu" else self.variants

        def kept(one: tuple[Variants, Tensor]) -> Kept:
            part, places = one
            with torch.no_grad(), self._autocast(values.device):
                return Kept(part, part.remember(network, values[places], target[places]), places)

        parts = zip(said.split(at_once), rows.split(at_once), strict=True)
        return beside_one_another(kept, parts, values.device)

    def _rows(self, count: int, target: np.ndarray) -> Tensor:
        """Places of the rows that each variant sees, `(M, n)`: all, or drawn ones, of each class one at least."""
        if count <= self.context_size:
            return torch.arange(count).expand(self.variants, -1)
        generator = np.random.default_rng(self.seed_)
        drawn = []
        for _ in range(self.variants):
            order = generator.permutation(count)
            if self._count and self._count < self.context_size:
                first = np.unique(target[order], return_index=True)[1]
                order = np.concatenate((order[first], np.delete(order, first)))
            drawn.append(np.sort(order[: self.context_size]))
        return torch.from_numpy(np.stack(drawn))

    def _network_here(self, device: torch.device) -> InContextNetwork:
        network = placed(self.network_, device, self._dtype)
        assert isinstance(network, InContextNetwork)
        return network

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        fast = self.precision == "bfloat16" or (self.precision == "auto" and _has_bfloat16(device))
        return torch.autocast(device.type, torch.bfloat16) if fast else nullcontext()

    def _answers(self, values: Tensor, contexts: Iterable[Kept]) -> Iterator[tuple[Kept, Tensor]]:
        """Variants, each with its log-probabilities of classes or steps, `(M, asked, outputs)`, in float64 on the CPU."""
        network = self._network_here(values.device)

        def answers(kept: Kept) -> tuple[Kept, Tensor]:
            with torch.no_grad(), self._autocast(values.device):
                return kept, kept.variants.answer(network, values, kept.context).double().cpu()

        return beside_one_another(answers, contexts, values.device)

    def _outputs_of(self, values: Tensor, contexts: Iterable[Kept]) -> np.ndarray:
        """The mean answer of all variants, `(asked, outputs)`."""
        raise NotImplementedError

    def row_attention(self, X: Any, *, context: Any = None) -> np.ndarray:
        """How much of the votes each row of X takes of each row of the context, `(rows, context's rows)`, the mean over heads and variants; rows sum to 1.

        Attention says where a network looks, not what its answer would be without it: `explain_row` measures that.
        """
        values, count = self._asked(X), len(self._given(context)[0])
        total = torch.zeros(len(values), count, dtype=torch.float64)
        network = self._network_here(values.device)
        for kept in self._kept(context):
            with torch.no_grad(), self._autocast(values.device):
                shares = kept.variants.attention(network, values, kept.context).double().cpu()
            for part, places in zip(shares, kept.rows.cpu(), strict=True):
                total[:, places] += part / part.sum(-1, keepdim=True)
        return (total / self.variants).numpy()

    def explain_row(self, x: Any, top: int = 10, *, context: Any = None) -> RowExplanation:
        """The rows that vouch for the prediction of one row: the `top` ones with the largest shares of the votes, each with its values and its effect, the change of the prediction
        when this row is taken out of the table.

        The prediction is the probability of the predicted class, or the number. Each effect is an answer of its own with another context, so this takes `top` times as long as a first prediction.
        """
        check_whole(top=top)
        values = self._asked(x)
        if len(values) != 1:
            raise InvalidArgument(f"explain_row takes one row, as X[3:4]; got {len(values)} rows")
        cells, target = self._given(context)
        shares = self.row_attention(x, context=context)[0]
        places = np.argsort(-shares, kind="stable")[: min(top, len(cells) - 1)]
        first = self._outputs_of(values, self._kept(context))
        all_values, codes = self._values(cells), self._codes(target).to(values.device)
        without = []
        for place in places:
            left = torch.from_numpy(np.delete(np.arange(len(cells)), place)).to(values.device)
            without.append(self._outputs_of(values, self._remembered(all_values[left], codes[left])))
        prediction = self._quantity(first, first)
        return RowExplanation(
            answer=self._named(first)[0],
            prediction=prediction,
            rows=tuple(places.tolist()),
            shares=tuple(shares[places].tolist()),
            effects=tuple(prediction - self._quantity(one, first) for one in without),
            values=self.columns_.shown(cells[places]),
            targets=tuple(self._target_shown(target[places])),
            row=self.columns_.shown(self._read(x).inputs[0]),
            stored=len(cells),
            share_of="votes",
        )

    def _quantity(self, outputs: np.ndarray, first: np.ndarray) -> float:
        """The number that effects compare: of classes the probability of what was predicted first."""
        raise NotImplementedError

    def _named(self, outputs: np.ndarray) -> list[Any]:
        raise NotImplementedError

    def _target_shown(self, target: np.ndarray) -> list[Any]:
        raise NotImplementedError

    def held_out(self, share: float = 0.2) -> dict[str, float]:
        """What `evaluate` says of a drawn share of the rows of `fit`, which are asked while answers look at the others."""
        check_number(0, 1, share=share)
        check_is_fitted(self, "network_")
        count = len(self.context_cells_)
        order = np.random.default_rng(self.seed_).permutation(count)
        asked, seen = np.split(order, [min(count - 1, max(1, round(share * count)))])
        contexts = self._remembered(
            self._values(self.context_cells_[seen]), self._codes(self.context_target_[seen]).to(device_of(self.device))
        )
        outputs = self._outputs_of(self._values(self.context_cells_[asked]), contexts)
        return self._judged(outputs, self.context_target_[asked])

    def _judged(self, outputs: np.ndarray, target: np.ndarray) -> dict[str, float]:
        raise NotImplementedError

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy, or of numbers the coefficient of determination; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return super().score(X, y, sample_weight)

    def _described(self) -> dict[str, Any]:
        # Networks of the package change; a saved one stays what it was.
        description = super()._described()
        description["fitted"]["network_arguments_"] = encode(self.network_.arguments())
        return description

    def _network(self) -> InContextNetwork:
        """A new one like that which was saved; in folders that do not say which, no columns share a vector."""
        first = pretrained(self._kind_of_target).arguments() | {"paired": None}
        return InContextNetwork(**getattr(self, "network_arguments_", first))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags


def _is_own(context: Any) -> bool:
    """Whether answers look at the rows of `fit`."""
    return context is None or (isinstance(context, str) and context == "train")


def _has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
