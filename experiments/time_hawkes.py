"""When the next event happens: seven processes without types, by a mixture of log-normal waiting times.

The data of Shchur et al. 2020 (*Fast and flexible temporal point processes with triangular maps*): six processes of a thousand sequences on [0, 100] and taxi pick-ups of 182 days on [0, 24]; the last fifth is the test.
Figures are the negative log-likelihood per event in nats, the wait for the first event and the time behind the last one included. Of two processes the law that drew them is known. Three seeds of one setting for all processes.

Beside ours: one rate (the control), log-normal waiting times without memory (`renewal.py`), and RMTPP and THP of easy-tpp 0.3.0 (`easytpp.py`, width and rate chosen on validation sequences, one seed). A drawn process of one rate says whether ours finds
that there is nothing to find: its loss is 1 - log(rate). The published figures are of other splits and of a likelihood per sequence, so none stand beside.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import easytpp, events, renewal
from experiments.events import PROCESSES, Split
from experiments.foreseen import fitted_on, foreseen
from experiments.recipe import Bar, Block, Setting, Table
from experiments.symmetry import mean, shown

SEEDS = (0, 1, 2)
POISSON, RATE = "one rate of 0.7", 0.7
# Options of NextEvent.
OURS: dict[str, Any] = {"embed_dim": 32, "num_heads": 2, "history": 256, "trend": True}
QUICK: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "layers": 1, "epochs": 2}
LIMIT = 20  # sequences of each part in a quick run


def drawn(count: int, seed: int, end: float = 100.0) -> events.Events:
    """A Poisson process of one rate: the number of events, then their times."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        times = np.sort(random.uniform(0, end, random.poisson(RATE * end)))
        sequences.append((np.zeros(len(times), np.int64), times))
    return events.listed(sequences, ("event",), end)


def _split(work: Path, name: str, quick: bool) -> Split:
    split = Split(drawn(700, 0), drawn(100, 1), drawn(200, 2)) if name == POISSON else events.process(work, name)
    return Split(*(part.take(np.arange(min(LIMIT, len(part)))) for part in split)) if quick else split


def _ours(work: Path, name: str, quick: bool, seed: int, device: str) -> dict[str, Any]:
    return foreseen(_split(work, name, quick), OURS | (QUICK if quick else {}), seed, device)


def _beside(work: Path, name: str, quick: bool) -> dict[str, Any]:
    split = _split(work, name, quick)
    truth = renewal.true_hawkes(name, split.test) if name in renewal.TRUE_HAWKES else None
    if name == POISSON:
        gaps, tails = renewal.waits(split.test)
        truth = float(RATE * (gaps.sum() + tails.sum()) / len(gaps) - math.log(RATE))
    laws = {"one rate": renewal.constant_rate, "log-normal waits": renewal.log_normal}
    return {"truth": truth, **{law: fit(split.fitting, split.test)["nll"] for law, fit in laws.items()}}


def run(setting: Setting) -> dict[str, Any]:
    quick, work, device, store = setting.quick, setting.work, setting.device, setting.store()
    seeds, names = (SEEDS[:1], ["hawkes1", "taxi"]) if quick else (SEEDS, [*PROCESSES, POISSON])
    beside = {name: store.get(f"beside, {name}", partial(_beside, work, name, quick)) for name in names}
    parts = {f"ours, {name}, seed {seed}": (work, name, quick, seed, device) for name in names for seed in seeds}
    done = store.run(_ours, parts, setting.jobs)
    peers: dict[str, Any] = {}
    for name in [] if quick else PROCESSES:
        file = work / "easy-tpp" / f"{name}.npz"
        if not file.is_file():
            easytpp.export(events.process(work, name), file)
        peers[name] = easytpp.results(file)
    return {
        "quick": quick,
        "beside": beside,
        "fits": [{"process": name, **done[part]} for part, (_, name, *_) in parts.items() if part in done],
        "easy-tpp": peers,
        "wanted": len(parts),
    }


def tables(result: dict[str, Any]) -> list[Block]:
    beside, peers, fits = result["beside"], result["easy-tpp"], result["fits"]
    ours = {name: [fit["unknown"]["time_nll"] for fit in fits if fit["process"] == name] for name in beside}
    rows = []
    for name, laws in beside.items():
        known = peers.get(name, {})
        rows.append([
            name, "" if laws["truth"] is None else f"{laws['truth']:.4f}", f"{laws['one rate']:.4f}", f"{laws['log-normal waits']:.4f}",
            *(f"{known[peer]['nll']:.4f}" if peer in known else "" for peer in easytpp.MODELS), shown(ours[name], 4) if ours[name] else "",
            f"{mean([fit['seconds'] for fit in fits if fit['process'] == name]):.0f}" if ours[name] else "",
            ", ".join(f"{known[peer]['seconds']:.0f}" for peer in easytpp.MODELS if peer in known),
        ])  # fmt: skip
    bars: list[Block] = [Bar("hawkes1", mean(ours["hawkes1"]) if ours.get("hawkes1") else None, 0.55, False, ".4f")]
    for name, known in peers.items():
        if known and ours.get(name):
            best = min(row["nll"] for row in known.values())
            bars.append(
                Bar(f"{name}, ours less the better of easy-tpp's two", mean(ours[name]) - best, 0.0, False, ".4f")
            )
    if ours.get(POISSON):
        apart = max(abs(value - (1 - math.log(RATE))) for value in ours[POISSON])
        bars.append(Bar(f"{POISSON}, distance from 1 - log({RATE})", apart, 0.02, False, ".4f"))
    columns = [
        "process",
        "law that drew it",
        "one rate",
        "log-normal waits",
        *(f"easy-tpp {name}" for name in easytpp.MODELS),
        "ours",
        "seconds, ours",
        "seconds, easy-tpp",
    ]
    return [
        fitted_on(fits),
        Table(columns, rows, control="one rate"),
        *bars,
        f"- Incomplete: {len(fits)} of {result['wanted']} fits." if len(fits) < result["wanted"] else "",
    ]  # fmt: skip
