"""Multivariate time series: a network with any attention, and its classifier."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> where it lives: files and networks need no scikit-learn.
_HOMES = {
    "SeriesClassifier": "classifier",
    "SeriesData": "files",
    "SeriesNetwork": "network",
    "archive": "files",
    "read": "files",
}

__all__ = ["SeriesClassifier", "SeriesData", "SeriesNetwork", "archive", "read"]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.series.classifier import SeriesClassifier
    from heedful.series.files import SeriesData, archive, read
    from heedful.series.network import SeriesNetwork
