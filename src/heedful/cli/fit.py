"""`heedful fit` and `heedful predict`: a file in, a model folder out, and its answers for another file."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._errors import CorruptModel, InvalidArgument
from heedful._pretrained import located
from heedful._tasks import TASKS
from heedful._text import quantity
from heedful.cli.arguments import AsJson

if TYPE_CHECKING:
    import numpy as np

    from heedful.series import SeriesClassifier, SeriesData

__all__ = ["fit", "predict"]

Task = Annotated[
    str | None, typer.Option(help=f"What the file holds: {', '.join(TASKS)}.", show_default="by its ending")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]


def fit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="series.npz with X and y, or X_train and y_train; or .ts.")],
    out: Annotated[Path, typer.Option(help="The model's folder.")],
    task: Task = None,
    attention: Annotated[
        str, typer.Option(help="softmax, primal, linear, none; or a layer each: softmax+primal.")
    ] = "softmax+primal",
    layers: Annotated[int | None, typer.Option(help="Layers; the first name is repeated.", show_default="2")] = None,
    embed_dim: Annotated[int, typer.Option(help="Width of the network.")] = 64,
    num_heads: Annotated[int, typer.Option("--heads", help="Heads; they must divide the width.")] = 8,
    dropout: Annotated[float, typer.Option(help="Dropout.")] = 0.1,
    rank: Annotated[int, typer.Option(help="Rank of primal layers.")] = 10,
    eta: Annotated[float, typer.Option(help="Weight of the primal layers' loss.")] = 0.1,
    head: Annotated[str, typer.Option(help="flatten (weights for each step) or mean.")] = "flatten",
    epochs: Annotated[int, typer.Option(help="Passes over the data, at most.")] = 100,
    batch_size: Annotated[int | None, typer.Option(help="Series in a batch.", show_default="16 to 256, by their number")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    validation_fraction: Annotated[float, typer.Option("--held-out", help="Share of the series to hold out; 0 for none.")] = 0.2,
    patience: Annotated[int, typer.Option(help="Stop after this many epochs without a better held-out loss.")] = 20,
    random_state: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of everything random.")] = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Trains a classifier on the series of a file and saves it to a folder.

    If it is killed, the same command continues where it stopped; at most one
    epoch is lost.
    """
    _wait_asleep()
    kind = TASKS[_task(task, file)]
    _check_file(file)
    folder = _free(out, overwrite)
    room = import_module(kind.room)
    data = room.read(file)
    if data.y is None:
        raise InvalidArgument(f"{file} holds series without labels; add y, one label for each series")
    checkpoints = folder / "checkpoints"
    options: dict[str, Any] = {
        "layers": layers, "embed_dim": embed_dim, "num_heads": num_heads, "dropout": dropout, "rank": rank, "eta": eta, "head": head,
        "epochs": epochs, "batch_size": "auto" if batch_size is None else batch_size, "lr": lr, "validation_fraction": validation_fraction or None,
        "patience": patience, "random_state": random_state, "device": device, "progress": not quiet, "checkpoint_dir": checkpoints,
    }  # fmt: skip
    model: SeriesClassifier = room.SeriesClassifier(attention, **options)
    try:
        model.fit(data.X, data.y)
    except KeyboardInterrupt:
        typer.echo("heedful: stopped; the same call goes on after the last whole epoch", err=True)
        raise typer.Exit(130) from None
    model.set_params(checkpoint_dir=None, progress=False)
    model.save_pretrained(folder)
    for left in checkpoints.glob("*.ckpt*"):
        left.unlink()
    with suppress(OSError):  # something of the user's lies there
        checkpoints.rmdir()
    outcome = _outcome(model, data) | {"saved": str(folder)}
    typer.echo(json.dumps(outcome, indent=2) if as_json else _summary(outcome))


def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that heedful fit wrote.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="series.npz with X or X_test; or .ts.")],
    out: Annotated[Path | None, typer.Option(help="Write the table here.", show_default="to standard output")] = None,
    proba: Annotated[bool, typer.Option("--proba", help="A column of probabilities for each class.")] = False,
    task: Task = None,
    device: Device = "auto",
) -> None:
    """Predicts the class of every series in a file, as a table with a row for each.

    Where the file has labels, the accuracy goes to standard error.
    """
    _wait_asleep()
    from heedful._files import check_place

    kind = TASKS[_task(task, file)]
    if out is not None:
        check_place(out)
    if not located(folder).is_dir():
        raise CorruptModel(f"no saved folder at {folder}; give a folder that heedful fit wrote")
    _check_file(file)
    # All that can be checked without torch is checked by now.
    from heedful.bridges.estimator import Classifier, Estimator

    model = Estimator.from_pretrained(folder)
    if type(model).__name__ not in kind.estimators or not isinstance(model, Classifier):
        raise InvalidArgument(f"{folder} holds a {type(model).__name__}, which does not read {file.suffix} files")
    data = import_module(kind.room).read(file, "test")
    model.set_params(device=device)
    with _warnings_in_a_line():
        probabilities = model.predict_proba(data.X)
    answers = model.classes_[probabilities.argmax(1)]
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["case", "prediction", *(map(str, model.classes_) if proba else ())])
    for at, (answer, row) in enumerate(zip(answers.tolist(), probabilities.tolist(), strict=True)):
        rows.writerow([at, answer, *(f"{part:.6g}" for part in (row if proba else ()))])
    if out is None:
        typer.echo(table.getvalue(), nl=False)
    else:
        out.expanduser().write_text(table.getvalue())
        typer.echo(f"{quantity(len(answers), 'answer')} written to {out}")
    if data.y is not None:
        foreign = _foreign(data.y, model.classes_)
        if foreign.any():
            typer.echo(f"heedful: {_unknown(data.y[foreign], model.classes_, len(data.y))}", err=True)
        right = _agreement(answers, data.y)
        typer.echo(f"accuracy {right:.4f} on {len(answers)} labelled series", err=True)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: typer.echo(f"heedful: {message}", err=True)
        yield


def _agreement(answers: np.ndarray, labels: np.ndarray) -> float:
    """The part of the answers that is right."""
    answers, labels = _comparable(answers, labels)
    return float((answers == labels).mean())


def _foreign(labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Which labels are no class of the model."""
    import numpy as np

    labels, classes = _comparable(labels, classes)
    return ~np.isin(labels, classes)


def _comparable(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers are compared as numbers, strings with whatever by their text."""
    return (one.astype(str), other.astype(str)) if "U" in one.dtype.kind + other.dtype.kind else (one, other)


def _unknown(labels: np.ndarray, classes: np.ndarray, cases: int) -> str:
    def brief(names: list[Any]) -> str:
        return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    which = brief(sorted(set(labels.tolist())))
    return (
        f"{len(labels)} of {cases} labels are not classes of this model and count as wrong: {which}; its classes are "
        f"{brief(classes.tolist())}"
    )


def _check_file(file: Path) -> None:
    if not file.expanduser().is_file():
        raise InvalidArgument(f"there is no file {file}")


def _wait_asleep() -> None:
    # Read when torch is loaded: waiting threads sleep. Spinning, they slow this down manifold on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _task(task: str | None, file: Path) -> str:
    """What the file holds, as it was said or by its ending."""
    if task is not None and task not in TASKS:
        raise InvalidArgument(f"--task must be one of {', '.join(TASKS)}; got {task!r}")
    fitting = [name for name, kind in TASKS.items() if file.suffix in kind.endings]
    if task is None and not fitting:
        known = "; ".join(f"{name}: {', '.join(kind.endings)}" for name, kind in TASKS.items())
        raise InvalidArgument(f"cannot tell from its ending what {file} holds; files that are read: {known}")
    return task or fitting[0]


def _free(out: Path, overwrite: bool) -> Path:
    folder = out.expanduser()
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; name a folder")
    if (folder / "config.json").exists() and not overwrite:
        raise InvalidArgument(f"{folder} holds a model; name another folder, or give --overwrite to replace it")
    return folder


def _outcome(model: SeriesClassifier, data: SeriesData) -> dict[str, Any]:
    done = model.training_
    return {
        "data": repr(data),
        "epochs": len(done.epochs),
        "best_epoch": done.best,
        "resumed_after_epoch": done.resumed or None,
        "held_out_accuracy": done.measured.get("accuracy"),
        "held_out_loss": done.measured.get("loss"),
    }


def _summary(outcome: dict[str, Any]) -> str:
    def lines() -> Iterator[str]:
        yield outcome["data"]
        again = f", going on after epoch {outcome['resumed_after_epoch']}" if outcome["resumed_after_epoch"] else ""
        yield f"trained for {quantity(outcome['epochs'], 'epoch')}{again}; the best is {outcome['best_epoch']}"
        if outcome["held_out_accuracy"] is not None:
            yield f"held-out accuracy {outcome['held_out_accuracy']:.4f}"
        yield f"saved to {outcome['saved']}"

    return "\n".join(lines())
