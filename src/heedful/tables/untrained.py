"""Predictions for the rows of a table by a network that was trained on synthetic tables once and for all: nothing is fitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.bridges.predictors import Classifier, Regressor
from heedful.bridges.samples import Samples
from heedful.tables._answering import InContext, Kept, pretrained
from heedful.tables._columns import without_target
from heedful.tables._targets import as_codes, as_numbers

_ARGS = """
    Args:
        target: column of a frame that is to be predicted, where y is not given; `predict` leaves it out.
        categorical: columns that are categories though they hold numbers: names or places with commas between them; `"auto"` takes text and pandas' categories. In Python also a list.
        variants: in how many ways the table is said; answers are averaged.
        context_size: rows that a variant sees, at most; where there are more, each has drawn ones of its own.
        precision: what is computed in: `"bfloat16"`, `"float32"`, `"float64"`, or `"auto"`: bfloat16 where the device has instructions for it, else float32. May be set after `fit`.
        random_state: decides how the table is said, and which rows and columns are drawn.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
"""

_HOW = """
    X is an array or a data frame with a row for each case: numbers, categories (text, or pandas' own), dates, and missing cells (NaN, None) anywhere; a level never seen in
    `fit` counts as missing, with a warning. `fit` keeps the rows. An answer is one forward pass of a network whose weights lie in this package (Müller et al. 2022; Hollmann et al. 2023, "TabPFN"; ours
    is `InContextNetwork`, trained by the recipe `tables-prior` on synthetic tables alone): rows of `fit` and their targets are its context, and each asked row attends
    to them, never to other asked rows. The table is said in several ways, columns under other identities and levels and classes under other names, and answers are averaged.

    It was trained on tables of 30 to 600 rows and 1 to 50 columns. Of more rows each variant sees drawn ones of its own, and of more columns too; both are told by a
    warning. Where there are thousands of rows, boosted trees are better (`docs/untrained.md`).
"""


class InContextClassifier(InContext, Classifier):
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

    def _outputs_of(self, values: Tensor, contexts: Iterable[Kept]) -> np.ndarray:
        total = sum(answers.exp().sum(0) for _, answers in self._answers(values, contexts))
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
        best = self.predict_proba(X, context=context).argmax(1)
        return self.classes_[best]

    def evaluate(self, X: Any, y: Any = None, *, context: Any = None) -> dict[str, float]:
        """Accuracy and the mean of -log p on labelled rows; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return self._judged(self.predict_proba(X, context=context), self._as_target(np.asarray(y)))

    def _judged(self, outputs: np.ndarray, target: np.ndarray) -> dict[str, float]:
        losses = -np.log(np.clip(outputs[np.arange(len(target)), target], 1e-15, None))
        return {"accuracy": float((outputs.argmax(1) == target).mean()), "log_loss": float(losses.mean())}


class InContextRegressor(InContext, Regressor):
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
        return torch.from_numpy((target - self.target_mean_) / self.target_scale_).to(self._dtype)

    def _as_target(self, y: np.ndarray) -> np.ndarray:
        return as_numbers(y)

    def _outputs_of(self, values: Tensor, contexts: Iterable[Kept]) -> np.ndarray:
        means = [
            self.network_.means(answers, kept.context.target.double().cpu())
            for kept, answers in self._answers(values, contexts)
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
        laws: list[tuple[np.ndarray, np.ndarray]] = []
        for kept, answers in self._answers(self._asked(X), self._kept(context)):
            steps = self.network_.steps(kept.context.target.double().cpu())
            laws += zip(steps.numpy(), answers.exp().numpy(), strict=True)
        found = _quantiles([steps for steps, _ in laws], np.stack([chances for _, chances in laws]), wanted)
        return found * self.target_scale_ + self.target_mean_

    def evaluate(self, X: Any, y: Any = None, *, context: Any = None) -> dict[str, float]:
        """The root of the mean squared error on rows with targets; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return self._judged(self.predict(X, context=context)[:, None], self._as_target(np.asarray(y)))

    def _judged(self, outputs: np.ndarray, target: np.ndarray) -> dict[str, float]:
        rmse = float(np.sqrt(np.mean((outputs[:, 0] - target) ** 2)))
        return {"rmse": rmse, "r2": float(1 - rmse**2 / max(target.var(), 1e-300))}


def _quantiles(steps: Sequence[np.ndarray], chances: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Quantiles `(rows, levels)` of the mean of laws: `chances (laws, rows, n)` of steps `(n,)`, each spread evenly from half a step below it to half a step above.

    >>> _quantiles([np.arange(4.0)], np.array([[[0.0, 0.0, 1.0, 0.0]]]), np.array([0.1, 0.5, 0.9]))
    array([[1.6, 2. , 2.4]])
    """
    half = [(law[1] - law[0]) / 2 for law in steps]
    bounds = [np.append(law - gap, law[-1] + gap) for law, gap in zip(steps, half, strict=True)]
    places = np.unique(np.concatenate(bounds))
    below = np.zeros((*chances.shape[:2], chances.shape[2] + 1))
    np.cumsum(chances, axis=-1, out=below[..., 1:])
    below /= below[..., -1:]
    found = []
    for row in range(chances.shape[1]):
        shares = sum(np.interp(places, own, law) for own, law in zip(bounds, below[:, row], strict=True)) / len(bounds)
        found.append(np.interp(levels, shares, places))
    return np.stack(found)
