"""Three drawn worlds in which the time of an event says what it is, with the best that any model can do.

- *gap switch*: the gap to the next event chooses its type; without that gap nobody does better than a guess among four.
- *phase clock*: the type is the sector of a hidden clock of period 7.3, whose phase has to be found from the past.
- *marked Hawkes*: type 0 triggers type 1 soon and type 2 late; the waiting time says which of them it is.

Each generator draws in the order that its docstring says, so that a seed is a data set.
"""

from __future__ import annotations

import math

import numpy as np

from experiments.events import Events, listed

ETA, SWITCHED = 0.1, 8  # noise and types of the gap switch
PERIOD, SECTORS, ASTRAY = 7.3, 6, 0.05  # of the phase clock
END = 100.0  # of the Hawkes process
BASE = np.array([0.20, 0.02, 0.02])  # mu_k
WEIGHT = np.array([[0.0, 0.25, 0.25], [0.45, 0.0, 0.0], [0.45, 0.0, 0.0]])  # alpha_kj
DECAY = np.array([[1.0, 0.5, 0.5], [6.0, 1.0, 1.0], [0.3, 1.0, 1.0]])  # beta_kj


def gap_switch(count: int, seed: int, n: int = 64) -> Events:
    """`e_i = (e_{i-1} + 1 + floor(g_i)) mod 8` with gaps `g_i` uniform on (0, 4); one event in ten is drawn at random instead.

    Per sequence: the gaps, the first type, n uniform numbers, n types.
    """
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        gaps = random.uniform(0, 4, n)
        types = np.empty(n, np.int64)
        types[0] = random.integers(SWITCHED)
        uniform, drawn = random.random(n), random.integers(SWITCHED, size=n)
        for i in range(1, n):
            types[i] = (types[i - 1] + 1 + int(gaps[i])) % SWITCHED if uniform[i] >= ETA else drawn[i]
        sequences.append((types, np.cumsum(gaps)))
    return listed(sequences, tuple(map(str, range(SWITCHED))))


def gap_switch_best(known: bool) -> float:
    """The best accuracy, with the time of the next event or without it: `1 - eta + eta / 8` and `(1 - eta) / 4 + eta / 8`."""
    return (1 - ETA) / (1 if known else 4) + ETA / SWITCHED


def gap_switch_chances(events: Events) -> np.ndarray:
    """`[targets, 8]`: the chance of each type at the time of each event that has one before it."""
    places = events.targets
    gaps = np.floor(events.times[places] - events.times[places - 1]).astype(np.int64)
    expected = (events.types[places - 1] + 1 + gaps) % SWITCHED
    return (1 - ETA) * np.eye(SWITCHED)[expected] + ETA / SWITCHED


def phase_clock(count: int, seed: int, n: int = 48) -> Events:
    """`e_i = floor(6 frac((t_i + phi) / 7.3))`, gaps exponential of mean 11; one event in twenty is drawn at random instead.

    Per sequence: the phase, the gaps, n uniform numbers, n types.
    """
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        phase = random.uniform(0, PERIOD)
        times = np.cumsum(random.exponential(11.0, n))
        uniform, drawn = random.random(n), random.integers(SECTORS, size=n)
        sequences.append((np.where(uniform >= ASTRAY, _sector(times + phase), drawn), times))
    return listed(sequences, tuple(map(str, range(SECTORS))))


def _sector(times: np.ndarray) -> np.ndarray:
    turns = times / PERIOD
    return np.floor(SECTORS * (turns - np.floor(turns))).astype(np.int64)


def phase_clock_chances(events: Events, points: int = 2000) -> np.ndarray:
    """`[targets, 6]`: the chance of each type at its time, by the posterior of the phase on a grid of so many points."""
    phases = (np.arange(points) + 0.5) * PERIOD / points
    rows = []
    for types, times in events.pairs():
        sector = _sector(times[:, None] + phases)  # [n, points]
        right = sector == types[:, None]
        likelihood = np.log(np.where(right, 1 - ASTRAY + ASTRAY / SECTORS, ASTRAY / SECTORS))
        posterior = np.cumsum(likelihood, 0)[:-1]
        posterior = np.exp(posterior - posterior.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
        in_sector = np.stack([(posterior * (sector[1:] == k)).sum(1) for k in range(SECTORS)], 1)
        rows.append((1 - ASTRAY) * in_sector + ASTRAY / SECTORS)
    return np.concatenate(rows)


def hawkes(count: int, seed: int) -> Events:
    """`lambda_k(t) = mu_k + sum_j alpha_kj beta_kj sum_{t_i < t, e_i = j} exp(-beta_kj (t - t_i))` on [0, 100], by thinning.

    Per proposal, with the total intensity right after the last one as bound: an exponential wait of that rate, a uniform number that
    accepts it if times the bound it is at most the total intensity there, and, once accepted, one that chooses the type.
    """
    random = np.random.default_rng(seed)
    links = [(k, j, WEIGHT[k, j] * DECAY[k, j], DECAY[k, j]) for k, j in np.argwhere(WEIGHT > 0).tolist()]
    base = BASE.tolist()
    sequences = []
    for _ in range(count):
        now, types, times = 0.0, [], []
        excited = [0.0] * len(links)
        intensity = list(base)
        while True:
            bound = sum(intensity)
            wait = random.exponential(1 / bound)
            now += wait
            if now >= END:
                break
            excited = [value * math.exp(-beta * wait) for value, (*_, beta) in zip(excited, links, strict=True)]
            intensity = list(base)
            for value, (k, _, weight, _) in zip(excited, links, strict=True):
                intensity[k] += weight * value
            total = sum(intensity)
            if random.random() * bound > total:
                continue
            event = int(np.searchsorted(np.cumsum(intensity), random.random() * total))
            types.append(event)
            times.append(now)
            for at, (k, j, weight, _) in enumerate(links):
                if j == event:
                    excited[at] += 1
                    intensity[k] += weight
        sequences.append((np.array(types, np.int64), np.array(times)))
    return listed(sequences, ("parent", "soon", "late"), END)


def hawkes_intensities(events: Events) -> np.ndarray:
    """`[targets, 3]`: the intensity of each type just before each event that has one before it."""
    rows = []
    for types, times in events.pairs():
        apart = times[:, None] - times  # [n, n]
        past = np.tril(np.ones_like(apart, dtype=bool), -1)
        own = np.tile(BASE, (len(times), 1))
        for k in range(3):
            weight, decay = WEIGHT[k, types], DECAY[k, types]
            own[:, k] += (weight * decay * np.exp(-decay * np.where(past, apart, np.inf))).sum(1)
        rows.append(own[1:])
    return np.concatenate(rows)


def hawkes_chances(events: Events) -> np.ndarray:
    """`[targets, 3]`: the chance of each type at its time, its share of the intensity."""
    intensity = hawkes_intensities(events)
    return intensity / intensity.sum(1, keepdims=True)


def places(events: Events) -> np.ndarray:
    """The place of each target in its sequence, from 1 on."""
    return events.targets - events.starts[events.sequence[events.targets]]


# By name: generator, chances with the time known, training and test sequences
WORLDS = {
    "gap switch": (gap_switch, gap_switch_chances, 2000, 200),
    "phase clock": (phase_clock, phase_clock_chances, 2000, 300),
    "marked Hawkes": (hawkes, hawkes_chances, 1500, 200),
}
