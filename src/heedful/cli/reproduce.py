"""`heedful reproduce`: one recipe per published table, run from a checkout of the source."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import heedful
from heedful._errors import HeedfulError, InvalidArgument, Unsupported

__all__ = ["Setting", "names", "page", "recipe", "reproduce", "root"]


@dataclass(frozen=True)
class Setting:
    """How a recipe is to run.

    Attributes:
        quick: a short form that exercises the code; its figures are no evidence, and the recipe says so.
        device: where to train, as torch names it.
        work: an existing folder that survives a stop, for finished parts and prepared data.
        say: prints a line of progress.
    """

    quick: bool
    device: str
    work: Path
    say: Callable[[str], None] = field(default=print, repr=False)


def root() -> Path:
    """The checkout that holds the recipes."""
    folder = Path(heedful.__file__).resolve().parents[2]
    if not (folder / "experiments").is_dir():
        raise Unsupported("the recipes lie in experiments/ of heedful's source; run heedful from a checkout of it")
    return folder


def names() -> list[str]:
    """The recipes there are."""
    found = (root() / "experiments").glob("[a-z]*_*.py")
    return sorted(path.stem.replace("_", "-") for path in found)


def recipe(name: str) -> ModuleType:
    """The module of a recipe: its docstring says what is reproduced; `run(setting)` gives JSON, `table(result)` Markdown."""
    if name not in names():
        raise InvalidArgument(f"there is no recipe {name!r}; there are {', '.join(names())}")
    if str(root()) not in sys.path:
        sys.path.insert(0, str(root()))
    return import_module(f"experiments.{name.replace('-', '_')}")


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
) -> tuple[str, Path]:
    """Runs a recipe and writes its JSON; returns the table it makes and the file.

    The file is `experiments/results/NAME.json`, which the repository keeps, or `out`. A quick run goes to the work folder
    unless `out` says otherwise.
    """
    import torch

    module = recipe(name)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise InvalidArgument(f"device must be auto, cpu or cuda; got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device {device} was given, but torch finds no CUDA device here; leave it out for the CPU"
        )
    folder = root() / "experiments" / ".work" / name if work is None else Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    began = time.perf_counter()
    result = module.run(Setting(quick, device, folder, say))
    told = {
        "name": name,
        "command": f"heedful reproduce {name}{' --quick' if quick else ''}",
        "quick": quick,
        "seconds": round(time.perf_counter() - began, 1),
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "heedful": _version()},
        "result": result,
    }
    default = folder / "quick.json" if quick else root() / "experiments" / "results" / f"{name}.json"
    file = default if out is None else Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=1) + "\n")
    return module.table(result), file


def page() -> str:
    """docs/results.md: every recipe with its table, from the JSON that the repository keeps."""
    parts = [
        "# Results\n\nWritten by `make docs` from `experiments/results/`; each table names the command that prints it.\n"
    ]
    for name in names():
        module = recipe(name)
        summary, *more = (module.__doc__ or "").strip().split("\n\n", 1)
        parts.append(f"## {name}\n\n{' '.join(summary.split())}\n")
        parts += [f"{text.strip()}\n" for text in more]
        file = root() / "experiments" / "results" / f"{name}.json"
        if not file.is_file():
            parts.append(f"Not run yet: `heedful reproduce {name}`.\n")
            continue
        told = json.loads(file.read_text())
        where = f"{told['hardware']}, torch {told['versions']['torch']}, the last run {told['seconds']:.0f} s"
        parts.append(f"`{told['command']}` ({where}):\n\n{module.table(told['result']).strip()}\n")
    return "\n".join(parts)


def _version() -> str:
    try:
        return metadata.version("heedful")
    except metadata.PackageNotFoundError:
        return heedful.__version__


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
