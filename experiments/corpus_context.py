"""Vectors of words in context without training, beside plain averages: do they help to tell senses apart, or to find passages?

Two tasks that people have. **Senses**: WordNet has example sentences for senses of words; given a sentence and its word, which of the word's definitions is meant? A vector of the
sentence, or of the word in it, is compared with a vector of each definition. No dictionary is counted, so that no example is: prose, plays and articles
(`corpus.py`), 4.6 million words. **Passages**: first sentences of scipy's docstrings; found for each are those most like it, right are those of the same
submodule (`retrieval.py`). Counted are all docstrings of numpy, scipy and scikit-learn, the sentences themselves among them.

Rows: *averages* of word vectors (PPMI-SVD, 200); the same *weighted* by $a / (a + p)$ with the frequency p of a word and a = 0.001, which is what people use who average (Arora, Liang & Ma 2017);
the vector of the *word in context* and averages of all words in context (`CorpusAttention`: $(1 - \\gamma) H + \\gamma A H$), plain and weighted; shared words (senses) or TF-IDF
(passages); chance; the first sense that WordNet lists; and all-MiniLM-L6-v2, a network of 22 million weights that was trained on a billion pairs of sentences. $\\gamma$ and $\\beta$ are
chosen on every second case, figures are of the others, and so are the paired bootstrap intervals. Needs the texts that `corpus.py` names, and the extra `demo`; ten minutes of a CPU.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import corpus, retrieval
from experiments.corpus_cloze import interval
from experiments.recipe import Bar, Block, Setting, Table
from heedful._errors import Unsupported

WORDNET = Path("/usr/share/wordnet")
KINDS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
COUNTED = ("anarchism", "bible", "shakespeare", "wikipedia", "lee", "wikitext-2")
PACKAGES = {
    "numpy": ("linalg", "fft", "random", "polynomial", "ma"),
    "scipy": retrieval.SCIPY,
    "sklearn": retrieval.SKLEARN,
}
CASES, WORDS, SMOOTH = 1500, 20_000, 1e-3
MIXES, BETAS = (0.25, 0.5, 0.75), (1.0, 2.0)
AVERAGE, WEIGHTED, CONTEXT = "average", "weighted average", "average in context, weighted"


class Case(NamedTuple):
    """A sentence, a word of it, the definitions of the word, the first listed first, and which is meant."""

    sentence: str
    word: str
    definitions: list[str]
    meant: int


def cases(count: int, folder: Path = WORDNET) -> list[Case]:
    """Examples of words with two senses or more, drawn at random, each from another sense."""
    found = []
    for kind in KINDS:
        if not (folder / f"data.{kind}").is_file():
            raise Unsupported(f"there is no {folder / f'data.{kind}'}; install Debian's wordnet-base")
        senses: dict[str, tuple[list[str], list[str], str]] = {}
        for line in (folder / f"data.{kind}").read_text(encoding="latin-1").splitlines():
            head, bar, gloss = line.partition(" | ")
            if bar:
                fields = head.split()
                words = [re.sub(r"\(.*\)", "", word).lower() for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
                definition = re.split(r'; "', gloss)[0].strip().strip(";")
                senses[fields[0]] = (words, re.findall(r'"([^"]+)"', gloss), definition)
        for line in (folder / f"index.{kind}").read_text(encoding="latin-1").splitlines():
            if line.startswith(" "):
                continue
            fields = line.split()
            word, offsets = fields[0], fields[-int(fields[2]) :]
            if len(offsets) < 2 or "_" in word:
                continue
            definitions = [senses[offset][2] for offset in offsets]
            for at, offset in enumerate(offsets):
                for example in senses[offset][1]:
                    if word in corpus.words(example) and len(corpus.words(example)) > 3:
                        found.append(Case(example, word, definitions, at))
                        break
    chosen = np.random.default_rng(0).permutation(len(found))[:count]
    return [found[at] for at in chosen]


def docstrings(packages: Mapping[str, Sequence[str]] = PACKAGES) -> list[str]:
    """Docstrings of packages, paragraphs of prose, without code."""
    texts: dict[str, None] = {}
    for package, modules in packages.items():
        for name in (package, *(f"{package}.{module}" for module in modules)):
            module = import_module(name)
            for public in sorted(module.__all__):
                try:
                    what = getattr(module, public, None)
                except ImportError:  # announced, but to be switched on first
                    continue
                if public.startswith("_") or not callable(what):
                    continue
                text = re.sub(r"(?m)^\s*>>>.*$", "", inspect.getdoc(what) or "")
                texts.update(dict.fromkeys(part for part in text.split("\n\n") if part.count(" ") > 3))
    return list(texts)


class Vectors:
    """Texts as vectors of length 1, by counts, in every form that is compared."""

    def __init__(self, counter: Any) -> None:
        from heedful.corpus import CorpusAttention, WordVectors

        self.counter = counter
        words = WordVectors(min(200, len(counter.vocabulary_) // 10), progress=False).fit(counter)
        share = counter.word_counts_ / counter.word_counts_.sum()
        self.weights = SMOOTH / (SMOOTH + share)
        self._attention = lambda mix, beta: CorpusAttention(counter, mix=mix, beta=beta, vectors=words)
        self._held: dict[tuple[float, float], Any] = {}
        self._means: dict[int, np.ndarray] = {}
        self.words = words

    def attention(self, mix: float, beta: float) -> Any:
        if (mix, beta) not in self._held:
            self._held[mix, beta] = self._attention(mix, beta)
        return self._held[mix, beta]

    def averages(
        self, texts: Sequence[str], *, weighted: bool, setting: tuple[float, float] | None = None
    ) -> np.ndarray:
        """Means of vectors of words, in context where a setting (mix, beta) is given; plain and weighted ones are made at once."""
        name = hash((tuple(texts), setting))
        if name not in self._means:
            rows = np.zeros((2, len(texts), self.words.vectors_.shape[1]))
            for at, text in enumerate(texts):
                part = self.counter.vocabulary_.encode(corpus.words(text))
                part = part[part >= 0]
                if len(part):
                    own = (
                        self.words.vectors_[part] if setting is None else self.attention(*setting).transform([part])[0]
                    )
                    rows[0, at], rows[1, at] = own.sum(0), self.weights[part] @ own
            self._means[name] = rows
        return unit(self._means[name][int(weighted)])

    def in_context(self, sentences: Sequence[str], words: Sequence[str], setting: tuple[float, float]) -> np.ndarray:
        """The vector of a word in its sentence."""
        rows = np.zeros((len(words), self.words.vectors_.shape[1]))
        for at, (sentence, word) in enumerate(zip(sentences, words, strict=True)):
            tokens = [token for token in corpus.words(sentence) if token in self.counter.vocabulary_]
            if word in tokens:
                rows[at] = self.attention(*setting).transform([tokens])[0][tokens.index(word)]
        return unit(rows)


def unit(rows: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(length > 0, length, 1.0)


def chosen(scores: Sequence[np.ndarray], meant: Sequence[int]) -> np.ndarray:
    """1 where the best score is that of the sense that is meant, a share of it where several are best."""
    result = []
    for row, right in zip(scores, meant, strict=True):
        best = np.flatnonzero(row >= row.max() - 1e-12)
        result.append(float(right in best) / len(best))
    return np.array(result)


def run(setting: Setting) -> dict[str, Any]:
    import torch

    from heedful.corpus import Cooccurrence

    torch.set_num_threads(1)
    store, work = setting.store(), setting.work
    quick = setting.quick

    def counted(texts: Any) -> Vectors:
        options = {"min_count": 5, "max_vocabulary": 1000 if quick else WORDS, "tokenizer": corpus.words}
        return Vectors(Cooccurrence(10, progress=False, **options).fit(texts))

    def senses() -> dict[str, Any]:
        corpus.lines(work / "read.txt", COUNTED, setting.say)
        texts = (work / "read.txt").read_text(encoding="utf-8").splitlines()
        vectors = counted(texts[:: 50 if quick else 1])
        asked = cases(40 if quick else CASES)
        definitions = [text for case in asked for text in case.definitions]
        ends = np.cumsum([len(case.definitions) for case in asked])[:-1]
        sentences, words, meant = ([case[at] for case in asked] for at in (0, 1, 3))

        def right(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            scores = [theirs_of @ one for one, theirs_of in zip(ours, np.split(theirs, ends), strict=True)]
            return chosen(scores, meant)

        def form(weighted: bool, at: tuple[float, float] | None = None) -> np.ndarray:
            return right(
                *(vectors.averages(texts, weighted=weighted, setting=at) for texts in (sentences, definitions))
            )

        def word(at: tuple[float, float]) -> np.ndarray:
            return right(
                vectors.in_context(sentences, words, at), vectors.averages(definitions, weighted=True, setting=at)
            )

        shared = [
            np.array(
                [len((set(corpus.words(sentence)) - {name}) & set(corpus.words(text))) for text in case.definitions],
                float,
            )
            for sentence, name, case in zip(sentences, words, asked, strict=True)
        ]
        rows = {
            "chance": np.array([1 / len(case.definitions) for case in asked]),
            "first sense listed": np.array([float(at == 0) for at in meant]),
            "shared words": chosen(shared, meant),
            AVERAGE: form(False),
            WEIGHTED: form(True),
        }
        told = _tuned(
            rows,
            {
                "average in context": lambda at: form(False, at),
                CONTEXT: lambda at: form(True, at),
                "word in context": word,
            },
        )
        rows["MiniLM"] = right(*(_encoded(texts) for texts in (sentences, definitions)))
        return _result(rows, told) | {"tokens": vectors.counter.tokens_}

    def passages() -> dict[str, Any]:
        from sklearn.feature_extraction.text import TfidfVectorizer

        texts, labels = retrieval.sentences("scipy", retrieval.SCIPY[: 2 if quick else None])
        vectors = counted(docstrings({"scipy": retrieval.SCIPY} if quick else PACKAGES))
        tfidf = TfidfVectorizer(tokenizer=corpus.words, token_pattern=None).fit_transform(texts).toarray()
        rows = {
            "chance": _precisions(np.random.default_rng(0).normal(size=(len(texts), 50)), labels),
            "TF-IDF": _precisions(tfidf, labels),
            AVERAGE: _precisions(vectors.averages(texts, weighted=False), labels),
            WEIGHTED: _precisions(vectors.averages(texts, weighted=True), labels),
        }
        forms: dict[str, Callable[[tuple[float, float]], np.ndarray]] = {
            "average in context": lambda at: _precisions(vectors.averages(texts, weighted=False, setting=at), labels),
            CONTEXT: lambda at: _precisions(vectors.averages(texts, weighted=True, setting=at), labels),
        }
        told = _tuned(rows, forms)
        rows["MiniLM"] = _precisions(_encoded(texts), labels)
        return _result(rows, told) | {"tokens": vectors.counter.tokens_}

    return {"senses": store.get("senses", senses), "passages": store.get("passages", passages)}


def _encoded(texts: Sequence[str]) -> np.ndarray:
    from heedful.bridges.sentences import Sentences

    return np.asarray(Sentences().encode(list(texts)))


def _precisions(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The average precision of each text's list of the others, by cosines."""
    from heedful.ranking.metrics import average_precision

    cosines = unit(vectors) @ unit(vectors).T
    np.fill_diagonal(cosines, -np.inf)
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :-1]
    return np.array([average_precision(labels[row] == label) for row, label in zip(order, labels, strict=True)])


def _tuned(
    rows: dict[str, np.ndarray], forms: dict[str, Callable[[tuple[float, float]], np.ndarray]]
) -> dict[str, Any]:
    """Adds rows with the setting that is best on every second case; returns the settings."""
    told = {}
    for name, form in forms.items():
        tried = {(mix, beta): form((mix, beta)) for mix in MIXES for beta in BETAS}
        best = max(tried, key=lambda at: float(tried[at][::2].mean()))
        rows[name], told[name] = tried[best], list(best)
    return told


def _result(rows: dict[str, np.ndarray], told: dict[str, Any]) -> dict[str, Any]:
    held = {name: values[1::2] for name, values in rows.items()}
    return {
        "cases": len(rows["chance"]),
        "rows": {name: float(values.mean()) for name, values in held.items()},
        "settings": told,
        "context - average": interval(held["average in context"], held[AVERAGE]),
        "context - weighted": interval(held[CONTEXT], held[WEIGHTED]),
        "MiniLM - context": interval(held["MiniLM"], held[CONTEXT]),
    }


def tables(result: dict[str, Any]) -> Iterable[Block]:
    titles = {"senses": "right senses", "passages": "mean average precision"}
    for name, title in titles.items():
        part = result[name]
        yield f"{name.capitalize()}: {part['tokens']:,} words counted, {part['cases']:,} cases, figures of every second one."
        yield Table(
            [name, title, "$\\gamma$, $\\beta$"],
            [
                [row, f"{value:.1%}", ", ".join(map(str, part["settings"].get(row, ())))]
                for row, value in part["rows"].items()
            ],
            control=WEIGHTED,
        )
        for what in ("context - average", "context - weighted", "MiniLM - context"):
            mean, low, high = part[what]
            yield f"- {what}: {mean:+.3f}, 95 % of bootstrap draws in [{low:+.3f}, {high:+.3f}]"
    for name in titles:
        what = f"{name}: context adds to a plain average, lower end of the interval"
        yield Bar(what, result[name]["context - average"][1], 0.0, shown="+.3f")
        what = f"{name}: context adds to a weighted average, lower end of the interval"
        yield Bar(what, result[name]["context - weighted"][1], 0.0, shown="+.3f")
