"""How fast pairs of words are counted, and in how much memory: ours, and the C program of GloVe on the same text.

Texts are those of `corpus.py`, lines of words, 10 million of them; window 10, weights 1/distance, words that occur five times. Every row is a process of its own on one core, the best of three: its CPU
seconds (compiled code was compiled before), and the memory that it took beyond what it had when it began (Linux). **From text** reads and splits the file, chooses words and counts; **from numbers** counts documents
of token numbers. `cooccur` reads the same file and a list of words that is given, and writes symmetric counts; ours are directed, from which symmetric
ones follow. All counts are compared: `cooccur` counts the most frequent word with itself twice where all counts fit
into its table (*tiny*, 20,000 words). *Few* is a smaller case, a million words of which 20,000 are counted.

GloVe's own program stands beside ours if it lies in the work folder as `cooccur`: build stanfordnlp/GloVe with `make` and copy `build/cooccur`. No package
carries it. GloVe by alternating least squares and by AdaGrad are compared on 200,000 words: what J they reach, in which CPU time.
"""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np

from experiments import corpus
from experiments.recipe import Bar, Block, Setting, Table
from experiments.store import workers

WINDOW, MIN_COUNT, TOKENS = 10, 5, 10_000_000
# A smaller case: so many tokens of so many words.
FEW, FEW_WORDS = 1_000_000, 20_000
# A text whose counts fit into the table of GloVe's program.
TINY = 20_000
GLOVE_WORDS = 200_000
ROUNDS = 3
# Is there while a process counts.
MARK = "counting"

# Rows by name: what is counted, and the options of Cooccurrence.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "from text, numba": ("text", {"engine": "numba"}),
    "from text, numpy": ("text", {"engine": "numpy"}),
    "from text, each distance, numba": ("text", {"engine": "numba", "per_distance": True}),
    "from numbers, numba": ("numbers", {"engine": "numba"}),
    "from numbers, numpy": ("numbers", {"engine": "numpy"}),
    "from numbers, each distance, numba": ("numbers", {"engine": "numba", "per_distance": True}),
    "from numbers, each distance, numpy": ("numbers", {"engine": "numpy", "per_distance": True}),
    "from text, numba, at most 100MB": ("text", {"engine": "numba", "max_memory": "100MB"}),
    "from text, numba, at most 4GB": ("text", {"engine": "numba", "max_memory": "4GB"}),
    "few, from numbers, numba": ("few", {"engine": "numba"}),
    "few, from numbers, numpy": ("few", {"engine": "numpy"}),
}


def run(setting: Setting) -> dict[str, Any]:
    store, work = setting.store(), setting.work
    tokens, few, words = (200_000, 50_000, 2000) if setting.quick else (TOKENS, FEW, FEW_WORDS)
    _prepare(work, tokens, few, words, setting)
    program = (work / "cooccur").is_file()
    calls: dict[str, tuple[Any, ...]] = {name: (count, work, *row) for name, row in ROWS.items()}
    if program:
        calls |= {f"cooccur, {what}": (c_tool, work, what) for what in ("text", "few")}
    # Row by row in each round: others work on the machine too, and take its caches at some times.
    rounds: dict[str, list[Any]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        for name, call in calls.items():
            if number == 0 or "at most" not in name:
                rounds[name].append(store.get(f"{name}, {number}", lambda call=call: _alone(*call)))
    rows = {name: min(several, key=lambda one: one["cpu"]) for name, several in rounds.items()}
    compared = {
        what: store.get(f"compared, {what}", lambda what=what: _alone(agreement, work, what)) if program else None
        for what in ("text", "few", "tiny")
    }
    glove = store.get("glove", lambda: _alone(gloves, work, GLOVE_WORDS // (20 if setting.quick else 1)))
    return {"rows": rows, "compared": compared, "glove": glove}


def _alone(function: Any, work: Path, *arguments: Any) -> Any:
    """What a function gives in a process of its own, with the memory that it took while it counted, files that are mapped apart."""
    with workers(1) as pool:
        future = pool.submit(function, work, *arguments)
        process, peak = next(iter(pool._processes)), 0
        while not future.done():
            if (work / MARK).exists():
                peak = max(peak, _memory(process) or 0)
            wait([future], timeout=0.005)
        result = future.result()
    before = result.pop("before", None)
    return result if before is None else result | {"peak": peak - before}


def _prepare(work: Path, tokens: int, few: int, words: int, setting: Setting) -> None:
    """Files of words and of numbers, with the words that count."""
    if (work / f"few-{few}.npz").is_file():
        return
    from heedful.corpus import Cooccurrence

    corpus.lines(work / "prose.txt", say=setting.say)
    for name, size, kept in (("text", tokens, None), ("tiny", TINY, None), ("few", few, words)):
        lines, count = [], 0
        with (work / "prose.txt").open(encoding="utf-8") as prose:
            for line in prose:
                lines.append(line)
                count += line.count(" ") + 1
                if count >= size:
                    break
        (work / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
        counter = Cooccurrence(1, min_count=MIN_COUNT if kept is None else 1, max_vocabulary=kept, progress=False)
        vocabulary = counter.partial_fit(work / f"{name}.txt").vocabulary_
        pairs = zip(vocabulary.words, vocabulary.counts.tolist(), strict=True)
        (work / f"{name}-words.txt").write_text(
            "".join(f"{word} {number}\n" for word, number in pairs), encoding="utf-8"
        )
        ids = [vocabulary.encode(line.split()) for line in lines]
        ids = [part[part >= 0] for part in ids]
        stored = {"ids": np.concatenate(ids).astype(np.int32), "ends": np.cumsum([len(part) for part in ids])}
        np.savez(work / (f"few-{few}.npz" if name == "few" else f"{name}.npz"), **stored, size=len(vocabulary))


def _numbers(work: Path, what: str) -> tuple[list[np.ndarray], int]:
    with np.load(work / "text.npz" if what == "numbers" else next(work.glob("few-*.npz"))) as data:
        return np.split(data["ids"], data["ends"][:-1]), int(data["size"])


def count(work: Path, what: str, options: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds and memory of a count, in this process."""
    from heedful.corpus import Cooccurrence

    # Compiled beforehand, if it is compiled.
    Cooccurrence(WINDOW, progress=False, vocabulary=7, **options).fit([np.arange(7) % 5] * 3)
    if what == "text":
        given: Any = work / "text.txt"
        counter = Cooccurrence(WINDOW, min_count=MIN_COUNT, progress=False, **options)
    else:
        given, size = _numbers(work, what)
        counter = Cooccurrence(WINDOW, vocabulary=size, progress=False, **options)
    before = _memory()
    (work / MARK).touch()
    began, wall = time.process_time(), time.perf_counter()
    counter.fit(given)
    spent, waited = time.process_time() - began, time.perf_counter() - wall
    (work / MARK).unlink()
    matrices = [counter.counts()] if not options.get("per_distance") else [counter.counts(d) for d in range(1, 11)]
    held = sum(part.nbytes for m in matrices for part in (m.data, m.indices, m.indptr))
    return {
        "cpu": spent,
        "seconds": waited,
        "before": before,
        "result": held,
        "tokens": counter.tokens_,
        "words": len(counter.vocabulary_),
    }


def _memory(process: int | str = "self") -> int | None:
    """The memory of a process in bytes, files that are mapped apart; None where the system does not say."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def _c_call(work: Path, what: str) -> tuple[Path, list[str]]:
    out = work / f"{what}-cooccurrence.bin"
    command = [str(work / "cooccur"), "-verbose", "0", "-symmetric", "1", "-window-size", str(WINDOW), "-memory", "4.0"]
    return out, [
        *command,
        "-vocab-file",
        str(work / f"{what}-words.txt"),
        "-overflow-file",
        str(work / f"{what}-overflow"),
    ]


def c_tool(work: Path, what: str) -> dict[str, Any]:
    """CPU seconds and memory of GloVe's program."""
    out, command = _c_call(work, what)
    with (work / f"{what}.txt").open("rb") as text, out.open("wb") as records:
        subprocess.run(command, stdin=text, stdout=records, stderr=subprocess.DEVNULL, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024}


def agreement(work: Path, what: str) -> dict[str, Any]:
    """How far our counts are from those of GloVe's program, cell by cell, the most frequent word with itself apart."""
    from heedful.corpus import Cooccurrence, Vocabulary, read_glove_counts

    c_tool(work, what)
    words = [line.split()[0] for line in (work / f"{what}-words.txt").read_text(encoding="utf-8").splitlines()]
    counter = Cooccurrence(WINDOW, vocabulary=Vocabulary(words), progress=False).fit(work / f"{what}.txt")
    ours, theirs = counter.counts(directed=False), read_glove_counts(work / f"{what}-cooccurrence.bin", len(words))
    first = [float(part[0, 0]) for part in (ours, theirs)]
    same = bool((ours.indptr == theirs.indptr).all() and (ours.indices == theirs.indices).all())
    apart = abs(ours - theirs).tocoo()
    elsewhere = apart.data[(apart.row > 0) | (apart.col > 0)].max(initial=0.0)
    return {"cells": int(ours.nnz), "same_cells": same, "largest": float(elsewhere / ours.max()), "first": first}


def gloves(work: Path, words: int) -> dict[str, Any]:
    """J by CPU seconds, of both solvers, on the first words."""
    import torch

    from heedful.corpus import Cooccurrence

    torch.set_num_threads(1)
    lines, count = [], 0
    with (work / "prose.txt").open(encoding="utf-8") as prose:
        # All sources lie one behind the other; every 54th line is of all.
        for at, line in enumerate(prose):
            if at % 54 == 0 and count < words:
                lines.append(line)
                count += line.count(" ") + 1
    counter = Cooccurrence(WINDOW, min_count=MIN_COUNT, progress=False).fit(lines)
    matrix = counter.counts(directed=False)
    result: dict[str, Any] = {"tokens": counter.tokens_, "words": len(counter.vocabulary_), "cells": int(matrix.nnz)}
    return result | {solver: _timed(matrix, solver) for solver in ("als", "adagrad")}


def _timed(matrix: Any, solver: Any) -> dict[str, Any]:
    """J after each sweep, and the CPU seconds until then."""
    from heedful.corpus import glove

    began, marks = time.process_time(), []
    fitted = glove(matrix, 50, solver=solver, x_max=10.0, progress=lambda *_: marks.append(time.process_time() - began))
    return {"losses": list(fitted.losses), "cpu": marks}


def tables(result: dict[str, Any]) -> Iterable[Block]:
    rows = result["rows"]
    text, few = rows["from text, numba"], rows["few, from numbers, numba"]
    yield f"{text['tokens']:,} words of text, {text['words']:,} of them different ones that count; few: {few['tokens']:,} of {few['words']:,}."
    yield Table(
        ["count", "CPU s", "memory, MB", "counts themselves, MB", "reference, CPU s"],
        [
            [
                name,
                f"{row['cpu']:.2f}",
                f"{row['peak'] / 1e6:.0f}" if row.get("peak") is not None else "",
                f"{row['result'] / 1e6:.0f}" if "result" in row else "",
                {"from numbers, numpy": "6.1", "cooccur, text": "14.7"}.get(name, ""),
            ]
            for name, row in rows.items()
        ],
        paper="reference, CPU s",
        control="cooccur, text" if rows.get("cooccur, text") else "from numbers, numpy",
    )
    for name, one in result["compared"].items():
        if one:
            same = "in the same cells as" if one["same_cells"] else "NOT in the cells of"
            yield (
                f"- {name}: {one['cells']:,} counts, {same} cooccur; the largest difference, the most frequent word with itself apart, is {one['largest']:.1e} of the largest count; that "
                f"word with itself: {one['first'][0]:,.2f}, cooccur {one['first'][1]:,.2f}"
            )
    glove = result["glove"]
    als, adagrad = glove["als"], glove["adagrad"]
    yield (
        f"GloVe of {glove['tokens']:,} words, {glove['words']:,} different, {glove['cells']:,} cells, 50 components, x_max 10. The last column: the sweeps that "
        "least squares had done in AdaGrad's whole time."
    )
    within = sum(spent <= adagrad["cpu"][-1] for spent in als["cpu"])
    yield Table(
        ["solver", "J after 1", "J at the end", "sweeps", "CPU s", "J at equal time"],
        [
            ["alternating least squares", f"{als['losses'][0]:,.0f}", f"{als['losses'][-1]:,.0f}", len(als["losses"]), f"{als['cpu'][-1]:.1f}", f"{als['losses'][within - 1]:,.0f}" if within else "none"],
            ["AdaGrad", f"{adagrad['losses'][0]:,.0f}", f"{adagrad['losses'][-1]:,.0f}", len(adagrad["losses"]), f"{adagrad['cpu'][-1]:.1f}", f"{adagrad['losses'][-1]:,.0f}"],
        ],
    )  # fmt: skip
    by_numbers, each = rows["from numbers, numba"]["cpu"], rows["from numbers, each distance, numba"]["cpu"]
    tool = rows.get("cooccur, text")
    if tool:
        yield f"Ours is {tool['cpu'] / text['cpu']:.2f} times as fast as cooccur from text, {tool['cpu'] / by_numbers:.2f} times from numbers."
    fast = text["cpu"] <= 15 or bool(tool and tool["cpu"] >= 2 * text["cpu"])
    yield Bar("10 million words from text: 15 CPU s at most, or twice as fast as cooccur", fast)
    yield Bar(
        "each distance, from text, share of counting all together",
        rows["from text, each distance, numba"]["cpu"] / text["cpu"],
        1.5,
        at_least=False,
        shown=".2f",
    )
    yield Bar(
        "each distance, from numbers, share of counting all together",
        each / by_numbers,
        1.5,
        at_least=False,
        shown=".2f",
    )
    bound = rows["from text, numba, at most 100MB"]
    if bound.get("peak") is not None:
        # The limit, and some hundred MB for the part of the corpus that is read.
        yield Bar(
            "at most 100MB: memory less the counts themselves, MB",
            (bound["peak"] - bound["result"]) / 1e6,
            400,
            at_least=False,
            shown=".0f",
        )
    yield Bar("a million tokens of 20,000 words, CPU s", few["cpu"], 1.5, at_least=False, shown=".2f")
    small = rows.get("cooccur, few")
    yield Bar(
        "the same, share of cooccur's", few["cpu"] / small["cpu"] if small else None, 0.5, at_least=False, shown=".2f"
    )
    yield Bar(
        "least squares' J after 8 sweeps, share of AdaGrad's after 15",
        als["losses"][-1] / adagrad["losses"][-1],
        1.0,
        at_least=False,
        shown=".3f",
    )
