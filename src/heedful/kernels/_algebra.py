"""What `*`, `+`, `normalized()` and `averaged()` make."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.kernels.base import Kernel, _divide, _hide, check_parameter, per_head
from heedful.kernels.forms import Division, Folded, FusedForm, Parameter, Traits


class _Pair(Kernel):
    left: Kernel
    right: Kernel

    def __post_init__(self) -> None:
        _check_pairs(self, "left")
        _check_pairs(self, "right")


def _check_pairs(owner: Kernel, name: str) -> None:
    part = getattr(owner, name)
    if not isinstance(part, Kernel):
        raise InvalidArgument(f"{type(owner).__name__}: {name} must be a kernel; got {part!r}")
    if part.of_pairs is not part:
        raise InvalidArgument(f"{part!r} acts on the whole sequence; compose inside it, as in HigherOrder(a * b)")


class Product(_Pair):
    """Coefficients multiplied.

    Where both kernels are exponential their scores add, and rows are normalised if either kernel's are: the product of
    `Softmax()` and `Gaussian(2.0)` is the softmax of the sum of their scores.
    """

    @property
    def traits(self) -> Traits:
        a, b = self.left.traits, self.right.traits
        exponential = a.exponential and b.exponential
        return Traits(
            exponential=exponential,
            division=("sum" if "sum" in (a.division, b.division) else a.division or b.division)
            if exponential
            else None,
            nonnegative=a.nonnegative and b.nonnegative,
            stationary=a.stationary and b.stationary,
            invariant=a.invariant and b.invariant,
        )

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return self.left.score(query, key) + self.right.score(query, key)

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if self.traits.exponential:
            return super().weights(query, key, keep, bias)
        weights = self.left.weights(query, key, keep) * self.right.weights(query, key, keep)
        return weights if bias is None else weights * _hide(bias, keep).exp()

    def _undivided(self) -> Kernel:
        return Product(self.left._undivided(), self.right._undivided()) if self.traits.division else self

    @property
    def scored(self) -> bool:
        return self.traits.exponential

    @property
    def folds(self) -> bool:
        return self.left.folds and self.right.folds

    def fold(self, query: Tensor, key: Tensor) -> Folded | None:
        left, right = self.left.fold(query, key), self.right.fold(query, key)
        if left is None or right is None:
            return None
        columns = [part.column for part in (left, right) if part.column is not None]
        return Folded(
            torch.cat([part.query * part.scale for part in (left, right)], dim=-1),
            torch.cat([part.key for part in (left, right)], dim=-1),
            sum(columns[1:], columns[0]) if columns else None,
            1.0,
        )

    @property
    def fused_form(self) -> FusedForm | None:
        known = self.folds and self.traits.division == "sum"
        return FusedForm("exp", 1.0, division="sum", inputs="folded") if known else None


class Sum(_Pair):
    """Coefficients added, each as `attend` would use it: attend(a + b) = attend(a) + attend(b)."""

    scored = False

    @property
    def traits(self) -> Traits:
        a, b = self.left.traits, self.right.traits
        return Traits(
            nonnegative=a.nonnegative and b.nonnegative,
            stationary=a.stationary and b.stationary,
            invariant=a.invariant and b.invariant,
        )

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return self.left.weights(query, key, keep, bias) + self.right.weights(query, key, keep, bias)


class Scaled(Kernel):
    """Coefficients multiplied by a number, or by a tensor per head: `0.5 * Softmax()`."""

    kernel: Kernel
    factor: Parameter

    def __post_init__(self) -> None:
        _check_pairs(self, "kernel")
        check_parameter(self, "factor")

    @property
    def scored(self) -> bool:
        return self.kernel.scored

    def with_scale(self, scale: float | None) -> Kernel:
        return self if scale is None else Scaled(self.kernel.with_scale(scale), self.factor)

    @property
    def traits(self) -> Traits:
        inner = self.kernel.traits
        positive = not isinstance(self.factor, Tensor) and self.factor >= 0
        return inner._replace(exponential=False, division=None, nonnegative=inner.nonnegative and positive)

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return self.kernel.weights(query, key, keep, bias) * per_head(self.factor, query)

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        inner = None if self.kernel.traits.division else self.kernel.features(query, key)
        return None if inner is None else (inner[0] * per_head(self.factor, query), inner[1])

    def feature_size(self, head_dim: int) -> int | None:
        return None if self.kernel.traits.division else self.kernel.feature_size(head_dim)

    @property
    def fused_form(self) -> FusedForm | None:
        inner = self.kernel.fused_form
        return inner and replace(inner, factors=(*inner.factors, self.factor))


class Divided(Kernel):
    """Rows of coefficients divided by their sum, or by the number of keys the row may attend to."""

    kernel: Kernel
    by: Division = "sum"

    def __post_init__(self) -> None:
        _check_pairs(self, "kernel")
        if self.by not in ("sum", "count"):
            raise InvalidArgument(f"Divided: by must be 'sum' or 'count'; got {self.by!r}")
        if self.by == "sum" and not self.kernel.traits.nonnegative and type(self.kernel).traits is not Kernel.traits:
            raise InvalidArgument(
                f"{self.kernel!r} may have negative coefficients, so a row sum may vanish; use averaged() instead"
            )

    @property
    def traits(self) -> Traits:
        inner = self.kernel.traits
        # Divided twice, a coefficient is no exponential of a score over one sum.
        return inner._replace(division=self.by, exponential=inner.exponential and inner.division is None)

    @property
    def scored(self) -> bool:
        return self.kernel.scored

    @property
    def folds(self) -> bool:
        return self.traits.exponential and self.kernel.folds

    def _undivided(self) -> Kernel:
        return self.kernel._undivided()

    def with_scale(self, scale: float | None) -> Kernel:
        return self if scale is None else Divided(self.kernel.with_scale(scale), self.by)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return self.kernel.score(query, key)

    def weights(self, query: Tensor, key: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if self.traits.exponential and self.by == "sum":
            return super().weights(query, key, keep, bias)
        return _divide(self.kernel.weights(query, key, keep, bias), keep, self.by)

    def features(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self.kernel.traits.division else self.kernel.features(query, key)

    def feature_size(self, head_dim: int) -> int | None:
        return None if self.kernel.traits.division else self.kernel.feature_size(head_dim)

    def fold(self, query: Tensor, key: Tensor) -> Folded | None:
        return self.kernel.fold(query, key)

    @property
    def fused_form(self) -> FusedForm | None:
        inner = self.kernel.fused_form
        # Rows are divided once, and multiplied behind that.
        return None if inner is None or inner.division or inner.factors else replace(inner, division=self.by)

    @property
    def fused_map(self) -> Literal["elu", "relu"] | None:
        return self.kernel.fused_map if self.by == "sum" else None
