"""Primal-Attention: the scores of an asymmetric kernel SVD, and what is made of them, at linear cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from heedful import masks
from heedful._checks import check_choice
from heedful._errors import Unsupported
from heedful._runtime import full_precision
from heedful.kernels import Cosine, Kernel, Polynomial
from heedful.ops import linear
from heedful.ops.fused import means, primal_loss, primal_ops
from heedful.ops.ksvd import lifted, lowered, relative_gap
from heedful.ops.request import Request, wide

COSINE = Cosine()
IDENTITY = Polynomial(1, scale=1.0)

# Devices on which the forms made for a GPU run, fused kernels first. Tests add the CPU, where Triton's interpreter runs them.
FUSED: frozenset[str] = frozenset({"cuda"})

Reduction = Literal["per_sample", "batch"]
Trace = Literal["param", "data"]
Penalty = Literal["objective", "kkt"]
TrackLoss = bool | Literal["kkt"]


class Scores(NamedTuple):
    """The two projections of every token."""

    e: Tensor  # [B, H, n, s]
    r: Tensor  # [B, H, n, s]


class Parts(NamedTuple):
    """What the objective and the KKT residual need of one pass."""

    energy: Tensor  # [B, 2, H, s], sum over tokens of e^2, and of r^2
    tokens: Tensor  # [B], how many
    product: Tensor  # [H], tr(W_e^T W_r)
    w_e: Tensor  # [H, n', s], or [H, p, s] where weights are static, as they were given
    w_r: Tensor
    data: Data | None  # None where every prefix has a kernel of its own


class Data(NamedTuple):
    """The same weights as they act on features, and what one multiplication by the Gram matrix makes of them.

    The fused kernels make the latter only where `parts="kkt"` asks for it.
    """

    on: Tensor  # [B, 2, H, p, s], or [2, H, p, s] where weights are static: F^T W_e and F^T W_r
    sample: Tensor | None  # [B, H, n', p], as it was given
    moment: Tensor | None  # [B, 2, H, p, s], Phi_q^T E and Phi_k^T R


class Folded(NamedTuple):
    """Outputs of every head, and the parts of the loss where they were asked for."""

    output: Tensor  # [B, H, n, v]
    parts: Parts | None


def sample(x: Tensor, rows: int, how: str, keep: Tensor | None = None) -> Tensor:
    """`rows` vectors that stand for a sequence: `[B, n, d]` -> `[B, rows, d]`.

    `"stride"` takes tokens at floor(m (n - 1) / (rows - 1)), `"segment_mean"` the means of the tokens from floor(m n / rows) up
    to floor((m + 1) n / rows), of at least one each. Both count tokens where `keep` `[B, n]` is True, and are equal where
    rows = n. Fewer tokens than rows are repeated; a sequence without tokens gives its last entry.
    """
    length, kind = x.shape[1], wide(x.dtype)
    if length == 0:
        return x.new_zeros(x.shape[0], rows, x.shape[-1])
    if how != "stride" and keep is None:
        if length == rows:
            return x
        if means.usable(x, FUSED):
            return means.means(x, rows)
    row = torch.arange(rows, device=x.device)
    count: Any = length if keep is None else keep.sum(dim=-1, keepdim=True)  # [B, 1]
    last = length - 1 if keep is None else (count - 1).clamp_min(0)
    if how == "stride":
        return _take(x, row * last // max(rows - 1, 1), keep)
    width = -(-length // rows)
    if keep is None and width * rows == length:
        return x.unflatten(1, (rows, width)).mean(dim=2, dtype=kind)
    first = row * count // rows  # [rows] or [B, rows]
    if width == 1:
        return _take(x, first, keep)
    size = ((row + 1) * count // rows - first).clamp_min(1)
    if x.device.type in FUSED:
        return _averaged(x, first, size, keep)
    inside = torch.arange(width, device=x.device)
    share = (inside < size[..., None]).to(kind) / size[..., None]  # [..., rows, width]
    # Places past a segment's end have no share; they stay on tokens all the same.
    places = (first[..., None] + inside).flatten(-2).clamp_max(last)
    taken = _take(x, places, keep).unflatten(1, (rows, width)).to(kind)
    with full_precision(x.device):
        return (share[..., None, :] @ taken)[..., 0, :]


def _averaged(x: Tensor, first: Tensor, size: Tensor, keep: Tensor | None) -> Tensor:
    """The means of segments as one matrix product, which a GPU does faster than it copies tokens: `[B, n, d]` -> `[B, rows, d]`."""
    place = torch.arange(x.shape[1], device=x.device)
    if keep is not None:
        # Of a sequence without tokens the last entry is the one.
        keep = keep | (~keep.any(dim=-1, keepdim=True) & (place == x.shape[1] - 1))
        x, place = x.masked_fill(~keep[..., None], 0.0), keep.cumsum(dim=-1)[:, None] - 1
    begin, size = first[..., None], size[..., None]
    inside = (place >= begin) & (place < begin + size)  # [(B,) rows, n]
    share = (1.0 / size).to(x.dtype)
    # What rounding did to the shares is put right afterwards.
    with full_precision(x.device):
        kind = wide(x.dtype)
        return (torch.where(inside, share, 0.0) @ x).to(kind) / (share.to(kind) * size)


def _take(x: Tensor, rank: Tensor, keep: Tensor | None) -> Tensor:
    """The tokens of these ranks, `[m]` or `[B, m]`, among those that are kept; where none is, the last of all."""
    if keep is None:
        return x.index_select(1, rank)
    at = torch.searchsorted(keep.cumsum(dim=-1), (rank + 1).expand(x.shape[0], -1).contiguous())
    return x.gather(1, at.clamp_max(x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[-1]))


def features(query: Tensor, key: Tensor, feature_map: Kernel = COSINE) -> tuple[Tensor, Tensor]:
    """Phi_q and Phi_k in the type sums are kept in."""
    kind = wide(query.dtype)
    query, key = query.to(kind), key.to(kind)
    if type(feature_map) is Cosine:
        return _unit(query), _unit(key)
    both = feature_map.steady_features(query, key)
    assert both is not None
    return both[0].to(kind), both[1].to(kind)


def _unit(x: Tensor) -> Tensor:
    """x / max(||x||, 1e-12), as `torch.nn.functional.normalize`, whose backward pass takes twice as long."""
    return x * x.square().sum(dim=-1, keepdim=True).clamp_min(1e-24).rsqrt()


def primal_attention(
    query: Tensor,
    key: Tensor,
    sample: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    *,
    feature_map: Kernel = COSINE,
    is_causal: bool = False,
) -> Scores:
    r"""The scores of an asymmetric kernel SVD: $E = \Phi_q F^T W_e$, $R = \Phi_k F^T W_r$ (Chen et al. 2023).

    Shapes: query and key `[B, H, n, p]`, sample F `[B, H, m, p]`, weights `[H, m, s]` or `[B, H, m, s]`; without a sample
    the weights are `[H, p', s]` and act on features as they are. E is unnormalised linear attention with queries Phi_q,
    keys F and values W_e, which are learned and tied to positions. With `is_causal`, token i reads rows 0..i of the sample,
    which has one row per token, by the same chunks that serve causal feature maps.

    >>> import torch
    >>> from heedful.ops.primal import primal_attention
    >>> x, w = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 7, 4)
    >>> primal_attention(x, x, x, *w.unbind(), is_causal=True).e.shape
    torch.Size([2, 3, 7, 4])
    """
    with full_precision(query.device):
        phi_q, phi_k = features(query, key, feature_map)
        w_e, w_r = w_e.to(phi_q.dtype), w_r.to(phi_q.dtype)
        sample = None if sample is None else sample.to(phi_q.dtype)
        if sample is None or not is_causal:
            return Scores(phi_q @ lowered(w_e, sample), phi_k @ lowered(w_r, sample))
        e, r = (
            linear.run(Request(phi, sample, w.expand(*sample.shape[:-1], -1), IDENTITY, masks.causal))
            for phi, w in ((phi_q, w_e), (phi_k, w_r))
        )
        return Scores(e, r)


def folded(
    query: Tensor,
    key: Tensor,
    sample: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Tensor | None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    feature_map: Kernel = COSINE,
    parts: TrackLoss = True,
) -> Folded:
    r"""$[E, R]\,C^T + b$ and what the loss needs, without writing E or R (Chen et al. 2023).

    $$O = \Phi_q (F^T W_e C_e^T) + \Phi_k (F^T W_r C_r^T) + b, \qquad
    \textstyle\sum_i e_{ic}^2 = \big[W_{e|X}^T (\Phi_q^T M \Phi_q)\, W_{e|X}\big]_{cc},\quad W_{e|X} = F^T W_e,$$

    with M = diag(keep). Shapes as in `primal_attention`; c_e and c_r `[v, s]`, or C `[v, 2 s]` and None; bias `[v]`, keep `[B, n]` (True counts).
    Output in the dtype of the query; sums in float32 or wider. `residual` needs `parts="kkt"`, J any other than False.
    """
    given = _Given(sample, w_e, w_r, c_e, c_r, bias, keep)
    alike = query.dtype == key.dtype and query.shape == key.shape
    if alike and _fusable(query, query.shape, given, feature_map):
        return _fused(torch.stack((query.transpose(1, 2), key.transpose(1, 2)), dim=2), given, parts)
    with full_precision(query.device):
        phi_q, phi_k = (phi.contiguous() for phi in features(query, key, feature_map))
        kind = phi_q.dtype
        w_e, w_r, c_e, c_r = (x.to(kind) for x in (w_e, w_r, *halves(c_e, c_r)))
        sample = None if sample is None else sample.to(kind)
        on_e, on_r = (lowered(w, sample) for w in (w_e, w_r))  # [(B,) H, p, s]
        out = _two_products(phi_q, on_e @ c_e.mT, phi_k, on_r @ c_r.mT, None if bias is None else bias.to(kind))
        record = None
        if parts:
            phi_q, phi_k = kept(phi_q, keep), kept(phi_k, keep)
            moments = [phi.mT @ phi @ on for phi, on in ((phi_q, on_e), (phi_k, on_r))]
            moment = torch.stack(moments, dim=1)
            data = Data(torch.stack((on_e, on_r), dim=-4), sample, moment)
            energy = (data.on * moment).sum(dim=-2)
            record = Parts(energy, counted(query, keep), trace_of(w_e, w_r), w_e, w_r, data)
        return Folded(out.to(query.dtype), record)


def folded_pair(
    pair: Tensor,
    sample: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor,
    c_r: Tensor | None,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    feature_map: Kernel = COSINE,
    parts: TrackLoss = True,
) -> Folded:
    """`folded` of queries and keys as one linear map makes them, `[B, n, 2, H, p]`: on a GPU neither is copied."""
    given = _Given(sample, w_e, w_r, c_e, c_r, bias, keep)
    batch, n, _, heads, size = pair.shape
    if _fusable(pair, (batch, heads, n, size), given, feature_map):
        return _fused(pair, given, parts)
    query, key = (x.transpose(1, 2) for x in pair.unbind(2))
    return folded(query, key, *given, feature_map=feature_map, parts=parts)


class _Given(NamedTuple):
    """What a fold takes beside queries and keys."""

    sample: Tensor | None
    w_e: Tensor
    w_r: Tensor
    c_e: Tensor
    c_r: Tensor | None
    bias: Tensor | None
    keep: Tensor | None


def halves(c_e: Tensor, c_r: Tensor | None) -> tuple[Tensor, Tensor]:
    """C_e and C_r, of which the first may hold both."""
    if c_r is not None:
        return c_e, c_r
    c_e, c_r = c_e.chunk(2, dim=-1)
    return c_e, c_r


def _fusable(x: Tensor, shape: Sequence[int], given: _Given, feature_map: Kernel) -> bool:
    """Whether the fused kernels serve queries and keys of such a shape, `[B, H, n, p]`, in x: cosine features of 16-bit or float32 tensors on
    a GPU, nothing that broadcasts.
    """
    if type(feature_map) is not Cosine or x.device.type not in FUSED:
        return False
    sample, w_e, w_r, c_e, c_r, _, keep = given
    batch, heads, n, p = shape
    v, (_, rows, s) = c_e.shape[-2], w_e.shape if w_e.dim() == 3 else (0, 0, 0)
    readout = (v, s if c_r is not None else 2 * s)
    return (
        w_e.shape == (heads, p if sample is None else sample.shape[-2], s)
        and w_e.shape == w_r.shape
        and c_e.shape[-2:] == readout
        and (c_e.dim() == 2 or c_e.shape[:-2] == (heads,))
        and (c_r is None or c_e.shape == c_r.shape)
        and (sample is None or sample.shape == (batch, heads, rows, p))
        and (keep is None or keep.shape == (batch, n))
        and primal_ops.usable(x, p, v, s, FUSED)
    )


def _fused(pair: Tensor, given: _Given, parts: TrackLoss) -> Folded:
    """Both sides in one stack: the device waits for few launches, and reads queries and keys once."""
    sample, w_e, w_r, c_e, c_r, bias, keep = given
    w_r, c_r = w_r.to(w_e.dtype), None if c_r is None else c_r.to(c_e.dtype)
    with full_precision(pair.device):
        out, made = primal_ops.fold(pair, sample, w_e, w_r, c_e, c_r, bias, keep, bool(parts))
        record = None
        if made is not None:
            data = Data(made.on, sample, _moment(pair, keep, made.on) if parts == "kkt" else None)
            record = Parts(made.energy, made.tokens, made.product, w_e, w_r, data)
        return Folded(out.transpose(1, 2), record)


def _moment(pair: Tensor, keep: Tensor | None, on: Tensor) -> Tensor:
    """Phi^T Phi W of both sides, `[B, 2, H, p, s]`, by plain operations."""
    query, key = (x.transpose(1, 2) for x in pair.unbind(2))
    sides = [kept(phi, keep) for phi in features(query, key)]
    return torch.stack([phi.mT @ (phi @ w) for phi, w in zip(sides, on.unbind(1), strict=True)], dim=1)


def _two_products(a: Tensor, m: Tensor, b: Tensor, n: Tensor, bias: Tensor | None) -> Tensor:
    """a m + b n + bias, `[B, H, rows, p] @ [(B,) H, p, v]`, as two matrix products of which each adds to what it finds."""
    lead, rows = a.shape[:2], a.shape[2]
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    m, n = (x.expand(*lead, *x.shape[-2:]).flatten(0, 1) for x in (m, n))
    out = a @ m if bias is None else torch.baddbmm(bias.expand(a.shape[0], rows, -1), a, m)
    return torch.baddbmm(out, b, n).unflatten(0, lead)


def read(scores: Scores, c_e: Tensor, c_r: Tensor | None, bias: Tensor | None) -> Tensor:
    """E c_e^T + R c_r^T + bias of scores that were written out, in their type."""
    c_e, c_r = halves(c_e, c_r)
    with full_precision(scores.e.device):
        out = scores.e @ c_e.mT.to(scores.e.dtype) + scores.r @ c_r.mT.to(scores.e.dtype)
        return out if bias is None else out + bias.to(out.dtype)


def scored(scores: Scores, w_e: Tensor, w_r: Tensor, keep: Tensor | None) -> Parts:
    """The parts of scores that were written out, as the causal prefix form does."""
    energy = torch.stack([kept(part, keep).square().sum(dim=-2) for part in scores], dim=1)
    w_e, w_r = w_e.to(energy.dtype), w_r.to(energy.dtype)
    return Parts(energy, counted(scores.e, keep), trace_of(w_e, w_r), w_e, w_r, data=None)


def trace_of(w_e: Tensor, w_r: Tensor) -> Tensor:
    """tr(W_e^T W_r) of every head."""
    return (w_e * w_r).sum(dim=(-2, -1))


def kept(x: Tensor, keep: Tensor | None) -> Tensor:
    """`[B, H, n, p]`, zero at padding."""
    return x if keep is None else x.masked_fill(~keep[:, None, :, None], 0.0)


def counted(tokens: Tensor, keep: Tensor | None) -> Tensor:
    """How many tokens each sequence of `[B, H, n, p]` has, `[B]`."""
    kind = wide(tokens.dtype)
    if keep is None:
        return torch.full(tokens.shape[:1], tokens.shape[2], dtype=kind, device=tokens.device)
    return keep.sum(dim=-1).to(kind)


def objective(parts: Parts, lam: Tensor, reduction: Reduction = "per_sample", trace: Trace = "param") -> Tensor:
    r"""J of the asymmetric kernel SVD, `[B]` for `"per_sample"`, a number for `"batch"` (Chen et al. 2023).

    $$J = \tfrac12 \mathrm{mean}_{h,i} \|\lambda_h \odot e_{hi}\|^2 + \tfrac12 \mathrm{mean}_{h,i} \|\lambda_h \odot r_{hi}\|^2
    - \mathrm{mean}_h\, \mathrm{tr}(W_{e,h}^T W_{r,h})$$

    Means are over the tokens that count, of each sequence or of the whole batch; a sequence without tokens has J = 0.
    `trace="data"` takes the weights as they act on features, $W_{e|X}$ and $W_{r|X}$: of each sequence, or their mean over the
    batch. At every stationary point J = 0, but not the other way round: see `kkt_residual`.
    """
    _check(reduction, trace)
    if trace == "data" and parts.data is None:
        raise Unsupported(
            "trace='data' needs one set of weights per sequence, but causal='prefix' has one per token; use trace='param'"
        )
    energy = parts.energy.sum(dim=1) * lam.to(parts.energy.dtype).square()
    quadratic = energy.sum(dim=-1).mean(dim=-1) / 2  # [B]
    there = (parts.tokens > 0).to(quadratic.dtype)
    traces = parts.product if trace == "param" or parts.data is None else trace_of(*parts.data.on.unbind(-4))
    product = traces.mean(dim=-1)  # [B], or () for weights that all sequences share
    if reduction == "per_sample":
        return (quadratic / parts.tokens.clamp_min(1) - product) * there
    product = (product * there).sum() / there.sum().clamp_min(1)
    return quadratic.sum() / parts.tokens.sum().clamp_min(1) - product


def residual(parts: Parts, lam: Tensor, reduction: Reduction = "per_sample") -> Tensor:
    r"""The KKT residual of `heedful.ops.ksvd.kkt_residual` with $\Lambda = \mathrm{diag}(\lambda^2) / n$.

    `[B, H]` for `"per_sample"`: is each sequence's kernel decomposed? `[H]` for `"batch"`: is the kernel of all tokens of the
    batch, with features F phi, decomposed? A sequence without tokens has residual 0.
    """
    _check(reduction)
    if parts.data is None:
        raise Unsupported(
            "causal='prefix' has a kernel for every prefix, so no single decomposition to check; use causal=False"
        )
    moment = parts.data.moment
    if moment is None:
        raise Unsupported(
            "the KKT residual needs more than this pass kept; make or set track_loss='kkt' before it, or call kkt_residual(x)"
        )
    rows = None if parts.data.sample is None else parts.data.sample.to(moment.dtype)
    pull_e, pull_r = (lifted(part, rows) for part in moment.unbind(1))
    weights = lam.to(pull_e.dtype).square()[:, None, :]
    if reduction == "batch":
        pull_e, pull_r, count = pull_e.sum(dim=0), pull_r.sum(dim=0), parts.tokens.sum()
    else:
        count = parts.tokens[:, None, None, None]
    weights = weights / count.clamp_min(1)
    w_e, w_r = (w.to(pull_e.dtype) for w in (parts.w_e, parts.w_r))
    gap = relative_gap(pull_e * weights, pull_r * weights, w_e, w_r)
    return gap if reduction == "batch" else gap * (parts.tokens > 0)[:, None]


def penalty(
    parts: Parts, lam: Tensor, reduction: Reduction = "per_sample", trace: Trace = "param", kind: Penalty = "objective"
) -> Tensor:
    """What is added to a loss, a number: the mean of J^2, or of the KKT residual, over sequences that have tokens."""
    check_choice(Penalty, penalty=kind)
    if (reduction, trace, kind) == ("per_sample", "param", "objective") and primal_loss.usable(
        parts.energy, lam, parts.product, parts.tokens, FUSED
    ):
        return primal_loss.penalty(parts.energy, lam, parts.product, parts.tokens)
    if kind == "kkt":
        each = residual(parts, lam, reduction).mean(dim=-1)
    else:
        each = objective(parts, lam, reduction, trace).square()
    return each if reduction == "batch" else each.sum() / (parts.tokens > 0).sum().clamp_min(1)


def _check(reduction: str, trace: str = "param") -> None:
    check_choice(Reduction, reduction=reduction)
    check_choice(Trace, trace=trace)
