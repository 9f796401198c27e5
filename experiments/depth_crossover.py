"""Which depth wins at which size: Levine et al. 2020, the crossover of section 5 in small.

Language models of 0.25M, 1M, 4M and 16M parameters in their layers, each at depths 1, 2, 3, 6 and 12, on 29M tokens of free text
(`experiments/corpus.py`): 2,000 byte-pair tokens, context 256, 900 steps of 128 windows, AdamW, bfloat16, tied embeddings,
gain-free RMSNorm, outputs scaled by 1/sqrt(2L). Every cell has four or five learning rates and two seeds, and two more rates
where the best one is at the edge. An arrow marks a cell whose best rate is still the last one tried; its loss is then an upper
bound. The rate is chosen on the validation text. 29M tokens are short training, which favours shallow models.

Needs a GPU, about fifteen minutes of it. `--seconds 540` stops before a cell that would end later; the next run goes on.
"""

from __future__ import annotations

import math
from typing import Any

from experiments.crossover import Cell, Crossover, run_crossover
from experiments.recipe import Block, Setting, Table
from experiments.stacked import Protocol

# budget: (layers, width, heads) near 12 L d² = budget; widths that heads of 32 to 104 channels divide.
SHAPES = {
    0.25e6: [(1, 144, 3), (2, 104, 2), (3, 80, 2), (6, 56, 1), (12, 40, 1)],
    1e6: [(1, 288, 6), (2, 200, 5), (3, 168, 3), (6, 120, 3), (12, 80, 2)],
    4e6: [(1, 576, 9), (2, 416, 13), (3, 336, 6), (6, 240, 5), (12, 168, 3)],
    16e6: [(1, 1152, 18), (2, 816, 17), (3, 672, 12), (6, 480, 10), (12, 336, 6)],
}
# Small models want higher rates: multiples of 1.5e-3 min(1.5, sqrt(256 / d)).
MULTIPLES = {0.25e6: (2, 4, 8, 16, 32), 1e6: (2, 4, 8, 16), 4e6: (1, 2, 4, 8), 16e6: (1, 2, 4, 8)}

# The reference run that this protocol was drawn up with: one seed, multiples 1, 2, 4.
REFERENCE = {0.25e6: 2, 1e6: 2, 4e6: 3, 16e6: 12}

QUICK = Protocol(context=32, batch=4, steps=12, warmup=2)


def cells(quick: bool = False) -> list[Cell]:
    shapes_to_train = []
    for budget, shapes in SHAPES.items():
        for layers, width, heads in shapes[:2] if quick else shapes:
            base = 1.5e-3 * min(1.5, math.sqrt(256 / width))
            rates = tuple(base * multiple for multiple in MULTIPLES[budget])
            shapes_to_train.append(Cell(budget, layers, width, heads, rates))
    return shapes_to_train[:3] if quick else shapes_to_train


def run(setting: Setting) -> dict[str, Any]:
    import numpy

    from experiments import corpus

    facts = corpus.prepare(setting.work, setting.say)
    tokens, valid = (numpy.load(setting.work / f"{part}.npy").astype("int32") for part in ("train", "valid"))
    result = run_crossover(
        tokens,
        valid[:4_000] if setting.quick else valid,
        cells(setting.quick),
        seeds=(0,) if setting.quick else (0, 1),
        protocol=QUICK if setting.quick else None,
        device=setting.device,
        store=None if setting.quick else setting.store("cells"),
        seconds=setting.seconds,
        extend=not setting.quick,
        say=setting.say,
    )
    return result.to_dict() | {"corpus": facts, "gpu_seconds": round(sum(cell.seconds for cell in result.cells))}


def tables(result: dict[str, Any]) -> list[Block]:
    crossover = Crossover.from_dict(result)
    words = ", ".join(f"{name} {count:,}" for name, count in result["corpus"]["sources"].items())
    winners = [
        [f"{budget / 1e6:g}M", cell.layers, ", ".join(map(str, crossover.as_good(budget))), REFERENCE[budget]]
        for budget, cell in crossover.winners().items()
    ]
    missing = f"Incomplete: {len(crossover.cells)} cells of {len(cells())}, or edges left to extend.\n"
    return [
        crossover.table(),
        Table(
            ["12 L d² ≈", "best depth", "within two standard errors", "reference run"], winners, paper="reference run"
        ),
        "Mean and standard error over seeds at the best rate, in nats; d is the width.\n"
        f"{'' if crossover.complete else missing}"
        f"{result['corpus']['train_tokens']:,} training tokens from (words): {words}.\n"
        f"{result['gpu_seconds']} s of training in all calls together.",
    ]
