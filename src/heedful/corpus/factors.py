"""A matrix of associations as a product of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from heedful._checks import check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._result import Result

__all__ = ["Factors", "directional", "symmetric"]

# Up to this size, and where most of the rank is wanted, all of the spectrum is computed.
DENSE = 1000
# A block of the basis has one column for so many components, and this many at least.
SHARE, LEAST = 5, 10
STEPS = 16


@dataclass(frozen=True)
class Factors(Result):
    """Queries and keys whose inner products are associations, `query @ key.T`.

    Attributes:
        query, key: `(V, rank)` in float64.
        values: singular values, falling; of a symmetric matrix eigenvalues, falling in size, whose signs are in the keys.
        energy: the share of the matrix's sum of squares that they reproduce.
    """

    query: np.ndarray
    key: np.ndarray
    values: np.ndarray
    energy: float

    _not = ("query", "key")

    def matrix(self) -> np.ndarray:
        """`query @ key.T`, `(V, V)`, dense."""
        return self.query @ self.key.T

    def __str__(self) -> str:
        return f"{self.query.shape[0]} words, rank {len(self.values)}: {self.energy:.1%} of the squared associations"


def directional(matrix: Any, rank: int, *, power: float = 0.5, seed: int = 0, steps: int = STEPS) -> Factors:
    r"""Queries of later tokens and keys of earlier ones, from associations D with rows of earlier and columns of later tokens.

    $$D \approx U \Sigma V^T, \qquad \mathrm{key} = U \Sigma^{p}, \quad \mathrm{query} = V \Sigma^{1 - p}, \qquad
    \mathrm{query}\; \mathrm{key}^T \approx D^T$$

    A row of the product is a token that looks back, a column what it looks at. The decomposition is truncated: the best of this
    rank (Eckart & Young 1936). Large matrices are decomposed on the space that a random block $R$ and its images $(D D^T)^k D R$, k up to
    `steps`, span (Musco & Musco 2015, algorithm 2): as many products as power iterations take, and far nearer, which matters where singular values
    lie close to one another. The largest entry of each column of U is positive, so that equal seeds give equal signs.

    Args:
        matrix: `(V, V)`, sparse or dense.
        rank: how many components to keep.
        power: p, the share of singular values that goes to the keys.
        seed: of the random block.
        steps: how many images of the block; more make later components exact.

    >>> import numpy as np
    >>> D = np.array([[0.0, 2.0], [1.0, 3.0]])
    >>> factors = directional(D, 2)
    >>> np.allclose(factors.query @ factors.key.T, D.T)
    True
    """
    check_number(least=0, most=1, power=power)
    u, values, v = svd(matrix, rank, seed=seed, steps=steps)
    return Factors(v * values ** (1 - power), u * values**power, values, _energy(values, matrix))


def symmetric(matrix: Any, rank: int, *, power: float = 0.5, seed: int = 0, steps: int = STEPS) -> Factors:
    r"""Queries and keys of a symmetric matrix, which needs both: it has negative eigenvalues, and no real W gives $S = W W^T$.

    $$S = U \Lambda U^T, \qquad \mathrm{query} = U |\Lambda|^{1 - p}, \quad \mathrm{key} = U |\Lambda|^{p} \mathrm{sign}(\Lambda), \qquad p = \tfrac12$$

    The components of largest $|\lambda|$ are kept. Taking $W = U \Lambda_+^{1/2}$ for both leaves out the squares of all negative
    eigenvalues: a fifth to a third of the whole for matrices of word associations.

    >>> import numpy as np
    >>> S = np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> factors = symmetric(S, 2)
    >>> np.allclose(factors.query @ factors.key.T, S), factors.values.round(6).tolist()
    (True, [2.0, -2.0])
    """
    check_number(least=0, most=1, power=power)
    matrix = _square(matrix)
    check_whole(1, matrix.shape[0], rank=rank)
    check_whole(0, seed=seed, steps=steps)
    if abs(matrix - matrix.T).max() > 1e-9 * max(abs(matrix).max(), 1e-300):
        raise InvalidArgument("the matrix is not symmetric; take directional(), or counts(directed=False)")
    if _is_small(matrix, rank):
        values, vectors = torch.linalg.eigh(torch.from_numpy(_dense(matrix)))
    else:
        basis, images = _space(matrix, rank, seed, steps)
        # Equal halves: rounding must not make the small matrix asymmetric.
        small = basis.T @ images
        values, vectors = torch.linalg.eigh((small + small.T) / 2)
        vectors = basis @ vectors
    # Largest first; of a pair +x, -x the positive one, also where rounding says otherwise.
    order = np.lexsort((-values.numpy(), -np.round(abs(values.numpy()), 12)))[:rank]
    chosen, u = values.numpy()[order], _signed(vectors.numpy()[:, order])[0]
    size = abs(chosen)
    return Factors(u * size ** (1 - power), u * size**power * np.sign(chosen), chosen, _energy(chosen, matrix))


def svd(matrix: Any, rank: int, *, seed: int = 0, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U `(n, rank)`, falling singular values and V `(m, rank)` of a sparse or dense matrix, with signs fixed."""
    matrix = _matrix(matrix)
    check_whole(1, min(matrix.shape), rank=rank)
    check_whole(0, seed=seed, steps=steps)
    if _is_small(matrix, rank):
        u, values, vh = torch.linalg.svd(torch.from_numpy(_dense(matrix)), full_matrices=False)
    else:
        basis, images = _space(matrix, rank, seed, steps)
        small, values, vh = torch.linalg.svd(images.T, full_matrices=False)
        u = basis @ small
    left, right = _signed(u.numpy()[:, :rank], vh.numpy().T[:, :rank])
    return left, values.numpy()[:rank].copy(), right


def _space(matrix: Any, rank: int, seed: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An orthonormal basis Q `(n, some)` of a space that holds the largest left singular vectors, nearly, and D^T Q."""
    least = min(matrix.shape)
    block = min(max(-(-rank // SHARE), LEAST), least)
    # Enough for the rank, and no more than there are dimensions.
    count = min(max(steps + 1, -(-rank // block) + 1), least // block)
    draw = np.random.default_rng(seed)
    across = matrix.T.tocsr() if hasattr(matrix, "tocsr") else matrix.T
    basis = torch.empty(matrix.shape[0], block * count, dtype=torch.float64)
    images = torch.empty(matrix.shape[1], block * count, dtype=torch.float64)
    last = torch.from_numpy(draw.standard_normal((matrix.shape[1], block)))
    for at in range(count):
        before, part = basis[:, : at * block], slice(at * block, (at + 1) * block)
        new = _times(matrix, last)
        scale = torch.linalg.norm(new)
        new, small = torch.linalg.qr(new - before @ (before.T @ new))
        spent = small.diagonal().abs() <= 1e-12 * scale
        if spent.any():
            # All directions are there: others keep the basis whole.
            others = torch.from_numpy(draw.standard_normal((matrix.shape[0], int(spent.sum()))))
            new[:, spent] = others / torch.linalg.norm(others, dim=0)
            new = torch.linalg.qr(new - before @ (before.T @ new))[0]
        # Again: what is left of a block that adds little is mostly rounding.
        basis[:, part] = torch.linalg.qr(new - before @ (before.T @ new))[0]
        last = images[:, part] = _times(across, basis[:, part])
    return basis, images


def _times(matrix: Any, other: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(matrix @ other.numpy()))


def _signed(u: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    """Columns multiplied so that the largest entry of each column of u is positive."""
    largest = u[abs(u).argmax(axis=0), np.arange(u.shape[1])]
    signs = np.where(largest < 0, -1.0, 1.0)
    return [np.ascontiguousarray(part * signs) for part in (u, *others)]


def _is_small(matrix: Any, rank: int) -> bool:
    least = min(matrix.shape)
    return least <= DENSE or 2 * rank >= least


def _matrix(matrix: Any) -> Any:
    """A sparse or dense matrix of finite numbers in float64."""
    matrix = (
        matrix.tocsr().astype(np.float64) if hasattr(matrix, "tocsr") else np.array(matrix, dtype=np.float64, ndmin=1)
    )
    values = matrix.data if hasattr(matrix, "tocsr") else matrix
    if matrix.ndim != 2 or not np.isfinite(values).all():
        raise InvalidArgument(f"a matrix of finite numbers is expected; got shape {matrix.shape}")
    return matrix


def _square(matrix: Any) -> Any:
    matrix = _matrix(matrix)
    if matrix.shape[0] != matrix.shape[1]:
        raise InvalidArgument(f"a square matrix is expected; got shape {matrix.shape}")
    return matrix


def _dense(matrix: Any) -> np.ndarray:
    return matrix.toarray() if hasattr(matrix, "toarray") else matrix


def _energy(values: np.ndarray, matrix: Any) -> float:
    stored = matrix.data if hasattr(matrix, "tocsr") else np.asarray(matrix)
    whole = float((np.asarray(stored, dtype=np.float64) ** 2).sum())
    return float((values**2).sum() / whole) if whole else 1.0
