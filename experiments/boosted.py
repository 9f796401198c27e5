"""Gradient-boosted trees on hand-made features of event sequences: what one would take instead of a sequence model.

scikit-learn's `HistGradientBoostingClassifier`. Of every target: the last types (as categories), the last gaps, hour and weekday of the last
event, how much of what has happened so far; and, where the target's time is known, the gap to it, its hour, quarter of an hour and weekday,
and its day. The setting is chosen, and the number of trees, on whole sequences apart from those it learns from and is tested on.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiments.counting import gaps, history, measured
from experiments.events import Events, Split

DEPTH = 4  # last events and gaps
FEW = 32  # types at most for counts of each


@dataclass(frozen=True)
class Trees:
    """A setting; `rows` at most are drawn for learning."""

    rate: float = 0.1
    leaves: int = 31
    rounds: int = 200
    rows: int = 1_000_000
    patience: int = 10
    l2: float = 10.0  # with 0, scikit-learn's default, leaves of rare types grow without bound


def features(events: Events, day: float, known: bool) -> tuple[np.ndarray, np.ndarray]:
    """`[targets, features]` in float32 with NaN where there is nothing, and which columns are categories.

    Args:
        events: whose `marks`, where there are some, are given for the last event too.
        day: how long a day is.
        known: whether the time of the target is.
    """
    targets = events.targets
    begin = events.starts[events.sequence[targets]]
    names = list(events.marks)
    categories = history(events, DEPTH)
    categories += [
        history(events, 1, name)[0] for name in names if not np.array_equal(events.marks[name], events.types)
    ]
    columns = [np.where(key < 0, np.nan, key) for key in categories]
    last = events.times[targets - 1]
    for back in range(1, DEPTH):
        there = targets - 1 - back >= begin
        earlier = events.times[np.maximum(targets - 1 - back, 0)]
        later = events.times[np.maximum(targets - back, 0)]
        columns.append(np.where(there, _log(later - earlier), np.nan))
    columns += [last % day / day, last // day % 7, _log(last - events.times[begin]), targets - begin]
    if len(events.names) <= FEW:
        columns += _so_far(events, last)
    if known:
        target = events.times[targets]
        columns += [
            _log(gaps(events)),
            target % day / day,
            target % day // (day / 96),
            target // day % 7,
            target // day,
        ]
    return np.stack(columns, 1).astype(np.float32), np.arange(len(columns)) < len(categories)


def _log(spans: np.ndarray) -> np.ndarray:
    return np.log1p(np.maximum(spans, 0))


def _so_far(events: Events, last: np.ndarray) -> list[np.ndarray]:
    """Of each type: how often it has happened, and how long before the last event it did last."""
    targets = events.targets
    begin = events.starts[events.sequence[targets]]
    columns = []
    for number in range(len(events.names)):
        own = events.types == number
        counts = np.concatenate(([0], np.cumsum(own)))
        columns.append(counts[targets] - counts[begin])
        place = np.maximum.accumulate(np.where(own, np.arange(len(own)), -1))[targets - 1]
        columns.append(np.where(place >= begin, _log(last - events.times[np.maximum(place, 0)]), np.nan))
    return columns


def fitted(split: Split, day: float, known: bool, settings: tuple[Trees, ...], seed: int = 0) -> dict[str, Any]:
    """The setting with the lowest loss on the validation sequences, measured on the test; seconds are of the chosen fit."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    (x, categories), (x_validation, _), (x_test, _) = (features(part, day, known) for part in split)
    y, y_validation, y_test = (part.types[part.targets] for part in split)
    # A column without any number, as of a type that never happened, has no bins.
    x, x_validation, x_test = (np.where(np.isnan(x).all(0), 0, each) for each in (x, x_validation, x_test))
    random = np.random.default_rng(seed)
    tried = []
    best: tuple[float, Any, dict[str, Any]] | None = None
    for setting in settings:
        rows = np.sort(random.permutation(len(y))[: setting.rows])
        began = time.perf_counter()
        model = HistGradientBoostingClassifier(
            learning_rate=setting.rate, max_leaf_nodes=setting.leaves, max_iter=setting.rounds, early_stopping=True, l2_regularization=setting.l2,
            n_iter_no_change=setting.patience, categorical_features=categories, random_state=seed,
        )  # fmt: skip
        # Types that training has not, validation cannot be asked about.
        there = np.isin(y_validation, y[rows])
        model.fit(x[rows], y[rows], X_val=x_validation[there], y_val=y_validation[there])
        seconds = time.perf_counter() - began
        figures = measured(_chances(model, x_validation, len(split.test.names)), y_validation)
        row = {**asdict(setting), "rows": len(rows), "rounds": model.n_iter_, "seconds": seconds, "validation": figures}
        tried.append(row)
        if best is None or figures["nll"] < best[0]:
            best = figures["nll"], model, row
    assert best is not None
    began = time.perf_counter()
    figures = measured(_chances(best[1], x_test, len(split.test.names)), y_test)
    return {**figures, **best[2], "predict_seconds": time.perf_counter() - began, "tried": tried}


def _chances(model: Any, x: np.ndarray, classes: int) -> np.ndarray:
    """`[targets, classes]`, a millionth at least: types that training did not have, and chances that are 0 in float32."""
    chances = np.zeros((len(x), classes))
    chances[:, model.classes_] = model.predict_proba(x)
    chances = np.maximum(chances, 1e-6)
    return chances / chances.sum(1, keepdims=True)
