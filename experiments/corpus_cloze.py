"""Words guessed from those around them by counts alone: does it help to know the order of words, and their distance?

Counts of a text, no training: the score of a word w in a gap is ln p(w) plus $\\lambda$ times the associations of the five words on either
side with w (`heedful.corpus.CorpusAttention.predict_masked`; smoothed conditional probabilities, 200 pairs of prior). The refinements of
Mehta (2025) one after the other: symmetric counts, directed ones, one matrix for each distance. Counted are dictionaries, prose and
WikiText-2 validation (`corpus.py`), 8,000 words; asked for are 1,500 places of the WikiText-2 test text, which is not counted, with words rarer
than the 50 commonest. **$\\lambda$ is chosen for every row** from the same grid on every second place; the figures are of the others. Word
frequencies are the control.

A second table says how much of the associations at each distance (positive PMI, cells weighted by their counts) forms of positions keep that
models use: a bias for each distance (T5, ALiBi), a small matrix for each, rotations of planes (rotary positions); see
`heedful.corpus.PositionEnergy`. A bias cannot change the order of words for a gap, since it is the same for all of them.

Figures of an independent reference run of the same protocol stand beside ours. Needs the texts that `corpus.py` names; three minutes of a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import corpus
from experiments.recipe import Bar, Block, Setting, Table
from experiments.store import copied

BESIDE = Path(__file__).parents[2] / "shared" / "data" / "text"
CONTEXT, SIZE, PLACES, COMMON = 5, 8000, 1500, 50
STRENGTHS = (0.3, 0.5, 0.7, 1.0, 1.5)
DRAWS, RANK = 2000, 200

# Rows by name: how distances are weighed, and the options of CorpusAttention; the reference run's mean reciprocal rank.
ROWS: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "symmetric, uniform weights": ("uniform", {}, 0.092),
    "symmetric, weights 1/distance": ("inverse", {}, 0.096),
    "directed": ("inverse", {"directed": True}, 0.102),
    "directed, each distance by itself": ("inverse", {"positions": "distance"}, 0.138),
}
SYMMETRIC, DIRECTED, RESOLVED = "symmetric, uniform weights", "directed", "directed, each distance by itself"


def prose(folder: Path, say: Any = print) -> Path:
    """A file of lines of words: all sources of prose, of WikiText-2 the validation text alone."""
    file = folder / "prose.txt"
    corpus.lines(file, [name for name in corpus.PROSE if name != "wikitext-2"], say)
    return file


def wikitext(folder: Path, part: str) -> Iterator[list[str]]:
    """Paragraphs of WikiText-2 as words."""
    text = copied(f"wikitext2_{part}.txt", BESIDE, folder).read_text(encoding="utf-8")
    for sign in "-,.":
        text = text.replace(f" @{sign}@ ", sign)
    for line in text.splitlines():
        if line.count(" ") > 8:
            yield corpus.words(line)


def run(setting: Setting) -> dict[str, Any]:
    from heedful.corpus import Cooccurrence, CorpusAttention
    from heedful.corpus.cloze import gap_logits, gaps

    store = setting.store()

    def counted(weighting: str) -> Any:
        options = {"max_vocabulary": SIZE, "unknown": "keep", "per_distance": True, "progress": False}
        counter = Cooccurrence(CONTEXT, weighting, **options)
        with prose(setting.work, setting.say).open(encoding="utf-8") as lines:
            some = (line.split() for at, line in enumerate(lines) if not setting.quick or at % 20 == 0)
            counter.partial_fit(some)
        return counter.partial_fit(wikitext(setting.work, "valid"))

    def part(name: str) -> dict[str, Any]:
        weighting, options, _ = ROWS[name]
        if weighting not in counters:
            counters[weighting] = counted(weighting)
        attention = CorpusAttention(counters[weighting], "conditional", **options)
        tests = list(wikitext(setting.work, "test"))
        places = gaps(attention, tests, COMMON, 100 if setting.quick else PLACES, 0)
        base, ranks, chance = attention.log_frequencies_, {strength: [] for strength in STRENGTHS}, []
        for ids, at in places:
            added = gap_logits(attention, ids[:at], ids[at + 1 :], 1.0, CONTEXT) - base
            chance.append(1 + int((base > base[ids[at]]).sum()))
            for strength, own in ranks.items():
                logits = base + strength * added
                own.append(1 + int((logits > logits[ids[at]]).sum()))
        return {
            "tokens": counters[weighting].tokens_,
            "ranks": {str(strength): own for strength, own in ranks.items()},
            "chance": chance,
        }

    def positions() -> dict[str, float]:
        if "inverse" not in counters:
            counters["inverse"] = counted("inverse")
        return CorpusAttention(counters["inverse"], rank=20 if setting.quick else RANK).explained_energy().to_dict()

    def speed() -> dict[str, float]:
        """Scores of a batch of the test text by look-up, against the matrix written out, then timed."""
        if "inverse" not in counters:
            counters["inverse"] = counted("inverse")
        attention = CorpusAttention(counters["inverse"])
        words = np.concatenate([attention.ids(line) for line in wikitext(setting.work, "test")])
        shape = (4, 16) if setting.quick else (64, 128)
        batch = words[: shape[0] * shape[1]].reshape(shape)
        whole = np.pad(counters["inverse"].association("ppmi", directed=False).toarray(), ((0, 1), (0, 1)))
        wanted = whole[batch[:, :, None], batch[:, None, :]]  # -1, an unknown word, is the row of zeros
        apart = float(np.abs(attention.scores(batch).numpy() - wanted).max())
        times = []
        for _ in range(20):
            began = time.perf_counter()
            attention.scores(batch)
            times.append(time.perf_counter() - began)
        return {"apart": apart, "milliseconds": 1e3 * min(times)}

    counters: dict[str, Any] = {}
    parts = {name: store.get(name, lambda name=name: part(name)) for name in ROWS}
    first = next(iter(parts.values()))
    rows = {name: _row(one["ranks"]) for name, one in parts.items()}
    chance = np.array(first["chance"][1::2])
    unigram = {"strength": None, "mrr": float((1 / chance).mean()), "top_10": float((chance <= 10).mean())}
    inverse = {name: 1 / np.array(parts[name]["ranks"][str(rows[name]["strength"])][1::2]) for name in ROWS}
    return {
        "tokens": first["tokens"],
        "places": len(first["chance"]),
        "rows": {"frequency alone": unigram, **rows},
        "directed - symmetric": interval(inverse[DIRECTED], inverse[SYMMETRIC]),
        "distances - directed": interval(inverse[RESOLVED], inverse[DIRECTED]),
        "positions": store.get("positions", positions),
        "speed": store.get("speed", speed),
    }


def _row(ranks: dict[str, list[int]]) -> dict[str, float]:
    """The best strength on every second place, and the figures of the others."""
    strength = max(ranks, key=lambda one: float((1 / np.array(ranks[one][::2])).mean()))
    own = np.array(ranks[strength][1::2])
    return {"strength": float(strength), "mrr": float((1 / own).mean()), "top_10": float((own <= 10).mean())}


def interval(one: np.ndarray, other: np.ndarray) -> list[float]:
    """The mean difference of pairs, and where 95 % of bootstrap draws lie."""
    g = np.random.default_rng(0)
    apart = one - other
    means = apart[g.integers(len(apart), size=(DRAWS, len(apart)))].mean(axis=1)
    return [float(apart.mean()), *np.quantile(means, (0.025, 0.975)).tolist()]


def tables(result: dict[str, Any]) -> Iterable[Block]:
    rows = result["rows"]
    yield f"{result['tokens']:,} tokens counted; {result['places']} places, figures of every second one."
    yield Table(
        ["counts", "$\\lambda$", "mean reciprocal rank", "among the best ten", "reference run"],
        [
            [
                name,
                row["strength"],
                f"{row['mrr']:.3f}",
                f"{row['top_10']:.1%}",
                ROWS[name][2] if name in ROWS else "0.004",
            ]
            for name, row in rows.items()
        ],
        paper="reference run",
        control="frequency alone",
    )
    for name in ("directed - symmetric", "distances - directed"):
        mean, low, high = result[name]
        yield f"- {name}: {mean:+.3f}, 95 % of bootstrap draws in [{low:+.3f}, {high:+.3f}]"
    symmetric, directed, resolved = (rows[name]["mrr"] for name in (SYMMETRIC, DIRECTED, RESOLVED))
    yield Bar("directed less symmetric", directed - symmetric, -0.005, shown=".4f")
    yield Bar("each distance by itself, times symmetric", resolved / symmetric, 1.25, shown=".2f")
    share = result["positions"]
    rank = share["rank"]
    yield Table(
        ["associations at each distance by", "share kept"],
        [
            ["one matrix for all distances", f"{share['none']:.3f}"],
            ["the same and a bias for each distance", f"{share['additive']:.3f}"],
            [f"one matrix of rank {rank}", f"{share['whole']:.3f}"],
            [f"{rank} x {rank} numbers for each distance", f"{share['tucker']:.3f}"],
            [f"rotations of {rank // 2} planes", f"{share['rotary']:.3f}"],
        ],
    )
    speed = result["speed"]
    yield Bar(
        "scores of 64 x 128 words of the test text by look-up, ms (fastest of 20)",
        speed["milliseconds"],
        50,
        False,
        ".1f",
    )
    yield Bar("the largest difference of these to the matrix written out", speed["apart"], 1e-10, False, ".1g")
