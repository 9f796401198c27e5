"""The command line: each command is a thin call of a public function."""

from __future__ import annotations

import math
import os
import sys
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from heedful import __version__
from heedful._errors import HeedfulError
from heedful.bridges.reading import DEMO
from heedful.cli.arguments import AsJson, Model, Overwrite, Text, TextFile, echo, in_options, spellings
from heedful.cli.corpus import corpus
from heedful.cli.discover import discover
from heedful.cli.events import events
from heedful.cli.explain import explain
from heedful.cli.fit import FitCommand, fit
from heedful.cli.flow import flow
from heedful.cli.plan import plan, seprank
from heedful.cli.predict import impute, predict, score
from heedful.cli.rank import rank
from heedful.cli.symmetry import symmetry

__all__ = ["app", "main"]

app = typer.Typer(
    name="heedful",
    help="Self-attention to build with and to look into.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Runs the command line; an error is one line on standard error, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        # A token that the terminal cannot show is no reason to stop.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Read when torch is loaded: waiting threads sleep. Spinning, they slow this down manifold on a machine with other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        code = _group()(prog_name="heedful", standalone_mode=False)
    except (HeedfulError, OSError) as error:
        _stop(in_options(str(error), spellings(_command())))
    except Exception as error:
        if _is_out_of_memory(error):
            _stop("there is not enough memory for these sizes; give smaller ones")
        # What the command line itself finds wrong; the class lies elsewhere in each version of typer.
        if not hasattr(error, "format_message"):
            raise
        line = f"heedful {sys.argv[1]}" if _command() else "heedful"
        message = error.format_message().strip().removesuffix(".")
        _stop(f"{message}{'' if message.endswith('?') else ';'} see {line} --help")
    sys.exit(code if isinstance(code, int) else 0)


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises RuntimeError for a tensor that the CPU has no room for, and a class of its own on other devices.
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def _command() -> Any:
    """The command that was asked for, or None; of a group of commands, the one in it."""
    command = _group().commands.get(sys.argv[1])
    return getattr(command, "commands", {}).get((sys.argv[2:] or [""])[0], command)


@cache
def _group() -> Any:
    # One for the whole run: a command may learn options while its words are read.
    return typer.main.get_command(app)


def _stop(message: str) -> NoReturn:
    print("heedful:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"heedful {__version__}")
        raise typer.Exit


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("look")
def _look(
    model: Model = DEMO,
    text: Text = None,
    file: TextFile = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Read this many tokens and leave the rest out.", show_default="all")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the report goes.", show_default="report.html")] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Print the summary alone.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Show the report in the browser.")] = False,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone; a report only with --out.")] = False,
) -> None:
    """Shows what a model does while it reads a text: a summary here, and a report to look at.

    Reads this disk alone, never the network.
    """
    from heedful._checks import check_whole
    from heedful._progress import bar
    from heedful.cli.look import check_options, model_folder, read_text, show_page

    place = check_options(out, no_report=no_report, as_json=as_json, open_it=open_it, overwrite=overwrite, file=file)
    check_whole(max_tokens=max_tokens, optional=True)
    folder = model_folder(model, "look")
    words = read_text(text, file)
    # All that can be checked without torch is checked by now.
    from heedful.lens.looking import look

    with bar() as say:
        result = look(folder, words, max_tokens=max_tokens, progress=say)
        written = None if place is None else result.save(place)
    echo(result, as_json)
    if written is not None:
        typer.echo(f"\nreport written to {place}", err=as_json)
        if open_it:
            show_page(written)


@app.command("doctor")
def _doctor(as_json: AsJson = False) -> None:
    """Lists what is installed here and which implementations of attention run."""
    from heedful.cli.doctor import examine, show

    health = examine()
    if as_json:
        echo(health, as_json)
    else:
        show(health)


@app.command("reproduce")
def _reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The recipe; without a name all are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run that exercises the code; no evidence.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    work: Annotated[Path | None, typer.Option(help="Folder for finished parts, to continue after a stop.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    seconds: Annotated[float, typer.Option(help="Begin no further part after so many.", show_default=False)] = math.inf,
    train: Annotated[
        bool, typer.Option("--train", help="Train weights that the package carries anew, and put them in their place.")
    ] = False,
) -> None:
    """Recomputes a published table and prints our numbers beside the paper's."""
    from heedful.cli.reproduce import recipes

    if name is None:
        typer.echo(recipes().listing())
        return
    table, file = recipes().reproduce(
        name, quick=quick, device=device, work=work, out=out, seconds=seconds, train=train
    )
    typer.echo(f"{table}\n\nwritten to {file}")


app.command("explain")(explain)
app.command("flow")(flow)
app.command("discover")(discover)
app.add_typer(events, name="events")
app.add_typer(corpus, name="corpus")
app.command("fit", cls=FitCommand)(fit)
app.command("predict")(predict)
app.command("score")(score)
app.command("impute")(impute)
app.command("rank")(rank)
app.command("symmetry")(symmetry)
app.command("plan")(plan)
app.command("seprank")(seprank)
