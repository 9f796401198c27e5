"""What a check found: the verdict, how sure it is, and the counterexample."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heedful._errors import HeedfulError, InvalidArgument
from heedful._plot import Axes, axes
from heedful._result import Result, plain

# Larger arrays are described, not printed.
ROWS, COLUMNS = 6, 16

# The same for JSON.
LISTED = 4096


class SymmetryBroken(HeedfulError, AssertionError):
    """Raised by `raise_if_failed`; the message is the report."""


@dataclass(frozen=True, eq=False)
class Counterexample(Result):
    """An input and a group element for which moving first and moving afterwards differ.

    `move` names the element in words; `element` is its matrix Q, its vector t, or the order of positions.
    """

    move: str
    element: Tensor
    x: Tensor
    z: Tensor | None
    got: Tensor
    expected: Tensor
    error: float
    tolerance: float
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        large = {name: value for name, value in tensors.items() if value.numel() > LISTED}
        norms = {
            name: {"shape": list(value.shape), "norm": float(value.double().norm())} for name, value in large.items()
        }
        return super().to_dict() | plain(norms)

    def __str__(self) -> str:
        lines = [f"counterexample: {self.move}, n = {len(self.x)}" + (f" ({self.reason})" if self.reason else "")]
        arrays = [("X", self.x), ("Z", self.z), ("f of the moved input", self.got), ("moved f", self.expected)]
        lines += [_shown(name, value) for name, value in arrays if value is not None]
        return "\n".join([*lines, f"  relative error {self.error:.3g}, allowed {self.tolerance:.1g}"])


@dataclass(frozen=True)
class Component(Result):
    """The trials whose group element has this determinant (None for groups without one)."""

    determinant: int | None
    trials: int
    failures: int
    largest: float

    _also = ("passed",)

    @property
    def passed(self) -> bool:
        """Whether no trial of this part failed."""
        return self.failures == 0


@dataclass(frozen=True, eq=False)
class Report(Result):
    """One symmetry of one function, tested.

    Attributes:
        symmetry: `embedding` (the group acts on vectors) or `position` (the order of tokens changes).
        errors: the relative error of every trial, inf where an output was not finite.
        output: how the output was to move: `rows`, `matrix`, `scalar`, or the name of a function.
        lengths: the numbers of tokens that were tried; `inputs`: how many inputs of each kind.
        noise: the largest error that rounding alone made; `tolerance`: the largest error that was let pass.
        weak: passed, but with a tolerance above 1 %, or on outputs that are nothing beside their inputs: conclude nothing.
        bound: the 95 % upper bound on the probability that a random input fails (Clopper & Pearson).
        deterministic: whether two equal calls gave equal outputs; where not, nothing can be concluded, and `passed` is False.
        moved: the parameters that moved with the embedding, by role.
        notes: what to know before believing the verdict.
    """

    name: str
    symmetry: str
    group: str
    d: int
    output: str
    errors: tuple[float, ...] = field(repr=False)
    failures: int
    noise: float
    tolerance: float
    weak: bool
    bound: float
    components: tuple[Component, ...]
    deterministic: bool
    lengths: tuple[int, ...]
    inputs: dict[str, int]
    moved: dict[str, str] = field(repr=False)
    notes: tuple[str, ...]
    counterexample: Counterexample | None = field(repr=False)

    _also = ("passed", "trials", "largest", "median", "q95")
    _not = ("errors",)

    @property
    def passed(self) -> bool:
        """No trial failed, and the function is deterministic."""
        return self.failures == 0 and self.deterministic

    @property
    def sample(self) -> str:
        """The lengths and kinds of inputs in words."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.inputs.items())
        return f"n = {', '.join(map(str, self.lengths))}; {kinds}"

    @property
    def outcome(self) -> str:
        """`holds`, `weak`, `broken` or `random`."""
        if not self.deterministic:
            return "random"
        return "broken" if self.failures else "weak" if self.weak else "holds"

    @property
    def trials(self) -> int:
        """How many inputs were tried."""
        return len(self.errors)

    @property
    def largest(self) -> float:
        """The largest relative error."""
        return max(self.errors)

    def quantile(self, share: float) -> float:
        """The relative error that this share of the trials stays below."""
        ordered = sorted(self.errors)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def q95(self) -> float:
        return self.quantile(0.95)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        what = f"{self.symmetry} symmetry, group {self.group}"
        if not self.deterministic:
            return f"{self.name}: {what}: UNDECIDED, two equal calls differ"
        if self.failures:
            return f"{self.name}: {what}: BROKEN in {self.failures} of {self.trials} trials"
        holds = "HOLDS WEAKLY" if self.weak else "HOLDS"
        return f"{self.name}: {what}: {holds} in {self.trials} trials (fails on at most {self.bound:.2%} of inputs, 95 % sure)"

    def raise_if_failed(self) -> None:
        """Raises `SymmetryBroken` with the whole report unless the check passed."""
        if not self.passed:
            raise SymmetryBroken(str(self))

    def plot(self, ax: Axes | None = None) -> Axes:
        """The errors of all trials in ascending order, with the noise and the tolerance; infinite ones stand on top."""
        ax = axes(ax)
        finite = sorted(max(error, 1e-18) for error in self.errors if math.isfinite(error))
        ax.semilogy(range(1, len(finite) + 1), finite, "o", markersize=3, label="relative error")
        infinite = range(len(finite) + 1, len(self.errors) + 1)
        if infinite:
            ax.semilogy(infinite, [10 * max([1.0, *finite])] * len(infinite), "x", color="tab:red", label="not finite")
        ax.axhline(max(self.noise, 1e-18), linestyle=":", color="gray", label="rounding alone")
        ax.axhline(self.tolerance, linestyle="--", color="black", label="tolerance")
        ax.set(xlabel="trial, by error", ylabel="relative error", title=self.verdict.split(" in ")[0].split(" (")[0])
        ax.legend()
        return ax

    def __str__(self) -> str:
        lines = [self.verdict, "  part     trials  failures  largest error"]
        for part in self.components:
            name = "all" if part.determinant is None else f"det {part.determinant:+d}"
            lines.append(f"  {name:<7}  {part.trials:>6}  {part.failures:>8}  {part.largest:>13.3g}")
        lines.append(
            f"  median {self.median:.2g}, 95 % {self.q95:.2g}, rounding alone {self.noise:.2g}, "
            f"tolerance {self.tolerance:.2g}, failure bound {self.bound:.2g}"
        )
        lines.append(f"  inputs: {self.sample}")
        if self.moved:
            lines.append("  moved with the embedding: " + ", ".join(f"{n} ({r})" for n, r in self.moved.items()))
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, *([str(self.counterexample)] if self.counterexample else [])])


def failure_bound(failures: int, trials: int, confidence: float = 0.95) -> float:
    r"""Clopper and Pearson's upper bound on a failure probability: the p with $P(\mathrm{Bin}(T, p) \le x) = 1 - c$.

    With no failure it is $1 - 0.05^{1/T}$, just below $3/T$.

    >>> round(failure_bound(0, 200), 4), round(failure_bound(3, 200), 4)
    (0.0149, 0.0383)
    """
    if trials < 1 or not 0 <= failures <= trials:
        raise InvalidArgument(f"failures must lie between 0 and trials >= 1; got {failures} of {trials}")
    if failures == trials:
        return 1.0
    low, high = failures / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(failures, trials, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(failures: int, trials: int, p: float) -> float:
    """The chance of so many failures or fewer."""
    if p >= 1.0:
        return 0.0
    logs = (
        math.lgamma(trials + 1) - math.lgamma(x + 1) - math.lgamma(trials - x + 1)
        + (x * math.log(p) if x else 0.0) + (trials - x) * math.log1p(-p)
        for x in range(failures + 1)
    )  # fmt: skip
    return math.fsum(math.exp(log) for log in logs)


def _shown(name: str, tensor: Tensor) -> str:
    if tensor.dim() == 0:
        return f"  {name} = {float(tensor) + 0.0:.6g}"
    if tensor.dim() > 2 or tensor.numel() > ROWS * COLUMNS or tensor.shape[-1] > COLUMNS:
        return f"  {name}: {' x '.join(map(str, tensor.shape))} numbers of norm {float(tensor.norm()):.4g}"
    rows = [f"[{', '.join(f'{v + 0.0:.4g}' for v in row)}]" for row in torch.atleast_2d(tensor).tolist()]
    return f"  {name} = " + f",\n{' ' * (len(name) + 5)}".join(rows)
