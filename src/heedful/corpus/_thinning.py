"""Frequent words left out at random, by a rule that neither order nor the cut of a corpus changes."""

from __future__ import annotations

import numpy as np


def chances(occurrences: np.ndarray, subsample: float) -> np.ndarray:
    """With which probability each word stays, `(V,)`: min(1, sqrt(t / f)) for a share f of all words."""
    shares = np.maximum(occurrences, 1) / max(1, int(occurrences.sum()))
    return np.minimum(1.0, np.sqrt(subsample / shares))


def thinned(ids: np.ndarray, lengths: np.ndarray, chance: np.ndarray, seed: int) -> np.ndarray:
    """Numbers of tokens, -1 for those left out.

    What is drawn for a token depends on the seed, its place and all words of its document, so that a document loses the same words
    wherever it stands.
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(ids)) - np.repeat(starts, lengths)
    own = _mixed(ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _mixed((places + 1).astype(np.uint64)))
    whole = np.zeros(len(lengths), np.uint64)
    np.add.at(whole, np.repeat(np.arange(len(lengths)), lengths), own)
    seeds = np.full(1, seed, np.uint64)
    drawn = _mixed(own ^ np.repeat(_mixed(whole + _mixed(seeds)), lengths))
    share = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.where((ids >= 0) & (share < chance[ids]), ids, -1)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Numbers of 64 bits scattered: the last steps of splitmix64 (Steele, Lea & Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
