"""One kernel per head: a call of its own for each group of heads that share theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.kernels import Kernel, PerHead
from heedful.masks import Mask, Region
from heedful.masks.algebra import Range
from heedful.ops.request import Request


def split(request: Request) -> list[tuple[list[int], Request]]:
    """The heads of each group, and their part of the request; all heads where there is one kernel for all."""
    if not isinstance(request.kernel, PerHead):
        return [(list(range(request.query.shape[-3] if request.query.dim() > 2 else 1)), request)]
    groups = _groups(request.kernel.kernels)
    if len(groups) == 1:
        return [(groups[0][0], request._replace(kernel=groups[0][1]))]
    return [(heads, _part(request, heads)._replace(kernel=kernel)) for heads, kernel in groups]


def join(heads: Sequence[list[int]], parts: Sequence[Tensor]) -> Tensor:
    """What came of the groups `[..., group, Q, E]`, each head in its place again."""
    if len(parts) == 1:
        return parts[0]
    order = [head for group in heads for head in group]
    whole = torch.cat(list(parts), dim=-3)
    places = [order.index(head) for head in range(len(order))]
    return whole if places == sorted(places) else _take(whole, places)


def _groups(kernels: Sequence[Kernel]) -> list[tuple[list[int], Kernel]]:
    """Heads whose kernels are equal, by the same tensors: equal numbers may be learned apart."""
    groups: list[tuple[list[int], Kernel]] = []
    for head, kernel in enumerate(kernels):
        for heads, other in groups:
            if _same(kernel, other):
                heads.append(head)
                break
        else:
            groups.append(([head], kernel))
    return groups


def _same(one: Kernel, other: Kernel) -> bool:
    ours, theirs = one.tensors(), other.tensors()
    if list(ours) != list(theirs) or any(ours[name] is not theirs[name] for name in ours):
        return False
    return one == other


def _part(request: Request, heads: list[int]) -> Request:
    shared = request.query.shape[-3] // max(1, request.key.shape[-3])
    of_keys = [head // shared for head in heads]
    mask, bias, factors = request.mask, request.bias, request.factors
    return request._replace(
        query=_take(request.query, heads),
        key=_take(request.key, of_keys),
        value=_take(request.value, of_keys),
        mask=None if mask is None else _of_heads(mask, heads, Region.whole(request.shape, request.query.device)),
        bias=None if bias is None else _take(bias, heads),
        factors=factors and (_take(factors[0], heads), _take(factors[1], heads)),
    )


def _take(x: Tensor, heads: Sequence[int]) -> Tensor:
    """These heads of `[..., heads, n, m]`; as it is where one entry stands for all."""
    if x.dim() < 3 or x.shape[-3] == 1:
        return x
    if list(heads) == list(range(heads[0], heads[-1] + 1)):
        return x.narrow(-3, heads[0], len(heads))
    return x.index_select(-3, torch.tensor(heads, device=x.device))


def _of_heads(mask: Mask, heads: list[int], whole: Region) -> Mask:
    """The mask of these heads: itself where it is the same for all, as one of its pairs tells."""
    queries, keys = whole.shape[-2:]
    pair = mask.block(whole._replace(rows=(0, min(1, queries)), cols=(0, min(1, keys))))
    return _Heads(mask, tuple(heads), whole.shape) if pair.dim() > 2 and pair.shape[-3] > 1 else mask


@dataclass(frozen=True, eq=False)
class _Heads(Mask):
    """Some heads of a mask that differs between heads."""

    mask: Mask
    heads: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole grid

    @property
    def same_for_every_query(self) -> bool:  # type: ignore[override]
        return self.mask.same_for_every_query

    def block(self, at: Region) -> Tensor:
        first, last = at.lead[-1]
        lead = [at._replace(lead=(*at.lead[:-1], run), shape=self.shape) for run in _runs(self.heads[first:last])]
        blocks = [(self.mask.block(one), one.lead[-1]) for one in lead]
        wide = [x.expand(*x.shape[:-3], stop - start, *x.shape[-2:]) for x, (start, stop) in blocks]
        return torch.cat(wide, dim=-3)

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        return self.mask.span(rows, self.shape)


def _runs(heads: Sequence[int]) -> list[Range]:
    """Heads that follow one another, from the first to behind the last."""
    runs: list[Range] = []
    for head in heads:
        runs = [*runs[:-1], (runs[-1][0], head + 1)] if runs and runs[-1][1] == head else [*runs, (head, head + 1)]
    return runs
