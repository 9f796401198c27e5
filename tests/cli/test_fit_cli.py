"""`heedful fit` and `heedful predict`: a file in, a folder out, one line for whatever goes wrong."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from bumps import two_bumps
from failing import one_line
from heedful.bridges import training
from heedful.series import SeriesClassifier, archive, read

SHARED = Path(__file__).parents[3] / "shared" / "data" / "series"
QUICK = ("--embed-dim", "8", "--heads", "2", "--rank", "3", "--epochs", "3")


@pytest.fixture
def file(tmp_path):
    (X, y), (unseen, answers) = two_bumps(60, 0), two_bumps(20, 1)
    np.savez(tmp_path / "bumps.npz", X_train=X, y_train=y, X_test=unseen, y_test=answers)
    return tmp_path / "bumps.npz"


def test_a_file_becomes_a_folder_and_answers(run, file, tmp_path):
    code, out, err = run("fit", file, "--out", tmp_path / "model", *QUICK)
    assert code == 0
    model = SeriesClassifier.from_pretrained(tmp_path / "model")
    assert out.splitlines() == [
        "bumps: 60 series of 2 channels, 11 steps, 2 classes",
        f"trained for 3 epochs; the best is {model.training_.best}",
        f"held-out accuracy {model.training_.measured['accuracy']:.4f}",
        f"saved to {tmp_path / 'model'}",
    ]
    assert "3/3" in err
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    test = read(file, "test")
    same = SeriesClassifier(embed_dim=8, num_heads=2, rank=3, epochs=3, random_state=0).fit(*two_bumps(60, 0))
    np.testing.assert_array_equal(same.predict_proba(test.X), model.predict_proba(test.X))

    code, out, err = run("predict", tmp_path / "model", file, "--proba")
    assert code == 0
    head, *rows = csv.reader(io.StringIO(out))
    assert head == ["case", "prediction", "other", "same"]
    assert [row[0] for row in rows] == [str(at) for at in range(20)]
    assert [row[1] for row in rows] == model.predict(test.X).tolist()
    np.testing.assert_allclose(
        [[float(part) for part in row[2:]] for row in rows], model.predict_proba(test.X), atol=1e-5
    )
    assert err == f"accuracy {model.score(test.X, test.y):.4f} on 20 labelled cases\n"
    code, out, _ = run("predict", tmp_path / "model", file, "--out", tmp_path / "answers.csv")
    assert (code, out) == (0, f"20 answers written to {tmp_path / 'answers.csv'}\n")
    assert (tmp_path / "answers.csv").read_text().splitlines()[1] == f"0,{rows[0][1]}"


def test_json_and_quiet(run, file, tmp_path):
    options = ("--json", "--quiet", "--held-out", 0, "--attention", "none", "--batch-size", 20)
    code, out, err = run("fit", file, "--out", tmp_path / "model", *QUICK, *options)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["epochs"], told["held_out_accuracy"], told["saved"]) == (3, None, str(tmp_path / "model"))


def test_a_model_is_not_written_over(run, file, tmp_path):
    assert run("fit", file, "--out", tmp_path / "model", *QUICK, "--quiet")[0] == 0
    before = (tmp_path / "model" / "config.json").read_bytes()
    code, out, err = run("fit", file, "--out", tmp_path / "model", *QUICK)
    assert (code, out) == (2, "")
    assert "holds a model; name another folder, or give --overwrite" in err
    assert (tmp_path / "model" / "config.json").read_bytes() == before
    assert run("fit", file, "--out", tmp_path / "model", *QUICK, "--quiet", "--overwrite", "--seed", 1)[0] == 0
    assert SeriesClassifier.from_pretrained(tmp_path / "model").seed_ == 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [(OSError("the power went"), 2, "the power went"), (KeyboardInterrupt(), 130, "stopped; the same call goes on")],
)
def test_a_stopped_call_goes_on(error, code, told, run, file, tmp_path, monkeypatch):
    step = training._Task.training_step

    def stopping(task, batch, index):
        if task.current_epoch == 2:
            raise error
        return step(task, batch, index)

    monkeypatch.setattr(training._Task, "training_step", stopping)
    call = ("fit", file, "--out", tmp_path / "model", *QUICK, "--quiet")
    stopped, out, err = run(*call)
    assert (stopped, out) == (code, "")
    assert err.startswith(f"heedful: {told}")
    assert err.count("\n") == 1
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["checkpoints"]
    monkeypatch.setattr(training._Task, "training_step", step)
    code, out, _ = run(*call)
    assert code == 0
    assert "trained for 3 epochs, going on after epoch 2" in out
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_what_goes_wrong_is_one_line(run, file, tmp_path):
    (tmp_path / "file").write_text("mine")
    np.savez(tmp_path / "bare.npz", X=np.zeros((3, 2, 5)))
    np.savez(tmp_path / "nan.npz", X=np.zeros((3, 2, 5)), y=[0, 1, np.nan])
    np.savez(tmp_path / "inf.npz", X=np.full((3, 2, 5), np.inf), y=[0, 1, 0])
    np.savez(tmp_path / "half.npz", X=np.zeros((3, 2, 5)), y=[0.5, 1, 2])
    (tmp_path / "cut.npz").write_bytes(file.read_bytes()[:-100])
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    out = ("--out", tmp_path / "new")
    for arguments, told in (
        (("fit", tmp_path / "none.npz", *out), "there is no file"),
        (("fit", tmp_path / "bare.npz", *out), "holds no labels"),
        (("fit", tmp_path / "nan.npz", *out), "is NaN at case 2"),
        (("fit", tmp_path / "cut.npz", *out), "cannot be read as .npz"),
        (("fit", tmp_path / "table.txt", *out), "cannot tell from its ending what"),
        (
            ("fit", tmp_path / "table.csv", *out),
            "--target is missing; name the column to predict, one of a, b. Files of other kinds are known by columns (geometry: case; events: "
            "sequence, time), or by --task",
        ),
        (("fit", tmp_path / "table.csv", *out, "--task", "series"), "neither .npz nor .ts"),
        (("fit", file, *out, "--task", "poems"), "--task must be one of series, geometry, events, tables; got 'poems'"),
        (("fit", file), "--out is missing"),
        (("fit", file, "--out", tmp_path / "file"), "is a file; name a folder"),
        (("fit", file, *out, "--heads", 7), "--embed-dim must be a multiple of --heads"),
        (("fit", file, *out, "--attention", "magic"), "--attention must be of softmax"),
        (("fit", file, *out, "--device", "cuda:99"), "there is no device 'cuda:99'"),
        (("fit", file, *out, "--batch-size", 0), "--batch-size must be"),
        (("fit", file, *out, "--seed", -1), "--seed must be"),
        (("fit", tmp_path / "inf.npz", *out), "contains infinity"),
        (("fit", tmp_path / "half.npz", *out, "--estimator", "SeriesClassifier"), "Unknown label type: continuous"),
        (("predict", tmp_path / "new", file), "no saved folder at"),
        (("predict", tmp_path, file), "config.json is missing"),
        (("predict", tmp_path / "new", file, "--out", tmp_path / "no" / "a.csv"), "there is no folder"),
    ):
        code, said, err = run(*arguments)
        assert (code, said) == (2, ""), arguments
        assert err.startswith("heedful: ")
        assert err.count("\n") == 1
        assert told in err, arguments
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_numbers_are_compared_as_numbers_and_warnings_are_a_line(run, tmp_path):
    X, y = two_bumps(40, 0)
    np.savez(tmp_path / "truth.npz", X=X, y=y == "same")
    assert run("fit", tmp_path / "truth.npz", "--out", tmp_path / "model", *QUICK, "--quiet")[0] == 0
    right = SeriesClassifier.from_pretrained(tmp_path / "model").score(X, y == "same")
    for kind in (int, float, str):
        labels = (y == "same").astype(kind)
        np.savez(tmp_path / "again.npz", X=np.concatenate((X, X[..., :1]), 2), y=labels)
        code, _, err = run("predict", tmp_path / "model", tmp_path / "again.npz")
        assert code == 0
        assert err.splitlines() == [
            "heedful: 40 of 40 series are longer than the longest of the training, 11 steps, and are cut there: positions and "
            "head know no later step",
            f"accuracy {right:.4f} on 40 labelled cases",
        ]


def test_labels_that_are_no_class_are_named(run, file, tmp_path):
    assert run("fit", file, "--out", tmp_path / "model", *QUICK, "--quiet")[0] == 0
    X, y = two_bumps(20, 1)
    for labels, told in (
        (
            np.where(np.arange(20) < 3, "third", y),
            "3 of 20 labels are not classes .* count as wrong: third; its classes are other, same",
        ),
        (np.arange(20), "20 of 20 labels are not classes .*: 0, 1, 2, 3, 4 and 15 more; its classes are other, same"),
    ):
        np.savez(tmp_path / "new.npz", X=X, y=labels)
        code, out, err = run("predict", tmp_path / "model", tmp_path / "new.npz")
        assert (code, len(out.splitlines())) == (0, 21)
        first, second = err.splitlines()
        assert re.fullmatch(f"heedful: {told}", first)
        right = np.mean(
            [line.split(",")[1] == str(label) for line, label in zip(out.splitlines()[1:], labels, strict=True)]
        )
        assert second == f"accuracy {right:.4f} on 20 labelled cases"


def test_a_folder_of_a_later_release_is_one_line(run, file, tmp_path):
    assert run("fit", file, "--out", tmp_path / "model", *QUICK, "--quiet")[0] == 0
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"heedful": "7.0.0"}))
    code, out, err = run("predict", tmp_path / "model", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "was written by heedful 7.0.0" in err


def test_help_is_there(run):
    for command, words in (
        ("fit", ("--attention", "--held-out", "killed")),
        ("predict", ("--proba", "score")),
        ("score", ("--json", "FOLDER")),
    ):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert all(word in out for word in words)
        assert max(map(len, out.splitlines())) <= 80


def test_help_lists_the_options_of_what_is_named(run, people):
    assert "heedful fit FILE --help" in run("fit", "--help")[1]
    for words, option, other in (
        (("--task", "tables"), "--variants", "--max-len"),
        ((people,), "--variants", "--max-len"),
        (("--estimator", "DatapointRegressor"), "--p-feature", "--max-len"),
        (("--estimator", "NextEvent"), "--rotate-values", "--p-feature"),
        ((people, "--estimator", "DatapointRegressor"), "--p-feature", "--variants"),
    ):
        code, out, _ = run("fit", *words, "--help")
        assert (code, f"{option} " in out, f"{other} " in out) == (0, True, False), words
    for words, told in (
        (("--estimator", "Magic"), "--estimator must be one of SeriesClassifier, "),
        ((people, "--estimator", "Magic"), "--estimator must be one of DatapointClassifier, "),
        (("--task", "poems"), "--task must be one of series"),
    ):
        assert told in one_line(run("fit", *words, "--help"))


@pytest.mark.data
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"there is no {SHARED}; it runs where that folder lies")
def test_series_of_the_shared_folder(run, tmp_path):
    """Six hand postures of 65 steps (ERing, 30 series): an accuracy far from chance on 270 that were not seen."""
    options = ("--embed-dim", 32, "--heads", 4, "--epochs", 40, "--held-out", 0, "--lr", 0.002, "--quiet")
    assert run("fit", SHARED / "ERing.npz", "--out", tmp_path / "model", *options)[0] == 0
    code, out, err = run("predict", tmp_path / "model", SHARED / "ERing.npz")
    assert (code, len(out.splitlines())) == (0, 271)
    assert float(err.split()[1]) > 0.85


def test_unequal_series_of_the_archive(run, tmp_path):
    """JapaneseVowels: nine speakers, 7 to 29 steps; a small network and few epochs, so a bound below the recipe's."""
    pytest.importorskip("sktime", reason="the extra 'archive' is not installed")
    train, test = archive("JapaneseVowels")
    model = SeriesClassifier(embed_dim=32, num_heads=4, epochs=12, lr=3e-3, validation_fraction=None, random_state=0)
    model.fit(train.X, train.y)
    with pytest.warns(UserWarning, match="1 of 370 series are longer"):
        assert model.score(test.X, test.y) > 0.95


def test_score_tells_how_well_a_model_does(run, file, tmp_path):
    assert run("fit", file, "--out", tmp_path / "model", *QUICK, "--quiet")[0] == 0
    test = read(file, "test")
    right = SeriesClassifier.from_pretrained(tmp_path / "model").score(test.X, test.y)
    code, out, err = run("score", tmp_path / "model", file)
    assert (code, out, err) == (0, f"{test!r}\naccuracy {right:.4f}\n", "")
    code, out, _ = run("score", tmp_path / "model", file, "--json")
    assert json.loads(out) == {"data": repr(test), "cases": 20, "accuracy": right}
    np.savez(tmp_path / "bare.npz", X=test.X)
    code, out, err = run("score", tmp_path / "model", tmp_path / "bare.npz")
    assert (code, out, "holds no labels" in err) == (2, "", True)


def test_options_are_the_estimators_own(run, file, tmp_path):
    """Whatever the constructor takes is an option, with its docstring, type and default; nothing lists them twice."""
    import inspect

    _, out, _ = run("fit", "--help")
    own = set(inspect.signature(SeriesClassifier).parameters) - {"progress", "checkpoint_dir"}
    short = {"num_heads": "heads", "validation_fraction": "held-out", "random_state": "seed"}
    for name in own:
        assert f"--{short.get(name, name.replace('_', '-'))} " in out
    assert "Width of the network" in out
    call = ("fit", file, "--out", tmp_path / "model", *QUICK, "--quiet")
    more = ("--max-len", 7, "--patience", "none", "--batch-size", "auto", "--class-weight", "balanced", "--head=mean")
    assert run(*call, *more)[0] == 0
    model = SeriesClassifier.from_pretrained(tmp_path / "model")
    assert (model.max_len, model.patience, model.batch_size, model.class_weight) == (7, None, "auto", "balanced")
    assert (model.head, model.random_state) == ("mean", 0)
    for wrong, message in (
        (("--epochs", "many"), "Invalid value for '--epochs'"),
        (("--head", "max"), "--head must be one of flatten, mean; got 'max'"),
        (("--held-out", 1.5), "--held-out must be a number from 0 on, below 1"),
        (("--estimator", "Magic"), "--estimator must be one of SeriesClassifier, SeriesRegressor; got 'Magic'"),
        (("--colour", "red"), "--colour"),
    ):
        code, _, err = run("fit", file, "--out", tmp_path / "new", *wrong)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--devices", "x"), "--devices must be a whole number from 1 on; got 'x'"),
        (("--num-nodes", 0), "--num-nodes must be a whole number from 1 on"),
        (("--strategy", "foo"), "--strategy must be one of auto, ddp"),
        (("--epochs", "x"), "'--epochs': must be a whole number; got 'x'"),
        (("--lr", "fast"), "'--lr': must be a number; got 'fast'"),
        (("--held-out", 2), "--held-out must be a number from 0 on, below 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_wrong_options_are_refused_before_any_work(options, message, run, file, tmp_path):
    code, out, err = run("fit", file, "--out", tmp_path / "model", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_what_is_missing_is_said_at_once(run, file):
    assert "--out is missing" in run("fit", file)[2]
    assert "Missing argument 'FILE'" in run("fit")[2]
    assert run("fit", "nosuch.npz", "-h")[0] == 0


def test_events_by_the_columns_that_are_named(run, tmp_path):
    """Of a table with a column `case`, as of points: what names columns of events says that it holds them."""
    rng = np.random.default_rng(0)
    rows = [f"{case},{time:.3f},{'ab'[case % 2]}" for case in range(9) for time in np.cumsum(rng.exponential(1.0, 6))]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(["case,timestamp,activity", *rows]))
    columns = ("--sequence", "case", "--time-column", "timestamp", "--type", "activity")
    small = ("--embed-dim", 8, "--heads", 2, "--layers", 1, "--epochs", 1, "--quiet")
    code, out, _ = run("fit", log, *columns, *small, "--out", tmp_path / "model")
    assert code == 0
    assert "held-out accuracy" in out
    code, out, _ = run("predict", tmp_path / "model", log, "--at", "+0.5", "--proba")
    assert (code, out.splitlines()[0]) == (0, "case,prediction,case,median time,a,b")
    assert len(out.splitlines()) == 10
    code, out, _ = run("score", tmp_path / "model", log, "--json")
    assert [one["at"] for one in json.loads(out)["evaluations"]] == [None, "true"]
    (tmp_path / "noise.csv").write_bytes(b"\xff\xfe\x00\x9c" * 40)
    for arguments, said in (
        (("predict", tmp_path / "model", log, "--at", "+1d"), "numbers of an unknown unit"),
        (("fit", tmp_path / "noise.csv", "--out", tmp_path / "new", *small), "is not text in UTF-8; convert it first"),
        (("events", "periods", log), "Name them: --sequence, --time-column, --type"),
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert said in err
    code, out, _ = run("events", "periods", log, *columns, "--json")
    assert (code, json.loads(out)["peaks"]) == (0, [])


PEOPLE = ("--members", "2", "--epochs", "4", "--embed-dim", "8", "--row-tokens", "2", "--lr", "0.01", "--quiet")


@pytest.fixture
def people(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["age,city,since,buys"]
    for row in range(80):
        age, city, day = rng.integers(18, 80), rng.choice(["Bern", "Rome"]), 1 + row % 28
        buys = "" if row == 7 else "yes" if age > 45 else "no"
        lines.append(f"{'' if row % 9 == 0 else age},{'' if row % 11 == 0 else city},2020-02-{day:02},{buys}")
    (tmp_path / "people.csv").write_text("\n".join(lines))
    return tmp_path / "people.csv"


def test_a_table_becomes_a_folder_and_answers(run, people, tmp_path):
    code, out, _ = run("fit", people, "--target", "buys", "--out", tmp_path / "model", *PEOPLE)
    assert code == 0
    assert out.splitlines()[0] == "people: 79 rows of 3 features", "a row without a target is not learned from"
    code, out, err = run("predict", tmp_path / "model", people, "--proba")
    head, *rows = csv.reader(io.StringIO(out))
    assert head == ["case", "prediction", "no", "yes"]
    assert len(rows) == 80, "every row is answered"
    assert err == ""
    code, out, _ = run("score", tmp_path / "model", people, "--json")
    assert json.loads(out)["accuracy"] > 0.8
    code, out, _ = run("impute", tmp_path / "model", people)
    filled = list(csv.DictReader(io.StringIO(out)))
    given = list(csv.DictReader(people.open()))
    assert len(filled) == 80
    for before, after in zip(given, filled, strict=True):
        assert after["age"]
        assert after["city"] in ("Bern", "Rome")
        assert not before["city"] or before["city"] == after["city"]
        assert before["since"] == after["since"]
        assert before["buys"] == after["buys"], "what is to be predicted stays"
    code, out, _ = run("impute", tmp_path / "model", people, "--out", tmp_path / "filled.csv")
    assert out == f"80 rows written to {tmp_path / 'filled.csv'}\n"


def test_files_are_replaced_only_when_that_was_asked_for(run, people, tmp_path):
    assert run("fit", people, "--target", "buys", "--out", tmp_path / "model", "--variants", "1")[0] == 0
    own, kept = people.read_bytes(), tmp_path / "kept.csv"
    (tmp_path / "same.csv").symlink_to(people)
    for command in ("predict", "impute"):
        kept.write_text("mine")
        for more in ((), ("--overwrite",)):
            for out in (people, tmp_path / "same.csv"):
                err = one_line(run(command, tmp_path / "model", people, "--out", out, *more))
                assert "is the file that is read; name another file to write to" in err
        assert people.read_bytes() == own
        err = one_line(run(command, tmp_path / "model", people, "--out", kept))
        assert err == f"heedful: {kept} is there; name another file, or give --overwrite to replace it\n"
        assert kept.read_text() == "mine"
    assert run("predict", tmp_path / "model", people, "--out", kept, "--overwrite")[0] == 0
    assert kept.read_text().startswith("case,prediction")


def test_a_small_table_needs_no_training(run, people, tmp_path):
    code, out, err = run("fit", people, "--target", "buys", "--out", tmp_path / "model", "--variants", "2")
    assert code == 0, err
    assert "nothing is trained: InContextClassifier" in out
    assert "--estimator DatapointClassifier" in out
    code, out, _ = run("predict", tmp_path / "model", people)
    assert len(out.splitlines()) == 81
    code, out, _ = run("score", tmp_path / "model", people, "--json")
    assert json.loads(out)["accuracy"] > 0.8
    code, out, err = run("fit", people, "--target", "age", "--out", tmp_path / "ages", "--variants", "1", "--json")
    assert code == 0, err
    assert json.loads(out)["estimator"] == "InContextRegressor"


def test_options_of_two_estimators_do_not_go_together(run, people, tmp_path):
    both = ("--target", "buys", "--out", tmp_path / "model", "--variants", "2", "--epochs", "1")
    code, out, err = run("fit", people, *both)
    assert (code, out) == (2, "")
    assert err.startswith("heedful: --variants is no option of DatapointClassifier")
    assert "--estimator" in err
    # A table that is too large for answers without training.
    (tmp_path / "many.csv").write_text("\n".join(["age,buys", *(f"{row},{row % 2}" for row in range(1001))]))
    few = ("--target", "buys", "--out", tmp_path / "model", "--seed", "1", "--variants", "4")
    code, out, err = run("fit", tmp_path / "many.csv", *few)
    assert (code, out) == (2, "")
    assert err.startswith("heedful: --variants is no option of DatapointClassifier")
    assert not (tmp_path / "model").exists()


def test_what_is_wrong_with_a_file_is_said_of_the_file(run, people, tmp_path):
    model = tmp_path / "model"
    assert run("fit", people, "--target", "buys", "--out", model, "--variants", "1")[0] == 0
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "noise.csv").write_bytes(bytes(range(128, 256)))
    (tmp_path / "head.csv").write_text("age,city,since\n")
    (tmp_path / "few.csv").write_text("age,since\n30,2020-02-01\n")
    (tmp_path / "many.csv").write_text("age,city,since,pets\n30,Bern,2020-02-01,2\n")
    (tmp_path / "waves.ts").write_text("@data\n")
    new = ("--target", "buys", "--out", tmp_path / "new")
    for arguments, told in (
        (("predict", model, tmp_path / "few.csv"), "few.csv has no column city, which the model was fitted on"),
        (("predict", model, tmp_path / "many.csv"), "many.csv has a column pets, which the model was not fitted on"),
        (("score", model, tmp_path / "many.csv"), "many.csv has no column buys, with the answers"),
        (("predict", model, tmp_path / "head.csv"), "head.csv has no rows"),
        (("fit", tmp_path / "head.csv", *new), "head.csv has no rows"),
        (("predict", model, tmp_path / "empty.csv"), "empty.csv is empty"),
        (("fit", tmp_path / "empty.csv", *new), "empty.csv is empty"),
        (("fit", tmp_path / "noise.csv", *new), "noise.csv is not text in UTF-8; convert it first"),
        (("fit", tmp_path, *new), f"{tmp_path} is a folder; give a file"),
        (("fit", "--out", "new", tmp_path), f"{tmp_path} is a folder; give a file"),
        (("fit", tmp_path / "waves.ts", *new), "--target names a column of a table"),
        (("impute", model, people), "holds an InContextClassifier"),
    ):
        assert told in one_line(run(*arguments)), arguments
    # The order of columns is not asked for.
    straight, turned = ("age,city,since", "40,Bern,2020-02-03"), ("since,age,city", "2020-02-03,40,Bern")
    answers = []
    for lines in (straight, turned):
        (tmp_path / "one.csv").write_text("\n".join(lines))
        answers.append(run("predict", model, tmp_path / "one.csv", "--proba"))
    assert answers[0] == answers[1]
    assert answers[0][0] == 0


def test_an_array_without_targets_is_said_to_lack_y(run, tmp_path):
    np.savez(tmp_path / "table.npz", X=np.zeros((9, 2)))
    code, _, err = run("fit", tmp_path / "table.npz", "--task", "tables", "--out", tmp_path / "model")
    assert code == 2
    assert "holds no labels; add y" in err


def test_numbers_become_a_regressor(run, people, tmp_path):
    code, _, err = run("fit", people, "--target", "age", "--out", tmp_path / "model", *PEOPLE)
    assert code == 0, err
    assert json.loads((tmp_path / "model" / "config.json").read_text())["estimator"]["type"] == "DatapointRegressor"
    code, _, err = run("fit", people, "--target", "ages", "--out", tmp_path / "new", *PEOPLE)
    assert code != 0
    assert "ages is no column of" in err
