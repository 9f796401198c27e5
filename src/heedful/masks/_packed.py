"""Sequences of various lengths laid end to end along one axis."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful._runtime import readable
from heedful.masks._checks import to_tensor
from heedful.masks.algebra import Mask, Range, Region

# Positions outside every sequence: a query there and a key there differ from all others and from each other.
NO_QUERY, NO_KEY = -1, -2


@dataclass(frozen=True, eq=False)
class _Packed(Mask):
    query_bounds: Tensor  # [sequences + 1]
    key_bounds: Tensor  # [sequences + 1]
    # The same as numbers; None where they could only be had by waiting.
    known: tuple[list[int], list[int]] | None = field(compare=False)

    def ids(self, at: Region) -> tuple[Tensor, Tensor]:
        """Which sequence each of a block's queries and keys belongs to."""
        queries = _sequence(self.query_bounds.to(at.device), torch.arange(*at.rows, device=at.device), NO_QUERY)
        return queries, _sequence(self.key_bounds.to(at.device), torch.arange(*at.cols, device=at.device), NO_KEY)

    def block(self, at: Region) -> Tensor:
        queries, keys = self.ids(at)
        return queries[:, None] == keys

    def span(self, rows: Range, shape: tuple[int, ...]) -> Range:
        if self.known is None or torch.compiler.is_compiling():
            # A compiled graph must not be tied to the lengths of one batch.
            return 0, shape[-1]
        queries, keys = self.known
        last = len(queries) - 2
        first, final = (bisect_right(queries, position) - 1 for position in (rows[0], rows[1] - 1))
        if first > last:
            return 0, 0
        return keys[first], max(keys[first], keys[min(final, last) + 1])

    def check(self, shape: tuple[int, ...]) -> None:
        if self.known is None or torch.compiler.is_compiling():
            return
        for (argument, kind), bounds, size in zip(_NAMES, self.known, shape[-2:], strict=True):
            if bounds[-1] > size:
                raise InvalidArgument(f"packed: {argument} ends at {bounds[-1]}, but there are {size} {kind}")


_NAMES = (("cu_seqlens", "queries"), ("key_cu_seqlens", "keys"))


def packed(cu_seqlens: Tensor | Sequence[int], key_cu_seqlens: Tensor | Sequence[int] | None = None) -> Mask:
    """Sequences laid end to end: `cu_seqlens` = [0, n1, n1 + n2, ...]; queries see the keys of their own sequence.

    The boundaries are flash-attention's, along one axis that all batches and heads share; `key_cu_seqlens`, with as many
    sequences, says where keys have others. What lies behind the last boundary sees nothing and is seen by nothing, so a
    packed axis may be filled up to a fixed length. `packed(...) & causal` is causal inside each sequence. `causal` counts
    positions along the packed axis, so with boundaries of their own for keys it does not mean causal within a sequence.

    >>> import torch
    >>> from heedful import masks
    >>> (masks.packed([0, 2, 3]) & masks.causal).dense((4, 4)).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 0, 0]], dtype=torch.int32)
    """
    queries = _bounds("cu_seqlens", cu_seqlens)
    keys = queries if key_cu_seqlens is None else _bounds("key_cu_seqlens", key_cu_seqlens)
    if queries.shape != keys.shape:
        raise InvalidArgument(
            "packed: cu_seqlens and key_cu_seqlens must name as many sequences; "
            f"got {queries.shape[0] - 1} and {keys.shape[0] - 1}"
        )
    known = (queries.tolist(), keys.tolist()) if readable(queries) and readable(keys) else None
    for (argument, _), bounds in zip(_NAMES, known or (), strict=False):
        if bounds[0] != 0 or any(after < before for before, after in pairwise(bounds)):
            raise InvalidArgument(f"packed: {argument} must start at 0 and never decrease; got {bounds!r:.100}")
    return _Packed(queries, keys, known)


def _bounds(argument: str, value: Tensor | Sequence[int]) -> Tensor:
    tensor = to_tensor("packed", argument, value)
    if (
        tensor.is_floating_point()
        or tensor.is_complex()
        or tensor.dtype == torch.bool
        or tensor.dim() != 1
        or not len(tensor)
    ):
        raise InvalidArgument(
            f"packed: {argument} must be integers [0, n1, n1 + n2, ...] of shape (sequences + 1,); "
            f"got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


def _sequence(bounds: Tensor, positions: Tensor, outside: int) -> Tensor:
    """The number of the sequence that holds each position, or `outside`."""
    index = torch.bucketize(positions, bounds.to(positions.dtype), right=True) - 1
    return index.masked_fill((index < 0) | (index >= bounds.shape[0] - 1), outside)
