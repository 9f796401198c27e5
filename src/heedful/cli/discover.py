"""`heedful discover`: the causal graph behind a covariance or a table of data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._errors import InvalidArgument
from heedful.cli.arguments import AsJson

if TYPE_CHECKING:
    import numpy as np

    from heedful.lens.causes import PAG

__all__ = ["check_picture", "discover", "draw_to", "read_table", "write_text"]

# Edges printed; more are a plane of letters, and --json has them all.
SHOWN = 60


def read_table(file: Path) -> tuple[np.ndarray, list[str] | None]:
    """The numbers of a CSV or npy file, and the names of its columns where a first line has them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.csv").write_text("rain,wet\\n1,0.5\\n0.5,1\\n")
    ...     read_table(Path(folder) / "a.csv")[1]
    ['rain', 'wet']
    """
    import numpy as np

    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    if file.suffix == ".npy":
        try:
            found = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InvalidArgument(f"{file} is no array that numpy saved: {error}") from None
        if found.ndim != 2 or not (np.issubdtype(found.dtype, np.floating) or np.issubdtype(found.dtype, np.integer)):
            raise InvalidArgument(f"{file} must hold a table of numbers; it has shape {found.shape} of {found.dtype}")
        return found.astype(float), None
    try:
        lines = [line for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file} is no text in UTF-8; give a CSV file, or .npy") from None
    if not lines:
        raise InvalidArgument(f"{file} is empty")
    return _numbers(lines, file)


def _numbers(lines: list[str], file: Path) -> tuple[np.ndarray, list[str] | None]:
    import csv

    import numpy as np

    sign = next((one for one in ",;\t" if one in lines[0]), None)
    rows = list(csv.reader(lines, delimiter=sign)) if sign else [line.split() for line in lines]
    rows = [[cell.strip() for cell in row] for row in rows]
    names = None if all(_is_number(cell) for cell in rows[0]) else rows.pop(0)
    # What pandas writes has its labels at the left too.
    if names and rows and len(rows[0]) > 1 and not _is_number(rows[0][0]) and len(names) == len(rows[0]):
        names, rows = names[1:], [row[1:] for row in rows]
    for at, row in enumerate(rows):
        if len(row) != len(rows[0]) or (names and len(row) != len(names)):
            raise InvalidArgument(f"{file}: row {at + 1} has {len(row)} numbers where {len(names or rows[0])} belong")
        wrong = next((cell for cell in row if not _is_number(cell)), None)
        if wrong is not None:
            raise InvalidArgument(f"{file}: {wrong!r:.30} in row {at + 1} is no number")
    if not rows:
        raise InvalidArgument(f"{file} has a line of names and no numbers")
    return np.array(rows, float), names


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def write_text(path: Path, text: str) -> None:
    """Writes a file whose place was checked before the work began."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}; give another file") from None


def check_picture(path: Path | None) -> None:
    """Refuses a picture that matplotlib cannot draw, before the work begins; it knows the format by the name's ending."""
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        from heedful._errors import MissingExtra

        raise MissingExtra("matplotlib", "plot") from None
    if path.suffix and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise InvalidArgument(f"cannot draw {path}: give a name that ends in .png, .svg or .pdf")


def draw_to(path: Path, pag: PAG, highlight: tuple[int, ...] = (), target: int | None = None) -> None:
    """A picture of the graph, whose name was checked before the work began."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    ax = pag.plot(highlight=highlight, target=target)
    figure: Any = ax.figure
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def discover(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, with or without names, or .npy.")],
    samples: Annotated[int | None, typer.Option("--samples", "-n", help="How many samples a covariance was made of.")] = None,
    data: Annotated[bool, typer.Option("--data", help="The file holds samples, one a row, instead of a covariance.")] = False,
    alpha: Annotated[float, typer.Option(help="Pairs with a larger p-value are independent.")] = 0.01,
    learner: Annotated[str, typer.Option(help="icd, fci or pc.")] = "icd",
    selection_bias: Annotated[bool, typer.Option("--selection-bias", help="Allow for selected samples (rules R5-R7).")] = False,
    max_cond_size: Annotated[int | None, typer.Option(help="Condition on no more than so many.", show_default="no end")] = None,
    as_json: AsJson = False,
    dot: Annotated[Path | None, typer.Option(help="Write Graphviz source here.")] = None,
    graphml: Annotated[Path | None, typer.Option(help="Write GraphML here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the graph here: .png, .svg, .pdf.")] = None,
) -> None:  # fmt: skip
    """Learns the causal graph behind a covariance matrix or a table of data.

    a --> b: a is a cause of b. a <-> b: something outside the table moves
    both. A circle o: the independences leave that end open.
    """
    from heedful.cli.look import progress
    from heedful.lens.causes import discover as learn
    from heedful.lens.report import check_place

    for place in filter(None, (dot, graphml, plot)):
        check_place(place)
    check_picture(plot)
    numbers, names = read_table(file.expanduser())
    if data == (samples is not None):
        told = "a table of samples says itself how many there are; leave --samples out" if data else (
            "how many samples was the covariance made of? give --samples, or --data if the file holds the samples"
        )  # fmt: skip
        raise InvalidArgument(told)
    options: dict[str, Any] = {"alpha": alpha, "learner": learner, "names": names, "selection_bias": selection_bias}
    options |= {} if max_cond_size is None else {"max_cond_size": max_cond_size}
    with progress() as say:
        options |= {} if say is None else {"progress": lambda done, total: say("learning", done, total)}
        found = learn(data=numbers, **options) if data else learn(numbers, samples=samples, **options)
    for path, make in ((dot, found.to_dot), (graphml, found.to_graphml)):
        if path is not None:
            write_text(path, make())
    if plot is not None:
        draw_to(plot, found)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else told_of(found))
    if not as_json:
        for path in filter(None, (dot, graphml, plot)):
            typer.echo(f"written to {path}")


def told_of(found: PAG) -> str:
    """The graph in lines."""
    edges = [str(edge) for edge in found.edges()]
    head = f"{found.n} nodes, {len(edges)} edges; {found.learner.upper()}, N = {found.samples}, alpha = {found.alpha:g}"
    lines = [head, *(f"  {edge}" for edge in edges[:SHOWN])]
    if len(edges) > SHOWN:
        lines.append(f"  ... {len(edges) - SHOWN} more; --json prints all")
    confidence = found.confidence
    lines.append(f"{len(found.tests)} tests" + ("" if confidence is None else f", confidence {confidence:.2f}"))
    return "\n".join([*lines, *found.trust().sentences])
