"""Which rows of a table each of several networks leaves out, so that every row is judged by a network that never saw it."""

from __future__ import annotations

import numpy as np

from heedful.bridges.samples import Samples, hold_out


def drawn_folds(samples: Samples, members: int, fraction: float | None, seed: int) -> np.ndarray:
    """The member that each row is held out from; `members` where from none.

    Rows of a class, in random order, are dealt to the members in turn, groups together. A single member leaves out the share `fraction`; where
    that is 0 or None, or where all rows are one group, nothing is left out. The only row of a class stays.

    >>> samples = Samples((np.zeros((7, 1)),), np.array([0, 0, 0, 0, 1, 1, 2]))
    >>> np.bincount(drawn_folds(samples, 3, 0.2, seed=0)).tolist()
    [2, 2, 2, 1]
    """
    count = len(samples)
    folds = np.full(count, members)
    if not fraction:
        return folds
    codes = samples.target if samples.target is not None and samples.target.dtype.kind in "iu" else None
    if members == 1:
        folds[hold_out(count, fraction, seed, codes=codes, groups=samples.groups)[1]] = 0
        return folds
    keys = np.zeros(count) if codes is None else codes
    order = np.lexsort((np.random.default_rng(seed).random(count), keys))
    groups = np.arange(count) if samples.groups is None else samples.groups
    if len(np.unique(groups)) < 2:
        return folds
    first = {group: place % members for place, group in enumerate(dict.fromkeys(groups[order].tolist()))}
    folds = np.array([first[group] for group in groups.tolist()])
    if codes is not None:
        folds[np.bincount(codes)[codes] < 2] = members
    return folds
