"""Where in time is the evidence? Bursts hidden in noise, found by a classifier that was told only which series have one.

Series of three channels and unequal lengths, autoregressive noise, a tenth of the values missing. Half of them hold a short burst, somewhere, in one channel;
the labels say whether, not where. `heedful.series.SeriesClassifier` counts convolutions and fits a ridge, in seconds, and its scores are sums
over steps: `evidence` says what each segment and channel adds, and the parts sum to the score exactly.

Left and right: an unseen series with a burst (the dashed frame shows where) and one without; red speaks for a burst, blue against it. Below: how much of the
evidence lies in the burst's own segment and channel, over all unseen series that have one, beside the other cells, and where the truth is among 24 cells by rank.

Run `python gallery/plot_evidence.py [picture.png]`. It takes about half a minute, needs the extras tables and plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from matplotlib.patches import Rectangle

from heedful.series import SeriesClassifier

SERIES, CHANNELS, SEGMENTS, BURST = 240, 3, 8, 16

Cases = tuple[list[np.ndarray], np.ndarray, np.ndarray]


def drawn(rng: np.random.Generator, count: int) -> Cases:
    """Series, whether they hold a burst, and (segment, channel, first step) of it."""
    X, has, places = [], [], []
    for at in range(count):
        steps = int(rng.integers(160, 241))
        x = rng.standard_normal((CHANNELS, steps))
        for step in range(1, steps):
            x[:, step] += 0.7 * x[:, step - 1]
        segment, channel = int(rng.integers(SEGMENTS)), int(rng.integers(CHANNELS))
        begin = min(max(int((segment + 0.5) * steps / SEGMENTS) - BURST // 2, 0), steps - BURST)
        if at % 2:
            wave = np.sin(np.pi * np.arange(BURST) / 2 + rng.uniform(0, 2 * np.pi))
            x[channel, begin : begin + BURST] += 4.5 * wave * np.sqrt(np.hanning(BURST))
        x[rng.random(x.shape) < 0.1] = np.nan
        X.append(x)
        has.append("burst" if at % 2 else "noise")
        places.append((segment, channel, begin))
    return X, np.array(has), np.array(places)


def main(picture: Path) -> None:
    rng = np.random.default_rng(0)
    (X, y, _), (unseen, answers, places) = (drawn(rng, SERIES) for _ in range(2))
    model = SeriesClassifier(segments=SEGMENTS, random_state=0).fit(X, y)
    evidence = model.evidence(unseen)
    cells = evidence.values[..., 0] - evidence.values[..., 1]  # for a burst, against noise

    figure, ((left, right), (below, last)) = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained")
    order = np.argsort(evidence.scores[:, 0] - evidence.scores[:, 1])
    clear, noise = (order[answers[order] == name] for name in ("burst", "noise"))
    # Of each the one in the middle.
    for ax, case in ((left, int(clear[len(clear) // 2])), (right, int(noise[len(noise) // 2]))):
        evidence.plot(case, "burst", ax=ax)
        share = model.predict_proba(unseen[case : case + 1])[0, 0]
        ax.set_title(f"{answers[case]}: probability of a burst {share:.2f}")
        if answers[case] == "burst":
            _, channel, begin = places[case]
            frame = Rectangle((begin, channel + 0.02), BURST, 0.96, fill=False, linestyle="--", linewidth=2)
            ax.add_patch(frame)

    own = cells[clear, places[clear, 0], places[clear, 1]]
    others = cells[clear].reshape(len(clear), -1)
    bins = np.linspace(others.min(), others.max(), 40).tolist()
    below.hist(others.ravel(), bins=bins, density=True, color="#9aa5b1", label="all cells")
    below.hist(own, bins=bins, density=True, color="#c0392b", alpha=0.7, label="the burst's own")
    below.set(xlabel="evidence for a burst, log-odds", ylabel="density", title="series with a burst: 24 cells each")
    below.legend(frameon=False)

    ranks = (others > own[:, None]).sum(1) + 1
    first = float((ranks == 1).mean())
    last.hist(ranks, bins=(np.arange(25) + 0.5).tolist(), color="#c0392b")
    last.axhline(len(ranks) / 24, color="black", linestyle="--", linewidth=1)
    last.text(24, len(ranks) / 24, "chance ", ha="right", va="bottom")
    last.set(xlabel="rank of the burst's cell by evidence", ylabel="series", title=f"first of 24 in {first:.0%}")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    gap = np.abs(evidence.scores[:, 1] - evidence.scores[:, 0] - model.decision_function(unseen)).max()
    print(f"accuracy on unseen series {model.score(unseen, answers):.3f}")
    print(f"the burst's segment and channel has most evidence in {first:.1%} (chance 4.2%)")
    print(f"evidence and score differ by at most {gap:.0e}; written to {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "plot_evidence.png"))
