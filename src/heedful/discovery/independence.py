"""Conditional independence, many questions at a time: Fisher's z on a covariance or on rows, a threshold, d-separation.

Every test answers `run(x, y, z)`: pair k is `x[k]`, `y[k]` given the set `z[k]`, and all sets of one call have the same size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from heedful._checks import check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.discovery.paths import bits, mask_of

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Smallest eigenvalues of a correlation matrix: above the first they are rounding, below the second no data explains them.
_ROUNDING, _IMPOSSIBLE = -1e-8, -1e-2
# What is left of a variable's variance once rounding alone can explain it: 64 roundings of a variance of one.
_NOTHING = 64 * float(np.finfo(np.float64).eps)
# Numbers held at once by one block of tests: 16 MiB. In a table that is kept: 128 MiB.
_BLOCK, _TABLE = 1 << 21, 1 << 24


class Decisions(NamedTuple):
    """The answers of one call of a test, one entry per question.

    `rho` is the partial correlation, `log_p` the natural logarithm of the p-value, `independent` the decision. Where
    `testable` is false nothing could be decided: `rho` is 0, `log_p` 0, and `independent` false, so that the edge stays.
    """

    rho: Floats
    log_p: Floats
    independent: Bools
    testable: Bools


class IndependenceTest(Protocol):
    """What a learner needs: the number of variables, and answers for arrays `x [k]`, `y [k]`, `z [k, r]`."""

    @property
    def n(self) -> int: ...

    @property
    def alpha(self) -> float | None: ...

    @property
    def samples(self) -> int | None: ...

    def run(self, x: Ints, y: Ints, z: Ints) -> Decisions: ...


def table(values: Any, name: str) -> Floats:
    """A matrix of finite numbers, from an array, a tensor or a data frame."""
    try:
        matrix = np.array(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values, np.float64)
    except (TypeError, ValueError):
        kinds = getattr(values, "dtypes", {}).items()
        text = [repr(str(column)) for column, kind in kinds if getattr(kind, "kind", "O") not in "biuf"]
        columns = f"; column{'s' * (len(text) > 1)} {', '.join(text)} must be left out or made numbers" if text else ""
        raise InvalidArgument(f"{name} must be a table of numbers; got {type(values).__name__}{columns}") from None
    if matrix.ndim != 2:
        raise InvalidArgument(f"{name} must be a table of numbers, with rows and columns; got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise InvalidArgument(f"{name} holds {int((~np.isfinite(matrix)).sum())} values that are not finite")
    return matrix


def log_p_value(rho: ArrayLike, samples: int, size: int) -> Floats:
    r"""Logarithm of Fisher's two-sided p-value of partial correlations given `size` variables.

    $z = \operatorname{atanh}(\rho)\sqrt{N - |Z| - 3}$, $\ln p = \ln 2 + \ln\Phi(-|z|)$; it stays finite where `2 (1 - cdf)`
    has long become 0. $|\rho| \ge 1$ gives $-\infty$.

    >>> from heedful.discovery import log_p_value
    >>> log_p_value([0.0, 0.5, 1.0], samples=103, size=0).round(3)
    array([  0.   , -17.047,    -inf])
    """
    freedom = samples - size - 3
    if freedom <= 0:
        raise InvalidArgument(f"Fisher's z needs samples > size + 3; got samples = {samples}, size = {size}")
    with np.errstate(divide="ignore"):
        z = np.arctanh(np.minimum(np.abs(np.asarray(rho, np.float64)), 1.0)) * math.sqrt(freedom)
    tail = torch.special.log_ndtr(torch.from_numpy(np.ascontiguousarray(-z).reshape(-1)))
    log_p: Floats = np.minimum(tail.numpy().reshape(z.shape) + math.log(2), 0.0)
    return log_p


def correlation(covariance: ArrayLike) -> Floats:
    r"""Checks a covariance matrix and scales it: $R_{ij} = C_{ij} / \sqrt{C_{ii} C_{jj}}$, in float64.

    A variable without variance gets correlation 0 with all others. A matrix far from positive semidefinite is refused.

    >>> from heedful.discovery import correlation
    >>> correlation([[4.0, 1.0], [1.0, 1.0]])
    array([[1. , 0.5],
           [0.5, 1. ]])
    """
    matrix = table(covariance, "covariance")
    if matrix.shape[0] != matrix.shape[1]:
        raise InvalidArgument(f"covariance must be square; got shape {matrix.shape}. For data use discover(data=...)")
    gap = np.abs(matrix - matrix.T).max(initial=0.0)
    if gap > 1e-6 * max(np.abs(matrix).max(initial=0.0), 1e-300):
        raise InvalidArgument(f"covariance must be symmetric; C and its transpose differ by up to {gap:.3g}")
    variance = matrix.diagonal()
    if (variance < 0).any():
        at = int(np.argmin(variance))
        raise InvalidArgument(f"variances must not be negative; variable {at} has {variance[at]:.3g}")
    scale = np.zeros_like(variance)
    np.divide(1.0, np.sqrt(variance), out=scale, where=variance > 0)
    R = (matrix + matrix.T) / 2 * scale[:, None] * scale[None, :]
    if np.abs(R).max(initial=0.0) > 1 + 1e-6:
        i, j = np.unravel_index(np.abs(R).argmax(), R.shape)
        raise InvalidArgument(
            f"this is no covariance: variables {i} and {j} would have correlation {R[i, j]:.3g}, beyond 1"
        )
    np.clip(R, -1.0, 1.0, out=R)
    np.fill_diagonal(R, 1.0)
    least = indefiniteness(R)
    if least < _IMPOSSIBLE:
        raise InvalidArgument(
            f"this is no covariance: the smallest eigenvalue of its correlation matrix is {least:.3g}, and that of data is never "
            "negative; compute it from rows without missing values, or give the rows themselves as data"
        )
    return R


def indefiniteness(R: Floats) -> float:
    """The smallest eigenvalue of a correlation matrix where it is negative beyond rounding, else 0.

    >>> round(indefiniteness(np.array([[1, 0.9, -0.9], [0.9, 1, 0.9], [-0.9, 0.9, 1]])), 3)
    -0.8
    """
    least = float(np.linalg.eigvalsh(R)[0]) if len(R) else 0.0
    return least if least < _ROUNDING * len(R) else 0.0


class _Partial:
    """Partial correlations by `_block`, for as many questions at a time as memory is meant for."""

    n: int
    _numbers: Callable[[int], int]  # held for one question, by the size of its set
    _block: Callable[[Ints, Ints, Ints], tuple[Floats, Bools]]

    def partial(self, x: Ints, y: Ints, z: Ints) -> tuple[Floats, Bools]:
        r"""$\rho_{xy \cdot Z}$ `[k]`, and whether it is defined: false where Z fixes x or y already."""
        step = max(1, _BLOCK // self._numbers(z.shape[1]))
        starts = range(0, max(len(x), 1), step)
        parts = [self._block(x[at : at + step], y[at : at + step], z[at : at + step]) for at in starts]
        return np.concatenate([rho for rho, _ in parts]), np.concatenate([known for _, known in parts])


class _Fisher(_Partial):
    samples: int
    alpha: float

    def _set(self, samples: int, alpha: float) -> None:
        check_whole(4, samples=samples)  # Fisher's z divides by N - 3
        check_number(0, 1, alpha=alpha)
        self.samples, self.alpha = int(samples), float(alpha)

    def run(self, x: Ints, y: Ints, z: Ints) -> Decisions:
        if self.samples - z.shape[1] - 3 <= 0:
            none = np.zeros(len(x), bool)
            return Decisions(np.zeros(len(x)), np.zeros(len(x)), none, none)
        rho, known = self.partial(x, y, z)
        log_p = np.where(known, log_p_value(rho, self.samples, z.shape[1]), 0.0)
        return Decisions(rho, log_p, known & (log_p > math.log(self.alpha)), known)


class _Matrix(_Partial):
    r"""By elimination of Z in the matrix of (Z, x, y), one variable for all questions at once: what is left of x and y is the
    Schur complement S, and $\rho = S_{xy} / \sqrt{S_{xx} S_{yy}}$. A variable of Z that the others determine is passed over.
    """

    def __init__(self, covariance: ArrayLike) -> None:
        self.R = correlation(covariance)
        self.R.flags.writeable = False
        self.n = len(self.R)

    def _numbers(self, size: int) -> int:
        return (size + 2) ** 2

    def _block(self, x: Ints, y: Ints, z: Ints) -> tuple[Floats, Bools]:
        nodes = np.concatenate([z.T, x[None], y[None]])  # [r + 2, k]
        left = self.R[nodes[:, None], nodes[None, :]]  # [r + 2, r + 2, k]
        for at in range(z.shape[1]):
            row = left[at, at + 1 :]
            factor = row / np.where(left[at, at] > _NOTHING, left[at, at], np.inf)
            left[at + 1 :, at + 1 :] -= factor[:, None] * row[None, :]
        return _cosine(left[-2, -1], left[-2, -2], left[-1, -1], np.sqrt)


class FisherZ(_Matrix, _Fisher):
    r"""Fisher's z test of $\rho_{xy \cdot Z} = 0$ on a covariance or correlation matrix (Fisher 1924).

    Independent iff $p > \alpha$ with $p = 2\Phi(-|\operatorname{atanh}\rho|\sqrt{N - |Z| - 3})$. With $N - |Z| - 3 \le 0$, or where Z
    fixes x or y already, nothing can be tested: the pair counts as dependent. The covariance of attention is no sample
    covariance, so there a p-value is a scale for a threshold and no error rate.

    Args:
        covariance: `[n, n]`, symmetric.
        samples: N, how many draws the covariance stands for; at least 4.
        alpha: level in (0, 1).

    >>> import numpy as np
    >>> from heedful.discovery import FisherZ
    >>> chain = FisherZ([[1, 0.8, 0.64], [0.8, 1, 0.8], [0.64, 0.8, 1]], samples=100, alpha=0.01)
    >>> chain.run(np.array([0, 0]), np.array([2, 1]), np.array([[1], [2]])).independent
    array([ True, False])
    """

    def __init__(self, covariance: ArrayLike, samples: int, alpha: float = 0.01) -> None:
        super().__init__(covariance)
        self._set(samples, alpha)


class RowFisherZ(_Fisher):
    r"""Fisher's z test whose partial correlations are cosines between rows, for $C = A A^\top$.

    $\rho_{xy \cdot Z} = \cos(r_x, r_y)$ with $r_v = a_v$ minus its projection on the rows of Z (Gram-Schmidt, twice): the condition number
    of A counts, not its square. Use it for attention, whose $A A^\top$ is near singular.

    Args:
        rows: `[n, m]`, one row per variable.
        samples: N; at least 4.
        alpha: level in (0, 1).
    """

    def __init__(self, rows: ArrayLike, samples: int, alpha: float = 0.01) -> None:
        matrix = table(rows, "rows")
        # Only angles matter: an orthogonal change of axes leaves min(n, m) numbers per row.
        if matrix.shape[1] > matrix.shape[0] > 0:
            matrix = np.asarray(np.linalg.qr(matrix.T, mode="r")).T
        norm = np.linalg.norm(matrix, axis=1, keepdims=True)
        self.rows: Floats = np.divide(matrix, norm, out=np.zeros_like(matrix), where=norm > 0)
        self.rows.flags.writeable = False
        self.n = len(self.rows)
        self._set(samples, alpha)

    def _numbers(self, size: int) -> int:
        return (size + 2) * max(self.rows.shape[1], 1)

    @cached_property
    def _given_one(self) -> Floats:
        """[z, x, y]: all partial correlations given a single variable; NaN where undefined."""
        rho = np.full((self.n,) * 3, np.nan)
        for z, row in enumerate(self.rows):
            rest = self._off(self.rows, [np.broadcast_to(row, self.rows.shape)])
            length = np.linalg.norm(rest, axis=1)
            known = np.flatnonzero(length > _NOTHING)
            rest = rest[known] / length[known, None]
            rho[z][np.ix_(known, known)] = rest @ rest.T
        return np.clip(rho, -1.0, 1.0)

    def _block(self, x: Ints, y: Ints, z: Ints) -> tuple[Floats, Bools]:
        if z.shape[1] == 1 and self.n**3 <= _TABLE:
            rho = self._given_one[z[:, 0], x, y]
            return np.nan_to_num(rho), ~np.isnan(rho)
        basis: list[Floats] = []
        for column in z.T:
            rest = self._off(self.rows[column], basis)
            length = np.linalg.norm(rest, axis=1, keepdims=True)
            basis.append(np.divide(rest, length, out=np.zeros_like(rest), where=length > _NOTHING))
        a, b = self._off(self.rows[x], basis), self._off(self.rows[y], basis)
        # Lengths here, variances in a matrix: what rounding leaves of a row is 1e-14, not its square.
        return _cosine(np.einsum("ki,ki->k", a, b), np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))

    @staticmethod
    def _off(rows: Floats, basis: list[Floats]) -> Floats:
        for _ in range(2):
            for axis in basis:
                rows = rows - np.einsum("ki,ki->k", rows, axis)[:, None] * axis
        return rows


class RhoThreshold(_Matrix):
    r"""Independent iff $|\rho_{xy \cdot Z}| < \varepsilon$: for a covariance known exactly. It has no p-values: `log_p` is 0 or -inf."""

    alpha = None
    samples = None

    def __init__(self, covariance: ArrayLike, eps: float = 1e-9) -> None:
        super().__init__(covariance)
        check_number(0, 1, eps=eps)
        self.eps = float(eps)

    def run(self, x: Ints, y: Ints, z: Ints) -> Decisions:
        rho, known = self.partial(x, y, z)
        independent = known & (np.abs(rho) < self.eps)
        return Decisions(rho, np.where(independent | ~known, 0.0, -np.inf), independent, known)


class DSeparation:
    """The truth: d-separation in a known graph, given the selection variables as well.

    Args:
        parents: `parents[v]` are the parents of node v.
        observed: the nodes a learner sees, in its order; all that are neither latent nor selection by default.
        latent: nodes that nobody sees; the rest by default.
        selection: nodes that were conditioned on when the sample was taken.

    >>> from heedful.discovery import DSeparation
    >>> collider = DSeparation([[], [], [0, 1]])
    >>> collider.separated(0, 1, []), collider.separated(0, 1, [2])
    (True, False)
    """

    alpha = None
    samples = None

    def __init__(
        self,
        parents: Sequence[Iterable[int]],
        observed: Sequence[int] | None = None,
        latent: Iterable[int] | None = None,
        selection: Iterable[int] = (),
    ) -> None:
        count = len(parents)
        self.parents = tuple(tuple(sorted({int(one) for one in each})) for each in parents)
        hidden, chosen = set(latent or ()), tuple(int(one) for one in selection)
        if observed is None:
            observed = [v for v in range(count) if v not in hidden and v not in chosen]
        self.observed, self.selection = tuple(int(v) for v in observed), chosen
        strange = {*self.observed, *chosen, *hidden, *(p for each in self.parents for p in each)} - set(range(count))
        if strange:
            raise InvalidArgument(f"nodes must be 0 ... {count - 1}; got {sorted(strange)}")
        if len(set(self.observed)) < len(self.observed) or set(self.observed) & ({*chosen} | hidden):
            raise InvalidArgument("observed nodes must be distinct and neither latent nor selection variables")
        self._up = [mask_of(each) for each in self.parents]
        self._down = [mask_of(v for v in range(count) if self._up[v] >> u & 1) for u in range(count)]
        self._ancestors = list(self._up)
        for via in range(count):
            for v in range(count):
                if self._ancestors[v] >> via & 1:
                    self._ancestors[v] |= self._ancestors[via]
        if any(self._ancestors[v] >> v & 1 for v in range(count)):
            raise InvalidArgument("parents must form a graph without cycles")
        self.n = len(self.observed)
        self._selected = mask_of(chosen)
        self._seen: dict[tuple[int, int], int] = {}

    def separated(self, x: int, y: int, z: Iterable[int]) -> bool:
        """Whether observed x and y are d-separated by z and the selection variables."""
        conditions = self._selected | mask_of(self.observed[one] for one in z)
        return not self._reached(self.observed[x], conditions) >> self.observed[y] & 1

    def run(self, x: Ints, y: Ints, z: Ints) -> Decisions:
        questions = zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
        apart = np.array([self.separated(*question) for question in questions], bool)
        return Decisions(np.where(apart, 0.0, 1.0), np.where(apart, 0.0, -np.inf), apart, np.ones(len(apart), bool))

    def _reached(self, x: int, conditions: int) -> int:
        """Every node with an open path from x (Bayes ball on bit sets)."""
        known = self._seen.get((x, conditions))
        if known is not None:
            return known
        opens = conditions
        for v in bits(conditions):
            opens |= self._ancestors[v]
        # `rising`: nodes entered from a child; `falling`: entered from a parent.
        rising, falling, new_rising, new_falling = 0, 0, 1 << x, 0
        while new_rising or new_falling:
            rising, falling = rising | new_rising, falling | new_falling
            up = down = 0
            for v in bits(new_rising & ~conditions):
                up |= self._up[v]
                down |= self._down[v]
            for v in bits(new_falling):
                if not conditions >> v & 1:
                    down |= self._down[v]
                if opens >> v & 1:
                    up |= self._up[v]
            new_rising, new_falling = up & ~rising, down & ~falling
        if len(self._seen) >= 1 << 16:
            self._seen.clear()
        self._seen[x, conditions] = rising | falling
        return rising | falling


def _cosine(product: Floats, first: Floats, second: Floats, root: Any = np.positive) -> tuple[Floats, Bools]:
    """The cosine of vectors from their product and their lengths, or squared lengths with `root=np.sqrt`."""
    known = (first > _NOTHING) & (second > _NOTHING)
    scale = root(np.where(known, first * second, 1.0))
    return np.where(known, np.clip(product / scale, -1.0, 1.0), 0.0), known
