"""Mercer's features: cycles of learned or given periods with their harmonics (Xu et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful._runtime import full_precision
from heedful.nn._frequencies import DEFAULT, Free, TimeScale, as_periods, fraction, ranged
from heedful.nn._laws import Exponents
from heedful.nn.time import Init, PeriodicTime, PeriodRange

Coefficient = Literal["tied", "free"]
Output = Literal["features", "projected"]


class MercerTime(PeriodicTime):
    r"""Mercer's features: a kernel of the elapsed time for each of k periods, as a cosine series of `degree` m (Xu et al. 2019).

    $$\Phi_P(t) = [\sqrt{a_0}, \sqrt{a_1} \cos\theta, \sqrt{a_1} \sin\theta, \dots, \sqrt{a_m} \cos m\theta, \sqrt{a_m} \sin m\theta],
    \quad \theta = 2\pi t/P, \qquad \psi_P(\tau) = a_0 + \sum_{c=1}^m a_c \cos(2\pi c\tau/P),$$

    side by side for all periods, so that kernels add and dim = k (2m + 1). The learned logarithms of $a_c \ge 0$ start alike, with a
    sum of 1; periods are learned as those of `BochnerTime(spectrum="free")`. Cut at m, the series of a kernel is off by
    $\sum_{c>m} a_c$ at most, which it is at $\tau = 0$.

    Where ours differs: the paper has coefficients of their own for the cosine and the sine of one harmonic, with which inner products
    depend on more than the elapsed time; that is `coef="free"`. Here a period is a period; in the paper's notation it is a
    frequency, too.

    `output="projected"` is the form of the paper's code, one number for each period (dim = k):

    $$y_j(t) = b_j + \sum_{c=1}^m \big(A_{jc} \sin c\theta_j + B_{jc} \cos c\theta_j\big),$$

    with all weights learned (Glorot-uniform at first, b = 0). `init="authors"` has its angular frequencies $c\, 10^{-s_j}$, s learned and evenly
    from 0 to 8 at first.

    Args:
        periods: k periods, numbers in the unit of the times or strings such as "1d", "7d", "365.25d" for times in seconds; or k itself:
            periods evenly on a logarithmic scale, in `period_range` or as `calibrate` finds it.
        degree: harmonics of each period, m.
        trainable: False keeps the periods where they start; coefficients are learned all the same.

    >>> import torch
    >>> encoding = MercerTime(["1d", "7d"], degree=3, trainable=False)
    >>> encoding.dim, encoding(torch.tensor([0, 1388533518])).shape
    (14, torch.Size([2, 14]))
    >>> encoding.kernel(torch.tensor([0.0, 7 * 86400.0])).allclose(torch.ones(2))
    True
    """

    def __init__(
        self,
        periods: int | Sequence[float | str],
        degree: int,
        *,
        coef: Coefficient = "tied",
        output: Output = "features",
        period_range: PeriodRange = "auto",
        init: Init = "log",
        trainable: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(degree=degree)
        check_choice(Coefficient, coef=coef)
        check_choice(Output, output=output)
        check_choice(Init, init=init)
        given = [] if is_whole(periods) else as_periods(periods)  # type: ignore[arg-type]
        count = periods if is_whole(periods) else len(given)
        check_whole(periods=count)
        if given and (init == "authors" or period_range != "auto"):
            raise InvalidArgument(
                "periods were given: leave out init='authors' and period_range, or give their number instead"
            )
        if init == "authors" and period_range != "auto":
            raise InvalidArgument("init='authors' has its own periods: leave period_range out")
        if output == "projected" and coef == "free":
            raise InvalidArgument(
                "output='projected' has a weight for every cosine and sine, and no coefficients: leave coef out"
            )
        self.degree, self.coef, self.output, self.period_range = degree, coef, output, period_range
        self.init, self.trainable = init, trainable
        self._named = {"periods": periods}
        self.count = int(count)
        self.dim = self.count if output == "projected" else self.count * (2 * degree + 1)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.law = (
            Exponents(self.count, trainable, most=8, **place)
            if init == "authors"
            else Free(self.count, trainable, **place)
        )
        if output == "projected":
            self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(self.count, 2 * degree, **place)))
            self.bias = nn.Parameter(torch.zeros(self.count, **place))
        else:
            width = degree + 1 if coef == "tied" else 2 * degree + 1
            even = -math.log(self.count * (degree + 1))
            self.log_coefficients = nn.Parameter(torch.full((self.count, width), even, **place))
        self._start(DEFAULT, [])

    def _start(self, scale: TimeScale, periods: list[float]) -> None:
        own = [] if is_whole(self._named["periods"]) else as_periods(self._named["periods"])
        self.law.start(ranged(self.period_range, scale), own + periods)

    def forward(self, times: Tensor) -> Tensor:
        """Features `(..., dim)` of times `(...,)`."""
        angles = 2 * torch.pi * self.turns(times)
        with full_precision(angles.device):
            cosine, sine = (part.unflatten(-1, (self.count, self.degree)) for part in (angles.cos(), angles.sin()))
            if self.output == "projected":
                waves = torch.cat((sine, cosine), dim=-1)  # [..., k, 2m]
                return self.bias.to(waves) + (self.weight.to(waves) * waves).sum(-1)
            roots = (self.log_coefficients.to(angles) / 2).exp()
            first, rest = roots.split((1, roots.shape[-1] - 1), dim=-1)
            rest = rest.unflatten(-1, (self.degree, -1))  # [k, m, 1 or 2]
            waves = (torch.stack((cosine, sine), dim=-1) * rest).flatten(-2)
            return torch.cat((first.expand(*waves.shape[:-1], 1), waves), dim=-1).flatten(-2)

    def rates(self) -> Tensor:
        """Turns per unit of time of every harmonic, float64 `(k m,)`, harmonics of one period side by side."""
        return (self.law.rates()[:, None] * self._harmonics()).flatten()

    def _turns(self, times: Tensor) -> Tensor:
        return fraction(self.law.turns(times)[..., None] * self._harmonics()).flatten(-2)

    def _harmonics(self) -> Tensor:
        device = next(self.parameters()).device
        return torch.arange(1, self.degree + 1, dtype=torch.float64, device=device)

    def amplitudes(self) -> Tensor:
        """Roots of what each harmonic has of the kernel, `(k m,)`."""
        if self.output == "projected":
            squares = self.weight.to(self._dtype()).square().unflatten(-1, (2, self.degree)).sum(1) / 2
        else:
            squares = self.log_coefficients.to(self._dtype()).exp()[:, 1:].unflatten(-1, (self.degree, -1)).mean(-1)
        return squares.flatten().sqrt()

    def constant(self) -> Tensor:
        """The sum of all a_0."""
        if self.output == "projected":
            return self.bias.to(self._dtype()).square().sum()
        return self.log_coefficients[:, 0].to(self._dtype()).exp().sum()

    def extra_repr(self) -> str:
        return f"{self.count}, {self.degree}, coef={self.coef!r}, output={self.output!r}"
