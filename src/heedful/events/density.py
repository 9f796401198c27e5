"""The density of a waiting time: a mixture of log-normal laws, in closed form."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.special import log_ndtr, ndtr

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_STEPS = 60  # halvings of an interval in which a quantile lies


class LogNormalMixture(NamedTuple):
    r"""Waiting times $\Delta$ whose logarithm is a mixture of normal laws.

    $$p(\Delta) = \sum_c w_c\, \frac{1}{\Delta\, a\, s_c}\, \varphi\!\left(\frac{z - \mu_c}{s_c}\right), \qquad z = \frac{\log \Delta - b}{a},$$

    where a and b are the standard deviation and the mean of $\log \Delta$ in training. Survival function, quantiles and mean need no
    sampling and no integral (Shchur et al. 2020, "Intensity-free learning of temporal point processes").

    >>> import torch
    >>> one = LogNormalMixture(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    >>> round(float(one.log_prob(torch.tensor(1.0))), 4), round(float(one.quantile(0.5)), 4)
    (-0.9189, 1.0)
    """

    log_weights: Tensor  # [..., C]
    means: Tensor  # [..., C]
    log_scales: Tensor  # [..., C]
    shift: float = 0.0  # b
    spread: float = 1.0  # a

    @classmethod
    def of(cls, raw: Tensor, shift: float, spread: float) -> LogNormalMixture:
        """From `[..., 3 C]` real numbers; standard deviations stay between e^-7 and e^5."""
        weights, means, scales = raw.chunk(3, dim=-1)
        return cls(functional.log_softmax(weights, dim=-1), means, 6 * torch.tanh(scales / 6) - 1, shift, spread)

    def at(self, places: Any) -> LogNormalMixture:
        """The laws of some places, by an index of the leading axes."""
        return self._replace(
            log_weights=self.log_weights[places], means=self.means[places], log_scales=self.log_scales[places]
        )

    def cpu(self) -> LogNormalMixture:
        """The same on the CPU."""
        return self._replace(
            log_weights=self.log_weights.cpu(), means=self.means.cpu(), log_scales=self.log_scales.cpu()
        )

    def _standard(self, waits: Tensor) -> Tensor:
        """z of waits `[...]`, one for each component."""
        z = ((waits.double().log() - self.shift) / self.spread).to(self.means.dtype)
        return (z[..., None] - self.means) * torch.exp(-self.log_scales)

    def log_prob(self, waits: Tensor) -> Tensor:
        """log p of waits above 0, per unit of time."""
        z = self._standard(waits)
        inner = torch.logsumexp(self.log_weights - 0.5 * z.square() - self.log_scales - _HALF_LOG_2PI, dim=-1)
        return inner - waits.double().log().to(inner.dtype) - math.log(self.spread)

    def log_survival(self, waits: Tensor) -> Tensor:
        """log P(wait > `waits`); 0 for waits of 0."""
        held = waits > 0
        z = self._standard(torch.where(held, waits, 1.0))
        return torch.where(held, torch.logsumexp(self.log_weights + log_ndtr(-z), dim=-1), 0.0)

    def cdf(self, waits: Tensor) -> Tensor:
        """P(wait <= `waits`)."""
        held = waits > 0
        z = self._standard(torch.where(held, waits, 1.0))
        return torch.where(held, (self.log_weights.exp() * ndtr(z)).sum(-1), 0.0)

    def quantile(self, share: float) -> Tensor:
        """The wait that is not exceeded with probability `share`, by halving an interval, in float64."""
        weights, means, scales = (part.double() for part in (self.log_weights.exp(), self.means, self.log_scales.exp()))
        low, high = (means - 40 * scales).amin(-1), (means + 40 * scales).amax(-1)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            below = (weights * ndtr((middle[..., None] - means) / scales)).sum(-1) < share
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return torch.exp(self.shift + self.spread * (low + high) / 2)

    def mean(self) -> Tensor:
        """The expected wait; heavy tails make it large, and infinite in floating point."""
        means, scales = self.means.double(), self.log_scales.double().exp()
        inner = self.log_weights.double() + self.shift + self.spread * means + (self.spread * scales).square() / 2
        return torch.logsumexp(inner, dim=-1).exp()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One wait for each place."""
        picked = torch.multinomial(self.log_weights.exp().flatten(0, -2), 1, generator=generator)
        picked = picked.reshape(*self.log_weights.shape[:-1], 1)
        mean, scale = (part.gather(-1, picked)[..., 0].double() for part in (self.means, self.log_scales.exp()))
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64, device=mean.device)
        return torch.exp(self.shift + self.spread * (mean + scale * noise))
