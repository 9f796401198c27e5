"""What a head does, by tests: how much of its attention goes where a role says, beside heads that look at random places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful._result import Result

# A role is named where its score is at least so large, so many times chance, and so many standard deviations of random heads above
# chance, over at least so many queries.
FLOOR, TIMES, DEVIATIONS, PLACES = 0.3, 2.0, 4.0, 3
# Most heads leave some weight on special tokens, as a place to rest: only where it is most of their attention is it what they do.
MOST = 0.5

# Role -> the simpler one that explains it, where that scores nearly as much: articles mostly stand beside their nouns.
EXPLAINED = {"article to noun": "next token", "noun to article": "previous token", "special tokens": "first token"}
ENOUGH = 0.8

SINKS = ("first token", "special tokens")
# Name -> what a head of that role does.
ROLES = {
    "previous token": "attends to the token before",
    "next token": "attends to the token after",
    "itself": "attends to the token itself",
    "first token": "rests on the first token",
    "special tokens": "rests on special tokens such as [SEP]",
    "duplicate token": "attends to other places of the same token",
    "induction": "attends to what followed the same token before",
    "same word class": "attends from an article, preposition, pronoun or punctuation mark to others of that class",
    "article to noun": "attends from an article to its noun",
    "noun to article": "attends from a noun to its article",
    "verb to object": "attends from a verb to its object",
    "object to verb": "attends from an object to its verb",
    "pronoun to noun": "attends from a pronoun to the noun it stands for",
}


@dataclass(frozen=True)
class Role(Result):
    r"""One test of one head.

    Args:
        name: of `ROLES`.
        score: the share of attention that goes where the role says, $s = \frac{1}{m} \sum_i \sum_{j \in T_i} a_{ij}$, over the m queries
            i that have such keys $T_i$.
        chance: the mean score of random heads: each row of weights as it is, its places among the keys shuffled.
        threshold: what the score must reach: the largest of 0.3 (0.5 for a sink), twice chance, and chance plus four standard deviations of
            random heads. It exceeds 1 where a text has too few places for any score to tell.
        places: m.
    """

    name: str
    score: float
    chance: float
    threshold: float
    places: int

    _also = ("passed",)

    @property
    def passed(self) -> bool:
        return self.places >= PLACES and self.score >= self.threshold

    def __str__(self) -> str:
        return f"{self.name}, {self.score:.2f} of its attention; chance {self.chance:.2f}"


@dataclass(frozen=True)
class Tally:
    """What a test has summed up of several heads, `[heads]` each; tallies of several texts add up."""

    score: Tensor
    chance: Tensor
    variance: Tensor
    places: Tensor

    def __add__(self, other: Tally) -> Tally:
        parts = zip(self._parts(), other._parts(), strict=True)
        return Tally(*(mine + theirs for mine, theirs in parts))

    def _parts(self) -> tuple[Tensor, ...]:
        return self.score, self.chance, self.variance, self.places

    def roles(self, name: str) -> list[Role]:
        """The test's result for each head."""
        floor = MOST if name in SINKS else FLOOR
        roles = []
        for score, chance, variance, places in zip(*(part.tolist() for part in self._parts()), strict=True):
            count = max(places, 1)
            random = chance / count
            threshold = max(floor, TIMES * random, random + DEVIATIONS * math.sqrt(max(variance, 0.0)) / count)
            roles.append(Role(name, score / count, random, threshold, int(places)))
        return roles


def measured(weights: Tensor, wanted: Tensor, among: Tensor) -> Tally:
    r"""How much attention goes to the wanted keys, and what random heads give.

    Row i of a random head is a shuffle of row i over the v keys that count. With the sum r and the sum of squares q of these weights, and t
    wanted keys, its score has the mean $r t / v$ and the variance $\frac{t (v - t)}{v (v - 1)} (q - r^2 / v)$.

    Args:
        weights: `[heads, Q, K]`.
        wanted: boolean `[Q, K]`, the keys that the role says.
        among: boolean `[Q, K]`, the keys that it could have been. A query with no wanted key, or with no other, has no say.

    >>> import torch
    >>> even = torch.full((1, 4, 4), 0.25)
    >>> ahead = torch.eye(4, dtype=torch.bool).roll(1, 1)
    >>> measured(even, ahead, torch.ones(4, 4, dtype=torch.bool)).roles("next token")[0]
    Role(name='next token', score=0.25, chance=0.25, threshold=0.5, places=4)
    """
    wanted = wanted & among
    t, v = wanted.sum(-1), among.sum(-1)
    rows = ((t > 0) & (v > t)).nonzero().flatten()
    a, wanted, among, t, v = weights[:, rows].double(), wanted[rows], among[rows], t[rows], v[rows]
    live = (a != 0).any(-1)  # [H, Q]
    inside = a * among
    total = inside.sum(-1)
    spread = (inside.square().sum(-1) - total.square() / v).clamp_min(0)
    chance, variance = total * t / v, spread * t * (v - t) / (v * (v - 1)).clamp_min(1)
    score, chance, variance = ((part * live).sum(-1) for part in ((a * wanted).sum(-1), chance, variance))
    return Tally(score, chance, variance, live.sum(-1))


def position_tests(special: Sequence[bool], visible: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The tests that need no more than places: by name, the wanted keys and those that it could have been, `[n, n]` each."""
    n = len(special)
    at = torch.arange(n)
    marks = torch.tensor(special, dtype=torch.bool)
    words = visible & ~marks & ~marks[:, None]
    step = at[None] - at[:, None]
    far = visible & ~marks[:, None] & (step != 0)
    return {
        "previous token": (step == -1, words),
        "next token": (step == 1, words),
        "itself": (step == 0, words),
        "first token": ((at == 0).expand(n, n), far),
        "special tokens": (marks.expand(n, n), far),
    }


def ordered(roles: Iterable[Role]) -> tuple[Role, ...]:
    """The roles that a head passes, the largest multiple of chance first and sinks last, without those that another one explains.

    >>> article, ahead = (Role(name, 0.7, 0.1, 0.3, 23) for name in ("article to noun", "next token"))
    >>> [role.name for role in ordered([article, ahead])]
    ['next token']
    """
    passed = {role.name: role for role in roles if role.passed}
    explained = {
        name
        for name, other in EXPLAINED.items()
        if {name, other} <= set(passed) and passed[other].score >= ENOUGH * passed[name].score
    }
    kept = [role for name, role in passed.items() if name not in explained]
    return tuple(sorted(kept, key=lambda role: (role.name in SINKS, -role.score / max(role.chance, 1e-9))))
