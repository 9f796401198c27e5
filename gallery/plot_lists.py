"""What does the context of a list change? Results of an image search before and after they are re-scored together.

Scikit-learn's digits of 8 x 8 points. `heedful.ranking.ListReranker` learns on the digits 0 to 4 what a good list looks like, from the similarities among its members alone, and
re-ranks lists of the digits 5 to 9, which it has not seen: each image asks for the others of its digit. Every query has two rows of results, first by cosine, then in the new order;
a green frame is the same digit, a red one another. Shown are the query that gains most, one in the middle, and the one that loses most: context helps on average, not always.
Right: the average precision of every query before and after, the three of the left marked.

Printed are mean average precision and first places, beside those of methods without training.

Run `python gallery/plot_lists.py [picture.png]`. It takes about a minute, needs the extras train, tables and plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from sklearn.datasets import load_digits

from heedful.ranking import ListReranker, average_precision, rerank

SHOWN, CANDIDATES, EPOCHS = 16, 100, 4
OTHERS = ("cosine", "alpha-dba", "k-reciprocal", "diffusion")


def precisions(order: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The average precision of each list."""
    return np.array([average_precision(labels[row] == label) for row, label in zip(order, labels, strict=True)])


def thumbnails(axes: np.ndarray, pictures: np.ndarray, good: np.ndarray) -> None:
    for ax, picture, right in zip(axes, pictures, good, strict=True):
        ax.imshow(picture, cmap="gray_r", interpolation="nearest")
        for side in ax.spines.values():
            side.set(color="tab:green" if right else "tab:red", linewidth=2.5)


def main(picture: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    vectors = (images - images.mean(0)).astype(np.float32)
    learned, asked = labels < 5, labels > 4
    model = ListReranker(
        CANDIDATES, embed_dim=64, num_heads=4, affinity="jaccard", epochs=EPOCHS, random_state=0, progress=False
    ).fit(vectors[learned], labels[learned])

    X, y, pictures = vectors[asked], labels[asked], images[asked].reshape(-1, 8, 8)
    orders = {name: rerank(None, X, name).order for name in OTHERS} | {"ListReranker": model.rerank(X).order}
    quality = {name: precisions(order, y) for name, order in orders.items()}
    for name, order in orders.items():
        first = (y[order[:, 0]] == y).mean()
        print(f"{name:<13} mAP {100 * quality[name].mean():.1f}, first places {100 * first:.1f}")

    gain = quality["ListReranker"] - quality["cosine"]
    queries = np.argsort(-gain)[[0, len(gain) // 2, -1]]
    figure = pyplot.figure(figsize=(15, 5.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2.4, 1))
    axes = left.subplots(6, SHOWN + 1, subplot_kw={"xticks": [], "yticks": []})
    for at, query in enumerate(queries):
        for row, name in zip(axes[2 * at : 2 * at + 2], ("cosine", "ListReranker"), strict=True):
            found = orders[name][query, :SHOWN]
            thumbnails(row[1:], pictures[found], y[found] == y[query])
            row[1].set_ylabel("before" if name == "cosine" else "after", fontsize=9)
            value = quality[name][query]
            row[-1].annotate(f"{value:.2f}", (1.15, 0.5), xycoords="axes fraction", va="center", fontsize=9)
        axes[2 * at, 0].imshow(pictures[query], cmap="gray_r", interpolation="nearest")
        axes[2 * at, 0].set_title("query", fontsize=9)
        axes[2 * at + 1, 0].set_axis_off()
    left.suptitle("The first results before and after re-ranking; behind each list its average precision", fontsize=11)
    ax = right.subplots()
    ax.plot((0, 1), (0, 1), color="gray", linewidth=1)
    for digit in np.unique(y):
        of = y == digit
        ax.scatter(quality["cosine"][of], quality["ListReranker"][of], s=8, alpha=0.6, linewidths=0, label=f"a {digit}")
    ax.scatter(
        quality["cosine"][queries], quality["ListReranker"][queries], s=70, facecolors="none", edgecolors="black"
    )
    ax.set(xlabel="average precision before", ylabel="after", xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    ax.legend(frameon=False, loc="lower right", markerscale=2)
    better = (quality["ListReranker"] > quality["cosine"]).mean()
    ax.set_title(f"{len(y)} queries, {100 * better:.0f} % of them better", fontsize=11)
    figure.savefig(picture, dpi=110)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lists.png"))
