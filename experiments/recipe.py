"""What a recipe is: `run(setting)` gives JSON, `tables(result)` what is shown of it; run, kept and collected here.

A recipe is a module `experiments/<name_with_underscores>.py`; its docstring says what is reproduced and by which protocol.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import heedful
from experiments.store import Store, processes
from heedful._errors import HeedfulError, InvalidArgument

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """How a recipe is to run.

    Attributes:
        quick: a short form that exercises the code; its figures are no evidence, and the page says so.
        device: where to train, as torch names it.
        work: an existing folder that survives a stop, for finished parts and prepared data.
        say: prints a line of progress.
        seconds: after so many no further part is begun; the next run goes on.
        train: whether weights that the package carries are trained anew, and put in their place.
    """

    quick: bool
    device: str
    work: Path
    say: Callable[[str], None] = field(default=print, repr=False)
    seconds: float = math.inf
    train: bool = False

    @property
    def jobs(self) -> int:
        """Processes for parts that run beside one another."""
        return 1 if self.quick else processes()

    def store(self, name: str = "parts") -> Store:
        """Finished parts; those of a quick run by themselves."""
        return Store(self.work / (f"{name}-quick" if self.quick else name), self.say, self.seconds)


@dataclass(frozen=True)
class Table:
    """Rows under columns, as Markdown. `paper` names the column of published figures, `control` the row or column that could embarrass ours."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]
    paper: str = ""
    control: str = ""

    def __post_init__(self) -> None:
        rows = tuple(tuple("" if cell is None else _cell(str(cell)) for cell in row) for row in self.rows)
        object.__setattr__(self, "rows", rows)
        if any(len(row) != len(self.columns) for row in rows):
            raise InvalidArgument(f"a row of the table has not {len(self.columns)} cells, as {', '.join(self.columns)}")
        if self.paper and self.paper not in self.columns:
            raise InvalidArgument(f"there is no column {self.paper!r} for published figures")
        if self.control and self.control not in (*self.columns, *(row[0] for row in rows)):
            raise InvalidArgument(f"there is no row or column {self.control!r} for the control")

    def __str__(self) -> str:
        head, *body = (
            "".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (self.columns, *self.rows)
        )
        return "\n".join([head, f"|{'---|' * len(self.columns)}", *body])


@dataclass(frozen=True)
class Bar:
    """What was wanted of a figure, and the verdict; without a bound the value says itself whether it is met."""

    what: str
    value: float | None
    bound: float | None = None
    at_least: bool = True
    shown: str = "g"  # how figures are written

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "no figure"
        if self.bound is None:
            good = bool(self.value)
        else:
            good = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "met" if good else "MISSED"

    @property
    def wanted(self) -> str:
        return "" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.bound:g}"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """What, the figure, the bar and the verdict, as a row of a table."""
        return self.what, "" if self.value is None else format(self.value, self.shown), self.wanted, self.verdict

    def __str__(self) -> str:
        what, value, wanted, verdict = self.cells
        return f"- {what}: {verdict}" if self.bound is None else f"- {what}: {value}, wanted {wanted}: {verdict}"


def _cell(text: str) -> str:
    """On one line; a bar would end the cell, one behind a backslash is a norm in an equation."""
    return re.sub(r"(?<!\\)\|", r"\\|", text).replace("\n", " ")


Block = str | Table | Bar


class Recipe(Protocol):
    """The module of a recipe."""

    __doc__: str | None

    def run(self, setting: Setting) -> dict[str, Any]: ...

    def tables(self, result: dict[str, Any]) -> Iterable[Block]: ...


def names() -> list[str]:
    """The recipes there are."""
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("[a-z]*_*.py"))


def recipe(name: str) -> Recipe:
    """A recipe by its name."""
    if name not in names():
        raise InvalidArgument(f"there is no recipe {name!r}; there are {', '.join(names())}")
    return import_module(f"experiments.{name.replace('-', '_')}")  # type: ignore[return-value]


def text(module: Recipe, result: dict[str, Any]) -> str:
    """A result as Markdown: paragraphs and tables apart, lines of a list together."""
    blocks: list[Block] = ["A quick run: no evidence."] if result.get("quick") else []
    blocks += module.tables(result)

    def lines() -> Iterator[str]:
        listed = False
        for block in map(str, filter(None, blocks)):
            item = block.lstrip().startswith("- ")
            if not (listed and item):
                yield ""
            yield block
            listed = item

    return "\n".join(lines()).strip()


def hardware(device: str) -> str:
    """What a recipe ran on, in words."""
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else f"{os.cpu_count()} CPU cores"


def reproduce(
    name: str,
    *,
    quick: bool = False,
    device: str = "auto",
    work: str | Path | None = None,
    out: str | Path | None = None,
    seconds: float = math.inf,
    train: bool = False,
) -> tuple[str, Path]:
    """Runs a recipe and writes its JSON; returns the Markdown it makes and the file.

    The file is `experiments/results/NAME.json`, which the repository keeps, or `out`. A quick run goes to the work folder
    unless `out` says otherwise. `train` is for recipes of weights that the package carries.
    """
    import torch

    module = recipe(name)
    if train and not getattr(module, "TRAINS", False):
        raise InvalidArgument(f"{name} makes no weights of the package; leave --train out")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise InvalidArgument(f"device must be auto, cpu or cuda; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device {device} was given, but torch finds no CUDA device here; leave it out for the CPU"
        )
    folder = FOLDER / ".work" / name if work is None else Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    began = time.perf_counter()
    result = module.run(Setting(quick, device, folder, say, seconds, train))
    record = {
        "name": name,
        "command": f"heedful reproduce {name}{' --train' if train else ''}{' --quick' if quick else ''}",
        "quick": quick,
        "seconds": round(time.perf_counter() - began, 1),
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "heedful": heedful.__version__},
        "result": result,
    }
    default = folder / "quick.json" if quick else FOLDER / "results" / f"{name}.json"
    file = default if out is None else Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
    return text(module, result), file


def page() -> str:
    """docs/results.md: every recipe with its tables, from the JSON that the repository keeps."""
    parts = [
        "# Results\n\nWritten by `make docs` from `experiments/results/`; each table names the command that prints it.\n"
    ]
    for name in names():
        module = recipe(name)
        summary, *more = (module.__doc__ or "").strip().split("\n\n", 1)
        parts.append(f"## {name}\n\n{' '.join(summary.split())}\n")
        parts += [f"{paragraphs.strip()}\n" for paragraphs in more]
        file = FOLDER / "results" / f"{name}.json"
        if not file.is_file():
            parts.append(f"Not run yet: `heedful reproduce {name}`.\n")
            continue
        record = json.loads(file.read_text())
        where = f"{record['hardware']}, torch {record['versions']['torch']}, the last run {record['seconds']:.0f} s"
        parts.append(f"`{record['command']}` ({where}):\n\n{text(module, record['result'])}\n")
    return "\n".join(parts)


def listing() -> str:
    """One line per recipe."""
    lines = []
    for name in names():
        try:
            first = (recipe(name).__doc__ or "").strip().split("\n")[0]
        except (HeedfulError, ImportError) as error:
            first = f"cannot run here: {error}"
        lines.append(f"  {name:<24} {first}")
    return "\n".join(lines)
