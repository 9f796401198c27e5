"""Files of sets of points, and the command line on them."""

import csv
import io
import json

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

import pandas as pd

from heedful import InvalidArgument
from heedful.geometry import EquivariantClassifier, EquivariantRegressor, read
from ions import ions

SMALL = ("--layers", 1, "--channels", 3, "--width", 8, "--units", 4, "--epochs", 2, "--quiet")
X, ENERGY, FORCE = ions(12, 0)
LENGTHS = np.resize([5, 2, 3], 12)


def test_padded_and_concatenated_sets_are_one(tmp_path):
    parts = [case[:n] for case, n in zip(X, LENGTHS, strict=True)]
    padded = np.where((np.arange(5) < LENGTHS[:, None])[..., None], X, np.nan)
    np.savez(tmp_path / "padded.npz", X=padded, y=FORCE, lengths=LENGTHS)
    forces = [case[:n] for case, n in zip(FORCE, LENGTHS, strict=True)]
    np.savez(tmp_path / "rows.npz", X=np.concatenate(parts), y=np.concatenate(forces), lengths=LENGTHS)
    for name in ("padded", "rows"):
        data = read(tmp_path / f"{name}.npz")
        assert repr(data) == f"{name}: 12 cases of 2 to 5 points, 4 columns"
        for one, two in zip(data.X, parts, strict=True):
            np.testing.assert_array_equal(one, two)
        for one, two in zip(data.y, forces, strict=True):
            np.testing.assert_array_equal(one, two)
    np.savez(tmp_path / "split.npz", X_train=X, y_train=ENERGY, X_test=X[:3], y_test=ENERGY[:3])
    assert len(read(tmp_path / "split.npz")) == 12
    assert repr(read(tmp_path / "split.npz", "test")) == "split: 3 cases of 5 points, 4 columns"
    np.savez(tmp_path / "named.npz", X=X[:, 0], y=np.array([b"a", b"b"] * 6))
    assert read(tmp_path / "named.npz").y.tolist() == ["a", "b"] * 6
    assert repr(read(tmp_path / "named.npz")) == "named: 12 cases of 1 point, 4 columns"


def frame():
    columns = dict(zip(["x", "y", "z", "charge"], X.reshape(-1, 4).T, strict=True))
    return pd.DataFrame({"case": np.repeat([f"m{at}" for at in range(12)], 5), **columns})


def test_long_tables_hold_answers_of_cases_or_of_points(tmp_path):
    frame().assign(target=np.repeat(ENERGY, 5)).to_csv(tmp_path / "energy.csv", index=False)
    data = read(tmp_path / "energy.csv")
    np.testing.assert_allclose(data.y, ENERGY)
    assert data.X.columns.tolist() == ["case", "x", "y", "z", "charge"]
    assert repr(data) == "energy: 12 cases of 5 points, 4 columns"
    named = {f"target_{at}": FORCE.reshape(-1, 3)[:, at] for at in range(3)}
    frame().assign(**named).to_csv(tmp_path / "forces.csv", index=False)
    np.testing.assert_allclose(read(tmp_path / "forces.csv").y, FORCE.reshape(-1, 3))
    frame().assign(target=np.repeat(["a", "b"], 30)).to_csv(tmp_path / "labels.csv", index=False)
    assert read(tmp_path / "labels.csv").y.tolist() == ["a"] * 6 + ["b"] * 6
    frame().to_csv(tmp_path / "bare.csv", index=False)
    assert read(tmp_path / "bare.csv").y is None


def test_parquet_is_read(tmp_path, monkeypatch):
    """With a stand-in for pandas' reader, which needs pyarrow, that not every machine has; and its message where there is none."""
    (tmp_path / "energy.parquet").write_text("")
    table = frame().assign(target=np.repeat(ENERGY, 5))
    monkeypatch.setattr(pd, "read_parquet", lambda file: table)
    np.testing.assert_array_equal(read(tmp_path / "energy.parquet").y, ENERGY)

    def missing(file):
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr(pd, "read_parquet", missing)
    with pytest.raises(InvalidArgument, match="pip install pyarrow"):
        read(tmp_path / "energy.parquet")


def test_a_parquet_file_is_read(tmp_path):
    pytest.importorskip("pyarrow", reason="pandas reads .parquet by it")
    frame().assign(target=np.repeat(ENERGY, 5)).to_parquet(tmp_path / "energy.parquet")
    np.testing.assert_array_equal(read(tmp_path / "energy.parquet").y, ENERGY)


def test_files_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "plain.csv").write_text("x,y\n1,2\n")
    (tmp_path / "gap.csv").write_text("case,x,target\n1,2,3\n1,2,\n")
    (tmp_path / "nobody.csv").write_text("case,x\n1,2\n,2\n")
    (tmp_path / "points.txt").write_text("")
    (tmp_path / "broken.parquet").write_text("no")
    np.savez(tmp_path / "deep.npz", X=np.zeros((2, 2, 2, 2)))
    np.savez(tmp_path / "words.npz", X=np.array([["a"]]))
    np.savez(tmp_path / "dates.npz", X=X, y=np.zeros(12, dtype="datetime64[s]"))
    np.savez(tmp_path / "long.npz", X=X, lengths=LENGTHS + 1)
    np.savez(tmp_path / "half.npz", X=X[0], lengths=[2, 2])
    np.savez(tmp_path / "other.npz", points=X)
    for name, message in (
        ("none.npz", "there is no file"),
        ("empty.csv", "empty.csv is empty; give a table"),
        ("plain.csv", "has no column 'case', which says of which case a point is; it has x, y"),
        ("gap.csv", "has rows without target, as that of case"),
        ("nobody.csv", "has rows without a case"),
        ("points.txt", "is none of .npz, .csv, .parquet"),
        ("broken.parquet", "cannot be read|pip install pyarrow"),
        ("deep.npz", "must be numbers of shape"),
        ("words.npz", "must be numbers of shape"),
        ("dates.npz", "y in .* must be numbers or strings"),
        ("long.npz", "lengths in .* must be 12 whole numbers from 1 to 5"),
        ("half.npz", "whole numbers from 1 on whose sum is 5"),
        ("other.npz", "has no array X_train or X; it holds points"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            read(tmp_path / name)


def test_the_command_line_reads_sets(run, tmp_path):
    np.savez(tmp_path / "ions.npz", X=X, y=ENERGY)
    fit = ("fit", tmp_path / "ions.npz", "--out", tmp_path / "energy", "--task", "geometry", "--dim", 3)
    code, out, _ = run(*fit, "--translation", "invariant", *SMALL)
    assert code == 0
    assert out.splitlines()[0] == "ions: 12 cases of 5 points, 4 columns"
    model = EquivariantRegressor.from_pretrained(tmp_path / "energy")
    assert (model.translation, model.dim_, model.symmetry_error_ < 1e-10) == ("invariant", 3, True)
    # The model says what its files hold, though series read this ending too.
    code, out, err = run("predict", tmp_path / "energy", tmp_path / "ions.npz")
    assert (code, err) == (0, f"r2 {model.score(X, ENERGY):.4f} on 12 labelled cases\n")
    head, *rows = csv.reader(io.StringIO(out))
    assert head == ["case", "prediction"]
    np.testing.assert_allclose([float(row[1]) for row in rows], model.predict(X))
    code, out, _ = run("score", tmp_path / "energy", tmp_path / "ions.npz", "--json")
    assert json.loads(out)["r2"] == pytest.approx(model.score(X, ENERGY))
    assert "--proba is for classifiers" in run("predict", tmp_path / "energy", tmp_path / "ions.npz", "--proba")[2]
    code, _, err = run("predict", tmp_path / "energy", tmp_path / "ions.npz", "--task", "series")
    assert (code, "holds an EquivariantRegressor, which does not read .npz" in err) == (2, True)


def test_the_command_line_writes_a_row_for_each_point(run, tmp_path):
    named = {f"target_{at}": FORCE.reshape(-1, 3)[:, at] for at in range(3)}
    table = frame().assign(**named)
    table = table[table.index % 5 < np.repeat(LENGTHS, 5)]
    table.to_csv(tmp_path / "forces.csv", index=False)
    fit = ("fit", tmp_path / "forces.csv", "--out", tmp_path / "model", "--dim", 3, "--output", "vector", *SMALL)
    assert run(*fit)[0] == 0
    table[["z", "charge", "x", "y", "case"]].to_csv(tmp_path / "unseen.csv", index=False)
    code, out, err = run("predict", tmp_path / "model", tmp_path / "unseen.csv")
    assert (code, err) == (0, "")
    head, *rows = csv.reader(io.StringIO(out))
    assert head == ["case", "point", "prediction 1", "prediction 2", "prediction 3"]
    assert len(rows) == LENGTHS.sum()
    assert [row[:2] for row in rows[4:8]] == [["0", "4"], ["1", "0"], ["1", "1"], ["2", "0"]]
    model = EquivariantRegressor.from_pretrained(tmp_path / "model")
    wanted = np.concatenate(model.predict(table.drop(columns=list(named))))
    np.testing.assert_allclose([[float(part) for part in row[2:]] for row in rows], wanted, atol=1e-6)
    code, out, _ = run("score", tmp_path / "model", tmp_path / "forces.csv", "--json")
    assert json.loads(out)["cases"] == 12


def test_the_command_line_classifies_sets(run, tmp_path):
    frame().assign(target=np.repeat(np.where(np.median(ENERGY) < ENERGY, "high", "low"), 5)).to_csv(
        tmp_path / "levels.csv", index=False
    )
    fit = ("fit", tmp_path / "levels.csv", "--out", tmp_path / "model", "--estimator", "EquivariantClassifier")
    assert run(*fit, "--dim", 3, "--group", "SO", "--class-weight", "balanced", *SMALL)[0] == 0
    model = EquivariantClassifier.from_pretrained(tmp_path / "model")
    assert (model.group, model.classes_.tolist()) == ("SO", ["high", "low"])
    code, out, err = run("predict", tmp_path / "model", tmp_path / "levels.csv", "--proba")
    assert (code, out.splitlines()[0]) == (0, "case,prediction,high,low")
    assert err.startswith("accuracy ")
    code, _, err = run(*fit, "--dim", 3, "--translation", "equivariant", "--overwrite", *SMALL)
    assert (code, "is for answers that move along" in err) == (2, True)
