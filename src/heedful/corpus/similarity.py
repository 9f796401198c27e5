"""What vectors of words are good for: nearest words, pairs that people have judged, analogies."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heedful._checks import check_number, check_whole
from heedful._errors import InvalidArgument, MissingExtra
from heedful._plot import Axes, axes
from heedful._result import Result
from heedful._text import quantity
from heedful.corpus.vocabulary import Vocabulary

__all__ = ["AnalogyScore", "Neighbours", "PairScore"]

# Questions that are answered at once.
BATCH = 512


@dataclass(frozen=True)
class Neighbours(Result):
    """The nearest words, the nearest first; it iterates over pairs of a word and its cosine.

    Attributes:
        words: the words.
        cosines: of the angle with what was asked for.
        question: what was asked for, in words.
    """

    words: tuple[str, ...]
    cosines: tuple[float, ...]
    question: str = ""

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return iter(zip(self.words, self.cosines, strict=True))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, place: int) -> tuple[str, float]:
        return self.words[place], self.cosines[place]

    def __str__(self) -> str:
        return "\n".join([self.question, *(f"  {cosine:6.3f}  {word}" for word, cosine in self)])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars of cosines, the nearest word on top."""
        ax = axes(ax)
        ax.barh(self.words[::-1], self.cosines[::-1])
        ax.set(xlabel="cosine", title=self.question)
        return ax


@dataclass(frozen=True)
class PairScore(Result):
    """How far cosines of pairs of words have the order of people's judgements.

    Attributes:
        rho: Spearman's rank correlation over the pairs both of whose words are known.
        covered: how many these are; compare models on the same pairs alone.
        pairs: how many there are.
        judgements, cosines: of the covered pairs.
    """

    rho: float
    covered: int
    pairs: int
    judgements: tuple[float, ...]
    cosines: tuple[float, ...]

    _not = ("judgements", "cosines")

    def __str__(self) -> str:
        return f"Spearman's rho {self.rho:.3f} on {self.covered} of {quantity(self.pairs, 'pair')}"

    def plot(self, ax: Axes | None = None) -> Axes:
        """A dot for each pair."""
        ax = axes(ax)
        ax.scatter(self.judgements, self.cosines, s=8, alpha=0.6)
        ax.set(xlabel="people", ylabel="cosine", title=str(self))
        return ax


@dataclass(frozen=True)
class AnalogyScore(Result):
    """How many questions "a is to b as c is to ?" are answered by the nearest word.

    Attributes:
        accuracy: the share of right answers among the questions all of whose words are known.
        correct, covered, questions: numbers of questions.
        sections: by the name of each section, (correct, covered, questions).
    """

    accuracy: float
    correct: int
    covered: int
    questions: int
    sections: dict[str, tuple[int, int, int]]

    def __str__(self) -> str:
        lines = [f"{self.accuracy:.1%} right of {self.covered} covered of {quantity(self.questions, 'question')}"]
        if len(self.sections) > 1:
            width = max(map(len, self.sections))
            for name, (right, covered, asked) in self.sections.items():
                share = f"{right / covered:6.1%}" if covered else "     -"
                lines.append(f"  {name:<{width}} {share} of {covered:>5} of {asked}")
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars of shares of right answers by section."""
        ax = axes(ax)
        known = {name: right / covered for name, (right, covered, _) in self.sections.items() if covered}
        ax.barh(list(known)[::-1], list(known.values())[::-1])
        ax.set(xlabel="share of right answers", xlim=(0, 1))
        return ax


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1; zeros stay."""
    # Division by the largest first: squares of large entries overflow.
    largest = abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
    scaled = vectors / np.where(largest > 0, largest, 1.0)
    length = np.linalg.norm(scaled, axis=-1, keepdims=True)
    return scaled / np.where(length > 0, length, 1.0)


def nearest(
    vocabulary: Vocabulary,
    vectors: np.ndarray,
    towards: np.ndarray,
    without: Sequence[int],
    top: int,
    among: int | None,
    question: str,
) -> Neighbours:
    """The words whose vectors, of length 1, have the largest cosines with one."""
    check_whole(top=top)
    check_whole(optional=True, among=among)
    cosines = vectors[:among] @ unit(towards)
    cosines[[place for place in without if place < len(cosines)]] = -math.inf
    best = np.argsort(-cosines, kind="stable")[:top]
    best = best[cosines[best] > -math.inf]
    return Neighbours(tuple(vocabulary.decode(best)), tuple((cosines[best] + 0.0).tolist()), question)


def place_of(vocabulary: Vocabulary, word: Any) -> int:
    """The number of a word, as it is written or in lower case; -1 where it is unknown."""
    if not isinstance(word, str):
        raise InvalidArgument(f"a word is expected, a text; got {word!r:.100}")
    for form in (word, word.lower()):
        if form in vocabulary:
            return vocabulary.index(form)
    return -1


def pair_score(vocabulary: Vocabulary, vectors: np.ndarray, pairs: Any, unknown: str) -> PairScore:
    """`WordVectors.evaluate_pairs`, for vectors of length 1."""
    try:
        from scipy.stats import spearmanr
    except ImportError:
        raise MissingExtra("scipy", "corpus") from None
    triples = list(_pairs(pairs))
    places = np.array([[place_of(vocabulary, word) for word in one[:2]] for one in triples], np.int64).reshape(-1, 2)
    missing = places.min(axis=1, initial=0) < 0
    if unknown == "raise" and missing.any():
        first = triples[int(missing.argmax())]
        raise InvalidArgument(
            f"the pair {first[0]}, {first[1]} has a word that is unknown; unknown='skip' leaves it out"
        )
    kept = np.flatnonzero(~missing) if unknown == "skip" else np.arange(len(triples))
    if len(kept) < 2:
        raise InvalidArgument(f"of {quantity(len(triples), 'pair')} {len(kept)} have two known words; two are needed")
    first, second = places[kept].T
    cosines = np.where(missing[kept], 0.0, (vectors[first] * vectors[second]).sum(axis=1))
    judged = np.array([float(triples[at][2]) for at in kept])
    rho = math.nan if np.ptp(cosines) == 0 or np.ptp(judged) == 0 else float(spearmanr(judged, cosines).statistic)
    return PairScore(rho, int((~missing).sum()), len(triples), tuple(judged.tolist()), tuple(cosines.tolist()))


def _pairs(pairs: Any) -> Iterator[tuple[str, str, float]]:
    """(word, word, judgement): of a file with three columns, or of triples."""
    if isinstance(pairs, str | Path):
        for number, line in enumerate(_lines(pairs), 1):
            fields = [part for part in re.split(r"[\t,;]|\s{2,}| ", line) if part]
            try:
                yield fields[0], fields[1], float(fields[2])
            except (IndexError, ValueError):
                # The first line may name the columns.
                if number > 1 or len(fields) < 3:
                    raise InvalidArgument(
                        f"line {number} of {pairs} must be two words and a number; got {line!r:.100}"
                    ) from None
        return
    for one in pairs:
        if not isinstance(one, Sequence) or isinstance(one, str) or len(one) != 3:
            raise InvalidArgument(f"pairs must be (word, word, number); got {one!r:.100}")
        check_number(**{f"the judgement of {one[0]}, {one[1]}": one[2]})
        yield one[0], one[1], one[2]


def _lines(file: str | Path) -> list[str]:
    """Lines of a text file without empty ones and remarks."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file} is no text in UTF-8; convert it first") from None
    except OSError as error:
        raise InvalidArgument(f"cannot read {str(file)!r:.100}: {error.strerror}; give another file") from None
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def analogy_score(
    vocabulary: Vocabulary, vectors: np.ndarray, questions: Any, among: int | None, unknown: str
) -> AnalogyScore:
    """`WordVectors.evaluate_analogies`, for vectors of length 1."""
    check_whole(optional=True, among=among)
    known = vectors[:among]
    sections = {name: list(rows) for name, rows in _questions(questions)}
    result: dict[str, tuple[int, int, int]] = {}
    for name, rows in sections.items():
        places = np.array([[place_of(vocabulary, word) for word in row] for row in rows], np.int64).reshape(-1, 4)
        fits = ((places >= 0) & (places < len(known))).all(axis=1)
        if unknown == "raise" and not fits.all():
            first = rows[int(fits.argmin())]
            raise InvalidArgument(f"{' '.join(first)} has a word that is unknown; unknown='skip' leaves it out")
        right = _right(known, places[fits])
        asked = len(rows) if unknown == "zero" else int(fits.sum())
        result[name] = (right, asked, len(rows))
    correct, covered, count = (sum(part) for part in zip(*result.values(), strict=True)) if result else (0, 0, 0)
    if not covered:
        raise InvalidArgument(f"of {quantity(count, 'question')} none has four known words")
    return AnalogyScore(correct / covered, correct, covered, count, result)


def _right(vectors: np.ndarray, places: np.ndarray) -> int:
    """How many questions are answered: the nearest to b - a + c, these three aside, is d."""
    right = 0
    for start in range(0, len(places), BATCH):
        part = places[start : start + BATCH]
        a, b, c = (vectors[part[:, at]] for at in range(3))
        cosines = (b - a + c) @ vectors.T
        np.put_along_axis(cosines, part[:, :3], -math.inf, axis=1)
        right += int((cosines.argmax(axis=1) == part[:, 3]).sum())
    return right


def _questions(questions: Any) -> Iterator[tuple[str, Iterable[Sequence[str]]]]:
    """Sections of four words each: of a file with lines `: name` before them, of a mapping, or of a list."""
    if isinstance(questions, Mapping):
        rows_of = dict(questions)
    elif isinstance(questions, str | Path):
        rows_of, name = {}, "questions"
        for line in _lines(questions):
            if line.startswith(":"):
                name = line[1:].strip()
            else:
                rows_of.setdefault(name, []).append(line.split())
    else:
        rows_of = {"questions": questions}
    for name, rows in rows_of.items():
        rows = list(rows)
        for row in rows:
            if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 4:
                raise InvalidArgument(f"a question has four words, a, b, c and d; got {row!r:.100}")
        yield name, rows
