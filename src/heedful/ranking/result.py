"""What a search or a method of re-ranking returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heedful._result import Result
from heedful._text import quantity


@dataclass(frozen=True)
class Ranking(Result):
    """The database in the order in which it answers each query.

    Attributes:
        order: `(queries, m)`, places in the database, the best first; -1 where a list has no further item.
        scores: `(queries, m)`, what they are ordered by, never rising along a row; minus infinity where `order` is -1.

    >>> print(Ranking(np.array([[2, 0, -1]]), np.array([[0.9, 0.5, -np.inf]])))
    1 query, up to 3 items each
    query 0: 2 (0.900), 0 (0.500)
    """

    order: NDArray[np.int64]
    scores: NDArray[np.floating]

    def __len__(self) -> int:
        return len(self.order)

    def __str__(self) -> str:
        lines = [f"{quantity(len(self), 'query', 'queries')}, up to {quantity(self.order.shape[1], 'item')} each"]
        for number, (places, scores) in enumerate(zip(self.order[:10], self.scores[:10], strict=True)):
            there = [f"{place} ({score:.3f})" for place, score in zip(places, scores, strict=True) if place >= 0]
            more = f", and {len(there) - 5} more" if len(there) > 5 else ""
            lines.append(f"query {number}: {', '.join(there[:5]) or 'nothing'}{more}")
        if len(self) > 10:
            lines.append(f"and {quantity(len(self) - 10, 'more query', 'more queries')}")
        return "\n".join(lines)
