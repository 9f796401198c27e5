"""`heedful discover`: the causal graph behind a covariance or a table of data."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from heedful._errors import InvalidArgument
from heedful._text import quantity
from heedful.cli.arguments import AsJson

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from heedful._plot import Axes
    from heedful.discovery import PAG

__all__ = ["check_picture", "discover", "draw_to", "read_table", "write_text"]

# Edges printed; more are a plane of letters, and --json has them all.
SHOWN = 60


class Table(NamedTuple):
    """A file of numbers: its values, the names of its columns, and the labels of its rows, where it has any."""

    values: np.ndarray
    names: list[str] | None
    labels: list[str] | None


def read_table(file: Path) -> Table:
    """The numbers of a CSV or npy file, with the names and row labels that it has.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.csv").write_text("rain,wet\\n1,0.5\\n0.5,1\\n")
    ...     read_table(Path(folder) / "a.csv").names
    ['rain', 'wet']
    """
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}")
    import numpy as np

    if file.suffix == ".npy":
        try:
            found = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InvalidArgument(f"{file} is no array that numpy saved: {error}") from None
        if found.ndim != 2 or not (np.issubdtype(found.dtype, np.floating) or np.issubdtype(found.dtype, np.integer)):
            raise InvalidArgument(f"{file} must hold a table of numbers; it has shape {found.shape} of {found.dtype}")
        return Table(found.astype(float), None, None)
    try:
        lines = [line for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file} is no text in UTF-8; give a CSV file, or .npy") from None
    if not lines:
        raise InvalidArgument(f"{file} is empty")
    return _numbers(lines, file)


def _numbers(lines: list[str], file: Path) -> Table:
    import csv

    import numpy as np

    sign = next((one for one in ",;\t" if one in lines[0]), None)
    rows = list(csv.reader(lines, delimiter=sign)) if sign else [line.split() for line in lines]
    rows = [[cell.strip() for cell in row] for row in rows]
    names = rows.pop(0) if _is_header(rows) else None
    if not rows:
        raise InvalidArgument(f"{file} has a line of names and no numbers")
    # Labels at the left: pandas writes no name above them, R none at all.
    width = len(rows[0])
    labelled = names is not None and width > 1 and (len(names) == width - 1 or (len(names) == width and not names[0]))
    labels = [row[0] for row in rows if row] if labelled else None
    if names is not None and labels is not None:
        names, rows = names[len(names) - width + 1 :], [row[1:] for row in rows]
    for at, row in enumerate(rows, 1):
        if len(row) != len(rows[0]) or (names and len(row) != len(names)):
            raise InvalidArgument(f"{file}: row {at} has {len(row)} numbers where {len(names or rows[0])} belong")
        for column, cell in enumerate(row):
            if _is_number(cell):
                continue
            where = f"column {names[column]!r}" if names else f"column {column + 1}"
            if _is_missing(cell):
                raise InvalidArgument(
                    f"{file}: {cell!r:.30} in row {at} of {where} is no number; leave out rows with missing values, or fill them"
                )
            raise InvalidArgument(
                f"{file}: {cell!r:.30} in row {at} of {where} is no number; leave the column out, or write numbers for its values"
            )
    return Table(np.array(rows, float), names, labels)


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: it holds text where the second has numbers, or nothing but text."""
    first = [not (_is_number(cell) or _is_missing(cell)) for cell in rows[0]]
    # The numbers that pandas gives to columns without names, behind the gap above its row labels.
    if rows[0][0] == "" and rows[0][1:] == [str(at) for at in range(len(rows[0]) - 1)]:
        return True
    if not any(first) or len(rows) == 1:
        return any(first)
    second = [not (_is_number(cell) or _is_missing(cell)) for cell in rows[1]]
    return (
        len(first) != len(second)
        or all(first)
        or any(one and not other for one, other in zip(first, second, strict=True))
    )


def _is_missing(cell: str) -> bool:
    """Whether a cell of a table says that its number is not known, or not finite."""
    return cell.lower().lstrip("+-") in {"", "nan", "na", "n/a", "<na>", "null", "none", "inf", "infinity", "."}


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


def draw_to(path: Path, draw: Callable[[], Axes]) -> None:
    """A picture, whose name was checked before the work began."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    figure: Any = draw().figure
    try:
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def discover(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, with or without names, or .npy.")],
    samples: Annotated[int | None, typer.Option("--samples", "-n", help="How many samples the covariance was computed from.")] = None,
    data: Annotated[bool, typer.Option("--data", help="The file holds samples, one a row, instead of a covariance.")] = False,
    alpha: Annotated[float, typer.Option(help="Pairs with a larger p-value are independent.")] = 0.01,
    learner: Annotated[str, typer.Option(help="icd, fci or pc.")] = "icd",
    selection_bias: Annotated[bool, typer.Option("--selection-bias", help="Allow for selected samples (rules R5-R7).")] = False,
    max_cond_size: Annotated[int | None, typer.Option(help="Condition on at most this many variables.", show_default="no limit")] = None,
    as_json: AsJson = False,
    dot: Annotated[Path | None, typer.Option(help="Write Graphviz source here.")] = None,
    graphml: Annotated[Path | None, typer.Option(help="Write GraphML here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the graph here: .png, .svg, .pdf.")] = None,
) -> None:  # fmt: skip
    """Learns the causal graph behind a covariance matrix or a table of data.

    a --> b: a causes b. a <-> b: an unobserved variable causes both. A circle
    o: the data leave this end of the edge undetermined.
    """
    from heedful._files import check_place

    for place in filter(None, (dot, graphml, plot)):
        check_place(place)
    check_picture(plot)
    table = read_table(file.expanduser())
    if data == (samples is not None):
        raise InvalidArgument(
            "--data takes the number of samples from the file; leave --samples out"
            if data
            else "a covariance needs --samples, the number of samples it was computed from; give --data if the file holds the samples"
        )
    if (
        not data
        and table.labels
        and table.names
        and table.labels != table.names
        and set(table.labels) == set(table.names)
    ):
        raise InvalidArgument(f"{file}: rows and columns of a covariance must have the same order; the first row is {table.labels[0]!r}, "
                              f"the first column {table.names[0]!r}")  # fmt: skip
    if selection_bias and learner == "pc":
        raise InvalidArgument("--selection-bias is for icd and fci; pc assumes that nothing was selected")
    options: dict[str, Any] = {"alpha": alpha, "learner": learner, "names": table.names, "max_cond_size": max_cond_size}
    options |= {"selection_bias": True} if selection_bias else {}
    # All that can be checked without torch is checked by now.
    from heedful.discovery import discover as learn

    with bar() as say, warnings.catch_warnings():
        # What there is to warn of stands in the graph's trust, which is printed.
        warnings.simplefilter("ignore", UserWarning)
        options |= {} if say is None else {"progress": lambda done, total: say("learning", done, total)}
        found = learn(data=table.values, **options) if data else learn(table.values, samples=samples, **options)
    if table.labels and data:
        typer.echo(
            f"the first column ({table.labels[0]!r}, ...) has no name and was read as labels of the rows", err=True
        )
    for path, make in ((dot, found.to_dot), (graphml, found.to_graphml)):
        if path is not None:
            write_text(path, make())
    if plot is not None:
        draw_to(plot, lambda: found.plot(layout="graph"))
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else summary_of(found))
    if not as_json:
        for path in filter(None, (dot, graphml, plot)):
            typer.echo(f"written to {path}")


def summary_of(found: PAG) -> str:
    """The graph in lines."""
    edges = [str(edge) for edge in found.edges()]
    size = f"{quantity(found.n, 'node')}, {quantity(len(edges), 'edge')}"
    head = f"{size}; {found.learner.upper()}, N = {found.samples}, alpha = {found.alpha:g}"
    lines = [head, *(f"  {edge}" for edge in edges[:SHOWN])]
    if len(edges) > SHOWN:
        lines.append(f"  ... {len(edges) - SHOWN} more; --json prints all")
    lines.append(quantity(len(found.tests), "independence test"))
    return "\n".join([*lines, *found.trust().sentences])
