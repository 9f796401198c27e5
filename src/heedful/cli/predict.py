"""`heedful predict`, `score` and `impute`: what a folder that `heedful fit` wrote says of another file."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._errors import CorruptModel, InvalidArgument
from heedful._files import located, write
from heedful._tasks import TASKS, task_of
from heedful._text import quantity, with_article
from heedful.cli.arguments import AsJson, Overwrite, check_outputs, echo, warnings_in_a_line
from heedful.cli.cases import TaskName, check_file, labelled, read

if TYPE_CHECKING:
    from heedful._tasks import Task

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
ENDINGS = ", ".join(dict.fromkeys(end for task in TASKS.values() for end in task.endings))
LIKE = f"Cases like those that the model was fitted on, in a file of that kind ({ENDINGS})"
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that heedful fit wrote.")]


def predict(
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"{LIKE}; labels may be left out.")],
    out: Annotated[Path | None, typer.Option(help="Write the table here.", show_default="to standard output")] = None,
    overwrite: Overwrite = False,
    proba: Annotated[bool, typer.Option("--proba", help="A column of probabilities for each class.")] = False,
    at: Annotated[
        str | None,
        typer.Option(
            help="Events: the time at which the next event happens, a number or a date, or +WAIT behind each last event.",
            show_default="unknown",
        ),
    ] = None,
    task: TaskName = None,
    device: Device = "auto",
) -> None:
    """Predicts the answer for every case in a file, as a table with a row for each.

    Where the file has labels, the model's score goes to standard error. Of
    events it is the next one of every sequence: its likeliest type, and its
    median time.
    """
    check_outputs([out], overwrite=overwrite, reads=[file])
    model, kind = _opened(folder, file, task, device)
    if proba and not hasattr(model, "predict_proba"):
        raise InvalidArgument(f"--proba is for classifiers; {folder} holds {with_article(type(model).__name__)}")
    if at is not None and not hasattr(model, "times_at"):
        raise InvalidArgument(f"--at is for events; {folder} holds {with_article(type(model).__name__)}")
    data = _like(model, read(kind, file, "test", getattr(model, "target", None), every=True), file)
    with warnings_in_a_line():
        given = {} if at is None else {"at": model.times_at(data.X, at)}
        shares: Any = model.predict_proba(data.X, **given) if hasattr(model, "classes_") else None
        answers = model.predict(data.X) if shares is None else model.classes_[shares.argmax(1)]
        beside = model.columns_beside(data.X) if hasattr(model, "columns_beside") else {}
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    head, lines = _lines(answers, getattr(model, "per_point_", False))
    rows.writerow([*head, *beside, *(map(str, model.classes_) if proba else ())])
    for place, line in enumerate(lines):
        more = [column[place] for column in beside.values()]
        rows.writerow([*line, *more, *(f"{part:.6g}" for part in (shares[place].tolist() if proba else ()))])
    if out is None:
        typer.echo(table.getvalue(), nl=False)
    else:
        write(out, table.getvalue())
        typer.echo(f"{quantity(len(answers), 'answer')} written to {out}")
    if data.y is not None:
        typer.echo(f"{model.metric} {_quality(model, data, answers):.4f} on {len(answers)} labelled cases", err=True)


def impute(
    folder: Folder,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A table with the columns that the model was fitted on: .csv or .parquet."),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the table here.", show_default="to standard output")] = None,
    overwrite: Overwrite = False,
    device: Device = "auto",
) -> None:
    """Fills the missing cells of a table by a model that heedful fit made of rows like these.

    Numbers are filled by their prediction, categories by their likeliest level;
    all other cells stay as they are, and so does the column to predict.
    """
    check_outputs([out], overwrite=overwrite, reads=[file])
    model, kind = _opened(folder, file, None, device)
    if not hasattr(model, "impute"):
        raise InvalidArgument(
            f"{folder} holds {with_article(type(model).__name__)}, which fills no cells; DatapointClassifier and DatapointRegressor do"
        )
    if file.suffix == ".npz":
        raise InvalidArgument(f"{file} is no .csv or .parquet; impute writes a table with the names of its columns")
    with warnings_in_a_line():
        filled = model.impute(_like(model, read(kind, file, "test", None), file).X)
    from heedful.bridges.frames import read_table

    # Cells that were there are written as they were.
    frame = read_table(file.expanduser(), text=True)
    for name in filled.columns:
        frame[name] = frame[name].astype(object).where(frame[name].notna(), filled[name].astype(object))
    text = frame.to_csv(index=False)
    if out is None:
        typer.echo(text, nl=False)
        return
    write(out, text)
    typer.echo(f"{quantity(len(frame), 'row')} written to {out}")


def _lines(answers: Any, per_point: bool) -> tuple[list[str], list[list[Any]]]:
    """A table of answers: a row for each case, or for each point of it, and a column for each number."""
    parts = [([at], answer) for at, answer in enumerate(answers)]
    if per_point:
        parts = [([*at, point], answer) for at, case in parts for point, answer in enumerate(case)]
    values = [answer.tolist() for _, answer in parts]
    columns = ["prediction"]
    if isinstance(values[0], list):
        columns = [f"prediction {number}" for number in range(1, 1 + len(values[0]))]
    lines = [
        [*at, *(value if isinstance(value, list) else [value])] for (at, _), value in zip(parts, values, strict=True)
    ]
    return ["case", *(["point"] if per_point else []), *columns], lines


def score(
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"{LIKE}, with their labels.")],
    task: TaskName = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Computes the metric of a model, such as accuracy, on the labelled cases of a file.

    Of events every one is predicted from those before it, first with its time
    unknown and then with its time known.
    """
    model, kind = _opened(folder, file, task, device)
    data = _like(model, labelled(kind, file, "test", getattr(model, "target", None)), file)
    if not kind.labelled:
        with warnings_in_a_line():
            results = model.evaluations(data.X)
        judged = {"data": repr(data), "evaluations": [result.to_dict() for result in results]}
        echo(judged, as_json, lambda _: "\n".join(map(str, (f"{data!r}", *results))))
        return
    with warnings_in_a_line():
        value = _quality(model, data)
    outcome = {"data": repr(data), "cases": len(data), model.metric: value}
    echo(outcome, as_json, lambda _: f"{data!r}\n{model.metric} {value:.4f}")


def _opened(folder: Path, file: Path, task: str | None, device: str) -> tuple[Any, Task]:
    """The model of a folder, and the task that reads its files."""
    # Of packages that read one ending, the one that the model is of.
    kind = (
        task_of(file, task)
        if task is not None or not any(file.suffix in one.endings for one in TASKS.values())
        else None
    )
    if not located(folder).is_dir():
        raise CorruptModel(f"no saved folder at {folder}; give a folder that heedful fit wrote")
    check_file(file)
    # All that can be checked without torch is checked by now.
    from heedful.bridges.estimator import Estimator

    model = Estimator.from_pretrained(folder)
    name = type(model).__name__
    if kind is None:
        kind = next((one for one in TASKS.values() if name in one.estimators and file.suffix in one.endings), None)
    if kind is None or name not in kind.estimators:
        raise InvalidArgument(f"{folder} holds {with_article(name)}, which does not read {file.suffix} files")
    return model.set_params(device=device), kind


def _like(model: Any, data: Any, file: Path) -> Any:
    """The data, of a table with the columns that the model was fitted on, in their order."""
    if not hasattr(data, "labelled_by") or not hasattr(data.X, "columns") or not hasattr(model, "feature_names_in_"):
        return data
    known, there = list(model.feature_names_in_), list(data.X.columns)
    missing = [name for name in known if name not in there]
    others = [name for name in there if name not in known]
    strange = [name for name in others if name != getattr(model, "target", None)]
    if missing:
        raise InvalidArgument(f"{file} has no {_columns(missing)}, which the model was fitted on; add that")
    if strange:
        raise InvalidArgument(
            f"{file} has {_columns(strange, 'a ')}, which the model was not fitted on; leave that out"
        )
    return replace(data, X=data.X[[*known, *others]])


def _columns(names: list[Any], article: str = "") -> str:
    return f"{article}column {names[0]}" if len(names) == 1 else f"columns {_brief(names)}"


def _quality(model: Any, data: Any, answers: Any = None) -> float:
    """The model's metric on labelled data; labels that are no class of a classifier's are named, and count as wrong."""
    if not hasattr(model, "classes_"):
        return float(model.score(data.X, data.y))
    answers = model.predict(data.X) if answers is None else answers
    labels, classes = data.y, model.classes_
    if "U" in labels.dtype.kind + classes.dtype.kind:
        # Numbers are compared as numbers, strings with whatever by their text.
        answers, labels, classes = (part.astype(str) for part in (answers, labels, classes))
    foreign = [at for at, label in enumerate(labels.tolist()) if label not in classes.tolist()]
    if foreign:
        which = _brief(sorted(set(data.y[foreign].tolist())))
        typer.echo(
            f"heedful: {len(foreign)} of {len(labels)} labels are not classes of this model and count as wrong: {which}; its "
            f"classes are {_brief(classes.tolist())}",
            err=True,
        )
    return float((answers == labels).mean())


def _brief(names: list[Any]) -> str:
    return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
