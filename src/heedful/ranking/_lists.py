"""What a re-ranker reads beside vectors: lists that another search found, and which of their members are relevant."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.ranking._asked import Asked

# Lists that are re-scored at once.
LISTS = 64


def candidate_lists(similar: Any, asked: Asked) -> tuple[Tensor, Tensor]:
    """Similarities and places of candidates that somebody else found, the most similar first."""
    assert asked.candidates is not None
    numbers = torch.arange(len(asked.queries), device=similar.device)
    parts = []
    for at, chosen in zip(numbers.split(LISTS), asked.candidates.split(LISTS), strict=True):
        near = similar.table(at, chosen, 1)[:, 1:, 0].masked_fill(chosen < 0, -torch.inf)
        order = near.argsort(dim=1, descending=True, stable=True)
        parts.append((near.gather(1, order), chosen.gather(1, order)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def relevant_places(places: Tensor, relevant: Any, count: int) -> Tensor:
    """Which of the places, in a database of so many rows, are relevant to their query."""
    rows = list(relevant)
    if len(rows) != len(places):
        raise InvalidArgument(f"relevant must have an entry for each of the {len(places)} queries; got {len(rows)}")
    matrix = np.asarray(relevant) if np.ndim(rows[0]) == 1 and np.asarray(rows[0]).dtype == bool else None
    sets = (
        [np.flatnonzero(row) for row in matrix] if matrix is not None else [np.asarray(row, dtype=int) for row in rows]
    )
    for number, good in enumerate(sets):
        outside = good[(good < 0) | (good >= count)]
        if outside.size:
            raise InvalidArgument(
                f"relevant must be places from 0 to {count - 1}, rows of the database; query {number} has {outside.flat[0]}"
            )
    return torch.stack(
        [
            torch.isin(row.cpu(), torch.from_numpy(np.ascontiguousarray(good)))
            for row, good in zip(places, sets, strict=True)
        ]
    ).to(places.device)
