"""The distance between two Gaussian laws."""

from __future__ import annotations

from typing import Any

import numpy as np

from heedful._errors import InvalidArgument
from heedful.transport._clouds import Array, array


def gaussian_w2(m1: Any, S1: Any, m2: Any, S2: Any) -> float:
    r"""$W_2$ between $N(m_1, S_1)$ and $N(m_2, S_2)$, in closed form (Bures).

    $$W_2^2 = |m_1 - m_2|^2 + \mathrm{tr}\left(S_1 + S_2 - 2 (S_2^{1/2} S_1 S_2^{1/2})^{1/2}\right)$$

    Ours takes the trace as $\min_U |S_1^{1/2} - S_2^{1/2} U|_F^2$ over orthogonal U, which is the same number: of nearly equal laws
    the difference of traces keeps half of the digits alone. Covariances may be singular.

    Args:
        m1, m2: means `(r,)`.
        S1, S2: covariances `(r, r)`, symmetric and without negative eigenvalues.

    >>> gaussian_w2([0.0, 0.0], [[4.0, 0.0], [0.0, 1.0]], [3.0, 0.0], [[4.0, 0.0], [0.0, 25.0]])
    5.0
    """
    first, second = array(m1, "m1", 1), array(m2, "m2", 1)
    if first.shape != second.shape:
        raise InvalidArgument(f"m1 has {len(first)} numbers and m2 {len(second)}; both means must have the same")
    root1, root2 = _root(S1, "S1", len(first)), _root(S2, "S2", len(first))
    u, _, vh = np.linalg.svd(root2 @ root1)
    # In directions that a law does not reach U is what rounding makes of it; of equal laws the identity is the best.
    trace = min(np.square(root1 - root2 @ turn).sum() for turn in (u @ vh, np.eye(len(u))))
    return float(np.sqrt(np.square(first - second).sum() + trace))


def _root(covariance: Any, name: str, size: int) -> Array:
    matrix = array(covariance, name)
    largest = np.abs(matrix).max()
    if matrix.shape != (size, size):
        raise InvalidArgument(f"{name} must be a symmetric matrix of shape {(size, size)}; got shape {matrix.shape}")
    apart = np.abs(matrix - matrix.T)
    if apart.max() > 1e-8 * largest:
        i, j = np.unravel_index(apart.argmax(), apart.shape)
        raise InvalidArgument(
            f"{name} must be a symmetric matrix; {name}[{i}, {j}] = {matrix[i, j]:g} and {name}[{j}, {i}] = {matrix[j, i]:g} differ by "
            f"{apart.max():g}. ({name} + {name}.T) / 2 is symmetric"
        )
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    if values[0] < -1e-8 * max(largest, values[-1]):
        raise InvalidArgument(f"{name} has the negative eigenvalue {values[0]:.3g}; a covariance has none")
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
