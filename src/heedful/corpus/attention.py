"""Attention read off a corpus: the weights between the words of a text are their associations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from heedful._attend import attend
from heedful._checks import check_choice, check_number, check_whole, is_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful.corpus._sequences import Sequences, Unknown
from heedful.corpus.associations import Kind
from heedful.corpus.positions import PositionEnergy
from heedful.corpus.statistics import Form, Statistics
from heedful.corpus.vocabulary import Vocabulary
from heedful.masks import Mask, causal, dense, keys

if TYPE_CHECKING:
    from heedful.corpus.cloze import Cloze, ClozeScore
    from heedful.nn import TokenAttention

__all__ = ["CorpusAttention"]

# Distances of the heads of `heads="distance"`, on either side: the next word, two or three away, farther.
BANDS = ((1, 1), (2, 3), (4, None))
SPECTRAL = 4


class CorpusAttention:
    r"""Attention between the words of a text by how they go together in a corpus, without training.

    With $S$ a matrix of associations between all words and $t_1 \ldots t_n$ the words of a text, scores are looked up:

    $$M_{ij} = S_{t_i t_j} \;(= O S O^\top), \qquad A = \mathrm{softmax}_j(\beta M + \mathrm{mask}), \qquad H' = (1 - \gamma) H + \gamma A H$$

    Mehta (2025), sections 3 to 5, whose Q is the one-hot matrix called O here. What differs from the paper: rows are divided by a
    softmax over associations instead of raw counts, which frequent words would take over; no word attends to itself unless
    `exclude_self=False`, since a word's association with itself is mostly the largest; S is factored into two
    maps (`factors`), since it is not positive, and one map cannot give it.

    Args:
        counts: a `Cooccurrence` that was fitted; or a matrix `(V, V)` of associations, sparse or not, which is taken as it is, and then
            `vocabulary` is needed for texts.
        association: what an association is, see `heedful.corpus.association`; `smoothing`, `shift` and `prior` (its `beta`) go there.
        beta: what scores are multiplied by before the softmax.
        directed: whether the order of two words counts: the score is that of the earlier word before the later one, from whichever of
            the two it is asked. Positions imply it.
        positions: `None`; or how scores depend on the distance, for which the counts need `per_distance=True`: `"distance"`, a
            matrix for each distance, $M_{ij} = D_{|i-j|}$; `"tucker"`, $u^\top B_\delta v$; `"additive"`, $D + \kappa(\delta)$, which is a
            bias of distances as T5 and ALiBi have, read off the corpus; `"rotary"`, $B_\delta$ made of scaled rotations. All of them
            are zero beyond the window.
        heads: how many; each has a block of the singular vectors of S (`"spectral"` is 4). `"distance"`: heads for the next word, two or
            three away, farther, to the left and, unless causal, to the right.
        rank: singular vectors that `factors`, spectral heads, `"tucker"`, `"rotary"` and `vectors_` have; at most V.
        exclude_self: whether no word attends to its own place.
        is_causal: whether no word attends to later ones.
        mix: $\gamma$, how much of a vector comes from its context.
        vectors: H, `(V, d)` or a fitted `WordVectors`; by default left singular vectors of symmetric PPMI, rank columns.
        unknown: words that were not counted: `"zero"` have no association, `"skip"` are left out, `"raise"` is an error.

    >>> from heedful.corpus import Cooccurrence
    >>> counts = Cooccurrence(window=3).fit(["the sea is deep", "the deep sea", "the bank lends money", "money is in the bank"])
    >>> attention = CorpusAttention(counts, smoothing=1)
    >>> attention.scores("deep sea money").shape
    torch.Size([3, 3])
    >>> attention.attention("deep sea money")[0, 0]
    tensor([0.0000, 0.7723, 0.2277], dtype=torch.float64)
    """

    def __init__(
        self,
        counts: Any,
        association: Kind = "ppmi",
        *,
        vocabulary: Vocabulary | Sequence[str] | None = None,
        smoothing: float = 0.75,
        shift: float = 1,
        prior: float = 200.0,
        beta: float = 1.0,
        directed: bool = False,
        positions: Form | None = None,
        heads: int | Literal["spectral", "distance"] = 1,
        rank: int = 200,
        exclude_self: bool = True,
        is_causal: bool = False,
        mix: float = 0.5,
        vectors: Any = None,
        unknown: Unknown = "zero",
        seed: int = 0,
    ) -> None:
        check_choice(Kind, association=association)
        check_choice(Form, optional=True, positions=positions)
        check_choice(Unknown, unknown=unknown)
        check_choice((True, False), directed=directed, exclude_self=exclude_self, is_causal=is_causal)
        check_number(beta=beta)
        check_number(0, prior=prior)
        check_number(least=0, most=1, mix=mix)
        check_whole(rank=rank)
        check_whole(0, seed=seed)
        if not is_whole(heads) or heads < 1:
            check_choice(("spectral", "distance"), heads=heads)
        self.association, self.smoothing, self.shift, self.prior = association, smoothing, shift, prior
        self.beta, self.positions, self.heads, self.unknown, self.seed = beta, positions, heads, unknown, seed
        self.exclude_self, self.is_causal, self.mix = exclude_self, is_causal, mix
        self.directed = directed or positions is not None
        self.vectors = vectors
        counter = counts if hasattr(counts, "vocabulary_") else None
        matrix = _matrix(counts) if counter is None else None
        self.vocabulary = _vocabulary(counter, matrix, vocabulary)
        self._sequences = Sequences(self.vocabulary, None if counter is None else counter.tokenizer, unknown)
        self.size = len(self.vocabulary)
        # Where V bounds the rank, as much of it as heads and planes share evenly.
        unit = 2 if positions == "rotary" else self.num_spectral
        self.rank = rank if rank <= self.size else max(1, self.size - self.size % unit)
        self._check_forms(counter)
        self._statistics = Statistics(
            counter, matrix, association, smoothing, shift, prior, self.directed, positions, self.rank, seed
        )

    def _check_forms(self, counter: Any) -> None:
        """Refuses what does not go together."""
        if self.positions is not None and (counter is None or not counter.per_distance):
            raise InvalidArgument(
                f"positions={self.positions!r} needs counts of each distance: give a Cooccurrence(per_distance=True)"
            )
        if self.positions == "rotary" and self.rank % 2:
            raise InvalidArgument(
                f"rank must be even for positions='rotary', whose planes have two components; got {self.rank}"
            )
        if self.num_spectral == 1:
            return
        if self.positions is not None:
            raise InvalidArgument(
                f"heads={self.heads!r} are parts of one matrix; with positions={self.positions!r} use heads='distance'"
            )
        if self.rank % self.num_spectral:
            raise InvalidArgument(f"rank must be a multiple of heads = {self.num_spectral}; got {self.rank}")
        if self.directed and not self.is_causal:
            raise InvalidArgument(
                "spectral heads of directed scores look back alone: give is_causal=True, or leave directed out"
            )

    @property
    def num_spectral(self) -> int:
        """Blocks of singular vectors."""
        return SPECTRAL if self.heads == "spectral" else self.heads if is_whole(self.heads) else 1

    @property
    def num_heads(self) -> int:
        return len(BANDS) * (2 - self.is_causal) if self.heads == "distance" else self.num_spectral

    @property
    def window(self) -> int:
        """How far apart words were counted; 0 where a matrix was given."""
        return self._statistics.window

    @cached_property
    def vectors_(self) -> np.ndarray:
        """H `(V, d)`: what is averaged by the attention."""
        given = self.vectors
        if given is None:
            return self._statistics.vectors()
        if hasattr(given, "vectors_"):
            places = given.vocabulary_.encode(self.vocabulary.words)
            return np.where((places >= 0)[:, None], np.asarray(given.vectors_)[places], 0.0)
        given = np.asarray(given, dtype=float)
        if given.ndim != 2 or len(given) != self.size:
            raise InvalidArgument(f"vectors must have shape ({self.size}, d), a row for each word; got {given.shape}")
        return given

    def tokens(self, text: Any) -> list[str]:
        """The words of a text as they are counted, without unknown ones where these are left out."""
        return self._sequences.tokens(text)

    def ids(self, sequence: Any) -> np.ndarray:
        """Numbers of words `(..., n)`, -1 for unknown ones: of a text, a list of words, or numbers as they are."""
        return self._sequences.ids(sequence)

    def scores(self, sequence: Any) -> Tensor:
        """M `(..., n, n)` in float64, before `beta` and masks: rows look, columns are looked at. Looked up, not factored."""
        return torch.from_numpy(self._statistics.scores(self.ids(sequence)))

    def head_scores(self, sequence: Any) -> Tensor:
        """M of each head `(..., H, n, n)`; their sum is M, of spectral heads up to `rank`."""
        ids = self.ids(sequence)
        if self.num_spectral > 1:
            query, key = self._rows(ids)
            return query @ key.mT
        whole = torch.from_numpy(self._statistics.scores(ids))
        bands = self._bands(ids.shape[-1])
        if bands is None:
            return whole[..., None, :, :]
        own = bands.clone()
        own[0] |= torch.eye(ids.shape[-1], dtype=torch.bool)
        return whole[..., None, :, :] * own

    def _bands(self, n: int) -> Tensor | None:
        """Which pairs belong to each of the heads by distance, `(H, n, n)`."""
        if self.heads != "distance":
            return None
        back = torch.arange(n)[:, None] - torch.arange(n)
        sides = (back,) if self.is_causal else (back, -back)
        return torch.stack([(side >= low) & (side <= (high or n)) for side in sides for low, high in BANDS])

    def _mask(self, ids: np.ndarray, padding: Any) -> Mask | None:
        """Who may attend to whom; `padding` is True for what is left out."""
        n = ids.shape[-1]
        parts = [causal] if self.is_causal else []
        if self.exclude_self:
            parts.append(dense(~torch.eye(n, dtype=torch.bool)))
        bands = self._bands(n)
        if bands is not None:
            parts.append(dense(bands if ids.ndim > 1 else bands[None]))
        if padding is not None:
            hidden = torch.as_tensor(padding)
            if hidden.dtype != torch.bool or tuple(hidden.shape) != ids.shape:
                raise InvalidArgument(
                    f"padding must be boolean (True = ignore) of shape {ids.shape}; got {tuple(hidden.shape)}"
                )
            parts.append(keys(~hidden.reshape(-1, n)))
        mask = None
        for part in parts:
            mask = part if mask is None else mask & part
        return mask

    def attention(self, sequence: Any, padding: Any = None) -> Tensor:
        """A `(..., H, n, n)`: rows sum to 1, or are zero where there is nothing to attend to.

        `padding` `(..., n)` is True for what nobody attends to.
        """
        ids = self.ids(sequence)
        weights = attend.coefficients(*self._nothing(ids), self._scored(ids, padding))
        return weights if ids.ndim > 1 else weights[0]

    def _nothing(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Queries and keys without a word in them: what is looked up comes as a mask that adds to scores."""
        batch = int(np.prod(ids.shape[:-1]))
        zeros = torch.zeros(batch, self.num_heads, ids.shape[-1], 1, dtype=torch.float64)
        return zeros, zeros

    def _scored(self, ids: np.ndarray, padding: Any) -> Tensor:
        n = ids.shape[-1]
        scores = self.beta * self.head_scores(ids).reshape(int(np.prod(ids.shape[:-1])), self.num_heads, n, n)
        mask = self._mask(ids, padding)
        return scores if mask is None else scores.masked_fill(~mask.dense(scores.shape), -torch.inf)

    def evidence(self, sequence: Any) -> Tensor:
        """E = M (O S) `(n, V)`: what each word collects about all words by two steps, not normalised (Mehta 2025, section 3)."""
        ids = self.ids(sequence)
        if ids.ndim != 1:
            raise InvalidArgument(f"evidence is of one sequence; got ids of shape {ids.shape}")
        return torch.from_numpy(self._statistics.scores(ids) @ self._all(ids))

    def _all(self, ids: np.ndarray) -> np.ndarray:
        """Associations of each word with all, `(n, V)`; zeros for unknown ones."""
        zeros = np.zeros(self.size)
        return (
            np.stack([self._statistics.whole.row(word) if word >= 0 else zeros for word in ids])
            if len(ids)
            else np.zeros((0, self.size))
        )

    def logits(self, sequence: Any) -> Tensor:
        r"""$\ln p + \sum_j A_{ij} S_{t_j \cdot}$ `(n, V)`: which word would stand in each place, heads averaged."""
        ids = self.ids(sequence)
        weights = self.attention(ids).mean(dim=-3)
        return torch.from_numpy(self.log_frequencies_) + weights @ torch.from_numpy(self._all(ids))

    def towards(self, word: int, distance: int) -> np.ndarray:
        """Associations `(V,)` of a word with every word that might stand `distance` places behind it, or before it if negative."""
        return self._statistics.towards(word, distance)

    @cached_property
    def log_frequencies_(self) -> np.ndarray:
        """ln p `(V,)` of the words, half a count for those without one."""
        counts = np.maximum(np.asarray(self.vocabulary.counts, dtype=float), 0.5)
        return np.log(counts / counts.sum())

    def transform(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Vectors of the words of each text in their context, `(n, d)`: (1 - mix) H + mix A H, heads averaged."""
        if isinstance(texts, str):
            raise InvalidArgument("texts must be a list of texts; give [text]")
        return [self._contextual(self.ids(text)) for text in texts]

    def _contextual(self, ids: np.ndarray) -> np.ndarray:
        own = np.where((ids >= 0)[:, None], self.vectors_[ids], 0.0)
        if not len(ids):
            return own
        values = torch.from_numpy(own)[None, None].expand(-1, self.num_heads, -1, -1)
        # Unknown words have no vector; attending to them would only shorten the others.
        context = attend(*self._nothing(ids), values, self._scored(ids, torch.from_numpy(ids < 0))).mean(dim=1)[0]
        return np.asarray((1 - self.mix) * own + self.mix * context.numpy())

    def embed(self, texts: Sequence[Any]) -> np.ndarray:
        """One vector per text `(B, d)`: the mean over its known words of what `transform` gives."""
        vectors = self.transform(texts)
        if not vectors:
            return np.zeros((0, self.vectors_.shape[1]))
        known = [self.ids(text) >= 0 for text in texts]
        zeros = np.zeros(self.vectors_.shape[1])
        return np.stack(
            [part[keep].mean(axis=0) if keep.any() else zeros for part, keep in zip(vectors, known, strict=True)]
        )

    def _rows(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        known = (ids >= 0)[..., None]
        rows = (
            np.where(known, side[ids], 0.0) for side in (self._statistics.factors.query, self._statistics.factors.key)
        )
        query, key = (torch.from_numpy(side).unflatten(-1, (self.num_spectral, -1)) for side in rows)
        return query.transpose(-2, -3), key.transpose(-2, -3)

    def factors(self, sequence: Any) -> tuple[Tensor, Tensor]:
        r"""Queries and keys `(..., H, n, d_k)` for which plain `attend(query, key, value)` has the scores $\beta M$.

        Both are rows of the factors times $d_k^{1/4}$ (and the query times $\beta$), since softmax attention divides by
        $\sqrt{d_k}$. Exact where `rank` is V. What no word may attend to is left to `attend`: `is_causal`, which directed scores need, and a
        mask without the diagonal for `exclude_self`.
        """
        self._check_factored()
        if self.positions is not None:
            raise Unsupported("biases of positions='additive' are no part of query and key; module() has them")
        query, key = self._rows(self.ids(sequence))
        root = query.shape[-1] ** 0.25
        return query * (self.beta * root), key * root

    def _check_factored(self) -> None:
        if self.positions not in (None, "additive"):
            raise Unsupported(
                f"positions={self.positions!r} gives each distance its own matrix and does not factor into query and key; use attention()"
            )
        if self.directed and not self.is_causal:
            raise Unsupported(
                "directed scores differ to the left and to the right; one query and key say one of them: is_causal=True"
            )
        if self.heads == "distance":
            raise Unsupported("heads='distance' are masks; factor with heads=1 or more")

    def module(self, *, dtype: torch.dtype = torch.float32) -> TokenAttention:
        """A layer `heedful.nn.TokenAttention` with these factors and vectors as parameters, to be trained on.

        It takes token ids; `is_causal` is given to its `forward`. It knows no unknown words: give them any number, and mark them in
        `key_padding_mask`. With `positions="additive"` it has the biases of distances; beyond the window, where this class has no scores, it
        keeps those of the two words.
        """
        from heedful.nn import TokenAttention

        self._check_factored()
        if self.positions is not None and not self.exclude_self:
            raise Unsupported(
                "positions='additive' has no score of a word with itself; a layer needs exclude_self=True"
            )
        reach = self.window if self.positions == "additive" else 0
        layer = TokenAttention(
            self.size,
            self.rank,
            self.vectors_.shape[1],
            self.num_heads,
            beta=self.beta,
            exclude_self=self.exclude_self,
            reach=reach,
            dtype=dtype,
        )
        tables = {
            "queries": self._statistics.factors.query,
            "keys": self._statistics.factors.key,
            "values": self.vectors_,
        }
        with torch.no_grad():
            for name, table in tables.items():
                getattr(layer, name).copy_(torch.from_numpy(np.ascontiguousarray(table)))
            if layer.bias is not None:
                kappa = torch.from_numpy(self.beta * self._statistics.biases)
                layer.bias[:, :reach], layer.bias[:, reach + 1 :] = kappa.flip(0), kappa
        return layer

    def explained_energy(self) -> PositionEnergy:
        """How much of the associations at each distance every form of positions explains."""
        return self._statistics.explained()

    def predict_masked(
        self,
        text: Any,
        position: int | None = None,
        *,
        top: int = 10,
        strength: float = 1.0,
        context: int | None = None,
    ) -> Cloze:
        """The words that fit best in a place of a text; see `heedful.corpus.Cloze`.

        Args:
            text: with `[MASK]` or `___` in the place, or any text with `position`.
            position: the place among the words, from 0 on; negative from the end.
            top: how many words.
            strength: what associations are multiplied by.
            context: words on either side that are read; the window by default.
        """
        from heedful.corpus.cloze import predict

        return predict(self, text, position, top=top, strength=strength, context=context)

    def score(
        self,
        texts: Sequence[Any],
        *,
        context: int | None = None,
        strength: float = 1.0,
        common: int = 50,
        most: int = 1500,
        seed: int = 0,
    ) -> ClozeScore:
        """How well words of texts are guessed from those around them: the mean reciprocal rank and more.

        Args:
            texts: not those that were counted.
            context, strength: as in `predict_masked`.
            common: so many of the most frequent words are not asked for.
            most: how many places are asked for, drawn at random.
        """
        from heedful.corpus.cloze import score

        return score(self, texts, context=context, strength=strength, common=common, most=most, seed=seed)

    def __repr__(self) -> str:
        parts = [f"{self.size} words", repr(self.association)]
        parts += [f"positions={self.positions!r}"] if self.positions else ["directed"] if self.directed else []
        parts += [f"heads={self.heads!r}"] if self.heads != 1 else []
        return f"CorpusAttention({', '.join(parts)})"


def _vocabulary(counter: Any, matrix: Any, given: Vocabulary | Sequence[str] | None) -> Vocabulary:
    """The words: those of the counts, or those that go with a matrix; places where nothing names them."""
    if counter is not None:
        if given is not None:
            raise InvalidArgument("vocabulary is that of the counts; leave it out")
        return counter.vocabulary_
    words = map(str, range(matrix.shape[0])) if given is None else given
    own = words if isinstance(words, Vocabulary) else Vocabulary(words)
    if len(own) != matrix.shape[0]:
        raise InvalidArgument(f"the matrix has {matrix.shape[0]} rows, and the vocabulary {len(own)} words")
    return own


def _matrix(matrix: Any) -> Any:
    """A square matrix as CSR in float64."""
    from heedful.corpus._pairs import sparse

    if not hasattr(matrix, "shape") or len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        got = f"shape {tuple(matrix.shape)}" if hasattr(matrix, "shape") else type(matrix).__name__
        raise InvalidArgument(f"counts must be a fitted Cooccurrence or a square matrix of associations; got {got}")
    cells = sparse().csr_array(matrix, dtype=np.float64)
    if not np.isfinite(cells.data).all():
        raise InvalidArgument("associations must be finite; put 0 where nothing is known of two words")
    return cells
