"""Axes to draw on, and pictures in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import InvalidArgument, MissingExtra
from heedful._files import check_place, new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["axes", "check_picture", "save_picture", "whole_ticks"]


def axes(ax: Axes | None) -> Axes:
    """These axes, or new ones; the one place that asks for matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtra("matplotlib", "plot") from None
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


def whole_ticks(ax: Axes, which: str = "xy") -> None:
    """Places, layers and epochs are counted: no ticks between them."""
    from matplotlib.ticker import MaxNLocator

    for name in which:
        getattr(ax, f"{name}axis").set_major_locator(MaxNLocator(integer=True))


def check_picture(path: Path) -> None:
    """Refuses a file that matplotlib cannot draw, before the work begins; it knows the format by the name's ending."""
    check_place(path)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise MissingExtra("matplotlib", "plot") from None
    if path.suffix and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise InvalidArgument(f"cannot draw {path}: give a name that ends in .png, .svg or .pdf")


def save_picture(path: Path, draw: Callable[[], Axes]) -> None:
    """Draws into a file, whose name was checked before the work began; no screen is needed."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    figure: Any = draw().figure
    path = check_place(path if path.suffix else path.with_suffix(".png"))
    try:
        with new_file(path) as part:
            figure.savefig(part, dpi=150, format=path.suffix[1:].lower())
    finally:
        pyplot.close(figure)
