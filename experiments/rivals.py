"""What one would take instead of ours for a table: linear models, neighbours, kernels, forests, boosted trees; on one core.

`python -m experiments.rivals tables-cc18` runs the rivals of a recipe alone and keeps their parts in its work folder; a machine without a
rival's package finds them there.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

from experiments.recipe import FOLDER, Setting, recipe
from experiments.store import Store
from experiments.tabular import Data, judged, one_thread, spread


@dataclass(frozen=True)
class Rival:
    """A model by its maker, `make(rows to learn from, seed)`; what it is given: "dense" (standardised, a column for each level, means for
    missing cells), "codes" (cells as they are, levels as numbers) or "frame" (a data frame with pandas' categories)."""

    make: Callable[[Data, int], Any]
    given: str = "dense"
    package: str = "scikit-learn"

    @property
    def is_here(self) -> bool:
        return self.package == "scikit-learn" or find_spec(self.package) is not None


def _linear(data: Data, seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge

    return LogisticRegression(max_iter=5000) if data.classes else Ridge()


def _neighbours(data: Data, seed: int) -> Any:
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

    return (KNeighborsClassifier if data.classes else KNeighborsRegressor)(5)


def _support(data: Data, seed: int) -> Any:
    """Scores of the machine as probabilities by Platt's sigmoid, fitted on its own folds."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.svm import SVC, SVR

    if not data.classes:
        return SVR(C=100.0)
    return CalibratedClassifierCV(SVC(), ensemble=False, cv=min(5, int(np.bincount(data.y).min())))


def _forest(data: Data, seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    return (RandomForestClassifier if data.classes else RandomForestRegressor)(300, random_state=seed, n_jobs=1)


def _extra(data: Data, seed: int) -> Any:
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

    return (ExtraTreesClassifier if data.classes else ExtraTreesRegressor)(300, random_state=seed, n_jobs=1)


def _boosting(data: Data, seed: int) -> Any:
    from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

    return (GradientBoostingClassifier if data.classes else GradientBoostingRegressor)(
        n_estimators=500, random_state=seed
    )


def _process(data: Data, seed: int) -> Any:
    """A Gaussian process with a length for each column, and noise."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    # From a start of more noise the lengths end where every row is alone.
    size, lengths = ConstantKernel(1.0, (1e-3, 1e5)), RBF(np.ones(data.X.shape[1]), (1e-2, 1e4))
    kernel = size * lengths + WhiteKernel(0.01, (1e-9, 1.0))
    return GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)


def _xgboost(rounds: int | None = None) -> Callable[[Data, int], Any]:
    def make(data: Data, seed: int) -> Any:
        import xgboost

        kind = xgboost.XGBClassifier if data.classes else xgboost.XGBRegressor
        return kind(n_jobs=1, random_state=seed, enable_categorical=True, n_estimators=rounds)

    return make


def _lightgbm(**options: Any) -> Callable[[Data, int], Any]:
    def make(data: Data, seed: int) -> Any:
        import lightgbm

        kind = lightgbm.LGBMClassifier if data.classes else lightgbm.LGBMRegressor
        return kind(n_jobs=1, random_state=seed, verbose=-1, **options)

    return make


def _catboost(data: Data, seed: int) -> Any:
    import catboost

    kind = catboost.CatBoostClassifier if data.classes else catboost.CatBoostRegressor
    return kind(thread_count=1, random_seed=seed, verbose=False, allow_writing_files=False)


FOREST = "random forest, 300 trees"
RIVALS = {
    "linear": Rival(_linear),
    "5 nearest rows": Rival(_neighbours),
    "SVM, Gaussian kernel": Rival(_support),
    FOREST: Rival(_forest, "codes"),
    "extra trees, 300": Rival(_extra, "codes"),
    "gradient boosting, 500 trees": Rival(_boosting, "codes"),
    "Gaussian process": Rival(_process),
    "XGBoost": Rival(_xgboost(), "frame", "xgboost"),
    "XGBoost, 1,000 rounds": Rival(_xgboost(1000), "frame", "xgboost"),
    "LightGBM": Rival(_lightgbm(), "frame", "lightgbm"),
    # As it comes, its leaves of rare classes grow without bound; XGBoost's have this weight at least.
    "LightGBM, 1,000 rounds": Rival(_lightgbm(n_estimators=1000, min_child_weight=1.0), "frame", "lightgbm"),
    "CatBoost": Rival(_catboost, "frame", "catboost"),
}


def dense(data: Data) -> Any:
    """Numbers standardised, means for missing ones; a column for each level, of which a missing cell is one."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = [place for place in range(data.X.shape[1]) if place not in data.categorical]
    return make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), numbers),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), list(data.categorical)),
    )


def fitted(name: str, data: Data, learn: np.ndarray, test: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """A rival measured on the rows `test`; seconds of one core for `fit` and answers together."""
    rival, data = RIVALS[name], data.filled(learn)
    estimator: Any = rival.make(replace(data, X=data.X[learn], y=data.y[learn]), seed)
    fit: dict[str, Any] = {}
    table = data.frame() if rival.given == "frame" else data.X
    first, second = (table.iloc[rows] if rival.given == "frame" else table[rows] for rows in (learn, test))
    if rival.given == "dense":
        from sklearn.pipeline import make_pipeline

        estimator = make_pipeline(dense(data), estimator)
    if rival.package == "catboost":
        columns = [f"c{place}" for place in data.categorical]
        # CatBoost takes no missing category: it is a level of its own.
        levels = {column: table[column].astype(object).map(str) for column in columns}
        first, second = (table.assign(**levels).iloc[rows] for rows in (learn, test))
        fit["cat_features"] = columns
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        estimator.fit(first, data.y[learn], **fit)
        answers = estimator.predict_proba(second) if data.classes else np.asarray(estimator.predict(second))
        seconds = time.process_time() - began
    if data.classes:
        answers = spread(answers, estimator.classes_, data.classes)
    return {
        **judged(data.y[test], answers),
        "seconds": seconds,
        "package": _version(rival.package),
    }


@cache
def _version(package: str) -> str:
    """A package with its version; `xgboost` may be carried by `xgboost-cpu`."""
    carriers = metadata.packages_distributions().get(package, [package])
    return f"{package} {metadata.version(carriers[0])}"


def possible(
    store: Store, parts: Mapping[str, tuple[Any, ...]], names: Mapping[str, str]
) -> dict[str, tuple[Any, ...]]:
    """Parts that are kept, or whose rival's package (by `names` of parts) is installed."""
    return {part: given for part, given in parts.items() if store.has(part) or RIVALS[names[part]].is_here}


def main(name: str) -> None:
    work = FOLDER / ".work" / name
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting(False, "cpu", work, lambda line: print(line, flush=True))
    recipe(name).rivals(setting, 1)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1])
