"""Small sequences of events in which the wait says what comes."""

import numpy as np


def waits(count, seed, length=23, labels=("slow", "quick")):
    """Gaps are exponential; an event is quick where the gap before it is below 0.7."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        gaps = rng.exponential(1.0, int(rng.integers(5, length)))
        sequences.append((np.where(gaps < 0.7, labels[1], labels[0]), 50 * rng.random() + np.cumsum(gaps)))
    return sequences


def flat(sequences):
    """The same as a dict of flat arrays."""
    return {
        "types": np.concatenate([types for types, _ in sequences]),
        "times": np.concatenate([times for _, times in sequences]),
        "offsets": np.cumsum([0, *(len(times) for _, times in sequences)]),
    }
