"""`heedful discover`: the causal graph behind a covariance or a table of data."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from heedful._errors import InvalidArgument
from heedful._files import write
from heedful._plot import save_picture
from heedful._progress import bar
from heedful._text import quantity
from heedful.cli.arguments import AsJson, Overwrite, check_outputs, echo

if TYPE_CHECKING:
    import numpy as np

    from heedful.discovery import PAG

# Edges printed; more are a plane of letters, and --json has them all.
SHOWN = 60


class DataFile(NamedTuple):
    """A file of numbers: its values, the names of its columns, and the labels of its rows, where it has any."""

    values: np.ndarray
    names: list[str] | None
    labels: list[str] | None


def read_table(file: Path) -> DataFile:
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
            array = np.load(file, allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise InvalidArgument(f"{file} is no array that numpy saved: {error}") from None
        if array.ndim != 2 or array.dtype.kind not in "iuf":
            raise InvalidArgument(f"{file} must hold a table of numbers; it has shape {array.shape} of {array.dtype}")
        return DataFile(array.astype(float), None, None)
    try:
        lines = [line for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file} is no text in UTF-8; give a CSV file, or .npy") from None
    if not lines:
        raise InvalidArgument(f"{file} is empty")
    return _numbers(lines, file)


def _numbers(lines: list[str], file: Path) -> DataFile:
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
            missing, text = (
                "leave out rows with missing values, or fill them",
                "leave the column out, or write numbers for its values",
            )
            advice = missing if _is_missing(cell) else text
            raise InvalidArgument(f"{file}: {cell!r:.30} in row {at} of {where} is no number; {advice}")
    return DataFile(np.array(rows, float), names, labels)


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
    overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Learns the causal graph behind a covariance matrix or a table of data.

    a --> b: a causes b. a <-> b: an unobserved variable causes both. A circle
    o: the data leave this end of the edge undetermined.
    """
    files = check_outputs([dot, graphml], [plot], overwrite=overwrite, reads=[file])
    if samples is None and not data and file.expanduser().is_file():
        raise InvalidArgument(
            "--samples is missing: how many samples the covariance was computed from; give --data if the file holds the samples"
        )
    table = read_table(file.expanduser())
    labels, names = table.labels or [], table.names or []
    if not data and labels != names and labels and set(labels) == set(names):
        raise InvalidArgument(
            f"{file}: rows and columns of a covariance must have the same order; the first row is {labels[0]!r}, the first "
            f"column {names[0]!r}"
        )
    # All that can be checked without torch is checked by now.
    from heedful.discovery import discover as learn

    with bar() as progress, warnings.catch_warnings():
        # What there is to warn of stands in the graph's trust, which is printed.
        warnings.simplefilter("ignore", UserWarning)
        graph = learn(
            **{"data" if data else "covariance": table.values},
            samples=samples,
            alpha=alpha,
            learner=learner,
            names=table.names,
            max_cond_size=max_cond_size,
            selection_bias=selection_bias,
            progress=progress,
        )
    if labels and data:
        typer.echo(f"the first column ({labels[0]!r}, ...) has no name and was read as labels of the rows", err=True)
    if dot is not None:
        write(dot, graph.to_dot())
    if graphml is not None:
        write(graphml, graph.to_graphml())
    if plot is not None:
        save_picture(plot, lambda: graph.plot(layout="graph"))
    echo(graph, as_json, _summary)
    if not as_json:
        for path in files:
            typer.echo(f"written to {path}")


def _summary(graph: PAG) -> str:
    edges = [str(edge) for edge in graph.edges()]
    size = f"{quantity(graph.n, 'node')}, {quantity(len(edges), 'edge')}"
    lines = [f"{size}; {graph.learner.upper()}, N = {graph.samples}, alpha = {graph.alpha:g}"]
    lines += [f"  {edge}" for edge in edges[:SHOWN]]
    if len(edges) > SHOWN:
        lines.append(f"  ... {len(edges) - SHOWN} more; --json prints all")
    return "\n".join([*lines, quantity(len(graph.tests), "independence test"), *graph.trust().sentences])
