"""Attention without a model: who attends to whom, by how often words stand together in a text.

Python's own handbook is counted here (`heedful.corpus.Cooccurrence`), which takes a second, and a sentence about Python is read by `CorpusAttention`: the weight
between two words is a softmax over their associations, positive PMI in the order in which they stand. Nothing was trained.

Above the sentence, arcs from each word to the one it attends to most by counts alone; below it, the same for a head of all-MiniLM-L6-v2, a trained model
whose 72 heads were searched for the one that agrees best. The number is the correlation of the two maps, a word and itself left out. It flatters: it is the best
of 72 (the histogram shows the others), and much of it is distance alone, since words that go together stand together and many heads look at neighbours.
`heedful.lens.corpus.explain_heads` takes both out, and then next to nothing is left in this model (`heedful reproduce corpus-heads`).

Run `python gallery/plot_counts.py [picture.png]`. It takes some seconds, needs the extras corpus, demo and plot and no network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from heedful.bridges.reading import demo_model_path, load
from heedful.corpus import Cooccurrence, CorpusAttention
from heedful.lens import observe

SENTENCE = "if the file is not found the open function raises an error and returns no value"
WINDOW = 8


def counted() -> CorpusAttention:
    """Attention from counts of the handbook's paragraphs."""
    paragraphs = [part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name])]
    counts = Cooccurrence(WINDOW, min_count=2, unknown="keep", progress=False).fit(paragraphs)
    return CorpusAttention(counts, directed=True)


def between_words(weights: np.ndarray) -> np.ndarray:
    """Rows that sum to 1 over the other words."""
    own = np.where(np.eye(len(weights), dtype=bool), 0.0, weights)
    return own / own.sum(axis=1, keepdims=True)


def heads(sentence: str) -> dict[tuple[int, int], np.ndarray]:
    """What every head of MiniLM gives from word to word, by layer and head."""
    model, tokenizer = load(demo_model_path())
    seen = observe(model, sentence, keep=("weights",), tokenizer=tokenizer)
    if list(seen.tokens[0][1:-1]) != sentence.split():
        raise ValueError("MiniLM cuts a word of this sentence in pieces; take one of plain words")
    return {
        (record.index, head): between_words(record.weights_of(head, sequence=0).double().numpy()[1:-1, 1:-1])
        for record in seen
        for head in range(record.heads)
    }


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of two maps, a word and itself left out."""
    apart = ~np.eye(len(one), dtype=bool)
    return float(np.corrcoef(one[apart], other[apart])[0, 1])


def draw_arcs(ax: Axes, weights: np.ndarray, side: int, colour: str) -> None:
    """From each word an arc to the one it attends to most; the thicker, the more."""
    for place, row in enumerate(weights):
        best = int(row.argmax())
        # Arcs to the right and to the left need opposite signs to stay on one side; long ones are flatter.
        bend = -side * np.sign(best - place) * min(0.45, 4 / abs(best - place))
        ax.add_patch(
            FancyArrowPatch(
                (place, 0.16 * side),
                (best, 0.16 * side),
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>",
                mutation_scale=11,
                linewidth=0.6 + 5 * row[best],
                color=colour,
                alpha=0.35 + 0.6 * row[best],
            )
        )


def draw_map(ax: Axes, weights: np.ndarray, words: list[str], title: str, colours: str) -> None:
    ax.imshow(weights, cmap=colours, vmin=0, vmax=max(0.4, weights.max()))
    ax.set_title(title, fontsize=10)
    ax.set_xticks(range(len(words)), words, rotation=60, ha="right", fontsize=7)
    ax.set_yticks(range(len(words)), words, fontsize=7)
    ax.set(xlabel="is looked at", ylabel="looks")


def main(path: Path) -> None:
    words = SENTENCE.split()
    attention = counted()
    ours = attention.attention(SENTENCE)[0].numpy()
    theirs = heads(SENTENCE)
    values = {place: agreement(ours, weights) for place, weights in theirs.items()}
    best = max(values, key=lambda place: values[place])
    name = f"MiniLM, head {best[0]}.{best[1]}"

    figure, panels = pyplot.subplot_mosaic(
        [["arcs"] * 3, ["ours", "theirs", "all"]],
        figsize=(12, 8.6),
        layout="constrained",
        height_ratios=(1, 1.1),
        width_ratios=(1, 1, 0.8),
    )
    top, right = panels["arcs"], panels["all"]
    draw_arcs(top, ours, 1, "tab:orange")
    draw_arcs(top, theirs[best], -1, "tab:blue")
    for place, word in enumerate(words):
        top.text(place, 0, word, ha="center", va="center", fontsize=12)
    top.text(-0.6, 2.3, "counted in Python's handbook, nothing trained", color="tab:orange", fontsize=12, va="top")
    top.text(-0.6, -2.3, f"{name}, the best of {len(values)}: r = {values[best]:.2f}", color="tab:blue", fontsize=12)
    top.set(xlim=(-0.7, len(words) - 0.3), ylim=(-2.5, 2.5))
    top.set_axis_off()
    draw_map(panels["ours"], ours, words, "by counts", "Oranges")
    draw_map(panels["theirs"], theirs[best], words, name, "Blues")
    right.hist(list(values.values()), bins=18, color="tab:gray")
    right.axvline(values[best], color="tab:blue")
    right.set(xlabel="correlation with the map by counts", ylabel="heads")
    right.set_title(f"all {len(values)} heads of MiniLM", fontsize=10)
    figure.savefig(path, dpi=150)
    for place in np.argsort(-ours.max(axis=1))[:5]:
        print(f"{words[place]} -> {words[int(ours[place].argmax())]} {ours[place].max():.2f}")
    print(f"{name}: r = {values[best]:.2f}, median head {np.median(list(values.values())):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("counts.png"))
