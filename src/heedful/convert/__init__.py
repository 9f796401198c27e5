"""Turning pretrained models into others: softmax attention of an encoder into Primal-Attention.

>>> from heedful import convert
>>> convert.primalize.__name__
'primalize'
"""

from heedful.convert.distilling import Distillation, pool
from heedful.convert.primal import breaking_point, load, primalize, save
from heedful.convert.result import BreakingPoint, LayerFit, Primalized

__all__ = [
    "BreakingPoint",
    "Distillation",
    "LayerFit",
    "Primalized",
    "breaking_point",
    "load",
    "pool",
    "primalize",
    "save",
]
