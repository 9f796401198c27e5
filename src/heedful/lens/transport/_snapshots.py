"""Arrays of one shape, one after the other, in memory or in a temporary file."""

from __future__ import annotations

import tempfile
import weakref
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


class Snapshots:
    """Grows by `append`; `array()` is all of them, `(S, ...)`. The file is deleted with this object, or when the process ends."""

    def __init__(self, disk: bool) -> None:
        self._kept: list[NDArray[Any]] = []
        self._file: IO[bytes] | None = None
        if disk:
            # Without a name on POSIX systems: nothing is left behind, however the process ends.
            self._file = tempfile.TemporaryFile(prefix="heedful-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self.shape: tuple[int, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, snapshot: NDArray[Any]) -> None:
        if self._count == 0:
            self.shape, self._dtype = snapshot.shape, snapshot.dtype
        snapshot = np.ascontiguousarray(snapshot, dtype=self._dtype)
        if self._file is None:
            self._kept.append(snapshot)
        else:
            self._file.seek(self._count * snapshot.nbytes)
            self._file.write(snapshot.tobytes())
            self._file.flush()
        self._count += 1

    def array(self) -> NDArray[Any]:
        if self._file is None:
            return np.stack(self._kept)
        return np.memmap(self._file, self._dtype, "r", shape=(self._count, *self.shape))
