"""How many directions does attention have? Singular values of MiniLM's layers, softmax against primal.

The paper on Primal-Attention (Chen et al. 2023) shows that singular values of its layer fall faster than those of softmax attention.
Part of that is no discovery: the kernel of a primal layer has at most the rank of a head's width, here 32, where a softmax matrix
of n tokens may have rank n. So this picture has three kinds of matrices of the same model and text:

- the softmax coefficients of all six layers;
- the cosine kernel of the same queries and keys, whose rank is bounded as that of a primal layer;
- K_X of the last layer after `heedful.convert.primalize` has made it primal. K_X is made of queries, keys and the layer's input; the
  weights that least squares finds do not enter it, so a few sentences out of docstrings are enough here.

Run `python gallery/plot_spectrum.py [picture.png]`. It needs the extras hf, demo and plot, and no network.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps, pyplot

from heedful import convert, lens
from heedful.bridges.reading import demo_model_path, load

TEXT = (
    "When the water of the river had risen above the old stone bridge, the farmers drove their cattle up the hill, carried "
    "what they could out of the cellars, and sat down under the oaks to wait. Nobody spoke of the harvest. An engineer from the "
    "city measured the flood with a long pole, wrote the figure into his book, and said that it would fall before the morning "
    "came. It did not. On the third day a boat brought bread, two nurses and a letter in which the government promised to build "
    "a dam; by then the mill was gone, and the children had named the new lake after the dog that first swam across it."
)


def sentences(count: int) -> list[str]:
    """Sentences out of the docstrings of torch's layers."""
    found: dict[str, None] = {}
    for _, layer in sorted(inspect.getmembers(torch.nn, inspect.isclass)):
        for part in re.split(r"\n\s*\n", inspect.getdoc(layer) or ""):
            for one in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(part.split())):
                if 6 <= len(one.split()) <= 40 and re.fullmatch(r"[A-Z][\w ,;:'()-]+\.", one):
                    found[one] = None
    return list(found)[:count]


def mean_decay(found: lens.Spectrum) -> np.ndarray:
    """Singular values relative to the largest, the geometric mean over heads."""
    length = min(len(one.values) for one in found)
    values = np.array([one.values[:length] for one in found])
    return np.exp(np.log(np.maximum(values / values[:, :1], 1e-6)).mean(axis=0))


def main(picture: Path) -> None:
    model, tokenizer = load(demo_model_path())
    made = convert.primalize(model, sentences(60), rank=32, tokenizer=tokenizer, batch_size=8, ridge=0.1)
    before = lens.spectrum(model, TEXT, tokenizer=tokenizer)
    after = lens.spectrum(made.model, TEXT, tokenizer=tokenizer, layers=[-1])
    softmax, last = before.select("softmax"), before.layers[-1]
    width = before.select("cosine")[0].bound

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.2), sharey=True, layout="constrained")
    for ax, name in zip(axes, ("softmax", "cosine"), strict=False):
        for layer in before.layers:
            values = mean_decay(before.select(name, layer))
            colour = colormaps["viridis"](0.92 * layer / last)
            ax.semilogy(range(1, len(values) + 1), values, color=colour, label=f"layer {layer}")
    axes[0].set(title="softmax attention", ylabel="singular value / largest, mean of heads")
    axes[1].set(title="cosine kernel of the same layers")
    axes[0].legend(frameon=False, fontsize="small")
    kinds = {
        "softmax": (before.select("softmax", last), "C1", "-"),
        "cosine kernel": (before.select("cosine", last), "C0", "--"),
        "primal, K_X": (after.select("primal", last), "C3", "-"),
    }
    for label, (found, colour, style) in kinds.items():
        values = mean_decay(found)
        ranked = f"{label} (effective rank {found.effective_rank:.1f})"
        axes[2].semilogy(range(1, len(values) + 1), values, style, color=colour, label=ranked, lw=2)
    axes[2].set(title=f"the last layer, layer {last}")
    axes[2].legend(frameon=False, fontsize="small")
    for ax in axes:
        ax.axvline(width, color="gray", lw=0.8, ls=":")
        ax.set(xlabel="place", xlim=(0, softmax[0].bound), ylim=(1e-5, 1.5))
    axes[1].annotate("width of a head:\nno rank beyond it", (width, 0.6), xytext=(width + 4, 0.35), fontsize="small")
    figure.suptitle(f"Singular values of MiniLM's attention on {softmax[0].rows} tokens")
    figure.savefig(picture, dpi=120)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
