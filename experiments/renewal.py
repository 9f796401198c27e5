"""What stands beside a learned law of waiting times: one rate, log-normal waiting times, and the process that drew the data.

Every figure is the negative log-likelihood per event, in nats and the unit of the data: `(sum over sequences of integral_0^T lambda -
sum_i log lambda(t_i)) / events`, so the wait from 0 to the first event and the one from the last event to the end T count too.
"""

from __future__ import annotations

import math

import numpy as np

from experiments.events import Events
from heedful._errors import InvalidArgument

# Times were kept in float32, so that some gaps are 0; shorter ones count as this.
SHORTEST = 1e-6


def waits(events: Events) -> tuple[np.ndarray, np.ndarray]:
    """Every waiting time of processes watched from 0 to the end: `[events]` that ended by an event, `[sequences]` that were cut."""
    if events.end is None:
        raise InvalidArgument("these events have no end, until when they were watched")
    begun, cut = [], []
    for _, times in events.pairs():
        all_times = np.concatenate(([0.0], times))
        begun.append(np.diff(all_times))
        cut.append(events.end - all_times[-1])
    return np.concatenate(begun), np.array(cut)


def constant_rate(train: Events, test: Events) -> dict[str, float]:
    """A Poisson process of one rate; NLL per event with the time behind the last event."""
    gaps, tails = waits(train)
    rate = len(gaps) / (gaps.sum() + tails.sum())
    gaps, tails = waits(test)
    return {"rate": rate, "nll": float(rate * (gaps.sum() + tails.sum()) / len(gaps) - math.log(rate))}


def log_normal(train: Events, test: Events) -> dict[str, float]:
    """A renewal process of log-normal waiting times, the cut ones included in its likelihood; NLL per event."""
    from scipy.optimize import minimize
    from scipy.stats import norm

    def total(parameters: np.ndarray, events: Events) -> float:
        location, scale = parameters[0], math.exp(parameters[1])
        gaps, tails = waits(events)
        logs = np.log(np.maximum(gaps, SHORTEST))
        density = norm.logpdf(logs, location, scale) - logs
        survival = norm.logsf(np.log(np.maximum(tails, SHORTEST)), location, scale)
        return float(-(density.sum() + survival.sum()) / len(gaps))

    gaps, _ = waits(train)
    logs = np.log(np.maximum(gaps, SHORTEST))
    found = minimize(total, [logs.mean(), math.log(logs.std())], args=(train,), method="Nelder-Mead")
    return {"location": float(found.x[0]), "scale": math.exp(found.x[1]), "nll": total(found.x, test)}


# mu, and (alpha, beta) of each exponential: lambda(t) = mu + sum_i sum_c alpha_c exp(-beta_c (t - t_i))
TRUE_HAWKES = {"hawkes1": (0.2, ((0.8, 1.0),)), "hawkes2": (0.2, ((0.4, 1.0), (8.0, 20.0)))}


def true_hawkes(name: str, test: Events) -> float:
    """NLL per event of the process that drew hawkes1 or hawkes2: `(integral of lambda - sum of log lambda(t_i)) / events`."""
    base, parts = TRUE_HAWKES[name]
    total, count = 0.0, 0
    for _, times in test.pairs():
        apart = times[:, None] - times
        past = np.tril(np.ones_like(apart, dtype=bool), -1)
        intensity = np.full(len(times), base)
        total += base * test.end if test.end is not None else 0.0
        for alpha, beta in parts:
            intensity += alpha * np.exp(-beta * np.where(past, apart, np.inf)).sum(1)
            total += alpha / beta * (1 - np.exp(-beta * (test.end - times))).sum()
        total -= np.log(intensity).sum()
        count += len(times)
    return float(total / count)
