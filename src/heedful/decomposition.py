"""Kernel SVD of asymmetric kernels, in scikit-learn's habits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heedful._checks import check_choice, check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful.bridges.predictors import Transformer
from heedful.bridges.samples import check_is_fitted, validated
from heedful.kernels import Divided, Kernel, Polynomial, Product, Scaled, Sum
from heedful.ops import ksvd

__all__ = ["KernelSVD"]

Array = NDArray[np.float64]
Solver = Literal["auto", "dense", "primal", "nystrom"]

# Kernel entries that are held at once where rows are divided by sums over all points.
CELLS = 2**24

LINEAR = Polynomial(1, scale=1.0)


class KernelSVD(Transformer):
    r"""Singular value decomposition of an asymmetric kernel matrix $K_{ij} = \kappa(A x_i, B z_j)$.

    Two sets of points, or one in two roles: $K = U \Sigma V^T$ with n x m entries, in general neither square nor symmetric nor
    positive, where `KernelPCA` needs all three (Suykens 2016). Of new points

    $$u(x) = \frac{1}{\sigma} \sum_j \kappa(x, z_j)\, v_j, \qquad v(z) = \frac{1}{\sigma} \sum_i \kappa(x_i, z)\, u_i,$$

    which `transform` and `transform_right` compute; on the points of `fit` they give U and V.

    Args:
        n_components: how many singular triplets to keep; all that are not zero by default.
        kernel: a heedful kernel such as `Gaussian(2.0)` or `Softmax()`, `"linear"`, `"precomputed"` (X is K itself), or a callable that
            makes the matrix of two sets of points. Of a kernel whose rows are divided by their sum, the sum is that over the
            z of `fit`, also for new points on either side.
        solver: `"dense"` decomposes K; `"primal"` needs a kernel with finite features (`"linear"`, `Cosine()`, `FeatureMap(...)`) and takes
            O((n + m) p^2) for p features, exactly; `"nystrom"` sees some rows and columns of K alone. `"auto"`
            takes the primal one where there are fewer features than points, else the dense one, and says so in `solver_`.
        random_state: draws the landmarks.
        left, right: matrices A `(p, features of X)` and B `(p, features of Z)`, applied to the points first; with the query
            and key matrices of an attention layer K is that layer's matrix.
        n_landmarks: how many columns `"nystrom"` draws, without replacement; of rows it draws twice as many.

    Attributes:
        singular_values_: `(components,)`, falling.
        left_vectors_, right_vectors_: U `(n, components)` and V `(m, components)`; the largest entry of each column of U is
            positive. Components beyond the rank of K are zero.
        solver_: what `"auto"` came to.

    Nystrom: with rows r and columns c drawn, K is near $K_{:c} K_{rc}^+ K_{r:}$, and equal to it where the rank of $K_{rc}$ is that of K.
    The usual formulas scale the singular vectors of $K_{rc}$ up; ours are the exact ones of the approximation, by thin QR at the
    same order of cost, so that vectors are orthonormal. With as many rows as columns, errors would be large: K is not positive.

    >>> import numpy as np
    >>> from heedful import Gaussian
    >>> from heedful.decomposition import KernelSVD
    >>> X, Z = np.random.default_rng(0).normal(size=(2, 30, 4))
    >>> svd = KernelSVD(5, Gaussian(2.0)).fit(X, Z=Z)
    >>> svd.transform(X[:3]).shape, svd.transform_right(Z[:2]).shape
    ((3, 5), (2, 5))
    """

    _fitted: ClassVar[tuple[str, ...]] = ("n_features_in_", "solver_", "_width_right", "_n_features_out")
    _arrays: ClassVar[tuple[str, ...]] = (
        "singular_values_", "left_vectors_", "right_vectors_", "_left_map", "_right_map", "_rows_at", "_columns_at", "_x", "_z",
    )  # fmt: skip

    def __init__(
        self,
        n_components: int | None = None,
        kernel: Kernel | str | Callable[[Array, Array], Any] = "linear",
        solver: Solver = "auto",
        random_state: Any = None,
        *,
        left: Any = None,
        right: Any = None,
        n_landmarks: int = 100,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.solver = solver
        self.random_state = random_state
        self.left = left
        self.right = right
        self.n_landmarks = n_landmarks

    def fit(self, X: Any, y: Any = None, *, Z: Any = None) -> Self:  # type: ignore[override]
        """Decomposes the kernel between X `(n, features)` and Z `(m, features)`, by default X again; y is ignored."""
        self._check()
        X = validated(self, _array(X))
        _check_not_points(y, X)
        if self._precomputed:
            if Z is not None or self.left is not None or self.right is not None:
                raise InvalidArgument(
                    "kernel='precomputed' takes the matrix as X; there are no points Z, left or right"
                )
            self._width_right, size = X.shape[0], X.shape
        else:
            Z = X if Z is None else _matrix(Z, "Z")
            self._width_right, size = Z.shape[1], (X.shape[0], Z.shape[0])
            self._x, self._z = _projected(X, self.left, "left"), _projected(Z, self.right, "right")
            if isinstance(self._form, Kernel) and self._x.shape[1] != self._z.shape[1]:
                raise InvalidArgument(
                    f"the kernel needs points of one width; got {self._x.shape[1]} for X and {self._z.shape[1]} for Z. left and "
                    "right, matrices, bring both to one"
                )
        self._rows_at, self._columns_at = (np.arange(length) for length in size)
        self.solver_ = self._chosen(min(size))
        if self.solver_ == "dense":
            u, sigma, vh = torch.linalg.svd(torch.from_numpy(self._left(X)), full_matrices=False)
            self._keep(u, sigma, vh.mT, vh.mT, u)
        elif self.solver_ == "primal":
            phi, psi = (torch.from_numpy(side) for side in (self._left(X), self._right(Z)))
            u, sigma, v = ksvd.ksvd(phi, psi)
            self._keep(u, sigma, v, psi.mT @ v, phi.mT @ u)
        else:
            self._nystrom(X, Z)
        return self

    def _nystrom(self, X: Array, Z: Any) -> None:
        """Landmark features a(x) = K(x, c) V~ / sqrt(sigma~), b(z) = K(r, z)^T U~ / sqrt(sigma~), then as if they were the kernel's."""
        draw = _generator(self.random_state)
        # Twice as many rows: the pseudo-inverse of a square sample magnifies what the sample misses without bound.
        for name, count in (("_columns_at", self.n_landmarks), ("_rows_at", 2 * self.n_landmarks)):
            everything = getattr(self, name)
            setattr(self, name, np.sort(draw.choice(everything, min(count, len(everything)), replace=False)))
        # [n, columns] and [m, rows]
        across, down = self._left(X), self._right(X.T if self._precomputed else Z)
        u, sigma, vh = torch.linalg.svd(torch.from_numpy(across[self._rows_at]), full_matrices=False)
        alive = sigma > sigma[0] * max(X.shape[0], down.shape[0]) * torch.finfo(sigma.dtype).eps
        if not alive.any():
            raise InvalidArgument(
                "the kernel is zero at all landmarks, so nothing can be told of it; raise n_landmarks"
            )
        lift_left, lift_right = (side[:, alive] / sigma[alive].sqrt() for side in (vh.mT, u))
        a, b = torch.from_numpy(across) @ lift_left, torch.from_numpy(down) @ lift_right
        left, values, right = ksvd.ksvd(a, b)
        self._keep(left, values, right, lift_left @ (b.mT @ right), lift_right @ (a.mT @ left))

    def _keep(self, u: Tensor, sigma: Tensor, v: Tensor, left_map: Tensor, right_map: Tensor) -> None:
        """The triplets, so that u(x) = left(x) left_map / sigma; components beyond the rank are zero, or left out."""
        size = max(u.shape[0], v.shape[0])
        alive = sigma > sigma[:1] * size * torch.finfo(sigma.dtype).eps
        if not alive.any():
            raise InvalidArgument("the kernel is zero for all these points, so it has no singular vectors; give others")
        count = int(alive.sum()) if self.n_components is None else min(self.n_components, len(sigma))
        largest = u.gather(0, u.abs().argmax(dim=0, keepdim=True))
        sign = torch.where(alive, torch.where(largest[0] < 0, -1.0, 1.0), 0.0).to(u)
        inverse = sign / torch.where(alive, sigma, 1.0)
        self.singular_values_ = torch.where(alive, sigma, 0.0)[:count].numpy()
        self.left_vectors_, self.right_vectors_ = ((part * sign)[:, :count].numpy() for part in (u, v))
        self._left_map, self._right_map = ((part * inverse)[:, :count].numpy() for part in (left_map, right_map))
        self._n_features_out = count

    def fit_transform(self, X: Any, y: Any = None, *, Z: Any = None) -> Array:
        """U, of the points of `fit`."""
        return self.fit(X, y, Z=Z).left_vectors_

    def transform(self, X: Any) -> Array:
        """u(x) for each row of X, `(rows, components)`; for `"precomputed"` a row is k(x, z) over the z of `fit`."""
        check_is_fitted(self)
        return self._left(validated(self, _array(X), reset=False)) @ self._left_map

    def transform_right(self, Z: Any) -> Array:
        """v(z) for each row of Z, `(rows, components)`; for `"precomputed"` a row is k(x, z) over the x of `fit`."""
        check_is_fitted(self)
        Z = _matrix(Z, "Z")
        if Z.shape[1] != self._width_right:
            raise InvalidArgument(f"Z has {Z.shape[1]} columns; expected {self._width_right}, as in fit")
        return self._right(Z) @ self._right_map

    @property
    def _precomputed(self) -> bool:
        return isinstance(self.kernel, str) and self.kernel == "precomputed"

    @property
    def _form(self) -> Kernel | Callable[[Array, Array], Any]:
        return LINEAR if isinstance(self.kernel, str) else self.kernel

    def _left(self, X: Array) -> Array:
        """What `_left_map` acts on: features of x, or its coefficients with the points z that count."""
        if self._precomputed:
            return X[:, self._columns_at]
        X = _projected(X, self.left, "left")
        if self.solver_ != "primal":
            return _between(self._form, X, self._z[self._columns_at], self._z)
        kernel = self._form
        assert isinstance(kernel, Kernel)
        phi, psi = _features(kernel, X, self._z)
        if kernel.traits.division == "count":
            return phi / len(psi)
        total = phi @ psi.sum(axis=0)
        return phi if kernel.traits.division is None else phi / np.where(total == 0, 1.0, total)[:, None]

    def _right(self, Z: Array) -> Array:
        if self._precomputed:
            return Z[:, self._rows_at]
        Z = _projected(Z, self.right, "right")
        if self.solver_ != "primal":
            return _between(self._form, self._x[self._rows_at], Z, self._z).T
        assert isinstance(self._form, Kernel)
        return _features(self._form, self._x[:1], Z)[1]

    def _chosen(self, points: int) -> str:
        size = (
            self._form.feature_size(self._x.shape[1])
            if not self._precomputed and isinstance(self._form, Kernel)
            else None
        )
        if self.solver == "primal" and size is None:
            raise InvalidArgument(
                f"solver='primal' needs a kernel with finite features, such as 'linear', Cosine() or FeatureMap('elu'); got "
                f"{self.kernel!r:.100}"
            )
        if self.solver != "auto":
            return self.solver
        return "primal" if size is not None and size < points else "dense"

    def _load(self, weights: dict[str, Tensor]) -> None:
        if weights:
            raise InvalidArgument(f"it has no tensors {', '.join(weights)}")

    def _check(self) -> None:
        check_choice(Solver, solver=self.solver)
        check_whole(n_landmarks=self.n_landmarks)
        check_whole(optional=True, n_components=self.n_components)
        _generator(self.random_state)
        kernel = self.kernel
        if not isinstance(kernel, Kernel) and not callable(kernel) and kernel not in ("linear", "precomputed"):
            raise InvalidArgument(
                f"kernel must be a heedful kernel such as Gaussian(), 'linear', 'precomputed' or a callable; got {kernel!r:.100}"
            )
        if isinstance(kernel, Kernel) and kernel.of_pairs is not kernel:
            raise InvalidArgument(
                f"{kernel!r} acts on a whole sequence, so a new point has no coefficient; give a kernel of pairs"
            )
        if isinstance(kernel, Kernel) and any(t.dim() and t.shape[0] != 1 for t in kernel.tensors().values()):
            raise InvalidArgument(f"{kernel!r} has parameters per head; give one head's")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = self._precomputed
        return tags


def _between(kernel: Kernel | Callable[[Array, Array], Any], X: Array, Z: Array, everything: Array) -> Array:
    """K(x, z), in float64; rows are divided as they are over all z of `fit`."""
    if not isinstance(kernel, Kernel):
        matrix = _matrix(kernel(X, Z), "what the kernel returns")
        if matrix.shape != (len(X), len(Z)):
            raise InvalidArgument(
                f"the kernel gave shape {matrix.shape} for {len(X)} and {len(Z)} points; expected {(len(X), len(Z))}"
            )
        return matrix
    keys, every = (torch.from_numpy(np.ascontiguousarray(part))[None] for part in (Z, everything))
    step = max(1, CELLS // max(len(Z), len(everything)))
    with torch.no_grad():
        blocks = [_pairs(kernel, part[None], keys, every)[0] for part in torch.from_numpy(X).split(step)]
    return torch.cat(blocks).numpy()


def _pairs(kernel: Kernel, query: Tensor, key: Tensor, every: Tensor) -> Tensor:
    """`[1, Q, K]`: coefficients of some keys, each row divided by what all keys make of it."""
    division = kernel.traits.division
    if kernel.traits.exponential and division == "sum":
        total = kernel.score(query, every).logsumexp(dim=-1, keepdim=True)
        return (kernel.score(query, key) - total).exp()
    if isinstance(kernel, Scaled):
        return kernel.factor * _pairs(kernel.kernel, query, key, every)
    if isinstance(kernel, Sum):
        return _pairs(kernel.left, query, key, every) + _pairs(kernel.right, query, key, every)
    if isinstance(kernel, Product) and not kernel.traits.exponential:
        return _pairs(kernel.left, query, key, every) * _pairs(kernel.right, query, key, every)
    inner = kernel.kernel if isinstance(kernel, Divided) else None
    part = kernel.coefficients(query, key) if inner is None else _pairs(inner, query, key, every)
    if division == "count":
        return part / every.shape[-2]
    if division is None:
        return part
    whole = kernel.coefficients(query, every) if inner is None else _pairs(inner, query, every, every)
    total = whole.sum(dim=-1, keepdim=True)
    return part / total.masked_fill(total == 0, 1.0)


def _features(kernel: Kernel, X: Array, Z: Array) -> tuple[Array, Array]:
    pair = (torch.from_numpy(np.ascontiguousarray(part))[None] for part in (X, Z))
    with torch.no_grad():
        features = kernel.steady_features(*pair)
    assert features is not None
    return features[0][0].numpy(), features[1][0].numpy()


def _array(X: Any) -> Any:
    return X.detach().cpu().numpy() if isinstance(X, Tensor) else X


def _matrix(X: Any, name: str) -> Array:
    """A finite matrix in float64 with rows and columns."""
    try:
        array = np.asarray(_array(X))
        array = array if array.dtype.kind == "c" else array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{name} must be numbers of shape (points, features); got {type(X).__name__}: {error}"
        ) from None
    if array.ndim != 2 or array.size == 0 or array.dtype.kind == "c":
        raise InvalidArgument(f"{name} must be real, of shape (points, features); got {array.dtype} {array.shape}")
    if not np.isfinite(array).all():
        raise InvalidArgument(f"{name} holds NaN or infinity; leave these points out, or fill them in")
    return array


def _projected(X: Array, matrix: Any, name: str) -> Array:
    """X A^T."""
    if matrix is None:
        return X
    matrix = _matrix(matrix, name)
    if matrix.shape[1] != X.shape[1]:
        raise InvalidArgument(
            f"{name} must have shape (width, {X.shape[1]}) for points of {X.shape[1]} features; got {matrix.shape}"
        )
    return X @ matrix.T


def _check_not_points(y: Any, X: Array) -> None:
    """A second set of points given by place would go unnoticed, for scikit-learn has y there."""
    shape: tuple[int, ...] = np.shape(_array(y)) if y is not None and hasattr(y, "shape") else ()
    if len(shape) == 2 and (shape[0] != X.shape[0] or shape[1] == X.shape[1] > 1):
        raise InvalidArgument(
            f"fit ignores its second argument, here of shape {shape}; give points by name: fit(X, Z=Z)"
        )


def _generator(state: Any) -> Any:
    """What `random_state` stands for, as scikit-learn reads it."""
    if state is None or is_whole(state):
        return np.random.RandomState(state)
    if isinstance(state, np.random.RandomState | np.random.Generator):
        return state
    raise InvalidArgument(f"random_state must be None, an integer or a generator of numpy; got {state!r}")
