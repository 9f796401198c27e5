"""`heedful explain`: the words whose removal changes a model's answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._errors import InvalidArgument
from heedful._files import write
from heedful._plot import save_picture
from heedful._progress import bar
from heedful.bridges.reading import DEMO
from heedful.cli.arguments import (
    AsJson,
    Model,
    Overwrite,
    Text,
    TextFile,
    check_outputs,
    echo,
    in_options,
    with_options,
)
from heedful.lens.causes.settings import ExplainSettings

if TYPE_CHECKING:
    from heedful.lens.causes.result import Explanation


@with_options(ExplainSettings)
def explain(
    model: Model = DEMO,
    text: Text = None,
    file: TextFile = None,
    target: Annotated[
        str | None, typer.Option(help="The answer to explain: a label or a word.", show_default="the model's own")
    ] = None,
    explain_windows: Annotated[
        bool, typer.Option("--windows", help="Explain a long text window by window, each by itself.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write a page to look at here.")] = None,
    dot: Annotated[Path | None, typer.Option(help="Write the graph as Graphviz source here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the graph here: .png, .svg, .pdf.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    **settings: Any,
) -> None:
    """Finds the smallest sets of words whose removal changes a model's answer.

    Learns the causal graph over the words from attention, removes the sets it
    proposes, and asks the model again; lists every set of the smallest size
    found and the effect of each word. Classifiers, masked and causal language
    models; of an encoder without a head, what changes its embedding. Reads this
    disk alone, never the network.
    """
    from heedful.cli.look import model_folder, read_text

    files = check_outputs([out, dot], [plot], overwrite=overwrite, reads=[file])
    folder = model_folder(model, "explain")
    ExplainSettings(**settings)
    if explain_windows and (settings["truncate"] or files):
        raise InvalidArgument(
            "--windows prints an explanation for each window; leave --truncate, --out, --dot and --plot out"
        )
    words = read_text(text, file)
    # All that can be checked without torch is checked by now.
    from heedful.lens.causes import CausalExplainer
    from heedful.lens.looking import SENTENCE

    explainer = CausalExplainer(folder, **settings)
    with bar() as progress:
        if explain_windows:
            windows = explainer.explain_windows(words or SENTENCE, target, progress=progress)
        else:
            result = explainer.explain(words or SENTENCE, target, progress=progress)
    if explain_windows:
        if as_json:
            echo({"windows": windows}, as_json)
            return
        for window in windows:
            typer.echo(f"{window.part[:1].upper()}{window.part[1:]}.")
            _show(window)
            typer.echo("")
        return
    if out is not None:
        write(out, result.to_html())
    if dot is not None:
        write(dot, result.pag.to_dot())
    if plot is not None:
        save_picture(plot, result.plot)
    if as_json:
        echo(result, as_json)
        return
    _show(result)
    for path in files:
        typer.echo(f"written to {path}")


def _show(result: Explanation) -> None:
    """The explanation for people, the answer in bold where the terminal has any."""
    from rich.console import Console
    from rich.text import Text

    from heedful.lens.causes.telling import lines

    console = Console(highlight=False)
    spelled = {"max_sets": "--max-sets", "max_calls": "--max-calls"}
    first, *rest = lines(result, min(console.width, 100), lambda note: in_options(note, spelled))
    console.print(Text(first, "bold"), Text("\n".join(rest)), sep="\n")
