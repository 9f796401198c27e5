"""How much more often two words occur together than chance would have it, for every pair that does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from heedful._checks import check_choice, check_number
from heedful._errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["association"]

Kind = Literal["ppmi", "pmi", "sppmi", "npmi", "log1p", "log", "conditional"]


def association(
    counts: Any, kind: Kind = "ppmi", *, smoothing: float = 0.75, shift: float = 1, beta: float = 200.0
) -> csr_array:
    r"""A sparse matrix of associations, from counts C of pairs `(V, V)`; only cells with a count are there.

    With row sums $r$, column sums $c$, their total $T$ and $p_b = c_b^\alpha / \sum_j c_j^\alpha$, which for $\alpha = 1$ is
    $c_b / T$:

    | kind | value of a cell |
    |---|---|
    | `pmi` | $\ln \frac{C_{ab}}{r_a\, p_b}$ |
    | `ppmi` | $\max(\mathrm{PMI}, 0)$ |
    | `sppmi` | $\max(\mathrm{PMI} - \ln k, 0)$ |
    | `npmi` | $\mathrm{PMI} / (-\ln (C_{ab} / T))$ |
    | `log1p`, `log` | $\ln(1 + C_{ab})$, $\ln C_{ab}$ |
    | `conditional` | $\ln \frac{C_{ab} + \beta p_b}{r_a + \beta} - \ln \frac{\beta p_b}{r_a + \beta} = \ln \left(1 + \frac{C_{ab}}{\beta p_b}\right)$ |

    In the last row $p_b = c_b / T$, whatever $\alpha$ is. Cells of `pmi`, `npmi` and `log` may be zero and are stored all the same, for a cell
    that is not there means something else: never together. PMI: Church & Hanks 1990; the positive and the shifted one: Levy & Goldberg 2014; smoothing $\alpha$: Levy, Goldberg & Dagan 2015.
    `npmi` is 1 for words that only occur together; a cell that holds the whole total gets 1.

    `conditional` is the logarithm of a smoothed conditional probability over $p_b$, $\ln\frac{C_{ab} + \beta p_b}{r_a + \beta} - \ln p_b$,
    which has a value in every cell: $\ln\frac{\beta}{r_a + \beta}$ where nothing was counted. What is returned is the difference to
    that value, which is zero there, so the matrix stays sparse. To have the whole, add `np.log(beta / (r + beta))[:, None]`, where
    `r = counts.sum(axis=1)`: a number for each row, which a softmax over `b` does not see.

    Args:
        counts: a scipy matrix or an array, such as `Cooccurrence.counts()`; not negative.
        kind: one of the table.
        smoothing: the exponent $\alpha$ of column sums, for the four kinds with PMI in them. 0.75 makes rare contexts weigh less; 1 is exact.
        shift: k of `sppmi`, from 1 on; 1 is `ppmi`.
        beta: how many pairs the prior of `conditional` weighs.

    >>> from scipy.sparse import csr_array
    >>> counts = csr_array([[0.0, 3.0], [1.0, 0.0]])
    >>> association(counts, "pmi", smoothing=1).toarray().round(3)
    array([[0.   , 0.288],
           [1.386, 0.   ]])
    """
    check_choice(Kind, kind=kind)
    check_number(0, most=1, smoothing=smoothing)
    check_number(least=1, shift=shift)
    check_number(0, beta=beta)
    matrix = counted(counts)
    values, columns = matrix.data, matrix.indices
    if kind in ("log", "log1p"):
        matrix.data = np.log(values) if kind == "log" else np.log1p(values)
        return matrix
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    row_sums, column_sums = np.asarray(matrix.sum(axis=1)), np.asarray(matrix.sum(axis=0))
    powers = column_sums ** (1.0 if kind == "conditional" else smoothing)
    share = powers / powers.sum() if len(values) else powers
    if kind == "conditional":
        matrix.data = np.log1p(values / (beta * share[columns]))
        return matrix
    pmi = np.log(values) - np.log(row_sums[rows]) - np.log(share[columns])
    if kind == "npmi":
        surprise = np.log(values.sum()) - np.log(values)
        matrix.data = np.where(surprise > 0, pmi / np.where(surprise > 0, surprise, 1.0), 1.0)
    elif kind == "pmi":
        matrix.data = pmi
    else:
        matrix.data = np.maximum(pmi - (math.log(shift) if kind == "sppmi" else 0.0), 0.0)
        matrix.eliminate_zeros()
    return matrix


def counted(counts: Any) -> Any:
    """A copy in float64, each cell once, zeros left out; what cannot be counts is refused."""
    try:
        from scipy.sparse import csr_array
    except ImportError:
        raise MissingExtra("scipy", "corpus") from None
    matrix = csr_array(counts, dtype=np.float64, copy=True)
    if matrix.ndim != 2:
        raise InvalidArgument(f"counts must be a matrix of shape (rows, columns); got shape {matrix.shape}")
    if not np.isfinite(matrix.data).all() or (matrix.data < 0).any():
        raise InvalidArgument("counts must be finite and not negative; is this an association already?")
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix
