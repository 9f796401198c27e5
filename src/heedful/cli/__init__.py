"""The command line: each command is a thin call of a public function."""

from __future__ import annotations

import json
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from heedful import __version__
from heedful._errors import HeedfulError, InvalidArgument

__all__ = ["app", "main"]

app = typer.Typer(
    name="heedful",
    help="Self-attention to build with and to look into.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEMO = "demo"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def main() -> None:
    """Runs the command line; what goes wrong is told in one line, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        # A token that the terminal cannot show is no reason to stop.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="heedful")
    except (HeedfulError, OSError) as error:
        print("heedful:", " ".join(str(error).split()), file=sys.stderr)
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
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face folder; demo is a small MiniLM.")
    ] = DEMO,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="What the model reads.", show_default="a sentence")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Refuse a longer text.", show_default="the model's limit")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows what each layer of a model looks at while it reads a text.

    Reads this disk alone, never the network.
    """
    from heedful.lens.report import look

    model = str(Path(model).expanduser()) if model else model
    if model != DEMO and not (model and Path(model).exists()):
        raise InvalidArgument(
            f"there is no folder {model!r}; the model comes first, as in: heedful look demo 'A text.'"
        )
    result = look(None if model == DEMO else model, " ".join(text) if text else None, max_tokens=max_tokens)
    typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))


@app.command("doctor")
def _doctor(as_json: AsJson = False) -> None:
    """Tells what is installed here, and which ways to attend run."""
    from heedful.cli.doctor import examine, show

    health = examine()
    if as_json:
        typer.echo(json.dumps(health.to_dict(), indent=2))
    else:
        show(health)
