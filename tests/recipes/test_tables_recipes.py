"""Parts of the recipes of tables: splits, measures, rivals, poker hands, pairs of rows, and what their tables say."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from experiments import pairs, poker, rivals, tables_cc18, tables_corruption, tables_uci, tabular
from experiments.recipe import Setting, recipe, text

from heedful._errors import InvalidArgument, Unsupported

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A data folder of two small files, as the one beside the checkout."""
    folder = tmp_path / "beside"
    folder.mkdir()
    random = np.random.default_rng(0)
    lines = [",".join(f"{value:.3f}" for value in row) for row in random.normal(size=(23, 3))]
    (folder / "yacht.csv").write_text("a,b,y\n" + "\n".join(lines) + "\n")
    x = np.array([[0, 1.5], [1, np.nan], [2, 0.5]], np.float32)
    np.savez(folder / tabular.CC18, a__X=x, a__y=np.array([0, 1, 1], np.int16), a__cat=np.array([0], np.int16))
    (folder / tabular.CC18.replace(".npz", ".json")).write_text(json.dumps([{"name": "A", "key": "a"}]))
    monkeypatch.setattr(tabular, "BESIDE", folder)
    return folder


def test_files_are_copied_and_read(beside, tmp_path, monkeypatch):
    work = tmp_path / "work"
    read = tabular.read(work, "yacht")
    assert (read.X.shape, read.y.shape, read.classes) == ((23, 2), (23,), 0)
    assert tabular.cc18_names(work) == ["A"]
    table = tabular.cc18(work, "A")
    assert (table.categorical, table.classes, table.y.tolist()) == ((0,), 2, [0, 1, 1])
    assert np.isnan(table.X[1, 1])
    monkeypatch.setattr(tabular, "BESIDE", tmp_path / "nowhere")
    np.testing.assert_array_equal(tabular.read(work, "yacht").X, read.X)
    with pytest.raises(Unsupported, match=r"there is no boston\.csv in .*; copy it"):
        tabular.read(work, "boston")
    with pytest.raises(InvalidArgument, match="there is no table 'mars'; there are yacht"):
        tabular.read(work, "mars")
    with pytest.raises(InvalidArgument, match="there is no table 'B'; there are A"):
        tabular.cc18(work, "B")


def test_splits_share_no_row_and_keep_classes():
    data = tabular.drawn("a", 230, 3)
    learn, test = tabular.halves(data, 1, 100)
    assert (len(learn), len(test), len({*learn, *test})) == (50, 50, 100)
    assert np.ptp(np.bincount(data.y[learn])) <= 1
    assert not np.array_equal(tabular.halves(data, 2, 100)[0], learn)
    parts = [tabular.published(data, fold) for fold in range(10)]
    assert sorted(np.concatenate([part.test for part in parts]).tolist()) == list(range(230))
    for train, validation, test in parts:
        assert sorted([*train, *validation, *test]) == list(range(230))
        assert abs(len(validation) - 46) <= 1
    protein = tabular.published(replace(tabular.drawn("protein", 100)), 4)
    assert [len(part) for part in protein] == [70, 10, 20]
    assert len(protein.fitting) == 80
    assert len(tabular.tenth(data, 0)[1]) == 23


def test_measures_by_hand():
    chances = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [1.0, 0.0]])
    found = tabular.judged(np.array([0, 1, 1, 1]), chances)
    assert found["accuracy"] == 0.5
    assert found["balanced"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["auc"] == pytest.approx(2 / 3)
    assert found["nll"] == pytest.approx(-np.log([0.9, 0.6, 0.3, 1e-7]).mean(), rel=1e-6)
    assert tabular.judged(np.array([1.0, 2.0]), np.array([1.0, 5.0])) == {"rmse": pytest.approx(np.sqrt(4.5))}
    assert "auc" not in tabular.judged(np.array([0, 0, 1]), np.full((3, 3), 1 / 3))
    np.testing.assert_array_equal(tabular.spread(np.array([[0.2, 0.8]]), np.array([0, 2]), 4), [[0.2, 0, 0.8, 0]])


def test_a_column_without_values_is_given_to_nobody():
    data = tabular.drawn("a", 30, 2)
    data.X[:20, 1] = np.nan
    left = data.filled(np.arange(20))
    assert (left.X.shape, left.categorical) == ((30, 4), (3,))
    np.testing.assert_array_equal(left.X[:, 3], data.X[:, 4])


@pytest.mark.parametrize(
    "name", [name for name, rival in rivals.RIVALS.items() if "1,000" not in name and rival.is_here]
)
def test_a_rival_learns(name, monkeypatch):
    # These two are for tables of numbers alone.
    plain = name in ("Gaussian process", "gradient boosting, 500 trees")
    data = tabular.drawn("a", 200, 0 if plain else 2)
    data = replace(data, categorical=()) if plain else data
    make = rivals.RIVALS[name].make

    def small(data, seed):
        model = make(data, seed)
        names = {"n_estimators", "iterations"} & set(model.get_params())
        return model.set_params(**dict.fromkeys(names or (["iterations"] if name == "CatBoost" else []), 30))

    monkeypatch.setitem(rivals.RIVALS, name, replace(rivals.RIVALS[name], make=small))
    found = rivals.fitted(name, data, np.arange(140), np.arange(140, 200))
    assert found["seconds"] > 0
    assert found["package"].split()[0] == rivals.RIVALS[name].package
    if data.classes:
        assert found["auc"] > 0.7
    else:
        assert found["rmse"] < 0.9 * data.y[140:].std()


def test_parts_of_an_absent_package_are_left_to_others(tmp_path, monkeypatch):
    store = Setting(True, "cpu", tmp_path, lambda line: None).store()
    store.keep("one", 1)
    monkeypatch.setitem(rivals.RIVALS, "CatBoost", replace(rivals.RIVALS["CatBoost"], package="no_such_package"))
    names = {"one": "CatBoost", "two": "CatBoost", "three": "linear"}
    assert list(rivals.possible(store, dict.fromkeys(names, ()), names)) == ["one", "three"]


def test_every_class_of_poker_by_hand():
    """Suits are 13 cards apart; an ace is 0."""
    hands = {
        0: [0, 14, 5, 7, 9], 1: [0, 13, 5, 7, 9], 2: [0, 13, 5, 18, 9], 3: [0, 13, 26, 7, 9], 4: [16, 4, 5, 6, 7], 5: [0, 2, 5, 7, 9],
        6: [0, 13, 26, 5, 18], 7: [0, 13, 26, 39, 9], 8: [4, 3, 2, 1, 0], 9: [12, 11, 10, 9, 0],
    }  # fmt: skip
    assert poker.worth(np.array(list(hands.values()))).tolist() == list(hands)
    # An ace above the king makes a straight; round the corner it does not.
    assert poker.worth(np.array([[13, 12, 11, 10, 9], [13, 1, 12, 11, 10]])).tolist() == [4, 0]
    assert sum(poker.counts()) == 2_598_960


def test_dealt_hands_follow_the_formula():
    random = np.random.default_rng(0)
    hands = poker.dealt(30_007, random)
    assert hands.shape == (30_007, 5)
    assert (np.diff(np.sort(hands, axis=1), axis=1) > 0).all()
    found = np.bincount(poker.worth(hands), minlength=10)[:7]
    wanted = len(hands) * np.array(poker.counts()[:7]) / 2_598_960
    assert (np.abs(found - wanted) < 4.5 * np.sqrt(wanted)).all()
    assert poker.worth(poker.rare(3, random)).tolist() == [8] * 3 + [9] * 3
    plain, ordered = poker.table(hands[:5], poker.SUITS), poker.sorted_table(hands[:5])
    np.testing.assert_array_equal(13 * plain.X[:, 0::2] + plain.X[:, 1::2], hands[:5])
    np.testing.assert_array_equal(plain.y, ordered.y)


@pytest.mark.parametrize("variant", pairs.VARIANTS)
def test_pairs_hide_originals_and_show_copies(variant):
    generator = torch.Generator().manual_seed(0)
    features, targets = pairs.toy(7, 5)(3, generator)
    rows, truth = pairs.paired(features, targets, variant, generator)
    assert rows.values.shape == (3, 14, 5)
    assert rows.hidden[:, :7].all()
    assert not rows.hidden[:, 7:].any()
    torch.testing.assert_close(rows.target[:, 7:], truth + float(variant in ("add one", "both")))
    same = rows.values[:, :7] == rows.values[:, 7:]
    kept = 2 if variant in ("random features", "both") else 5
    assert same[..., :kept].all()
    assert not same[..., kept:].any()
    if kept == 5:
        shift = float(variant == "add one")
        torch.testing.assert_close(pairs.nearest(pairs.Pairs(rows, truth)), truth + shift)


def test_without_attention_between_rows_nothing_is_looked_up():
    draw = pairs.toy(5, 2)
    options = {"embed_dim": 4, "num_heads": 2, "layers": 1, "steps": 2, "tables": 2}
    apart, together = (pairs.trained(draw, "original", 0, between_rows=seen, **options) for seen in (False, True))
    assert pairs.corrupted(apart, draw, 3)["change"] == 0
    assert pairs.corrupted(together, draw, 3)["change"] > 0
    flat = pairs.intervened(apart, draw, 3)
    assert np.ptp(flat["answers"]) == 0
    assert flat["slope"] == pytest.approx(0)
    found = pairs.measured(apart, draw, "original", 3, "cpu")
    assert found["nearest"] == 0
    assert pairs.scored(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0])) == {"rmse": 1.0, "r": pytest.approx(1.0)}


def test_ranks_share_equal_places():
    figures = {
        "a": {"one": {"auc": [0.9], "nll": [0.1]}, "two": {"auc": [0.5], "nll": [0.3]}},
        "b": {"one": {"auc": [0.8], "nll": [0.2]}, "two": {"auc": [0.5], "nll": [0.1]}},
        "c": {"one": {"auc": [0.7], "nll": [0.3]}, "two": {"auc": [0.6], "nll": [0.2]}},
    }
    assert tables_cc18.ranks(figures, "auc") == {"a": 1.75, "b": 2.25, "c": 2.0}
    assert tables_cc18.ranks(figures, "nll") == {"a": 2.0, "b": 1.5, "c": 2.5}


def test_holes_are_a_fifth_and_do_not_depend_on_the_fold():
    data = tabular.drawn("a", 400)
    first, gone = tables_uci.holed(data, 0)
    assert abs(gone.mean() - 0.2) < 0.02
    np.testing.assert_array_equal(np.isnan(first.X), gone)
    np.testing.assert_array_equal(tables_uci.holed(data, 0)[1], gone)


def test_needed_rows_are_compared_in_pairs():
    near = [
        {"deletion": {"near": [1.0, 2.0, None], "random": [1.5, 2.75, 1.0], "far": [1.0, 2.0, 3.0]}} for _ in range(4)
    ]
    assert tables_corruption.less(near, "random") == pytest.approx(1 / 256)
    assert tables_corruption.less(near, "far") is None


@pytest.mark.parametrize("name", ["tables-cc18", "tables-corruption", "tables-uci"])
def test_one_that_was_stopped_says_so(name, tmp_path):
    module = recipe(name)
    result = module.run(Setting(True, "cpu", tmp_path, lambda line: None, seconds=0.0))
    assert "Incomplete: 0 of" in text(module, result)
