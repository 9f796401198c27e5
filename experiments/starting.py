"""Small language models that start from counts of their tokens: what is prepared once, and how they are trained.

`texts` keeps the tokens to train on and to validate with in `tokens.npz`. `prepare` counts, lets `heedful.convert.warm_start_` write into a model of
`heedful.nn`, and keeps its weights in `starts-*.npz`; a machine that has these files needs neither the texts nor scipy and gensim. `trained`
puts them into the stacked models of `stacked.py` and trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments import corpus, stacked
from experiments.stacked import Protocol
from heedful import Softmax
from heedful._errors import Unsupported
from heedful.convert import warm_start_
from heedful.nn import Encoder

WINDOW, BETA = 10, 0.3
# Tokens: as many as 500 steps of the large size read, so that counts know no more text than training sees.
TRAIN, VALID = 8_000_000, 100_000
FULL = "embeddings + query/key + value/output"
# What a start sets besides random weights: which table, queries and keys, values and outputs. The first ones are trained first.
STARTS = {
    "random": ("", False, False),
    "random, rows of length 1": ("unit", False, False),
    "embeddings": ("counts", False, False),
    "embeddings + query/key": ("counts", True, False),
    FULL: ("counts", True, True),
    "embeddings of word2vec": ("sgns", False, False),
    "embeddings + value/output": ("counts", False, True),
    "query/key on a random table": ("", True, False),
}


@dataclass(frozen=True)
class Scale:
    """A size of models and texts."""

    name: str
    layers: int
    width: int
    heads: int
    counted: int  # tokens that are counted
    epochs: int  # of word2vec
    valid: int  # tokens that losses are taken on
    protocol: Protocol


SMALL = Scale("small", 1, 64, 2, 2_000_000, 5, 30_000, Protocol(context=64, batch=16, steps=200, warmup=20))
LARGE = Scale("large", 2, 128, 4, TRAIN, 3, VALID, Protocol(context=128, batch=128, steps=500, warmup=50))


class Language(nn.Module):
    """A table of tokens that is the head too, and an encoder without biases: the shape of `stacked`, as a module."""

    def __init__(self, vocabulary: int, scale: Scale) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, scale.width)
        kernels = [Softmax() for _ in range(scale.layers)]
        self.encoder = Encoder(scale.width, scale.heads, kernels, norm="rms", bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.table(ids), is_causal=True) @ self.table.weight.T


def texts(folder: Path, say: Callable[[str], None] = print) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on and to validate with, from the file or made and written there."""
    file = folder / "tokens.npz"
    if not file.is_file():
        corpus.prepare(folder, say)
        train, valid = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "valid"))
        np.savez_compressed(file, train=train[:TRAIN], valid=valid[:VALID])
    with np.load(file) as data:
        return data["train"], data["valid"]


def prepare(folder: Path, scale: Scale, say: Callable[[str], None] = print) -> dict[str, np.ndarray]:
    """The table, maps of the first layer and word2vec's table, from the file or made and written there."""
    file = folder / f"starts-{scale.name}.npz"
    if not file.is_file():
        from heedful.corpus import Cooccurrence

        tokens = texts(folder, say)[0][: scale.counted].astype(np.int64)
        documents = np.split(tokens, np.flatnonzero(tokens == 0))
        say(f"{scale.name}: counting {len(tokens):,} tokens")
        counts = Cooccurrence(WINDOW, vocabulary=corpus.VOCABULARY, progress=False).fit(documents)
        torch.manual_seed(0)
        model = Language(corpus.VOCABULARY, scale)
        report = warm_start_(model, counts, beta=BETA)
        say(str(report))
        attention: Any = model.encoder.layers[0].self_attn  # type: ignore[union-attr]
        arrays = {
            "table": model.table.weight,
            "maps": attention.in_proj_weight.T,
            "out": attention.out_proj.weight.T,
            "known": torch.from_numpy(counts.word_counts_ > 0),
            "held": torch.tensor([report.scores or 0.0, report.follows or 0.0]),
        }
        plain = Language(corpus.VOCABULARY, scale)
        apart = warm_start_(plain, counts, ("qk",), beta=BETA)
        arrays["maps_on_random"] = plain.encoder.layers[0].self_attn.in_proj_weight.T  # type: ignore[union-attr]
        arrays["random_table"] = plain.table.weight
        say(str(apart))
        sgns = word2vec(documents, scale, say)
        np.savez(file, sgns=sgns, **{name: part.detach().numpy() for name, part in arrays.items()})
    with np.load(file) as data:
        return dict(data)


def word2vec(documents: Sequence[np.ndarray], scale: Scale, say: Callable[[str], None] = print) -> np.ndarray:
    """Vectors of skip-gram with negative samples (gensim), the control that knows no PPMI: rows of length 1."""
    try:
        from gensim.models import Word2Vec
    except ImportError:
        raise Unsupported(
            "the control needs gensim: pip install gensim; or bring starts-*.npz of another machine"
        ) from None
    lines = [list(map(str, part.tolist())) for part in documents]
    say(f"{scale.name}: word2vec, {scale.epochs} epochs")
    model = Word2Vec(
        lines,
        vector_size=scale.width,
        window=WINDOW,
        min_count=1,
        sg=1,
        negative=5,
        epochs=scale.epochs,
        seed=1,
        workers=1,
    )
    table = np.random.default_rng(0).normal(size=(corpus.VOCABULARY, scale.width))
    for token in range(corpus.VOCABULARY):
        if str(token) in model.wv:
            table[token] = model.wv[str(token)]
    return (table / np.linalg.norm(table, axis=1, keepdims=True)).astype(np.float32)


def start(name: str, scale: Scale, seeds: Sequence[int], arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Weights of a start, one model for each seed."""
    table, queries, values = STARTS[name]
    weights = stacked.initial(scale.layers, scale.width, scale.protocol, seeds)
    d = scale.width
    if table == "unit":
        weights["embedding"] = weights["embedding"] / weights["embedding"].norm(dim=-1, keepdim=True)
    elif table:
        known = torch.from_numpy(arrays["known"])
        weights["embedding"][:, known] = torch.from_numpy(arrays["table" if table == "counts" else "sgns"])[known]
    if queries and not table:
        # The maps belong to the table that they were computed for.
        weights["embedding"][:] = 0.02 * torch.from_numpy(arrays["random_table"])
    if queries:
        weights["qkv"][0, ..., : 2 * d] = torch.from_numpy(arrays["maps" if table else "maps_on_random"])[:, : 2 * d]
    if values:
        weights["qkv"][0, ..., 2 * d :] = torch.from_numpy(arrays["maps"])[:, 2 * d :]
        weights["out"][0] = torch.from_numpy(arrays["out"])
    return weights


@cache
def _loaded(folder: Path, scale: Scale) -> tuple[dict[str, np.ndarray], Tensor, Tensor]:
    train, valid = (torch.from_numpy(part.astype(np.int32)) for part in texts(folder))
    return prepare(folder, scale), train, valid


def trained(
    name: str,
    scale: Scale,
    rates: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    at: Sequence[int],
    folder: Path,
    device: str,
) -> dict[str, Any]:
    """Losses of one start after some steps, `[step][rate][seed]`; None for a model that diverged."""
    arrays, train, valid = _loaded(folder, scale)
    began = time.perf_counter()
    scale = replace(scale, protocol=replace(scale.protocol, steps=steps))
    own = start(name, scale, seeds, arrays)
    weights = {key: torch.cat([part] * len(rates), dim=-3) for key, part in own.items()}
    models = [(rate, seed) for rate in rates for seed in seeds]
    found = stacked.curves(
        weights,
        scale.heads,
        [rate for rate, _ in models],
        [seed for _, seed in models],
        train,
        valid[: scale.valid],
        scale.protocol,
        at,
        device=device,
    )
    finite = np.array(found).reshape(len(at), len(rates), len(seeds))
    losses = np.where(np.isfinite(finite), finite, None).tolist()
    return {"steps": list(at), "losses": losses, "seconds": round(time.perf_counter() - began, 1)}
