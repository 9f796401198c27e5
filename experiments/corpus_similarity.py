"""Word vectors from counts, beside skip-grams with negative sampling: how near are their cosines to what people say of pairs of words?

Counted are dictionaries, prose and encyclopedia articles (`corpus.py`, 10.8 million words), window 10, weights 1/distance, the 30,000 most
frequent words. WordSim-353 and SimLex-999 are judgements of pairs, Google's questions analogies; all rows answer the same pairs and
questions, those whose words are among the 30,000. Beside ours: gensim's skip-grams with negative sampling, window 10, 5 epochs, the same size of vectors, on
one core. CPU seconds are of the process, from the file of words to vectors. Differences are of a paired bootstrap over pairs.

**Read the first row as the best of several**: that singular values count for nothing (p = 0) and that there are 200 components was chosen among a dozen settings
on these very pairs, in the reference runs that stand beside ours; the rival has one setting, that of the reference runs with most epochs. The control are counts without chance taken out
(`log1p`). GloVe by least squares, whose objective is lower than AdaGrad's (`corpus-speed`), gives the worst vectors: rare pairs are fitted too well, which a ridge of 1 mends in part (0.3 and 3 were tried, on a quarter of the texts, and both helped). Dictionaries alone, 6.2 million
words, do about as well as all texts: definitions put a word beside its relatives. Do not expect these figures of other corpora.
Needs the texts that `corpus.py` names, and gensim; five minutes of a CPU without skip-grams, which take ten.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import corpus
from experiments.recipe import Bar, Block, Setting, Table
from heedful._errors import Unsupported

WINDOW, WORDS, MIN_COUNT, SIZE = 10, 30_000, 5, 200
EPOCHS, DRAWS = 5, 2000
TESTS = {"WordSim-353": "wordsim353.tsv", "SimLex-999": "simlex999.txt", "analogies": "questions-words.txt"}
PAIRS = ("WordSim-353", "SimLex-999")

# Rows by name: options of WordVectors, how many of its first components count, and the figures of the reference runs.
ROWS: dict[str, tuple[dict[str, Any], int, str]] = {
    "PPMI-SVD, 200": ({}, 200, "0.724 / 0.420"),
    "PPMI-SVD, 100": ({}, 100, "0.730 / 0.388"),
    "PPMI-SVD, 200, p = 1/2": ({"power": 0.5}, 200, "0.720 / 0.383"),
    "shifted PPMI, k = 5, 200": ({"association": "sppmi", "shift": 5}, 200, "0.697 / 0.411"),
    "symmetric with signs, 200": ({"method": "symmetric"}, 200, ""),
    "directed PPMI, later words, 100": ({"method": "directional"}, 100, "0.690 / 0.396"),
    "log1p counts, 100, p = 1/2": ({"association": "log1p", "power": 0.5}, 100, "0.451 / 0.213"),
    "GloVe by least squares, 50": ({"method": "glove", "dim": 50, "x_max": 10.0}, 50, "0.467 / 0.257"),
    "GloVe by least squares, 50, ridge 1": ({"method": "glove", "dim": 50, "x_max": 10.0, "ridge": 1.0}, 50, ""),
}
OURS, RIVAL, CONTROL = "PPMI-SVD, 200", "gensim skip-grams, 200", "log1p counts, 100, p = 1/2"
DICTIONARIES = ("wordnet", "gcide")


class Lines:
    """The lines of a file as lists of words, as often as they are asked for."""

    def __init__(self, file: Path, every: int = 1) -> None:
        self.file, self.every = file, every

    def __iter__(self) -> Iterator[list[str]]:
        with self.file.open(encoding="utf-8") as lines:
            for at, line in enumerate(lines):
                if at % self.every == 0:
                    yield line.split()


def test_file(work: Path, name: str) -> Path:
    """A test that gensim carries, copied into the work folder."""
    file = work / TESTS[name]
    if not file.is_file():
        wheels = corpus.brought("gensim-*.whl")
        if not wheels:
            raise Unsupported(f"{TESTS[name]} comes with gensim; see experiments/corpus.py")
        with zipfile.ZipFile(wheels[0]) as archive:
            file.write_bytes(archive.read(f"gensim/test/test_data/{TESTS[name]}"))
    return file


def sgns(file: Path, out: Path, size: int, every: int = 1) -> dict[str, Any]:
    """Trains gensim's skip-grams on one core, keeps the vectors in a file, and tells what it took."""
    import gensim
    from gensim.models import Word2Vec

    began = time.process_time()
    options = {"vector_size": size, "window": WINDOW, "min_count": MIN_COUNT, "epochs": EPOCHS}
    model = Word2Vec(Lines(file, every), sg=1, negative=5, workers=1, seed=0, **options)
    cpu = time.process_time() - began
    np.savez(out, words=np.array(model.wv.index_to_key), vectors=model.wv.vectors)
    return {"version": gensim.__version__, "words": len(model.wv), **options, "cpu": cpu}


def scores(model: Any, work: Path) -> dict[str, Any]:
    """What a model does at all tests, with cosines of pairs for comparisons."""
    result: dict[str, Any] = {}
    for name in PAIRS:
        score = model.evaluate_pairs(test_file(work, name))
        result[name] = score.to_dict() | {"cosines": score.cosines, "judgements": score.judgements}
    answers = model.evaluate_analogies(test_file(work, "analogies"))
    return result | {"analogies": {"accuracy": answers.accuracy, "covered": answers.covered}}


def run(setting: Setting) -> dict[str, Any]:
    import torch

    store, work = setting.store(), setting.work
    every, words, size = (20, 2000, 20) if setting.quick else (1, WORDS, SIZE)
    sources = corpus.lines(work / "prose.txt", say=setting.say)
    torch.set_num_threads(1)
    counted = _counters(work, every)

    def row(name: str) -> dict[str, Any]:
        from heedful.corpus import WordVectors

        options, first, _ = ROWS[name]
        counter, cpu = counted("prose.txt", corpus.PROSE, words)
        options = {"dim": max(first, SIZE if name.startswith("PPMI") else first)} | options
        if setting.quick:
            options["dim"] = size
        began = time.process_time()
        model = WordVectors(**options, progress=False).fit(counter)
        taken = time.process_time() - began
        few = WordVectors.from_vectors(counter.vocabulary_.words, model.vectors_[:, :first])
        return scores(few, work) | {"counting": cpu, "vectors": taken, "tokens": counter.tokens_}

    def rival() -> dict[str, Any]:
        from heedful.corpus import WordVectors

        told = store.get(
            "sgns", lambda: sgns(work / "prose.txt", work / f"sgns{'-quick' * setting.quick}.npz", size, every)
        )
        with np.load(work / f"sgns{'-quick' * setting.quick}.npz") as data:
            vectors = dict(zip(data["words"].tolist(), data["vectors"], strict=True))
        own = [word for word in counted("prose.txt", corpus.PROSE, words)[0].vocabulary_ if word in vectors]
        model = WordVectors.from_vectors(own, np.stack([vectors[word] for word in own]))
        return scores(model, work) | {"counting": 0.0, "vectors": told["cpu"], "version": told["version"]}

    def dictionaries() -> dict[str, Any]:
        from heedful.corpus import WordVectors

        counter, cpu = counted("dictionaries.txt", DICTIONARIES, min(words, 20_000))
        began = time.process_time()
        model = WordVectors(size, progress=False).fit(counter)
        return scores(model, work) | {
            "counting": cpu,
            "vectors": time.process_time() - began,
            "tokens": counter.tokens_,
        }

    def seeds() -> float:
        """Of the ten nearest words of every 300th word those that another seed gives too."""
        from heedful.corpus import WordVectors

        counter = counted("prose.txt", corpus.PROSE, words)[0]
        models = [WordVectors(size, random_state=seed, progress=False).fit(counter) for seed in (0, 1)]
        asked = counter.vocabulary_.words[:: 1 + words // 100]
        found = [[set(model.most_similar(word).words) for word in asked] for model in models]
        return float(np.mean([len(one & two) / 10 for one, two in zip(*found, strict=True)]))

    parts: dict[str, Callable[[], Any]] = {name: lambda name=name: row(name) for name in ROWS}
    parts |= {RIVAL: rival, "dictionaries": dictionaries, "seeds": seeds}
    done = {name: store.get(name, part) for name, part in parts.items()}
    between = {test: difference(done[OURS][test], done[RIVAL][test]) for test in PAIRS}
    for one in done.values():
        for test in PAIRS if isinstance(one, dict) else ():
            one[test] = {key: value for key, value in one[test].items() if key not in ("cosines", "judgements")}
    return {"sources": sources, "parts": done, "differences": between}


def _counters(work: Path, every: int) -> Callable[[str, Iterable[str], int], tuple[Any, float]]:
    """Counts of a file, made once, and the CPU seconds that they took."""
    held: dict[str, tuple[Any, float]] = {}

    def counted(file: str, sources: Iterable[str], words: int) -> tuple[Any, float]:
        from heedful.corpus import Cooccurrence

        if file not in held:
            corpus.lines(work / file, tuple(sources), lambda line: None)
            began = time.process_time()
            counter = Cooccurrence(WINDOW, min_count=MIN_COUNT, max_vocabulary=words, progress=False)
            counter.fit(work / file if every == 1 else list(Lines(work / file, every)))
            held[file] = counter, time.process_time() - began
        return held[file]

    return counted


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Spearman's rho of one less that of the other on the same pairs, and where 95 % of bootstrap draws lie."""
    from scipy.stats import rankdata

    judged = np.array(one["judgements"])
    if one["judgements"] != other["judgements"]:
        raise Unsupported("both must have cosines of the same pairs")
    cosines = [np.array(part["cosines"]) for part in (one, other)]
    places = np.random.default_rng(0).integers(len(judged), size=(DRAWS, len(judged)))

    def rho(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        first, second = (rankdata(part[rows], axis=1) for part in (judged, values))
        first, second = (part - part.mean(1, keepdims=True) for part in (first, second))
        return (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))

    whole = np.arange(len(judged))[None]
    draws = rho(cosines[0], places) - rho(cosines[1], places)
    return [float((rho(cosines[0], whole) - rho(cosines[1], whole))[0]), *np.quantile(draws, (0.025, 0.975)).tolist()]


def tables(result: dict[str, Any]) -> Iterable[Block]:
    parts, between = result["parts"], result["differences"]
    sources = ", ".join(f"{name} {size:,}" for name, size in result["sources"].items())
    yield f"{parts[OURS]['tokens']:,} words: {sources}. gensim {parts[RIVAL]['version']}."
    coverage = {name: f"{parts[OURS][name]['covered']} of {parts[OURS][name]['pairs']}" for name in PAIRS}
    names = [*ROWS, RIVAL]
    yield Table(
        ["vectors", *(f"{name} ({coverage[name]})" for name in PAIRS), "analogies", "CPU s", "reference"],
        [
            [
                name,
                *(f"{parts[name][test]['rho']:.3f}" for test in PAIRS),
                f"{parts[name]['analogies']['accuracy']:.1%}",
                f"{parts[name]['counting']:.0f} + {parts[name]['vectors']:.0f}" if name != RIVAL else f"{parts[name]['vectors']:.0f}",
                ROWS[name][2] if name in ROWS else "0.649 / 0.406 at 100",
            ]
            for name in names
        ],
        paper="reference",
        control=CONTROL,
    )  # fmt: skip
    for test in PAIRS:
        mean, low, high = between[test]
        yield f"- {OURS} less {RIVAL}, {test}: {mean:+.3f}, 95 % of bootstrap draws in [{low:+.3f}, {high:+.3f}]"
    alone = parts["dictionaries"]
    yield Table(
        ["dictionaries alone, 200", "pairs", "rho", "reference"],
        [
            [test, f"{alone[test]['covered']} of {alone[test]['pairs']}", f"{alone[test]['rho']:.3f}", published]
            for test, published in zip(PAIRS, ("0.739 of 298", "0.455 of 967"), strict=True)
        ],
        paper="reference",
    )
    spent = alone["counting"] + alone["vectors"]
    yield f"Counting {alone['tokens']:,} words of dictionaries and their vectors took {spent:.0f} CPU seconds (reference: 27)."
    ours, rival = (parts[name]["counting"] + parts[name]["vectors"] for name in (OURS, RIVAL))
    yield Bar("WordSim-353", parts[OURS]["WordSim-353"]["rho"], 0.70, shown=".3f")
    yield Bar("SimLex-999", parts[OURS]["SimLex-999"]["rho"], 0.40, shown=".3f")
    yield Bar("WordSim-353, end of the interval above skip-grams", between["WordSim-353"][1], 0.0, shown="+.3f")
    yield Bar("SimLex-999, other end of the interval", between["SimLex-999"][2], 0.0, shown="+.3f")
    yield Bar("CPU time, share of skip-grams", ours / rival, 0.25, at_least=False, shown=".3f")
    yield Bar("dictionaries alone: WordSim-353", alone["WordSim-353"]["rho"], 0.70, shown=".3f")
    yield Bar("dictionaries alone: SimLex-999", alone["SimLex-999"]["rho"], 0.42, shown=".3f")
    yield Bar("nearest words that another seed gives too", parts["seeds"], 0.9, shown=".3f")
