"""ListOps of the Long Range Arena: nested lists of operations on digits, of 501 to 1,999 tokens, and their value.

The generator of google-research/long-range-arena (`lra_benchmarks/data/listops.py`), draw by draw: a node below the deepest
level is a list with probability 1/4, of 2 to 10 parts, whose operation is drawn after its parts; a tree is kept if its
length fits and it was not seen before. Two things differ, and neither changes the distribution. The original walks a Python
set, whose order no seed fixes; here trees keep the order in which they were drawn. And trees are drawn in chunks, each with
a seed of its own, so that the file is the same however many processes drew it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.store import processes, workers

OPERATIONS = ("MIN", "MAX", "MED", "SM")
# Padding is 0, a digit is one more than itself.
FIRST_OPERATION, END, SYMBOLS = 11, 15, 16
SPLITS = {"train": 96_000, "dev": 2_000, "test": 2_000}
CHUNK = 1_000

MAX_DEPTH, MAX_PARTS, SHORTEST, LONGEST, LIST_SHARE = 10, 10, 501, 1_999, 0.25

Sample = tuple[bytes, int]  # tokens and value


class Listed(NamedTuple):
    """Samples in one row: the tokens of sample i are `tokens[ends[i - 1] : ends[i]]`."""

    tokens: np.ndarray
    ends: np.ndarray
    values: np.ndarray

    def padded(self, first: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens `[count, length]`, zero behind each end; lengths; values."""
        starts = np.concatenate(([0], self.ends))
        table = np.zeros((count, length), dtype=np.uint8)
        for row, at in enumerate(range(first, first + count)):
            table[row, : starts[at + 1] - starts[at]] = self.tokens[starts[at] : starts[at + 1]]
        return table, np.diff(starts)[first : first + count], self.values[first : first + count]


def draw(source: random.Random) -> Iterator[Sample]:
    """Trees that fit, as tokens without parentheses and their value, without end; the same one may come twice."""
    chance, bits = source.random, source.getrandbits
    tokens = bytearray()

    def below(limit: int) -> int:
        # What choice and randint of the standard library draw, without their detours.
        width = limit.bit_length()
        drawn = bits(width)
        while drawn >= limit:
            drawn = bits(width)
        return drawn

    def digit() -> int:
        drawn = below(10)
        tokens.append(1 + drawn)
        return drawn

    def operation(depth: int) -> int:
        place = len(tokens)
        tokens.append(END)
        count = 2 + below(MAX_PARTS - 1)
        deeper = depth + 1 < MAX_DEPTH
        parts = [operation(depth + 1) if deeper and chance() <= LIST_SHARE else digit() for _ in range(count)]
        kind = below(len(OPERATIONS))
        tokens[place] = FIRST_OPERATION + kind
        tokens.append(END)
        return value_of(kind, parts)

    while True:
        tokens.clear()
        value = operation(1) if chance() <= LIST_SHARE else digit()
        if SHORTEST <= len(tokens) <= LONGEST:
            yield bytes(tokens), value


def value_of(kind: int, parts: list[int]) -> int:
    """The least, the greatest, the median rounded down, or the sum modulo 10."""
    if kind == 2:
        ordered, half = sorted(parts), len(parts) // 2
        return ordered[half] if len(parts) % 2 else (ordered[half - 1] + ordered[half]) // 2
    return (min, max, None, sum)[kind](parts) % 10  # type: ignore[misc]


def chunk(seed: int, number: int, count: int = CHUNK) -> list[Sample]:
    """The first `count` different trees of one stream of random numbers."""
    expressions: dict[bytes, int] = {}
    for tokens, value in draw(random.Random(f"listops {seed} {number}")):
        expressions.setdefault(tokens, value)
        if len(expressions) == count:
            return list(expressions.items())
    raise AssertionError("draw has no end")


def generate(total: int, seed: int = 0, size: int = CHUNK, jobs: int = 1) -> Listed:
    """Different trees in the order in which they were drawn, chunk by chunk."""
    expressions: dict[bytes, int] = {}
    done = 0
    while len(expressions) < total:
        # More chunks than this are drawn only where two of them drew the same tree.
        wanted = -(-(total - len(expressions)) // size)
        for part in _chunks(seed, range(done, done + wanted), size, jobs):
            for tokens, value in part:
                expressions.setdefault(tokens, value)
        done += wanted
    kept = list(expressions.items())[:total]
    ends = np.cumsum([len(tokens) for tokens, _ in kept])
    tokens = np.frombuffer(b"".join(tokens for tokens, _ in kept), dtype=np.uint8)
    return Listed(tokens, ends, np.array([value for _, value in kept], dtype=np.uint8))


def _chunks(seed: int, numbers: range, size: int, jobs: int) -> Iterator[list[Sample]]:
    if jobs == 1 or len(numbers) == 1:
        yield from (chunk(seed, number, size) for number in numbers)
        return
    with workers(min(jobs, len(numbers))) as pool:
        yield from pool.map(chunk, [seed] * len(numbers), numbers, [size] * len(numbers))


def prepare(folder: Path, total: int, seed: int = 0, say: Callable[[str], None] = print) -> Listed:
    """The samples from their file in the folder, which is written first where there is none."""
    file = folder / f"listops-{total}-{seed}.npz"
    if not file.is_file():
        say(f"drawing {total:,} ListOps samples")
        data = generate(total, seed, jobs=processes())
        part = file.with_suffix(".part.npz")
        np.savez(part, **data._asdict())
        part.replace(file)
    with np.load(file) as kept:
        return Listed(**kept)
