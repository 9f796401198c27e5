"""The data sets of the UEA archive that are at hand, each as one .npz in a folder that can be taken to another machine.

They come from the data folder beside the checkout (`shared/data/series`) and from an installed aeon or sktime
(JapaneseVowels, BasicMotions). A file that lies in the folder already is taken as it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from heedful._errors import HeedfulError, Unsupported
from heedful.series import SeriesData, archive, read

BESIDE = Path(__file__).parents[2] / "shared" / "data" / "series"
PACKAGED = ("BasicMotions", "JapaneseVowels")


def prepare(folder: Path) -> list[str]:
    """Writes what is found into the folder; the names of all that lie there then."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in BESIDE.glob("*.npz"):
        if not (folder / file.name).is_file():
            write(folder / file.name, *(read(file, split) for split in ("train", "test")))
    for name in PACKAGED:
        if not (folder / f"{name}.npz").is_file():
            try:
                write(folder / f"{name}.npz", *archive(name))
            except HeedfulError:
                continue
    names = sorted(file.stem for file in folder.glob("*.npz"))
    if not names:
        raise Unsupported(f"no data set in {folder} or {BESIDE}, and neither aeon nor sktime is installed")
    return names


def load(folder: Path, name: str) -> tuple[SeriesData, SeriesData]:
    """The training and the test part."""
    return read(folder / f"{name}.npz", "train"), read(folder / f"{name}.npz", "test")


def write(file: Path, train: SeriesData, test: SeriesData) -> None:
    """Both parts as one .npz."""
    arrays = {}
    for split, data in (("train", train), ("test", test)):
        arrays |= {f"X_{split}": _array(data.X), f"y_{split}": data.y}
    # A name that no other process has: several may find the folder empty at once.
    part = file.with_name(f".{file.stem}-{id(arrays)}.npz")
    np.savez_compressed(part, **arrays)
    part.replace(file)


def _array(cases: np.ndarray | list[np.ndarray]) -> np.ndarray:
    """One array (cases, channels, time), NaN behind the end of a shorter series."""
    if isinstance(cases, np.ndarray):
        return cases
    array = np.full((len(cases), len(cases[0]), max(case.shape[1] for case in cases)), np.nan)
    for row, case in zip(array, cases, strict=True):
        row[:, : case.shape[1]] = case
    return array
