"""Times as vectors: what every time encoding shares, and Bochner's features (Xu et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful._plot import Axes, axes
from heedful._runtime import full_precision, readable
from heedful.nn._frequencies import DEFAULT, Free, Law, TimeScale, as_periods, as_range, check_times, ranged, time_scale
from heedful.nn._laws import Exponents, Flow, Mixture
from heedful.nn._module import Module
from heedful.nn._time_results import TimeSpectrum, is_wide

Spectra = Literal["free", "normal", "mixture", "flow", "mlp"]
Sampler = Literal["quantile", "random"]
Resample = Literal["never", "train"]
Layout = Literal["interleaved", "half"]
Init = Literal["log", "authors"]
PeriodRange = Literal["auto"] | tuple[float | str, float | str]


class TimeEncoding(Module):
    """Maps times `(...,)` to vectors `(..., dim)`.

    Times are float64 or whole numbers (float32 where it is exact enough) in any unit and from any origin. Vectors have the dtype of the
    parameters, float32 where that is less precise, under autocast too: phases are reduced in float64, and turned into cosines
    afterwards.
    """

    dim: int
    _named: dict[str, Any]  # arguments whose names are those of methods

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), **getattr(self, "_named", {})}

    def calibrate(
        self, times: Tensor, mask: Tensor | None = None, periods: Sequence[float | str] | None = None
    ) -> Self:
        """Fits the scale of time to a data set, in place: frequencies start anew.

        Periods start evenly on a logarithmic scale between twice the 1st percentile of positive gaps and four times the 99th percentile
        of spans, or in `period_range` where that was given; periods given to the constructor stay.

        Args:
            times: `(B, n)`, sequences as rows.
            mask: boolean `(B, n)`, True = a real event; padding enters nothing.
            periods: further periods to start at, as from `heedful.ops.periodogram`; the log-spaced ones fill up what is left.
                Encodings without periods of their own pass over them.
        """
        given = as_range(getattr(self, "period_range", "auto"))
        try:
            scale = time_scale(times, mask)
        except InvalidArgument:
            if given is None or not times.isfinite().all():
                raise
            scale = given  # times without a gap have no scale of their own, and need none
        with torch.no_grad():
            self._start(scale, as_periods(periods))
        return self

    def _start(self, scale: TimeScale, periods: list[float]) -> None:
        """Takes over the scale of the data."""

    def _dtype(self) -> torch.dtype:
        """That of the parameters, at least float32."""
        return torch.promote_types(next(self.parameters()).dtype, torch.float32)

    def _float64(self, times: Tensor) -> Tensor:
        check_times(times)
        if readable(times) and times.is_floating_point() and not times.isfinite().all():
            raise InvalidArgument(
                "times hold NaN or infinite values; drop these events, or give padding any finite time"
            )
        return times.double()


class PeriodicTime(TimeEncoding):
    r"""Features of R pairs $a_i \cos 2\pi r_i t, a_i \sin 2\pi r_i t$, so that inner products are a kernel of the elapsed time.

    $$\psi(\tau) = c + \sum_i a_i^2 \cos 2\pi r_i \tau$$
    """

    law: Law

    def rates(self) -> Tensor:
        """Turns per unit of time, float64 `(R,)`, differentiable."""
        raise NotImplementedError

    def amplitudes(self) -> Tensor:
        """What cosine and sine of each pair are multiplied with, `(R,)`."""
        raise NotImplementedError

    def constant(self) -> Tensor:
        """What the kernel has beside its cosines, a number."""
        return torch.zeros((), dtype=self._dtype(), device=next(self.parameters()).device)

    def turns(self, times: Tensor) -> Tensor:
        """Phases of times `(...,)` in turns, `(..., R)` within [0, 1], reduced in float64, differentiable."""
        return self._turns(self._float64(times)).to(self._dtype())

    def _turns(self, times: Tensor) -> Tensor:
        raise NotImplementedError

    def periods(self) -> Tensor:
        """The learned periods, float64, in the unit of the times."""
        return self.law.periods()

    def kernel(self, tau: Tensor | float) -> Tensor:
        r"""$\psi(\tau)$ of elapsed times of any shape; where features are not invariant, its mean over all t."""
        tau = tau if isinstance(tau, Tensor) else torch.as_tensor(tau, dtype=torch.float64)
        tau = tau.to(next(self.parameters()).device)
        with full_precision(tau.device):
            cosines = (2 * torch.pi * self._turns(self._float64(tau)).to(self._dtype())).cos()
            return self.constant() + (cosines * self.amplitudes().square()).sum(-1)

    def spectrum(self) -> TimeSpectrum:
        """The lines of the kernel, heaviest first."""
        with torch.no_grad():
            periods, weights = (1 / self.rates().abs()).cpu().numpy(), self.amplitudes().square().double().cpu().numpy()
            order = np.argsort(-weights, kind="stable")
            return TimeSpectrum(periods[order], weights[order], float(self.constant()))

    def plot(self, ax: Axes | None = None, *, longest: float | None = None) -> Axes:
        r"""$\psi(\tau)$ up to `longest` (by default two of the longest periods, or one where they differ widely), periods marked."""
        ax = axes(ax)
        with torch.no_grad():
            periods = self.periods().cpu().numpy()
            periods = np.unique(periods[np.isfinite(periods)])
            if periods.size == 0:
                raise InvalidArgument("every learned rate is 0: there is no period to draw")
            wide = is_wide(periods)
            end = as_periods([longest])[0] if longest else float(periods[-1]) * (1 if wide else 2)
            tau = np.geomspace(periods[0] / 8, end, 4000) if wide else np.linspace(0, end, 2000)
            ax.plot(tau, self.kernel(torch.from_numpy(tau)).cpu().numpy(), linewidth=1.2)
        inside = periods[periods <= end]
        for period in inside:
            ax.axvline(period, color="tab:orange", linewidth=1, alpha=0.6, zorder=0)
        if len(inside) <= SHOWN_PERIODS:
            for period in inside:
                ax.annotate(
                    f"{period:.6g}",
                    (period, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(3, -12),
                    textcoords="offset points",
                )
        ax.set(xscale="log" if wide else "linear", xlabel="elapsed time", ylabel=r"$\psi(\tau)$")
        return ax


SHOWN_PERIODS = 6  # with their numbers


class BochnerTime(PeriodicTime):
    r"""Bochner's features: inner products of encoded times are a learned kernel of the elapsed time (Xu et al. 2019).

    $$\Phi(t) = F^{-1/2} [\cos 2\pi r_1 t, \sin 2\pi r_1 t, \dots, \cos 2\pi r_F t, \sin 2\pi r_F t], \qquad
    \langle \Phi(t), \Phi(t') \rangle = \frac1F \sum_i \cos 2\pi r_i (t - t') = \psi(t - t'), \qquad F = \mathrm{dim} / 2.$$

    By Bochner's theorem every continuous kernel of the elapsed time with $\psi(0) = 1$ is such a mean over a law of rates. `spectrum`
    says how that law is learned:

    - `"free"` (the paper's non-parametric form): each rate by itself, $r_i = 1/P_i + s_i/H$. The first period P and the
      horizon H are exact numbers, the shift s is learned from 0. A phase at the end of the horizon moves by s turns, so that gradients
      are of order one whatever t/P is; with logarithms of periods as parameters they are $2\pi t/P$. (They grow with t/H: count times from an
      origin nearby where it matters, as `TimeAttention` does.)
    - `"normal"` (the paper's location-scale form): $r_i = \mu + \sigma\, \Phi_N^{-1}(u_i)$; $\mu = 0$ at first, and a period of one
      $\sigma$ is the geometric mean of the range.
    - `"mixture"`: `components` normal laws share the frequencies evenly; their weights, a softmax, are the squares of amplitudes. (With
      round(w F) points each, as one may read the idea, the weights would have no gradient.)
    - `"flow"`, also `"mlp"` (the paper's inverse distribution function): $r_i = e^{-g(u_i)}$, g a small network of each $u_i$ by itself.

    The base points are $u_i = (i - 1/2)/F$ (`sampler="quantile"`) or drawn once (`"random"`); `resample="train"` draws others in each call of
    `forward` while training, so times that meet in one inner product go through one call. Evaluation is always deterministic.

    With F rates drawn independently from a law with $E|2\pi r| \le \sigma$,
    $$P\Big(\sup_{|\tau| \le T} |\langle \Phi(t + \tau), \Phi(t) \rangle - \psi(\tau)| \ge \epsilon\Big)
    \le 4 \sqrt{\sigma T/\epsilon}\, e^{-F\epsilon^2/16} + 2 e^{-F\epsilon^2/8}.$$
    This is about `sampler="random"` alone. It says nothing of quantile points, which are closer in practice, nor of *trained*
    `"free"` frequencies, which are no sample of anything.

    `init="authors"` is the form of the paper's code, $[\beta \sin(t\, 10^{-s}) \mid \beta' \cos(t\, 10^{-s'})]$, all of it trained, s and
    s' evenly from 0 to 8 at first: no factor $F^{-1/2}$, and invariant at the start alone. `calibrate` has no say in it.

    Learning a period is not convex: a gradient finds P where $|1/P_i - 1/P|$ times the span of a sequence is below about a half. Give known cycles as
    `periods`, or those of `heedful.ops.periodogram` to `calibrate`.

    Args:
        dim: even; two features for each frequency.
        period_range: (shortest, longest) period to start at; `"auto"` is 1 to 10,000 until `calibrate` has seen the data.
        periods: periods to start at besides, numbers in the unit of the times or strings such as "1d" for times in seconds. The first
            frequencies of `"free"`, the first means of `"normal"` and `"mixture"`.
        normalize: the factor $F^{-1/2}$, by which features have norm 1.
        layout: `"interleaved"` as above, or `"half"` for all cosines and then all sines.
        trainable: False keeps all frequencies where they start.

    >>> import torch
    >>> encoding = BochnerTime(6, periods=["1d", "7d"])
    >>> now = torch.tensor([1388533518.993], dtype=torch.float64)
    >>> (encoding(now) * encoding(now + 86400)).sum(-1).allclose(encoding.kernel(86400.0))
    True
    >>> encoding.periods().tolist()
    [86400.0, 604800.0, 100.0]
    """

    def __init__(
        self,
        dim: int,
        spectrum: Spectra = "free",
        *,
        sampler: Sampler = "quantile",
        resample: Resample = "never",
        components: int = 4,
        period_range: PeriodRange = "auto",
        periods: Sequence[float | str] | None = None,
        normalize: bool = True,
        layout: Layout = "interleaved",
        init: Init = "log",
        trainable: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(2, dim=dim)
        if dim % 2:
            raise InvalidArgument(f"dim must be even, a cosine and a sine for each frequency; got {dim}")
        check_choice(Spectra, spectrum=spectrum)
        check_choice(Sampler, sampler=sampler)
        check_choice(Resample, resample=resample)
        check_choice(Layout, layout=layout)
        check_choice(Init, init=init)
        check_whole(components=components)
        self.dim, self.sampler, self.resample, self.components = dim, sampler, resample, components
        self.period_range, self.normalize, self.layout = period_range, normalize, layout
        self.init, self.trainable = init, trainable
        self._named = {"spectrum": spectrum, "periods": periods}
        self._check(spectrum, len(as_periods(periods)))
        place = {"device": device, "dtype": dtype}
        self.law = self._law(spectrum, place)
        self.scales = nn.Parameter(torch.ones(dim, **place), requires_grad=trainable) if init == "authors" else None
        self._start(DEFAULT, [])

    def _check(self, spectrum: str, count: int) -> None:
        if spectrum == "free" and (self.sampler, self.resample) != ("quantile", "never"):
            raise InvalidArgument(
                "spectrum='free' trains each frequency and has no base points: sampler and resample are for "
                "'normal', 'mixture' and 'flow'"
            )
        if self.init == "authors" and (
            spectrum != "free" or count or self.period_range != "auto" or self.layout == "half"
        ):
            raise InvalidArgument(
                "init='authors' is one fixed form: spectrum='free', with its own periods and layout; leave these arguments out"
            )
        if spectrum == "mixture" and self.components > self.dim // 2:
            raise InvalidArgument(
                f"dim={self.dim} has {self.dim // 2} frequencies, too few for components={self.components}"
            )
        most = {"free": self.dim // 2, "normal": 1, "mixture": self.components}.get(spectrum, 0)
        if count > most:
            raise InvalidArgument(
                f"spectrum={spectrum!r} with dim={self.dim} takes at most {most} periods to start at; got {count}"
            )

    def _law(self, spectrum: str, place: dict[str, Any]) -> Law:
        frequencies, drawing = self.dim // 2, {"sampler": self.sampler, "resample": self.resample}
        if self.init == "authors":
            return Exponents(self.dim, self.trainable, most=8, copies=2, **place)
        if spectrum == "free":
            return Free(frequencies, self.trainable, **place)
        if spectrum in ("normal", "mixture"):
            components = 1 if spectrum == "normal" else self.components
            centred = spectrum == "normal"
            return Mixture(frequencies, self.trainable, **drawing, components=components, centred=centred, **place)
        return Flow(frequencies, self.trainable, **drawing, **place)

    def _start(self, scale: TimeScale, periods: list[float]) -> None:
        self.law.start(ranged(self.period_range, scale), as_periods(self._named["periods"]) + periods)
        if self.scales is not None:
            self.scales.data.fill_(1)

    def forward(self, times: Tensor) -> Tensor:
        """Features `(..., dim)` of times `(...,)`."""
        self.law.redraw()
        times = self._float64(times)
        with full_precision(times.device):
            angles = 2 * torch.pi * self._turns(times).to(self._dtype())
            if self.scales is not None:
                sine, cosine = angles.chunk(2, dim=-1)
                return self.scales.to(angles) * torch.cat((sine.sin(), cosine.cos()), dim=-1)
            amplitudes = self.amplitudes()
            parts = angles.cos() * amplitudes, angles.sin() * amplitudes
            return torch.cat(parts, dim=-1) if self.layout == "half" else torch.stack(parts, dim=-1).flatten(-2)

    def rates(self) -> Tensor:
        """Turns per unit of time, float64 `(dim / 2,)`, differentiable; `(dim,)` for `init="authors"`, sines first."""
        return self.law.rates()

    def turns(self, times: Tensor) -> Tensor:
        """Phases of times `(...,)` in turns, `(..., dim / 2)` within [0, 1], reduced in float64, differentiable."""
        if self.scales is not None:
            raise Unsupported(
                "init='authors' trains the frequencies of sines and cosines apart, so there are no pairs to turn; use init='log', "
                "or an interaction that adds or joins features"
            )
        return super().turns(times)

    def _turns(self, times: Tensor) -> Tensor:
        return self.law.turns(times)

    def amplitudes(self) -> Tensor:
        """What cosine and sine of each frequency are multiplied with, `(dim / 2,)`; their squares are the kernel's weights."""
        if self.scales is not None:
            # The mean over t of sin(t) sin(t + tau) is cos(tau) / 2.
            return self.scales.to(self._dtype()).abs() / 2**0.5
        shares = self.law.shares()
        return (shares if self.normalize else shares * self.law.frequencies).sqrt().to(self._dtype())

    def extra_repr(self) -> str:
        return f"{self.dim}, spectrum={self._named['spectrum']!r}"
