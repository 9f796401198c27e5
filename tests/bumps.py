"""A task that needs attention."""

import numpy as np


def two_bumps(count, seed, steps=11):
    """A bump in channel 0, a later one in channel 1; the class says whether their signs agree.

    Neither one step nor any weighted sum of steps knows it: what is needed is to bring two steps together.
    """
    rng = np.random.default_rng(seed)
    X, signs = 0.1 * rng.normal(size=(count, 2, steps)), rng.choice([-1, 1], size=(count, 2))
    X[np.arange(count), 0, rng.integers(0, 5, count)] += 2 * signs[:, 0]
    X[np.arange(count), 1, rng.integers(6, steps, count)] += 2 * signs[:, 1]
    return X, np.where(signs.prod(1) > 0, "same", "other")
