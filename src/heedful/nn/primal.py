"""Primal-Attention: attention as an asymmetric kernel SVD, at a cost linear in the sequence's length."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from heedful._checks import check_number
from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import full_precision
from heedful.kernels import Kernel
from heedful.nn._describe import Causal, MapName, Primal, Sampling, Weights
from heedful.nn.primal_core import PrimalCore
from heedful.ops import LinearState, ksvd, linear
from heedful.ops import primal as ops
from heedful.ops.primal import TrackLoss


class PrimalState(NamedTuple):
    """All that a causal primal layer remembers of the past: its size does not depend on how long that was."""

    left: LinearState | Tensor  # prefix: sums of x w_e; cummean: the sum of queries, [B, H, p]
    right: LinearState | Tensor
    seen: Tensor  # [B], tokens that were not padding
    length: int  # all tokens


class PrimalStep(NamedTuple):
    """The output of the tokens given, and the state from which the next ones continue."""

    output: Tensor
    state: PrimalState


class PrimalAttention(PrimalCore):
    r"""Self-attention as an asymmetric kernel SVD, O(n) in time and memory (Chen et al. 2023).

    Of every head the layer takes queries and keys, their features phi, and n' rows F that stand for its input; with
    learned $W_e, W_r \in R^{n' \times s}$ and C shared by the heads,

    $$E = \Phi_q F^T W_e, \qquad R = \Phi_k F^T W_r, \qquad O_h = [E, R]\, C^T + b, \qquad Y = \mathrm{concat}_h(O_h) W_o^T + b_o.$$

    There are no values and no n x n matrix. E is unnormalised linear attention whose values W_e are parameters tied to
    positions. `ksvd_loss()` is the regulariser of the last forward pass.

    Args:
        rank: s, the number of components.
        max_len: with `weights="data"`, n' = min(max_len, rank * rank_multi). Any length may be given afterwards, but for
            `causal="prefix"`, which ends at `max_len`.
        sampling: how F is taken. `"stride"`: n' evenly spaced tokens (the authors'); all others are then invisible to
            every other token. `"segment_mean"` (default): means of n' segments, so that every token is seen, at the same
            order of cost; both are equal where n' = n.
        weights: `"data"` as above; `"static"`: E = Phi_q W_e with W_e of shape (p, s), which mixes no tokens at all.
        causal: `"prefix"`: token t reads sum over j <= t of x_j w_{rho(j)}, rho(j) = floor(j n' / max_len).
            `"cummean"` (the authors'): queries and keys become means over the past, weights are static.
        feature_map: `"cosine"` (x / norm of x), `"elu"`, `"relu"`, `"identity"`, `"random"`, or a kernel with finite features;
            data-dependent weights need as many features as a head is wide.
        dropout: of the heads' outputs, in training.
        track_loss: whether forward keeps what `ksvd_loss` needs, O(p s) per head. Turn it off to serve. `"kkt"` keeps what
            `ksvd_loss(penalty="kkt")` needs as well, which on a GPU takes a second pass over the tokens.

    Where ours differs from the authors' code: padding enters neither the sample, nor the loss, nor the mean over the past,
    and its output is zero; sums are in float32 under autocast; positions are found by integer arithmetic on the device.

    >>> import torch
    >>> from heedful.nn import PrimalAttention
    >>> layer = PrimalAttention(32, 4, rank=6, max_len=50)
    >>> layer(torch.randn(2, 19, 32)).shape
    torch.Size([2, 19, 32])
    >>> layer.ksvd_loss().shape
    torch.Size([])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        rank: int = 20,
        *,
        max_len: int | None = None,
        rank_multi: int = 10,
        sampling: Sampling = "segment_mean",
        weights: Weights | None = None,
        causal: Causal = False,
        feature_map: MapName | Kernel = "cosine",
        bias: bool = True,
        dropout: float = 0.0,
        track_loss: TrackLoss = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_number(least=0, high=1, dropout=dropout)
        form = Primal(rank, rank_multi, sampling, weights, causal, feature_map, track_loss)
        super().__init__(embed_dim, num_heads, form, max_len, bias, device, dtype)
        self.dropout = dropout
        self.lam = nn.Parameter(torch.empty(num_heads, rank, device=device, dtype=dtype))
        self.head_proj = nn.Linear(2 * rank, self.head_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Linear maps as torch starts them; W_e and W_r of unit norm per head, heads orthogonal; lambda uniform in [0, 1)."""
        super().reset_parameters()
        self.head_proj.reset_parameters()
        self.out_proj.reset_parameters()
        nn.init.uniform_(self.lam)

    def _lambda(self) -> Tensor:
        return self.lam

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """`(B, n, embed)` -> `(B, n, embed)`; `key_padding_mask` `(B, n)` is True at padding, where the output is zero."""
        x, keep = self._entry(x, key_padding_mask)
        return self._leave(self._combine(x, keep, *self._readout()), keep)

    def step(self, x: Tensor, state: PrimalState | None = None, key_padding_mask: Tensor | None = None) -> PrimalStep:
        """Continues a causal layer by one or more tokens `(B, t, embed)`, from a state of constant size.

        >>> import torch
        >>> from heedful.nn import PrimalAttention
        >>> layer, x = PrimalAttention(32, 4, max_len=50, causal="prefix"), torch.randn(1, 7, 32)
        >>> first = layer.step(x[:, :6])
        >>> layer.step(x[:, 6:], first.state).output.allclose(layer(x)[:, 6:], atol=1e-6)
        True
        """
        if not self.causal:
            raise Unsupported(
                "this layer sees the whole sequence; make it causal='prefix' or causal='cummean' to decode"
            )
        past = 0 if state is None else state.length
        x, keep = self._entry(x, key_padding_mask, past)
        if x.shape[1] == 0:
            raise InvalidArgument(f"step takes at least one token; got x of shape {tuple(x.shape)}")
        if state is not None and state.seen.shape != x.shape[:1]:
            raise InvalidArgument(f"the state is of {state.seen.shape[0]} sequences; x has {x.shape[0]}")
        seen = torch.ones(x.shape[:2], dtype=torch.long, device=x.device) if keep is None else keep.long()
        seen = seen.cumsum(dim=-1) if state is None else seen.cumsum(dim=-1) + state.seen[:, None]  # [B, t]
        query, key = self._projected(x)
        move = self._step_mean if self.causal == "cummean" else self._step_prefix
        with full_precision(query.device):
            scores, left, right = move(x, query, key, keep, seen, state)
            out = ops.read(scores, *self._readout()).to(query.dtype)
        return PrimalStep(self._leave(out, keep), PrimalState(left, right, seen[:, -1], past + x.shape[1]))

    def _step_mean(
        self, x: Tensor, query: Tensor, key: Tensor, keep: Tensor | None, seen: Tensor, state: PrimalState | None
    ) -> tuple[ops.Scores, Tensor, Tensor]:
        query, key = self._sums(query, keep), self._sums(key, keep)
        if state is not None:
            assert isinstance(state.left, Tensor)
            assert isinstance(state.right, Tensor)
            query, key = query + state.left[..., None, :], key + state.right[..., None, :]
        count = seen.clamp_min(1)[:, None, :, None]
        return self._scores(x, query / count, key / count, keep), query[..., -1, :], key[..., -1, :]

    def _step_prefix(
        self, x: Tensor, query: Tensor, key: Tensor, keep: Tensor | None, seen: Tensor, state: PrimalState | None
    ) -> tuple[ops.Scores, LinearState, LinearState]:
        before: Any = (None, None) if state is None else state[:2]
        phi = ops.features(query, key, self._kernel)
        rows = self._heads(x).to(phi[0].dtype)
        values = (w.to(phi[0].dtype) for w in self._values(seen - 1))
        e, r = (linear.step(ops.IDENTITY, f, rows, w, s) for f, w, s in zip(phi, values, before, strict=True))
        return ops.Scores(e.output, r.output), e.state, r.state

    @torch.no_grad()
    def fit_ksvd_(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Self:
        """Sets W_e, W_r and lambda to the exact kernel SVD of x, of unit norm per head; queries and keys stay as they are.

        Of several sequences it is the SVD of the kernel between all their tokens, for the weights are shared. Components
        beyond the rank of the kernel, which is at most the head's width for one sequence, are set to zero.
        """
        query, key, sample = self.features(x, key_padding_mask)
        query, key, sample = query.double(), key.double(), None if sample is None else sample.double()
        tokens = x.shape[0] * x.shape[1] if key_padding_mask is None else int((~key_padding_mask).sum())
        if tokens == 0 or not all(bool(part.isfinite().all()) for part in (query, key)):
            raise InvalidArgument(
                f"fit_ksvd_ takes finite numbers and one token or more; got x of shape {tuple(x.shape)}"
            )
        if sample is not None and x.shape[0] > 1:
            query, key, sample = query @ sample.mT, key @ sample.mT, None
        query, key = (part.transpose(0, 1).flatten(1, 2) for part in (query, key))  # [H, B n, features]
        sample = None if sample is None else sample[0]
        triplets = ksvd.ksvd(query, key, sample, self.rank)
        alive = triplets.values > triplets.values[:, :1] * 1e-12  # [H, s at most]
        if not bool(alive[:, 0].all()):
            raise InvalidArgument(
                "the kernel of x is zero in some head, so it has no singular vectors; give other input"
            )
        w_e, w_r = (
            w * alive[:, None, :] for w in ksvd.primal_weights(triplets.left, triplets.right, query, key, sample)
        )
        size = ((w_e.square() + w_r.square()).sum(dim=(1, 2), keepdim=True) / 2).sqrt()
        lam = torch.where(alive, (tokens / triplets.values).sqrt(), 0.0)
        for parameter, value in ((self.w_e, w_e / size), (self.w_r, w_r / size), (self.lam, lam)):
            parameter.zero_()
            parameter[..., : value.shape[-1]] = value.to(parameter)
        self._last = None
        return self

    def _readout(self) -> tuple[Tensor, None, Tensor | None]:
        return self.head_proj.weight, None, self.head_proj.bias  # both halves in one

    def _leave(self, out: Tensor, keep: Tensor | None) -> Tensor:
        """`[B, H, n, p]` -> `[B, n, embed]`, zero at padding."""
        out = out.transpose(1, 2).flatten(-2)
        if self.dropout and self.training:
            out = nn.functional.dropout(out, self.dropout)
        y = self.out_proj(out)
        return y if keep is None else y.masked_fill(~keep[..., None], 0.0)
