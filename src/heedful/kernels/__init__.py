"""Kernels: what a coefficient is.

A kernel is data: it prints, compares, hashes, and goes through JSON. `a * b` multiplies coefficients, `a + b` adds them,
`0.5 * a` scales them, `a.normalized()` divides each row by its sum and `a.averaged()` by the number of keys.
"""

from heedful.kernels._algebra import Divided, Product, Scaled, Sum
from heedful.kernels.base import Folded, FusedForm, Kernel, Traits
from heedful.kernels.elementwise import Cosine, Polynomial, Relu, ReluSquared, Sigmoid
from heedful.kernels.feature_map import FeatureMap
from heedful.kernels.higher_order import HigherOrder
from heedful.kernels.softmax import Softmax
from heedful.kernels.stationary import Gaussian, Laplace

__all__ = [
    "Cosine",
    "Divided",
    "FeatureMap",
    "Folded",
    "FusedForm",
    "Gaussian",
    "HigherOrder",
    "Kernel",
    "Laplace",
    "Polynomial",
    "Product",
    "Relu",
    "ReluSquared",
    "Scaled",
    "Sigmoid",
    "Softmax",
    "Sum",
    "Traits",
]
