"""How long a library of 2,000 documents takes to index and to search, and whether re-ranking finds what a question asks for.

Documents are docstrings of installed packages, without their examples. The first sentence of a docstring asks; its own first passage,
which holds that sentence, is left out, and other passages of the same document are right. `python -m benchmarks.search --work FOLDER`
keeps documents and index there, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import random
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from heedful._progress import bar
from heedful.bridges.sentences import Sentences
from heedful.ranking import Library, rerank
from heedful.ranking._store import Store
from heedful.ranking.library import AUTO

MODULES = [
    "scipy.stats",
    "scipy.signal",
    "scipy.optimize",
    "scipy.linalg",
    "scipy.special",
    "scipy.ndimage",
    "scipy.interpolate",
    "scipy.integrate",
    "scipy.sparse",
    "scipy.spatial",
    "scipy.fft",
    "scipy.cluster.hierarchy",
    "scipy.spatial.distance",
    "numpy",
    "numpy.linalg",
    "numpy.fft",
    "numpy.random",
    "sklearn.linear_model",
    "sklearn.cluster",
    "sklearn.metrics",
    "sklearn.ensemble",
    "sklearn.preprocessing",
    "sklearn.decomposition",
    "sklearn.svm",
    "sklearn.model_selection",
    "sklearn.datasets",
    "pandas",
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.linalg",
    "networkx",
    "matplotlib.pyplot",
]
DOCUMENTS = 2000
# Questions that are passed by, and those that are asked, in the order of a draw.
PASSED, ASKED = 300, 400
FIRST = 100
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cosine", {}),
    (AUTO[0], dict(AUTO[1])),
    ("k-reciprocal", {}),
    ("alpha-qe", {"n": 3}),
    ("alpha-qe", {}),
    ("alpha-dba", {}),
    ("super-global", {}),
    ("diffusion", {}),
)
QUESTIONS = (
    "how do I fit a straight line to points with errors?",
    "distance between two probability distributions",
    "make the colours of a plot lighter",
    "find the shortest path in a graph",
)


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Module, name and text, each text once, of at least 60 words."""
    seen = set()
    for module in MODULES:
        home = importlib.import_module(module)
        for name in sorted(dir(home)):
            thing = getattr(home, name)
            text = inspect.getdoc(thing) or "" if callable(thing) and not name.startswith("_") else ""
            text = re.split(r"\n(?:Examples?|References|See Also)\n-+|\nExamples?:", text)[0]
            if len(text.split()) >= 60 and text not in seen:
                seen.add(text)
                yield module, name, text


def write_documents(folder: Path) -> None:
    """The documents as files, a folder for each module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        items = list(docstrings())
    random.Random(0).shuffle(items)
    written = set()
    for module, name, text in items[:DOCUMENTS]:
        file = folder / module.replace(".", "/") / f"{name}.rst"
        # Where upper and lower case are one, so are some names.
        if str(file).lower() not in written:
            written.add(str(file).lower())
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{name}\n{'=' * len(name)}\n\n{text}\n", encoding="utf-8")


def search_times(library: Library) -> list[float]:
    """Seconds for each question, behind the first one, which loads the model and the vectors."""
    library.search("a question")
    seconds = []
    for question in QUESTIONS:
        begun = time.perf_counter()
        library.search(question)
        seconds.append(time.perf_counter() - begun)
    return seconds


def known_items(store: Store, sentences: Sentences) -> Iterator[str]:
    """A line for each method: how well it finds other passages of the document whose first sentence asks."""
    numbers, vectors = store.vectors()
    rows = [row for start in range(0, len(numbers), 500) for row in store.rows(numbers[start : start + 500])]
    paths = np.array([row.path for row in rows])
    opening = np.r_[True, paths[1:] != paths[:-1]]
    names, counts = np.unique(paths, return_counts=True)
    chosen = [str(name) for name in names[counts >= 3]]
    random.Random(0).shuffle(chosen)
    chosen = chosen[PASSED : PASSED + ASKED]
    first = {row.path: row.text for row, opens in zip(rows, opening, strict=True) if opens}
    questions = [re.split(r"(?<=\.)\s|\n\n", first[name].strip())[0][:200] for name in chosen]
    asked = sentences.encode(questions, kind="query")
    database, homes = vectors[~opening], paths[~opening]
    lists = np.argsort(-(asked @ database.T), axis=1, kind="stable")[:, :FIRST]
    yield f"{len(chosen)} questions, lists of {FIRST} of {len(homes):,} passages; in %: reciprocal rank, first right, right in 5, AP"
    for method, options in CASES:
        figures = []
        for name, question, places in zip(chosen, asked, lists, strict=True):
            order = rerank(question[None], database[places], method, normalize=False, device="cpu", **options).order[0]
            good = homes[places][order] == name
            hits = np.flatnonzero(good)
            precision = (np.arange(len(hits)) + 1) / (hits + 1)
            found = 1 / (hits[0] + 1) if len(hits) else 0.0
            figures.append((found, good[0], good[:5].any(), precision.sum() / (homes == name).sum()))
        shown = "  ".join(f"{100 * value:5.1f}" for value in np.mean(np.array(figures, float), axis=0))
        yield f"{method:14} {', '.join(f'{key}={value}' for key, value in options.items()):24} {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for documents and index")
    work = parser.parse_args().work
    if not (work / "docs").is_dir():
        write_documents(work / "docs")
    sentences = Sentences(dtype="auto")
    with Library(work / "docs.sqlite", sentences) as library:
        cpu = time.process_time()
        with bar(stays=True) as say:
            update = library.update(work / "docs", progress=say)
        print(f"{update}\n{update.seconds:.0f} s, {time.process_time() - cpu:.0f} s of processors")
        print("a search:", ", ".join(f"{1000 * seconds:.0f}" for seconds in search_times(library)), "ms")
    store = Store(work / "docs.sqlite")
    for line in known_items(store, sentences):
        print(line, flush=True)
    store.close()


if __name__ == "__main__":
    main()
