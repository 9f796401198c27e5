"""What times do to queries, keys and scores: rotations, and biases that are functions of the elapsed time."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from heedful._errors import InvalidArgument
from heedful._runtime import readable
from heedful.masks.factors import Factors, side_by_side
from heedful.nn._frequencies import check_times
from heedful.ops.fold import split


class Moments(NamedTuple):
    """Times, and the one they are counted from."""

    times: Tensor  # [B, n], float64 or int64
    start: Tensor  # [B, 1]

    def since(self) -> Tensor:
        """Times counted from the start, in float64; whole numbers are subtracted before they are rounded."""
        return (self.times - self.start).to(torch.float64)


def whole_or_float64(name: str, times: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Times of this shape as int64 or float64."""
    if times is None or (isinstance(times, Tensor) and times.shape != shape):
        got = "None" if times is None else tuple(times.shape)
        raise InvalidArgument(
            f"{name} must be a tensor of shape (batch, seq) = {shape}, a time for each vector; got {got}"
        )
    check_times(times)
    return times.to(torch.float64 if times.is_floating_point() else torch.int64)


def moments(times: Tensor, key_times: Tensor, seen: Tensor | None, padding: Tensor | None) -> tuple[Moments, Moments]:
    """The times of queries and of events; those that do not matter become that of the first event that is seen.

    `seen` `[B, n]` are the events that any query sees (None: all), `padding` `[B, m]` the queries that stand for no event. The
    first event that is seen is the start: every causal query sees it, so no later time can move what came before.
    """
    usable = torch.ones_like(key_times, dtype=torch.bool) if seen is None else seen
    usable = usable & key_times.isfinite() if key_times.is_floating_point() else usable
    start = _first(key_times, usable)
    own = Moments(_known("times", times, start, padding), start)
    if key_times is times:
        return own, own  # an event that no query sees may be a query
    return own, Moments(_known("key_times", key_times, start, None if seen is None else ~seen), start)


def _first(times: Tensor, usable: Tensor) -> Tensor:
    """`[B, 1]`: the first of the usable times, or zero where there is none."""
    if times.shape[-1] == 0:
        return times.new_zeros(times.shape[0], 1)
    places = torch.arange(times.shape[-1], device=times.device)
    place = torch.where(usable, places, times.shape[-1] - 1).amin(dim=-1, keepdim=True)
    return torch.where(usable.gather(-1, place), times.detach().gather(-1, place), 0)


def _known(name: str, times: Tensor, start: Tensor, idle: Tensor | None) -> Tensor:
    """Times with the start where they are idle; refuses others that are not finite, where that can be seen without waiting."""
    times = times if idle is None else torch.where(idle, start, times)
    if times.is_floating_point() and readable(times) and not bool(times.isfinite().all()):
        batch, place = (~times.isfinite()).nonzero()[0].tolist()
        raise InvalidArgument(
            f"{name} must be finite wherever they count; got {float(times[batch, place])} in sequence {batch} at place {place}. "
            "Hide events without a time by key_padding_mask"
        )
    return times


class Rotation(NamedTuple):
    """Rotations of pairs of coordinates r and D / 2 + r, `[B, n, H, D]`: cosines twice, and sines with both signs."""

    cosine: Tensor
    sine: Tensor

    @staticmethod
    def by(turns: Tensor, num_heads: int) -> Rotation:
        """Turns `[B, n, F]` are dealt out to heads one by one, so that every head has slow and fast ones."""
        angle = 2 * math.pi * turns.unflatten(-1, (-1, num_heads)).transpose(-1, -2)
        cosine, sine = angle.cos(), angle.sin()
        return Rotation(torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1))

    def turn(self, x: Tensor, back: bool = False) -> Tensor:
        """R x, or R^T x, of vectors `[B, H, n, D]`."""
        rows = x.transpose(1, 2)  # as projections leave them
        first, second = rows.chunk(2, dim=-1)
        crossed = torch.cat((second, first), dim=-1) * self.sine
        straight = rows * self.cosine
        return (straight - crossed if back else straight + crossed).to(x.dtype).transpose(1, 2)


def harmonics(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> Factors:
    r"""$\sum_r a_{hr} \cos 2\pi(\theta_{ir} - \theta_{jr}) + b_{hr} \sin 2\pi(\theta_{ir} - \theta_{jr})$ as factors of rank 2 r.

    Turns $\theta$ of queries and keys are `[B, m, r]` and `[B, n, r]`, amplitudes a and b `[H, r]`.
    """
    (cos, sin), right = ((angle.cos(), angle.sin()) for angle in (2 * math.pi * x.unsqueeze(1) for x in (query, key)))
    a, b = (x.unsqueeze(1).to(query.dtype) for x in (cosine, sine))
    return torch.cat((a * cos + b * sin, a * sin - b * cos), dim=-1), torch.cat(right, dim=-1)


def decayed(query: Tensor, key: Tensor, rates: Tensor, dtype: torch.dtype) -> Factors:
    r"""$\gamma_h (t_j - t_0)$ as factors: one number per key, in 16 bit three whose sum has 24 bits or more.

    Times since $t_0$, `[B, m]` and `[B, n]`, and rates `[H]` are float64. It is $-\gamma_h (t_i - t_j)$ up to $\gamma_h (t_i - t_0)$, the
    same along a row. In 16 bit a fourth coordinate, of value zero, has the gradient of that constant: the gradients of scores sum to zero
    along a row but for their rounding, which would be multiplied by the time since $t_0$ instead of the time elapsed.
    """
    limit, fixed = torch.finfo(dtype).max, rates.detach()
    column = (fixed.unsqueeze(1) * key.unsqueeze(1)).clamp(-limit, limit)  # [B, H, n]
    parts = split(column, dtype) if dtype.itemsize == 2 else [column.to(dtype)]
    # One, with the gradient of the rate.
    ones = 1 + (rates - fixed) / fixed.clamp(min=torch.finfo(torch.float64).tiny)
    left = ones.view(-1, 1, 1).expand(-1, query.shape[1], len(parts)).to(dtype)
    if len(parts) == 1:
        return left, torch.stack(parts, dim=-1)
    none = (fixed - rates).view(-1, 1, 1) * query.detach().unsqueeze(1).unsqueeze(-1)
    return side_by_side(left, none.to(dtype)), torch.stack([*parts, torch.ones_like(parts[0])], dim=-1)


def bucketed(query: Tensor, key: Tensor, table: Tensor, unit: Tensor, step: Tensor) -> Tensor:
    r"""The entry of the table `[H, c]` for the bucket of each $\tau = t_i - t_j$: $\lfloor \log_2(1 + |\tau| / u) / s \rfloor$, `[B, H, m, n]`.

    The first half is of $\tau \ge 0$, the second of $\tau < 0$; the last of each half has no end.
    """
    elapsed, half = (query[:, :, None] - key[:, None, :]).detach(), table.shape[1] // 2
    table = table.to(torch.promote_types(table.dtype, torch.float32))  # gradients are sums over all pairs
    place = ((elapsed.abs() / unit).log1p() / (step * math.log(2.0))).nan_to_num().clamp(max=half - 1).long()
    scores = embedding(torch.where(elapsed < 0, place + half, place), table.T).permute(0, 3, 1, 2)
    # A time that is not finite has no bucket.
    return scores + (elapsed - elapsed).to(table.dtype)[:, None]
