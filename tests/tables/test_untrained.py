"""Estimators that need no training: what an answer may depend on, how a table may look, which rows vouch, files that were tampered with, and that answers are good."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from heedful import CorruptModel, InvalidArgument
from heedful._savable import write_folder
from heedful.tables import InContextClassifier, InContextRegressor, _answering, estimator_for
from heedful.tables.in_context import InContextNetwork
from heedful.tables.untrained import _quantiles

EXACT = {"precision": "float32", "device": "cpu"}


def rings(rows=151, seed=0):
    """Two classes that no line divides, beside a column that says nothing."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    return x, np.where((x[:, :2] ** 2).sum(1) > 1.4, "far", "near")


def fitted(**options):
    x, y = rings()
    return InContextClassifier(**EXACT | {"variants": 3} | options).fit(x[:101], y[:101]), x, y


def test_it_answers_what_no_line_does():
    model, x, y = fitted(variants=8)
    line = LogisticRegression().fit(x[:101], y[:101]).score(x[101:], y[101:])
    assert model.score(x[101:], y[101:]) > max(0.85, line + 0.15)
    X, labels = load_iris(return_X_y=True)
    assert InContextClassifier().fit(X[::2], labels[::2]).score(X[1::2], labels[1::2]) > 0.93


def test_an_answer_depends_on_its_row_alone():
    model, x, _ = fitted()
    whole = model.predict_proba(x[101:])
    assert np.abs(whole.sum(1) - 1).max() < 1e-12
    for row in (0, 17, 49):
        assert np.abs(model.predict_proba(x[101 + row : 102 + row]) - whole[row]).max() < 1e-5
    strange = x[101:].copy()
    strange[1], strange[2] = np.nan, 50.0
    others = np.delete(np.arange(50), [1, 2])
    assert np.abs(model.predict_proba(strange)[others] - whole[others]).max() < 1e-5


def test_the_seed_decides_and_the_default_is_one():
    x, y = rings()
    one, same, other, any_ = (
        InContextClassifier(**EXACT, variants=2, **seed).fit(x[:101], y[:101]).predict_proba(x[101:])
        for seed in ({}, {"random_state": 0}, {"random_state": 1}, {"random_state": None})
    )
    assert np.array_equal(one, same)
    assert np.abs(one - other).max() > 1e-6
    assert any_.shape == one.shape


def test_orders_units_and_names_do_not_matter():
    """Rows in another order are the same table; classes under other names and columns in other units nearly so (identities of columns are drawn)."""
    model, x, y = fitted(variants=2)
    wanted = model.predict_proba(x[101:])
    order = np.random.default_rng(0).permutation(101)
    moved = InContextClassifier(**EXACT, variants=2).fit(x[:101][order], y[:101][order])
    assert np.abs(moved.predict_proba(x[101:]) - wanted).max() < 1e-5
    units = x * [1e3, 1e-3, 7] + [5, 0, 1e4]
    scaled = InContextClassifier(**EXACT, variants=2).fit(units[:101], y[:101])
    assert np.abs(scaled.predict_proba(units[101:]) - wanted).max() < 1e-4


def test_another_context_is_as_if_it_had_been_fitted():
    model, x, y = fitted()
    other = InContextClassifier(**EXACT, variants=3).fit(x[30:101], y[30:101])
    # Columns are standardised by the rows of fit; the network standardises again, by its context.
    found = model.predict_proba(x[101:], context=(x[30:101], y[30:101]))
    assert np.abs(found - other.predict_proba(x[101:])).max() < 1e-4
    assert np.array_equal(model.predict_proba(x[101:], context="train"), model.predict_proba(x[101:]))
    for wrong in (("x",), "batch", (x[:3], y[:2]), (x[:0], y[:0]), 3):
        with pytest.raises((InvalidArgument, ValueError)):
            model.predict(x[101:], context=wrong)
    with pytest.raises(InvalidArgument, match="no class of this model"):
        model.predict(x[101:], context=(x[:2], ["far", "new"]))


def frame(rows=90, seed=0):
    random = np.random.default_rng(seed)
    kind = random.choice(["oak", "elm", "ash"], rows)
    height = random.normal(size=rows) + 2.5 * (kind == "elm")
    table = pandas.DataFrame({
        "kind": kind, "height": height, "planted": pandas.Timestamp("2001-05-01") + pandas.to_timedelta(random.integers(0, 9000, rows), "D"),
        "sick": random.random(rows) < 0.3, "target": np.where(height > 1.2, "tall", "low"),
    })  # fmt: skip
    table.loc[::7, "height"] = np.nan
    table.loc[1::9, "kind"] = None
    return table


def test_frames_with_categories_dates_and_missing_cells():
    table = frame()
    model = InContextClassifier(**EXACT, variants=4, target="target").fit(table[:60])
    assert model.score(table[60:]) > 0.8
    assert list(model.feature_names_in_) == ["kind", "height", "planted", "sick"]
    asked = table[60:].drop(columns="target")
    known = model.predict_proba(asked)
    with pytest.warns(UserWarning, match="pine"):
        new = model.predict_proba(asked.assign(kind="pine"))
    assert np.abs(new - model.predict_proba(asked.assign(kind=None))).max() < 1e-6
    assert known.shape == (30, 2)
    assert set(model.evaluate(table[60:])) == {"accuracy", "log_loss"}
    explained = model.explain_row(asked[:1], top=2)
    assert explained.row["kind"][0] == table.kind[60]
    assert explained.share_of == "votes"


def test_which_rows_vouch():
    model, x, y = fitted(variants=2)
    shares = model.row_attention(x[101:104])
    assert shares.shape == (3, 101)
    assert np.abs(shares.sum(1) - 1).max() < 1e-6
    told = model.explain_row(x[101:102], top=3)
    assert told.rows == tuple(np.argsort(-shares[0])[:3].tolist())
    assert told.targets == tuple(y[list(told.rows)])
    first = model.predict_proba(x[101:102])[0]
    assert told.answer == model.classes_[first.argmax()]
    left = np.delete(np.arange(101), told.rows[0])
    without = model.predict_proba(x[101:102], context=(x[left], y[left]))[0]
    assert told.effects[0] == pytest.approx(first.max() - without[first.argmax()], abs=1e-5)
    with pytest.raises(InvalidArgument, match="one row"):
        model.explain_row(x[:2])


def test_tables_beyond_what_was_trained_on_are_told():
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 61))
    y = (x[:, 0] > 0).astype(int)
    y[:2] = 2  # a class that a draw of rows would miss
    model = InContextClassifier(**EXACT, variants=3, context_size=64)
    with pytest.warns(UserWarning, match="are more than") as told:
        model.fit(x[:300], y[:300])
    assert ["300 rows" in str(one.message) for one in told] == [True, False]
    assert "61 columns" in str(told[1].message)
    shares = model.row_attention(x[300:303])
    assert np.abs(shares.sum(1) - 1).max() < 1e-6
    assert ((shares > 0).sum(1) > 64).all()  # variants have rows of their own
    rows = model._rows(300, y[:300])
    assert rows.shape == (3, 64)
    assert all(set(y[part]) == {0, 1, 2} for part in rows.numpy())
    assert model.predict_proba(x[300:]).shape == (100, 3)


def test_what_is_kept_between_calls_changes_nothing(monkeypatch):
    model, x, _ = fitted()
    before = dict(vars(model))
    first = model.predict_proba(x[101:])
    assert vars(model) == before
    assert model in _answering._CONTEXTS
    assert np.array_equal(model.predict_proba(x[101:]), first)
    monkeypatch.setattr(_answering, "KEPT", 0)
    again, *_ = fitted()
    assert np.array_equal(again.predict_proba(x[101:]), first)
    assert again not in _answering._CONTEXTS
    # Other settings are another context.
    model.set_params(variants=1)
    assert not np.array_equal(model.predict_proba(x[101:]), first)
    y = rings()[1]
    model.set_params(variants=3).fit(x[:50], y[:50])
    assert not np.array_equal(model.predict_proba(x[101:]), first)


def test_a_saved_model_answers_in_a_new_process(tmp_path):
    model, x, _ = fitted()
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "x.npy", x[101:])
    code = (
        "import sys, numpy as np; from heedful.bridges.estimator import Estimator; folder = sys.argv[1]\n"
        "np.save(folder + '/p.npy', Estimator.from_pretrained(folder + '/model').predict_proba(np.load(folder + '/x.npy')))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    assert np.abs(np.load(tmp_path / "p.npy") - model.predict_proba(x[101:])).max() < 1e-6


def test_a_folder_keeps_its_network_when_that_of_the_package_is_another(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 13))
    y = x[:, 0] > 0
    model = InContextClassifier(**EXACT, variants=2).fit(x, y)
    torch.manual_seed(0)
    model.network_ = InContextNetwork(10, embed_dim=16, num_heads=2, layers=1).requires_grad_(False)
    model.save_pretrained(tmp_path)
    again = InContextClassifier.from_pretrained(tmp_path)
    assert again.network_.arguments() == model.network_.arguments()
    assert np.array_equal(again.predict_proba(x), model.predict_proba(x))
    again.fit(x, y).save_pretrained(tmp_path / "refitted")
    assert InContextClassifier.from_pretrained(tmp_path / "refitted").network_.paired == 10


@pytest.mark.parametrize("kind", [InContextClassifier, InContextRegressor])
def test_folders_that_do_not_name_their_network_are_of_columns_by_themselves(kind, tmp_path):
    """As the first networks were saved."""
    x = np.random.default_rng(0).normal(size=(40, 13))
    model = kind(**EXACT, variants=1).fit(x, (x[:, 0] > 0).astype(float))
    torch.manual_seed(0)
    model.network_ = InContextNetwork(**model.network_.arguments() | {"paired": None}).requires_grad_(False)
    description = model._described()
    del description["fitted"]["network_arguments_"]
    write_folder(tmp_path, {"estimator": description}, model._tensors_saved())
    again = kind.from_pretrained(tmp_path)
    assert again.network_.paired is None
    assert np.array_equal(again.predict(x), model.predict(x))


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_weights_of_the_package(kind):
    folder = Path(_answering.__file__).parent / "weights" / kind
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6
    assert (folder / "training.json").is_file()
    network = _answering.pretrained(kind)
    assert network.numbers == (kind == "numbers")
    assert not any(part.requires_grad for part in network.parameters())


def test_weights_that_were_exchanged_are_refused(tmp_path, monkeypatch):
    source = Path(_answering.__file__).parent / "weights" / "classes"
    poisoned = tmp_path / "weights" / "classes"
    poisoned.mkdir(parents=True)
    for file in source.iterdir():
        (poisoned / file.name).write_bytes(file.read_bytes())
    content = bytearray((poisoned / "model.safetensors").read_bytes())
    content[-1000] ^= 1
    (poisoned / "model.safetensors").write_bytes(bytes(content))
    monkeypatch.setattr(_answering.resources, "files", lambda package: tmp_path)
    _answering.pretrained.cache_clear()
    try:
        with pytest.raises(CorruptModel, match="checksum"):
            InContextClassifier().fit(*rings(20))
    finally:
        _answering.pretrained.cache_clear()


def test_bad_arguments_are_named():
    x, y = rings(30)
    for options, word in (
        ({"variants": 0}, "variants"), ({"context_size": 1}, "context_size"), ({"precision": "half"}, "precision"), ({"device": "cuda:99"}, "cuda"),
        ({"random_state": -1}, "random_state"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=word):
            InContextClassifier(**options).fit(x, y)
    with pytest.raises(InvalidArgument, match="11 classes"):
        InContextClassifier().fit(np.arange(33.0)[:, None], np.arange(33) % 11)
    with pytest.raises(InvalidArgument, match="one class"):
        InContextClassifier().fit(x, np.zeros(30))
    with pytest.raises(InvalidArgument, match="no value at all"):
        InContextClassifier().fit(np.c_[x, np.full(30, np.nan)], y)
    with pytest.raises(InvalidArgument, match="levels"):
        InContextRegressor().fit(x, x[:, 0]).predict_quantiles(x, (0.0, 2.0))


def test_numbers():
    random = np.random.default_rng(0)
    x = random.normal(size=(160, 3))
    y = 1e4 + 300 * (x[:, 0] - 2 * x[:, 1] + 0.1 * random.normal(size=160))
    model = InContextRegressor(**EXACT, variants=4).fit(x[:110], y[:110])
    assert model.score(x[110:], y[110:]) > 0.9
    whole = model.predict(x[110:])
    assert np.abs(model.predict(x[115:116]) - whole[5]).max() < 1e-2
    low, middle, high = model.predict_quantiles(x[110:]).T
    assert ((low <= middle) & (middle <= high)).all()
    assert 0.6 < ((low <= y[110:]) & (y[110:] <= high)).mean() <= 1
    told = model.explain_row(x[110:111], top=2)
    assert told.prediction == pytest.approx(whole[0], abs=1e-2)
    assert set(model.held_out()) == {"rmse", "r2"}
    other = model.predict(x[110:], context=(x[:110], -y[:110]))
    assert np.corrcoef(other, whole)[0, 1] < -0.9
    constant = InContextRegressor(**EXACT, variants=2).fit(x[:30], np.full(30, 7.0))
    assert np.abs(constant.predict(x[30:40]) - 7).max() < 1e-6


@pytest.mark.parametrize("variants", [1, 3])
def test_quantiles_lie_around_what_is_known_for_sure(variants):
    """A law whose answer is nearly one number has its median there, not half a step below."""
    x = np.random.default_rng(0).normal(size=(200, 2))
    model = InContextRegressor(**EXACT, variants=variants).fit(x[:120], x[:120, 0])
    step = 10 / 99 * x[:120, 0].std()
    low, middle, high = (model.predict_quantiles(x[120:]) - model.predict(x[120:])[:, None]).T
    assert abs(np.median(middle)) < 0.1 * step
    assert abs(np.median(low + high)) < 0.2 * step
    constant = InContextRegressor(**EXACT, variants=variants).fit(x[:30], np.full(30, 7.0))
    assert np.abs(constant.predict_quantiles(x[30:40]) - 7).max() < 1e-6


def test_quantiles_of_several_laws():
    """Beside sums of draws: each law spreads its chances evenly around its own steps."""
    random = np.random.default_rng(0)
    steps = [np.linspace(-3, 3, 7), np.linspace(0, 12, 7)]
    chances = random.dirichlet(np.ones(7), size=(2, 3))
    levels = np.array([0.1, 0.5, 0.8])
    found = _quantiles(steps, chances, levels)
    for row in range(3):
        draws = np.concatenate([
            random.choice(law, 200_000, p=chances[which, row]) + (law[1] - law[0]) * (random.random(200_000) - 0.5)
            for which, law in enumerate(steps)
        ])  # fmt: skip
        assert np.abs(found[row] - np.quantile(draws, levels)).max() < 0.05


def test_one_huge_number_leaves_the_others_apart():
    """Their ranks are known to the network; in deviations of the column they would be one number."""
    x, y = rings()
    for huge in (1e9, 1e30):
        spoiled = x.copy()
        spoiled[0, 0] = huge
        model = InContextClassifier(**EXACT, variants=3).fit(spoiled[:101], y[:101])
        assert model.score(x[101:], y[101:]) > 0.85


def test_a_column_of_targets_is_their_list():
    x, y = rings(60)
    model = InContextClassifier(**EXACT, variants=1).fit(x, y)
    assert model.evaluate(x, y[:, None]) == model.evaluate(x, y)
    assert np.array_equal(model.predict(x, context=(x, y[:, None])), model.predict(x))
    numbers = InContextRegressor(**EXACT, variants=1).fit(x, x[:, 0])
    assert numbers.evaluate(x, x[:, :1]) == numbers.evaluate(x, x[:, 0])
    for wrong in (x[:, :2], x[0, 0]):
        with pytest.raises(InvalidArgument, match="one axis"):
            numbers.predict(x, context=(x, wrong))


def test_a_table_of_its_target_alone_is_refused():
    with pytest.raises(InvalidArgument, match="no column to predict from"):
        InContextClassifier(target="y").fit(pandas.DataFrame({"y": ["a", "b"]}))


def test_bfloat16_says_nearly_the_same():
    model, x, _ = fitted()
    exact = model.predict_proba(x[101:])
    assert np.abs(model.set_params(precision="bfloat16").predict_proba(x[101:]) - exact).max() < 0.1


def test_which_estimator_a_table_gets():
    x = np.zeros((40, 3))
    assert estimator_for(["a", "b"] * 20, x) == "InContextClassifier"
    assert estimator_for(np.arange(40) / 3, x) == "InContextRegressor"
    assert estimator_for(["a", "b"] * 20, x, {"preset"}) == "DatapointClassifier"
    assert estimator_for(["a", "b"] * 20, x, {"target", "device"}) == "InContextClassifier"
    assert estimator_for(["a", "b"] * 600, np.zeros((1200, 3))) == "DatapointClassifier"
    assert estimator_for([str(one % 11) for one in range(40)], x) == "DatapointClassifier"
    assert estimator_for(["a", "b"] * 20, np.zeros((40, 51))) == "DatapointClassifier"


def test_the_network_of_an_estimator_is_a_module_like_others(tmp_path):
    network = _answering.pretrained("classes")
    network.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    other = InContextNetwork.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)  # nobody's random numbers are spent on weights that are replaced
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))
