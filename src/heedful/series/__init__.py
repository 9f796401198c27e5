"""Multivariate time series: a network with any attention, and its classifier."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Name -> where it lives: files and networks need no scikit-learn.
_HOMES = {
    "SeriesClassifier": "heedful.series.classifier",
    "SeriesData": "heedful.series.files",
    "SeriesNetwork": "heedful.series.network",
    "archive": "heedful.series.files",
    "read": "heedful.series.files",
}

__all__ = ["SeriesClassifier", "SeriesData", "SeriesNetwork", "archive", "read"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'heedful.series' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


if TYPE_CHECKING:
    from heedful.series.classifier import SeriesClassifier
    from heedful.series.files import SeriesData, archive, read
    from heedful.series.network import SeriesNetwork
