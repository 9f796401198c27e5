"""Weights that a language model starts from, read off counts of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument, MissingExtra, Unsupported
from heedful._plot import Axes, axes
from heedful._result import Result
from heedful.bridges.starting import Start, find_start

Part = Literal["embedding", "qk", "ov"]
PARTS: tuple[Part, ...] = ("embedding", "qk", "ov")

# Up to so many tokens all eigenvectors are computed, beyond it the wanted ones by Lanczos' method.
WHOLE = 4096
# Directions of the embedding whose share of its variance is below this one are none: LayerNorm takes one away.
FLAT = 1e-10


@dataclass(frozen=True)
class WarmStart(Result):
    """What `warm_start_` set.

    Attributes:
        model: its class.
        parts: what was set: embedding, queries and keys, values and outputs.
        changed: names of the parameters that were written, whole or in part.
        tokens: rows of the embedding table; `counted`: those that occur in the counts, the others stay as they were.
        tied: whether the head shares the embedding table.
        layer: the layer whose maps were set.
        scores: of the associations of a token with those before it, the share that queries and keys of that layer give as scores: 1
            less the squared error over the squared sum, at every pair of tokens. None where they were not set.
        follows: the same of associations with the tokens that follow, for what values and outputs add to the logits.
        notes: what to know about this model.
    """

    model: str
    parts: tuple[str, ...]
    changed: tuple[str, ...]
    tokens: int
    counted: int
    tied: bool
    layer: int
    scores: float | None
    follows: float | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {', '.join(self.parts)} set from counts; {self.counted} of {self.tokens} tokens occur in them",
            f"  written: {', '.join(self.changed)}",
        ]
        for what, share in (("before", self.scores), ("that follow", self.follows)):
            if share is not None:
                lines.append(f"  associations with tokens {what}: layer {self.layer} holds {share:.1%} of them")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars: what the layer holds of the associations."""
        ax = axes(ax)
        held = {"before": self.scores, "that follow": self.follows}
        shares = {name: share for name, share in held.items() if share is not None}
        ax.bar(list(shares), list(shares.values()))
        ax.set(ylim=(0, 1), ylabel="share of associations", title=f"{self.model}, layer {self.layer}")
        return ax


def warm_start_(
    model: nn.Module,
    counts: Any,
    parts: Sequence[Part] = PARTS,
    *,
    embedding: Any = None,
    beta: float = 0.3,
    gain: float = 0.5,
    layer: int = 0,
    smoothing: float = 0.75,
    tokenizer: Any = None,
) -> WarmStart:
    r"""Writes what counts of tokens say into a model that is to be trained: its embedding and one layer of attention.

    With symmetric positive PMI $S = U \Sigma U^\top$ and directed D (rows earlier tokens), the rows of the table become
    $E = \mathrm{rows\ of\ length\ 1}\,(U_d \Sigma_d^{1/2})$, which the layer's own norm turns into $\hat E$. Then

    $$W = \hat E^+ D^\top \hat E^{+\top} = u \sigma v^\top, \qquad W_Q^h = (u_h s)^\top,\; W_K^h = (v_h s)^\top,\; s = (\beta \sigma_h / c)^{1/2}$$

    with c what the model multiplies scores by ($1/\sqrt{d_h}$ mostly), so that heads, each with a block of singular vectors, add up to $\beta$
    times the associations of a token with those before it; and
    $W_V, W_O$ are halves of the singular value decomposition of `gain` times $\hat E^+ D\, E_{out}^{+\top}$, so that what a head brings
    raises the logits of tokens that tend to follow. Mehta (2025) suggests queries and keys. Measured (the recipe `corpus-warmstart`, each
    start at its own best rate), all of the gain comes from the embedding, for which a table of word2vec does as well (`embedding=`); queries and keys add
    nothing, nor do values and outputs. The first loss is often higher than that of random weights, since every token's row raises its own
    logit; it is lower after a few steps. $\hat E$ is whatever the model's norm makes of E, so that LayerNorm, RMSNorm and their gains are all served; positions
    are left out of it, and rotary ones turn the scores with the distance. Everything else stays as it is.

    Args:
        model: pre-norm, with a table of tokens: GPT-2, Llama, Mistral, Qwen2 and their kin of Hugging Face, or any module that holds an
            `nn.Embedding` and our `Encoder` (and, for its logits, an `nn.Linear` over the tokens).
        counts: a fitted `heedful.corpus.Cooccurrence` of the model's token numbers, over the text it will be trained on.
        parts: which of `"embedding"`, `"qk"` and `"ov"`.
        embedding: another table `(V, d)` to start from, as vectors of word2vec; its rows are set to length 1.
        beta: how strong scores are at the start; `gain`: how strong values are.
        layer: whose maps are set; $\hat E$ is exact for the first.
        smoothing: the exponent of context counts, see `heedful.corpus.association`.
        tokenizer: names of the model's tokens, where the counts are of words; by default the counts' numbers are the model's.

    >>> from heedful.corpus import Cooccurrence
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16))
    >>> ids = torch.randint(11, (500,), generator=torch.Generator().manual_seed(0)).numpy()
    >>> print(warm_start_(model, Cooccurrence(3, vocabulary=11).fit([ids]), parts=("embedding",)))
    GPT2LMHeadModel: embedding set from counts; 11 of 11 tokens occur in them
      written: transformer.wte.weight
    """
    chosen = _checked(parts)
    check_number(beta=beta, gain=gain)
    check_number(0, most=1, smoothing=smoothing)
    check_whole(0, layer=layer)
    if not hasattr(counts, "association") or not hasattr(counts, "vocabulary_"):
        raise InvalidArgument(f"counts must be a fitted heedful.corpus.Cooccurrence; got {type(counts).__name__}")
    start = find_start(model, layer)
    if "qk" in chosen and start.unscored:
        raise Unsupported(f"{start.unscored}; parts=('embedding', 'ov') sets the others")
    rows = _rows(start, counts, tokenizer)
    directed = _part(counts.association("ppmi", smoothing=smoothing), rows)
    notes = list(start.notes) if {"qk", "ov"} & set(chosen) else []
    known = np.flatnonzero(_seen(counts, rows, directed))
    if len(known) < 2:
        raise InvalidArgument("the counts hold fewer than two of the model's tokens; count what the model reads")
    changed: list[str] = []
    with torch.no_grad():
        if "embedding" in chosen:
            table = _given(embedding, start) if embedding is not None else None
            if table is None:
                table = _spectral(
                    _part(counts.association("ppmi", directed=False, smoothing=smoothing), rows), start.size
                )
            changed += _set_embedding(start, table, known)
        scores = follows = None
        if {"qk", "ov"} & set(chosen):
            seen = start.normed()[known]
            inner = directed[known][:, known]
            if "qk" in chosen:
                scores = _set_scores(start, seen, inner.T, beta)
                changed += start.written("query", "key")
            if "ov" in chosen:
                outward = start.head_table()[known]
                follows = _set_values(start, seen, outward, inner, gain)
                changed += start.written("value", "output")
    return WarmStart(
        type(model).__name__,
        chosen,
        tuple(dict.fromkeys(changed)),
        start.tokens,
        len(known),
        start.tied,
        layer,
        scores,
        follows,
        tuple(notes),
    )


def _checked(parts: Any) -> tuple[Part, ...]:
    given = (parts,) if isinstance(parts, str) else tuple(parts)
    for part in given:
        check_choice(PARTS, parts=part)
    if not given:
        raise InvalidArgument(f"parts must name one or more of {', '.join(PARTS)}; got {parts!r}")
    return tuple(part for part in PARTS if part in given)


def _rows(start: Start, counts: Any, tokenizer: Any) -> np.ndarray:
    """For each of the model's tokens its number in the counts, -1 where it has none."""
    size = len(counts.vocabulary_)
    if tokenizer is not None:
        names = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), start.tokens)))
        rows = counts.vocabulary_.encode(names)
        return np.pad(rows, (0, start.tokens - len(rows)), constant_values=-1)
    if size > start.tokens:
        raise InvalidArgument(
            f"the counts have {size} tokens and the model {start.tokens}; count with the model's tokenizer, or give tokenizer="
        )
    numbered = size == start.tokens or hasattr(getattr(counts, "tokenizer", None), "convert_ids_to_tokens")
    if not numbered and list(counts.vocabulary_.words) != list(map(str, range(size))):
        raise InvalidArgument(
            f"the counts are of {size} words and the model has {start.tokens} tokens: word numbers are no token numbers; count token numbers, or give tokenizer="
        )
    return np.where(np.arange(start.tokens) < size, np.arange(start.tokens), -1)


def _part(matrix: Any, rows: np.ndarray) -> Any:
    """A matrix between the counts' tokens as one between the model's; rows and columns of tokens without a number are empty."""
    try:
        from scipy.sparse import csr_array
    except ImportError:
        raise MissingExtra("scipy", "corpus") from None
    places = np.flatnonzero(rows >= 0)
    pick = csr_array((np.ones(len(places)), (places, rows[places])), shape=(len(rows), matrix.shape[0]))
    return (pick @ matrix @ pick.T).tocsr()


def _seen(counts: Any, rows: np.ndarray, directed: Any) -> np.ndarray:
    """Tokens that stand beside another one in the counts."""
    beside = np.asarray(abs(directed).sum(axis=0)) + np.asarray(abs(directed).sum(axis=1))
    occurs = np.where(rows >= 0, np.asarray(counts.word_counts_)[rows], 0) > 0
    return (beside.reshape(-1) > 0) & occurs


def _spectral(matrix: Any, size: int) -> np.ndarray:
    """Eigenvectors of the largest absolute eigenvalues times their roots, `(V, size)`; signs fixed by the largest entry.

    Smoothing of contexts makes PPMI slightly asymmetric; what is decomposed is its symmetric part.
    """
    matrix = (matrix + matrix.T) / 2
    wanted = min(size, matrix.shape[0])
    if matrix.shape[0] <= WHOLE or wanted > matrix.shape[0] // 2:
        values, vectors = np.linalg.eigh(matrix.toarray())
    else:
        from scipy.sparse.linalg import eigsh

        values, vectors = eigsh(matrix, wanted, which="LM", v0=np.ones(matrix.shape[0]))
    order = np.argsort(-np.abs(values), kind="stable")[:wanted]
    vectors = vectors[:, order]
    signs = np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(wanted)])
    table = vectors * np.where(signs == 0, 1.0, signs) * np.sqrt(np.abs(values[order]))
    return np.pad(table, ((0, 0), (0, size - wanted)))


def _given(embedding: Any, start: Start) -> np.ndarray:
    table = np.asarray(embedding.detach().cpu() if isinstance(embedding, Tensor) else embedding, dtype=np.float64)
    if table.shape != (start.tokens, start.size):
        raise InvalidArgument(
            f"embedding must have shape (tokens, size) = ({start.tokens}, {start.size}); got {table.shape}"
        )
    if not np.isfinite(table).all():
        raise InvalidArgument("embedding must hold finite numbers; got NaN or infinity")
    return table


def _set_embedding(start: Start, table: np.ndarray, known: np.ndarray) -> list[str]:
    """Rows of length one for tokens that occur; a head of its own gets the same rows."""
    length = np.linalg.norm(table, axis=1, keepdims=True)
    known = known[length[known, 0] > 0]
    rows = torch.from_numpy(table[known] / length[known])
    for weight in start.tables():
        weight[torch.from_numpy(known).to(weight.device)] = rows.to(weight)
    return start.table_names()


def _inverse(table: np.ndarray) -> np.ndarray:
    """The pseudo-inverse `(d, V)` of a tall matrix, by its Gram matrix; directions without variance are left out."""
    return np.linalg.pinv(table.T @ table, rcond=FLAT, hermitian=True) @ table.T


def _set_scores(start: Start, seen: np.ndarray, matrix: Any, beta: float) -> float:
    """Queries and keys; returns the share of the matrix (rows the current token) that they hold."""
    inverse = _inverse(seen)
    u, sigma, v = _svd(inverse @ (matrix @ inverse.T))
    rank = min(start.key_heads * start.head_size, len(sigma))
    root = np.sqrt(abs(beta / start.scale) * sigma[:rank])
    query, key = (_blocks(side[:, :rank] * root, start) for side in (u * np.sign(beta / start.scale or 1.0), v))
    # Heads that share a key divide its scores among themselves.
    start.write("query", np.repeat(query, start.groups, axis=0) / start.groups)
    start.write("key", key)
    return _share(matrix, seen @ (u[:, :rank] * sigma[:rank]), seen @ v[:, :rank])


def _set_values(start: Start, seen: np.ndarray, outward: np.ndarray, matrix: Any, gain: float) -> float:
    """Values and outputs; returns the share of the matrix (columns the next token) that they hold."""
    u, sigma, v = _svd(_inverse(seen) @ (matrix @ _inverse(outward).T))
    rank = min(start.key_heads * start.head_size, len(sigma))
    root = np.sqrt(abs(gain) * sigma[:rank])
    value, output = (_blocks(side[:, :rank] * root, start) for side in (u * np.sign(gain or 1.0), v))
    start.write("value", value)
    start.write("output", np.repeat(output, start.groups, axis=0) / start.groups)
    return _share(matrix, seen @ (u[:, :rank] * sigma[:rank]), outward @ v[:, :rank])


def _svd(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u, sigma, vt = np.linalg.svd(matrix)
    return u, sigma, vt.T


def _blocks(side: np.ndarray, start: Start) -> np.ndarray:
    """`(d, rank)` as `(heads, head size, d)`: head h has the h-th block of columns, zeros where there are no more."""
    padded = np.pad(side, ((0, 0), (0, start.key_heads * start.head_size - side.shape[1])))
    return padded.T.reshape(start.key_heads, start.head_size, -1)


def _share(matrix: Any, left: np.ndarray, right: np.ndarray) -> float:
    """1 - |matrix - left right^T|^2 / |matrix|^2, without writing the product out."""
    total = float((matrix.data**2).sum())
    cross = float(((matrix @ right) * left).sum())
    own = float(((left.T @ left) * (right.T @ right)).sum())
    return 1 - (total - 2 * cross + own) / total if total else 0.0
