"""What changes a model's weights: softmax attention of an encoder into Primal-Attention, an embedding turned in place.

>>> from heedful import convert
>>> convert.primalize.__name__
'primalize'
"""

from heedful.convert.distilling import Distillation, pool
from heedful.convert.primal import breaking_point, load, primalize, save
from heedful.convert.result import BreakingPoint, LayerFit, Primalized
from heedful.convert.rotation import Outliers, Rotation, hadamard, rotate_
from heedful.convert.warm import WarmStart, warm_start_

__all__ = [
    "BreakingPoint",
    "Distillation",
    "LayerFit",
    "Outliers",
    "Primalized",
    "Rotation",
    "WarmStart",
    "breaking_point",
    "hadamard",
    "load",
    "pool",
    "primalize",
    "rotate_",
    "save",
    "warm_start_",
]
