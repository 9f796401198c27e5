"""The crossover protocol in a few minutes on a CPU: it exercises the code and says itself that it is not evidence.

0.05M parameters in the layers at depths 1, 2 and 4, context 64, 200 steps of 8 windows, three rates, one seed, on the text
of `depth-crossover`. Every rate and seed is in the table. No ordering of depths is claimed.
"""

from __future__ import annotations

from typing import Any

from experiments.crossover import Cell, Crossover, run_crossover
from experiments.recipe import Block, Setting, Table
from experiments.stacked import Protocol

RATES = (2e-3, 6e-3, 18e-3)
CELLS = [Cell(0.05e6, 1, 64, 2, RATES), Cell(0.05e6, 2, 48, 2, RATES), Cell(0.05e6, 4, 32, 1, RATES)]


def run(setting: Setting) -> dict[str, Any]:
    import numpy

    from experiments import corpus

    facts = corpus.prepare(setting.work.parent / "depth-crossover", setting.say)
    tokens, valid = (numpy.load(setting.work.parent / "depth-crossover" / f"{part}.npy") for part in ("train", "valid"))
    steps = 5 if setting.quick else 200
    result = run_crossover(
        tokens.astype("int32"),
        valid[:20_000].astype("int32"),
        CELLS,
        seeds=(0,),
        protocol=Protocol(context=64, batch=8, steps=steps, warmup=min(20, steps - 1)),
        device=setting.device,
        extend=False,
        say=setting.say,
    )
    return result.to_dict() | {"corpus": facts}


def tables(result: dict[str, Any]) -> list[Block]:
    crossover = Crossover.from_dict(result)
    rows = [
        [cell.layers, cell.width, f"{rate:g}", seed, f"{loss:.3f}"]
        for cell in crossover.cells
        for rate, losses in zip(cell.rates, cell.losses, strict=True)
        for seed, loss in enumerate(losses)
    ]
    return [str(crossover), Table(["L", "d", "rate", "seed", "loss"], rows)]
