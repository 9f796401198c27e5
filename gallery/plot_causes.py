"""Which words does the embedding of a sentence depend on? Causal graphs over the words of two texts, and the smallest sets that change it.

MiniLM turns a text into a vector. `heedful.explain` reads its last layer's attention as a causal model over the words, learns a graph for each
head, and looks there for words without which the vector changes (its cosine with the whole text's falls below 0.7). What it finds is
verified by masking the words and reading again. Classifiers and language models are asked the same way; there the answer must change.

How to read it: words stand from top to bottom, arcs are edges with a mark at each end. A dashed arc with two heads: neither word is the
cause of the other, something that is no word of the text moves both. The black box is where the answer is read off, here the mean of
all tokens; the coloured ones are the set. In a dense graph arcs that touch neither are pale.

Run `python gallery/plot_causes.py [picture.png]`. It needs the extras hf, demo and plot, and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import pyplot

from heedful.bridges.reading import demo_model_path, load
from heedful.lens.causes import CausalExplainer

TEXTS = (
    "The animal did not cross the street because it was too tired.",
    "When the water of the river had risen above the old stone bridge, the farmers drove their cattle up the hill, carried what "
    "they could out of the cellars, and sat down under the oaks to wait for the morning.",
)


def main(picture: Path) -> None:
    explainer = CausalExplainer(*load(demo_model_path()), candidates=40)
    found = [explainer.explain(text) for text in TEXTS]
    # Each graph in its own proportions, side by side at the same scale.
    figure, axes = pyplot.subplots(1, len(found), figsize=(10, 14), layout="constrained")
    for ax, one in zip(axes, found, strict=True):
        print(one)
        one.plot(ax)
        ax.set_anchor("N")
        words = " + ".join(one.words)
        more = f" (or any of {len(one.sets) - 1} other sets)" if len(one.sets) > 1 else ""
        told = (
            f"the embedding changes without {words}{more}"
            if one.found
            else f"no small set changes the embedding; nearest: {words}"
        )
        head = "" if one.head is None else f", head {one.head}"
        ax.set_title(f"{told}\nlayer {one.layer}{head}: {len(one.pag.edges())} edges, N = {one.pag.samples}, alpha = {one.pag.alpha:g}",
                     fontsize="medium")  # fmt: skip
    figure.savefig(picture, dpi=110)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
