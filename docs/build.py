"""Writes docs/reference.md (every public name with its first line), docs/results.md, and the site under docs/_build."""

from __future__ import annotations

import importlib
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = {
    "heedful": "The operator, kernels and errors",
    "heedful.kernels": "Kernels: what a coefficient is",
    "heedful.masks": "Masks: who may attend to whom",
    "heedful.ops": "Implementations of `attend`",
    "heedful.nn": "Layers",
    "heedful.series": "Time series",
    "heedful.events": "Events",
    "heedful.geometry": "Sets of points",
    "heedful.tables": "Tables",
    "heedful.ranking": "Ranking and search",
    "heedful.corpus": "Corpus statistics",
    "heedful.multimodal": "Pictures and texts",
    "heedful.transport": "Optimal transport",
    "heedful.decomposition": "Kernel SVD",
    "heedful.convert": "Pretrained models made linear",
    "heedful.discovery": "Causal discovery",
    "heedful.lens": "Lenses on models",
    "heedful.lens.causes": "Causal graphs and explanations",
    "heedful.lens.flows": "Attention between kinds of tokens",
    "heedful.lens.symmetry": "The symmetry laboratory",
    "heedful.lens.depth": "The depth planner",
    "heedful.lens.transport": "How points and tokens move",
    "heedful.bridges.transformers": "Hugging Face models",
}


def reference() -> str:
    """The page, from `__all__` and the docstrings."""
    from heedful.cli.reproduce import recipes

    parts = [
        "# Reference\n\nWritten by `make docs`. Each name's docstring holds its equation, shapes and an example.\n"
    ]
    for name, title in PACKAGES.items():
        module = importlib.import_module(name)
        rows = [(f"`{public}`", summary(getattr(module, public))) for public in module.__all__]
        parts.append(f"## {title}\n\n`{name}`\n\n{recipes().Table(['name', ''], rows)}\n")
    return "\n".join(parts)


def summary(thing: object) -> str:
    if isinstance(thing, int):
        return f"The number {thing}."
    described = inspect.ismodule(thing) or inspect.isclass(thing) or callable(thing)
    if not described:
        thing = type(thing)
    doc = inspect.getdoc(thing) or ""
    return " ".join(doc.split("\n\n")[0].split())


def names() -> Iterator[tuple[str, str]]:
    """Every public name with its summary, for the search."""
    for name in PACKAGES:
        module = importlib.import_module(name)
        yield from ((f"{name}.{public}", summary(getattr(module, public))) for public in module.__all__)


def main() -> None:
    import pages
    from heedful.cli.reproduce import recipes

    (HERE / "reference.md").write_text(reference())
    (HERE / "results.md").write_text(recipes().page())
    folder = HERE / "_build"
    shutil.rmtree(folder, ignore_errors=True)
    pages.write_names(folder / "api", "heedful")
    pages.write_report(folder / "report.html")
    pages.write_guides(folder, names(), pages.write_gallery(folder))
    print(f"wrote {HERE / 'reference.md'}, {HERE / 'results.md'} and {folder / 'index.html'}")


if __name__ == "__main__":
    main()
