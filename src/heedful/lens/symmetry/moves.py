"""Group elements: how each is drawn, and how it acts on inputs, outputs and parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal, get_args

import torch
from torch import Tensor

from heedful._checks import check_choice

Group = Literal["O", "SO", "permutation", "signed_permutation", "sign", "translation"]
Role = Literal["rows", "cols", "both", "bias", "fixed"]
GROUPS: tuple[Group, ...] = get_args(Group)
ROLES: tuple[Role, ...] = get_args(Role)

# Simple elements are made of the first coordinates alone: enough for a small counterexample, and few.
FIRST = 8


@dataclass(frozen=True, eq=False)
class Move(ABC):
    """One group element in float64: its name in words, and the matrix, vector or order it acts by."""

    name: str
    data: Tensor

    @abstractmethod
    def x(self, rows: Tensor) -> Tensor:
        """The tokens, moved."""

    @abstractmethod
    def undo(self, rows: Tensor) -> Tensor:
        """The tokens, moved back."""

    def z(self, rows: Tensor) -> Tensor:
        """The knowledge, moved."""
        return self.x(rows)

    def undo_z(self, rows: Tensor) -> Tensor:
        """The knowledge, moved back."""
        return self.undo(rows)

    def matrix(self, out: Tensor) -> Tensor:
        """A matrix `[..., d, d]` that belongs to the tokens, as their covariance; translations and orders leave it."""
        return out

    @cached_property
    def determinant(self) -> int | None:
        """+1 or -1 where the element has one."""
        return None


class Turn(Move):
    """An orthogonal matrix: rows become $x Q^T$."""

    def x(self, rows: Tensor) -> Tensor:
        return _each(rows, self.data)

    def undo(self, rows: Tensor) -> Tensor:
        return _each(rows, self.data.mT)

    @cached_property
    def determinant(self) -> int:
        return 1 if float(torch.linalg.det(self.data)) > 0 else -1

    def matrix(self, out: Tensor) -> Tensor:
        return self.data @ out @ self.data.mT

    @cached_property
    def exact(self) -> bool:
        """Whether it swaps and flips coordinates alone, without any rounding."""
        return bool(torch.equal(self.data, self.data.round()))

    def tilted(self, angle: float) -> Turn:
        """The element turned a little further, always in the same direction."""
        draw = torch.randn(self.data.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return Turn(self.name, torch.linalg.matrix_exp(angle * (draw - draw.mT) / (2 * len(draw)) ** 0.5) @ self.data)

    def inverse(self) -> Turn:
        """The element that undoes this one."""
        return Turn(self.name, self.data.mT)

    def parameter(self, weight: Tensor, role: Role) -> Tensor:
        """A parameter moved with the embedding: rows $WQ^T$, cols $QW$, both $QWQ^T$, bias $Qb$."""
        if role in ("rows", "both", "bias"):
            weight = weight @ self.data.mT
        if role in ("cols", "both"):
            weight = self.data @ weight
        return weight


class Shift(Move):
    """A translation: rows become $x + t$."""

    def x(self, rows: Tensor) -> Tensor:
        return rows + self.data

    def undo(self, rows: Tensor) -> Tensor:
        return rows - self.data


class Shuffle(Move):
    """A permutation of positions: row i becomes row order[i]; knowledge stays."""

    def x(self, rows: Tensor) -> Tensor:
        return rows[self.data]

    def undo(self, rows: Tensor) -> Tensor:
        return rows[self.data.argsort()]

    def z(self, rows: Tensor) -> Tensor:
        return rows

    def undo_z(self, rows: Tensor) -> Tensor:
        return rows


def _each(rows: Tensor, matrix: Tensor) -> Tensor:
    """x Q^T row by row: equal rows then round alike, however many stand beside them."""
    flat = rows.reshape(-1, 1, rows.shape[-1])
    return torch.bmm(flat, matrix.mT.expand(len(flat), *matrix.shape)).reshape(rows.shape)


def check_group(group: str) -> None:
    """Refuses a name that is none of the groups."""
    check_choice(GROUPS, group=group)


def draw(group: Group, d: int, generator: torch.Generator, determinant: int = 1) -> Move:
    """A random element of a group; Haar for O and SO. `determinant` is met where the group and d allow it."""
    if group == "translation":
        return Shift("translation", torch.randn(d, generator=generator, dtype=torch.float64))
    if group in ("O", "SO"):
        sign = 1 if group == "SO" else determinant
        return Turn("rotation" if sign > 0 else "rotation with a reflection", haar(d, generator, sign))
    for _ in range(16):
        matrix = torch.eye(d, dtype=torch.float64)
        if group != "sign":
            matrix = matrix[torch.randperm(d, generator=generator)]
        if group != "permutation":
            matrix = matrix * (2.0 * torch.randint(2, (d, 1), generator=generator) - 1.0)
        turn = Turn(group.replace("_", " "), matrix)
        # The identity tests nothing.
        if turn.determinant == determinant and not torch.equal(matrix, torch.eye(d, dtype=torch.float64)):
            break
    return turn


def haar(d: int, generator: torch.Generator, determinant: int | None = None) -> Tensor:
    """An orthogonal matrix, uniform over O(d) or over the part of it with this determinant."""
    q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    q = q * r.diagonal().sign()  # without the signs of R the law is not Haar's
    if determinant is not None and float(torch.linalg.det(q)) * determinant < 0:
        q[:, 0] = -q[:, 0]
    return q


def reflection(vector: Tensor) -> Turn:
    """Householder's $Q_u = I - 2uu^T/|u|^2$: fixes what is orthogonal to u, turns u around."""
    u = vector.double() / vector.double().norm()
    return Turn("reflection that fixes every row of X and Z", torch.eye(len(u), dtype=torch.float64) - 2 * u.outer(u))


def simple(group: Group, d: int) -> Iterator[Move]:
    """Elements that a person can check by eye, simplest first."""
    eye = torch.eye(d, dtype=torch.float64)
    some = range(min(d, FIRST))
    if group == "translation":
        yield from (Shift(f"translation by 1 along coordinate {i}", eye[i]) for i in some)
        return
    if group in ("O", "permutation", "signed_permutation"):
        for i, j in combinations(some, 2):
            swap = eye.clone()
            swap[[i, j]] = swap[[j, i]]
            yield Turn(f"swap of coordinates {i} and {j}", swap)
    if group in ("O", "sign", "signed_permutation"):
        for i in some:
            flip = eye.clone()
            flip[i, i] = -1.0
            yield Turn(f"sign flip of coordinate {i}", flip)
    if group in ("O", "SO", "signed_permutation"):
        for i, j in combinations(some, 2):
            turn = eye.clone()
            turn[[i, j]] = turn[[j, i]]
            turn[i] = -turn[i]
            yield Turn(f"quarter turn of coordinates {i} and {j}", turn)
    if group == "permutation" and d > 2:
        yield Turn("rotation of coordinates 0, 1 and 2", eye[[1, 2, 0, *range(3, d)]])


def simple_orders(n: int) -> Iterator[Move]:
    """Swaps of two positions."""
    for i, j in combinations(range(n), 2):
        order = torch.arange(n)
        order[[i, j]] = order[[j, i]]
        yield Shuffle(f"swap of positions {i} and {j}", order)
