"""Kernels: what a coefficient is.

A kernel is data: it prints, compares, hashes, and goes through JSON. `a * b` multiplies coefficients, `a + b` adds them,
`0.5 * a` scales them, `a.normalized()` divides each row by its sum, `a.averaged()` by the number of keys, and `a.symmetric()` by the roots of both degrees.
`PerHead` has a kernel of its own for each head.
"""

from heedful.kernels._algebra import Divided, Product, Scaled, Sum
from heedful.kernels.base import Kernel
from heedful.kernels.elementwise import Cosine, Exponential, Polynomial, Relu, ReluSquared, Sigmoid, Silu, Tanh
from heedful.kernels.feature_map import FeatureMap
from heedful.kernels.forms import Folded, FusedForm, Traits
from heedful.kernels.heads import PerHead, as_kernel
from heedful.kernels.higher_order import HigherOrder
from heedful.kernels.softmax import Softmax
from heedful.kernels.stationary import Gaussian, Laplace, Matern, RationalQuadratic
from heedful.kernels.symmetric import Symmetric

__all__ = [
    "Cosine",
    "Divided",
    "Exponential",
    "FeatureMap",
    "Folded",
    "FusedForm",
    "Gaussian",
    "HigherOrder",
    "Kernel",
    "Laplace",
    "Matern",
    "PerHead",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Relu",
    "ReluSquared",
    "Scaled",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Sum",
    "Symmetric",
    "Tanh",
    "Traits",
    "as_kernel",
]
