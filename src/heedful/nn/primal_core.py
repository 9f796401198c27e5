"""What layers made of e- and r-scores share: projections, sample, weights, loss, and the kernel they decompose."""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from torch import Tensor, nn

from heedful._checks import check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import full_precision
from heedful.nn._describe import Primal, find_map
from heedful.nn._module import Module, check_heads, check_input
from heedful.nn._primal_results import PrimalDual, PrimalScores
from heedful.ops import ksvd
from heedful.ops import primal as ops
from heedful.ops.primal import Penalty, Reduction, Trace
from heedful.ops.request import wide


class PrimalCore(Module):
    """Queries, keys and weights, from which e- and r-scores come; a subclass says what it makes of the scores."""

    def __init__(
        self, embed_dim: int, num_heads: int, form: Primal, max_len: int | None, bias: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_whole(optional=True, max_len=max_len)
        self.embed_dim, self.num_heads, self.max_len, self.bias = embed_dim, num_heads, max_len, bias
        self.head_dim = embed_dim // num_heads
        self.rank, self.rank_multi, self.sampling = form.rank, form.rank_multi, form.sampling
        self.weights, self.causal = form.weights, form.causal
        self.feature_map, self.track_loss = form.feature_map, form.track_loss
        self._kernel = find_map(form.feature_map)
        features = self._check(self._kernel.feature_size(self.head_dim))
        rows = features if self.weights == "static" else self._rows
        self.in_proj = nn.Linear(embed_dim, 2 * embed_dim, bias=bias, device=device, dtype=dtype)  # queries, then keys
        self.w_e = nn.Parameter(torch.empty(num_heads, rows, form.rank, device=device, dtype=dtype))
        self.w_r = nn.Parameter(torch.empty(num_heads, rows, form.rank, device=device, dtype=dtype))
        self._last: ops.Parts | None = None
        self._recorded = False  # whether gradients were recorded in the pass that left it

    def _check(self, features: int | None) -> int:
        if features is None:
            raise InvalidArgument(f"feature_map={self.feature_map!r} has no finite features; see heedful.FeatureMap")
        if self.weights == "data":
            if self.max_len is None:
                raise InvalidArgument(
                    "weights='data' has a row of weights per sampled position: give max_len, the longest length"
                )
            if features != self.head_dim:
                raise InvalidArgument(
                    f"weights='data' needs as many features as a head is wide, {self.head_dim}; "
                    f"feature_map={self.feature_map!r} has {features}: choose another, or weights='static'"
                )
        elif not self.causal:
            warnings.warn(
                f"{type(self).__name__}(weights='static') mixes no tokens: every output depends on its own token alone. "
                "weights='data' mixes, and so does causal='cummean'",
                stacklevel=4,
            )
        return features

    def reset_parameters(self) -> None:
        """Linear maps as torch starts them; weights of unit norm per head, heads orthogonal to one another."""
        self.in_proj.reset_parameters()
        with torch.no_grad():
            for weight in (self.w_e, self.w_r):
                # torch flattens the trailing axes: heads are orthonormal as vectors, columns are not. QR wants 32 bits.
                weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=wide(weight.dtype))))

    @property
    def _rows(self) -> int:
        """n', the number of rows that stand for a sequence."""
        return min(self.max_len or 1, self.rank * self.rank_multi)

    @property
    def description(self) -> Primal:
        """The layer as data."""
        return Primal(
            self.rank, self.rank_multi, self.sampling, self.weights, self.causal, self.feature_map, self.track_loss
        )

    def _lambda(self) -> Tensor:
        """`[H, s]`, whose square over n is the paper's Lambda."""
        raise NotImplementedError

    def scores(self, x: Tensor, key_padding_mask: Tensor | None = None) -> PrimalScores:
        """E and R of every head, written out."""
        x, keep = self._entry(x, key_padding_mask)
        scores = self._scores(x, *self._queries_keys(x, keep), keep)
        return PrimalScores(*(ops.kept(part, keep) for part in scores))

    def ksvd_loss(
        self, reduction: Reduction = "per_sample", trace: Trace = "param", penalty: Penalty = "objective"
    ) -> Tensor:
        """The regulariser of the last forward pass, a 0-d tensor: the mean of J^2 (`heedful.ops.primal.objective`).

        `reduction="per_sample"` squares J of every sequence, `"batch"` J of all tokens together; `trace` says which weights
        its last term takes; `penalty="kkt"` is the mean KKT residual instead, which unlike J is zero for a kernel SVD alone.
        On a GPU that takes `track_loss="kkt"`. After a pass under `torch.no_grad()` it has no gradient; in training, where it is
        asked for all the same, it raises.
        """
        if not self.track_loss or self._last is None:
            why = "no forward pass was run: call the layer first" if self.track_loss else "track_loss is False: set it"
            raise InvalidArgument(f"ksvd_loss is that of the last forward pass, and {why}")
        wanted = torch.is_grad_enabled()
        if wanted and self.training and not self._recorded:
            raise InvalidArgument(
                "the last forward pass recorded no gradients, so those of its loss would be wrong: call ksvd_loss under "
                "torch.no_grad() too, and give gradient checkpointing use_reentrant=False"
            )
        with full_precision(self._last.energy.device), torch.set_grad_enabled(wanted and self._recorded):
            return ops.penalty(self._last, self._lambda(), reduction, trace, penalty)

    def kkt_residual(
        self, x: Tensor, key_padding_mask: Tensor | None = None, reduction: Reduction = "per_sample"
    ) -> Tensor:
        """How far the layer is from a kernel SVD on x: 0 if and only if it is one. `[B, H]`, or `[H]` for `"batch"`."""
        self._refuse_prefix()
        x, keep = self._entry(x, key_padding_mask)
        none = self.w_e.new_zeros(1, self.rank)
        query, key = self._queries_keys(x, keep)
        weights = self._sample(x, keep), self.w_e, self.w_r, none, none, None, keep
        parts = ops.folded(query, key, *weights, feature_map=self._kernel, parts="kkt").parts
        assert parts is not None
        with full_precision(x.device):
            return ops.residual(parts, self._lambda(), reduction)

    def kernel_matrix(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        r"""$K_X = \Phi_q F^T F \Phi_k^T$, `[B, H, n, n]`: what the layer decomposes. O(n^2), to look at; zero at padding."""
        query, key, sample = self.features(x, key_padding_mask)
        with full_precision(query.device):
            return query @ key.mT if sample is None else (query @ sample.mT) @ (key @ sample.mT).mT

    def to_dual(self, x: Tensor, key_padding_mask: Tensor | None = None) -> PrimalDual:
        """The dual variables of x: E = K_X H_r is attention with the values H_r; see `heedful.ops.ksvd.dual_variables`."""
        query, key, sample = self.features(x, key_padding_mask)
        w_e, w_r = (w.to(query.dtype) for w in (self.w_e, self.w_r))
        with full_precision(query.device):
            return PrimalDual(*ksvd.dual_variables(w_e, w_r, query, key, sample))

    @torch.no_grad()
    def resize_(self, max_len: int) -> Self:
        """Changes `max_len`: W_e and W_r, new parameters then, are interpolated along positions.

        They are divided by the factor by which the number of rows grows, so that a sequence that changes slowly keeps its
        scores; not so for `causal="prefix"`, where tokens are added up, not rows.
        """
        check_whole(optional=True, max_len=max_len)
        if self.weights == "static":
            raise InvalidArgument("weights='static' have no positions, so there is nothing to resize")
        self._last = None
        before, self.max_len = self._rows, max_len
        scale = 1.0 if self.causal == "prefix" else before / self._rows
        # Samples by stride touch both ends, segments are cells.
        ends = self.sampling == "stride" and self.causal != "prefix"
        for name in ("w_e", "w_r"):
            old = getattr(self, name)
            kind = wide(old.dtype)
            new = nn.functional.interpolate(old.mT.to(kind), size=self._rows, mode="linear", align_corners=ends).mT
            setattr(self, name, nn.Parameter((scale * new).to(old.dtype).contiguous(), old.requires_grad))
        return self

    def _combine(self, x: Tensor, keep: Tensor | None, c_e: Tensor, c_r: Tensor | None, bias: Tensor | None) -> Tensor:
        """E c_e^T + R c_r^T + bias, `[B, H, n, v]`; keeps the parts of the loss."""
        if self.causal == "prefix":
            query, key = self._queries_keys(x, keep)
            scores = self._scores(x, query, key, keep)
            out = ops.read(scores, c_e, c_r, bias).to(query.dtype)
            parts = ops.scored(scores, self.w_e, self.w_r, keep) if self.track_loss else None
        else:
            rest = self._sample(x, keep), self.w_e, self.w_r, c_e, c_r, bias, keep
            how: dict[str, Any] = {"feature_map": self._kernel, "parts": self.track_loss}
            if self.causal:
                query, key = self._queries_keys(x, keep)
                out, parts = ops.folded(query, key, *rest, **how)
            else:
                pair = self.in_proj(x).view(*x.shape[:2], 2, self.num_heads, self.head_dim)
                out, parts = ops.folded_pair(pair, *rest, **how)
        if parts is not None:
            self._last = parts
            if self._recorded is not torch.is_grad_enabled():  # a module's attributes are slow to set
                self._recorded = not self._recorded
        return out

    def _entry(self, x: Tensor, key_padding_mask: Tensor | None, past: int = 0) -> tuple[Tensor, Tensor | None]:
        """The input, zero at padding whatever that held, and where there are tokens."""
        check_input("x", x, self.embed_dim)
        if self.causal == "prefix" and past + x.shape[1] > (self.max_len or 0):
            raise InvalidArgument(
                f"causal='prefix' has weights for max_len={self.max_len} positions; got {past + x.shape[1]}: resize_(max_len) "
                "makes room for more"
            )
        if key_padding_mask is None:
            return x, None
        if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
            got = getattr(key_padding_mask, "dtype", type(key_padding_mask).__name__)
            raise InvalidArgument(f"key_padding_mask must be boolean (True = ignore); got {got}")
        if key_padding_mask.shape != x.shape[:2]:
            raise InvalidArgument(
                f"got key_padding_mask of shape {tuple(key_padding_mask.shape)}, expected (batch, seq) = {tuple(x.shape[:2])}"
            )
        return x.masked_fill(key_padding_mask[..., None], 0.0), ~key_padding_mask

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)  # [B, H, n, p]

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = self.in_proj(x).chunk(2, dim=-1)
        return self._heads(query), self._heads(key)

    def _queries_keys(self, x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """`[B, H, n, p]` twice; means over the past for `"cummean"`."""
        query, key = self._projected(x)
        if self.causal != "cummean":
            return query, key
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[None] if keep is None else keep.cumsum(dim=-1)
        count = count.clamp_min(1)[:, None, :, None]
        return self._sums(query, keep) / count, self._sums(key, keep) / count

    def _sums(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """Sums over the past, in which padding has no part."""
        return ops.kept(x, keep).cumsum(dim=2, dtype=wide(x.dtype))

    def _sample(self, x: Tensor, keep: Tensor | None) -> Tensor | None:
        if self.weights == "static":
            return None
        return self._heads(ops.sample(x, self._rows, self.sampling, keep))

    def _scores(self, x: Tensor, query: Tensor, key: Tensor, keep: Tensor | None) -> ops.Scores:
        if self.causal == "prefix":
            place = torch.arange(x.shape[1], device=x.device) if keep is None else keep.cumsum(dim=-1) - 1
            w_e, w_r = self._values(place)
            return ops.primal_attention(query, key, self._heads(x), w_e, w_r, feature_map=self._kernel, is_causal=True)
        return ops.primal_attention(query, key, self._sample(x, keep), self.w_e, self.w_r, feature_map=self._kernel)

    def _values(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of W_e and W_r for positions `[n]` or `[B, n]`: `[H, n, s]` or `[B, H, n, s]`."""
        assert self.max_len is not None
        row = (place.clamp_min(0) * self._rows // self.max_len).clamp_max(self._rows - 1)
        if row.dim() == 1:
            return self.w_e.index_select(1, row), self.w_r.index_select(1, row)
        return self.w_e[:, row].transpose(0, 1), self.w_r[:, row].transpose(0, 1)

    def features(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Phi_q and Phi_k, zero at padding, and F, in the type sums are kept in."""
        self._refuse_prefix()
        x, keep = self._entry(x, key_padding_mask)
        query, key = self._queries_keys(x, keep)
        with full_precision(x.device):
            query, key = (ops.kept(phi, keep) for phi in ops.features(query, key, self._kernel))
            sample = self._sample(x, keep)
            return query, key, None if sample is None else sample.to(query.dtype)

    def _refuse_prefix(self) -> None:
        if self.causal == "prefix":
            raise Unsupported(
                "causal='prefix' has a kernel for every prefix, so no single one to look at; load the weights into a layer "
                "with causal=False"
            )

    def __getstate__(self) -> dict[str, Any]:
        # The parts of a loss belong to one graph, which neither a copy nor a pickle can take along.
        return {**self.__dict__, "_last": None}

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, max_len={self.max_len}, {self.description!r}"


def ksvd_loss(
    model: nn.Module, reduction: Reduction = "per_sample", trace: Trace = "param", penalty: Penalty = "objective"
) -> Tensor:
    """The mean of J^2 over the primal layers of a model, of their last forward pass; a 0-d tensor.

    The arguments are those of `PrimalAttention.ksvd_loss`. Layers with `track_loss=False` do not count. Where no layer
    counts, it is zero: of float32, on the device of the model's first parameter, without a gradient.

    >>> import torch, heedful
    >>> model = heedful.nn.Encoder(32, 4, ["softmax", "primal"], max_len=50)
    >>> out = model(torch.randn(2, 19, 32))
    >>> heedful.nn.ksvd_loss(model).requires_grad
    True
    """
    layers = [part for part in model.modules() if isinstance(part, PrimalCore) and part.track_loss]
    if not layers:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    return torch.stack([layer.ksvd_loss(reduction, trace, penalty) for layer in layers]).mean()
