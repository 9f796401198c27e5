"""How estimators of series read X: arrays, lists, tables and data frames, in `fit` and after it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful._runtime import device_of
from heedful.bridges.estimator import Estimator
from heedful.bridges.samples import Samples, validated
from heedful.series._cases import Cases, as_array, cases_of, filled, scales, standardised
from heedful.series._frames import Frames, check_rows, check_single, read_frames


class SeriesReader(Estimator):
    """X as `Samples` of values (cases, channels, time), NaN behind each end, and lengths; channels are standardised."""

    _read_facts: ClassVar[tuple[str, ...]] = ("n_features_in_", "channels_", "is_table_", "mean_", "scale_")
    channels_: int
    is_table_: bool

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        frames = read_frames(X)
        if not fitting:
            return self._read_unseen(X if frames is None else frames)
        if frames is None:
            check_rows(X, y)
        else:
            y, sample_weight = frames.aligned(y), frames.aligned(sample_weight, "sample_weight")
            groups = frames.aligned(groups, "groups")
        table = validated(self, _with_axes(as_array(X if frames is None else frames.series)), y)
        values, y = table if isinstance(table, tuple) else (table, None)
        cases = filled(cases_of(values[:, None] if values.ndim == 2 else values))
        self.channels_, self.is_table_ = cases.values.shape[1], values.ndim == 2
        if frames is not None and frames.channels is not None:
            self.feature_names_in_ = np.array(frames.channels, dtype=object)
        return Samples((cases.values, cases.lengths), y, sample_weight, groups)

    def _read_unseen(self, X: Any) -> Samples:
        # The names of a table's columns are those of its steps.
        channels = None if self.is_table_ else getattr(self, "feature_names_in_", None)
        if isinstance(X, Frames):
            X = X.ordered(channels).series
        elif channels is not None:
            check_single(X, channels)
        # A list holds series, whatever their length; the columns of a table are those of fit.
        table = self.is_table_ and not isinstance(X, list | tuple)
        X = _with_axes(as_array(X))
        values = validated(self, X, reset=False, features=table and getattr(X, "ndim", 2) == 2)
        values = values[:, None] if values.ndim == 2 else values
        if values.shape[1] != self.channels_:
            raise InvalidArgument(
                f"X has {values.shape[1]} features, but {type(self).__name__} is expecting {self.channels_} features as input: "
                "the features of series are their channels, X is (cases, channels, time)"
            )
        cases = filled(cases_of(values))
        return Samples((cases.values, cases.lengths))

    def _scale(self, samples: Samples) -> None:
        self.mean_, self.scale_ = scales(Cases(*samples.inputs))

    def _inputs(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """What convolutions read: standardised values (n, channels, time), zero behind each end, and lengths; on the device."""
        cases = Cases(*samples.inputs)
        longest = getattr(self, "max_len", None) or cases.values.shape[2]
        x, padding = standardised(cases, self.mean_, self.scale_, longest)
        device = device_of(self.device)
        # Sums are in float64, which MPS has not.
        device = torch.device("cpu") if device.type == "mps" else device
        return x.transpose(1, 2).contiguous().to(device), (~padding).sum(1).to(device)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = True
        return tags


def _with_axes(X: Any) -> Any:
    if getattr(X, "ndim", 2) > 3:
        raise InvalidArgument(f"X must have two or three axes, (cases, time) or (cases, channels, time); got {X.ndim}")
    if getattr(X, "ndim", 2) == 3 and 0 in X.shape:
        raise InvalidArgument(f"X must hold one case, one channel and one step or more; got shape {tuple(X.shape)}")
    return X
