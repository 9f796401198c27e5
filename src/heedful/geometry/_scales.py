"""Points in the network's units: one number divides all vectors of a kind, so that turning stays turning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.bridges.samples import FAR, moments
from heedful.geometry._cases import Cases


@dataclass(frozen=True)
class Columns:
    """What the columns of a point are: `vectors` vectors of `dim` numbers, then scalars; `centred`: the first vector is a position."""

    dim: int
    vectors: int
    centred: bool

    def vectors_of(self, cases: Cases) -> tuple[np.ndarray, np.ndarray]:
        """(cases, n, vectors, dim), positions relative to the centre of their case, and that centre (cases, dim), zero where none is taken."""
        size = self.vectors * self.dim
        values = cases.values[..., :size].reshape(*cases.values.shape[:2], self.vectors, self.dim)
        if not self.centred:
            return values, np.zeros((len(values), self.dim))
        inside = cases.inside[..., None]
        centre = np.where(inside, values[:, :, 0], 0.0).sum(1) / cases.lengths[:, None]
        values = values.copy()
        values[:, :, 0] = np.where(inside, values[:, :, 0] - centre[:, None], 0.0)
        return values, centre

    def scalars_of(self, cases: Cases) -> np.ndarray:
        return cases.values[..., self.vectors * self.dim :]


@dataclass(frozen=True)
class Scales:
    """Root mean squares `vectors` (vectors,) of the numbers in a kind of vector; mean and deviation of each scalar."""

    vectors: np.ndarray
    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, cases: Cases, columns: Columns) -> Scales:
        vectors = columns.vectors_of(cases)[0][cases.inside]  # [points, vectors, d]
        scalars = columns.scalars_of(cases)[cases.inside]
        pairs = np.array([moments(column) for column in scalars.T]).reshape(-1, 2)
        sizes = [root_mean_square(vectors[:, at]) for at in range(columns.vectors)]
        if columns.centred and sizes[0] <= 1e-12 * root_mean_square(cases.values[cases.inside][:, : columns.dim]):
            sizes[0] = 1.0  # rounding in the centre of points that coincide is no size
        return cls(np.array(sizes), pairs[:, 0], pairs[:, 1])

    def tensors(self, cases: Cases, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """Vectors, scalars and padding as the network takes them, in float64."""
        with np.errstate(over="ignore"):
            vectors = columns.vectors_of(cases)[0] / self.vectors[:, None]
            scalars = (columns.scalars_of(cases) - self.mean) / self.scale
        inside = cases.inside
        for values in (vectors, scalars):
            far = (~(np.abs(values) <= FAR)).reshape(*inside.shape, -1).any(-1) & inside
            if far.any():
                at = np.flatnonzero(far.any(1))
                raise InvalidArgument(
                    f"case {at[0]} has values more than {FAR:g} times as large as those of the training ({len(at)} such cases), too far for "
                    "float32; are its units those of the training?"
                )
        vectors = np.where(inside[..., None, None], vectors, 0.0)
        scalars = np.where(inside[..., None], scalars, 0.0)
        return torch.from_numpy(vectors), torch.from_numpy(scalars), torch.from_numpy(~inside)


def root_mean_square(values: np.ndarray) -> float:
    """Of all numbers, however large or small; 1 where all are zero."""
    # A power of two near the largest: squares neither overflow nor vanish, and nothing is rounded.
    unit = np.ldexp(1.0, np.frexp(np.abs(values).max(initial=0.0))[1] - 1)
    return float(np.sqrt(np.square(values / unit).mean()) * unit) if values.any() else 1.0
