"""`heedful fit`, `predict` and `score`: a file in, a model folder out, and its answers for another file."""

from __future__ import annotations

import csv
import inspect
import io
import re
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from heedful._errors import CorruptModel, InvalidArgument
from heedful._files import check_place, located, write
from heedful._tasks import TASKS, task_of
from heedful._text import quantity
from heedful.cli.arguments import AsJson, echo, warnings_in_a_line

if TYPE_CHECKING:
    from heedful._tasks import Task

CONTENTS = " ".join(f"{task.name.capitalize()}: {task.holds}." for task in TASKS.values())
TaskName = Annotated[
    str | None,
    typer.Option(help=f"What the file holds: {', '.join(TASKS)}.", show_default="by its ending and the names in it"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help=CONTENTS)]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that heedful fit wrote.")]

# What the command decides itself, and what is written shorter in the shell.
OWN = ("progress", "checkpoint_dir")
SHORT = {"num_heads": "--heads", "validation_fraction": "--held-out", "random_state": "--seed"}


class FitCommand(TyperCommand):
    """The command with the options of the estimator that fits the file, read off its constructor."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            return super().parse_args(ctx, args)
        own = [each for each in self.params if each.name in inspect.signature(fit).parameters]
        kind, estimators = _estimators(args)
        ctx.meta["heedful.task"] = kind
        # Of two that have an option, it is the first one's.
        asked = [each for one in estimators for each in typer.main.get_command(_asking(one)).params]
        offered = {each.name: each for each in reversed(asked)}
        more = list(reversed(offered.values()))
        self.params = [*own, *more]
        rest = super().parse_args(ctx, args)
        options = {name: ctx.params.pop(name) for name in offered if name in ctx.params}
        # Others are as the estimator has them.
        ctx.obj = {name: value for name, value in options.items() if name == "random_state" or _is_given(ctx, name)}
        return rest


def _is_given(ctx: Any, name: str) -> bool:
    return ctx.get_parameter_source(name).name == "COMMANDLINE"


def fit(
    ctx: typer.Context,
    file: File,
    out: Annotated[Path, typer.Option(help="The model's folder.")],
    task: TaskName = None,
    estimator: Annotated[
        str | None, typer.Option(help="Which estimator.", show_default="one that fits the data")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Trains a model on the data of a file and saves it to a folder.

    If it is killed, the same command continues where it stopped; at most one
    epoch is lost. For a table of up to 1,000 rows nothing is trained: the rows are
    kept, and a network of this package answers by looking at them. --estimator
    DatapointClassifier or DatapointRegressor trains on them.
    """
    kind: Task = ctx.meta["heedful.task"]
    _check_file(file)
    folder = _free(out, overwrite)
    data = _labelled(kind, file, "train", ctx.obj.get("target"))
    checkpoints = folder / "checkpoints"
    estimator = estimator or kind.fitting(data.y, data.X, ctx.obj.keys() - {"random_state"})
    own = {"progress": not quiet, "checkpoint_dir": checkpoints}
    _check_options(kind.estimator(estimator), ctx.obj)
    model = kind.estimator(estimator)(**ctx.obj)
    trains = own.keys() <= model.get_params().keys()
    model.set_params(**own if trains else {})
    try:
        model.fit(data.X, data.y)
    except KeyboardInterrupt:
        typer.echo("heedful: stopped; the same call goes on after the last whole epoch", err=True)
        raise typer.Exit(130) from None
    if hasattr(model, "training_"):
        from heedful.bridges.training import is_first

        if not is_first():
            return
    model.set_params(**{"checkpoint_dir": None, "progress": False} if trains else {})
    model.save_pretrained(folder)
    for left in checkpoints.glob("*.ckpt*"):
        left.unlink()
    with suppress(OSError):  # something of the user's lies there
        checkpoints.rmdir()
    outcome = _outcome(model, data) | {"saved": str(folder)}
    echo(outcome, as_json, _summary)


def _check_options(estimator: type[Any], given: dict[str, Any]) -> None:
    """Where options of several estimators are offered, those given must all be of the one that the data gets."""
    strange = [name for name in given if name not in inspect.signature(estimator).parameters]
    if strange:
        option = SHORT.get(strange[0], f"--{strange[0].replace('_', '-')}")
        raise InvalidArgument(
            f"{option} is no option of {estimator.__name__}, which this file gets with these options; leave it out, or name another by --estimator"
        )


def predict(
    folder: Folder,
    file: File,
    out: Annotated[Path | None, typer.Option(help="Write the table here.", show_default="to standard output")] = None,
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
    if out is not None:
        check_place(out)
    model, kind = _opened(folder, file, task, device)
    if proba and not hasattr(model, "predict_proba"):
        raise InvalidArgument(f"--proba is for classifiers; {folder} holds a {type(model).__name__}")
    if at is not None and not hasattr(model, "times_at"):
        raise InvalidArgument(f"--at is for events; {folder} holds a {type(model).__name__}")
    data = _read(kind, file, "test", getattr(model, "target", None), every=True)
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
    file: File,
    out: Annotated[Path | None, typer.Option(help="Write the table here.", show_default="to standard output")] = None,
    device: Device = "auto",
) -> None:
    """Fills the missing cells of a table by a model that heedful fit made of rows like these.

    Numbers are filled by their prediction, categories by their likeliest level;
    all other cells stay as they are, and so does the column to predict.
    """
    if out is not None:
        check_place(out)
    model, kind = _opened(folder, file, None, device)
    if not hasattr(model, "impute"):
        raise InvalidArgument(
            f"{folder} holds a {type(model).__name__}, which fills no cells; DatapointClassifier and DatapointRegressor do"
        )
    if file.suffix == ".npz":
        raise InvalidArgument(f"{file} is no .csv or .parquet; impute writes a table with the names of its columns")
    with warnings_in_a_line():
        filled = model.impute(kind.read(file, "test").X)
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


def score(folder: Folder, file: File, task: TaskName = None, device: Device = "auto", as_json: AsJson = False) -> None:
    """Computes the metric of a model, such as accuracy, on the labelled cases of a file.

    Of events every one is predicted from those before it, first with its time
    unknown and then with its time known.
    """
    model, kind = _opened(folder, file, task, device)
    data = _labelled(kind, file, "test", getattr(model, "target", None))
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


def _estimators(args: list[str]) -> tuple[Task, list[type[Any]]]:
    """The task and the estimator that the words of a command mean; those that it offers where they do not tell."""
    options = dict(pairwise(args)) | dict(word.split("=", 1) for word in args if "=" in word)
    if "--task" not in options and {"--sequence", "--time-column"} & options.keys():
        options["--task"] = "events"  # no other files have columns to be named
    elif "--task" not in options and "--target" in options:
        options["--task"] = "tables"
    files = [word for word in args if any(word.endswith(end) for task in TASKS.values() for end in task.endings)]
    if {"--help", "-h"} & set(args):
        there = [Path(word) for word in files if Path(word).expanduser().is_file()]
        kind = TASKS.get(options.get("--task", "")) or (task_of(there[0]) if there else next(iter(TASKS.values())))
    else:
        # What can be known before the estimator, and torch with it, is imported.
        others = [word for word in args if Path(word).suffix and not word.startswith("-")]
        kind = task_of(Path((files or others or ["FILE"])[0]), options.get("--task"))
        if files and not any(Path(word).expanduser().is_file() for word in files):
            _check_file(Path(files[0]))
        if "--out" not in options:
            raise InvalidArgument("--out is missing; name the model's folder")
    name = options.get("--estimator")
    names = (name,) if name in kind.estimators else kind.offers or kind.estimators[:1]
    return kind, [kind.estimator(each) for each in names]


def _asking(estimator: type[Any]) -> typer.Typer:
    """A command whose options are the parameters of an estimator's constructor."""
    texts, hints = _documented(estimator), get_type_hints(estimator.__init__)
    options = []
    for parameter in inspect.signature(estimator).parameters.values():
        kinds = _kinds(hints[parameter.name])
        if parameter.name in OWN or not kinds:
            continue
        default = 0 if parameter.name == "random_state" else parameter.default
        shown: dict[str, Any] = {"help": texts.get(parameter.name), "rich_help_panel": estimator.__name__}
        if kinds != [bool]:
            shown |= {"parser": partial(_value, kinds), "metavar": "|".join(_word(kind) for kind in kinds)}
        names = (SHORT[parameter.name],) if parameter.name in SHORT else ()
        option = typer.Option(*names, show_default=default is not None, **shown)
        annotation: Any = Annotated[bool, option] if kinds == [bool] else Annotated[Any, option]
        options.append(
            inspect.Parameter(parameter.name, parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def ask(**settings: Any) -> None: ...

    ask.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(ask)
    return app


def _kinds(annotation: Any) -> list[Any]:
    """What of an annotation can be written in the shell: numbers, words, truth values, and none."""
    if get_origin(annotation) is Literal:
        return [str]
    parts = get_args(annotation) or (annotation,)
    plain = [kind for kind in (int, float, bool, str) if kind in parts]
    return plain and [*plain, *([NoneType] if NoneType in parts else [])]


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "none"}


def _word(kind: Any) -> str:
    return {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT", NoneType: "none"}[kind]


def _value(kinds: list[Any], text: str) -> Any:
    if not isinstance(text, str):
        return text
    if NoneType in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind is not bool:
            with suppress(ValueError, TypeError):
                return kind(text)
    wanted = " or ".join(_WORDS[kind] for kind in kinds)
    raise typer.BadParameter(f"must be {wanted}; got {text!r}")


def _documented(estimator: type[Any]) -> dict[str, str]:
    """The first sentence on each parameter in the docstring's Args."""
    text = inspect.getdoc(estimator) or ""
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n {8,}.*)*)", section[1] if section else "", re.MULTILINE)
    plain = {names: " ".join(re.sub(r'`"?|"?`', "", words).split()) for names, words in entries}
    return {
        name: (words[:1].upper() + words[1:]).split(". ")[0].rstrip(".") + "."
        for names, words in plain.items()
        for name in names.split(", ")
    }


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
    _check_file(file)
    # All that can be checked without torch is checked by now.
    from heedful.bridges.estimator import Estimator

    model = Estimator.from_pretrained(folder)
    name = type(model).__name__
    if kind is None:
        kind = next((one for one in TASKS.values() if name in one.estimators and file.suffix in one.endings), None)
    if kind is None or name not in kind.estimators:
        raise InvalidArgument(f"{folder} holds a {name}, which does not read {file.suffix} files")
    return model.set_params(device=device), kind


def _read(kind: Task, file: Path, split: str, target: str | None, every: bool = False) -> Any:
    """What a file holds; of a table whose target has a name that column is y. With `every`, also rows in which it is missing."""
    data = kind.read(file, split)
    return data.labelled_by(target, every=every) if hasattr(data, "labelled_by") else data


def _labelled(kind: Task, file: Path, split: str, target: str | None = None) -> Any:
    data = _read(kind, file, split, target)
    if data.y is not None or not kind.labelled:
        return data
    if not hasattr(data, "labelled_by") or not hasattr(data.X, "columns"):
        raise InvalidArgument(f"{file} holds no labels; add y, one for each case")
    names = ", ".join(map(str, data.X.columns[:8]))
    wrong = "--target is missing" if target is None else f"target={target!r} is no column of {file}"
    others = "; ".join(
        f"{one.name}: {', '.join(one.endings[file.suffix])}" for one in TASKS.values() if one.endings.get(file.suffix)
    )
    raise InvalidArgument(
        f"{wrong}; name the column to predict, one of {names}. Files of other kinds are known by columns ({others}), or by --task"
    )


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


def _check_file(file: Path) -> None:
    if not file.expanduser().is_file():
        raise InvalidArgument(f"there is no file {file}")


def _free(out: Path, overwrite: bool) -> Path:
    folder = out.expanduser()
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; name a folder")
    if (folder / "config.json").exists() and not overwrite:
        raise InvalidArgument(f"{folder} holds a model; name another folder, or give --overwrite to replace it")
    return folder


def _outcome(model: Any, data: Any) -> dict[str, Any]:
    if hasattr(model, "loo_score_"):
        name = type(model).__name__
        return {"data": repr(data), "estimator": name, f"leave_one_out_{model.metric}": model.loo_score_}
    if not hasattr(model, "training_"):
        return {"data": repr(data), "estimator": type(model).__name__, **_prefixed(model.held_out())}
    training = model.training_
    return {
        "data": repr(data),
        "epochs": len(training.epochs),
        "best_epoch": training.best,
        "resumed_after_epoch": training.resumed or None,
        **_prefixed({name: training.measured.get(name) for name in (*training.measured, model.metric, "loss")}),
    }


def _prefixed(measured: dict[str, Any]) -> dict[str, Any]:
    return {f"held_out_{name}": value for name, value in measured.items()}


def _summary(outcome: dict[str, Any]) -> str:
    trained = (
        f"nothing is trained: {outcome.get('estimator')} looks at these rows for each answer, by weights that learned from synthetic tables; "
        "--estimator DatapointClassifier or DatapointRegressor trains on them"
    )
    if "epochs" in outcome:
        again = f", going on after epoch {outcome['resumed_after_epoch']}" if outcome["resumed_after_epoch"] else ""
        trained = f"trained for {quantity(outcome['epochs'], 'epoch')}{again}; the best is {outcome['best_epoch']}"
    alone = [name for name in outcome if name.startswith("leave_one_out_")]
    if alone:
        trained = f"{outcome['estimator']}: convolution features and a ridge, without training; --method network trains a network"
        trained = trained if outcome["estimator"] == "SeriesClassifier" else trained.split(";")[0]
    measured = [f"leave-one-out {name.removeprefix('leave_one_out_')} {outcome[name]:.4f}" for name in alone]
    measured += [
        f"held-out {name.removeprefix('held_out_')} {value:.4f}"
        for name, value in outcome.items()
        if name.startswith("held_out_") and name != "held_out_loss" and value is not None
    ]
    return "\n".join((outcome["data"], trained, *measured, f"saved to {outcome['saved']}"))
