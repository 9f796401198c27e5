"""Times as vectors: what every time encoding shares, and Bochner's features (Xu et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful._runtime import full_precision, readable
from heedful.nn._frequencies import (
    DEFAULT,
    Free,
    TimeScale,
    as_periods,
    as_range,
    check_times,
    time_scale,
)
from heedful.nn._module import Module

Spectra = Literal["free", "normal", "mixture", "flow", "mlp"]
Layout = Literal["interleaved", "half"]


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
        """Fits the scale of time to a data set, in place: what is learned starts anew.

        Periods start between twice the 1st percentile of positive gaps and four times the 99th percentile of spans, or in
        `period_range` where that was given; periods given to the constructor stay.

        Args:
            times: `(B, n)`, sequences as rows.
            mask: boolean `(B, n)`, True = a real event; padding enters nothing.
            periods: further periods to start at, as from `heedful.ops.periodogram`; the log-spaced ones fill up what is left.
                Encodings without periods of their own pass over them.
        """
        scale = time_scale(times, mask)
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


class BochnerTime(TimeEncoding):
    r"""$\Phi(t) = F^{-1/2} [\cos 2\pi r_1 t, \sin 2\pi r_1 t, \dots]$ with learned rates: inner products depend on differences alone.

    >>> import torch
    >>> BochnerTime(6)(torch.tensor([[0.0, 1.5, 2.0]])).shape
    torch.Size([1, 3, 6])
    """

    def __init__(
        self,
        dim: int,
        spectrum: Spectra = "free",
        *,
        period_range: Literal["auto"] | tuple[float | str, float | str] = "auto",
        periods: Sequence[float | str] | None = None,
        normalize: bool = True,
        layout: Layout = "interleaved",
        trainable: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(2, dim=dim)
        if dim % 2:
            raise InvalidArgument(f"dim must be even, a cosine and a sine for each frequency; got {dim}")
        check_choice(Layout, layout=layout)
        self.dim, self.period_range, self.normalize = dim, period_range, normalize
        self.layout, self.trainable = layout, trainable
        self._named = {"spectrum": spectrum, "periods": periods}
        self.law = Free(dim // 2, trainable, device=device, dtype=dtype)
        self._start(DEFAULT, [])

    def _start(self, scale: TimeScale, periods: list[float]) -> None:
        given = as_range(self.period_range)
        if given is not None:
            scale = given._replace(horizon=given.horizon if scale is DEFAULT else scale.horizon)
        own = as_periods(self._named["periods"])
        if len(own) > self.law.frequencies:
            raise InvalidArgument(f"dim={self.dim} has {self.law.frequencies} frequencies; got {len(own)} periods")
        self.law.start(scale, own + periods)

    def forward(self, times: Tensor) -> Tensor:
        """Features `(..., dim)` of times `(...,)`."""
        with full_precision(times.device):
            turns = 2 * torch.pi * self.turns(times)
            amplitudes = self.amplitudes()
            parts = turns.cos() * amplitudes, turns.sin() * amplitudes
            return torch.cat(parts, -1) if self.layout == "half" else torch.stack(parts, -1).flatten(-2)

    def rates(self) -> Tensor:
        """Turns per unit of time, float64 `(dim / 2,)`."""
        return self.law.rates()

    def turns(self, times: Tensor) -> Tensor:
        """Phases `(..., dim / 2)` in turns, within [0, 1]."""
        return self.law.turns(self._float64(times)).to(self._dtype())

    def amplitudes(self) -> Tensor:
        """What cosine and sine of each frequency are multiplied with, `(dim / 2,)`."""
        shares = self.law.shares()
        return (shares if self.normalize else shares * self.law.frequencies).sqrt().to(self._dtype())
