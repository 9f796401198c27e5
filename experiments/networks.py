"""Networks for time series in `series-rivals`: on the steps of series, and on tokens of convolution features."""

from __future__ import annotations

import json
import statistics
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments import series
from experiments.primal_uea import ATTENTION, batch_size, epochs
from experiments.recipe import FOLDER, Block, Table
from experiments.tabular import one_thread

NETWORK, KIND = "network", "softmax+primal"
ON_FEATURES = {"network on features": "softmax", "network on features, no attention": "none"}
# Sets of 150 training series or more.
LARGER = ("Handwriting", "RacketSports", "Libras", "OSULeaf", "JapaneseVowels", "PLAID", "PenDigits")
TOKENS = {"64 components": 64, "256 components": 256, "256 sums": 256}
TOKEN, SEGMENTS, FEATURES = "64 components", 8, 2_520
AT_MOST = 8_000  # tokens from which components are learned


def training(count: int, attention: Any = ATTENTION[KIND]) -> dict[str, Any]:
    """As in `primal-uea`: all cases are learned from, for a number of epochs that was fixed beforehand."""
    size = {"epochs": epochs(count), "batch_size": batch_size(count)}
    return {"method": "network", "attention": attention, "validation_fraction": None, **size}


def measured_before() -> list[dict[str, Any]]:
    """The same network on sets of the UEA archive, as `primal-uea` has trained it: accuracies, five seeds."""
    kept = FOLDER / "results" / "primal-uea.json"
    rows = json.loads(kept.read_text())["result"]["fits"] if kept.is_file() else []
    return [
        {"method": NETWORK, "set": row["set"], "seed": row["seed"], "accuracy": row["accuracy"]}
        for row in rows
        if row["attention"] == KIND
    ]


def fit_on_features(folder: Path, name: str, seed: int) -> list[dict[str, Any]]:
    """The network on convolution features of eight segments, with attention and without; tested once."""
    train, test = series.load(folder, name)
    X, unseen = tokens(train.X, test.X, TOKEN, seed)
    return [_on_tokens((X, train.y, unseen, test.y), method, name, seed) for method in ON_FEATURES]


def hold_out(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """A kind of tokens, judged by 30 % of the training part."""
    from sklearn.model_selection import train_test_split

    train, _ = series.load(folder, name)
    own, other = train_test_split(np.arange(len(train)), test_size=0.3, stratify=train.y, random_state=0)
    X, unseen = tokens([train.X[at] for at in own], [train.X[at] for at in other], kind, 0)
    row = _on_tokens((X, train.y[own], unseen, train.y[other]), next(iter(ON_FEATURES)), name, 0)
    return {"set": name, "tokens": kind, "accuracy": row["accuracy"]}


def tokens(X: Any, unseen: Any, kind: str, seed: int) -> tuple[np.ndarray, ...]:
    """(cases, numbers, segments) of both parts: features of each segment, standardised, as principal components or as sums with random weights."""
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler
    from sklearn.random_projection import GaussianRandomProjection

    from heedful.series import SeriesFeatures

    features = SeriesFeatures(segments=SEGMENTS, features=FEATURES, random_state=seed, device="cpu").fit(X)
    parts = [features.transform(part).astype(np.float32).reshape(SEGMENTS * len(part), -1) for part in (X, unseen)]
    scale = StandardScaler().fit(parts[0])
    parts = [scale.transform(part) for part in parts]
    size = TOKENS[kind]
    reduce: Any = PCA(size, svd_solver="randomized", random_state=seed)
    if kind.endswith("sums"):
        reduce = GaussianRandomProjection(size, random_state=seed)
    some = np.random.default_rng(seed).permutation(len(parts[0]))[:AT_MOST]
    reduce.fit(parts[0][some])
    return tuple(reduce.transform(part).reshape(-1, SEGMENTS, size).swapaxes(1, 2) for part in parts)


def _on_tokens(data: tuple[Any, ...], method: str, name: str, seed: int) -> dict[str, Any]:
    from heedful.series import SeriesClassifier

    options = training(len(data[0]), ON_FEATURES[method])
    model = SeriesClassifier(random_state=seed, device="cpu", **options)
    return measured(model, data, {"method": method, "set": name, "seed": seed})


def measured(model: Any, data: tuple[Any, ...], about: dict[str, Any]) -> dict[str, Any]:
    """Accuracy of a model on unseen series, and processor seconds of one thread."""
    X, y, unseen, answers = data
    _warm()
    with one_thread(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ series are longer")
        began = time.process_time()
        model.fit(X, y)
        between = time.process_time()
        accuracy = 100 * float(np.mean(model.predict(unseen) == answers))
    return about | {"accuracy": accuracy, "fit": between - began, "predict": time.process_time() - between}


@cache
def _warm() -> None:
    """A first fit pays for imports; the rivals' do not count either."""
    from heedful.series import SeriesClassifier

    X = np.random.default_rng(0).standard_normal((8, 30))
    SeriesClassifier(features=84, device="cpu").fit(X, [0, 1] * 4).predict(X)


def blocks(result: dict[str, Any], accuracy: dict[str, dict[str, float]]) -> list[Block]:
    """The kernel method, the network on steps and the network on features, on the larger sets."""
    methods = ("ours", NETWORK, *ON_FEATURES)
    names = [name for name in LARGER if all(name in accuracy.get(method, {}) for method in ON_FEATURES)]
    if not names:
        return []
    rows = [[name, *(shown(accuracy.get(method, {}).get(name)) for method in methods)] for name in names]
    first, control = ON_FEATURES
    gains = {
        "network on steps less the kernel method, on all sets that have both": _gaps(accuracy, NETWORK, "ours"),
        "network on features less the kernel method": _gaps(accuracy, first, "ours"),
        "network on features less the network on steps": _gaps(accuracy, first, NETWORK),
        "network on features less the same without attention": _gaps(accuracy, first, control),
    }
    kinds = {kind: [row["accuracy"] for row in result["held_out"] if row["tokens"] == kind] for kind in TOKENS}
    return [
        f"A network on convolution features of {SEGMENTS} segments, on sets of 150 training series or more. Test accuracy in %; on features the means of three seeds.",
        Table(["data set", *methods], rows, control=control),
        *(
            f"- The {other}: {statistics.fmean(gaps):+.1f} points in the mean of {len(gaps)} sets, above on {sum(gap > 0 for gap in gaps)}, below on {sum(gap < 0 for gap in gaps)}."
            for other, gaps in gains.items()
            if gaps
        ),
        "- Tokens by 30 % of each training part, held out, means over sets: "
        + ", ".join(f"{kind} {statistics.fmean(values):.1f}" for kind, values in kinds.items() if values)
        + f"; taken: {TOKEN}.",
    ]


def _gaps(accuracy: dict[str, dict[str, float]], method: str, other: str) -> list[float]:
    own, there = accuracy.get(method, {}), accuracy.get(other, {})
    return [own[name] - there[name] for name in own if name in there]


def shown(value: float | None) -> str | None:
    """A percentage in a cell."""
    return None if value is None else f"{value:.1f}"
