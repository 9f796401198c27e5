"""What synthetic tables look like: a panel for each kind of target that `heedful.tables.prior` draws.

A network that answers tables without training has seen tables like these, a million of them. Each panel is one table with two columns, of 150 the one
that can be seen best in a plane, its rows in the colour of their class. Lines and
trees one would expect; rules ("this column above, that one below"), products (neither column says anything by itself), waves and counts are there so that the network has
met such laws before. Noise in the classes is part of it: some tables cannot be told apart by anybody.

Run `python gallery/plot_prior.py [picture.png]`. It takes some seconds, needs the extra plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor

from heedful.tables.prior import TARGETS, Draws, Shape, draw

ROWS, TRIED = 500, 150


def clear(values: Tensor, target: Tensor) -> float:
    """How well a table can be seen in a plane: by how much more often a row's nearest one has its class than a random one; nothing where cells lie on few values or far out."""
    kinds = int(target.max()) + 1
    if values.isnan().any() or not 2 <= kinds <= 4 or min(len(column.unique()) for column in values.T) < ROWS / 4:
        return 0.0
    points = (values - values.mean(0)) / values.std(0)
    if points.abs().max() > 4:
        return 0.0
    near = torch.cdist(points, points).fill_diagonal_(torch.inf).argmin(1)
    shares = target.bincount() / len(target)
    return float((target[near] == target).float().mean() - shares.max())


def main(picture: Path) -> None:
    figure, panels = pyplot.subplots(2, 5, figsize=(15, 6.4), layout="constrained")
    for ax, (name, (_, share)) in zip(panels.flat, TARGETS.items(), strict=True):
        tables = draw(TRIED, Shape(ROWS, 0, 2), Draws(7), part=1, targets=[name])
        best = max(
            range(TRIED), key=[clear(*pair) for pair in zip(tables.values, tables.target, strict=True)].__getitem__
        )
        ax.scatter(*tables.values[best].T, c=tables.target[best], cmap="tab10", vmin=0, vmax=9, s=8, linewidths=0)
        ax.set(title=f"{name} ({share:.0%} of tables)", xticks=[], yticks=[])
    figure.supxlabel("first column")
    figure.supylabel("second column")
    figure.savefig(picture, dpi=110)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("prior.png"))
