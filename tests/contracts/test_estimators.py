"""scikit-learn's own checks, on tables as univariate series and on the same numbers as a 3-D array."""

from functools import partial
from unittest import SkipTest

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from sklearn.utils.estimator_checks import check_dataframe_column_names_consistency, estimator_checks_generator

from heedful.series import SeriesClassifier

OPTIONS = {"embed_dim": 8, "num_heads": 2, "rank": 3, "epochs": 6, "lr": 0.03, "dropout": 0.0, "batch_size": 32}


class CubeClassifier(SeriesClassifier):
    """Gives a table (cases, columns) on as an array (cases, channels, one step)."""

    def _read(self, X, *labels, **more):
        return super()._read(cube(X), *labels, **more)


def cube(X):
    table = np.asarray(X)
    return table[..., None] if table.ndim == 2 else X


TABLE = SeriesClassifier(["primal"], **OPTIONS, random_state=0)
CUBE = CubeClassifier(["softmax"], **OPTIONS | {"epochs": 8, "lr": 0.1}, predict_dtype="float64", random_state=0)

# Check -> why it says nothing here. All others must pass, 60 on tables (in float32) and 59 on 3-D arrays (in float64).
ALWAYS = {
    "check_array_api_input": "scikit-learn skips it unless SCIPY_ARRAY_API is set before scipy is imported",
    "check_sample_weight_equivalence_on_dense_data": "a case of weight 2 is in one batch, two cases are in two; and zeros change "
    "which cases are held out",
}
LEFT_OUT = {
    TABLE: ALWAYS,
    CUBE: {
        **ALWAYS,
        "check_estimators_empty_data_messages": "it wants a message that names a shape of two axes",
    },
}


def name_of(check):
    return check.func.__name__ if isinstance(check, partial) else check.__name__


def checks(estimator):
    for made, check in estimator_checks_generator(estimator, mark=None):
        if name_of(check) not in LEFT_OUT[estimator]:
            options = "-".join(map(str, getattr(check, "keywords", {})))
            yield pytest.param(made, check, id=f"{type(estimator).__name__}-{name_of(check)}-{options}".rstrip("-"))


@pytest.mark.parametrize(("estimator", "check"), [*checks(TABLE), *checks(CUBE)])
def test_scikit_learn_check(estimator, check):
    try:
        assert check(estimator) is None
    except SkipTest as reason:
        pytest.fail(f"a check that counts did not run: {reason}")


def test_the_checks_are_counted():
    """A release of scikit-learn with other checks is to be noticed."""
    for estimator, passed in ((TABLE, 60), (CUBE, 59)):
        names = [name_of(check) for _, check in estimator_checks_generator(estimator, mark=None)]
        assert len(list(checks(estimator))) == passed
        assert len(names) == 62
        assert set(LEFT_OUT[estimator]) <= set(names)


def test_tables_keep_their_column_names():
    pytest.importorskip("pandas", reason="the extra 'tables' is not installed")
    check_dataframe_column_names_consistency("SeriesClassifier", TABLE)
