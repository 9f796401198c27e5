"""Which kernels have a fused form: an elementwise function of alpha q.k + beta, or of minus a squared distance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from heedful.kernels import Cosine, Gaussian, Kernel, Polynomial, Relu, ReluSquared, Sigmoid, Softmax
from heedful.kernels._algebra import Divided, Product, Scaled
from heedful.kernels._base import Parameter

Activation = Literal["exp", "sigmoid", "relu", "relu_squared", "power"]

BASE_2 = ("exp", "sigmoid")
"""Functions that are made of powers of two in the end: their scores come times log2(e)."""

DIVISIONS = {None: 0, "sum": 1, "count": 2}


@dataclass(frozen=True)
class Form:
    """A kernel as the fused kernels see it. `alpha` and `beta` are numbers, or tensors with one entry or one per head.

    With `distance` the score is alpha (q.k - q.q / 2 - k.k / 2) + beta instead of alpha q.k + beta.
    """

    activation: Activation
    alpha: Parameter | None = None  # None: 1 / sqrt(head size)
    beta: Parameter = 0.0
    degree: int = 1
    division: int = 0
    distance: bool = False
    inputs: Literal["plain", "unit", "folded"] = "plain"  # as they are, of unit length, or as `Kernel.fold` makes them
    factors: tuple[Parameter, ...] = ()  # of the output


FORMS: dict[type[Kernel], Callable[..., Form]] = {
    Softmax: lambda kernel: Form("exp", kernel.scale, division=1),
    Gaussian: lambda kernel: Form(
        "exp",
        None if kernel.bandwidth is None else kernel.bandwidth**-2,
        division=int(kernel.normalize),
        distance=True,
    ),
    Sigmoid: lambda kernel: Form("sigmoid", kernel.scale, kernel.bias),
    Relu: lambda kernel: Form("relu", kernel.scale),
    ReluSquared: lambda kernel: Form("relu_squared", kernel.scale),
    Polynomial: lambda kernel: Form("power", kernel.scale, kernel.offset, degree=kernel.degree),
    Cosine: lambda kernel: Form("power", 1.0, inputs="unit"),
}


def form(kernel: Kernel) -> Form | str:
    """The fused form of a kernel, or why it has none."""
    if type(kernel) in FORMS:
        return FORMS[type(kernel)](kernel)
    if type(kernel) is Scaled:
        inner = form(kernel.kernel)
        return inner if isinstance(inner, str) else replace(inner, factors=(*inner.factors, kernel.factor))
    if type(kernel) is Divided:
        inner = form(kernel.kernel)
        if isinstance(inner, Form) and (inner.division or inner.factors):
            return "rows are divided behind another division or factor"
        return inner if isinstance(inner, str) else replace(inner, division=DIVISIONS[kernel.by])
    if type(kernel) is Product and kernel.folds and kernel.traits.division == "sum":
        return Form("exp", 1.0, division=1, inputs="folded")
    return f"{type(kernel).__name__} is no elementwise function of one inner product or squared distance"
