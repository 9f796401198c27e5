"""`heedful events`: what can be said of files of events without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.arguments import AsJson, Overwrite, check_outputs, echo, warnings_in_a_line

events = typer.Typer(help="Looks into files of events without training.", no_args_is_help=True)


@events.callback()
def _start() -> None:
    pass


@events.command("periods")
def periods(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help=".csv or .parquet with a row for each event, or .npz with times and offsets."
        ),
    ],
    sequence: Annotated[str, typer.Option(help="Column that says of which sequence a row is.")] = "sequence",
    time_column: Annotated[str, typer.Option(help="Column with the time: numbers, or dates.")] = "time",
    type: Annotated[str, typer.Option(help="Column with the type, where there is one.")] = "type",
    sort: Annotated[bool, typer.Option("--sort", help="Bring events in the order of their times.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the periodogram here.", show_default="not drawn")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Finds cycles in the times of events and in their types, each with its significance.

    Periods are in the unit of the times; of dates, in seconds.
    """
    check_outputs([], [out], overwrite=overwrite, reads=[file])
    # All that can be checked without torch is checked by now.
    from heedful import events as package

    data = package.read(file)
    with warnings_in_a_line():
        result = package.periods(data.X, sequence=sequence, time_column=time_column, type=type, sort=sort)
    echo(result, as_json)
    if out is not None:
        from heedful._plot import save_picture

        save_picture(out, result.plot)
        typer.echo(f"\nperiodogram drawn to {out}", err=as_json)
