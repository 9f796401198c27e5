"""Sequences of events: badges of Stack Overflow, flights from New York, seven processes without types; their splits.

The files lie in the data folder beside the checkout (`shared/data/events`), which says where each comes from and its licence; a recipe
copies them into its work folder, where a machine without the data folder finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.store import copied
from heedful._errors import InvalidArgument

BESIDE = Path(__file__).parents[2] / "shared" / "data" / "events"
FILES = {"badges": "stackoverflow_badges.npz", "flights": "nyc_flights_2013.npz", "processes": "tpp_unmarked.npz"}
PROCESSES = (
    "hawkes1", "hawkes2", "self_correcting", "stationary_renewal", "nonstationary_renewal", "nonstationary_poisson", "taxi",
)  # fmt: skip
HELD_OUT = 300  # users of Stack Overflow for choosing settings


@dataclass(frozen=True)
class Events:
    """Sequences, one after another.

    Args:
        types: `[events]`, whole numbers that index `names`.
        times: `[events]`, float64, never decreasing inside a sequence.
        starts: where each sequence begins; one more than there are sequences.
        names: of the types.
        marks: more columns by name, `[events]` each.
        end: until when every sequence was watched, from time 0 on; None where that is not known.
    """

    types: np.ndarray
    times: np.ndarray
    starts: np.ndarray
    names: tuple[str, ...]
    marks: Mapping[str, np.ndarray] = field(default_factory=dict)
    end: float | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def sequence(self) -> np.ndarray:
        """The number of each event's sequence, `[events]`."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def targets(self) -> np.ndarray:
        """Places of the events that have one before them in their sequence: what is predicted."""
        later = np.ones(len(self.types), bool)
        later[self.starts[:-1][self.lengths > 0]] = False
        return np.flatnonzero(later)

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Types and times of a sequence."""
        own = slice(self.starts[number], self.starts[number + 1])
        return self.types[own], self.times[own]

    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """A list of (types, times)."""
        return [self.of(number) for number in range(len(self))]

    def given(self, marks: Sequence[str] = ()) -> dict[str, Any]:
        """The events as `heedful.events.NextEvent` takes them; the named marks as levels of text."""
        watched = {} if self.end is None else {"starts": 0.0, "ends": self.end}
        kinds = {} if len(self.names) == 1 else {"types": self.types}
        columns = {name: self.marks[name].astype(str) for name in marks}
        return {"times": self.times, "offsets": self.starts, **kinds, **watched, "marks": columns}

    def take(self, chosen: np.ndarray) -> Events:
        """Some sequences, by their numbers or by a mask."""
        numbers = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        lengths = self.lengths[numbers]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        places = np.repeat(self.starts[numbers] - starts[:-1], lengths) + np.arange(starts[-1])
        marks = {name: column[places] for name, column in self.marks.items()}
        return Events(self.types[places], self.times[places], starts, self.names, marks, self.end)


class Split(NamedTuple):
    """Sequences to learn from, to choose settings by, and to test on."""

    train: Events
    validation: Events
    test: Events

    @property
    def fitting(self) -> Events:
        """All but the test: what a rival without settings learns from, and an estimator that holds out some itself."""
        return joined(self.train, self.validation)


def joined(first: Events, second: Events) -> Events:
    """The sequences of both."""
    return Events(
        np.concatenate((first.types, second.types)),
        np.concatenate((first.times, second.times)),
        np.concatenate((first.starts, second.starts[1:] + first.starts[-1])),
        first.names,
        {name: np.concatenate((column, second.marks[name])) for name, column in first.marks.items()},
        first.end,
    )


def listed(sequences: list[tuple[np.ndarray, np.ndarray]], names: tuple[str, ...], end: float | None = None) -> Events:
    """A list of (types, times) as events."""
    starts = np.cumsum([0, *(len(times) for _, times in sequences)])
    return Events(
        np.concatenate([np.asarray(types, np.int64) for types, _ in sequences]),
        np.concatenate([np.asarray(times, np.float64) for _, times in sequences]),
        starts,
        names,
        end=end,
    )


def prepare(folder: Path, kind: str) -> Path:
    """The file of a kind in the work folder, copied there the first time."""
    return copied(FILES[kind], BESIDE, folder)


def badges(folder: Path, split: int = 1) -> Split:
    """Badges of Stack Overflow (Du et al. 2016), split 1 to 5; times in seconds, types 0 to 21.

    The test users of a split are its 1,326 original ones. All others whose badges are at hand are for training: 3,142 of the 5,307
    that the original has; 300 of them, drawn with the split's number as seed, are held out for choosing settings.
    """
    if split not in range(1, 6):
        raise InvalidArgument(f"split must be 1 to 5; got {split}")
    with np.load(prepare(folder, "badges")) as held:
        everybody = Events(
            held["types"].astype(np.int64) - 1,
            held["times_ms"] / 1000,
            held["offsets"],
            tuple(map(str, held["type_names"][1:])),
        )
        test = (held["test_fold_bits"] >> (split - 1) & 1).astype(bool)
    others = np.random.default_rng(split).permutation(np.flatnonzero(~test))
    held_out, train = np.sort(others[:HELD_OUT]), np.sort(others[HELD_OUT:])
    return Split(everybody.take(train), everybody.take(held_out), everybody.take(test))


def flights(folder: Path, target: str = "dest") -> Split:
    """Departures from New York in 2013 by aircraft; `target` is what the types are, "dest" or "origin"; times in minutes.

    The marks hold destination, origin and carrier of every departure.
    """
    if target not in ("dest", "origin"):
        raise InvalidArgument(f"target must be dest or origin; got {target!r}")
    with np.load(prepare(folder, "flights")) as held:
        marks = {name: held[name].astype(np.int64) for name in ("dest", "origin", "carrier")}
        every = Events(
            marks[target],
            held["times_min"].astype(np.float64),
            held["offsets"],
            tuple(map(str, held[f"{target}_names"])),
            marks,
        )
        part = held["split"]
    return Split(*(every.take(part == number) for number in range(3)))


def process(folder: Path, name: str) -> Split:
    """One of the seven processes without types: the last fifth of the sequences is the test, an eighth of the others validation.

    Of a thousand sequences 0-699 are for training, 700-799 for validation, 800-999 for the test; of taxi's 182 the last 36.
    """
    if name not in PROCESSES:
        raise InvalidArgument(f"there is no process {name!r}; there are {', '.join(PROCESSES)}")
    with np.load(prepare(folder, "processes")) as held:
        times, starts = held[f"{name}_times"].astype(np.float64), held[f"{name}_offsets"]
        every = Events(np.zeros(len(times), np.int64), times, starts, ("event",), end=float(held[f"{name}_tmax"]))
    count = len(every)
    test = count - count // 5
    numbers = np.arange(count)
    return Split(
        every.take(numbers < test - test // 8),
        every.take((numbers >= test - test // 8) & (numbers < test)),
        every.take(numbers >= test),
    )
