"""Predictions for the rows of a table by a network that was trained on synthetic tables once and for all: nothing is fitted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
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
from heedful._text import quantity
from heedful.bridges.estimator import Estimator, device_of, placed, seed_of
from heedful.bridges.predictors import Classifier, Regressor
from heedful.bridges.samples import Samples, check_is_fitted
from heedful.tables._columns import Columns, read_columns, without_target
from heedful.tables._targets import as_codes, as_numbers
from heedful.tables._variants import Variants
from heedful.tables.in_context import Context, InContextNetwork
from heedful.tables.results import RowExplanation

COLUMNS = 50
"""Columns that a variant sees, at most: as many as the synthetic tables had."""

KEPT = 2**30
"""Bytes that a context's keys and values may take to be kept between calls."""

_ARGS = """
    Args:
        target: column of a frame that is to be predicted, where y is not given; `predict` leaves it out.
        categorical: columns that are categories though they hold numbers: names or places with commas between them; `"auto"` takes text and pandas' categories. In Python also a list.
        variants: in how many ways the table is said; answers are averaged.
        context_size: rows that a variant sees, at most; where there are more, each has drawn ones of its own.
        precision: what is computed in: `"float32"`, `"bfloat16"`, or `"auto"`: bfloat16 where the device has instructions for it, else float32.
        random_state: decides how the table is said, and which rows and columns are drawn.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
"""

_HOW = """
    X is an array or a data frame with a row for each case: numbers, categories (text, or pandas' own), dates, and missing cells (NaN, None) anywhere; a level never seen in
    `fit` counts as missing, with a warning. `fit` keeps the rows. An answer is one forward pass of a network whose weights lie in this package (Müller et al. 2022; Hollmann et al. 2023, "TabPFN"; ours
    is `InContextNetwork`, trained by the recipe `tables-prior` on synthetic tables alone): rows of `fit` and their targets are its context, and each asked row attends
    to them, never to other asked rows. The table is said in several ways, columns under other identities and levels and classes under other names, and answers are averaged.

    It was trained on tables of 30 to 600 rows and 1 to 50 columns. Of more rows each variant sees drawn ones of its own, and of more columns too; both are told by a
    warning. Where there are thousands of rows, boosted trees are better (`docs/tables-without-training.md`).
"""


class _Kept(NamedTuple):
    """Some variants with what they know of their rows, at the places `rows (M, n)` of the table."""

    variants: Variants
    context: Context
    rows: Tensor


# By estimator, which must look the same before and after an answer.
_CONTEXTS: WeakKeyDictionary[Any, tuple[Any, list[_Kept]]] = WeakKeyDictionary()


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


class _InContext(Estimator):
    """What both estimators share."""

    _kind_of_target: ClassVar[str]
    _arrays: ClassVar[tuple[str, ...]] = ("context_cells_", "context_target_")
    network_: InContextNetwork
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
        check_choice(("auto", "float32", "bfloat16"), precision=self.precision)
        device_of(self.device)

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
        X, y = without_target(X, y, self.target, fitting=fitting)
        cells, y = read_columns(self, X, y, fitting=fitting, categorical=self.categorical)
        if fitting and len(cells) < 2:
            raise InvalidArgument("X has one sample; a table to look at needs two rows or more")
        if fitting and np.isnan(cells).all(0).any():
            name = self.columns_.names[int(np.isnan(cells).all(0).argmax())]
            raise InvalidArgument(f"column {name!r} of X holds no value at all; leave it out")
        return Samples((cells,), y)

    # What answers are made of

    def _asked(self, X: Any) -> Tensor:
        check_is_fitted(self, "network_")
        return self._values(self._read(X).inputs[0])

    def _values(self, cells: np.ndarray) -> Tensor:
        scaled = torch.from_numpy(self.columns_.standardised(cells))
        return scaled.to(device_of(self.device), torch.float32)

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
        if context is None or (isinstance(context, str) and context == "train"):
            return self.context_cells_, self.context_target_
        if not isinstance(context, tuple) or len(context) != 2:
            raise InvalidArgument(f"context must be 'train' or rows with their targets (X, y); got {context!r:.80}")
        cells, target = self._read(context[0]).inputs[0], self._as_target(np.asarray(context[1]))
        if len(cells) != len(target) or not len(cells):
            raise InvalidArgument(
                f"context has {len(cells)} rows and {len(target)} targets; give one for each, and a row at least"
            )
        return cells, target

    def _kept(self, context: Any) -> Iterator[_Kept]:
        """Variants with what they know of the context; of the rows of `fit` this is kept between calls where it is not too large."""
        own = context is None or isinstance(context, str)
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

    def _remembered(self, values: Tensor, target: Tensor) -> Iterator[_Kept]:
        network = self._network_here(values.device)
        levels = [0 if part is None else len(part) for part in self.columns_.levels]
        said = Variants.draw(self.variants, levels, self._count, network.identity, self.seed_, COLUMNS)
        said = said.to(values.device, values.dtype)
        rows = self._rows(len(values), target.cpu().numpy()).to(values.device)
        # On a CPU one variant at a time: what it needs then fits into the caches.
        at_once = 1 if values.device.type == "cpu" else self.variants
        for part, places in zip(said.split(at_once), rows.split(at_once), strict=True):
            with torch.no_grad(), self._autocast(values.device):
                yield _Kept(part, part.remember(network, values[places], target[places]), places)

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
        network = placed(self.network_, device)
        assert isinstance(network, InContextNetwork)
        return network

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        fast = self.precision == "bfloat16" or (self.precision == "auto" and _has_bfloat16(device))
        return torch.autocast(device.type, torch.bfloat16) if fast else nullcontext()

    def _answers(self, values: Tensor, kept: _Kept) -> Tensor:
        """Log-probabilities of classes or steps by some variants, `(M, asked, outputs)`, in float64 on the CPU."""
        network = self._network_here(values.device)
        with torch.no_grad(), self._autocast(values.device):
            return kept.variants.answer(network, values, kept.context).double().cpu()

    def _outputs_of(self, values: Tensor, contexts: Iterator[_Kept]) -> np.ndarray:
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

    def _network(self) -> InContextNetwork:
        """A new one like that of the package, for weights that were saved."""
        return InContextNetwork(**pretrained(self._kind_of_target).arguments())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags


def _has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16 faster than in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class InContextClassifier(_InContext, Classifier):
    __doc__ = f"""Classifies rows of a table without training, by a network that has learned from synthetic tables.
{_HOW}{_ARGS}
    Fitted: `classes_` (ten at most), `columns_`, `context_cells_` and `context_target_` (the rows of `fit`), `network_`, `n_features_in_`, `seed_`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = InContextClassifier().fit(X[::2], y[::2])
    >>> model.score(X[1::2], y[1::2]) > 0.9
    True
    """

    _kind_of_target = "classes"
    _fitted: ClassVar[tuple[str, ...]] = ("classes_", "n_features_in_", "columns_", "seed_")

    def _labelled(self, samples: Samples) -> Samples:
        samples = super()._labelled(samples)
        most = pretrained("classes").classes
        if len(self.classes_) > most:
            raise InvalidArgument(
                f"y has {len(self.classes_)} classes, and this network answers {most} at most; DatapointClassifier, which is trained on the table, takes any number"
            )
        return samples

    @property
    def _count(self) -> int:
        return len(self.classes_)

    def _codes(self, target: np.ndarray) -> Tensor:
        return torch.from_numpy(target.astype(np.int64))

    def _as_target(self, y: np.ndarray) -> np.ndarray:
        return as_codes(y, self.classes_)

    def _outputs_of(self, values: Tensor, contexts: Iterator[_Kept]) -> np.ndarray:
        total = sum(self._answers(values, kept).exp().sum(0) for kept in contexts)
        assert isinstance(total, Tensor)
        return (total / total.sum(-1, keepdim=True)).numpy()

    def _quantity(self, outputs: np.ndarray, first: np.ndarray) -> float:
        return float(outputs[0, first[0].argmax()])

    def _named(self, outputs: np.ndarray) -> list[Any]:
        return self.classes_[outputs.argmax(-1)].tolist()

    def _target_shown(self, target: np.ndarray) -> list[Any]:
        return self.classes_[target].tolist()

    def predict_proba(self, X: Any, *, context: Any = None) -> np.ndarray:
        """Probabilities `(rows, classes)`, in the order of `classes_`. `context` are rows with their targets `(X, y)` to look at instead of those of `fit`."""
        return self._outputs_of(self._asked(X), self._kept(context))

    def decision_function(self, X: Any, *, context: Any = None) -> np.ndarray:
        """Logarithms of probabilities `(rows, classes)`; of two classes the second's minus the first's, `(rows,)`."""
        logs = np.log(np.clip(self.predict_proba(X, context=context), np.finfo(np.float64).tiny, None))
        return logs[:, 1] - logs[:, 0] if logs.shape[1] == 2 else logs

    def predict(self, X: Any, *, context: Any = None) -> np.ndarray:
        """The class of largest probability for each row; for `context` see `predict_proba`."""
        return self.classes_[self.predict_proba(X, context=context).argmax(1)]

    def evaluate(self, X: Any, y: Any = None, *, context: Any = None) -> dict[str, float]:
        """Accuracy and the mean of -log p on labelled rows; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return self._judged(self.predict_proba(X, context=context), self._as_target(np.asarray(y)))

    def _judged(self, outputs: np.ndarray, target: np.ndarray) -> dict[str, float]:
        losses = -np.log(np.clip(outputs[np.arange(len(target)), target], 1e-15, None))
        return {"accuracy": float((outputs.argmax(1) == target).mean()), "log_loss": float(losses.mean())}


class InContextRegressor(_InContext, Regressor):
    __doc__ = f"""Predicts a number for each row of a table without training, by a network that has learned from synthetic tables.
{_HOW}{_ARGS}
    An answer is a law on steps between -5 and 5 deviations of the context's targets: `predict` is its mean, `predict_quantiles` its quantiles. It does not go beyond these.

    Fitted: `columns_`, `context_cells_` and `context_target_` (the rows of `fit`), `network_`, `n_features_in_`, `seed_`.

    >>> X = np.random.default_rng(0).normal(size=(120, 3))
    >>> y = X[:, 0] - 2 * X[:, 1]
    >>> model = InContextRegressor().fit(X[:80], y[:80])
    >>> model.score(X[80:], y[80:]) > 0.9
    True
    """

    _kind_of_target = "numbers"
    _fitted: ClassVar[tuple[str, ...]] = ("n_features_in_", "columns_", "target_mean_", "target_scale_", "seed_")

    def _labelled(self, samples: Samples) -> Samples:
        samples = super()._labelled(samples)
        self._scale(samples)
        return samples

    @property
    def _count(self) -> int:
        return 0

    def _codes(self, target: np.ndarray) -> Tensor:
        return torch.from_numpy((target - self.target_mean_) / self.target_scale_).float()

    def _as_target(self, y: np.ndarray) -> np.ndarray:
        return as_numbers(y)

    def _outputs_of(self, values: Tensor, contexts: Iterator[_Kept]) -> np.ndarray:
        means = [
            self.network_.means(self._answers(values, kept), kept.context.target.double().cpu()) for kept in contexts
        ]
        return (torch.cat(means).mean(0).numpy() * self.target_scale_ + self.target_mean_)[:, None]

    def _quantity(self, outputs: np.ndarray, first: np.ndarray) -> float:
        return float(outputs[0, 0])

    def _named(self, outputs: np.ndarray) -> list[Any]:
        return outputs[:, 0].tolist()

    def _target_shown(self, target: np.ndarray) -> list[Any]:
        return target.tolist()

    def predict(self, X: Any, *, context: Any = None) -> np.ndarray:
        """A number for each row. `context` are rows with their targets `(X, y)` to look at instead of those of `fit`."""
        return self._outputs_of(self._asked(X), self._kept(context))[:, 0]

    def predict_quantiles(
        self, X: Any, levels: Sequence[float] = (0.1, 0.5, 0.9), *, context: Any = None
    ) -> np.ndarray:
        """Quantiles `(rows, levels)` of the law that the variants' answers make together."""
        wanted = np.asarray(levels, dtype=np.float64)
        if wanted.ndim != 1 or not len(wanted) or not ((wanted > 0) & (wanted < 1)).all():
            raise InvalidArgument(f"levels must be numbers between 0 and 1; got {levels!r:.80}")
        values, places, chances = self._asked(X), [], []
        for kept in self._kept(context):
            answers = self._answers(values, kept).exp()
            places.append(self.network_.steps(kept.context.target.double().cpu())[:, None].expand_as(answers))
            chances.append(answers)
        at, order = torch.cat(places).transpose(0, 1).flatten(1).sort(-1)
        shares = torch.cat(chances).transpose(0, 1).flatten(1).gather(1, order).cumsum(-1)
        shares = shares / shares[:, -1:]
        found = [np.interp(wanted, share, place) for share, place in zip(shares.numpy(), at.numpy(), strict=True)]
        return np.stack(found) * self.target_scale_ + self.target_mean_

    def evaluate(self, X: Any, y: Any = None, *, context: Any = None) -> dict[str, float]:
        """The root of the mean squared error on rows with targets; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return self._judged(self.predict(X, context=context)[:, None], self._as_target(np.asarray(y)))

    def _judged(self, outputs: np.ndarray, target: np.ndarray) -> dict[str, float]:
        rmse = float(np.sqrt(np.mean((outputs[:, 0] - target) ** 2)))
        return {"rmse": rmse, "r2": float(1 - rmse**2 / max(target.var(), 1e-300))}
