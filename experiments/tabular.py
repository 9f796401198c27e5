"""Tables to learn from, how they are split, and what is measured on them: what the recipes of tables have in common.

The files lie in the data folder beside the checkout (`shared/data/tabular`), which says where each comes from and its licence; a recipe
copies them into its work folder, where a machine without the data folder finds them.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.recipe import hardware
from experiments.store import copied
from heedful._errors import InvalidArgument

BESIDE = Path(__file__).parents[2] / "shared" / "data" / "tabular"
CC18 = "openml_cc18_small30.npz"
FILES = {"yacht": "yacht.csv", "concrete": "concrete.csv", "boston": "boston.csv", "protein": "protein.csv.gz"}
BUNDLED = ("breast cancer", "digits")  # scikit-learn carries them
LEAST = 1e-7  # probability that a label is given at least, of any model
SEED = 42  # of the paper's splits


@dataclass(frozen=True)
class Data:
    """A table: `X [rows, columns]` in float64 with NaN where a cell is missing, codes in the columns `categorical`; `y [rows]`.

    `classes` is how many labels there are, 0 to `classes - 1`; 0 where y is a number.
    """

    name: str
    X: np.ndarray
    y: np.ndarray
    categorical: tuple[int, ...] = ()
    classes: int = 0

    def __len__(self) -> int:
        return len(self.y)

    def filled(self, learn: np.ndarray) -> Data:
        """Without columns that hold no value in the rows to learn from: no model is given them."""
        there = np.flatnonzero(~np.isnan(self.X[learn]).all(0))
        places = tuple(int(np.flatnonzero(there == place)[0]) for place in self.categorical if place in there)
        return replace(self, X=self.X[:, there], categorical=places)

    def frame(self) -> Any:
        """A data frame whose categories are pandas' own, each with all levels of the table."""
        import pandas

        frame = pandas.DataFrame(self.X, columns=[f"c{place}" for place in range(self.X.shape[1])])
        for place in self.categorical:
            column = self.X[:, place]
            levels = np.unique(column[~np.isnan(column)])
            codes = np.where(np.isnan(column), -1, np.searchsorted(levels, column))
            frame[f"c{place}"] = pandas.Categorical.from_codes(codes, levels.astype(np.int64))
        return frame


class Split(NamedTuple):
    """Places of rows to learn from, to stop by, and to test on."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def fitting(self) -> np.ndarray:
        """All but the test."""
        return np.sort(np.concatenate((self.train, self.validation)))


def prepare(folder: Path, name: str) -> Path:
    """A file in the work folder, copied there the first time."""
    return copied(name, BESIDE, folder)


def cc18_names(folder: Path) -> list[str]:
    """Names of the 30 tables of OpenML-CC18 that have at most 2,000 rows."""
    return [row["name"] for row in json.loads(prepare(folder, CC18.replace(".npz", ".json")).read_text())]


def cc18(folder: Path, name: str) -> Data:
    """One of them."""
    listed = {row["name"]: row["key"] for row in json.loads(prepare(folder, CC18.replace(".npz", ".json")).read_text())}
    if name not in listed:
        raise InvalidArgument(f"there is no table {name!r}; there are {', '.join(listed)}")
    with np.load(prepare(folder, CC18)) as held:
        x, y, places = (held[f"{listed[name]}__{part}"] for part in ("X", "y", "cat"))
    return Data(name, x.astype(np.float64), y.astype(np.int64), tuple(places.tolist()), int(y.max()) + 1)


def read(folder: Path, name: str) -> Data:
    """yacht, concrete, boston or protein, the target last; breast cancer, digits or diabetes, as scikit-learn carries them."""
    if name == "diabetes":
        from sklearn import datasets

        return Data(name, *datasets.load_diabetes(return_X_y=True))
    if name in BUNDLED:
        from sklearn import datasets

        loaded = datasets.load_breast_cancer() if name == "breast cancer" else datasets.load_digits()
        return Data(name, loaded.data.astype(np.float64), loaded.target.astype(np.int64), (), len(loaded.target_names))
    if name not in FILES:
        raise InvalidArgument(f"there is no table {name!r}; there are {', '.join((*FILES, *BUNDLED))}")
    file = prepare(folder, FILES[name])
    cells = np.loadtxt(file, delimiter=",", skiprows=1)
    return Data(name, cells[:, :-1], cells[:, -1])


def drawn(name: str, rows: int, classes: int = 0, seed: int = 0) -> Data:
    """A stand-in for quick runs: four numbers and a category, some cells missing; the target hangs on the first three columns."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 5))
    x[:, 4] = random.integers(3, size=rows)
    signal = x[:, 0] - x[:, 1] * x[:, 2] + 0.1 * random.normal(size=rows)
    x[random.random(x.shape) < 0.03] = np.nan
    if not classes:
        return Data(name, np.nan_to_num(x), signal, (4,))
    return Data(name, x, np.searchsorted(np.quantile(signal, np.arange(1, classes) / classes), signal), (4,), classes)


def halves(data: Data, seed: int, rows: int = 1000, test_share: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """At most `rows` rows, half (or another share) to test on and the others to learn from, shares of classes kept in both draws."""
    from sklearn.model_selection import train_test_split

    places = np.arange(len(data))
    labels = data.y if data.classes else np.zeros(len(data))
    if len(data) > rows:
        places, _ = train_test_split(places, train_size=rows, random_state=seed, stratify=labels)
    learn, test = train_test_split(places, test_size=test_share, random_state=seed, stratify=labels[places])
    return np.sort(learn), np.sort(test)


def published(data: Data, fold: int) -> Split:
    """The paper's split, by the authors' code: fold `fold` of 10 (seed 42) is the test; of the others 2/9 are for validation, 70/20/10 in all.

    Of protein: 5 folds, 70/10/20.
    """
    from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

    count, share = (5, 0.1 / 0.8) if data.name == "protein" else (10, 0.2 / 0.9)
    folds = (StratifiedKFold if data.classes else KFold)(count, shuffle=True, random_state=SEED)
    others, test = list(folds.split(data.X, data.y))[fold]
    train, validation = train_test_split(others, test_size=share, random_state=SEED)
    return Split(np.sort(train), np.sort(validation), test)


def tenth(data: Data, fold: int) -> tuple[np.ndarray, np.ndarray]:
    """Fold `fold` of 10, shuffled with seed 0, as a test; all others to learn from."""
    from sklearn.model_selection import KFold, StratifiedKFold

    folds = (StratifiedKFold if data.classes else KFold)(10, shuffle=True, random_state=0)
    return list(folds.split(data.X, data.y))[fold]


def judged(y: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """Of probabilities `[rows, classes]`: area under the ROC curve (of several classes the mean over pairs of them, where all are there),
    accuracy, its mean over classes, and the mean of -log p, p at least 1e-7. Of numbers the root of the mean squared error."""
    if answers.ndim == 1:
        return {"rmse": float(np.sqrt(np.mean((answers - y) ** 2)))}
    from sklearn.metrics import roc_auc_score

    chances = np.clip(answers.astype(np.float64), LEAST, None)
    chances /= chances.sum(1, keepdims=True)
    right = answers.argmax(1) == y
    present, figures = np.unique(y), {}
    if len(present) == chances.shape[1]:
        two = len(present) == 2
        figures["auc"] = float(
            roc_auc_score(y, chances[:, 1] if two else chances, multi_class="raise" if two else "ovo")
        )
    return {
        **figures,
        "accuracy": float(right.mean()),
        "balanced": float(np.mean([right[y == label].mean() for label in present])),
        "nll": float(-np.log(chances[np.arange(len(y)), y]).mean()),
    }


def spread(chances: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """`[rows, classes]`: zeros for labels that the rows to learn from did not have."""
    full = np.zeros((len(chances), classes))
    full[:, labels] = chances
    return full


@contextmanager
def one_thread() -> Iterator[None]:
    """One core for whatever runs inside, so that seconds of CPU are what a user of one core waits."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def clock(device: str) -> float:
    """Seconds of CPU on the CPU, which others on the machine do not lengthen; else of the wall's clock."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def model(data: Data, options: Mapping[str, Any], seed: int, device: str) -> Any:
    """Ours, not yet fitted."""
    from heedful.tables import DatapointClassifier, DatapointRegressor

    kind = DatapointClassifier if data.classes else DatapointRegressor
    places = options.get("categorical", list(data.categorical) or "auto")
    return kind(**{**options, "categorical": places}, random_state=seed, device=device)


def ours(
    data: Data,
    learn: np.ndarray,
    test: np.ndarray,
    options: Mapping[str, Any],
    seed: int,
    device: str,
    also: Callable[[Any], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Our estimator fitted and measured; with `mode="transductive"` the features of the test rows are part of the table, in `fit` and in the answer.

    `also` is given the fitted estimator, for further figures.
    """
    import heedful.bridges.training  # noqa: F401  # of no fit's seconds

    data = data.filled(learn)
    both = options.get("mode") == "transductive"
    estimator = model(data, options, seed, device)
    with one_thread(), warnings.catch_warnings():
        # Levels that the rows to learn from have not are to be expected.
        warnings.simplefilter("ignore")
        began = clock(device)
        estimator.fit(data.X[learn], data.y[learn], unlabelled=data.X[test] if both else None)
        ask = estimator.predict_proba if data.classes else estimator.predict
        answers = ask(data.X[test], context="batch" if both else "train")
        seconds = clock(device) - began
        if data.classes:
            answers = spread(answers, estimator.classes_, data.classes)
        more = {} if also is None else also(estimator)
    return {
        **judged(data.y[test], answers),
        **more,
        "seconds": seconds,
        "epochs": len(estimator.training_.epochs),
        "parameters": sum(part.numel() for part in estimator.network_.parameters()),
        "device": hardware(device),
    }


def fitted_on(fits: Sequence[Mapping[str, Any]]) -> str:
    """On what ours ran."""
    counts = Counter(fit["device"] for fit in fits)
    places = " and ".join(f"{place} ({count} fits)" for place, count in counts.items())
    shared = any("CPU" not in place for place in counts)
    return (
        f"Ours ran on {places}{': several at once on the GPU, so that its seconds are upper bounds' if shared else ''}."
        if places
        else ""
    )
