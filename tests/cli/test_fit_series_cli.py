"""`heedful fit` of series: the kernel method by default, numbers where y holds them."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")

from heedful.series import SeriesClassifier, SeriesRegressor


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.uniform(1, 5, 40)
    X = rng.normal(size=(40, 2, 31))
    X[:, 0] += 3 * np.sin(y[:, None] * np.arange(31) / 4)
    np.savez(tmp_path / "numbers.npz", X=X, y=y)
    np.savez(tmp_path / "classes.npz", X=X, y=np.where(y > 3, "fast", "slow"))
    lines = [",".join(map(str, case[0])) + f":{answer}" for case, answer in zip(X, y, strict=True)]
    (tmp_path / "numbers.ts").write_text("@problemName x\n@targetLabel true\n@data\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_classes_take_the_kernel_method(run, files):
    code, out, _ = run("fit", files / "classes.npz", "--out", files / "model", "--features", "168", "--quiet")
    assert code == 0
    model = SeriesClassifier.from_pretrained(files / "model")
    assert model.method_ == "kernel"
    assert out.splitlines() == [
        "classes: 40 series of 2 channels, 31 steps, 2 classes",
        "SeriesClassifier: convolution features and a ridge, without training; --method network trains a network",
        f"leave-one-out accuracy {model.loo_score_:.4f}",
        f"saved to {files / 'model'}",
    ]
    code, out, err = run("predict", files / "model", files / "classes.npz", "--proba")
    assert code == 0
    assert out.startswith("case,prediction,fast,slow\n0,")
    assert err.startswith("accuracy ")


@pytest.mark.parametrize("name", ["numbers.npz", "numbers.ts"])
def test_numbers_take_the_regressor(run, files, name):
    code, out, _ = run("fit", files / name, "--out", files / "model", "--features", "168", "--quiet", "--json")
    assert code == 0
    told = json.loads(out)
    model = SeriesRegressor.from_pretrained(files / "model")
    assert told["estimator"] == "SeriesRegressor"
    assert told["leave_one_out_r2"] == pytest.approx(model.loo_score_)
    assert "numbers to predict" in told["data"]
    code, out, _ = run("score", files / "model", files / name, "--json")
    assert code == 0
    assert json.loads(out)["r2"] > 0.8


def test_options_of_the_network_are_not_the_regressors(run, files):
    code, _, err = run("fit", files / "numbers.npz", "--out", files / "model", "--epochs", "3")
    assert code == 2
    assert "SeriesRegressor, which has no epochs" in err
    code, _, err = run("fit", files / "classes.npz", "--out", files / "model", "--kernel", "cubic")
    assert code == 2
    assert "--kernel must be one of linear, softmax, linear+softmax; got 'cubic'" in err
