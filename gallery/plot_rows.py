"""Which rows did this prediction rely on? Attention to stored rows, and what the prediction would be without each.

Two moons of points, each point a row of a table with two columns and a class. `heedful.tables.DatapointClassifier` predicts a new row by looking at the stored
ones. Left and middle: two rows that are asked for (stars), and the stored rows in the size of their share of the attention. Right: the ten most attended rows of the second, with
their class and the effect of taking each out of the table; attention says where the network looks, the effect what that does.

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

ROWS, EPOCHS = 200, 20
ASKED = np.array([[0.5, -0.55], [0.45, 0.2]])
COLOURS = np.array(["tab:blue", "tab:orange"])


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
        shares = np.mean([model.row_attention(asked, layer=layer)[0] for layer in (0, 1)], axis=0)
        ax.scatter(*X.T, s=8 + 2500 * shares, c=COLOURS[y], alpha=0.6, linewidths=0)
        ax.scatter(*asked.T, marker="*", s=220, color="black", zorder=3)
        probability = model.predict_proba(asked)[0]
        likely = probability.argmax()
        ax.set(
            title=f"asked: {model.classes_[likely]}, {probability[likely]:.2f}",
            xlabel="first column",
            ylabel="second column",
        )
    explanation = model.explain_row(ASKED[1:], top=10)
    explanation.plot(third)
    for place, effect in zip(range(10)[::-1], explanation.effects, strict=True):
        third.text(0.001, place, f"{effect:+.4f} without it", va="center", fontsize=8, color="white")
    print(explanation)
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "rows.png"))
