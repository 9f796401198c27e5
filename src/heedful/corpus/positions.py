"""Associations at every distance, and how well few numbers say the same: a shared term, small matrices, rotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from heedful._plot import Axes, axes
from heedful._result import Result

__all__ = ["PositionEnergy"]

ANGLES, DECAYS, ROUNDS = 257, 49, 6
# Cells whose vectors are held at once.
CELLS = 50_000


@dataclass(frozen=True)
class PositionEnergy(Result):
    r"""How much of associations at each distance a form that has fewer numbers explains.

    $$1 - \sum_{\delta ab} C_\delta[a,b]\,(D_\delta[a,b] - \hat D_\delta[a,b])^2 \Big/ \sum_{\delta ab} C_\delta[a,b]\, D_\delta[a,b]^2$$

    over all cells with a count. 1 is all of it; below 0 is worse than nothing.

    Attributes:
        none: $\hat D_\delta = D$, one matrix for all distances.
        additive: $\hat D_\delta = D + \kappa(\delta)$, what a bias of distances (T5, ALiBi) can say.
        tucker: $\hat D_\delta = U B_\delta V^\top$, a small matrix per distance.
        rotary: the same with $B_\delta$ scaled rotations of planes, what rotary positions can say.
        whole: $\hat D_\delta = U U^\top D_\delta V V^\top$ is `tucker`; this is the same for D alone, $U \Sigma V^\top$ at every distance: what
            the rank costs before positions are added.
        rank: columns of U and V.
    """

    none: float
    additive: float
    tucker: float
    rotary: float
    whole: float
    rank: int

    def __str__(self) -> str:
        names = {
            "none": "one matrix for all",
            "additive": "a bias per distance",
            "tucker": f"{self.rank} x {self.rank} per distance",
        }
        names |= {"rotary": "rotations of planes", "whole": f"rank {self.rank}, one for all"}
        lines = ["Share of the associations at each distance that is explained by"]
        return "\n".join([*lines, *(f"  {words:<22} {getattr(self, name):>6.3f}" for name, words in names.items())])

    def plot(self, ax: Axes | None = None) -> Axes:
        """A bar for each form."""
        ax = axes(ax)
        names = ("none", "additive", "whole", "tucker", "rotary")
        ax.bar(names, [getattr(self, name) for name in names])
        ax.set(ylabel="explained share", title=f"Positions, rank {self.rank}")
        return ax


def biases(tables: Sequence[Any], whole: Any, counts: Sequence[Any]) -> np.ndarray:
    r"""$\kappa(\delta)$ `(w,)`: the mean of $D_\delta - D$ over cells with a count at that distance, weighted by it."""
    out = np.zeros(len(tables))
    for place, (table, count) in enumerate(zip(tables, counts, strict=True)):
        a, b, weight = cells_of(count)
        if len(a):
            out[place] = np.average(pick(table, a, b) - pick(whole, a, b), weights=weight)
    return out


def cores(tables: Sequence[Any], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    r"""$B_\delta = U^\top D_\delta V$ `(w, r, r)`, for U and V with orthonormal columns."""
    return np.stack([left.T @ (table @ right) for table in tables])


def rotations(small: np.ndarray) -> np.ndarray:
    r"""The nearest $\hat B_\delta = \bigoplus_m \mathrm{Re}\text{-}\mathrm{form}(a_m \rho_m^\delta e^{i \delta \theta_m})$ to $B_\delta$ `(w, r, r)`.

    Every plane of two components in a row has an angle $\theta$, a decay $0 < \rho \le 1$ and a complex factor a (its phase belongs to
    the query's map, as in a model with rotary positions). The nearest scaled rotation of a 2 x 2 block G is
    $z = (G_{11} + G_{22} + i\,(G_{21} - G_{12})) / 2$; $(\theta, \rho)$ minimise $\sum_\delta |z_\delta - a \rho^\delta e^{i\delta\theta}|^2$, a in
    closed form, by a grid that is refined.
    """
    w, r, _ = small.shape
    blocks = np.stack([small[:, m : m + 2, m : m + 2] for m in range(0, r, 2)], axis=1)  # [w, r/2, 2, 2]
    z = (blocks[..., 0, 0] + blocks[..., 1, 1] + 1j * (blocks[..., 1, 0] - blocks[..., 0, 1])) / 2
    distance = np.arange(1, w + 1)
    fitted = np.stack([_wave(z[:, m], distance) for m in range(r // 2)], axis=1)
    out = np.zeros_like(small)
    for m in range(r // 2):
        real, imaginary = fitted[:, m].real, fitted[:, m].imag
        out[:, 2 * m, 2 * m] = out[:, 2 * m + 1, 2 * m + 1] = real
        out[:, 2 * m + 1, 2 * m], out[:, 2 * m, 2 * m + 1] = imaginary, -imaginary
    return out


def _wave(z: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The nearest a (rho e^{i theta})^distance to complex numbers."""
    centre, width = np.array([0.0, 0.5]), np.array([np.pi, 0.5])
    for _ in range(ROUNDS):
        angles = np.linspace(centre[0] - width[0], centre[0] + width[0], ANGLES)
        decays = np.clip(np.linspace(centre[1] - width[1], centre[1] + width[1], DECAYS), 1e-3, 1.0)
        basis = (decays[:, None] * np.exp(1j * angles))[..., None] ** distance  # [decays, angles, w]
        gain = np.abs(basis.conj() @ z) ** 2 / (np.abs(basis) ** 2).sum(-1)
        best = np.unravel_index(gain.argmax(), gain.shape)
        centre = np.array([angles[best[1]], decays[best[0]]])
        width = width * 4 / np.array([ANGLES, DECAYS])
    basis = (centre[1] * np.exp(1j * centre[0])) ** distance
    return basis * (basis.conj() @ z) / (np.abs(basis) ** 2).sum()


def cells_of(matrix: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and values of a sparse matrix in its order."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return rows, matrix.indices, matrix.data


def pick(matrix: Any, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Values of a sparse matrix at pairs `(n,)`; zeros where nothing is."""
    if not len(rows):
        return np.zeros(0)
    found = matrix[rows, columns]
    return np.asarray(found.toarray() if hasattr(found, "toarray") else found, dtype=float).reshape(-1)


def energy(
    tables: Sequence[Any], counts: Sequence[Any], form: Callable[[int, np.ndarray, np.ndarray], np.ndarray]
) -> float:
    """The share that `form(distance - 1, rows, columns)` explains; see `PositionEnergy`."""
    missed = total = 0.0
    for place, (table, count) in enumerate(zip(tables, counts, strict=True)):
        a, b, weight = cells_of(count)
        for start in range(0, len(a), CELLS):
            part = slice(start, start + CELLS)
            true = pick(table, a[part], b[part])
            missed += float(weight[part] @ (true - form(place, a[part], b[part])) ** 2)
            total += float(weight[part] @ true**2)
    return 1 - missed / total if total else 0.0


def explained(
    tables: Sequence[Any], whole: Any, counts: Sequence[Any], left: np.ndarray, right: np.ndarray
) -> PositionEnergy:
    """All forms on the same cells."""
    small = cores(tables, left, right)
    turned, one, kappa = rotations(small), left.T @ (whole @ right), biases(tables, whole, counts)

    def low_rank(core: Callable[[int], np.ndarray]) -> float:
        # Cells of a distance come one after the other.
        side = lru_cache(1)(lambda at: left @ core(at))
        return energy(tables, counts, lambda at, a, b: np.einsum("ij,ij->i", side(at)[a], right[b]))

    return PositionEnergy(
        none=energy(tables, counts, lambda _, a, b: pick(whole, a, b)),
        additive=energy(tables, counts, lambda at, a, b: pick(whole, a, b) + kappa[at]),
        tucker=low_rank(lambda at: small[at]),
        rotary=low_rank(lambda at: turned[at]),
        whole=low_rank(lambda _: one),
        rank=left.shape[1],
    )
