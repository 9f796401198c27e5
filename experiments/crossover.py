"""The empirical protocol: train shapes of equal size, see which depth wins, and where the winner changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.recipe import Table
from experiments.store import Store
from heedful._errors import InvalidArgument, Unsupported
from heedful._plot import axes

if TYPE_CHECKING:
    from heedful._plot import Axes

__all__ = ["Cell", "Crossover", "Trained", "run_crossover"]

# An optimum at the edge of the rates is sought further out at most this often.
EXTENSIONS = 2


@dataclass(frozen=True)
class Cell:
    """A shape to train, the budget it stands for, and the learning rates to try."""

    budget: float
    layers: int
    width: int
    heads: int
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Trained:
    """A shape with its validation loss by `[rate][seed]`, in nats; a model that diverged has infinite loss."""

    budget: float
    layers: int
    width: int
    heads: int
    rates: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    seconds: float = 0.0

    @property
    def params(self) -> int:
        """$12 L d^2$."""
        return 12 * self.layers * self.width**2

    @property
    def means(self) -> list[float]:
        """The loss at each rate, over seeds."""
        return [sum(row) / len(row) for row in self.losses]

    @property
    def best(self) -> int:
        """Which rate has the lowest mean loss."""
        return min(range(len(self.rates)), key=lambda at: self.means[at])

    @property
    def loss(self) -> float:
        return self.means[self.best]

    @property
    def error(self) -> float | None:
        """The standard error of the loss over seeds; None for one seed."""
        row, mean = self.losses[self.best], self.loss
        if len(row) < 2:
            return None
        return math.sqrt(sum((loss - mean) ** 2 for loss in row) / (len(row) - 1) / len(row))

    @property
    def edge(self) -> str | None:
        """`lowest` or `highest` where the best rate is the last one tried on that side, else None."""
        return {0: "lowest", len(self.rates) - 1: "highest"}.get(self.best)

    @property
    def is_evidence(self) -> bool:
        """At least two seeds, and the best rate lies inside the ones tried."""
        return len(self.losses[0]) >= 2 and self.edge is None

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self) | {"rates": list(self.rates), "losses": [_finite(row) for row in self.losses]}
        more = {"loss": self.loss, "error": self.error, "edge": self.edge, "best_rate": self.rates[self.best]}
        return plain | {"params": self.params} | more

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trained:
        """From what `to_dict` gives."""
        losses = tuple(tuple(math.inf if loss is None else loss for loss in row) for row in data["losses"])
        plain = {name: data[name] for name in ("budget", "layers", "width", "heads", "seconds")}
        return cls(**plain, rates=tuple(data["rates"]), losses=losses)


@dataclass(frozen=True)
class Crossover:
    """Every shape that was trained; `complete` is False where time ran out first."""

    cells: tuple[Trained, ...]
    complete: bool = True
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def budgets(self) -> list[float]:
        return sorted({cell.budget for cell in self.cells})

    def of(self, budget: float) -> list[Trained]:
        """The shapes of a budget, by depth."""
        return sorted((cell for cell in self.cells if cell.budget == budget), key=lambda cell: cell.layers)

    def winners(self) -> dict[float, Trained]:
        """The shape with the lowest loss for each budget."""
        return {budget: min(self.of(budget), key=lambda cell: cell.loss) for budget in self.budgets}

    def as_good(self, budget: float) -> list[int]:
        """Depths whose loss is within two standard errors of the lowest, the winner's among them."""
        best = self.winners()[budget]
        noise = {cell.layers: 2 * math.hypot(cell.error or 0.0, best.error or 0.0) for cell in self.of(budget)}
        return [cell.layers for cell in self.of(budget) if cell.loss - best.loss <= noise[cell.layers]]

    @property
    def is_evidence(self) -> bool:
        """Every shape has two seeds or more and a best rate inside those tried."""
        return self.complete and bool(self.cells) and all(cell.is_evidence for cell in self.cells)

    def rows(self) -> list[tuple[int, int, float, int]]:
        """(layers, width, loss, seed) at the best rate, for `fit_law`."""
        return [(c.layers, c.width, loss, seed) for c in self.cells for seed, loss in enumerate(c.losses[c.best])]

    def to_dict(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "is_evidence": self.is_evidence,
            "protocol": self.protocol,
            "winners": {f"{budget:g}": cell.layers for budget, cell in self.winners().items()},
            "cells": [cell.to_dict() for cell in self.cells],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Crossover:
        """From what `to_dict` gives."""
        return cls(tuple(map(Trained.from_dict, data["cells"])), data["complete"], data["protocol"])

    def table(self) -> Table:
        """Budgets down, depths across, the lowest loss of a row in bold, an edge marked by its arrow."""
        depths = sorted({cell.layers for cell in self.cells})
        rows = []
        for budget, winner in self.winners().items():
            cells = {cell.layers: cell for cell in self.of(budget)}
            marks = (_cell(cells[depth], cells[depth] is winner) if depth in cells else "" for depth in depths)
            rows.append([f"{budget / 1e6:g}M", *marks])
        return Table(["12 L d² ≈", *(f"L={depth}" for depth in depths)], rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws loss against parameters, a line for each depth; open marks have their best rate at the edge."""
        ax = axes(ax)
        from matplotlib import colormaps

        depths = sorted({cell.layers for cell in self.cells})
        colours = colormaps["viridis"]
        for at, depth in enumerate(depths):
            line = sorted((c for c in self.cells if c.layers == depth), key=lambda c: c.params)
            colour = colours(at / max(len(depths) - 1, 1) * 0.9)
            sizes, heights = [c.params for c in line], [c.loss for c in line]
            ax.errorbar(sizes, heights, [c.error or 0.0 for c in line], color=colour, label=f"depth {depth}")
            for cell in line:
                face = "white" if cell.edge else colour
                ax.plot(cell.params, cell.loss, marker="o", color=colour, markerfacecolor=face)
        ax.set(xscale="log", xlabel="parameters in layers, 12 L d²", ylabel="validation loss (nats)")
        ax.set_title("Which depth wins at which size")
        ax.legend()
        return ax

    def __str__(self) -> str:
        notes = [] if self.is_evidence else ["not evidence: it needs two seeds, inner best rates and every shape"]
        return "\n".join([str(self.table()), *notes])


def run_crossover(
    tokens: Any,
    valid: Any,
    cells: Sequence[Cell],
    *,
    seeds: Sequence[int] = (0, 1),
    protocol: Any = None,
    device: str = "cpu",
    store: Store | None = None,
    seconds: float = math.inf,
    extend: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Crossover:
    r"""Trains every cell at all its rates and seeds, and reports which depth is best for each budget.

    Shapes of one budget share $N = 12 L d^2$; the depth with the lowest validation loss wins, and the width at which the
    winner changes is what the law $\ln d^* = a + bL$ was fitted to (Levine et al. 2020, section 5). Ours differs in size:
    minutes on one GPU, where the paper trained to convergence; short training favours shallow models.

    Args:
        tokens, valid: the text to train on and the held-out one, 1-d integer tensors or arrays.
        cells: what to train. `stacked.train` trains the models of a cell at once.
        protocol: a `Protocol`; by default that of the GPU recipe.
        store: finished cells; what it holds already is not trained again.
        seconds: no cell is begun that would end later; the result then says `complete=False`.
        extend: where the best rate of a cell is at the edge, try two more beyond it, after all cells, the smallest first.
    """
    import torch

    from experiments.stacked import OutOfTime, Protocol, train

    began = time.perf_counter()
    protocol = protocol or Protocol()
    tokens, valid = (_text(name, text, protocol) for name, text in (("tokens", tokens), ("valid", valid)))
    if not cells or not len(seeds):
        raise InvalidArgument("cells must hold one shape at least, and seeds one number, as in seeds=(0, 1)")
    for cell in cells:
        if not cell.rates or not all(0 < rate < math.inf for rate in cell.rates):
            raise InvalidArgument(f"a cell needs positive learning rates, such as (1e-3, 3e-3); got {cell.rates!r}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"device {device!r} is not available here; give device='cpu', or run it where CUDA is")
    done = {
        _key(cell): Trained.from_dict(store.read(_name(cell))) for cell in cells if store and store.has(_name(cell))
    }

    def finish(cell: Cell, old: Trained | None = None) -> None:
        left = seconds - (time.perf_counter() - began)
        start = time.perf_counter()
        shape = (cell.layers, cell.width, cell.heads)
        losses = train(*shape, cell.rates, seeds, tokens, valid, protocol, device=device, seconds=left, say=say)
        spent = time.perf_counter() - start
        one = Trained(cell.budget, *shape, cell.rates, tuple(map(tuple, losses)), spent)
        one = one if old is None else _joined(old, one)
        done[_key(one)] = one
        say(f"{_name(one)}: {one.loss:.4f} at {one.rates[one.best]:.2g} {one.edge or ''}")
        if store is not None:
            store.keep(_name(one), one.to_dict())

    complete = True
    try:
        for cell in cells:
            if _key(cell) not in done:
                finish(cell)
        for _ in range(EXTENSIONS if extend else 0):
            for cell in cells:
                old = done[_key(cell)]
                if old.edge:
                    finish(Cell(*_shape(old), _beyond(old)), old)
    except OutOfTime as reason:
        say(f"stopped: {reason}")
        complete = False
    trained = tuple(done[_key(cell)] for cell in cells if _key(cell) in done)
    return Crossover(trained, complete, protocol.to_dict() | {"seeds": len(seeds)})


def _text(name: str, text: Any, protocol: Any) -> Any:
    """Tokens as a tensor, each of them a row of the vocabulary."""
    import torch

    try:
        row = torch.as_tensor(text)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{name} must be a list, array or tensor of whole numbers ({error})") from None
    if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise InvalidArgument(f"{name} must be whole numbers in one axis; got {row.dtype} of shape {tuple(row.shape)}")
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < protocol.vocabulary:
        raise InvalidArgument(
            f"{name} must lie from 0 to {protocol.vocabulary - 1}, the protocol's vocabulary; "
            f"got {int(row.min())} to {int(row.max())}"
        )
    return row


def _key(cell: Cell | Trained) -> tuple[float, int, int]:
    return cell.budget, cell.layers, cell.width


def _shape(cell: Trained) -> tuple[float, int, int, int]:
    return cell.budget, cell.layers, cell.width, cell.heads


def _name(cell: Cell | Trained) -> str:
    return f"{cell.budget:g} {cell.layers} x {cell.width}"


def _beyond(cell: Trained) -> tuple[float, ...]:
    """Two rates past the edge, twofold and fourfold."""
    outer, step = (cell.rates[0], 0.5) if cell.edge == "lowest" else (cell.rates[-1], 2.0)
    return (outer * step, outer * step**2)


def _joined(old: Trained, new: Trained) -> Trained:
    pairs = sorted(zip(old.rates + new.rates, old.losses + new.losses, strict=True))
    rates, losses = (tuple(part) for part in zip(*pairs, strict=True))
    return Trained(*_shape(old), rates, losses, old.seconds + new.seconds)


def _finite(row: Sequence[float]) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in row]


def _cell(cell: Trained, wins: bool) -> str:
    loss = f"**{cell.loss:.3f}**" if wins else f"{cell.loss:.3f}"
    error = "" if cell.error is None else f" ± {cell.error:.3f}"
    arrow = {"lowest": "↓", "highest": "↑", None: ""}[cell.edge]
    return f"{loss}{arrow}{error} (d={cell.width})"
