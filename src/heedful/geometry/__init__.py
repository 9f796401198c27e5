"""Sets of points with vectors and scalars: answers that turn with space, or do not; a regressor and a classifier."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> where it lives: files and networks need no scikit-learn.
_HOMES = {
    "EquivariantClassifier": "classifier",
    "EquivariantNetwork": "network",
    "EquivariantRegressor": "regressor",
    "PointData": "files",
    "perpendicular": "network",
    "read": "files",
}

__all__ = ["EquivariantClassifier", "EquivariantNetwork", "EquivariantRegressor", "PointData", "perpendicular", "read"]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.geometry.classifier import EquivariantClassifier
    from heedful.geometry.files import PointData, read
    from heedful.geometry.network import EquivariantNetwork, perpendicular
    from heedful.geometry.regressor import EquivariantRegressor
