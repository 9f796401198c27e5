"""Singular values and what is read off them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes, colours
from heedful._result import Result
from heedful._text import quantity

SHARE = 0.9


@dataclass(frozen=True)
class MatrixSpectrum(Result):
    r"""The singular values $\sigma_1 \ge \sigma_2 \ge \dots$ of one matrix: of one head of one layer reading one sequence.

    Args:
        name: what the matrix is: `"softmax"`, `"cosine"`, `"primal"`, or the name it was given.
        layer, head, sequence: whose it is; 0 for a matrix that stands alone.
        rows, columns: its size, padding left out.
        bound: the rank it cannot exceed, whatever it learned: the smaller side, or the width of its features.
        values: singular values, falling; at most `bound` of them.

    >>> from heedful.lens import MatrixSpectrum
    >>> one = MatrixSpectrum("matrix", 0, 0, 0, 3, 3, 3, (4.0, 2.0, 2.0))
    >>> one.cumulative(), one.rank(0.6), one.rank(0.6, power=2)
    ((0.5, 0.75, 1.0), 2, 1)
    >>> round(one.effective_rank, 3), one.stable_rank
    (2.828, 1.5)
    """

    name: str
    layer: int
    head: int
    sequence: int
    rows: int
    columns: int
    bound: int
    values: tuple[float, ...] = field(repr=False)

    _also = ("effective_rank", "stable_rank")

    def cumulative(self, power: int = 1) -> tuple[float, ...]:
        r"""$c_k = \sum_{i \le k} \sigma_i^{power} / \sum_i \sigma_i^{power}$ for k = 1, 2, ...; ones for a matrix of zeros."""
        shares = self._shares(power)
        # Rounding of the sum shall neither miss nor pass one.
        return (
            (*tuple(min(1.0, total) for total in accumulate(shares[:-1])), 1.0) if any(shares) else (1.0,) * len(shares)
        )

    def rank(self, share: float = SHARE, power: int = 1) -> int:
        """How many singular values hold this share of their sum; 0 for a matrix of zeros."""
        if not 0 < share <= 1:
            raise InvalidArgument(f"share must lie in (0, 1]; got {share!r}")
        if not self.values or self.values[0] == 0:
            return 0
        # The last ulp of a sum does not count: shares of 0.5 and 0.4 hold 0.9.
        return next(at for at, total in enumerate(self.cumulative(power), 1) if total >= share - 1e-12)

    @property
    def effective_rank(self) -> float:
        r"""$e^{-\sum_i p_i \log p_i}$ with $p_i = \sigma_i / \sum_j \sigma_j$ (Roy & Vetterli 2007); 0 for a matrix of zeros."""
        shares = [share for share in self._shares(1) if share > 0]
        return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0

    @property
    def stable_rank(self) -> float:
        r"""$\|A\|_F^2 / \sigma_1^2$, at most the rank; 0 for a matrix of zeros."""
        first = self.values[0]
        return sum((value / first) ** 2 for value in self.values) if first > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The values and every figure; JSON types alone. `rank_90_energy` is `rank_90` of squared singular values."""
        return super().to_dict() | {"rank_90": self.rank(), "rank_90_energy": self.rank(power=2)}

    def _shares(self, power: int) -> list[float]:
        if power not in (1, 2):
            raise InvalidArgument(f"power must be 1 (singular values) or 2 (their squares, energy); got {power!r}")
        # Relative to the largest first: squares of tiny or huge values leave the range.
        largest = self.values[0] if self.values else 0.0
        powers = [(value / largest) ** power if largest > 0 else 0.0 for value in self.values]
        return [value / (sum(powers) or 1.0) for value in powers]


@dataclass(frozen=True, repr=False)
class Spectrum(Result):
    """The singular values of several matrices, beside one another.

    Indexing and iteration go over the matrices. `power` is what curves and ranks are drawn and printed with.

    >>> import torch
    >>> from heedful import lens
    >>> found = lens.spectrum({"identity": torch.eye(5), "ones": torch.ones(5, 5)})
    >>> [round(one.effective_rank, 6) for one in found]
    [5.0, 1.0]
    >>> found
    Spectrum(identity, ones: 2 matrices)
    """

    matrices: tuple[MatrixSpectrum, ...]
    power: int = 1

    def __iter__(self) -> Iterator[MatrixSpectrum]:
        return iter(self.matrices)

    def __len__(self) -> int:
        return len(self.matrices)

    def __getitem__(self, at: int) -> MatrixSpectrum:
        return self.matrices[at]

    @property
    def names(self) -> tuple[str, ...]:
        """What kinds of matrices there are."""
        return tuple(dict.fromkeys(one.name for one in self))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({one.layer for one in self}))

    def select(self, name: str | None = None, layer: int | None = None, head: int | None = None) -> Spectrum:
        """The matrices of this name, layer and head; an error where there are none."""
        choice = {"name": name, "layer": layer, "head": head}
        wanted = {field: value for field, value in choice.items() if value is not None}
        matrices = tuple(one for one in self if all(getattr(one, field) == value for field, value in wanted.items()))
        if not matrices:
            asking = ", ".join(f"{field} {value!r}" for field, value in wanted.items())
            raise InvalidArgument(
                f"no matrix with {asking}; there are {', '.join(self.names)} in layers {list(self.layers)}"
            )
        return replace(self, matrices=matrices)

    def beside(self, other: Spectrum, label: str) -> Spectrum:
        """This spectrum and another one, whose names get a label: an ablation beside what it was taken from.

        >>> import torch
        >>> from heedful import lens
        >>> one, two = (lens.spectrum({"primal": torch.randn(5, 5)}) for _ in range(2))
        >>> one.beside(two, "eta = 0").names
        ('primal', 'primal, eta = 0')
        """
        named = tuple(replace(one, name=f"{one.name}, {label}") for one in other)
        if {one.name for one in named} & set(self.names):
            raise InvalidArgument(f"there is a spectrum labelled {label!r} already; give another label")
        return replace(self, matrices=self.matrices + named)

    @property
    def effective_rank(self) -> float:
        """The mean over the matrices; `select` says of which."""
        return self._mean("effective_rank")

    @property
    def stable_rank(self) -> float:
        """The mean over the matrices."""
        return self._mean("stable_rank")

    @property
    def rank_90(self) -> float:
        """The mean, over the matrices, of how many singular values hold 90 % (of their sum, or of energy, as `power` says)."""
        return sum(one.rank(power=self.power) for one in self) / len(self)

    def _mean(self, name: str) -> float:
        return sum(getattr(one, name) for one in self) / len(self)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Cumulative singular values, a line for each name and layer: the mean over its heads and sequences."""
        ax = axes(ax)
        styles = ("-", "--", ":", "-.")
        several = len(self.layers) > 1
        shades = dict(zip(self.layers, colours("viridis", len(self.layers), 0.9), strict=True))
        for style, name in enumerate(self.names):
            one = self.select(name)
            for layer in one.layers:
                curve = mean_curve(one.select(layer=layer))
                colour = shades[layer] if several else f"C{style}"
                label = f"{name}, layer {layer}" if several else name
                ax.plot(range(1, len(curve) + 1), curve, styles[style % 4], color=colour, label=label, lw=1.5)
        ax.axhline(SHARE, color="gray", lw=0.8, zorder=0)
        what = "singular values" if self.power == 1 else "squared singular values"
        ax.set(xlabel="how many of them", ylabel=f"share of the sum of {what}", ylim=(0, 1.02), xlim=(0, None))
        ax.legend(frameon=False, fontsize="small", ncols=len(self.names))
        return ax

    def __str__(self) -> str:
        width = max(len("matrix"), *map(len, self.names))
        lines = [f"{'matrix':<{width}}  layer  effective rank  stable rank  90 % in  of at most"]
        for name in self.names:
            for layer in (one := self.select(name)).layers:
                part = one.select(layer=layer)
                bound = sum(matrix.bound for matrix in part) / len(part)
                lines.append(
                    f"{name:<{width}}  {layer:>5}  {part.effective_rank:>14.1f}  {part.stable_rank:>11.1f}  "
                    f"{part.rank_90:>7.1f}  {bound:>10.4g}"
                )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Spectrum({', '.join(self.names)}: {quantity(len(self), 'matrix', 'matrices')})"


def mean_curve(spectrum: Spectrum) -> list[float]:
    """The mean of the cumulative curves; one that ends before the others stays at one."""
    curves = [one.cumulative(spectrum.power) for one in spectrum]
    longest = max(map(len, curves))
    return [sum(curve[at] if at < len(curve) else 1.0 for curve in curves) / len(curves) for at in range(longest)]
