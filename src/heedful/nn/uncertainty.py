"""Attention that knows how sure it is: a sparse variational Gaussian process on the scores of a kernel SVD."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._plot import axes
from heedful._result import Result
from heedful._runtime import eval_mode
from heedful.kernels import Kernel
from heedful.nn._describe import Causal, MapName, Primal, Sampling, Weights
from heedful.nn.primal_core import PrimalCore
from heedful.ops.primal import TrackLoss
from heedful.ops.request import wide

Average = Literal["logits", "probs"]


class Marginal(NamedTuple):
    """The posterior of every token and channel before the last linear map, each `[B, H, n, s]`."""

    mean: Tensor
    std: Tensor


class GaussianProcessAttention(PrimalCore):
    r"""Kernel-eigen-pair sparse variational Gaussian process attention, KEP-SVGP (Chen et al. 2024), sum form.

    The e- and r-scores of `PrimalAttention` are the inducing features. With $l = e^{\log l} = \Lambda^{-1/2}$ per head and, for
    each of s channels c, a variational mean $m_c$ and a lower triangular factor $L_c$ with positive diagonal,

    $$v_t = (e_t + r_t) \odot l^2, \qquad f_{tc} \sim N(v_t \cdot m_c,\; \|v_t L_c\|^2), \qquad O_h = f W^T + b,$$

    heads are concatenated, and there is no output map. Every forward pass draws, in training and in eval mode; set
    `generator` to repeat a draw. `kl()` is the price of the posterior, `ksvd_loss()` that of the scores with lambda = l.

    Arguments are those of `PrimalAttention`. Where ours differs from the authors' code: L_c is triangular in its own two
    axes (theirs has rank s - c, which the KL does not know), noise is independent between channels as the KL assumes, and
    padding has no part. The concatenated form, which fixes the length, is left out.

    >>> import torch
    >>> from heedful.nn import GaussianProcessAttention
    >>> layer = GaussianProcessAttention(32, 4, rank=5, max_len=50)
    >>> layer(torch.randn(2, 19, 32)).shape, bool(layer.kl() > 0)
    (torch.Size([2, 19, 32]), True)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        rank: int = 10,
        *,
        max_len: int | None = None,
        rank_multi: int = 10,
        sampling: Sampling = "segment_mean",
        weights: Weights | None = None,
        causal: Causal = False,
        feature_map: MapName | Kernel = "cosine",
        bias: bool = True,
        track_loss: TrackLoss = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        form = Primal(rank, rank_multi, sampling, weights, causal, feature_map, track_loss)
        super().__init__(embed_dim, num_heads, form, max_len, bias, device, dtype)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_heads, *shape, device=device, dtype=dtype))

        self.log_l = empty(rank)
        self.mean = empty(rank, rank)  # component, channel
        self.log_diagonal = empty(rank, rank)  # channel, component
        self.lower = empty(rank, rank, rank)  # channel, and a matrix of which what is below the diagonal counts
        self.head_proj = nn.Linear(rank, self.head_dim, bias=bias, device=device, dtype=dtype)
        self.generator: torch.Generator | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scores start as in `PrimalAttention`; l = 1, m ~ N(0, 1/s), L = I / 10."""
        super().reset_parameters()
        self.head_proj.reset_parameters()
        nn.init.zeros_(self.log_l)
        nn.init.normal_(self.mean, std=self.rank**-0.5)
        nn.init.constant_(self.log_diagonal, -2.302585)
        nn.init.zeros_(self.lower)

    def _lambda(self) -> Tensor:
        return self.log_l.exp()

    @property
    def factors(self) -> Tensor:
        """L `[H, s, s, s]`: for every channel a lower triangular matrix with positive diagonal."""
        return self.lower.tril(-1) + self.log_diagonal.exp().diag_embed()

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """One draw, `(B, n, embed)` -> `(B, n, embed)`; zero at padding."""
        x, keep = self._entry(x, key_padding_mask)
        mean, std = self._marginal(x, keep)
        noise = torch.randn(mean.shape, generator=self.generator, dtype=mean.dtype, device=mean.device)
        y = self.head_proj(mean + std * noise).transpose(1, 2).flatten(-2)
        return y if keep is None else y.masked_fill(~keep[..., None], 0.0)

    def marginal(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Marginal:
        """Mean and standard deviation of f, which `forward` draws."""
        return self._marginal(*self._entry(x, key_padding_mask))

    def _marginal(self, x: Tensor, keep: Tensor | None) -> Marginal:
        scale = (2 * self.log_l).exp().diag_embed()  # [H, s, s]
        v = self._combine(x, keep, scale, scale, None)  # [B, H, n, s]
        spread = torch.einsum("bhnk,hckl->bhncl", v, self.factors.to(v.dtype))
        return Marginal(v @ self.mean.to(v.dtype), torch.linalg.vector_norm(spread, dim=-1))

    def kl(self) -> Tensor:
        r"""KL(q || N(0, Lambda^2)) over heads and channels, a 0-d tensor:

        $$\sum_c \tfrac12 \big[\|\mathrm{diag}(l^2) L_c\|_F^2 + \|\mathrm{diag}(l^2)\, m_c\|^2 - 2\textstyle\sum \log \mathrm{diag} L_c - 4 \sum \log l - s\big]$$
        """
        kind = wide(self.mean.dtype)
        square = (2 * self.log_l.to(kind)).exp()  # l^2, [H, s]
        trace = (square[:, None, :, None] * self.factors).square().sum()
        distance = (square[..., None] * self.mean).square().sum()
        logarithms = 2 * self.log_diagonal.sum(dtype=kind) + 4 * self.rank * self.log_l.sum(dtype=kind)
        return (trace + distance - logarithms - self.num_heads * self.rank**2) / 2

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "generator": None}


def kl_loss(model: nn.Module, train_size: int, kl_scale: float = 1.0) -> Tensor:
    """The KL term of a model's Gaussian process layers, to be added to a *mean* loss: kl_scale * sum of KL / train_size.

    Without the division, as in the authors' code, the KL of a batch-mean loss counts once per sample. Zero where no layer
    is a Gaussian process.
    """
    check_whole(train_size=train_size)
    check_number(least=0, kl_scale=kl_scale)
    parts = [part.kl() for part in model.modules() if isinstance(part, GaussianProcessAttention)]
    if not parts:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    return torch.stack(parts).sum() * (kl_scale / train_size)


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Result):
    """Classes by Monte Carlo: `logits` of every draw `[draws, ..., classes]`, and the `probabilities` made of them."""

    logits: Tensor
    probabilities: Tensor

    _also = ("entropy", "disagreement")
    _not = ("logits",)

    @property
    def entropy(self) -> Tensor:
        """Of the probabilities, in nats: how unsure the prediction is."""
        return _entropy(self.probabilities)

    @property
    def disagreement(self) -> Tensor:
        """Entropy of the mean of all draws less their mean entropy, in nats: the part that is the model's ignorance."""
        draws = self.logits.softmax(dim=-1)
        return (_entropy(draws.mean(dim=0)) - _entropy(draws).mean(dim=0)).clamp_min(0.0)

    def plot(self, ax: Any = None, *, sample: int = 0) -> Any:
        """Probabilities of one sample, with their spread over the draws."""
        ax = axes(ax)
        draws = self.logits.softmax(dim=-1).reshape(len(self.logits), -1, self.logits.shape[-1])[:, sample].cpu()
        chosen = self.probabilities.reshape(-1, self.probabilities.shape[-1])[sample].cpu()
        ax.bar(range(len(chosen)), chosen.numpy(), yerr=draws.std(dim=0, correction=0).numpy())
        ax.set(xlabel="class", ylabel="probability", title=f"{len(draws)} draws")
        return ax

    def __repr__(self) -> str:
        shape = tuple(self.probabilities.shape)
        return f"Prediction({len(self.logits)} draws, probabilities {shape}, mean entropy {float(self.entropy.mean()):.3g})"


@torch.no_grad()
def mc_predict(
    model: nn.Module,
    *inputs: Any,
    mc_samples: int = 10,
    average: Average = "logits",
    seed: int | None = None,
    **named: Any,
) -> Prediction:
    """Runs a classifier with Gaussian process layers several times in eval mode, and averages.

    `average="logits"` is the authors'; `"probs"` averages probabilities, as the predictive distribution asks. With a seed
    the draws are the same every time. The model gets `inputs` and `named` and returns logits `[..., classes]`.

    >>> import torch
    >>> from heedful.nn import GaussianProcessAttention, mc_predict
    >>> model = torch.nn.Sequential(GaussianProcessAttention(8, 2, 3, max_len=5), torch.nn.Flatten(), torch.nn.Linear(40, 4))
    >>> mc_predict(model, torch.randn(2, 5, 8), seed=0).probabilities.shape
    torch.Size([2, 4])
    """
    check_whole(mc_samples=mc_samples)
    check_choice(Average, average=average)
    layers = [part for part in model.modules() if isinstance(part, GaussianProcessAttention)]
    if not layers:
        raise InvalidArgument("the model has no GaussianProcessAttention, so every draw would be the same")
    with eval_mode(model), _seeded(layers, seed):
        draws = [model(*inputs, **named) for _ in range(mc_samples)]
    if not isinstance(draws[0], Tensor):
        raise InvalidArgument(f"the model must return logits, a tensor; got {type(draws[0]).__name__}")
    logits = torch.stack(draws).float()
    if average == "logits":
        return Prediction(logits, logits.mean(dim=0).softmax(dim=-1))
    return Prediction(logits, logits.softmax(dim=-1).mean(dim=0))


@contextmanager
def _seeded(layers: list[GaussianProcessAttention], seed: int | None) -> Iterator[None]:
    """Layers that draw by this seed; afterwards they draw as before."""
    before = [layer.generator for layer in layers]
    try:
        for at, layer in enumerate(layers):
            if seed is not None:
                layer.generator = torch.Generator(layer.mean.device).manual_seed(seed + at)
        yield
    finally:
        for layer, generator in zip(layers, before, strict=True):
            layer.generator = generator


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(dim=-1)
