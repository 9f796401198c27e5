"""Predictions for the rows of a table that look at other rows, as scikit-learn estimators."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from heedful.bridges.predictors import Classifier, Regressor
from heedful.bridges.samples import Samples
from heedful.tables._calibration import temperature
from heedful.tables._columns import without_target
from heedful.tables._looking import Looking
from heedful.tables._presets import NUMBERS
from heedful.tables._targets import as_codes, as_numbers

ARGS = """
    Args:
        preset: settings under one name: `"fast"` (small row vectors, votes of stored rows, several members: seconds on a CPU), `"small"` (cells and a few row tokens), `"base"` (the published network) or
            `"authors"` (as their code runs). What is none below is as the preset says.
        target: column of a frame that is to be predicted, where y is not given; `predict` leaves it out.
        categorical: columns that are categories though they hold numbers: names or places with commas between them; `"auto"` takes text and pandas' categories. In Python also a list.
        layers: layers of attention between rows, each followed by one between columns where the preset has it.
        embed_dim: width of a cell.
        num_heads: heads; they must divide the width of a row.
        row_encoder: what of a row meets other rows: `"flatten"` (all its cells, as published) or `"latent"` (row tokens).
        row_tokens: vectors that stand for a row, with `"latent"`.
        dropout: share of activations that training drops.
        between_rows: whether rows look at one another; without it, the control of every claim about rows.
        inducing: so many learned rows stand between the rows, for tables of a hundred thousand rows.
        norm_kv: whether keys and values are normalised.
        scale: what scores are divided by: the root of the width of a `"head"`, or of the whole `"width"`.
        p_feature: share of the cells that training hides and asks for; needed to `impute`.
        p_target: share of the targets that training hides and asks for; the rest is seen by the others. With 1 no target is ever seen, so that rows share features alone.
        tradeoff: weight of the loss of features at the beginning; the rest is the target's.
        tradeoff_schedule: how it falls to 0: `"cosine"`, `"linear"`, or `"constant"` (it does not).
        members: networks whose answers are averaged; each leaves out its own part of the rows, on which it is measured.
        mode: `"inductive"` (an answer looks at stored rows alone, so that it does not depend on what else is asked), or `"transductive"` (as published: rows that are asked are part of the table).
        context_size: how many stored rows an answer looks at, the nearest of all; none is all, at most 10,000 drawn ones.
        optimizer: a class of `torch.optim` by its name, `"Lamb"` or `"LookaheadLamb"`.
        lr: learning rate at its highest.
        schedule: how the learning rate falls: `"cosine"`, `"flat-cosine"` or `"flat"`.
        flat: share of the steps before it falls, with `"flat-cosine"`.
        weight_decay: weight decay of the optimizer.
        clip: gradients are clipped to this norm.
        clip_value: gradients are clamped to this value, each by itself.
        epochs: epochs at most; one is ten steps, or as many as all rows take.
        batch_size: rows of a step; `"auto"` is all, at most 1,024.
        precision: what is trained in, `"float32"` or `"bfloat16"` (where that is safe); `"auto"` is bfloat16 on a GPU.
        validation_fraction: share of the rows to hold out where there is one member; with 0 or none all members learn from all rows, for all epochs. The weights of the epoch with
            the least held-out loss are kept.
        patience: stop after this many epochs without a better held-out loss.
        random_state: decides folds, first weights, what is hidden, and dropout. On the CPU the result is the same bit for bit.
        device: where it trains and answers: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"`, `"cuda:1"` or `"mps"`.
        predict_dtype: what answers are computed in, `"float32"` or `"float64"`. May be set after `fit`.
        progress: shows a bar on standard error.
        checkpoint_dir: a folder in which the training is kept after every epoch, until it ends. `fit` called again after a
            kill, with equal parameters and data, goes on there and reaches the same weights. One folder serves many fits.
"""

_ROWS = """
    X is an array or a data frame with a row for each case: numbers, categories (text, or pandas' own), dates, and missing cells (NaN, None) anywhere. Numbers are
    standardised; a level never seen in `fit` counts as missing, with a warning. The network is `TableNetwork` (Kossen et al. 2021, "Self-attention between datapoints"): each answer attends to
    the stored rows of `fit` and their targets, whose keys and values are computed once. `row_attention`, `explain_row`, `corruption_test` and `deletion_test` say which rows
    an answer relied on, and whether it did at all; `impute` fills missing cells of any column.

    Loss: $\\lambda_t L_{\\mathrm{features}} + (1 - \\lambda_t) L_{\\mathrm{target}}$ of hidden cells, $\\lambda_t$ falling to 0 (eq. 5). Where ours differs: rows whose
    target is asked for are not looked at by others, so that training and prediction see the same; members are measured on the rows they left out; see `docs/tables.md`.
"""


class _Datapoints(Looking):
    """The parameters of both estimators."""

    _optional: ClassVar[tuple[str, ...]] = ("feature_names_in_",)
    _arrays: ClassVar[tuple[str, ...]] = ("context_cells_", "context_target_", "context_rows_")

    def __init__(
        self,
        preset: str = "fast",
        *,
        target: str | None = None,
        categorical: str | Sequence[Any] = "auto",
        layers: int | None = None,
        embed_dim: int | None = None,
        num_heads: int | None = None,
        row_encoder: str | None = None,
        row_tokens: int | None = None,
        dropout: float | None = None,
        between_rows: bool = True,
        inducing: int | None = None,
        norm_kv: bool | None = None,
        scale: str | None = None,
        p_feature: float | None = None,
        p_target: float | None = None,
        tradeoff: float | None = None,
        tradeoff_schedule: str = "cosine",
        members: int | None = None,
        mode: str = "inductive",
        context_size: int | None = None,
        optimizer: str | None = None,
        lr: float | None = None,
        schedule: str | None = None,
        flat: float | None = None,
        weight_decay: float | None = None,
        clip: float | None = None,
        clip_value: float | None = None,
        epochs: int | None = None,
        batch_size: int | str = "auto",
        precision: str = "auto",
        validation_fraction: float | None = 0.2,
        patience: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        predict_dtype: str = "float32",
        progress: bool = False,
        checkpoint_dir: str | Path | None = None,
    ) -> None:
        self.preset = preset
        self.target = target
        self.categorical = categorical
        self.layers = layers
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.row_encoder = row_encoder
        self.row_tokens = row_tokens
        self.dropout = dropout
        self.between_rows = between_rows
        self.inducing = inducing
        self.norm_kv = norm_kv
        self.scale = scale
        self.p_feature = p_feature
        self.p_target = p_target
        self.tradeoff = tradeoff
        self.tradeoff_schedule = tradeoff_schedule
        self.members = members
        self.mode = mode
        self.context_size = context_size
        self.optimizer = optimizer
        self.lr = lr
        self.schedule = schedule
        self.flat = flat
        self.weight_decay = weight_decay
        self.clip = clip
        self.clip_value = clip_value
        self.epochs = epochs
        self.batch_size = batch_size
        self.precision = precision
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.predict_dtype = predict_dtype
        self.progress = progress
        self.checkpoint_dir = checkpoint_dir

    def _asked_outputs(self, X: Any, context: Any, context_size: int | None) -> np.ndarray:
        if context is None:
            context = "batch" if self.mode == "transductive" else "train"
        answers = self._answered(self._asked(X), context, context_size)
        return self._combined([part.target[0] for part in answers])

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy, or of numbers the coefficient of determination; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return super().score(X, y, sample_weight)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags


class DatapointClassifier(_Datapoints, Classifier):
    __doc__ = f"""Classifies rows of a table by attention to other rows and their labels.
{_ROWS}{ARGS}
    Fitted: `classes_`, `columns_`, `context_cells_` and `context_target_` (the stored rows), `temperature_` (probabilities are calibrated on rows that members left
    out), `network_` (the members), `training_` (every epoch), `n_features_in_`, `seed_`.

    >>> import numpy as np
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = DatapointClassifier(members=2, random_state=0).fit(X[::2], y[::2])
    >>> model.score(X[1::2], y[1::2]) > 0.9
    True
    >>> model.explain_row(X[1:2], top=3).rows[0] in range(75)
    True
    """

    _fitted: ClassVar[tuple[str, ...]] = (
        "classes_", "n_features_in_", "columns_", "temperature_", "seed_", "training_",
    )  # fmt: skip
    temperature_: float

    @property
    def _outputs_count(self) -> int:
        return len(self.classes_)

    def _codes(self, target: np.ndarray) -> Tensor:
        return torch.from_numpy(target.astype(np.int64))

    def _linear(
        self, cells: np.ndarray, target: np.ndarray, weights: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.linear_model import LogisticRegression

        count, present = len(self.classes_), np.unique(target)
        slope, offset = np.zeros((count, cells.shape[1])), np.zeros(count)
        if len(present) > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # near enough is enough for a start
                model = LogisticRegression(C=self._setting("start"), max_iter=100).fit(cells, target, weights)
            two = len(present) == 2
            slope[present] = np.concatenate((-model.coef_, model.coef_)) / 2 if two else model.coef_
            offset[present] = np.concatenate((-model.intercept_, model.intercept_)) / 2 if two else model.intercept_
        # A class that none of these rows has is unlikely, not impossible.
        offset[np.setdiff1d(np.arange(count), present)] = offset.min() - np.log(1 + len(target))
        return slope, offset

    def _judged(self, answers: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (answers.argmax(-1) == target).float()}

    def _verify(self, network: nn.Module, samples: Samples) -> None:
        self._keep(samples)
        held = [number for number in range(self._setting("members")) if (self._folds == number).any()]
        self.temperature_ = 1.0
        if held:
            network.eval()
            parts = [self._held_answers(network, number) for number in held]
            logits, target = (torch.cat(side).cpu() for side in zip(*parts, strict=True))
            stored = self._stored
            weights = None
            if stored.weights is not None:
                weights = torch.cat([stored.weights[stored.folds == number] for number in held]).double().cpu()
            self.temperature_ = temperature(logits.double(), target, weight=weights)

    def _combined(self, answers: Sequence[Tensor]) -> np.ndarray:
        """The logarithm of the members' mean probability."""
        logits = torch.stack([part.double().cpu() for part in answers]) / self.temperature_
        return logits.log_softmax(-1).logsumexp(0).sub(np.log(len(answers))).numpy()

    def _quantity(self, answers: Sequence[Tensor], start: Sequence[Tensor]) -> np.ndarray:
        return np.exp(self._combined(answers)[:, self._combined(start)[0].argmax()])

    def _named(self, combined: np.ndarray) -> list[Any]:
        return self.classes_[combined.argmax(-1)].tolist()

    def _target_shown(self, target: np.ndarray) -> list[Any]:
        return self.classes_[target].tolist()

    def _as_target(self, y: np.ndarray) -> np.ndarray:
        return as_codes(y, self.classes_)

    def _scores(self, combined: np.ndarray, y: Any) -> dict[str, float]:
        codes = self._as_target(np.asarray(y))
        losses = -combined[np.arange(len(codes)), codes]
        return {"accuracy": float((combined.argmax(-1) == codes).mean()), "log_loss": float(losses.mean())}

    def decision_function(self, X: Any, *, context: Any = None, context_size: int | None = None) -> np.ndarray:
        """Logarithms of probabilities `(rows, classes)`; of two classes the second's minus the first's, `(rows,)`."""
        logs = self._asked_outputs(X, context, context_size)
        return logs[:, 1] - logs[:, 0] if logs.shape[1] == 2 else logs

    def predict_proba(self, X: Any, *, context: Any = None, context_size: int | None = None) -> np.ndarray:
        """Probabilities `(rows, classes)`, in the order of `classes_`.

        `context` is what the answers look at: `"train"` (the rows of `fit`; an answer then does not depend on which others are asked), rows with their targets `(X, y)`
        instead of these, or `"batch"` (the rows of `fit` and all rows of X). `context_size` nearest rows of it, or all.
        """
        logs = self._asked_outputs(X, context, context_size)
        shares = np.exp(logs)
        return shares / shares.sum(1, keepdims=True)

    def predict(self, X: Any, *, context: Any = None, context_size: int | None = None) -> np.ndarray:
        """The class of largest probability for each row; for `context` and `context_size` see `predict_proba`."""
        best = self._asked_outputs(X, context, context_size).argmax(1)
        return self.classes_[best]

    def evaluate(self, X: Any, y: Any = None, *, context: Any = None) -> dict[str, float]:
        """Accuracy and the mean of -log p on labelled rows; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return self._scores(self._asked_outputs(X, context, None), y)


class DatapointRegressor(_Datapoints, Regressor):
    __doc__ = f"""Predicts a number for each row of a table by attention to other rows and their numbers.
{_ROWS}{ARGS}
    Fitted: `columns_`, `context_cells_` and `context_target_` (the stored rows), `target_mean_`, `target_scale_`, `network_` (the members), `training_` (every
    epoch), `n_features_in_`, `seed_`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(120, 3))
    >>> y = X[:, 0] - 2 * X[:, 1]
    >>> model = DatapointRegressor(members=1, epochs=30, random_state=0).fit(X[:80], y[:80])
    >>> model.score(X[80:], y[80:]) > 0.8
    True
    """

    _fitted: ClassVar[tuple[str, ...]] = (
        "n_features_in_", "columns_", "target_mean_", "target_scale_", "seed_", "training_",
    )  # fmt: skip
    _outputs_count: ClassVar[int] = 0

    @property
    def _preset(self) -> dict[str, Any]:
        return super()._preset | NUMBERS.get(self.preset, {})

    def _scale(self, samples: Samples) -> None:
        known = self._known(samples)
        assert samples.target is not None
        super()._scale(replace(samples, target=samples.target[known]))

    def _codes(self, target: np.ndarray) -> Tensor:
        return torch.from_numpy((target - self.target_mean_) / self.target_scale_).float()

    def _linear(
        self, cells: np.ndarray, target: np.ndarray, weights: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.linear_model import Ridge

        model = Ridge(1 / self._setting("start")).fit(cells, (target - self.target_mean_) / self.target_scale_, weights)
        return model.coef_[None], np.array([model.intercept_])

    def _judged(self, answers: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"absolute_error": (answers[:, 0] - target).abs() * self.target_scale_}

    def _verify(self, network: nn.Module, samples: Samples) -> None:
        self._keep(samples)

    def _combined(self, answers: Sequence[Tensor]) -> np.ndarray:
        mean = torch.stack([part.double().cpu() for part in answers]).mean(0).numpy()
        return mean * self.target_scale_ + self.target_mean_

    def _quantity(self, answers: Sequence[Tensor], start: Sequence[Tensor]) -> np.ndarray:
        return self._combined(answers)[:, 0]

    def _named(self, combined: np.ndarray) -> list[Any]:
        return combined[:, 0].tolist()

    def _target_shown(self, target: np.ndarray) -> list[Any]:
        return target.tolist()

    def _as_target(self, y: np.ndarray) -> np.ndarray:
        return as_numbers(y)

    def _scores(self, combined: np.ndarray, y: Any) -> dict[str, float]:
        errors = combined[:, 0] - self._as_target(np.asarray(y))
        return {"rmse": float(np.sqrt(np.mean(errors**2)))}

    def predict(self, X: Any, *, context: Any = None, context_size: int | None = None) -> np.ndarray:
        """A number for each row.

        `context` is what the answers look at: `"train"` (the rows of `fit`; an answer then does not depend on which others are asked), rows with their targets `(X, y)`
        instead of these, or `"batch"` (the rows of `fit` and all rows of X). `context_size` nearest rows of it, or all.
        """
        return self._asked_outputs(X, context, context_size)[:, 0]

    def evaluate(self, X: Any, y: Any = None, *, context: Any = None) -> dict[str, float]:
        """The root of the mean squared error on rows with targets; y may be a column of the frame X, named by `target`."""
        X, y = without_target(X, y, self.target, fitting=True)
        return self._scores(self._asked_outputs(X, context, None), y)
