"""Poker hands, drawn: five cards in the order in which they were dealt, and what the hand is worth.

The table of UCI (Poker Hand) is no package's; its law is known exactly, so it is drawn anew.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np

from experiments.tabular import Data

CARDS, TRAIN = 5, 25_010
NAMES = (
    "nothing", "one pair", "two pairs", "three of a kind", "straight", "flush", "full house", "four of a kind", "straight flush", "royal flush",
)  # fmt: skip
RARE = (8, 9)  # the published training part has five of each, which chance does not give
SUITS = tuple(range(0, 2 * CARDS, 2))


def counts() -> tuple[int, ...]:
    """How many of the C(52, 5) hands each class has, by formula.

    >>> counts()
    (1302540, 1098240, 123552, 54912, 10200, 5108, 3744, 624, 36, 4)
    """
    straight_flushes, flushes = 9 * 4, 4 * comb(13, 5)
    runs = 10 * 4**5 - 40
    pair = 13 * comb(4, 2) * comb(12, 3) * 4**3
    two = comb(13, 2) * comb(4, 2) ** 2 * 11 * 4
    three = 13 * comb(4, 3) * comb(12, 2) * 4**2
    full, four = 13 * comb(4, 3) * 12 * comb(4, 2), 13 * 48
    known = (pair, two, three, runs, flushes - 40, full, four, straight_flushes, 4)
    return (comb(52, 5) - sum(known), *known)


def worth(cards: np.ndarray) -> np.ndarray:
    """The class of each hand of cards 0 to 51, `[hands, 5]`: suit = card // 13, rank = card % 13, an ace is 0 and may stand above the king.

    >>> worth(np.array([[0, 12, 11, 10, 9], [0, 14, 2, 3, 4], [5, 18, 31, 44, 7]]))
    array([9, 4, 7])
    """
    ranks = np.sort(cards % 13, axis=1)
    flush = (cards // 13 == cards[:, :1] // 13).all(1)
    # Pairs of cards of one rank: 1, 2, 3, 4 or 6 of them say all of pairs, triples and fours.
    equal = sum((ranks[:, i] == ranks[:, j]).astype(int) for i, j in combinations(range(CARDS), 2))
    royal = (ranks == [0, 9, 10, 11, 12]).all(1)
    straight = (equal == 0) & ((ranks[:, -1] - ranks[:, 0] == 4) | royal)
    found = np.select([equal == 1, equal == 2, equal == 3, equal == 4, equal == 6], [1, 2, 3, 6, 7], 0)
    found = np.where(straight, 4, found)
    found = np.where(flush, 5, found)
    return np.where(straight & flush, np.where(royal, 9, 8), found)


def every_count() -> tuple[int, ...]:
    """Classes counted over all hands."""
    total = comb(52, CARDS)
    hands = np.fromiter((card for hand in combinations(range(52), CARDS) for card in hand), np.int8, CARDS * total)
    parts = np.array_split(hands.reshape(total, CARDS).astype(np.int16), 8)
    return tuple(sum(np.bincount(worth(part), minlength=10) for part in parts).tolist())


def dealt(count: int, random: np.random.Generator) -> np.ndarray:
    """Hands of five different cards, in order, `[count, 5]`."""
    return np.concatenate(
        [random.random((size, 52)).argsort(1)[:, :CARDS] for size in [10_000] * (count // 10_000) + [count % 10_000]]
    )


def rare(count: int, random: np.random.Generator) -> np.ndarray:
    """`count` straight flushes and as many royal ones, in any order."""
    hands = []
    for kind in RARE:
        for _ in range(count):
            start = 9 if kind == 9 else random.integers(9)
            ranks = (start + np.arange(CARDS)) % 13
            hands.append(random.permutation(13 * random.integers(4) + ranks))
    return np.array(hands)


def table(cards: np.ndarray, categorical: tuple[int, ...]) -> Data:
    """Suit and rank of each card, ten columns of codes."""
    cells = np.stack((cards // 13, cards % 13), axis=2).reshape(len(cards), 2 * CARDS)
    return Data("poker", cells.astype(np.float64), worth(cards), categorical, len(NAMES))


def sorted_table(cards: np.ndarray) -> Data:
    """What somebody who knows the game would give a model: ranks in order, the steps between them, and how many suits there are."""
    ranks = np.sort(cards % 13, axis=1)
    suits = np.sort(cards // 13, axis=1)
    kinds = 1 + (np.diff(suits, axis=1) > 0).sum(1)
    cells = np.concatenate((ranks, np.diff(ranks, axis=1), kinds[:, None]), axis=1)
    return Data("poker, sorted", cells.astype(np.float64), worth(cards), (), len(NAMES))
