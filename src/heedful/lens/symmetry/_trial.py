"""One trial: how far f is from commuting with a move, and how much of that its rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.lens.symmetry._inputs import EQUAL, GIVEN, LARGE, NORMAL, TINY, WHOLE
from heedful.lens.symmetry.callee import Callee
from heedful.lens.symmetry.moves import Move, Shuffle, Turn

Output = Literal["rows", "matrix", "scalar"] | Callable[[Tensor, Tensor], Any]
OUTPUTS = ("rows", "matrix", "scalar")

# What rounding to the dtype explains without being measured: so many times going there and back, but no more than this.
MARGIN, FINE = 50.0, 1e-6

# A single error may be so many times the measured noise; where the median error is above TYPICAL of it, none is.
FACTOR, TYPICAL = 6.0, 2.0

# Whatever was measured, a larger error is none of rounding.
CAP = 0.05

# A tolerance above this says little.
WEAK = 0.01

VANISHES = "f vanishes"

# Outputs below this share of the inputs' norm count as zero when errors are divided by their size.
FLOOR = 1e-3

# The noise is measured at so many points on a line, this far apart relative to the input. Coarser grains are rare.
POINTS, STEP = 12, 2.0**-5

# So many trials are measured each for itself; so many decide whether what was measured is rounding.
MEASURED, JUDGES = 16, 3

# Fourth differences: what they take from independent errors of variance one has variance 70; the median of |N(0, 1)|.
STENCIL, GAIN, MEDIAN = (1.0, -4.0, 6.0, -4.0, 1.0), math.sqrt(70), 0.6745


@dataclass(frozen=True, eq=False)
class Trial:
    """One input, one group element, and how far f is from commuting there."""

    move: Move
    x: Tensor
    z: Tensor | None
    kind: str
    base: Tensor
    got: Tensor
    expected: Tensor
    size: float
    error: float
    noise: float
    tolerance: float
    unit: float = 1.0  # the size of the numbers that round

    @property
    def failed(self) -> bool:
        """Whether the error is more than rounding can explain; outputs that are not finite always fail."""
        return not self.error <= self.tolerance

    @property
    def small(self) -> bool:
        """Whether the error of an ordinary input was measured against the input, for the output is nothing beside it."""
        return self.kind in (NORMAL, GIVEN) and self.unseen

    @property
    def unseen(self) -> bool:
        """Whether the output is nothing beside the input and differs by more than rounding: its error was not seen."""
        own = max(_norm(self.base), _norm(self.got))
        return own < FLOOR * _norm(self.x) and not self.error * self.size <= FINE * own


@dataclass(frozen=True, eq=False)
class Test:
    """A function, how its output moves, and the error to let pass."""

    callee: Callee
    output: Output
    tol: float | Literal["auto"]

    def moved(self, move: Move, out: Tensor) -> Tensor:
        """What f of a moved input is to be."""
        if callable(self.output):
            return torch.as_tensor(self.output(out, move.data)).to(out)
        return {"rows": move.x, "matrix": move.matrix, "scalar": lambda y: y}[self.output](out)

    def check_shape(self, out: Tensor, x: Tensor, move: Move) -> None:
        """Refuses an output that cannot move as it is said to."""
        shape, d = tuple(out.shape), x.shape[-1]
        if self.output == "matrix" and shape[-2:] != (d, d):
            raise InvalidArgument(f"{self.callee.name} returns {shape}, and output='matrix' is for d x d = ({d}, {d})")
        rows = isinstance(move, Shuffle)
        if self.output == "rows" and (not shape or shape[0 if rows else -1] != x.shape[0 if rows else -1]):
            wanted = f"{len(x)} rows, one per token" if rows else f"vectors of size d = {d}"
            other = (
                "output='matrix' tests what is d x d"
                if shape[-2:] == (d, d)
                else "output='scalar' tests what does not move"
            )
            raise InvalidArgument(f"{self.callee.name} returns {shape}, not {wanted}; {other}")

    def run(self, move: Move, x: Tensor, z: Tensor | None, kind: str = GIVEN) -> Trial:
        """f of the moved input, the moved f, and the rounding of going there and back."""
        callee = self.callee
        x_moved, z_moved = move.x(x), None if z is None else move.z(z)
        moves = (move, move.inverse()) if callee.roles and isinstance(move, Turn) else ()
        base = callee(x, z)
        got = callee(x_moved, z_moved, moves[:1])
        back = callee(move.undo(x_moved), None if z_moved is None else move.undo_z(z_moved), moves)
        if got.shape != base.shape:
            raise InvalidArgument(
                f"{callee.name} returns {tuple(base.shape)} and, for a moved input, {tuple(got.shape)}"
            )
        self.check_shape(base, x, move)
        expected = self.moved(move, base)
        if expected.shape != base.shape:
            raise InvalidArgument(
                f"output() returns {tuple(expected.shape)} for {tuple(base.shape)}; it must keep the shape"
            )
        size = max(_norm(base), _norm(got), FLOOR * _norm(x), 1e-300)
        finite = all(bool(out.isfinite().all()) for out in (base, got, back, expected))
        noise = _norm(back, base) / size if finite else 0.0
        error = _norm(got, expected) / size if finite else math.inf
        eps = torch.finfo(callee.dtype).eps
        allowed = max(min(MARGIN * eps * x.shape[-1] ** 0.5, FINE), eps)
        if error > allowed:
            allowed = max(allowed, min(MARGIN * noise, FINE), FACTOR * noise)
        tolerance = min(allowed, CAP) if self.tol == "auto" else float(self.tol)
        return Trial(move, x, z, kind, base, got, expected, size, error, noise, tolerance)

    def measured(self, trial: Trial) -> Trial:
        """The trial with the noise of rounding measured, where its error asks for it."""
        if self.tol != "auto" or not trial.failed or trial.error > CAP:
            return trial
        # A translation takes small numbers among large ones, and there they round.
        ends = sorted({_scale(trial.x), _scale(trial.move.x(trial.x))})
        for unit in ends if ends[-1] > 2 * ends[0] else ends[-1:]:
            step = STEP
            # Noise that is high here and nowhere near, as where two softmax weights change places, needs shorter steps.
            while step >= STEP / 64 and trial.failed:
                noise = max(trial.noise, self.noise(trial, step * unit)[0])
                tolerance = max(trial.tolerance, min(FACTOR * noise, CAP))
                trial = replace(trial, noise=noise, tolerance=tolerance, unit=unit)
                step = step / 8 if trial.error <= 8 * FACTOR * noise else 0.0
        return trial

    def noise(self, trial: Trial, step: float) -> tuple[float, float]:
        r"""The rounding in $h(X) = f(XQ^T) - f(X)Q^T$ near the input of a trial, by median and by root mean square.

        h of an equivariant function is rounding and nothing else, h of another is smooth where f is. Fourth differences
        along a line leave of a smooth function next to nothing, and independent errors whole.
        """
        generator = torch.Generator().manual_seed(0)
        inputs = [trial.x] if trial.z is None else [trial.x, trial.z]
        lines = []
        for t in inputs:
            # Every number moves by half a step at least, up or down.
            tilt = (0.5 + torch.rand(t.shape, generator=generator, dtype=t.dtype)) * step
            lines.append(tilt * (2.0 * torch.randint(2, t.shape, generator=generator) - 1.0))
        move, rows = trial.move, []
        turns = self.callee.roles and isinstance(move, Turn) and not move.exact
        for at in range(POINTS):
            near = [t + (at - POINTS / 2) * line for t, line in zip(inputs, lines, strict=True)]
            if turns:
                # Parameters round when they are turned, and alike for all inputs: the turn has to vary as well.
                move = cast(Turn, trial.move).tilted((at - POINTS / 2) * step / trial.unit)
            moves = (move,) if self.callee.roles and isinstance(move, Turn) else ()
            turned = [move.x(near[0]), *(move.z(t) for t in near[1:])]
            out = self.moved(move, self.callee(near[0], near[1] if len(near) > 1 else None))
            got = self.callee(turned[0], turned[1] if len(turned) > 1 else None, moves)
            if out.shape != trial.got.shape or got.shape != out.shape:
                return 0.0, 0.0
            rows.append((got / trial.size - out / trial.size).flatten())
        h = torch.stack(rows)
        fourth = sum(c * h[at : len(h) - 4 + at] for at, c in enumerate(STENCIL)) / GAIN
        fourth = cast(Tensor, fourth)
        if not bool(fourth.isfinite().all()):
            return 0.0, 0.0
        return float(fourth.abs().median(0).values.norm()) / MEDIAN, float(fourth.square().sum(1).mean().sqrt())

    def rounds(self, trial: Trial) -> bool:
        """Whether the noise near a trial comes from jumps, as rounding does, and not from a function that waves.

        Over shorter steps the noise of jumps falls like the root of the step, for fewer are met, until none is; that of a
        smooth function falls at once, with the fourth power.
        """
        step, sizes = STEP, [self.noise(trial, STEP * trial.unit)[1]]
        while step > 64 * torch.finfo(torch.float64).eps:
            step /= 4
            sizes.append(self.noise(trial, step * trial.unit)[1])
            if sizes[-1] < 0.2 * sizes[-2]:
                if FACTOR * sizes[-1] < trial.error:
                    return sizes[-2] < 0.7 * max(sizes)
                # What was far off, as near a pole, is left; what remains explains the error as well.
                sizes = sizes[-1:]
        return True

    def void(self, trial: Trial) -> str:
        """Why an input that was drawn on purpose says nothing of symmetry; empty where it does.

        f may vanish, or overflow before and after the move; and where nearby inputs give values far apart (two norms are equal, and the
        larger is asked for) rounding decides which of them it takes.
        """
        if trial.kind in (TINY, LARGE) and (trial.unseen or not (trial.base.any() or trial.got.any())):
            return VANISHES
        if trial.kind in (NORMAL, GIVEN) or not (trial.failed or trial.tolerance > WEAK):
            return ""
        if not bool(trial.base.isfinite().all()) and not bool(trial.got.isfinite().all()):
            return "f is not finite"
        generator, eps = torch.Generator().manual_seed(0), torch.finfo(self.callee.dtype).eps
        # Large logits that differ in the last digit tie as well.
        tied = trial.kind in (WHOLE, EQUAL)
        step = max(2 * eps, min(eps**0.5, 1e-3)) if tied else 2 * eps
        inputs = [trial.x] if trial.z is None else [trial.x, trial.z]
        unit = step * _scale(trial.x)
        values = [
            self.callee(*(t + unit * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in inputs))  # type: ignore[arg-type]
            for _ in range(6)
        ]
        finite = all(value.shape == values[0].shape and bool(value.isfinite().all()) for value in values)
        apart = max(_norm(value, values[0]) for value in values[1:]) / trial.size if finite else math.inf
        return "f jumps" if not apart <= max(0.1 * min(trial.error, 1.0), (20 if tied else 4) * step) else ""


def settled(test: Test, trials: list[Trial]) -> list[Trial]:
    """The trials with a tolerance that follows from the rounding measured near each of them."""
    doubtful = [trial.failed and trial.error <= CAP for trial in trials]
    if test.tol != "auto" or not any(doubtful):
        return trials
    done: list[Trial] = []
    excused: list[Trial] = []
    noises: list[float] = []
    for trial, was in zip(trials, doubtful, strict=True):
        # What the least noise seen so far explains need not be measured again.
        known = TYPICAL * min(noises) if len(noises) >= MEASURED else 0.0
        if was and trial.error <= known:
            trial = replace(trial, noise=min(noises), tolerance=max(trial.tolerance, known))
        elif was:
            trial = test.measured(trial)
            noises.append(trial.noise)
            excused += [] if trial.failed else [trial]
        done.append(trial)
    ratios = [t.error / max(t.noise, 1e-300) if was else 0.0 for t, was in zip(done, doubtful, strict=True)]
    factor = TYPICAL if len(trials) > 4 and median(ratios) > TYPICAL else FACTOR
    judges = sorted(excused, key=lambda trial: -trial.error / trial.noise)[:JUDGES]
    if outvoted(map(test.rounds, judges), len(judges)):
        factor = 0.0
    if factor == FACTOR:
        return done
    return [
        replace(t, tolerance=max(before.tolerance, min(factor * t.noise, CAP))) if was else t
        for t, before, was in zip(done, trials, doubtful, strict=True)
    ]


def outvoted(votes: Iterable[bool], count: int) -> bool:
    """Whether fewer than half of so many votes are for it; no more are asked for than decide that.

    >>> outvoted([False, True, False], 3)
    True
    """
    ayes = noes = 0
    for vote in votes:
        ayes, noes = ayes + vote, noes + (not vote)
        if 2 * ayes >= count:
            break
        if 2 * noes > count:
            return True
    return False


def _scale(rows: Tensor) -> float:
    """The root mean square; 1 for zeros."""
    return float(rows.square().mean().sqrt()) or 1.0


def _norm(first: Tensor, second: Tensor | None = None) -> float:
    """The norm of a tensor or of a difference, also where squares would overflow."""
    largest = max(float(t.abs().max()) if t.numel() else 0.0 for t in (first, first if second is None else second))
    if not 1e150 < largest < math.inf:
        return float((first if second is None else first - second).norm())
    scaled = first / largest if second is None else first / largest - second / largest
    return largest * float(scaled.norm())
