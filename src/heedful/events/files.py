"""Files of events: tables in .csv and .parquet with a row for each event, and NumPy's .npz with flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heedful._errors import InvalidArgument
from heedful._text import quantity
from heedful.bridges.frames import is_frame, read_table
from heedful.bridges.npz import read_npz

Split = Literal["train", "test"]
NAMES = ("times", "offsets", "types", "starts", "ends")


@dataclass(frozen=True, eq=False)
class EventData:
    """Events of a file: `X` is what `NextEvent` takes, a data frame or a dict of arrays. What is to be foreseen lies in it, so `y` is None."""

    X: Any
    name: str
    y: None = None

    def __repr__(self) -> str:
        if is_frame(self.X):
            return f"{self.name}: {quantity(len(self.X), 'event')}, columns {', '.join(map(str, self.X.columns))}"
        events, sequences = len(self.X["times"]), len(self.X["offsets"]) - 1
        return f"{self.name}: {quantity(events, 'event')} in {quantity(sequences, 'sequence')}"


def read(file: str | Path, split: Split = "train") -> EventData:
    """Reads a table in .csv or .parquet with a row for each event, or a .npz.

    A table has a column for the sequence, the time (numbers, dates, or text that is a date) and the type; `NextEvent` is given their names. A .npz has the flat
    arrays `times` and `offsets` (events of sequence i are `times[offsets[i]:offsets[i + 1]]`), and perhaps `types`, `starts` and `ends`; with `_train` or `_test` behind
    all names, those of `split` are read. Object arrays, which are pickles, are not read.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/calls.npz", times=[0.5, 2.0, 1.0], types=["in", "out", "in"], offsets=[0, 2, 3])
    ...     read(f"{folder}/calls.npz")
    calls: 3 events in 2 sequences
    """
    file = Path(file).expanduser()
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    if file.suffix in (".csv", ".parquet"):
        return EventData(read_table(file), file.stem)
    if file.suffix != ".npz":
        raise InvalidArgument(f"{file} is none of .csv, .parquet, .npz; save a table with a row for each event")
    arrays = {name: array for name, (_, array) in read_npz(file, split, NAMES).items() if array is not None}
    if "offsets" not in arrays:
        raise InvalidArgument(
            f"{file} has times and no offsets; events of sequence i are times[offsets[i]:offsets[i + 1]], so offsets begin with 0 and end with their number"
        )
    return EventData(arrays, file.stem)
