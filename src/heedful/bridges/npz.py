"""NumPy's .npz files of cases: arrays by name, never Python objects, and one error for whatever is broken."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heedful._errors import InvalidArgument

__all__ = ["read_npz"]

# What numpy and zipfile raise of a file that is truncated, altered or something else.
_BROKEN = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


def read_npz(file: Path, split: str, names: Sequence[str] = ("X", "y")) -> dict[str, tuple[str, np.ndarray | None]]:
    """For each name what it is called in the file and its array: all with `_train` or `_test` behind, by `split`, or as they are.

    The first name must be there, the others may be None.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/a.npz", X_train=np.zeros(3), X_test=np.ones(2))
    ...     read_npz(Path(folder, "a.npz"), "test")
    {'X': ('X_test', array([1., 1.])), 'y': ('y_test', None)}
    """
    first = names[0]
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array, not several by name")
        with loaded as saved:
            ending = next((end for end in (f"_{split}", "") if f"{first}{end}" in saved), None)
            if ending is None:
                held = ", ".join(saved.files) or "nothing"
                raise InvalidArgument(f"{file} has no array {first}_{split} or {first}; it holds {held}")
            return {name: (f"{name}{ending}", saved.get(f"{name}{ending}")) for name in names}
    except InvalidArgument:
        raise
    except _BROKEN as error:
        why = " ".join(str(error).split())
        if "allow_pickle" in why and not zipfile.is_zipfile(file):
            why = "it is something else"
        elif "allow_pickle" in why:
            why = "it holds Python objects, which are not read; save numbers, and labels as numbers or strings"
        raise InvalidArgument(f"{file} cannot be read as .npz: {why}") from None
