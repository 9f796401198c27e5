"""The tests a learner executed, as compact arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Recorder", "Row", "Tests"]


class Row(NamedTuple):
    """One executed test: x and y given the set z."""

    x: int
    y: int
    z: tuple[int, ...]
    rho: float
    log_p: float
    independent: bool
    testable: bool


@dataclass(frozen=True, eq=False, repr=False)
class Tests:
    """Every executed test in order, `k` of them.

    Attributes:
        x, y: `[k]` the pair, x < y.
        z: `[k, widest]` the conditioning set, rising; -1 fills up.
        size: `[k]` how many there are in it.
        rho, log_p: `[k]` partial correlation and logarithm of the p-value.
        independent, testable: `[k]` the decision, and whether there was one.
    """

    __test__: ClassVar[bool] = False  # pytest would take the name for a class of tests

    x: NDArray[np.int32]
    y: NDArray[np.int32]
    z: NDArray[np.int32]
    size: NDArray[np.int32]
    rho: NDArray[np.float64]
    log_p: NDArray[np.float64]
    independent: NDArray[np.bool_]
    testable: NDArray[np.bool_]

    @classmethod
    def none(cls) -> Tests:
        return Recorder().tests()

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Row]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: int) -> Row:
        given = tuple(self.z[at, : self.size[at]].tolist())
        return Row(
            int(self.x[at]),
            int(self.y[at]),
            given,
            float(self.rho[at]),
            float(self.log_p[at]),
            bool(self.independent[at]),
            bool(self.testable[at]),
        )

    def __repr__(self) -> str:
        return f"Tests({len(self)} executed, {int(self.independent.sum())} independent, sets up to {self.z.shape[1]})"

    def take(self, rows: NDArray[Any]) -> Tests:
        """These rows, by mask or index."""
        size = self.size[rows]
        return Tests(
            self.x[rows],
            self.y[rows],
            self.z[rows, : int(size.max(initial=0))] if len(size) else self.z[rows, :0],
            size,
            self.rho[rows],
            self.log_p[rows],
            self.independent[rows],
            self.testable[rows],
        )

    def among(self, nodes: Sequence[int]) -> Tests:
        """The tests that name no other node, with the nodes renumbered by their place in `nodes`."""
        count = int(max([*nodes, *self.x.tolist(), *self.y.tolist(), int(self.z.max(initial=-1))], default=-1)) + 1
        place = np.full(count + 1, -2, np.int32)  # the last entry is the filler's
        place[-1] = -1
        place[list(nodes)] = np.arange(len(nodes))
        kept = self.take((place[self.x] >= 0) & (place[self.y] >= 0) & (place[self.z] >= -1).all(axis=1))
        x, y, z = place[kept.x], place[kept.y], place[kept.z]
        fill = np.where(z < 0, count, z)
        fill.sort(axis=1)
        z = np.where(fill == count, -1, fill).astype(np.int32)
        return Tests(np.minimum(x, y), np.maximum(x, y), z, kept.size, *kept._found())

    def _found(self) -> tuple[Any, ...]:
        return self.rho, self.log_p, self.independent, self.testable

    def to_dict(self) -> dict[str, Any]:
        """JSON types alone; a p-value of 0 has no finite logarithm and is written as null."""
        log_p = [value if value > -np.inf else None for value in self.log_p.tolist()]
        sets = [row[:size] for row, size in zip(self.z.tolist(), self.size.tolist(), strict=True)]
        return {
            "x": self.x.tolist(),
            "y": self.y.tolist(),
            "z": sets,
            "rho": self.rho.tolist(),
            "log_p": log_p,
            "independent": self.independent.tolist(),
            "testable": self.testable.tolist(),
        }

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Tests:
        sets = told["z"]
        widest = max(map(len, sets), default=0)
        return cls(
            np.array(told["x"], np.int32),
            np.array(told["y"], np.int32),
            np.array([[*each, *[-1] * (widest - len(each))] for each in sets], np.int32).reshape(len(sets), widest),
            np.array([len(each) for each in sets], np.int32),
            np.array(told["rho"], np.float64),
            np.array([-np.inf if value is None else value for value in told["log_p"]], np.float64),
            np.array(told["independent"], bool),
            np.array(told["testable"], bool),
        )


class Recorder:
    """Collects executed tests block by block."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Any, ...]] = []
        self.count = 0
        self.untestable = 0

    def add(self, x: Any, y: Any, z: Any, rho: Any, log_p: Any, independent: Any, testable: Any) -> None:
        if len(x):
            narrow = (np.asarray(each, np.int32) for each in (x, y, z))
            self._blocks.append((*narrow, rho, log_p, independent, testable))
            self.count += len(x)
            self.untestable += int(len(x) - np.count_nonzero(testable))

    def mark(self) -> tuple[int, int, int]:
        """A point to return to."""
        return len(self._blocks), self.count, self.untestable

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Forgets what was added since."""
        blocks, self.count, self.untestable = mark
        del self._blocks[blocks:]

    def tests(self) -> Tests:
        widest = max((block[2].shape[1] for block in self._blocks), default=0)
        z = np.full((self.count, widest), -1, np.int32)
        size = np.zeros(self.count, np.int32)
        at = 0
        for block in self._blocks:
            rows, columns = block[2].shape
            z[at : at + rows, :columns] = block[2]
            size[at : at + rows] = columns
            at += rows
        x, y, rho, log_p, independent, testable = (
            np.concatenate([np.zeros(0, kind), *(block[place] for block in self._blocks)], dtype=kind)
            for place, kind in ((0, np.int32), (1, np.int32), (3, float), (4, float), (5, bool), (6, bool))
        )
        return Tests(x, y, z, size, rho, log_p, independent, testable)
