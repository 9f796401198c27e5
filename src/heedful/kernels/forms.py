"""What a kernel states of itself: its traits, and the forms in which implementations take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Parameter = float | Tensor
"""A number, or a tensor with one entry (shared) or one entry per head."""

Division = Literal["sum", "count"]


class Traits(NamedTuple):
    """What an implementation may rely on.

    exponential: the coefficient is exp(score), so that products add scores and rows can be normalised stably.
    division: what each row of coefficients is divided by: its "sum", the "count" of keys it may attend to, or nothing.
    nonnegative: no coefficient is below zero.
    stationary: the coefficient depends on query - key alone.
    invariant: the coefficient depends on inner products alone, so rotating queries and keys together changes nothing.
    """

    exponential: bool = False
    division: Division | None = None
    nonnegative: bool = False
    stationary: bool = False
    invariant: bool = False


class Folded(NamedTuple):
    """Softmax attention in disguise: score = scale * query . key + column[key] + a term constant in each row."""

    query: Tensor  # [..., Q, E]
    key: Tensor  # [..., K, E]
    column: Tensor | None  # [..., K], float32 or wider
    scale: float


class Balance(NamedTuple):
    """What becomes of a kernel of pairs in one of the whole sequence, besides that its queries were moved."""

    rows: Tensor  # [..., Q, 1], by which outputs are multiplied
    keys: Tensor | None = None  # [..., K, 1], by which values are multiplied
    column: Tensor | None = None  # [..., K, 1], added to the scores of every key


@dataclass(frozen=True)
class FusedForm:
    """A kernel as the fused kernels take it: activation(alpha q.k + beta) of every pair, rows divided, times factors.

    `alpha` and `beta` are numbers, or tensors with one entry or one per head. With `distance` the score is
    alpha (q.k - q.q / 2 - k.k / 2) + beta instead.
    """

    activation: Literal["exp", "sigmoid", "relu", "relu_squared", "power"]
    alpha: Parameter | None = None  # None: 1 / sqrt(head size)
    beta: Parameter = 0.0
    degree: int = 1
    division: Division | None = None
    distance: bool = False
    inputs: Literal["plain", "unit", "folded"] = "plain"  # as they are, of unit length, or as `Kernel.fold` makes them
    factors: tuple[Parameter, ...] = ()  # of the output
