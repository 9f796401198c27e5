"""What every estimator does, by its being listed: scikit-learn's own checks, counted, and what they leave open."""

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

import pandas as pd
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_dataframe_column_names_consistency, estimator_checks_generator

from heedful import Gaussian, InvalidArgument
from heedful.bridges.estimator import Estimator
from heedful.corpus import WordVectors
from heedful.decomposition import KernelSVD
from heedful.events import NextEvent
from heedful.geometry import EquivariantClassifier, EquivariantRegressor
from heedful.ranking import ListReranker
from heedful.series import SeriesClassifier, SeriesFeatures, SeriesRegressor
from heedful.tables import (
    DatapointClassifier,
    DatapointRegressor,
    InContextClassifier,
    InContextRegressor,
    TransportClassifier,
)
from small import Coordinates, CubeClassifier, Numbers, Order, PairVectors, lists, table

NOT_RUN = {"check_array_api_input": "scikit-learn skips it unless SCIPY_ARRAY_API is set before scipy is imported"}
UNWEIGHTED = NOT_RUN | {
    "check_sample_weight_equivalence_on_dense_data": "a case of weight 2 is in one batch, two cases are in two; and zeros change "
    "which cases are held out"
}
TRAINED = {
    "epochs": 0, "batch_size": "large", "lr": 0.0, "validation_fraction": 1.0, "patience": -1, "random_state": "x",
    "device": "cuda:99", "predict_dtype": "half",
}  # fmt: skip


@dataclass(eq=False)
class Listed:
    """One estimator.

    `make(**options)` gives a quick one, `data()` X and what `fit` takes beside it, `answer` names the method that answers.
    `wrong` holds a value that cannot be for some parameters, `search` two that can be for one. `checks` counts those of
    scikit-learn that run on `make()`, all but those in `left_out`, each with its reason; a reason instead of a count where none can.
    """

    make: Callable[..., Any]
    data: Callable[[], tuple[Any, dict[str, Any]]]
    checks: int | str
    left_out: dict[str, str] = field(default_factory=lambda: NOT_RUN)
    answer: str = "predict"
    wrong: dict[str, Any] = field(default_factory=lambda: TRAINED)
    search: dict[str, list[Any]] = field(default_factory=dict)
    missing: bool = False
    frame: bool = True

    def fit(self, **options):
        X, others = self.data()
        return self.make(**options).fit(X, **others)

    @cached_property
    def fitted(self):
        """To be read, not changed."""
        return self.fit()

    def answers(self, model):
        return getattr(model, self.answer)(self.data()[0])

    @property
    def is_trained(self):
        params = self.make().get_params()
        return "epochs" in params and params.get("method") != "kernel"


def classes(steps=11):
    X = np.random.default_rng(0).normal(size=(30, steps))
    return X, {"y": np.where(X[:, 0] > 0, "up", "down")}


def cubes():
    X, labels = classes(22)
    return X.reshape(30, 2, 11), labels


def numbers():
    X, y = table(30)
    return X, {"y": y}


def places():
    """Sets of five points; each is to go to a point between itself and the centre."""
    X = np.random.default_rng(0).normal(size=(30, 5, 3))
    return X, {"y": (X + X.mean(1, keepdims=True)) / 2}


def happenings():
    """Sequences of seven events; a short gap is followed by type 1."""
    gaps = np.random.default_rng(0).uniform(2.0, 5.0, size=(30, 7))
    return np.stack((gaps < 3, gaps.cumsum(1)), axis=2).astype(float), {}


def pairs():
    """Counts of pairs of eleven words."""
    return np.random.default_rng(0).poisson(2.0, size=(11, 11)).astype(float), {}


def ranked():
    X, y, groups = lists(20)
    return X, {"y": y, "groups": groups}


SETS = {
    "layers": 1,
    "channels": 3,
    "width": 16,
    "units": 4,
    "epochs": 8,
    "lr": 0.03,
    "batch_size": 32,
    "random_state": 0,
}
OPTIONS = {"embed_dim": 8, "num_heads": 2, "rank": 3, "epochs": 6, "lr": 0.03, "dropout": 0.0, "batch_size": 32}
KEPT = {"variants": 2, "precision": "float64"}
KEPT_WRONG = {
    "variants": 0,
    "context_size": 1,
    "precision": "half",
    "random_state": "x",
    "device": "cuda:99",
}
DRAWN = {"features": 84, "random_state": 0}
REDRAWN = NOT_RUN | {
    "check_sample_weight_equivalence_on_dense_data": "biases are quantiles of drawn series, and of repeated ones others are drawn"
}
WRONG_DRAWS = {"segments": 0, "features": 83, "random_state": "x", "device": "cuda:99"}
ROWS = {
    "embed_dim": 4,
    "row_tokens": 2,
    "layers": 1,
    "members": 2,
    "epochs": 2,
    "lr": 0.03,
    "predict_dtype": "float64",
    "random_state": 0,
}
ESTIMATORS = {
    "series of one channel": Listed(
        partial(SeriesClassifier, **{"attention": ["primal"], **OPTIONS, "random_state": 0}),
        classes, 60, UNWEIGHTED, "predict_proba", TRAINED | {"layers": 0, "head": "max"}, {"rank": [2, 3]}, missing=True,
    ),
    "series of many channels": Listed(
        partial(
            CubeClassifier,
            **{"attention": ["softmax"], **OPTIONS, "epochs": 8, "lr": 0.1, "predict_dtype": "float64", "random_state": 0},
        ),
        cubes, 59, UNWEIGHTED | {"check_estimators_empty_data_messages": "it wants a message that names a shape of two axes"},
        "predict_proba", TRAINED | {"embed_dim": 9}, {"embed_dim": [4, 8]}, missing=True, frame=False,
    ),
    "series by convolutions": Listed(
        partial(SeriesClassifier, **DRAWN | {"method": "kernel"}), classes, 60, REDRAWN, "predict_proba",
        WRONG_DRAWS | {"method": "forest", "kernel": "cubic"}, {"features": [84, 168]}, missing=True,
    ),
    "numbers of series": Listed(
        partial(SeriesRegressor, **DRAWN), numbers, 57, REDRAWN, wrong=WRONG_DRAWS | {"kernel": "cubic"},
        search={"features": [84, 168]}, missing=True,
    ),
    "features of series": Listed(
        partial(SeriesFeatures, **DRAWN), lambda: (table(30)[0], {}), 45, answer="transform",
        wrong=WRONG_DRAWS | {"convolutions": "all"}, search={"segments": [1, 2]}, missing=True,
    ),
    "numbers of sets": Listed(
        partial(EquivariantRegressor, **SETS), numbers, 58, UNWEIGHTED, wrong=TRAINED | {"dim": 0, "group": "U", "width": 0},
        search={"units": [2, 4]},
    ),
    "classes of sets": Listed(
        partial(EquivariantClassifier, **SETS), classes, 61, UNWEIGHTED, "predict_proba",
        TRAINED | {"translation": "equivariant", "vectors": -1, "permutation": 2}, {"width": [8, 16]},
    ),
    "vectors of points": Listed(
        partial(EquivariantRegressor, **SETS | {"output": "vector", "group": "SO", "translation": "equivariant"}), places,
        "they are of tables, and two lines above", wrong=TRAINED | {"channels": 0, "case": 3}, search={"channels": [2, 3]}, frame=False,
    ),
    "next events": Listed(
        partial(NextEvent, **{"embed_dim": 8, "num_heads": 2, "layers": 1, "components": 2, "epochs": 6, "batch_size": 32, "random_state": 0}),
        happenings, "they are of tables, and these are sequences", answer="predict_proba",
        wrong=TRAINED | {"num_heads": 3, "history": 1, "time": "clock", "interaction": "none", "clock": 7, "sequence": 3, "negatives": 0},
        search={"embed_dim": [4, 8]}, frame=False,
    ),
    "classes of rows": Listed(
        partial(DatapointClassifier, **ROWS), classes, 59, UNWEIGHTED, "predict_proba",
        TRAINED | {"preset": "slow", "members": 0, "p_target": 0.0, "mode": "both", "num_heads": 3, "row_encoder": "rows"},
        {"row_tokens": [1, 2]}, missing=True,
    ),
    "numbers of rows": Listed(
        partial(DatapointRegressor, **ROWS | {"p_feature": 0.0}), numbers, 56, UNWEIGHTED,
        wrong=TRAINED | {"p_feature": 1.0, "tradeoff": 2.0, "context_size": 0}, search={"members": [1, 2]}, missing=True,
    ),
    "classes without training": Listed(
        partial(InContextClassifier, **KEPT), classes, 53, answer="predict_proba", wrong=KEPT_WRONG, search={"variants": [1, 2]}, missing=True,
    ),
    "numbers without training": Listed(
        partial(InContextRegressor, **KEPT), numbers, 50, wrong=KEPT_WRONG, search={"variants": [1, 2]}, missing=True,
    ),
    "classes by transport": Listed(
        partial(TransportClassifier, **{"hidden": 16, "members": 2, "epochs": 12, "lr": 0.02, "batch_size": 64, "predict_dtype": "float64", "random_state": 0}), classes, 66,
        UNWEIGHTED, "predict_proba", TRAINED | {"geometry": "line", "pairing": "nearest", "p": 0.5, "members": 0, "covariance": 0.0},
        {"hidden": [8, 16]}, missing=True,
    ),
    "result lists": Listed(
        partial(ListReranker, **{"candidates": 9, "embed_dim": 8, "num_heads": 2, "epochs": 3, "batch_size": 32, "predict_dtype": "float64", "random_state": 0}),
        classes, "scikit-learn has no rankers: its checks want a label for each row", wrong=TRAINED | {"candidates": 0, "keep": (1.0, 0.5), "affinity": "dot", "temperature": 0.0},
        search={"depth": [1, 2]}, frame=False,
    ),
    "kernel SVD": Listed(
        partial(KernelSVD, **{"n_components": 3}), lambda: (table(30)[0], {}), 46, answer="transform",
        wrong={"n_components": 0, "solver": "fast", "n_landmarks": None, "kernel": "rbf"}, search={"n_components": [1, 2]},
    ),
    "kernel SVD with landmarks": Listed(
        partial(
            KernelSVD,
            **{"n_components": 2, "kernel": Gaussian(2.0), "solver": "nystrom", "n_landmarks": 7, "random_state": 0},
        ),
        lambda: (table(30)[0], {}), "the line above runs them", answer="transform", wrong={"random_state": "x"},
    ),
    "word vectors": Listed(
        partial(PairVectors, **{"dim": 3}), pairs, 47, NOT_RUN | {"check_fit2d_1sample": "one row makes no square, and that is what the error says"}, "transform",
        wrong={"dim": 0, "method": "lsa", "association": "mi", "smoothing": 2.0, "power": 1.5, "sides": "left", "window": 0, "weighting": "far", "min_count": 0,
               "tokenizer": 3, "sweeps": -1, "x_max": 0.0, "unknown": "drop", "random_state": "x", "device": "cuda:99"},
    ),
    "word vectors of GloVe": Listed(
        partial(WordVectors, **{"dim": 3, "method": "glove-adagrad", "sides": "concat"}), pairs, "the line above runs them", answer="transform",
        wrong={"exponent": 0.0, "ridge": 0.0, "shift": 0.5, "max_vocabulary": 0, "n_jobs": 0},
    ),
    "regressor": Listed(partial(Numbers, **{"epochs": 8, "lr": 0.03}), numbers, 57, UNWEIGHTED, search={"width": [2, 3]}),
    "ranker": Listed(partial(Order, **{"epochs": 8}), ranked, "scikit-learn has no rankers: its checks fit without groups"),
    "transformer": Listed(
        partial(Coordinates, **{"epochs": 8}), lambda: (table(30)[0], {}), 52, UNWEIGHTED, "transform", search={"lr": [0.01, 0.02]}
    ),
}  # fmt: skip
CHECKED = {name: one for name, one in ESTIMATORS.items() if isinstance(one.checks, int)}
FRAMED = {name: one for name, one in ESTIMATORS.items() if one.frame}
SEARCHED = {name: one for name, one in ESTIMATORS.items() if one.search}
TRAINABLE = {name: one for name, one in ESTIMATORS.items() if one.is_trained}
CLASSIFIERS = {name: one for name, one in ESTIMATORS.items() if is_classifier(one.make())}
every = pytest.mark.parametrize("one", ESTIMATORS.values(), ids=ESTIMATORS)


def name_of(check):
    return getattr(check, "func", check).__name__


def checks_of(one):
    for estimator, check in estimator_checks_generator(one.make(), mark=None):
        if name_of(check) not in one.left_out:
            yield estimator, check


def parameters():
    for name, one in CHECKED.items():
        for estimator, check in checks_of(one):
            options = "-".join(map(str, getattr(check, "keywords", {})))
            yield pytest.param(estimator, check, id=f"{name}-{name_of(check)}-{options}".rstrip("-"))


@pytest.mark.parametrize(("estimator", "check"), list(parameters()))
def test_scikit_learn_check(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert check(estimator) is None
        except SkipTest as reason:
            pytest.fail(f"a check that counts did not run: {reason}")


@pytest.mark.parametrize("one", CHECKED.values(), ids=CHECKED)
def test_the_checks_are_counted(one):
    """A release of scikit-learn with other checks is to be noticed."""
    names = [name_of(check) for _, check in estimator_checks_generator(one.make(), mark=None)]
    assert len(list(checks_of(one))) == one.checks
    assert set(one.left_out) <= set(names)


@every
def test_parameters_go_in_and_out(one):
    model = one.make()
    params = model.get_params()
    assert type(model)(**params).get_params() == params
    assert clone(model).set_params(**params).get_params() == params
    name = next(iter(one.wrong))
    assert clone(model).set_params(**{name: "anything"}).get_params()[name] == "anything", "a constructor only stores"
    with pytest.raises(ValueError, match="Invalid parameter"):
        model.set_params(no_such_parameter=1)


class Untouched:
    def __getattr__(self, name):
        raise AssertionError(f"data was asked for {name}")

    __array__ = __len__ = __iter__ = __getitem__ = __getattr__


@every
def test_parameters_are_refused_before_data_is_touched(one, tmp_path):
    keeps = {"checkpoint_dir": tmp_path / "kept"} if one.is_trained else {}
    for name, value in one.wrong.items():
        model = one.make(**keeps | {name: value})
        with pytest.raises(InvalidArgument, match=name if name != "device" else "device|cuda:99"):
            model.fit(Untouched(), Untouched())
        assert not [fact for fact in vars(model) if fact.endswith("_")]
    assert list(tmp_path.iterdir()) == []


@every
def test_copies_answer_alike(one):
    model = one.fitted
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(one.answers(again), one.answers(model))
    assert clone(model).get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        one.answers(clone(model))


def interpreter(code, *arguments):
    """A new one that finds what this one finds: its command line and environment."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-c", code, *map(str, arguments)], "env": environment, "text": True}


OPENED = """
import sys
from pathlib import Path
import numpy as np
from heedful.bridges.estimator import Estimator
import small
assert "pytorch_lightning" not in sys.modules, "whoever serves a model needs no training"
for folder in Path(sys.argv[1]).iterdir():
    model = Estimator.from_pretrained(folder / "model")
    method = getattr(model, (folder / "answer").read_text())
    np.save(folder / "there.npy", method(np.load(folder / "X.npy")))
"""


def test_a_fresh_process_answers_alike(tmp_path):
    for name, one in ESTIMATORS.items():
        folder = tmp_path / name
        one.fitted.save_pretrained(folder / "model")
        assert sorted(file.name for file in (folder / "model").iterdir()) == ["config.json", "model.safetensors"]
        json.loads((folder / "model" / "config.json").read_text(), parse_constant=lambda value: pytest.fail(value))
        np.save(folder / "X.npy", one.data()[0])
        (folder / "answer").write_text(one.answer)
    done = subprocess.run(**interpreter(OPENED, tmp_path), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, one in ESTIMATORS.items():
        np.testing.assert_array_equal(np.load(tmp_path / name / "there.npy"), one.answers(one.fitted), name)


# One interpreter with a process for each estimator; a line tells of each batch, which is an epoch, before it is learned from.
KILLED = """
import os, pickle, sys, time
import torch, torch._dynamo
torch.set_num_threads(1)
import heedful.bridges.training, small
def slow(keeper, trainer, module):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(0.2)
heedful.bridges.training._Keeper.on_train_epoch_start = slow
for file in sys.argv[1:]:
    if not (child := os.fork()):
        with open(file, "rb") as opened:
            model, X, others = pickle.load(opened)
        model.fit(X, **others)
        os._exit(0)
    os.waitpid(child, 0)
    os.write(1, b"next\\n")
"""
LONG = {"epochs": 8, "batch_size": 64, "patience": None}


def test_a_kill_costs_one_epoch_at_most(tmp_path):
    calls = []
    for name, one in TRAINABLE.items():
        X, others = one.data()
        calls.append(tmp_path / f"{name}.pickle")
        calls[-1].write_bytes(pickle.dumps((one.make(**LONG, checkpoint_dir=tmp_path / name), X, others)))
    begun = []
    with subprocess.Popen(**interpreter(KILLED, *calls), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        for _ in TRAINABLE:
            count = 0
            for line in child.stdout:
                if line == "next\n":
                    break
                count += 1
                if count == 3:
                    os.kill(int(line), signal.SIGKILL)
            begun.append(count)
        errors = child.stderr.read()
        assert child.wait() == 0, errors
    for (name, one), count in zip(TRAINABLE.items(), begun, strict=True):
        assert 3 <= count < LONG["epochs"], (name, errors)
        assert len(list((tmp_path / name).iterdir())) == 1, name
        model = one.fit(**LONG, checkpoint_dir=tmp_path / name)
        assert count - 1 <= model.training_.resumed <= count, name
        wanted = one.fit(**LONG)
        assert model.training_.epochs == wanted.training_.epochs, name
        np.testing.assert_array_equal(one.answers(model), one.answers(wanted), name)
        assert list((tmp_path / name).iterdir()) == [], name


@every
def test_equal_seeds_give_equal_models(one):
    if "random_state" in one.make().get_params():
        first, second = (one.fit(random_state=np.random.RandomState(5)) for _ in range(2))
        np.testing.assert_array_equal(one.answers(first), one.answers(second))
        if one.is_trained:
            np.testing.assert_array_equal(one.answers(first), one.answers(one.fit(random_state=first.seed_)))
            assert not np.array_equal(one.answers(first), one.answers(one.fit(random_state=first.seed_ + 1)))
    np.testing.assert_array_equal(one.answers(one.fit()), one.answers(one.fitted))


@every
def test_the_caller_finds_everything_as_it_was(one, tmp_path, monkeypatch, capfd):
    """Where no progress is asked for nothing is printed; no file is left, no signal, seed or datum changed."""
    monkeypatch.chdir(tmp_path)
    X, others = one.data()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), signal.getsignal(signal.SIGINT), X.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = one.make(**{"device": "auto", "progress": False} if one.is_trained else {}).fit(X, **others)
        answers = getattr(model, one.answer)(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert signal.getsignal(signal.SIGINT) is before[2]
    assert np.array_equal(X, before[3])
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    if one.is_trained:
        assert {part.device.type for part in model.network_.parameters()} == {"cpu"}
        assert not model.network_.training
    if not torch.cuda.is_available():
        np.testing.assert_array_equal(answers, one.answers(one.fitted))


@every
def test_missing_values_are_read_or_refused(one):
    X, others = one.data()
    X = X.copy()
    X[3, ..., 1] = np.nan
    if one.missing:
        assert np.isfinite(getattr(one.make().fit(X, **others), one.answer)(X)).all()
        return
    with pytest.raises(ValueError, match="NaN"):
        one.make().fit(X, **others)
    with pytest.raises(ValueError, match="NaN"):
        getattr(one.fitted, one.answer)(X)


@pytest.mark.parametrize("one", FRAMED.values(), ids=FRAMED)
def test_columns_of_frames_keep_their_names(one, tmp_path):
    X, others = one.data()
    frame = pd.DataFrame(X, columns=[f"column {at}" for at in range(X.shape[1])])
    model = one.make().fit(frame, **others)
    assert model.feature_names_in_.tolist() == frame.columns.tolist()
    np.testing.assert_array_equal(getattr(model, one.answer)(frame), one.answers(one.fitted))
    model.save_pretrained(tmp_path)
    again = Estimator.from_pretrained(tmp_path)
    assert again.feature_names_in_.tolist() == frame.columns.tolist()
    for other in (frame[frame.columns[::-1]], frame.rename(columns={"column 0": "another"})):
        with pytest.raises(ValueError, match="feature names should match"):
            getattr(again, one.answer)(other)
    if isinstance(one.checks, int):
        check_dataframe_column_names_consistency(type(model).__name__, one.make())


@pytest.mark.parametrize("one", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_one_class_is_refused_and_unseen_labels_are_scored(one):
    X, others = one.data()
    with pytest.raises(ValueError, match="one class"):
        one.make().fit(X, np.full(len(X), "up"))
    unseen = np.where(np.arange(len(X)) % 3 > 0, others["y"], "unseen")
    right = one.fitted.predict(X) == unseen
    assert one.fitted.score(X, unseen) == pytest.approx(right.mean())


@pytest.mark.parametrize("one", SEARCHED.values(), ids=SEARCHED)
def test_it_is_searched_over_in_a_pipeline(one):
    X, others = one.data()
    quick = {"epochs": 1} if one.is_trained else {}
    model = one.make(**quick)
    step = type(model).__name__.lower()
    grid = {f"{step}__{name}": np.array(values) for name, values in one.search.items()}
    scoring = (
        None if hasattr(model, "score") else lambda fitted, X, y=None: float(np.square(fitted.transform(X)).mean())
    )
    pipeline = make_pipeline(FunctionTransformer(np.cumsum, kw_args={"axis": -1}), model)
    search = GridSearchCV(pipeline, grid, cv=2, scoring=scoring, error_score="raise").fit(X, **others)
    assert search.best_params_.keys() == grid.keys()
    assert np.isfinite(search.score(X, **others))
