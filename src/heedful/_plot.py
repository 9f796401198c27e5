"""Axes to draw on; the one place outside of `report` that knows matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import InvalidArgument, MissingExtra
from heedful._files import check_place, new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any


def axes(ax: Axes | None, size: tuple[float, float] | None = None) -> Axes:
    """These axes, or new ones; with a size in inches the new ones fill the whole picture."""
    pyplot = _pyplot()
    if ax is not None:
        return ax
    if size is None:
        return pyplot.subplots(layout="constrained")[1]
    ax = pyplot.subplots(figsize=size)[1]
    ax.set_position((0, 0, 1, 1))
    return ax


def whole_ticks(ax: Axes, which: str = "xy") -> None:
    """Places and layers are counted: no ticks between them."""
    from matplotlib.ticker import MaxNLocator

    for name in which:
        getattr(ax, f"{name}axis").set_major_locator(MaxNLocator(integer=True))


def heat_map(ax: Axes | None, values: Any, label: str | None = None, **look: Any) -> Axes:
    """A matrix in colours, rows down, with a bar that says what they mean; `look` goes to `imshow`."""
    ax = axes(ax)
    image = ax.imshow(values, **{"cmap": "cividis", "aspect": "auto"} | look)
    whole_ticks(ax)
    ax.figure.colorbar(image, ax=ax, label=label)
    return ax


def colours(name: str, count: int, end: float = 1.0) -> list[Any]:
    """So many colours along a palette, from its beginning to its end, or to this share of it."""
    from matplotlib import colormaps

    return [colormaps[name](end * at / max(1, count - 1)) for at in range(count)]


def check_picture(path: Path) -> None:
    """Refuses a file that matplotlib cannot draw, before the work begins; it knows the format by the name's ending."""
    check_place(path)
    _pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise InvalidArgument(f"cannot draw {path}: give a name that ends in .png, .svg or .pdf")


def save_picture(path: Path, draw: Callable[[], Axes]) -> None:
    """Draws into a file, whose name was checked before the work began; no screen is needed."""
    pyplot = _pyplot()
    pyplot.switch_backend("Agg")
    figure: Any = draw().figure
    path = check_place(path if path.suffix else path.with_suffix(".png"))
    try:
        with new_file(path) as part:
            figure.savefig(part, dpi=150, format=path.suffix[1:].lower())
    finally:
        pyplot.close(figure)


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtra("matplotlib", "plot") from None
    return pyplot
