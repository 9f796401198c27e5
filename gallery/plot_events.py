"""What comes next, if it happens at time t? Curves over the waiting time, beside the truth.

Two drawn worlds. In the first an order is followed by a parcel, soon, or by a complaint, late: the longer nothing has come, the likelier is a
complaint, and Bayes' rule says how likely. In the second every machine has a cycle of 7.3 hours with six stages and a phase of its own; an event shows the stage at a
random time. What it will show next depends on when.

`heedful.events.NextEvent` learns both from sequences alone. Above: its curves (lines) beside the truth (dashes), and the curves of a machine over three cycles.
Below: how well the predicted law of the waits is calibrated, and the periodogram in which the cycle is found before any training.

Run `python gallery/plot_events.py [picture.png]`. It takes about two minutes, needs the extras train, tables and plot and no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot

from heedful.events import NextEvent, periods

SEQUENCES, EPOCHS = 1000, 10
SHARE, SOON, LATE, PERIOD = 0.6, 0.5, 5.0, 7.3

Sequence = tuple[np.ndarray, np.ndarray]


def shop(rng: np.random.Generator) -> Sequence:
    """An order, then a parcel after about SOON with probability SHARE or a complaint after about LATE, then an order after about 1; and again."""
    types, gaps = [], []
    for _ in range(12):
        parcel = rng.random() < SHARE
        types += ["order", "parcel" if parcel else "complaint"]
        gaps += [rng.exponential(1.0), rng.exponential(SOON if parcel else LATE)]
    types.append("order")
    return np.array(types), np.cumsum([*gaps, rng.exponential(1.0)])


def parcel_after(wait: np.ndarray) -> np.ndarray:
    """The probability of a parcel if what follows an order comes after this wait, by Bayes' rule."""
    parcel, complaint = (share * np.exp(-wait / mean) / mean for share, mean in ((SHARE, SOON), (1 - SHARE, LATE)))
    return parcel / (parcel + complaint)


def machine(rng: np.random.Generator) -> Sequence:
    """Stages of a cycle of PERIOD, seen at random times."""
    times = np.cumsum(rng.exponential(11.0, 40))
    return (6 * ((times + rng.uniform(0, PERIOD)) / PERIOD % 1)).astype(int), times


def main(picture: Path) -> None:
    rng = np.random.default_rng(0)
    shops, machines = ([world(rng) for _ in range(SEQUENCES)] for world in (shop, machine))
    options = {"epochs": EPOCHS, "batch_size": 32, "random_state": 0, "patience": None}
    first = NextEvent(embed_dim=32, num_heads=2, layers=1, **options).fit(shops)
    second = NextEvent(rotate_values=True, layers=1, **options).fit(machines)

    figure, ((left, right), (below, last)) = pyplot.subplots(
        2, 2, figsize=(12, 8), width_ratios=(1, 1.3), layout="constrained"
    )
    waits = np.linspace(0.0, 4.0, 200)
    curve = first.probability_curve(shop(rng), waits)
    parcel, complaint = (curve.probabilities[:, list(curve.classes).index(name)] for name in ("parcel", "complaint"))
    truth = parcel_after(waits)
    for line, dashes, name, colour in (
        (parcel, truth, "parcel", "#2471a3"),
        (complaint, 1 - truth, "complaint", "#c0392b"),
    ):
        left.plot(waits, line, color=colour, linewidth=2, label=name)
        left.plot(waits, dashes, color=colour, linewidth=1, linestyle="--")
    left.set(
        xlabel="wait since the order",
        ylabel="probability if it happens then",
        ylim=(0, 1),
        title="what comes next depends on when",
    )
    left.legend(frameon=False)
    error = float(np.abs(parcel - truth).max())

    second.probability_curve(machine(rng), np.linspace(0.0, 3 * PERIOD, 300)).plot(right)
    right.set_title("six stages of a machine over three cycles")
    periods(machines).plot(last).set_title("the cycle of the machines, before any training")
    judged = second.evaluate([machine(rng) for _ in range(100)], at="true")
    judged.plot(below).set_title("how long until the next event: calibration")
    figure.savefig(picture, dpi=150)
    print(f"largest error of the left curves: {error:.3f}")
    print(
        f"stages foreseen, their time known: {judged.accuracy:.3f}; calibration error of the waits {judged.calibration_error:.3f}"
    )
    print(f"cycle found: {second.cycles_[0]:.4f} (true: {PERIOD})" if second.cycles_ else "no cycle found")
    print(f"written to {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "events.png"))
