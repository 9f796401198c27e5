"""Convolution features of time series as a scikit-learn transformer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import numpy as np
from torch import Tensor

from heedful._checks import check_choice, check_whole
from heedful.bridges.estimator import seed_of
from heedful.bridges.predictors import Transformer
from heedful.bridges.samples import check_is_fitted
from heedful.series._method import check_place
from heedful.series._reading import SeriesReader
from heedful.series._views import KINDS, View, drawn, packed, unpacked

Convolutions = Literal["shares", "contests", "both"]


class SeriesFeatures(Transformer, SeriesReader):
    r"""Turns each series into numbers by random convolutions, for any estimator of tables.

    For kernels k of nine taps at many dilations, of the series and of its differences from step to step:

    $$\mathrm{share} = \frac{1}{T} \#\{t : (k * x)_t > b\}, \qquad \mathrm{wins}_j = \Big(\sum_t [j = \arg\max_i (k_i * x)_t] (k_j * x)_t\Big)^{1/2}$$

    Shares are those of MiniRocket (Dempster et al. 2021), with biases b that are quantiles of training series; wins are those of Hydra (Dempster
    et al. 2023), in groups of eight kernels, and beside them the roots of how often each is the smallest. Where ours differ: they are by segment, they
    read unequal lengths and missing values as they are, both run on a GPU, and numbers of kernels fit their use in `SeriesClassifier`.

    X is as for `SeriesClassifier`. With `segments` S the result has S blocks of features, of each segment what it adds to the whole: the blocks
    sum to the features of the whole series.

    Args:
        convolutions: `"shares"`, `"contests"` (the wins) or `"both"`.
        segments: blocks of features, in parts of equal length of each series.
        features: how many shares are drawn, for the series and again for its differences; by default 9,996, or 2,520 of more than 2,000 series.
        random_state: decides channels, biases and weights. On the CPU the result is the same bit for bit.
        device: `"auto"` (CUDA where there is one), `"cpu"`, `"cuda"` or `"cuda:1"`.

    Fitted: `n_features_in_` (channels; of a table its columns), `mean_`, `scale_`, `seed_`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(12, 2, 50))
    >>> SeriesFeatures("shares", features=840, random_state=0).fit_transform(X).shape
    (12, 1680)
    """

    _fitted: ClassVar[tuple[str, ...]] = (*SeriesReader._read_facts, "seed_", "_n_features_out")

    def __init__(
        self,
        convolutions: Convolutions = "both",
        *,
        segments: int = 1,
        features: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
    ) -> None:
        self.convolutions = convolutions
        self.segments = segments
        self.features = features
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any = None) -> Self:  # type: ignore[override]
        """Draws kernels, and biases from X; y is ignored."""
        check_choice(Convolutions, convolutions=self.convolutions)
        check_whole(segments=self.segments)
        check_whole(84, optional=True, features=self.features)
        check_place(self.device, self.random_state)
        samples = self._read(X, fitting=True)
        self.seed_ = seed_of(self.random_state)
        self._scale(samples)
        kinds = tuple(KINDS) if self.convolutions == "both" else (self.convolutions,)
        self._views: list[View] = drawn(*self._inputs(samples), kinds, self.features, self.seed_)
        self._n_features_out = int(self.segments) * sum(view.size for view in self._views)
        return self

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "_views")
        x, lengths = self._inputs(self._read(X))
        views = unpacked({name: value.to(x.device) for name, value in packed(self._views).items()})
        segments = self._n_features_out // sum(view.size for view in views)
        result = np.empty((len(x), segments, self._n_features_out // segments))
        begin = 0
        for view in views:
            for rows, parts in view.parts(x, lengths, segments):
                result[rows.cpu().numpy(), :, begin : begin + view.size] = parts.cpu().numpy()
            begin += view.size
        return result.reshape(len(x), -1)

    def _tensors_saved(self) -> dict[str, Tensor]:
        return packed(self._views)

    def _load(self, weights: dict[str, Tensor]) -> None:
        self._views = unpacked(weights)
