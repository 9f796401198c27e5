"""The crossover protocol in a few minutes on a CPU: it exercises the code and says itself that it is not evidence.

0.05M parameters in the layers at depths 1, 2 and 4, context 64, 200 steps of 8 windows, three rates, one seed, on the text
of `depth-crossover`. Every rate and seed is in the table. No ordering of depths is claimed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.crossover import Cell, Crossover, run_crossover
from experiments.stacked import Protocol

if TYPE_CHECKING:
    from heedful.cli.reproduce import Setting

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


def table(result: dict[str, Any]) -> str:
    found = Crossover.from_dict(result)
    lines = ["| L | d | rate | seed | loss |", "|---|---|---|---|---|"]
    for cell in found.cells:
        for rate, losses in zip(cell.rates, cell.losses, strict=True):
            lines += [
                f"| {cell.layers} | {cell.width} | {rate:g} | {s} | {loss:.3f} |" for s, loss in enumerate(losses)
            ]
    return f"{found}\n\n" + "\n".join(lines)
