"""Count tables: the chance of the next type by what is known of the past, each table smoothed by a coarser one.

What anybody would try first, and what a model has to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from experiments.events import Events, Split


def history(events: Events, order: int, column: str = "") -> list[np.ndarray]:
    """The last types (or values of a mark) before each target, nearest first, -1 where there is none."""
    targets, values = events.targets, events.marks[column] if column else events.types
    begin = events.starts[events.sequence[targets]]
    return [
        np.where(targets - back >= begin, values[np.maximum(targets - back, 0)], -1) for back in range(1, order + 1)
    ]


def gaps(events: Events) -> np.ndarray:
    """The time from the last event to each target."""
    targets = events.targets
    return events.times[targets] - events.times[targets - 1]


def log_bins(values: np.ndarray, low: float, high: float, count: int = 40) -> np.ndarray:
    """The number of each value's bin between log-spaced edges."""
    return np.searchsorted(np.geomspace(low, high, count), values)


GAP_TABLE = "Markov 1 x 40 gap bins"
TIMETABLE = "last carrier, origin, destination, 5 minutes, 4 weeks"
Keys = Callable[[Events], list[np.ndarray]]


class CountTable:
    """Counts of answers by a list of keys; each further key refines the table before it.

    `p(y | k_1 .. k_m) = (n(y, k_1 .. k_m) + a p(y | k_1 .. k_{m-1})) / (n(k_1 .. k_m) + a)`, and without keys the shares of the answers,
    one more counted of each.

    Args:
        classes: how many answers there are.
        weight: `a`, of how many observations the coarser table is worth.
    """

    def __init__(self, classes: int, weight: float = 5.0) -> None:
        self.classes, self.weight = classes, weight

    def fit(self, keys: Sequence[np.ndarray], answers: np.ndarray) -> CountTable:
        """Keys are whole numbers from -1 on."""
        counts = np.bincount(answers, minlength=self.classes) + 1.0
        self.shares_ = counts / counts.sum()
        self.levels_: list[tuple[int, np.ndarray, np.ndarray]] = []  # span of the key, codes of the cells, chances
        above, cells = self.shares_[None], np.zeros(len(answers), np.int64)
        for key in keys:
            span = int(key.max()) + 2
            found, cells = np.unique(cells * span + key + 1, return_inverse=True)
            table = np.bincount(cells * self.classes + answers, minlength=len(found) * self.classes)
            table = table.reshape(len(found), self.classes) + self.weight * above[found // span]
            above = table / table.sum(1, keepdims=True)
            self.levels_.append((span, found, above))
        return self

    def chances(self, keys: Sequence[np.ndarray]) -> np.ndarray:
        """`[targets, classes]`; a cell that was never seen has the chances of the coarser one."""
        result = np.tile(self.shares_, (len(keys[0]), 1))
        cells, there = np.zeros(len(result), np.int64), np.ones(len(result), bool)
        for key, (span, found, table) in zip(keys, self.levels_, strict=True):
            codes = cells * span + key + 1
            cells = np.minimum(np.searchsorted(found, codes), len(found) - 1)
            there &= (key < span - 1) & (found[cells] == codes)
            result[there] = table[cells[there]]
        return result


def measured(chances: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """Accuracy and negative log-likelihood per target, in nats."""
    own = chances[np.arange(len(answers)), answers]
    return {"accuracy": float((chances.argmax(1) == answers).mean()), "nll": float(-np.log(own).mean())}


def _tabled(split: Split, keys: Keys, weight: float = 5.0) -> dict[str, float]:
    learned, asked = split.fitting, split.test
    table = CountTable(len(asked.names), weight).fit(keys(learned), learned.types[learned.targets])
    return measured(table.chances(keys(asked)), asked.types[asked.targets])


def _nothing(events: Events) -> list[np.ndarray]:
    return [np.zeros(len(events.targets), np.int64)]


def grams(split: Split, orders: Sequence[int] = (1, 2, 3)) -> dict[str, dict[str, float]]:
    """What the order of types alone says: tables of the last types, refined by those before."""
    tables: dict[str, Keys] = {f"Markov {order}": partial(history, order=order) for order in orders}
    return {name: _tabled(split, keys) for name, keys in {"majority": _nothing, **tables}.items()}


def badge_tables(split: Split) -> dict[str, dict[str, float]]:
    """Stack Overflow: the order alone, and the last type with the gap to the target in 40 log-spaced bins from 1 s to a year."""
    return grams(split, (1, 2)) | {
        GAP_TABLE: _tabled(split, lambda one: [*history(one, 1), log_bins(gaps(one), 1, 10**7.5)])
    }


def flight_tables(split: Split) -> dict[str, dict[str, float]]:
    """Flights: the last destination with the gap in hours (72 and more are one), the hour and the quarter of an hour of the target; then
    with the last origin and carrier too. Split by aircraft, a flight of the timetable is flown by others: `TIMETABLE` looks it up."""

    def last(*columns: str) -> Keys:
        return lambda one: [history(one, 1, column)[0] for column in columns]

    def gap(one: Events) -> list[np.ndarray]:
        return [np.minimum(gaps(one) // 60, 72).astype(np.int64)]

    def of_target(*minutes: int) -> Keys:
        """The part of the day; from four weeks on, the part of the year."""
        return lambda one: [
            (one.times[one.targets] % (1440 if step < 1440 else np.inf) // step).astype(np.int64) for step in minutes
        ]

    def both(*parts: Keys) -> Keys:
        return lambda one: [key for part in parts for key in part(one)]

    tables = {
        "majority": _nothing,
        "last destination": last("dest"),
        "last destination, gap": both(last("dest"), gap),
        "last destination, hour": both(last("dest"), of_target(60)),
        "last destination, hour, gap": both(last("dest"), of_target(60), gap),
        "last destination, quarter-hour": both(last("dest"), of_target(15)),
        "last carrier, origin, destination": last("carrier", "origin", "dest"),
        "last carrier, origin, destination, quarter-hour": both(last("carrier"), of_target(15), last("origin", "dest")),
        TIMETABLE: both(last("carrier"), of_target(15, 5, 28 * 1440), last("origin", "dest")),
    }
    return {name: _tabled(split, keys, 1.0) for name, keys in tables.items()}
