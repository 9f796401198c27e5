"""Vectors of words from counts: no training but for GloVe's, the same at every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from torch import Tensor

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._progress import bar
from heedful._runtime import device_of
from heedful._savable import encode
from heedful.bridges.estimator import seed_of
from heedful.bridges.predictors import Transformer
from heedful.bridges.samples import check_is_fitted, validated
from heedful.corpus import exchange, similarity
from heedful.corpus._documents import Tokens, kind_of
from heedful.corpus._pairs import sparse
from heedful.corpus._work import check_range
from heedful.corpus.associations import Kind, association, counted
from heedful.corpus.counting import Cooccurrence
from heedful.corpus.factors import directional, svd, symmetric
from heedful.corpus.gloves import glove
from heedful.corpus.similarity import AnalogyScore, Neighbours, PairScore
from heedful.corpus.vocabulary import Vocabulary

__all__ = ["WordVectors"]

Method = Literal["svd", "symmetric", "directional", "glove", "glove-adagrad"]
Sides = Literal["auto", "words", "contexts", "sum", "concat"]
Unknown = Literal["skip", "zero", "raise"]


class WordVectors(Transformer):
    r"""Vectors of words from counts of pairs, $S \approx W \tilde W^T$ for a matrix S of associations.

    | method | words $W$ | contexts $\tilde W$ |
    |---|---|---|
    | `"svd"` | $U \Sigma^p$ | $V \Sigma^{1-p}$, of symmetric counts |
    | `"symmetric"` | $U \lvert\Lambda\rvert^p$ | $U \lvert\Lambda\rvert^{1-p} \mathrm{sign}(\Lambda)$, of the same |
    | `"directional"` | $V \Sigma^p$ of the later word | $U \Sigma^{1-p}$ of the earlier one, of directed counts |
    | `"glove"`, `"glove-adagrad"` | $w$ | $\tilde w$, see `heedful.corpus.glove` |

    The default, positive PMI with smoothed contexts and p = 0, is what Levy, Goldberg & Dagan (2015) found best for the similarity of
    words; for associations themselves take p = 1/2. Signs are fixed: the largest entry of each column of U is positive. A component
    whose singular value is zero is zero.

    Args:
        dim: how many components, at most V. With p = 0 take far fewer than V: all of them are orthogonal, and no word is near another.
        method: of the table.
        association: what S is, of counts; `smoothing` and `shift` go to `heedful.corpus.association`. GloVe takes logarithms of its own.
        power: p, the share of singular values that words get.
        sides: what `vectors_` are: `"words"`, `"contexts"`, their `"sum"` or both side by side, `"concat"`. `"auto"` is the sum
            for GloVe, else words.
        window, weighting, min_count, max_vocabulary, vocabulary, tokenizer, n_jobs: for `fit` on texts, as in `Cooccurrence`. With a matrix,
            `vocabulary` names its words.
        sweeps, x_max, exponent, ridge: of GloVe.
        unknown: words without a vector, in `transform` and evaluations: `"skip"` leaves them out, `"zero"` gives them zeros, `"raise"` is an error.
        random_state: of the random subspace of large matrices, and of GloVe.
        device: where GloVe's least squares are solved.
        progress: shows a bar, at a terminal.

    Attributes:
        vocabulary_: a `Vocabulary`.
        words_, contexts_: W and $\tilde W$, `(V, dim)` in float64.
        vectors_: what `sides` makes of them.

    >>> texts = ["the sea is deep and blue", "the lake is deep and blue", "the bank lends money", "the shop takes money"] * 2
    >>> model = WordVectors(4, window=3, min_count=1).fit(texts)
    >>> model.most_similar("sea", top=1).words
    ('lake',)
    >>> model.transform(["the deep sea", "money"]).shape
    (2, 4)
    """

    _fitted: ClassVar[tuple[str, ...]] = ("n_features_in_", "vocabulary_", "_n_features_out", "_by_words")
    _arrays: ClassVar[tuple[str, ...]] = ("words_", "contexts_")

    vocabulary_: Vocabulary
    _splitter: Any
    words_: np.ndarray
    contexts_: np.ndarray

    def __init__(
        self,
        dim: int = 200,
        method: Method = "svd",
        *,
        association: Kind = "ppmi",
        smoothing: float = 0.75,
        shift: float = 1,
        power: float = 0.0,
        sides: Sides = "auto",
        window: int = 10,
        weighting: str | Callable[[int], float] = "inverse",
        min_count: int = 5,
        max_vocabulary: int | None = None,
        vocabulary: Vocabulary | Sequence[str] | None = None,
        tokenizer: Any = None,
        n_jobs: int = 1,
        sweeps: int | None = None,
        x_max: float = 100.0,
        exponent: float = 0.75,
        ridge: float = 1e-3,
        unknown: Unknown = "skip",
        random_state: Any = 0,
        device: str = "cpu",
        progress: bool = True,
    ) -> None:
        self.dim = dim
        self.method = method
        self.association = association
        self.smoothing = smoothing
        self.shift = shift
        self.power = power
        self.sides = sides
        self.window = window
        self.weighting = weighting
        self.min_count = min_count
        self.max_vocabulary = max_vocabulary
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.n_jobs = n_jobs
        self.sweeps = sweeps
        self.x_max = x_max
        self.exponent = exponent
        self.ridge = ridge
        self.unknown = unknown
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def _check(self) -> None:
        check_whole(dim=self.dim)
        check_choice(Method, method=self.method)
        check_choice(Kind, association=self.association)
        check_choice(Sides, sides=self.sides)
        check_choice(Unknown, unknown=self.unknown)
        check_number(0, most=1, smoothing=self.smoothing)
        check_number(least=1, shift=self.shift)
        check_number(least=0, most=1, power=self.power)
        check_number(0, x_max=self.x_max, exponent=self.exponent, ridge=self.ridge)
        check_whole(0, optional=True, sweeps=self.sweeps)
        device_of(self.device)
        if not isinstance(self.random_state, np.random.RandomState):
            seed_of(self.random_state)
        self._counter()

    @property
    def _is_glove(self) -> bool:
        return self.method.startswith("glove")

    def _words(self) -> Vocabulary | None:
        given = self.vocabulary
        if isinstance(given, str):
            raise InvalidArgument(f"vocabulary must be a Vocabulary or a list of words; got the text {given!r:.60}")
        return given if given is None or isinstance(given, Vocabulary) else Vocabulary(given)

    def _counter(self) -> Cooccurrence:
        """What counts texts, which checks the parameters it takes."""
        words = self._words()
        chosen: dict[str, Any] = {"min_count": self.min_count, "max_vocabulary": self.max_vocabulary}
        # Words that are given are not chosen; check_whole says what is wrong with a choice all the same.
        check_whole(min_count=self.min_count)
        if words is not None or Tokens(self.tokenizer).vocabulary is not None:
            chosen = {}
        options: dict[str, Any] = {"tokenizer": self.tokenizer, "n_jobs": self.n_jobs, "progress": self.progress}
        return Cooccurrence(self.window, self.weighting, vocabulary=words, **chosen, **options)

    def fit(self, X: Any, y: Any = None) -> Self:  # type: ignore[override]
        """Makes vectors of what was counted.

        Args:
            X: a fitted `Cooccurrence`; a matrix of counts `(V, V)`, dense, sparse or a DataFrame whose columns are the words, with the earlier
                word in rows; or texts, as `Cooccurrence.fit` takes them: a file, a folder, an iterable. Where a method wants symmetric counts, of a
                matrix that is not symmetric $C + C^T$ is taken.
            y: ignored.
        """
        self._check()
        for name in ("words_", "contexts_", "vocabulary_", "feature_names_in_", "_splitter"):
            self.__dict__.pop(name, None)
        counts, vocabulary, by_words = self._read_counts(X)
        if self.dim > counts.shape[0]:
            raise InvalidArgument(f"dim must be at most {counts.shape[0]}, the number of words; got {self.dim}")
        if not counts.nnz:
            raise InvalidArgument(f"no two of the {len(vocabulary)} words occur together; give more text")
        with bar(wanted=self.progress) as say:
            self.words_, self.contexts_ = self._factored(counts, say)
        self.vocabulary_, self._by_words, self.n_features_in_ = vocabulary, by_words, len(vocabulary)
        self._n_features_out = self.vectors_.shape[1]
        return self

    def _read_counts(self, X: Any) -> tuple[Any, Vocabulary, bool]:
        """Counts as the method wants them, the words, and whether texts are split into words here."""
        directed = self.method == "directional"
        if hasattr(X, "vocabulary_") and hasattr(X, "counts"):
            self._splitter = self.tokenizer if self.tokenizer is not None else getattr(X, "tokenizer", None)
            return X.counts(directed=directed), X.vocabulary_, _is_plain(self._splitter)
        if not _is_matrix(X):
            counter = self._counter().fit(X)
            return counter.counts(directed=directed), counter.vocabulary_, _is_plain(self.tokenizer)
        names = getattr(X, "columns", None)
        counts = self._numbers(X, fitting=True)
        if counts.shape[0] != counts.shape[1]:
            raise InvalidArgument(
                f"counts must be a square matrix, a row and a column for each word; got shape {counts.shape}"
            )
        words = self._words()
        if words is None:
            words = Vocabulary(map(str, range(counts.shape[0]) if names is None else names))
        if len(words) != counts.shape[0]:
            raise InvalidArgument(f"vocabulary has {len(words)} words, and the matrix {counts.shape[0]} rows")
        if not directed and (counts != counts.T).nnz:
            counts = (counts + counts.T).tocsr()
        return counts, words, True

    def _numbers(self, X: Any, *, fitting: bool = False) -> Any:
        """A matrix of numbers, none of them negative, as CSR."""
        table = X if hasattr(X, "tocsr") else validated(self, X, reset=fitting)
        if (table.tocsr().data if hasattr(table, "tocsr") else table).min(initial=0) < 0:
            raise InvalidArgument("Negative values in data: counts are expected, which are zero or more")
        return counted(table)

    def _factored(self, counts: Any, say: Any) -> tuple[np.ndarray, np.ndarray]:
        """W and W~."""
        seed = seed_of(self.random_state)
        if self._is_glove:
            options: dict[str, Any] = {
                "x_max": self.x_max,
                "exponent": self.exponent,
                "ridge": self.ridge,
                "sweeps": self.sweeps,
                "seed": seed,
            }
            solver: Any = "adagrad" if self.method == "glove-adagrad" else "als"
            result = glove(counts, self.dim, solver=solver, device=self.device, progress=say, **options)
            return result.words, result.contexts
        say(0, 1, "components")
        matrix = association(counts, self.association, smoothing=self.smoothing, shift=self.shift)
        if not matrix.nnz:
            raise InvalidArgument(f"all associations {self.association!r} are zero; take another, or more text")
        if self.method == "symmetric":
            # Smoothed contexts weigh one side of a pair; half of it goes to the other.
            factors = symmetric((matrix + matrix.T) / 2, self.dim, power=1 - self.power, seed=seed)
            words, contexts, values = factors.query, factors.key, abs(factors.values)
        elif self.method == "directional":
            factors = directional(matrix, self.dim, power=1 - self.power, seed=seed)
            words, contexts, values = factors.query, factors.key, factors.values
        else:
            left, values, right = svd(matrix, self.dim, seed=seed)
            words, contexts = left * values**self.power, right * values ** (1 - self.power)
        there = values > values[0] * len(words) * np.finfo(float).eps
        return np.ascontiguousarray(words * there), np.ascontiguousarray(contexts * there)

    @property
    def vectors_(self) -> np.ndarray:
        """A vector for each word, `(V, dim)`, of both sides side by side `(V, 2 dim)`."""
        check_is_fitted(self, "words_")
        sides = ("sum" if self._is_glove else "words") if self.sides == "auto" else self.sides
        if sides == "sum":
            return self.words_ + self.contexts_
        return np.c_[self.words_, self.contexts_] if sides == "concat" else getattr(self, f"{sides}_")

    def transform(self, X: Any) -> np.ndarray:
        """A vector for each text, `(texts, dim)`: the mean of those of its words; a word is a text of one word.

        Args:
            X: texts, lists of words or arrays of token numbers; or a matrix `(texts, V)`, dense or sparse, of how often each word
                of the vocabulary is there, as scikit-learn's `CountVectorizer(vocabulary=model.vocabulary_.words)` gives.
        """
        return super().transform(X)

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "words_")
        if isinstance(X, str | Path):
            raise InvalidArgument("transform takes a list of texts; give [text]")
        rows, sizes = self._rows_of_matrix(X) if _is_matrix(X) else self._rows_of_texts(X)
        return np.asarray(rows @ self.vectors_) / np.where(sizes > 0, sizes, 1.0)[:, None]

    def _rows_of_matrix(self, X: Any) -> tuple[Any, np.ndarray]:
        rows = self._numbers(X)
        if rows.shape[1] != self.n_features_in_:
            raise InvalidArgument(f"a row has a number for each of {self.n_features_in_} words; got shape {rows.shape}")
        return rows, np.asarray(rows.sum(axis=1)).reshape(-1)

    def _rows_of_texts(self, X: Iterable[Any]) -> tuple[Any, np.ndarray]:
        """How often each word of the vocabulary is in each text, and what the sum is divided by."""
        documents = list(X)
        tokenizer = self.tokenizer if self.tokenizer is not None else getattr(self, "_splitter", None)
        if tokenizer is None and not self._by_words and "text" in map(kind_of, documents):
            raise InvalidArgument(
                "texts were split by a tokenizer that is not kept; set_params(tokenizer=...), or give lists of words"
            )
        split = Tokens(tokenizer)(documents)
        ids = [np.asarray(part, np.int64) if _is_ids(part) else self.vocabulary_.encode(part) for part in split]
        for part, tokens in zip(ids, split, strict=True):
            if _is_ids(tokens):
                check_range(part, len(self.vocabulary_))
            elif self.unknown == "raise" and (part < 0).any():
                word = tokens[int((part < 0).argmax())]
                raise InvalidArgument(f"{word!r:.60} is not in the vocabulary; unknown='skip' or 'zero' passes over it")
        known = [part[part >= 0] for part in ids]
        ends = np.concatenate([[0], np.cumsum([len(part) for part in known], dtype=np.int64)])
        columns = np.concatenate([*known, np.zeros(0, np.int64)])
        shape = (len(ids), len(self.vocabulary_))
        rows = sparse().csr_array((np.ones(len(columns)), columns, ends), shape=shape)
        return rows, np.array([len(part) for part in (ids if self.unknown == "zero" else known)], dtype=float)

    def vector(self, word: str) -> np.ndarray:
        """The vector of a word, `(dim,)`."""
        return self.vectors_[self._index(word)]

    def _index(self, word: str) -> int:
        check_is_fitted(self, "words_")
        place = similarity.place_of(self.vocabulary_, word)
        return place if place >= 0 else self.vocabulary_.index(word)

    def similarity(self, one: str, other: str) -> float:
        """The cosine of two words."""
        return float(np.dot(*similarity.unit(self.vectors_[[self._index(one), self._index(other)]])))

    def most_similar(
        self,
        positive: str | Sequence[str],
        negative: str | Sequence[str] = (),
        *,
        top: int = 10,
        among: int | None = None,
    ) -> Neighbours:
        """The words nearest to the mean of some, less that of others, by cosines; what was asked for is left out.

        Args:
            positive, negative: a word, or several.
            top: how many words.
            among: only so many of the most frequent words.
        """
        more, less = ([part] if isinstance(part, str) else list(part) for part in (positive, negative))
        places = [[self._index(word) for word in part] for part in (more, less)]
        if not any(places):
            raise InvalidArgument("give a word to find others for")
        units = similarity.unit(self.vectors_)
        towards = units[places[0]].sum(axis=0) - units[places[1]].sum(axis=0)
        question = " + ".join(more) + "".join(f" - {word}" for word in less)
        return similarity.nearest(self.vocabulary_, units, towards, [*places[0], *places[1]], top, among, question)

    def analogy(self, a: str, b: str, c: str, *, top: int = 10, among: int | None = None) -> Neighbours:
        """What is to c as b is to a: the nearest to b - a + c (Mikolov et al. 2013)."""
        return self.most_similar([b, c], [a], top=top, among=among)

    def evaluate_pairs(self, pairs: Any) -> PairScore:
        """Spearman's correlation of cosines with people's judgements of pairs of words, with its coverage.

        `pairs` are (word, word, number), or a text file of such lines, as WordSim-353 and SimLex-999 come. A word that is unknown as
        it is written is looked up in lower case.
        """
        check_is_fitted(self, "words_")
        return similarity.pair_score(self.vocabulary_, similarity.unit(self.vectors_), pairs, self.unknown)

    def evaluate_analogies(self, questions: Any, *, among: int | None = None) -> AnalogyScore:
        """How many analogies are answered by the nearest word, the three words of the question aside.

        `questions` are (a, b, c, d), a mapping of sections to such rows, or a text file with lines `: section` between them, as Google's
        `questions-words.txt`. `among` asks among so many of the most frequent words alone; others count as unknown.
        """
        check_is_fitted(self, "words_")
        return similarity.analogy_score(
            self.vocabulary_, similarity.unit(self.vectors_), questions, among, self.unknown
        )

    @classmethod
    def from_vectors(cls, words: Iterable[str], vectors: Any, counts: Any = None, **options: Any) -> Self:
        """Vectors `(V, d)` that were made elsewhere, as a fitted model; `counts` say how often each word occurs."""
        table = np.array(vectors, dtype=np.float64)
        vocabulary = Vocabulary(words, counts)
        if table.ndim != 2 or len(table) != len(vocabulary) or not np.isfinite(table).all():
            raise InvalidArgument(
                f"vectors must be finite, of shape ({len(vocabulary)}, d), a row for each word; got shape {table.shape}"
            )
        model = cls(**{"dim": table.shape[1], "sides": "words"} | options)
        model._check()
        model.words_, model.contexts_, model.vocabulary_ = table, np.zeros_like(table), vocabulary
        model.n_features_in_, model._by_words, model._n_features_out = len(table), True, table.shape[1]
        return model

    def to_gensim(self) -> Any:
        """`gensim.models.KeyedVectors` of `vectors_`, in float32."""
        check_is_fitted(self, "words_")
        return exchange.to_gensim(self.vocabulary_.words, self.vectors_, self.vocabulary_.counts)

    @classmethod
    def from_gensim(cls, keyed: Any, **options: Any) -> Self:
        """The vectors of gensim's `KeyedVectors`, or of a model of gensim's that has some."""
        words, vectors, counts = exchange.from_gensim(keyed)
        return cls.from_vectors(words, vectors, counts, **options)

    def save_text(self, file: str | Path, *, header: bool = True) -> Path:
        """Writes `vectors_` as word2vec's text format, without the header as GloVe's; numbers in full precision."""
        check_is_fitted(self, "words_")
        return exchange.write_text(self.vocabulary_.words, self.vectors_, file, header)

    @classmethod
    def from_text(cls, file: str | Path, **options: Any) -> Self:
        """The vectors of a text file of word2vec's or GloVe's; the header tells which it is."""
        return cls.from_vectors(*exchange.read_text(file), **options)

    def _settings(self) -> dict[str, Any]:
        """The parameters as JSON; of functions and tokenizers it is only kept that there were some, in `_by_words`."""
        kept = self.get_params(deep=False)
        for name, usual in (("tokenizer", None), ("weighting", "inverse")):
            kept[name] = kept[name] if kept[name] is None or isinstance(kept[name], str) else usual
        return {name: encode(value) for name, value in kept.items()}

    def _load(self, weights: dict[str, Tensor]) -> None:
        if weights:
            raise InvalidArgument(f"it has no tensors {', '.join(weights)}")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = tags.input_tags.sparse = tags.input_tags.string = True
        return tags


def _is_matrix(X: Any) -> bool:
    """Whether this is a matrix of numbers: sparse, a frame, or what numpy reads as one; texts in arrays and series are none."""
    if hasattr(X, "tocsr") or (hasattr(X, "columns") and hasattr(X, "iloc")):
        return True
    if isinstance(X, list | tuple) and X and isinstance(X[0], list | tuple) and X[0]:
        return isinstance(X[0][0], float)
    if not hasattr(X, "__array__"):
        return False
    array = np.asarray(X)
    return array.dtype.kind in "biufc" or (array.dtype.kind == "O" and array.ndim == 2)


def _is_plain(tokenizer: Any) -> bool:
    """Whether texts are split into words, as they are without a tokenizer."""
    return tokenizer is None or (isinstance(tokenizer, str) and tokenizer == "words")


def _is_ids(document: Any) -> bool:
    return isinstance(document, np.ndarray) or hasattr(document, "detach") or kind_of(document) == "ids"
