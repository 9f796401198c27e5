"""Arithmetic on token vectors: the paper's example of why knowledge must turn with the input (Ma & Ying 2023, sec. 3.2).

Twelve tokens `+ - 0 ... 9` are the coordinate vectors. `fixed` has learned that embedding: exchange the vectors of plus and
minus and it computes the other thing. `with_knowledge` is told the token vectors Z, and is right in every embedding.

>>> from heedful.lens.symmetry import check_equivariance
>>> decode(fixed(encode("2+1")), torch.eye(12))
'3'
>>> report = check_equivariance(fixed, d=12, n=3, sampler=sample, trials=40)
>>> report.passed, report.counterexample.move, round(report.counterexample.error, 4)
(False, 'swap of coordinates 0 and 1', 1.4142)
>>> check_equivariance(with_knowledge, d=12, sampler=sample_with_knowledge, trials=40).largest
0.0
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful._errors import InvalidArgument

__all__ = ["TOKENS", "decode", "encode", "fixed", "sample", "sample_with_knowledge", "with_knowledge"]

TOKENS = "+-0123456789"


def encode(text: str) -> Tensor:
    """The coordinate vectors `[3, 12]` of an expression such as 2+1."""
    if len(text) != 3 or text[0] not in TOKENS[2:] or text[1] not in TOKENS[:2] or text[2] not in TOKENS[2:]:
        raise InvalidArgument(f"an expression is a digit, + or -, and a digit, as '2+1'; got {text!r}")
    return torch.eye(len(TOKENS), dtype=torch.float64)[[TOKENS.index(token) for token in text]]


def decode(rows: Tensor, z: Tensor) -> str:
    """The tokens whose vectors, rows of z `[12, d]`, are nearest."""
    return "".join(TOKENS[at] for at in _nearest(rows, z))


def with_knowledge(x: Tensor, z: Tensor) -> Tensor:
    r"""$f(X, Z) = z_{(a \pm b) \bmod 10}$ `[1, d]` for the expression that X `[3, d]` spells in token vectors Z `[12, d]`.

    Only inner products choose the row of Z, so $f(XQ^T, ZQ^T) = f(X, Z)Q^T$ for every orthogonal Q.
    """
    first, operator, second = _nearest(x, z)
    sign = -1 if operator == 1 else 1
    return z[[2 + (first - 2 + sign * (second - 2)) % 10]]


def fixed(x: Tensor) -> Tensor:
    """The same with the coordinate vectors built in: right for them, wrong in any other embedding."""
    return with_knowledge(x, torch.eye(len(TOKENS), dtype=x.dtype))


def sample(generator: torch.Generator, n: int = 3) -> Tensor:
    """A random expression, for `check_equivariance(fixed, sampler=sample)`."""
    digits = torch.randint(2, 12, (2,), generator=generator)
    operator = torch.randint(2, (1,), generator=generator)
    return torch.eye(len(TOKENS), dtype=torch.float64)[torch.stack((digits[0], operator[0], digits[1]))]


def sample_with_knowledge(generator: torch.Generator, n: int = 3) -> tuple[Tensor, Tensor]:
    """A random expression with the vectors of its tokens."""
    return sample(generator), torch.eye(len(TOKENS), dtype=torch.float64)


def _nearest(rows: Tensor, z: Tensor) -> list[int]:
    return torch.cdist(rows, z.to(rows)).argmin(-1).tolist()
