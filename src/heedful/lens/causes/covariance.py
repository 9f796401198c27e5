"""The covariance over tokens that attention implies when it is read as a linear structural model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heedful._checks import check_choice, is_whole
from heedful._errors import InvalidArgument
from heedful.lens._record import LayerRecord
from heedful.lens.causes.settings import COVARIANCES

Array = NDArray[np.float64]

# Weight of the diagonal in the covariance of the values, which a head's width leaves of low rank.
SHRINKAGE = 0.1
# Rows may miss one by what 16-bit weights lose.
TOLERANCE = 1e-3
# What arithmetic on weights leaves where nothing should be.
ROUNDING = 1e-6
# Below this length a row varies with nothing, so that it is independent of everything.
SMALLEST = 1e-8


def attention_correlation(
    A: Any,
    nodes: Sequence[int] | None = None,
    covariance: str = "attention",
    V: Any = None,
    merge: Sequence[Sequence[int]] | None = None,
    *,
    normalize: bool = False,
) -> Array:
    r"""The correlation of the tokens' outputs under one head: $R_{ij} = C_{ij} / \sqrt{C_{ii} C_{jj}}$ with $C = A A^T$.

    A head gives $Z = A V$. Read as a linear structural model $z = G z + \Lambda u$, that is $A = (I - G)^{-1} \Lambda$ with the
    columns of V for draws of the exogenous u, the tokens have the covariance $A\, C_V A^T$ (Rohekar et al. 2023, section 3).

    Args:
        A: weights `[..., n, n]`, tensors or arrays, rows that sum to one. Negative numbers within 1e-6 of zero count as zero.
        nodes: the tokens to relate, in this order; all by default. Their rows are taken and every column is kept, since a
            column is an exogenous term: cutting it away would not marginalise a token but change the others.
        covariance: `"attention"` is $A A^T$, for white values: the default, since it needs the attention alone and is what the
            paper's authors compute. `"value"` is $A C_V A^T$, with the covariance of the values over the head's
            dimensions, shrunk by 0.1 towards its mean variance. `"output"` is the covariance of Z itself, of rank below the
            head's width. `"centered"` is $A (I - 11^T / n) A^T$, without the part that all rows share by being positive.
        V: values `[..., n, d]`, for `"value"` and `"output"`.
        merge: groups of tokens, each to become one node by the mean of its rows (word pieces); `nodes` then counts groups.
        normalize: accept rows that do not sum to one. R is the same for any positive scale of a row.

    Returns:
        `[..., m, m]`, float64, with ones on the diagonal. Rows that are equal have correlation one. A row that does not vary (an
        even one, centred) has none with any other; tests on it are not decided.

    >>> import numpy as np
    >>> attention_correlation(np.eye(3))
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]])
    >>> attention_correlation([[0.6, 0.8], [0.8, 0.6]], normalize=True).round(2)[0, 1]
    np.float64(0.96)
    """
    return correlation_of(attention_factor(A, nodes, covariance, V, merge, normalize=normalize))


def correlation_of(rows: Array) -> Array:
    """The cosines between rows `[..., m, k]`: `[..., m, m]`."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    rows = np.where(lengths > SMALLEST, rows / np.maximum(lengths, SMALLEST), 0.0)
    R: Array = np.clip(rows @ rows.swapaxes(-1, -2), -1.0, 1.0)
    at = np.arange(R.shape[-1])
    R[..., at, at] = 1.0
    return (R + R.swapaxes(-1, -2)) / 2


def attention_factor(
    A: Any,
    nodes: Sequence[int] | None = None,
    covariance: str = "attention",
    V: Any = None,
    merge: Sequence[Sequence[int]] | None = None,
    *,
    normalize: bool = False,
) -> Array:
    r"""Rows $F$ `[..., m, k]` with $C = F F^T$: what partial correlations are best computed from.

    $F F^T$ squares the condition number, which for attention is large; a test that works on the rows avoids that. Arguments as for
    `attention_correlation`.

    >>> import numpy as np
    >>> attention_factor(np.eye(3), nodes=[2, 0])
    array([[0., 0., 1.],
           [1., 0., 0.]])
    """
    check_choice(COVARIANCES, covariance=covariance)
    A = _square(A)
    n = A.shape[-1]
    groups = [[place] for place in range(n)] if merge is None else [list(group) for group in merge]
    chosen = range(len(groups)) if nodes is None else list(nodes)
    for node in chosen:
        if not is_whole(node) or not 0 <= node < len(groups):
            raise InvalidArgument(f"nodes must be among 0..{len(groups) - 1}; got {node!r}")
    groups = [groups[node] for node in chosen]
    for group in groups:
        if not group or not all(0 <= place < n for place in group):
            raise InvalidArgument(f"a node must merge places among 0..{n - 1}, one or more; got {group}")
    if not groups:
        raise InvalidArgument("there are no nodes; name one or more tokens")
    # Only rows that are asked for matter: those of padding may hold anything.
    _check_rows(A[..., [place for group in groups for place in group], :], groups, normalize)
    rows = np.stack([A[..., group, :].mean(-2) for group in groups], axis=-2)
    if covariance == "attention":
        return rows
    if covariance == "centered":
        return rows - rows.mean(-1, keepdims=True)
    if V is None:
        raise InvalidArgument(f"covariance={covariance!r} needs the values V [..., n, d]")
    V = array(V, "V")
    if V.ndim < 2 or V.shape[-2] != n or V.shape[-1] < 2:
        raise InvalidArgument(f"V must be values [..., {n}, d] with d > 1; got shape {V.shape}")
    if not np.isfinite(V).all():
        raise InvalidArgument("V holds numbers that are not finite")
    if covariance == "value":
        return rows @ _root(V)
    width = V.shape[-1]
    if len(groups) + 2 > width - 1:
        raise InvalidArgument(
            f"covariance='output' has rank {width - 1} at most, the head's width less one, which {len(groups)} nodes exhaust; "
            "take fewer nodes, or covariance='attention'"
        )
    Z = rows @ V
    return np.asarray((Z - Z.mean(-1, keepdims=True)) / np.sqrt(width - 1))


def sem_weights(A: Any) -> Array:
    r"""What earlier tokens give to later ones in causal attention, exactly: $G = I - D A^{-1}$, $D = \mathrm{diag}(A)$.

    For lower triangular A with a positive diagonal, $z_i = \sum_{j<i} G_{ij} z_j + A_{ii} v_i$ holds for the outputs $z = A v$ of the
    head, whatever the values: `[..., n, n]` in, `[..., n, n]` out, float64, by a triangular system and no inverse. Ours; the
    paper stops at $A = (I - G)^{-1} D$.

    >>> import numpy as np
    >>> sem_weights([[1.0, 0.0], [0.4, 0.6]])
    array([[0. , 0. ],
           [0.4, 0. ]])
    """
    A = _square(A)
    _check_rows(A, [[place] for place in range(A.shape[-1])], normalize=True)
    diagonal = np.diagonal(A, axis1=-2, axis2=-1)
    if not is_triangular(A):
        raise InvalidArgument(
            "sem_weights: A must be lower triangular, as causal attention is; a later token is attended to"
        )
    if not (diagonal > 0).all():
        raise InvalidArgument("sem_weights: every token must attend to itself; A has a zero on its diagonal")
    lower = torch.from_numpy(np.tril(A))
    D = torch.diag_embed(torch.from_numpy(diagonal.copy()))
    mixed = torch.linalg.solve_triangular(lower.mT, D, upper=True).mT
    return np.asarray(torch.eye(A.shape[-1], dtype=torch.float64) - mixed)


def is_triangular(A: Array) -> bool:
    """Whether no token attends to a later one, but for rounding."""
    return bool((np.abs(np.triu(A, 1)) <= 1e-12).all())


def weights_of(record: LayerRecord, sequence: int = 0) -> Array:
    """The weights of one sequence, `[heads, n, n]`, computed anew in float64 from the queries and keys that were recorded.

    Weights in float32 carry a relative error of 1e-7 already, which partial correlations enlarge a thousand times.

    >>> import torch
    >>> from heedful.lens import observe
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> weights_of(observe(layer, torch.randn(1, 5, 8))[0]).shape
    (2, 5, 5)
    """
    tensors = {name: x.double() if x.is_floating_point() else x for name, x in dict(record._tensors).items()}
    return np.asarray(replace(record, _tensors=tensors).weights_of(sequence=sequence))


def values_of(record: LayerRecord, sequence: int = 0) -> Array:
    """The values of one sequence, `[heads, n, d]` in float64, shared ones repeated."""
    values = record.values[sequence].double()
    return np.asarray(values.repeat_interleave(record.heads // record.key_heads, 0))


def array(x: Any, name: str) -> Array:
    """Numbers of a tensor or an array, in float64."""
    try:
        return x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} must be real numbers; got {type(x).__name__}") from None


def _square(A: Any) -> Array:
    A = array(A, "A")
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or not A.shape[-1]:
        raise InvalidArgument(
            f"A must be attention weights [..., n, n], queries and keys the same; got shape {A.shape}"
        )
    return np.where((A < 0) & (A >= -ROUNDING), 0.0, A)


def _check_rows(rows: Array, groups: list[list[int]], normalize: bool) -> None:
    places = [place for group in groups for place in group]

    def first(bad: Any) -> int:
        return places[int(np.argwhere(bad)[0][-1])]

    if not np.isfinite(rows).all():
        raise InvalidArgument(
            f"A holds numbers that are not finite, in the row of token {first(~np.isfinite(rows).all(-1))}"
        )
    if (rows < 0).any():
        raise InvalidArgument(f"A must not be negative; the row of token {first((rows < 0).any(-1))} is")
    sums = rows.sum(-1)
    if not (sums > 0).all():
        raise InvalidArgument(f"token {first(sums <= 0)} attends to nothing; leave it out of the nodes")
    wrong = np.abs(sums - 1) > TOLERANCE
    if wrong.any() and not normalize:
        raise InvalidArgument(
            f"the rows of A must sum to 1; that of token {first(wrong)} sums to {sums[wrong][0]:.4g}. normalize=True accepts it"
        )


def _root(V: Array) -> Array:
    """A square root of the shrunk covariance of the values, `[..., n, n]`."""
    centred = V - V.mean(-1, keepdims=True)
    C = centred @ centred.swapaxes(-1, -2) / (V.shape[-1] - 1)
    variance = np.diagonal(C, axis1=-2, axis2=-1).mean(-1)[..., None, None]
    C = (1 - SHRINKAGE) * C + SHRINKAGE * variance * np.eye(V.shape[-2])
    values, vectors = np.linalg.eigh(C)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :])
