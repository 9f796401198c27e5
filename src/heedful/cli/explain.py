"""`heedful explain`: the words whose removal changes a model's answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._errors import InvalidArgument
from heedful.cli.arguments import DEMO, AsJson, Model, Text, TextFile, in_options

if TYPE_CHECKING:
    from heedful.lens.causes import Explanation

__all__ = ["explain"]


def _heads(text: str) -> str | list[int]:
    if text == "all":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"--heads must be all, or numbers with commas between, as 0,3; got {text!r}") from None


def _samples(text: str) -> str | int:
    named = {"hidden-size": "hidden_size", "head-dim": "head_dim"}
    if text.replace("_", "-") in named:
        return named[text.replace("_", "-")]
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 4:
        raise InvalidArgument(f"--samples must be hidden-size, head-dim or a number from 4 on; got {text!r}")
    return number


def explain(
    model: Model = DEMO,
    text: Text = None,
    file: TextFile = None,
    target: Annotated[
        str | None, typer.Option(help="The answer to explain: a label or a word.", show_default="the model's own")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Words with a larger p-value are independent.")] = 0.01,
    layer: Annotated[int, typer.Option(help="Whose attention; -1 is the last.")] = -1,
    heads: Annotated[str, typer.Option(help="all, or numbers: 0,3.")] = "all",
    n_samples: Annotated[
        str, typer.Option("--samples", help="N of the tests: hidden-size, head-dim or a number.")
    ] = "hidden-size",
    covariance: Annotated[str, typer.Option(help="attention, centered, value or output.")] = "attention",
    learner: Annotated[str, typer.Option(help="auto, icd, fci or pc.")] = "auto",
    replace: Annotated[str, typer.Option(help="What a word becomes: auto, mask, drop or pad.")] = "auto",
    task: Annotated[
        str, typer.Option(help="auto, classification, mlm, next-token; embedding leaves the head out.")
    ] = "auto",
    max_size: Annotated[int, typer.Option(help="No sets larger than this.")] = 5,
    max_sets: Annotated[int, typer.Option(help="List so many sets of the smallest size; of single words all.")] = 10,
    max_calls: Annotated[int, typer.Option(help="Ask about so many inputs at most.")] = 2000,
    candidates: Annotated[
        int | None, typer.Option(help="Words that take part, the most attended.", show_default="32")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Of a text that is too long, read as much as the model can.")
    ] = False,
    windows: Annotated[
        bool, typer.Option("--windows", help="Explain a long text window by window, each by itself.")
    ] = False,
    no_baselines: Annotated[bool, typer.Option("--no-baselines", help="The causal search alone.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a page to look at here.")] = None,
    dot: Annotated[Path | None, typer.Option(help="Write the graph as Graphviz source here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the graph here: .png, .svg, .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Finds the smallest sets of words whose removal changes a model's answer.

    Learns the causal graph over the words from attention, removes the sets it
    proposes, and asks the model again; lists every set of the smallest size
    found and the effect of each word. Classifiers, masked and causal language
    models; of an encoder without a head, what changes its embedding. Reads this
    disk alone, never the network.
    """
    from heedful._files import check_place
    from heedful.cli.discover import check_picture, draw_to, write_text
    from heedful.cli.look import model_folder, read_text
    from heedful.lens.looking import SENTENCE

    # Read when torch is loaded: waiting threads sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for place in filter(None, (out, dot, plot)):
        check_place(place)
    check_picture(plot)
    folder = model_folder(model, "explain")
    options: dict[str, Any] = {
        "alpha": alpha, "layer": layer, "heads": _heads(heads), "n_samples": _samples(n_samples), "covariance": covariance,
        "learner": learner, "replace": replace, "max_size": max_size, "max_calls": max_calls, "candidates": candidates,
        "baselines": not no_baselines, "task": task, "max_sets": max_sets, "truncate": truncate,
    }  # fmt: skip
    if windows and any((truncate, out, dot, plot)):
        raise InvalidArgument(
            "--windows prints an explanation for each window; leave --truncate, --out, --dot and --plot out"
        )
    words = read_text(text, file)
    asked = SENTENCE if words is None else words
    # All that can be checked without torch is checked by now.
    from heedful.lens.causes import CausalExplainer

    with bar() as say:
        explainer = CausalExplainer(folder, **options)
        try:
            every = explainer.explain_windows(asked, target, progress=say) if windows else []
            found = every[0] if windows else explainer.explain(asked, target, progress=say)
        except InvalidArgument as error:
            raise InvalidArgument(str(error).replace("(explain_windows)", "(--windows)")) from None
    if windows:
        show_windows(every, as_json)
        return
    if out is not None:
        write_text(out, found.to_html())
    if dot is not None:
        write_text(dot, found.pag.to_dot())
    if plot is not None:
        draw_to(plot, found.plot)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    show(found)
    for path in filter(None, (out, dot, plot)):
        typer.echo(f"written to {path}")


def show_windows(every: list[Explanation], as_json: bool) -> None:
    """The explanations of a long text, one after the other."""
    if as_json:
        typer.echo(json.dumps({"windows": [one.to_dict() for one in every]}, indent=2))
        return
    for one in every:
        typer.echo(f"{one.part[:1].upper()}{one.part[1:]}.")
        show(one)
        typer.echo("")


def show(found: Explanation) -> None:
    """The explanation for people, the answer in bold where the terminal has any."""
    from rich.console import Console
    from rich.text import Text

    from heedful.lens.causes.telling import lines

    console = Console(highlight=False)
    spelled = {"max_sets": "--max-sets", "max_calls": "--max-calls"}
    first, *rest = lines(found, min(console.width, 100), lambda note: in_options(note, spelled))
    console.print(Text(first, "bold"), Text("\n".join(rest)), sep="\n")
