"""Separation ranks computed: certified integers over a finite field, and in floating point for real weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful._result import Result
from heedful.lens.depth.theory import sep_bound

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Residues = NDArray[numpy.uint64]

P = 2**31 - 1

# Rows of the largest grid: 5,000 squared entries take half a gigabyte at work.
LARGEST = 5_000

# Columns that are eliminated at once: 31 + 16 + 5 bits of a sum fit in a float64.
PANEL = 32


def separation_rank(
    depth: int,
    width: int,
    heads: int = 1,
    n_tokens: int = 4,
    *,
    embedding_rank: int | None = None,
    residual: bool = False,
    query: Literal["left", "right"] = "left",
    seed: int = 0,
    method: Literal["exact", "float"] = "exact",
) -> int:
    r"""The rank with which the network ties the two halves of its tokens together, for generic weights.

    $sep(y) = \min\{R : y = \sum_{r \le R} g_r(x^A) h_r(x^B)\}$ (Levine et al. 2020, definition 1) of one output of the network
    without softmax, $y^{l+1,j} = \sum_h W^O_h \sum_{j'} \langle W^Q_h y^{l,j}, W^K_h y^{l,j'}\rangle W^V_h y^{l,j'}$ (eq. 3).
    It is the rank of the matrix $F_{ab} = y(x^A = a, x^B = b)$ over random a and b. Ours computes F and its rank over the field
    of $2^{31} - 1$ elements, so the result is an integer without tolerance: a lower bound for generic real weights always, and
    equal to it except with probability about $R\, 3^L / 2^{31}$; two seeds settle it.

    Args:
        heads: must divide the width; more heads lower the rank.
        n_tokens: in all, half on each side; two tokens give smaller ranks than four or more.
        embedding_rank: tokens lie in that many dimensions (Wies et al. 2021): the rank is that of a network so wide.
        residual: add the input of each layer to its output.
        query: the side that holds the token whose output is read.
        method: "float" takes singular values of random real weights instead; unreliable beyond a rank of 60.

    >>> separation_rank(2, 2), separation_rank(2, 3), sep_bound(3, 2)
    (18, 49, 49)
    """
    check_whole(depth=depth, width=width, heads=heads, n_tokens=n_tokens)
    if width % heads:
        raise InvalidArgument(f"{heads} heads do not divide width {width}; give a divisor")
    if n_tokens < 2 or n_tokens % 2:
        raise InvalidArgument(f"n_tokens must be even, half for each side; got {n_tokens}")
    rank = width if embedding_rank is None else embedding_rank
    check_whole(1, width, embedding_rank=rank)
    check_choice(("left", "right"), query=query)
    check_choice(("exact", "float"), method=method)
    if method == "float":
        return _float_generic(depth, width, heads, n_tokens, rank, residual, seed).rank
    size = sep_bound(rank, depth) + 6
    while True:
        if size > LARGEST:
            raise Unsupported(
                f"depth {depth} and width {rank} need a grid of {size:,} rows, above {LARGEST:,}; take a smaller depth or width"
            )
        exact = _rank(_grid(depth, width, heads, n_tokens // 2, rank, residual, query, size, seed))
        if exact < size:
            return exact
        size *= 2


def _grid(
    depth: int, width: int, heads: int, tokens: int, rank: int, residual: bool, query: str, size: int, seed: int
) -> Residues:
    """F over `size` random halves on either side."""
    import numpy as np

    draw = np.random.default_rng(seed)
    layers = weights(depth, width, heads, draw)
    embed = draw.integers(P, size=(rank, width), dtype=np.uint64)
    sides = [_matmul(draw.integers(P, size=(size, tokens, rank), dtype=np.uint64), embed) for _ in "AB"]
    moments = [_matmul(x.swapaxes(1, 2), x) for x in sides]
    own, other = (0, 1) if query == "left" else (1, 0)
    read, step = sides[own][:, 0, :, None], max(1, 2**19 // (size * width * width))
    grid = np.empty((size, size), dtype=np.uint64)
    for start in range(0, size, step):
        part = slice(start, start + step)
        moment = (moments[own][part, None] + moments[other][None]) % P
        grid[part] = forward(layers, moment, read[part, None], residual)[..., 0, 0]
    return grid


def weights(depth: int, width: int, heads: int, draw: Any) -> list[list[tuple[Residues, Residues]]]:
    """For each layer and head $W^O W^V$ and $W^{K T} W^Q$, of rank `width // heads`, over the field."""
    import numpy as np

    def product() -> Residues:
        left, right = (draw.integers(P, size=size, dtype=np.uint64) for size in _thin(width, heads))
        return _matmul(left, right)

    return [[(product(), product()) for _ in range(heads)] for _ in range(depth)]


def _thin(width: int, heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (width, width // heads), (width // heads, width)


def forward(layers: list[list[tuple[Residues, Residues]]], moment: Residues, x: Residues, residual: bool) -> Residues:
    """$y = T_L(M^{L-1}) \\cdots T_1(M) x$ with $T(M) = \\sum_h W^O W^V M W^{KT} W^Q$ and $M^l = T_l M^{l-1} T_l^T$."""
    import numpy as np

    for at, heads in enumerate(layers):
        mix: Any = sum(_matmul(_matmul(left, moment), right) for left, right in heads) % P
        if residual:
            mix = (mix + np.eye(mix.shape[-1], dtype=np.uint64)) % P
        x = _matmul(mix, x)
        if at + 1 < len(layers):
            moment = _matmul(_matmul(mix, moment), mix.swapaxes(-1, -2))
    return x


def _matmul(left: Residues, right: Residues) -> Residues:
    """A product of small matrices over the field, with leading axes; four products of residues fit in 64 bits."""
    total: Any = 0
    for k in range(left.shape[-1]):
        if k and k % 3 == 0:
            total %= P
        total = total + left[..., :, k, None] * right[..., None, k, :]
    return total % P


def _rank(grid: Residues) -> int:
    """Rank by elimination in panels: within one column by column, beyond it as a product of matrices."""
    import numpy as np

    rest, rank = grid.copy(), 0
    while min(rest.shape) > 0:
        panel, tail = rest[:, :PANEL], rest[:, PANEL:]
        lower = np.zeros((rest.shape[0], PANEL), dtype=np.uint64)
        pivots = 0
        for column in range(panel.shape[1]):
            nonzero = panel[pivots:, column].nonzero()[0]
            if len(nonzero) == 0:
                continue
            swap = [pivots, pivots + int(nonzero[0])]
            rest[swap], lower[swap] = rest[swap[::-1]], lower[swap[::-1]]
            inverse = np.uint64(pow(int(panel[pivots, column]), P - 2, P))
            factors = panel[pivots + 1 :, column] * inverse % P
            lower[pivots + 1 :, pivots] = factors
            panel[pivots + 1 :] = _less(panel[pivots + 1 :], factors[:, None] * panel[pivots])
            pivots += 1
            if pivots == rest.shape[0]:
                break
        for row in range(1, pivots):
            tail[row:pivots] = _less(tail[row:pivots], lower[row:pivots, row - 1, None] * tail[row - 1])
        rest = _less(tail[pivots:], _times(lower[pivots:, :pivots], tail[:pivots]))
        rank += pivots
    return rank


def _less(left: Residues, product: Residues) -> Residues:
    return (left + P - product % P) % P


def _times(left: Residues, right: Residues) -> Residues:
    """A long product by float64: the right factor in halves of 16 bits, so that every sum is an exact integer."""
    import numpy as np

    first = left.astype(np.float64)
    high = (first @ (right >> np.uint64(16)).astype(np.float64)).astype(np.uint64) % P
    low = (first @ (right & np.uint64(0xFFFF)).astype(np.float64)).astype(np.uint64)
    return (high * np.uint64(1 << 16) + low) % P


@dataclass(frozen=True)
class FloatRank(Result):
    """A numerical rank: `gap` is the ratio of the last singular value that counts to the next; below 100 do not trust it."""

    rank: int
    gap: float
    singular_values: tuple[float, ...]


def float_separation_rank(network: Any, *, n_tokens: int = 4, samples: int = 80, seed: int = 0) -> FloatRank:
    """The separation rank of a `PolynomialAttention` with the weights it has, by singular values in float64.

    Counts singular values above $n \\epsilon$ of the largest, n being `samples`, which must exceed the rank. Tokens are Gaussian:
    on the unit sphere the trace of M is fixed, and the rank of depth 2, width 2 drops from 18 to 12. Polynomials of degree
    $3^L$ are badly conditioned: beyond a rank of about 60, or below a gap of 100, use `separation_rank`.

    >>> import torch
    >>> from heedful.lens.depth import PolynomialAttention
    >>> _ = torch.manual_seed(0)
    >>> float_separation_rank(PolynomialAttention(2, 1, 2)).rank
    18
    """
    import torch

    check_whole(n_tokens=n_tokens, samples=samples)
    source = torch.Generator().manual_seed(seed)
    shape = (2, samples, max(1, n_tokens // 2), network.width)
    left, right = torch.randn(shape, generator=source, dtype=torch.float64) / network.width**0.5
    with torch.no_grad():
        moment = (left.mT @ left)[:, None] + (right.mT @ right)[None]  # [A, B, d, d]
        grid = network.double_from_moment(moment, left[:, None, 0])[..., 0]
    values = torch.linalg.svdvals(grid)
    rank = int((values > samples * torch.finfo(values.dtype).eps * values[0]).sum())
    gap = float(values[rank - 1] / values[rank]) if rank < samples else 1.0
    return FloatRank(rank, gap, tuple(values.tolist()))


def _float_generic(
    depth: int, width: int, heads: int, n_tokens: int, rank: int, residual: bool, seed: int
) -> FloatRank:
    import torch

    from heedful.lens.depth.polynomial import PolynomialAttention

    if rank != width:
        raise Unsupported("method='float' has no embedding_rank; use method='exact'")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = PolynomialAttention(width, heads, depth, residual=residual)
    samples = min(sep_bound(width, depth), 200) + 20
    return float_separation_rank(network, n_tokens=n_tokens, samples=samples, seed=seed)
