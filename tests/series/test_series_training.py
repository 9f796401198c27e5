"""Training: the hold-out part, the best epoch, checkpoints; what every estimator does is in contracts/test_estimators.py."""

import os
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from heedful import CorruptModel, InvalidArgument

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from pytorch_lightning.plugins import TorchCheckpointIO
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV

from bumps import two_bumps
from heedful.bridges import training
from heedful.bridges.estimator import Estimator
from heedful.bridges.record import Epoch, Hyperparameters, Training
from heedful.bridges.samples import hold_out
from heedful.series import SeriesClassifier

SMALL = {"embed_dim": 8, "num_heads": 2, "rank": 3, "epochs": 4, "random_state": 0}
X, Y = two_bumps(60, 0)


class Stopped(Exception):
    pass


@pytest.fixture
def stop_in(monkeypatch):
    """Makes a training fail at the third and last batch of an epoch, counted from 0; None lets it pass."""
    loss = SeriesClassifier._loss

    def set_epoch(epoch, error=Stopped):
        batches = count()

        def stopping(model, *batch):
            if epoch is not None and next(batches) == 3 * epoch + 2:
                raise error
            return loss(model, *batch)

        monkeypatch.setattr(SeriesClassifier, "_loss", stopping)

    return set_epoch


def equal(one, other):
    return one.training_.epochs == other.training_.epochs and np.array_equal(
        one.predict_proba(X), other.predict_proba(X)
    )


def test_a_progress_bar_is_one_line_on_standard_error(capfd):
    SeriesClassifier(**SMALL, progress=True).fit(X, Y)
    out, err = capfd.readouterr()
    assert out == ""
    assert "4/4" in err
    assert "held-out loss" in err
    assert max(map(len, err.splitlines())) <= 80


def test_an_interrupt_is_a_keyboard_interrupt(stop_in):
    handler = signal.getsignal(signal.SIGINT)
    stop_in(1, KeyboardInterrupt)
    model = SeriesClassifier(**SMALL)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y)
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(NotFittedError):
        model.predict(X)


def test_the_best_epoch_is_kept():
    model = SeriesClassifier(
        **SMALL | {"epochs": 60, "lr": 0.02, "dropout": 0.0, "batch_size": 8}, attention="none", patience=5
    )
    model.fit(X, Y)
    done = model.training_
    losses = [epoch.held_out["loss"] for epoch in done.epochs]
    assert len(losses) < 60, "noise cannot be learned: it stops early"
    assert done.best == 1 + int(np.argmin(losses))
    assert len(losses) == done.best + 5
    _, held = hold_out(len(Y), 0.2, 0, codes=np.unique(Y, return_inverse=True)[1])
    chosen = model.predict_proba(X[held])[np.arange(len(held)), np.searchsorted(model.classes_, Y[held])]
    assert -np.log(chosen).mean() == pytest.approx(done.measured["loss"], abs=1e-5)
    assert model.score(X[held], Y[held]) == pytest.approx(done.measured["accuracy"], abs=1e-6)
    everything = SeriesClassifier(**SMALL, validation_fraction=None).fit(X, Y).training_
    assert (everything.best, everything.measured, len(everything.epochs)) == (4, {}, 4)


def test_the_record_tells_itself():
    done = SeriesClassifier(**SMALL).fit(X, Y).training_
    assert str(done).startswith("4 epochs, the best is")
    assert str(Training((Epoch(0.5, {}),), 1, 1)) == "1 epoch (1 from a checkpoint), last loss 0.5"
    assert done.to_dict()["epochs"][3]["held_out"].keys() == {"loss", "accuracy"}
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    ax = done.plot()
    assert [line.get_label() for line in ax.lines] == ["training", "held out", "kept"]
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [epoch.loss for epoch in done.epochs])
    pyplot.close(ax.figure)


@pytest.mark.parametrize(
    ("codes", "fraction", "held"),
    [
        ([0] * 50 + [1] * 30 + [2] * 20, 0.2, [10, 6, 4]),
        ([0] * 9 + [1], 0.2, [2, 0]),
        ([0] * 3 + [1] * 3 + [2] * 3 + [3] * 3, 0.2, None),
        ([0, 1, 2], 0.5, [0, 0, 0]),
        ([0, 0], 0.2, [0]),
        ([0] * 10, None, [0]),
    ],
)
def test_every_class_keeps_a_case_to_learn_from(codes, fraction, held):
    codes = np.array(codes)
    for seed in range(20):
        learn, out = hold_out(len(codes), fraction, seed, codes=codes)
        assert sorted([*learn, *out]) == list(range(len(codes)))
        assert set(codes[learn]) == set(codes)
        if held is not None:
            np.testing.assert_array_equal(np.bincount(codes[out], minlength=len(held)), held)
    if len(out):
        assert not np.array_equal(
            hold_out(len(codes), fraction, 0, codes=codes)[1], hold_out(len(codes), fraction, 1, codes=codes)[1]
        )


def test_a_recipe_is_checked():
    for wrong, told in (
        ({"optimizer": "Magic"}, "class of torch.optim"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"clip": 0}, "clip"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            Hyperparameters(**wrong)
    assert Hyperparameters(optimizer="AdamW", clip=None).optimizer == "AdamW"


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_stopped_training_goes_on_to_the_same_weights(epoch, stop_in, tmp_path):
    wanted = SeriesClassifier(**SMALL).fit(X, Y)
    model = SeriesClassifier(**SMALL, checkpoint_dir=tmp_path / "deep" / "kept")
    stop_in(epoch)
    with pytest.raises(Stopped):
        model.fit(X, Y)
    assert len(list((tmp_path / "deep" / "kept").iterdir())) == 1
    stop_in(None)
    # Another training beside it has a file of its own.
    clone(model).set_params(epochs=1).fit(X, Y)
    clone(model).fit(X[:-1], Y[:-1])
    model.fit(X, Y)
    assert model.training_.resumed == epoch
    assert equal(model, wanted)
    assert list((tmp_path / "deep" / "kept").iterdir()) == []
    assert clone(model).fit(X, Y).training_.resumed == 0


def test_a_training_without_a_seed_goes_on_with_the_one_it_had(stop_in, tmp_path):
    options = SMALL | {"random_state": None, "checkpoint_dir": tmp_path}
    stop_in(2)
    with pytest.raises(Stopped):
        SeriesClassifier(**options).fit(X, Y)
    (file,) = tmp_path.iterdir()
    stop_in(None)
    model = SeriesClassifier(**options).fit(X, Y)
    assert model.training_.resumed == 2
    assert file.stem.endswith(f"-{model.seed_}")
    assert equal(model, SeriesClassifier(**SMALL | {"random_state": model.seed_}).fit(X, Y))


@pytest.mark.parametrize("when", ["patience", "epochs"])
def test_a_training_killed_behind_its_last_epoch_does_not_go_on(when, monkeypatch, tmp_path):
    options = SMALL | {
        "attention": "none",
        "epochs": 60 if when == "patience" else 3,
        "lr": 0.02,
        "batch_size": 8,
        "patience": 3,
    }
    wanted = SeriesClassifier(**options).fit(X, Y)

    def killed(task):
        raise Stopped

    monkeypatch.setattr(training._Task, "on_train_end", killed)
    with pytest.raises(Stopped):
        SeriesClassifier(**options, checkpoint_dir=tmp_path).fit(X, Y)
    monkeypatch.undo()
    model = SeriesClassifier(**options, checkpoint_dir=tmp_path).fit(X, Y)
    assert model.training_.resumed == len(wanted.training_.epochs) == len(model.training_.epochs)
    assert equal(model, wanted)


def test_a_checkpoint_is_whole_or_as_it_was(stop_in, tmp_path, monkeypatch):
    stop_in(2)
    model = SeriesClassifier(**SMALL, checkpoint_dir=tmp_path)
    with pytest.raises(Stopped):
        model.fit(X, Y)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()

    def half(self, checkpoint, path, options=None):
        Path(path).write_bytes(data[:1000])
        raise Stopped

    stop_in(None)
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", half)
    with pytest.raises(Stopped):
        model.fit(X, Y)
    assert file.read_bytes() == data
    monkeypatch.undo()
    assert model.fit(X, Y).training_.resumed == 2
    assert [left.name for left in tmp_path.iterdir()] == []


def test_a_damaged_checkpoint_is_told_and_runs_no_code(stop_in, tmp_path):
    stop_in(2)
    model = SeriesClassifier(**SMALL, checkpoint_dir=tmp_path)
    with pytest.raises(Stopped):
        model.fit(X, Y)
    (file,) = tmp_path.iterdir()
    stop_in(None)
    whole = file.read_bytes()
    file.write_bytes(whole[:-500])
    with pytest.raises(CorruptModel, match=r"cannot be read .*; delete it to train from the start"):
        model.fit(X, Y)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    torch.save({"epoch": Evil()}, file)
    with pytest.raises(CorruptModel, match="cannot be read"):
        model.fit(X, Y)
    assert not (tmp_path / "run").exists()
    file.write_bytes(whole)
    assert model.fit(X, Y).training_.resumed == 2


def test_models_are_searched_over_series_of_unequal_lengths(tmp_path):
    ragged = [case[:, : 9 + at % 3] for at, case in enumerate(X)]
    search = GridSearchCV(SeriesClassifier(**SMALL | {"epochs": 1}), {"attention": ["none", "primal"]}, cv=2)
    assert search.fit(ragged, Y).best_params_.keys() == {"attention"}
    assert 0 <= search.score(ragged, Y) <= 1
    # Arrays hold numpy's numbers, which layers and Lightning refuse.
    grid = {"rank": [2], "eta": [0, 1], "embed_dim": [8], "num_heads": [2], "epochs": [1], "batch_size": [8]}
    grid = {name: np.array(values) for name, values in grid.items()} | {"lr": np.array([0.01], dtype=np.float32)}
    best = GridSearchCV(SeriesClassifier(**SMALL), grid, cv=2, error_score="raise").fit(X, Y).best_estimator_
    best.set_params(device=torch.device("cpu")).save_pretrained(tmp_path)
    assert SeriesClassifier.from_pretrained(tmp_path).get_params() == best.set_params(device="cpu").get_params()


@pytest.mark.parametrize("labels", ["strings", "objects", "integers"])
def test_a_saved_model_comes_back_equal(labels, tmp_path):
    y = {"strings": Y, "objects": Y.astype(object), "integers": (Y == "same") * 7}[labels]
    model = SeriesClassifier(["softmax", "primal"], **SMALL).fit(X, y)
    model.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    for kind in (SeriesClassifier, Estimator):
        again = kind.from_pretrained(tmp_path)
        assert again.get_params() == model.get_params()
        assert again.training_ == model.training_
        assert again.classes_.dtype == model.classes_.dtype
        np.testing.assert_array_equal(again.predict(X), model.predict(X))
        np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
        assert again.score(X, y) == model.score(X, y)


def test_what_cannot_be_saved_or_loaded_is_told(tmp_path):
    with pytest.raises(NotFittedError):
        SeriesClassifier().save_pretrained(tmp_path / "none")
    SeriesClassifier(**SMALL | {"epochs": 1}).fit(X, Y).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace("same", "tame"))
    with pytest.raises(CorruptModel, match="was truncated or altered"):
        SeriesClassifier.from_pretrained(tmp_path)
    with pytest.raises(CorruptModel, match="no saved folder"):
        SeriesClassifier.from_pretrained(tmp_path / "nowhere")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu(tmp_path, stop_in):
    options = SMALL | {"device": "cuda", "epochs": 20, "lr": 5e-3}
    stop_in(5)
    with pytest.raises(Stopped):
        SeriesClassifier(**options, checkpoint_dir=tmp_path).fit(X, Y)
    stop_in(None)
    model = SeriesClassifier(**options, checkpoint_dir=tmp_path).fit(X, Y)
    assert model.training_.resumed == 5
    assert {p.device.type for p in model.network_.parameters()} == {"cpu"}
    there = model.predict_proba(X)
    np.testing.assert_allclose(model.set_params(device="cpu").predict_proba(X), there, atol=1e-4)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "inside", ""):
        with pytest.raises(InvalidArgument, match=r"cannot be made|name is empty"):
            SeriesClassifier(**SMALL, checkpoint_dir=place).fit(X, Y)
    assert (tmp_path / "file").read_text() == "mine"
