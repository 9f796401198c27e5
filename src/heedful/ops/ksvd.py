r"""Asymmetric kernel SVD (Suykens 2016) of $K = \Phi_q F^T F \Phi_k^T$, without writing K.

Features are `[..., n, p]` and `[..., m, p]`, the sample F is `[..., n', p]`; without a sample $K = \Phi_q \Phi_k^T$. Weights act on
features through the sample: $E = \Phi_q F^T W_e$, $R = \Phi_k F^T W_r$.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KSVD(NamedTuple):
    """Singular triplets, largest first: K is left diag(values) right^T where the rank of K is not above theirs."""

    left: Tensor  # [..., n, s]
    values: Tensor  # [..., s]
    right: Tensor  # [..., m, s]


class Dual(NamedTuple):
    """Dual variables of least norm, and how far the weights made of them are from those given, relative to their norm."""

    h_e: Tensor  # [..., n, s]
    h_r: Tensor  # [..., m, s]
    residual_e: Tensor  # [...], of W_e, which h_r makes
    residual_r: Tensor  # [...], of W_r, which h_e makes


class Pair(NamedTuple):
    """Weights W_e and W_r, or scores E and R."""

    e: Tensor
    r: Tensor


def ksvd(query: Tensor, key: Tensor, sample: Tensor | None = None, rank: int | None = None) -> KSVD:
    """Exact singular triplets in O((n + m + n') p^2), at most p of them.

    With thin factors F = Q T, Phi_q T^T = Q_a R_a and Phi_k T^T = Q_b R_b, the triplets of K are those of R_a R_b^T.

    >>> import torch
    >>> from heedful.ops.ksvd import ksvd
    >>> a, b = torch.randn(2, 50, 3, dtype=torch.float64)
    >>> ksvd(a, b).values.allclose(torch.linalg.svdvals(a @ b.mT)[:3])
    True
    """
    if sample is not None:
        triangle = torch.linalg.qr(sample, mode="r")[1]
        query, key = query @ triangle.mT, key @ triangle.mT
    (q_a, r_a), (q_b, r_b) = torch.linalg.qr(query), torch.linalg.qr(key)
    u, values, vh = torch.linalg.svd(r_a @ r_b.mT, full_matrices=False)
    rank = values.shape[-1] if rank is None else min(rank, values.shape[-1])
    return KSVD(q_a @ u[..., :rank], values[..., :rank], q_b @ vh.mT[..., :rank])


def primal_weights(h_e: Tensor, h_r: Tensor, query: Tensor, key: Tensor, sample: Tensor | None = None) -> Pair:
    """From dual to primal: W_e = F Phi_k^T H_r and W_r = F Phi_q^T H_e."""
    return Pair(lifted(key.mT @ h_r, sample), lifted(query.mT @ h_e, sample))


def dual_scores(h_e: Tensor, h_r: Tensor, query: Tensor, key: Tensor, sample: Tensor | None = None) -> Pair:
    """The dual model E = K H_r, R = K^T H_e, which is self-attention with the values H_r, and what that leaves out."""
    weights = primal_weights(h_e, h_r, query, key, sample)
    return Pair(query @ lowered(weights.e, sample), key @ lowered(weights.r, sample))


def dual_variables(w_e: Tensor, w_r: Tensor, query: Tensor, key: Tensor, sample: Tensor | None = None) -> Dual:
    """From primal to dual: H_r = pinv(F Phi_k^T) W_e, H_e = pinv(F Phi_q^T) W_r, of least norm.

    `residual` is 0 where the weights lie in the range of F Phi^T. What of them is orthogonal to the rows of F has no part
    in the scores: with at least p independent features the scores of both models agree whatever the residual is.
    """
    triangle = basis = None
    if sample is not None:
        basis, triangle = torch.linalg.qr(sample)
    duals, residuals = [], []
    for phi, w in ((query, w_r), (key, w_e)):
        reduced = phi if triangle is None else phi @ triangle.mT  # F Phi^T = basis reduced^T
        h = torch.linalg.pinv(reduced.mT) @ (w if basis is None else basis.mT @ w)
        image = reduced.mT @ h if basis is None else basis @ (reduced.mT @ h)
        duals.append(h)
        residuals.append(_norm(image - w) / _norm(w))
    return Dual(duals[0], duals[1], residuals[1], residuals[0])


def objective_sum(
    query: Tensor, key: Tensor, w_e: Tensor, w_r: Tensor, weights: Tensor, sample: Tensor | None = None
) -> Tensor:
    r"""$J = \frac12 \mathrm{tr}(E \Lambda E^T) + \frac12 \mathrm{tr}(R \Lambda R^T) - \mathrm{tr}(W_e^T W_r)$, `weights` the diagonal of Lambda.

    J is a quadratic form of (W_e, W_r), so it vanishes at every stationary point; it also vanishes on a whole cone that is none.
    """
    e, r = query @ lowered(w_e, sample), key @ lowered(w_r, sample)
    quadratic = (e.square().sum(dim=-2) + r.square().sum(dim=-2)) * weights
    return quadratic.sum(dim=-1) / 2 - (w_e * w_r).sum(dim=(-2, -1))


def kkt_residual(
    query: Tensor, key: Tensor, w_e: Tensor, w_r: Tensor, weights: Tensor, sample: Tensor | None = None
) -> Tensor:
    r"""How far weights are from a kernel SVD; zero if and only if they are one (`weights` is the diagonal of Lambda).

    $$\rho = \frac{\|A^T E \Lambda - W_r\|^2 + \|B^T R \Lambda - W_e\|^2}{\|W_e\|^2 + \|W_r\|^2}, \qquad A = \Phi_q F^T,\; B = \Phi_k F^T$$

    Weights that are all zero have residual 1.
    """
    pull_e, pull_r = (lifted(phi.mT @ (phi @ lowered(w, sample)), sample) for phi, w in ((query, w_e), (key, w_r)))
    return relative_gap(pull_e * weights[..., None, :], pull_r * weights[..., None, :], w_e, w_r)


def relative_gap(pull_e: Tensor, pull_r: Tensor, w_e: Tensor, w_r: Tensor) -> Tensor:
    """(||pull_e - w_r||^2 + ||pull_r - w_e||^2) / (||w_e||^2 + ||w_r||^2); 1 where the weights are zero."""
    gap = (pull_e - w_r).square().sum(dim=(-2, -1)) + (pull_r - w_e).square().sum(dim=(-2, -1))
    size = (w_e.square() + w_r.square()).sum(dim=(-2, -1))
    return torch.where(size > 0, gap / torch.where(size > 0, size, 1.0), 1.0)


def lowered(w: Tensor, sample: Tensor | None) -> Tensor:
    """Weights as they act on features: F^T W."""
    return w if sample is None else sample.mT @ w


def lifted(z: Tensor, sample: Tensor | None) -> Tensor:
    """F z, back to the rows of the sample."""
    return z if sample is None else sample @ z


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x)
