"""Depth for width: the law fitted by Levine et al., rivals, and your own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from heedful._checks import check_number
from heedful._errors import InvalidArgument
from heedful._plot import Axes, axes
from heedful._result import Result

KAPPA = 12.0
DEEPEST = 400.0

# Labels of models left of this width are put to the right of their points.
MIDDLE = 1448


class Law(ABC):
    """Which depth suits which width. `optimal_depth` grows with the width, without end."""

    name: str
    models: ClassVar[str] = ""
    """The kind of model that it was fitted on; empty where none is stated."""

    @abstractmethod
    def optimal_depth(self, width: float) -> float:
        """The depth for a width."""

    def optimal_width(self, depth: float) -> float:
        """The width for a depth."""
        check_number(0, depth=depth)
        return math.exp(_bisect(lambda x: self.optimal_depth(math.exp(x)) - depth, 0.0, 40.0, "depth", depth))

    def solve(self, params: float, kappa: float = KAPPA) -> tuple[float, float]:
        """Depth and width for a budget: $\\kappa L d^2 = N$ on the law."""
        check_number(0, params=params, kappa=kappa)

        def excess(x: float) -> float:
            depth = self.optimal_depth(math.exp(x))
            return -math.inf if depth <= 0 else math.log(kappa * depth) + 2 * x - math.log(params)

        width = math.exp(_bisect(excess, 0.0, 40.0, "params", params))
        return self.optimal_depth(width), width

    def sigma_depth(self, depth: float) -> float | None:
        """The standard error of the optimal depth in layers; None where the law states none."""
        return None

    def band(self, width: float) -> float:
        """Layers around the optimal depth within which no verdict is given: two standard errors, or a tenth without them."""
        depth = max(self.optimal_depth(width), 0.0)
        sigma = self.sigma_depth(depth)
        return 0.1 * depth if sigma is None else 2 * sigma

    def distance(self, depth: float, width: float) -> float:
        """How far a shape lies off the law, in halves of its band: standard errors, or twentieths of the depth without them.

        Above 2 the shape is outside of the band.
        """
        half = self.band(width) / 2
        return abs(depth - self.optimal_depth(width)) / half if half > 0 else math.inf

    def covers(self, depth: float, width: float) -> bool:
        """Whether a shape lies where the law was fitted."""
        return False

    def outside(self, depth: float, width: float) -> tuple[str, ...]:
        """Why a shape does not lie where the law was fitted, in words; nothing where it does."""
        return () if self.covers(depth, width) else (f"{self.name} states no sizes it was fitted on",)

    def plot(self, ax: Axes | None = None, models: Sequence[tuple[str, int, int]] = ()) -> Axes:
        """Draws depth against width with the band of two standard errors; `models` are points (name, layers, width)."""
        ax = axes(ax)
        widths = [math.exp(math.log(128) + step * math.log(16384 / 128) / 100) for step in range(101)]
        widths = [width for width in widths if self.optimal_depth(width) > 0]
        depths = [self.optimal_depth(width) for width in widths]
        (line,) = ax.plot(widths, depths, label=self.name)
        sigmas = [self.sigma_depth(depth) or 0.0 for depth in depths]
        if any(sigmas):
            low, high = ([d + sign * s for d, s in zip(depths, sigmas, strict=True)] for sign in (-2, 2))
            ax.fill_between(widths, low, high, alpha=0.25, color=line.get_color(), linewidth=0)
        for name, layers, width in models:
            ax.plot(width, layers, "o", color="black", markersize=5)
            side, shift = ("left", 6) if width < MIDDLE else ("right", -6)
            ax.annotate(name, (width, layers), xytext=(shift, 2), textcoords="offset points", ha=side)
        ax.set(xscale="log", xlabel="width", ylabel="depth (layers)", title="Depth for width")
        ax.set_ylim(bottom=0)
        ax.legend()
        return ax


@dataclass(frozen=True)
class DepthLaw(Result, Law):
    r"""The fitted law $\ln d^*(L) = a + b L$: the width from which on depth L is no longer the best choice.

    Levine et al., *The Depth-to-Width Interplay in Self-Attention* (arXiv 2006.12467 v3, section 5), from language models of
    6 to 48 layers. So $L^*(d) = (\ln d - a) / b$, and a budget of N parameters in the layers is spent best where
    $\kappa L e^{2(a + bL)} = N$; $\kappa$ is 12 for a GPT-2 layer. Errors: $\sigma_{\ln d} = \sqrt{\sigma_a^2 + (L
    \sigma_b)^2}$ and $\sigma_L = \sigma_{\ln d} / b$, with a and b as if independent, which overstates them.

    >>> law = DepthLaw()
    >>> f"{law.optimal_depth(768):.1f} layers, {law.optimal_width(48):.0f} channels"
    '28.9 layers, 2215 channels'
    >>> depth, width = law.solve(1.74e11)  # GPT-3 had 96 layers of 12288
    >>> round(depth), round(width)
    (80, 13424)
    """

    a: float = 5.039
    b: float = 0.0555
    a_std: float = 0.030
    b_std: float = 0.0013
    l_range: tuple[float, float] = (6, 48)
    models: ClassVar[str] = "plain GPT-type decoders"
    name: str = "levine2020"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.a) and 0 < self.b < math.inf):
            raise InvalidArgument(f"ln d = a + b L needs a finite a and b > 0; got a={self.a}, b={self.b}")

    def optimal_depth(self, width: float) -> float:
        check_number(0, width=width)
        return (math.log(width) - self.a) / self.b

    def optimal_width(self, depth: float) -> float:
        check_number(0, depth=depth)
        try:
            return math.exp(self.a + self.b * depth)
        except OverflowError:
            raise InvalidArgument(f"depth {depth:g} asks for a width beyond all floats; give fewer layers") from None

    def solve(self, params: float, kappa: float = KAPPA) -> tuple[float, float]:
        check_number(0, params=params, kappa=kappa)
        goal = math.log(params / kappa)
        excess: Callable[[float], float] = lambda depth: math.log(depth) + 2 * (self.a + self.b * depth) - goal  # noqa: E731
        depth = _bisect(excess, 1e-6, DEEPEST, "params", params)
        return depth, self.optimal_width(depth)

    def sigma_depth(self, depth: float) -> float:
        return self.sigma_log_width(depth) / self.b

    def sigma_log_width(self, depth: float) -> float:
        """The standard error of $\\ln d^*$ at a depth."""
        return math.hypot(self.a_std, depth * self.b_std)

    def covers(self, depth: float, width: float) -> bool:
        return not self.outside(depth, width)

    def outside(self, depth: float, width: float) -> tuple[str, ...]:
        """
        >>> DepthLaw().outside(96, 1600)
        ('96 layers, and levine2020 was fitted on 6 to 48',)
        """
        low, high = self.l_range
        least, most = self.optimal_width(low), self.optimal_width(high)
        sizes = [(depth, low, high, f"{depth:g} layers", ""), (width, least, most, f"width {width:g}", "widths ")]
        return tuple(
            f"{what}, and {self.name} was fitted on {of}{start:.0f} to {end:.0f}"
            for size, start, end, what, of in sizes
            if not start <= size <= end
        )

    @classmethod
    def from_runs(cls, rows: Iterable[Sequence[float]]) -> DepthLaw:
        """The law of your own runs; see `fit_law`."""
        from heedful.lens.depth.fit import fit_law

        return fit_law(rows)

    def __str__(self) -> str:
        return f"{self.name}: ln d = {self.a:.3f} ± {self.a_std:.3f} + ({self.b:.4f} ± {self.b_std:.4f}) L"


@dataclass(frozen=True)
class DepthCurve(Law):
    """A law given as a function from width to depth, without a stated error.

    >>> round(DepthCurve("half", lambda width: width / 32).optimal_width(24))
    768
    """

    name: str
    depth: Callable[[float], float] = field(repr=False)

    def optimal_depth(self, width: float) -> float:
        check_number(0, width=width)
        answer, depth = self.depth(width), math.nan
        with suppress(TypeError, ValueError, OverflowError):
            depth = float(answer)
        if not math.isfinite(depth):
            raise InvalidArgument(
                f"the law {self.name} gives {answer!r:.60} for width {width:g}; let it return a finite depth"
            )
        return depth


LAWS: dict[str, Law] = {
    "levine2020": DepthLaw(),
    # One layer for every 64 channels, the habit of GPT-2 and of many small trainers.
    "constant_aspect": DepthCurve("constant_aspect", lambda width: width / 64),
    # arXiv 2601.20994: the critical depth grows as width^0.44; 16 layers at width 512 (its figure 1b).
    "depth_delusion": DepthCurve("depth_delusion", lambda width: 16 * (width / 512) ** 0.44),
}


def find_law(law: str | Law | Callable[[float], float]) -> Law:
    """A law by name, a law, or a function from width to depth.

    >>> find_law("constant_aspect").optimal_depth(768)
    12.0
    """
    if isinstance(law, Law):
        return law
    if callable(law):
        return DepthCurve(getattr(law, "__name__", "callable"), law)
    if law not in LAWS:
        raise InvalidArgument(
            f"there is no law {law!r}; there are {', '.join(LAWS)} (in Python, a function of the width serves as well)"
        )
    return LAWS[law]


def _bisect(excess: Callable[[float], float], low: float, high: float, name: str, value: float) -> float:
    """The root of a growing function."""
    if excess(low) > 0 or excess(high) < 0:
        raise InvalidArgument(f"{name} {value:g} is outside of what the law can answer; give a usual size")
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2
