"""Multivariate time series: features by convolutions, a ridge on them, evidence in time, and a network with any attention."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> where it lives: files and networks need no scikit-learn.
_HOMES = {
    "Evidence": "evidence",
    "SeriesClassifier": "classifier",
    "SeriesData": "files",
    "SeriesFeatures": "features",
    "SeriesNetwork": "network",
    "SeriesRegressor": "regressor",
    "archive": "files",
    "estimator_for": "files",
    "read": "files",
}

__all__ = [
    "Evidence",
    "SeriesClassifier",
    "SeriesData",
    "SeriesFeatures",
    "SeriesNetwork",
    "SeriesRegressor",
    "archive",
    "estimator_for",
    "read",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.series.classifier import SeriesClassifier
    from heedful.series.evidence import Evidence
    from heedful.series.features import SeriesFeatures
    from heedful.series.files import SeriesData, archive, estimator_for, read
    from heedful.series.network import SeriesNetwork
    from heedful.series.regressor import SeriesRegressor
