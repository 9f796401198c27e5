"""A regressor of multivariate time series: one number or several for each, by convolution features and a ridge."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from heedful.bridges.predictors import Regressor
from heedful.bridges.samples import check_is_fitted
from heedful.series._method import KernelMethod, KernelName


class SeriesRegressor(KernelMethod, Regressor):
    r"""Predicts a number for each time series, or several, by convolution features and a ridge (extrinsic regression).

    X is as for `SeriesClassifier`: an array (cases, channels, time), a list of arrays (channels, time) of unequal lengths, a table (cases,
    time), or data frames; NaN inside a series is a missing value. y is numbers, (cases,) or (cases, outputs). Features, penalty and
    evidence are those of `SeriesClassifier(method="kernel")`.

    Args:
        kernel: `"linear"` (on features of whole series), `"softmax"` (every segment of a series is compared with every segment of another, up to 8
            times the time) or `"linear+softmax"`.
        segments: in how many parts of equal length `evidence` divides each series.
        features: how many shares of positive convolutions are drawn, for the series and again for its differences; by default 9,996, or
            2,520 of more than 2,000 series.
        random_state: decides which features are drawn. On the CPU the result is the same bit for bit.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"` or `"cuda:1"`.
        progress: shows a bar on standard error.

    Fitted: `n_features_in_` (channels; of a table its columns), `target_mean_`, `target_scale_`, `mean_`, `scale_`, `seed_`, `loo_score_` (the
    R² on training cases, each left out in turn).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.normal(size=(60, 40)), rng.uniform(1, 5, size=60)
    >>> X += 3 * np.sin(y[:, None] * np.arange(40) / 4)  # how fast each oscillates
    >>> model = SeriesRegressor(features=840, random_state=0).fit(X[:40], y[:40])
    >>> model.score(X[40:], y[40:]) > 0.8
    True
    """

    _fitted: ClassVar[tuple[str, ...]] = (*KernelMethod._read_facts, *Regressor._target, "seed_", "loo_score_")

    def __init__(
        self,
        kernel: KernelName = "linear",
        *,
        segments: int = 8,
        features: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        progress: bool = False,
    ) -> None:
        self.kernel = kernel
        self.segments = segments
        self.features = features
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:  # type: ignore[override]
        """Learns from X and y, numbers; `sample_weight` has a number for each case, and a case of weight 0 is left out altogether."""
        self._check_kernel()
        samples = self._labelled(self._read(X, y, sample_weight, fitting=True))
        self.__dict__.pop("machine_", None)
        if samples.weights is not None:
            samples = samples[samples.weights > 0]
        assert samples.target is not None
        Regressor._scale(self, samples)
        target = (samples.target - self.target_mean_) / self.target_scale_
        columns = torch.from_numpy(target.reshape(len(target), -1))
        weights = torch.ones(len(target)) if samples.weights is None else torch.from_numpy(samples.weights)
        weights = (weights / weights.sum()).double()

        def error(unseen: Tensor) -> float:
            return float(weights @ (unseen.cpu() - columns).square().mean(1))

        unseen = self._fit_machine(samples, columns.numpy(), error)
        spread = (columns - weights @ columns).square()
        self.loo_score_ = float(1 - error(unseen) / max(float(weights @ spread.mean(1)), 1e-12))
        self.machine_.scaled(self.target_scale_, self.target_mean_)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """A number for each series, or one for each output."""
        check_is_fitted(self, "machine_")
        scores = self._machine_scores(X)
        return scores if np.ndim(self.target_mean_) else scores[:, 0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
