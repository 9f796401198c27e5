"""Time encodings beside Bochner's and Mercer's: those of other papers, straight lines, places; and all of them by name."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful._runtime import full_precision
from heedful.nn._frequencies import DEFAULT, Free, Law, TimeScale, check_times, exact, number, ranged
from heedful.nn._laws import Exponents
from heedful.nn.mercer import MercerTime
from heedful.nn.positions import Kind, Positions
from heedful.nn.time import BochnerTime, Init, PeriodRange, TimeEncoding

EncodingName = Literal["bochner", "mercer", "time2vec", "tgat", "linear", "sinusoidal", "learned"]


class Time2Vec(TimeEncoding):
    r"""$[w_0 t/H + \varphi_0, \sin(2\pi r_1 t + \varphi_1), \dots]$ (Kazemi et al. 2019, "Time2Vec").

    Rates are those of `BochnerTime(spectrum="free")` and H its horizon, where the paper has plain weights; phases start at 0, w_0 at 1.

    >>> import torch
    >>> Time2Vec(5)(torch.zeros(2, 3)).shape
    torch.Size([2, 3, 5])
    """

    def __init__(self, dim: int, *, period_range: PeriodRange = "auto", device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_whole(2, dim=dim)
        self.dim, self.period_range = dim, period_range
        self.law = Free(dim - 1, True, device=device, dtype=dtype)
        self.slope = nn.Parameter(torch.ones(1, device=device, dtype=dtype))
        self.phases = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self._start(DEFAULT, [])

    def _start(self, scale: TimeScale, periods: list[float]) -> None:
        self.law.start(ranged(self.period_range, scale), periods)

    def forward(self, times: Tensor) -> Tensor:
        """Features `(..., dim)` of times `(...,)`."""
        times = self._float64(times)
        with full_precision(times.device):
            line = (times / number(self.law.horizon)).to(self._dtype())[..., None] * self.slope
            angles = 2 * torch.pi * self.law.turns(times).to(self._dtype()) + self.phases[1:]
            return torch.cat((line + self.phases[:1], angles.sin()), dim=-1)


class TGATTime(TimeEncoding):
    r"""$\cos(2\pi r_i t + \varphi_i)$, all of it learned (Xu et al. 2020, "Inductive representation learning on temporal graphs").

    `init="authors"` has their angular frequencies $10^{-s_i}$, s evenly from 0 to 9 at first, whatever `calibrate` saw; `"log"` has
    rates as `BochnerTime(spectrum="free")`. Phases start at 0. Inner products depend on more than the elapsed time: give
    it elapsed times.

    >>> import torch
    >>> TGATTime(3)(torch.tensor([0, 1]))
    tensor([[1.0000, 1.0000, 1.0000],
            [0.5403, 1.0000, 1.0000]], grad_fn=<CosBackward0>)
    """

    def __init__(
        self,
        dim: int,
        *,
        init: Init = "authors",
        period_range: PeriodRange = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim)
        check_choice(Init, init=init)
        if init == "authors" and period_range != "auto":
            raise InvalidArgument("init='authors' has its own periods: leave period_range out, or use init='log'")
        self.dim, self.init, self.period_range = dim, init, period_range
        place = {"device": device, "dtype": dtype}
        self.law: Law = Exponents(dim, True, most=9, **place) if init == "authors" else Free(dim, True, **place)
        self.phases = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self._start(DEFAULT, [])

    def _start(self, scale: TimeScale, periods: list[float]) -> None:
        self.law.start(ranged(self.period_range, scale), periods)

    def forward(self, times: Tensor) -> Tensor:
        """Features `(..., dim)` of times `(...,)`."""
        turns = self.law.turns(self._float64(times)).to(self._dtype())
        return (2 * torch.pi * turns + self.phases).cos()


class LinearTime(TimeEncoding):
    r"""$W [t/H,\ \operatorname{sign}(t) \log(1 + |t|/g)] + b$: a line for long times and a logarithm for short ones.

    The baseline for every other encoding. `calibrate` sets g to the 1st percentile of positive gaps and H to the 99th percentile of spans; with
    one unit for both terms, as it is usually written, one of them would be tiny or huge.

    >>> import torch
    >>> LinearTime(5)(torch.tensor([[0.0, -2.5]])).shape
    torch.Size([1, 2, 5])
    """

    units: Tensor

    def __init__(self, dim: int, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        check_whole(dim=dim)
        self.dim = dim
        self.map = nn.Linear(2, dim, device=device, dtype=dtype)
        self.register_buffer("units", exact([1.0, 1.0], device))
        self._start(DEFAULT, [])

    def _start(self, scale: TimeScale, periods: list[float]) -> None:
        self.units.copy_(exact([scale.horizon, scale.low / 2]))

    def forward(self, times: Tensor) -> Tensor:
        """Features `(..., dim)` of times `(...,)`."""
        times = self._float64(times)
        with full_precision(times.device):
            horizon, gap = number(self.units)
            both = torch.stack((times / horizon, times.sign() * (times.abs() / gap).log1p()), dim=-1).to(self._dtype())
            return functional.linear(both, self.map.weight.to(both), self.map.bias.to(both))


class PositionTime(TimeEncoding):
    """The place in the sequence in place of the time: what a model knows that sees the order alone. The table is that of `Positions`.

    >>> import torch
    >>> PositionTime(4)(torch.tensor([[17.0, 900.0]]))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    like: Tensor

    def __init__(
        self, dim: int, kind: Kind = "sinusoidal", *, max_len: int | None = None, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.positions = Positions(dim, kind, max_len=max_len, device=device, dtype=dtype)
        self.dim, self.kind, self.max_len = dim, kind, max_len
        # Sinusoidal positions have no parameter to say in which dtype they are wanted.
        self.register_buffer("like", torch.empty(0, device=device, dtype=dtype), persistent=False)

    def forward(self, times: Tensor) -> Tensor:
        """The vectors of places 0, 1, ... `(..., n, dim)` of times `(..., n)`."""
        check_times(times)
        if times.dim() == 0:
            raise InvalidArgument("times must have an axis of places, (..., n); got a single number")
        dtype = torch.promote_types(self.like.dtype, torch.float32)
        table = self.positions.table(times.shape[-1], times.device).to(dtype)
        return table.expand(*times.shape, self.dim)


def time_encoding(name: EncodingName, dim: int, **options: Any) -> TimeEncoding:
    """A time encoding of so many features by its name; `options` go to its class.

    `"mercer"` is `MercerTime` with `output="projected"` and `degree=5` unless said otherwise; with `output="features"` its size must be a
    multiple of 2 `degree` + 1. `"sinusoidal"` and `"learned"` are `PositionTime`.

    >>> time_encoding("linear", 8)
    LinearTime(
      (map): Linear(in_features=2, out_features=8, bias=True)
    )
    >>> time_encoding("mercer", 14, degree=3, output="features").count
    2
    """
    check_choice(EncodingName, name=name)
    if name in ("sinusoidal", "learned"):
        return PositionTime(dim, name, **options)
    if name == "mercer":
        return _mercer(dim, options)
    classes = {"bochner": BochnerTime, "time2vec": Time2Vec, "tgat": TGATTime, "linear": LinearTime}
    return classes[name](dim, **options)


def _mercer(dim: int, options: dict[str, Any]) -> MercerTime:
    check_whole(dim=dim)
    options = {"degree": 5, "output": "projected", **options}
    check_whole(degree=options["degree"])
    each = 2 * options["degree"] + 1 if options["output"] == "features" else 1
    encoding = MercerTime(**{"periods": max(1, dim // each), **options})
    if encoding.dim != dim:
        raise InvalidArgument(
            f"MercerTime with {encoding.count} periods has {encoding.dim} features, {each} for each; got dim={dim}"
        )
    return encoding
