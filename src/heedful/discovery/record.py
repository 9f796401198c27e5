"""The tests a learner executed, as compact arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heedful._result import Result

# The columns of a record, in order.
_TYPES = {
    **dict.fromkeys(("x", "y", "z", "size"), np.int32),
    **dict.fromkeys(("rho", "log_p"), np.float64),
    **dict.fromkeys(("independent", "testable"), np.bool_),
}


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
class Tests(Result):
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
        return TestLog().tests()

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Row]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: int) -> Row:
        x, y, z, size, *decision = (getattr(self, name)[at].tolist() for name in _TYPES)
        return Row(x, y, tuple(z[:size]), *decision)

    def __repr__(self) -> str:
        return f"Tests({len(self)} executed, {int(self.independent.sum())} independent, sets up to {self.z.shape[1]})"

    def to_dict(self) -> dict[str, Any]:
        """JSON types alone; a p-value of 0 has no finite logarithm and is written as null."""
        columns = super().to_dict()
        sets = zip(columns["z"], columns.pop("size"), strict=True)
        return columns | {"z": [row[:size] for row, size in sets]}

    @classmethod
    def from_dict(cls, columns: dict[str, Any]) -> Tests:
        """The tests that `to_dict` wrote."""
        sets = columns["z"]
        widest = max(map(len, sets), default=0)
        lists = {name: columns[name] for name in _TYPES if name != "size"} | {
            "z": [[*each, *[-1] * (widest - len(each))] for each in sets],
            "size": [len(each) for each in sets],
            "log_p": [-np.inf if value is None else value for value in columns["log_p"]],
        }
        arrays: dict[str, Any] = {name: np.array(lists[name], kind) for name, kind in _TYPES.items()}
        return cls(**arrays | {"z": arrays["z"].reshape(len(sets), widest)})


class TestLog:
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
        sets = [block[2] for block in self._blocks]
        z = np.full((self.count, max((each.shape[1] for each in sets), default=0)), -1, np.int32)
        size = np.repeat([each.shape[1] for each in sets], [len(each) for each in sets]).astype(np.int32)
        at = 0
        for each in sets:
            z[at : at + len(each), : each.shape[1]] = each
            at += len(each)
        x, y, *decisions = (
            np.concatenate([np.zeros(0, kind), *(block[place] for block in self._blocks)], dtype=kind)
            for place, kind in enumerate((np.int32, np.int32, None, float, float, bool, bool))
            if kind
        )
        return Tests(x, y, z, size, *decisions)
