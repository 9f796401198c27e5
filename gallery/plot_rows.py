"""Which rows did this prediction rely on? Votes of stored rows, and what the prediction would be without each.

Two moons of points, each point a row of a table with two columns and a class. `heedful.tables.DatapointClassifier` predicts a new row by votes of the stored
ones, weighed by how near they lie in a space that it learned. Left and middle: two rows that are asked for (stars), and the stored rows in the size of their share of the
votes. Right: the ten largest votes for the second, in the colour of their class; beside each by how much the prediction falls when this row is taken out of the table. The share says where
the network looks, the effect what that does.

Printed is the test that says whether looking matters: the score when every column of the stored rows is scrambled, also for a model whose rows cannot look at one another.

Run `python gallery/plot_rows.py [picture.png]`. It takes about a minute, needs the extras train, tables and plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from sklearn.datasets import make_moons

from heedful.tables import DatapointClassifier

ROWS, EPOCHS = 200, 40
ASKED = np.array([[0.5, -0.55], [0.45, 0.2]])
COLOURS = {"upper": "tab:blue", "lower": "tab:orange"}


def main(picture: Path) -> None:
    X, y = make_moons(ROWS, noise=0.2, random_state=0)
    new, truth = make_moons(1000, noise=0.2, random_state=1)
    names = np.array(["upper", "lower"])
    model = DatapointClassifier(members=3, epochs=EPOCHS, patience=EPOCHS, random_state=0).fit(X, names[y])
    control = DatapointClassifier(members=3, epochs=EPOCHS, patience=EPOCHS, between_rows=False, random_state=0)
    control.fit(X, names[y])
    for label, one in (("looking at rows", model), ("not looking", control)):
        print(f"{label}:\n{one.corruption_test(new, names[truth], n_repeats=5)}")

    figure, (first, second, third) = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    for ax, asked in ((first, ASKED[:1]), (second, ASKED[1:])):
        shares = model.row_attention(asked)[0]
        for name, colour in COLOURS.items():
            here = names[y] == name
            ax.scatter(*X[here].T, s=6 + 4000 * shares[here], c=colour, alpha=0.6, linewidths=0, label=f"class {name}")
        ax.scatter(*asked.T, marker="*", s=160, color="black", zorder=3, label="asked")
        probability = model.predict_proba(asked)[0]
        likely = probability.argmax()
        ax.set(
            title=f"asked: {model.classes_[likely]}, {probability[likely]:.2f}",
            xlabel="first column",
            ylabel="second column",
        )
    for handle in second.legend(frameon=False, loc="upper right").legend_handles:
        handle.set_sizes([40])
    explanation = model.explain_row(ASKED[1:], top=10)
    explanation.plot(third)
    for bar, effect, target in zip(third.patches, explanation.effects, explanation.targets, strict=True):
        bar.set_color(COLOURS[target])
        third.annotate(f"{effect:+.4f}", (bar.get_width(), bar.get_y() + bar.get_height() / 2), (4, 0), textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    third.set(
        xlabel="share of the votes; beside it the effect", xlim=(0, 1.15 * max(explanation.shares)), ylim=(-1.6, 9.6)
    )
    third.legend(frameon=False, loc="lower right")
    print(explanation)
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "rows.png"))
