"""Axes to draw on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful._errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes(ax: Axes | None) -> Axes:
    """These axes, or new ones; the one place that asks for matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtra("matplotlib", "plot") from None
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


def whole_ticks(ax: Axes) -> None:
    """Places and layers are counted: no ticks between them."""
    from matplotlib.ticker import MaxNLocator

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
