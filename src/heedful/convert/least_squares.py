"""Primal layers fitted to the outputs of another layer, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.nn import PrimalAttention

# Sweeps end when one lowers the error by less than this share.
GAIN = 1e-4
SWEEPS = 50

# To choose a ridge, so many are enough.
FEW = 5

# Tried where none is given, relative to the mean square of features.
RIDGES = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5)

Fit = TypeVar("Fit")


class Moments(NamedTuple):
    """Sums over tokens of the products of features Z and targets D: all that least squares needs of the data."""

    total: Tensor  # [Z, D, 1]^T [Z, D, 1], [f + d + 1, f + d + 1]
    size: int  # f

    def __add__(self, other: object) -> Moments:
        assert isinstance(other, Moments)
        return Moments(self.total + other.total, self.size)

    @property
    def mean(self) -> Tensor:
        return self.total[-1, :-1] / self.total[-1, -1]

    @property
    def spread(self) -> Tensor:
        """Products about the means, `[f + d, f + d]`."""
        sums = self.total[-1, :-1]
        return self.total[:-1, :-1] - sums[:, None] * self.mean

    @property
    def gram(self) -> Tensor:
        return self.spread[: self.size, : self.size]

    @property
    def cross(self) -> Tensor:
        return self.spread[: self.size, self.size :]

    @property
    def energy(self) -> Tensor:
        return self.spread[self.size :, self.size :].trace()

    def error(self, matrix: Tensor, bias: Tensor) -> float:
        r"""$\|Z M + b - D\| / \|D - \bar D\|$ of a map that was perhaps fitted to other data."""
        minus = torch.eye(len(bias), dtype=bias.dtype, device=bias.device)
        whole = torch.cat((matrix, -minus, bias[None]))
        missed = (whole * (self.total @ whole)).sum()
        energy = self.energy
        return float((missed.clamp_min(0) / energy).sqrt()) if energy > 0 else 0.0


@torch.no_grad()
def moments(parts: Iterable[tuple[Tensor, Tensor, Tensor | None]], pooled: float = 0.0) -> Moments:
    """Moments of features `[B, n, f]` and targets `[B, n, d]`, of tokens where `keep` `[B, n]` is True, in float64.

    `pooled` is a weight: the mean of each sequence is added as one more token that counts as much as `pooled` times all of
    its tokens.
    """
    total, size = None, 0
    for features, targets, keep in parts:
        both = torch.cat((features.double(), targets.double(), torch.ones_like(targets[..., :1]).double()), dim=-1)
        keep = torch.ones(both.shape[:2], dtype=torch.bool, device=both.device) if keep is None else keep
        rows = both[keep]
        if pooled:
            count = keep.sum(dim=1).clamp_min(1).to(both)
            means = (both * keep[..., None]).sum(dim=1) / count[:, None]
            rows = torch.cat((rows, means * (pooled * count).sqrt()[:, None]))
        total, size = rows.mT @ rows + (0.0 if total is None else total), features.shape[-1]
    if total is None or total[-1, -1] == 0:
        raise InvalidArgument("there are no tokens to fit to; give calibration data that is not all padding")
    return Moments(total, size)


def best(solved: Callable[[float], Fit], error: Callable[[Fit], float], ridge: float | None) -> float:
    """The ridge that was given, or of `RIDGES` the one whose solution has the least error, which falls and then rises."""
    if ridge is not None:
        return ridge
    errors: list[float] = []
    for one in RIDGES:
        errors.append(error(solved(one)))
        if len(errors) > 1 and errors[-1] > errors[-2]:
            break
    return RIDGES[errors.index(min(errors))]


def linear_map(known: Moments, ridge: float) -> tuple[Tensor, Tensor]:
    """The ridge regression D = Z M + b: M `[f, d]` and b `[d]`."""
    matrix = torch.cholesky_solve(known.cross, _factor(known.gram, ridge))
    return matrix, _bias(known, matrix)


def features(layer: PrimalAttention, x: Tensor, keep: Tensor | None) -> Tensor:
    """What W_e and W_r act on, side by side: Phi F^T of every head, `[B, n, 2 * heads * rows]`."""
    query, key, sample = layer.features(x, None if keep is None else ~keep)
    sides = [phi if sample is None else phi @ sample.mT for phi in (query, key)]
    return torch.stack(sides, dim=2).permute(0, 3, 1, 2, 4).flatten(2)  # [B, n, heads, 2, rows]


class Factors(NamedTuple):
    """A primal layer's weights between its features and its output, and that map as a whole."""

    weights: Tensor  # W_e and W_r of each head, [heads, 2, rows, r]
    mixed: Tensor  # C_e and C_r, [2, p, r]
    out: Tensor  # A, [heads, p, d]
    matrix: Tensor  # [2 * heads * rows, d]
    bias: Tensor  # [d]


def solve(known: Moments, output: Tensor, heads: int, rank: int, ridge: float, sweeps: int = SWEEPS) -> Factors:
    r"""The weights of a primal layer with queries, keys and sample fixed, by exact least squares for each factor in turn.

    The layer is $Y = \sum_h (Z^e_h W_{e,h} C_e^T + Z^r_h W_{r,h} C_r^T) A_h + b$, Z the features, A the output map: linear in each factor.
    Starting from `output`, the weight `[d, d]` of the map that is replaced, each W is solved for in turn, then A and b together,
    until a sweep gains little. C is the identity where the rank is that of a head or more; else the directions in which the
    unrestricted W give most output, found once.
    """
    gram = known.gram
    out = output.to(gram).mT.unflatten(0, (heads, -1))
    size = out.shape[1]
    mixed = torch.eye(size, dtype=out.dtype, device=out.device).expand(2, -1, -1)
    weights, out = _alternate(known, out, mixed, ridge, sweeps)
    if rank < size:
        # Directions of E C^T and of R C^T, shared by the heads as C is.
        blocks = _diagonal(gram, 2 * heads).unflatten(0, (heads, 2))
        mixed = torch.linalg.eigh((weights.mT @ blocks @ weights).sum(dim=0)).eigenvectors[..., -rank:]
        weights, out = _alternate(known, out, mixed, ridge, sweeps)
    if rank > size:
        # Orthonormal rows: W C^T is as before, and no column of C is zero, where gradients would vanish.
        wide = torch.linalg.qr(torch.randn(rank, size, dtype=out.dtype, device=out.device))[0].mT
        weights, mixed = weights @ wide, wide.expand(2, -1, -1)
    matrix = _whole(weights, mixed, out)
    return Factors(weights, mixed, out, matrix, _bias(known, matrix))


@torch.no_grad()
def fit_(layer: PrimalAttention, known: Moments, output: Tensor, ridge: float) -> float:
    """Sets W_e, W_r, C and the output map of a layer by `solve`; the error on the data of the moments."""
    solution = solve(known, output, layer.num_heads, layer.rank, ridge)
    layer.w_e.copy_(solution.weights[:, 0])
    layer.w_r.copy_(solution.weights[:, 1])
    layer.head_proj.weight.copy_(torch.cat(tuple(solution.mixed), dim=-1))
    layer.out_proj.weight.copy_(solution.out.flatten(0, 1).mT)
    layer.head_proj.bias.zero_()
    layer.out_proj.bias.copy_(solution.bias)
    return known.error(solution.matrix, solution.bias)


def _alternate(known: Moments, out: Tensor, mixed: Tensor, ridge: float, sweeps: int) -> tuple[Tensor, Tensor]:
    """W `[heads, 2, rows, r]` and A `[heads, p, d]` by exact steps in turn."""
    gram, cross, energy = known.gram, known.cross, known.energy
    heads, size = out.shape[:2]
    blocks = _slices(gram, 2 * heads)
    factors = [_factor(block, ridge) for block in _diagonal(gram, 2 * heads)]
    weights = gram.new_zeros(2 * heads, blocks[0].stop, mixed.shape[-1])
    error = 1.0
    for _ in range(sweeps):
        left = cross - gram @ _whole(weights.unflatten(0, (heads, 2)), mixed, out)
        for at, block in enumerate(blocks):
            right = mixed[at % 2].mT @ out[at // 2]  # [r, d]
            own = left[block] + gram[block, block] @ (weights[at] @ right)
            solved = torch.cholesky_solve(own @ right.mT, factors[at])
            new = torch.cholesky_solve(solved.mT, _factor(right @ right.mT, 1e-10)).mT
            left -= gram[:, block] @ ((new - weights[at]) @ right)
            weights[at] = new
        # What features make of every head's output: block diagonal, [2 * heads * rows, heads * p].
        by_head = torch.block_diag(*(weights.unflatten(0, (heads, 2)) @ mixed.mT).flatten(1, 2))
        square = by_head.mT @ gram @ by_head
        out = torch.cholesky_solve(by_head.mT @ cross, _factor(square, ridge)).unflatten(0, (heads, size))
        whole = by_head @ out.flatten(0, 1)
        missed = energy - 2 * (whole * cross).sum() + (whole * (gram @ whole)).sum()
        before, error = error, float((missed.clamp_min(0) / energy).sqrt()) if energy > 0 else 0.0
        if before - error < GAIN * before:
            break
    return weights.unflatten(0, (heads, 2)), out


def _whole(weights: Tensor, mixed: Tensor, out: Tensor) -> Tensor:
    """The map from features to outputs, `[2 * heads * rows, d]`."""
    return ((weights @ mixed.mT) @ out[:, None]).flatten(0, 2)


def _bias(known: Moments, matrix: Tensor) -> Tensor:
    return known.mean[known.size :] - known.mean[: known.size] @ matrix


def _slices(gram: Tensor, count: int) -> Sequence[slice]:
    rows = len(gram) // count
    return [slice(at * rows, (at + 1) * rows) for at in range(count)]


def _diagonal(gram: Tensor, count: int) -> Tensor:
    """The blocks on the diagonal, `[count, rows, rows]`."""
    return torch.stack([gram[block, block] for block in _slices(gram, count)])


def _factor(gram: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of a Gram matrix with a ridge, relative to its mean diagonal."""
    mean = gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    return torch.linalg.cholesky(gram + ridge * mean * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
