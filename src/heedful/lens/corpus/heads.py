"""Scores of heads, regressed on what counts say of the two words and on how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful._progress import Progress, silent
from heedful.lens._record import LayerRecord
from heedful.lens.corpus.result import CountedHead, CountedHeads
from heedful.lens.observation import Observation, observe

EXCHANGES = 9
# Words that stand next to one another in the order of frequencies, so many at a time, are as frequent.
BAND = 4


class Associations(Protocol):
    """What is asked of counts."""

    @property
    def window(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def frequencies(self) -> np.ndarray: ...
    def encode(self, tokens: Sequence[str]) -> np.ndarray: ...
    def association(self, distance: int | None = None, *, directed: bool = True) -> Any: ...


@dataclass(frozen=True, eq=False)
class Counted:
    """A fitted `Cooccurrence` as the regressions ask for it."""

    counts: Any

    @property
    def window(self) -> int:
        return int(self.counts.window)

    @property
    def source(self) -> str:
        return f"counts of {self.counts.tokens_:,} tokens"

    @property
    def frequencies(self) -> np.ndarray:
        return np.asarray(self.counts.word_counts_)

    def encode(self, tokens: Sequence[str]) -> np.ndarray:
        return np.asarray(self.counts.vocabulary_.encode(tokens))

    def association(self, distance: int | None = None, *, directed: bool = True) -> Any:
        return self.counts.association("ppmi", distance, directed=directed)


def explain_heads(
    model: nn.Module | Observation,
    texts: Any = None,
    counts: Any = None,
    *,
    tokenizer: Any = None,
    exchanges: int = EXCHANGES,
    alike: bool = True,
    progress: Progress = silent,
) -> CountedHeads:
    r"""How much of each head's scores is counting: $R^2$ of scores before the softmax on associations of words, and on positions.

    For every head, over pairs of tokens of all texts that may attend to one another, a word and itself left out, scores are
    regressed on positive PMI of the two words: of the symmetric counts, of the directed ones, of those at their very distance; and
    on the distance alone. What is explained is the variance within rows, since a softmax does not see what all scores of a query
    have in common. The control exchanges words of the text for others of it that are about as frequent, at random, and regresses again:
    `gain` is what it matters which words they are. (Exchanged for any others, a head that looks at rare words seems to count pairs: rare words
    have the larger associations.) Mehta (2025) reads attention as such counts; this measures how far a trained head agrees.

    Args:
        model: any that `observe` reads; or an `Observation` of one, with queries and keys kept, and then without `texts`.
        texts: a text, a list of texts (with `tokenizer`), or what `observe` takes.
        counts: a fitted `heedful.corpus.Cooccurrence` of the model's tokens with `per_distance=True`; by default tokens of the texts are
            counted in what is installed (`installed_counts`), which needs the tokenizer.
        tokenizer: the model's.
        exchanges: how often words are exchanged for the control.
        alike: whether for others that are about as frequent, or for any.

    >>> import numpy as np
    >>> from heedful.corpus import Cooccurrence
    >>> ids = np.random.default_rng(0).integers(7, size=400)
    >>> counts = Cooccurrence(3, vocabulary=7, per_distance=True).fit([ids])
    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = BertModel(BertConfig(vocab_size=7, pad_token_id=None, **sizes)).eval()
    >>> heads = explain_heads(model, torch.from_numpy(ids[None, :23]), counts)
    >>> len(heads), heads.pairs, heads[0].gain < 0.2
    (2, 506, True)
    """
    check_whole(2, exchanges=exchanges)
    check_choice((True, False), alike=alike)
    if isinstance(model, Observation):
        if texts is not None:
            raise InvalidArgument("an Observation has read its texts; leave texts out")
        seen = model
    else:
        seen = observe(model, texts, keep=("queries", "keys"), tokenizer=tokenizer)
    known = _counted(counts, seen, tokenizer)
    heads: list[CountedHead] = []
    left_out: list[int] = []
    designs: dict[bytes, _Design] = {}
    exchanged: list[np.ndarray] = []
    pairs, met = 0, 0.0
    for at, record in enumerate(seen):
        progress(at, len(seen), "corpus")
        if record.kind != "self" or not _scored(record):
            left_out.append(record.index)
            continue
        design = _design(seen, record, known, designs)
        if not design.pairs:
            continue
        pairs, met = design.pairs, design.met
        scores = _scores(record)
        figures, each = design.explain(list(scores.unbind(1)), exchanges, alike)
        heads += [CountedHead(record.index, head, **one) for head, one in enumerate(figures)]
        exchanged.append(each)
    if not heads:
        raise Unsupported(
            "no two words of this text are among the counts"
            if len(left_out) < len(seen)
            else "no layer computes its coefficients from one score of its own sequence"
        )
    luck = _luck(np.concatenate(exchanged, axis=1))
    return CountedHeads(tuple(heads), pairs, met, luck, known.source, tuple(left_out))


def explain_head(
    scores: Any, ids: Any, counts: Any, *, is_causal: bool = False, exchanges: int = EXCHANGES, alike: bool = True
) -> CountedHead:
    """The same for one matrix of scores `(n, n)` between words by their numbers in the counts `(n,)`, -1 for unknown ones.

    >>> import numpy as np
    >>> from heedful.corpus import Cooccurrence, CorpusAttention
    >>> ids = np.random.default_rng(0).integers(7, size=400)
    >>> counts = Cooccurrence(3, vocabulary=7, per_distance=True).fit([ids])
    >>> own = explain_head(CorpusAttention(counts).scores(ids[:23]), ids[:23], counts)
    >>> round(own.symmetric, 6), own.position < 0.2
    (1.0, True)
    """
    check_whole(2, exchanges=exchanges)
    check_choice((True, False), alike=alike)
    matrix = torch.as_tensor(scores).detach().double()
    numbers = np.asarray(ids)
    if matrix.dim() != 2 or matrix.shape != (len(numbers), len(numbers)):
        raise InvalidArgument(
            f"scores must have shape (n, n) for ids of shape (n,); got {tuple(matrix.shape)} and {numbers.shape}"
        )
    known = _checked(counts)
    keep = (numbers >= 0)[:, None] & (numbers >= 0) & ~np.eye(len(numbers), dtype=bool)
    keep &= np.tri(len(numbers), dtype=bool) if is_causal else True
    design = _Design([numbers], [keep], known)
    if not design.pairs:
        raise InvalidArgument("no two words of these ids may attend to one another")
    return CountedHead(0, 0, **design.explain([matrix[None]], exchanges, alike)[0][0])


def _luck(exchanged: np.ndarray) -> float:
    """The largest gain of any head in any exchange `(exchanges, heads)`: each of them against the mean of the others."""
    others = (exchanged.sum(0) - exchanged) / (len(exchanged) - 1)
    return float((exchanged - others).max())


def _counted(counts: Any, seen: Observation, tokenizer: Any) -> Associations:
    if counts is not None:
        return _checked(counts)
    if tokenizer is None:
        raise InvalidArgument("give counts, a fitted heedful.corpus.Cooccurrence, or the model's tokenizer")
    from heedful.lens.corpus.installed import installed_counts

    return installed_counts(tokenizer, [token for row in seen.tokens for token in row])


def _checked(counts: Any) -> Associations:
    if hasattr(counts, "encode") and hasattr(counts, "association"):
        return counts
    if not hasattr(counts, "association") or not hasattr(counts, "vocabulary_"):
        raise InvalidArgument(f"counts must be a fitted heedful.corpus.Cooccurrence; got {type(counts).__name__}")
    if not counts.per_distance:
        raise InvalidArgument("counts of each distance are needed: Cooccurrence(per_distance=True)")
    return Counted(counts)


def _scored(record: LayerRecord) -> bool:
    kernel = record.kernel
    return kernel is not None and kernel.scored and kernel.of_pairs is kernel


def _scores(record: LayerRecord) -> Tensor:
    """Scores before the softmax `(B, H, n, n)` in float64, what a mask adds to them included."""
    assert record.kernel is not None
    query, key = record.queries.double(), record.keys.double()
    key = key.repeat_interleave(record.heads // record.key_heads, dim=1)
    scores = record.kernel.score(query, key)
    bias = record._tensors.get("bias")
    return scores if bias is None else scores + bias.double().clamp_min(torch.finfo(torch.float32).min)


def _design(seen: Observation, record: LayerRecord, known: Associations, designs: dict[bytes, _Design]) -> _Design:
    """The regressors of a layer; layers with equal masks share them."""
    tokens = seen.query_tokens(record)
    ids, keep = [], []
    mask = record.mask
    for row in range(record.batch):
        numbers = known.encode(tokens.strings[row])
        free = tokens.valid[row].numpy() & ~tokens.special[row].numpy() & (numbers >= 0)
        pairs = free[:, None] & free & ~np.eye(len(numbers), dtype=bool)
        if mask is not None:
            pairs &= mask.expand(record.batch, -1, -1, -1)[row, 0].numpy()
        if record.causal:
            pairs &= np.tri(len(numbers), dtype=bool)
        ids.append(numbers)
        keep.append(pairs)
    name = b"".join(part.tobytes() for part in keep)
    if name not in designs:
        designs[name] = _Design(ids, keep, known)
    return designs[name]


@dataclass(eq=False)
class _Design:
    """Regressors for pairs of tokens of some texts: `ids` of each, and which pairs count."""

    ids: list[np.ndarray]
    keep: list[np.ndarray]
    known: Associations
    _bases: dict[str, list[np.ndarray]] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        return int(sum(part.sum() for part in self.keep))

    @cached_property
    def words(self) -> np.ndarray:
        """The words that occur, each once."""
        every = np.unique(np.concatenate(self.ids))
        return every[every >= 0]

    @cached_property
    def tables(self) -> dict[tuple[int | None, bool], np.ndarray]:
        """Associations between the words that occur, by distance and direction."""
        names = [(None, False), (None, True), *((distance, True) for distance in range(1, self.known.window + 1))]
        tables = {}
        for distance, directed in names:
            part = self.known.association(distance, directed=directed)[self.words][:, self.words]
            tables[distance, directed] = part if isinstance(part, np.ndarray) else part.toarray()
        return tables

    @property
    def met(self) -> float:
        """The share of pairs that occur in the counts with an association above zero at some distance."""
        every = [self.tables[distance, True] for distance in range(1, self.known.window + 1)]
        near = np.sum(every, axis=0) > 0
        near |= near.T
        found = sum(int(near[self._at(ids)][keep].sum()) for ids, keep in zip(self.ids, self.keep, strict=True))
        return found / max(1, self.pairs)

    def _at(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = np.searchsorted(self.words, np.maximum(ids, self.words[0]))
        return np.ix_(places, places)

    def columns(self, order: np.ndarray) -> dict[str, np.ndarray]:
        """Regressors `(pairs, k)` by name, with word w in the place of word order[w]."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in ("symmetric", "directed", "distance", "position")}
        reach = self.known.window
        for ids, keep in zip(self.ids, self.keep, strict=True):
            n = len(ids)
            back = np.arange(n)[:, None] - np.arange(n)  # above 0: the key stands before
            i, j = np.nonzero(keep)
            at = self._at(ids)
            at = order[at[0]], order[at[1]]
            left = (back > 0)[keep]
            apart = np.minimum(np.abs(back[keep]), reach + 1)

            def sides(values: np.ndarray, left: np.ndarray = left) -> np.ndarray:
                return np.stack([values * left, values * ~left], axis=1)

            whole = self.tables[None, True][at]
            stack = np.stack(
                [np.zeros((n, n)), *(self.tables[d, True][at] for d in range(1, reach + 1)), np.zeros((n, n))]
            )
            # The earlier word is in the row: for keys on the left that is the key.
            first, second = np.where(left, j, i), np.where(left, i, j)
            parts["symmetric"].append(self.tables[None, False][at][i, j][:, None])
            parts["directed"].append(sides(whole[first, second]))
            parts["distance"].append(sides(stack[apart, first, second]))
            signed = np.where(left, apart, -apart) + reach + 1
            parts["position"].append(np.eye(2 * reach + 3)[signed])
        return {name: np.concatenate(values) for name, values in parts.items()}

    @cached_property
    def rows(self) -> np.ndarray:
        """Which row of which text each pair belongs to, counted through."""
        starts = np.cumsum([0, *(len(ids) for ids in self.ids)])
        return np.concatenate([np.nonzero(keep)[0] + start for keep, start in zip(self.keep, starts, strict=False)])

    def centred(self, values: np.ndarray) -> np.ndarray:
        """Values `(pairs, k)` less their means within rows."""
        sums = np.stack([np.bincount(self.rows, column) for column in values.T], axis=1)
        counts = np.bincount(self.rows)
        return values - (sums / np.maximum(counts, 1)[:, None])[self.rows]

    def explain(
        self, scores: Sequence[Tensor], exchanges: int, alike: bool
    ) -> tuple[list[dict[str, float]], np.ndarray]:
        """For each head's scores `(B, n, n)` the shares that regressors explain; and those of every exchange, `(exchanges, heads)`."""
        keep = [torch.from_numpy(part) for part in self.keep]
        flat = [torch.cat([one[row][part] for row, part in enumerate(keep)]) for one in scores]
        heads = self.centred(torch.stack(flat, dim=1).numpy())
        total = (heads**2).sum(0)
        safe = np.where(total > 1e-24, total, np.inf)
        shares = {
            name: np.stack([((basis.T @ heads) ** 2).sum(0) / safe for basis in bases])
            for name, bases in self.bases(exchanges, alike).items()
        }
        means = {name: values.mean(axis=0).tolist() for name, values in shares.items()}
        return [{name: values[at] for name, values in means.items()} for at in range(len(scores))], shares["chance"]

    def bases(self, exchanges: int, alike: bool) -> dict[str, list[np.ndarray]]:
        """Orthonormal bases of regressors within rows, one for each name, and as many as there are exchanges for `chance`."""
        if not self._bases:
            columns = self.columns(np.arange(len(self.words)))
            self._bases = {name: [self._basis([part])] for name, part in columns.items()}
            self._bases["together"] = [self._basis(list(columns.values()))]
            generator = np.random.default_rng(0)
            orders = [self.exchanged(generator, alike) for _ in range(exchanges)]
            self._bases["chance"] = [self._basis(list(self.columns(order).values())) for order in orders]
        return self._bases

    def exchanged(self, generator: np.random.Generator, alike: bool) -> np.ndarray:
        """For each word another one, at random: any, or one that is about as frequent."""
        every = len(self.words)
        if not alike:
            return generator.permutation(every)
        order = np.argsort(self.known.frequencies[self.words], kind="stable")
        other = np.arange(every)
        # Where bands begin is drawn too, so that no two neighbours are always kept apart.
        for band in np.split(order, range(int(generator.integers(1, BAND + 1)), every, BAND)):
            ring = generator.permutation(band)
            other[ring] = np.roll(ring, 1)
        return other

    def _basis(self, columns: list[np.ndarray]) -> np.ndarray:
        u, s, _ = np.linalg.svd(self.centred(np.concatenate(columns, axis=1)), full_matrices=False)
        return np.asarray(u[:, s > 1e-9 * max(s.max(initial=0.0), 1e-300)])
