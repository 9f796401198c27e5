"""`heedful fit`: a file in, a model folder out."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from heedful._errors import InvalidArgument
from heedful._files import check_replaced
from heedful._tasks import HOMES, TASKS, task_of
from heedful._text import quantity
from heedful.cli.arguments import AsJson, echo
from heedful.cli.cases import TaskName, check_file, labelled

if TYPE_CHECKING:
    from heedful._tasks import Task

CONTENTS = " ".join(f"{task.name.capitalize()}: {task.holds}." for task in TASKS.values())
File = Annotated[Path, typer.Argument(metavar="FILE", help=CONTENTS)]

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

    Options depend on the data: `heedful fit FILE --help` or `heedful fit --task
    tables --help` lists them.

    If it is killed, the same command continues where it stopped; at most one
    epoch is lost. For a table of up to 1,000 rows nothing is trained: the rows
    are kept, and a network of this package answers by looking at them.
    --estimator DatapointClassifier or DatapointRegressor trains on them.
    """
    kind: Task = ctx.meta["heedful.task"]
    check_file(file)
    folder = _free(out, overwrite)
    data = labelled(kind, file, "train", ctx.obj.get("target"))
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


def _estimators(args: list[str]) -> tuple[Task, list[type[Any]]]:
    """The task and the estimator that the words of a command mean; those that it offers where they do not tell."""
    options = dict(pairwise(args)) | dict(word.split("=", 1) for word in args if "=" in word)
    if "--task" not in options and {"--sequence", "--time-column"} & options.keys():
        options["--task"] = "events"  # no other files have columns to be named
    files = [word for word in args if any(word.endswith(end) for task in TASKS.values() for end in task.endings)]
    if "--task" not in options and "--target" in options:
        if files and Path(files[0]).suffix not in TASKS["tables"].endings:
            raise InvalidArgument(
                f"--target names a column of a table; {files[0]} is none, its labels stand in it. Leave --target out"
            )
        options.setdefault("--task", "tables")
    if {"--help", "-h"} & set(args):
        kind = _explained([Path(word) for word in files if Path(word).expanduser().is_file()], options)
    else:
        # What can be known before the estimator, and torch with it, is imported.
        alone = [word for before, word in pairwise(["", *args]) if not (before[:1] == "-" or word[:1] == "-")]
        others = [word for word in args if Path(word).suffix and not word.startswith("-")]
        first = Path((files or alone or others or ["FILE"])[0])
        if first.expanduser().is_dir():
            check_file(first)
        kind = task_of(first, options.get("--task"))
        if files and not any(Path(word).expanduser().is_file() for word in files):
            check_file(first)
        if "--out" not in options:
            raise InvalidArgument("--out is missing; name the model's folder")
    name = options.get("--estimator")
    names = (name,) if name in kind.estimators else kind.offers or kind.estimators[:1]
    return kind, [kind.estimator(each) for each in names]


def _explained(files: list[Path], options: dict[str, str]) -> Task:
    """The task whose options the help lists: of the file, of --task or of --estimator; the first where none is named."""
    task, estimator = options.get("--task"), options.get("--estimator")
    if estimator is not None and task is None and not files:
        task = next((one.name for one in TASKS.values() if estimator in one.estimators), None)
        if task is None:
            raise InvalidArgument(f"estimator must be one of {', '.join(HOMES)}; got {estimator!r}")
    kind = task_of((files or [Path("FILE")])[0], task) if task or files else next(iter(TASKS.values()))
    if estimator is not None:
        kind.estimator(estimator)
    return kind


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


def _free(out: Path, overwrite: bool) -> Path:
    folder = out.expanduser()
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; name a folder")
    if (folder / "config.json").exists():
        check_replaced(folder, overwrite, "holds a model", "folder")
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
