"""From an equivariant function to its coefficients: f = A X + B Z, with A and B functions of inner products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful._plot import Axes, heat_map
from heedful._result import Result
from heedful._runtime import undisturbed
from heedful.lens.symmetry._report import Counterexample, SymmetryBroken
from heedful.lens.symmetry.callee import Callee, Function
from heedful.lens.symmetry.moves import Group, check_group, draw, reflection

# A part outside the span above this share of the output is no rounding.
OUTSIDE = 1e-6


@dataclass(frozen=True, eq=False)
class Coefficients(Result):
    """A `[n_out, n]` and B `[n_out, k]` (None without knowledge) with f(X, Z) = A X + B Z.

    Attributes:
        residual: |f - (AX + BZ)| / |f|, zero for an equivariant f.
        rank, condition: of the stack of X and Z.
        unique: its rows are independent, so that no other A and B give the same output.
        vacuous: they span the whole space: then any output is a combination, and the residual says nothing.
        counterexample: where the residual is not zero, the reflection that fixes X and Z but not f(X, Z).
    """

    A: Tensor
    B: Tensor | None
    residual: float
    rank: int
    condition: float
    vacuous: bool
    counterexample: Counterexample | None = field(default=None, repr=False)

    _also = ("unique", "passed")

    @property
    def unique(self) -> bool:
        """Whether no other A and B give the same output."""
        return self.rank == self.A.shape[-1] + (0 if self.B is None else self.B.shape[-1])

    @property
    def passed(self) -> bool:
        """Whether the output was found to be a combination of X and Z, by a test that could have failed."""
        return self.counterexample is None and not self.vacuous

    def combine(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """A x + B z, for vectors of any size."""
        if (self.B is None) != (z is None):
            has = "no B" if self.B is None else f"B of shape {tuple(self.B.shape)}"
            raise InvalidArgument(
                f"there is {has}; got {'no' if z is None else 'a'} z: give z exactly where f was given one"
            )
        out = self.A.to(x) @ x
        return out if self.B is None or z is None else out + self.B.to(z) @ z

    def raise_if_failed(self) -> None:
        """Raises `SymmetryBroken` where the output is no combination of X and Z."""
        if self.counterexample is not None:
            raise SymmetryBroken(str(self))

    def plot(self, ax: Axes | None = None) -> Axes:
        """A, and B beside it, as a heat map."""
        whole = self.A if self.B is None else torch.cat((self.A, self.B), -1)
        most = float(whole.abs().max())
        ax = heat_map(ax, whole.numpy(), vmin=-most, vmax=most, cmap="RdBu", aspect="equal")
        if self.B is not None:
            ax.axvline(self.A.shape[-1] - 0.5, color="black")
        ax.set(xlabel="token, then knowledge", ylabel="output", title="Coefficients A and B")
        return ax

    def __str__(self) -> str:
        shape = f"A {tuple(self.A.shape)}" + ("" if self.B is None else f", B {tuple(self.B.shape)}")
        sure = "vacuous, X and Z span the space" if self.vacuous else "unique" if self.unique else "of least norm"
        lines = [f"coefficients {shape}: residual {self.residual:.2g}, rank {self.rank}, {sure}"]
        return "\n".join([*lines, *([str(self.counterexample)] if self.counterexample else [])])


def recover_coefficients(
    f: Function, x: Tensor, z: Tensor | None = None, *, batched: bool | None = None
) -> Coefficients:
    r"""The coefficients of f at one input: $[A\;B] = f(X, Z)\,\tilde X^+$ with $\tilde X = [X; Z]$.

    This makes the existence proof of Ma & Ying (2023, Props. 3.1 and 3.2) constructive: for an equivariant f the result
    reproduces f exactly, is the same for every rotation of the input because $(\tilde X Q^T)^+ = Q \tilde X^+$, and moves with a
    permutation of tokens. Where f leaves the span of X and Z, the reflection that turns the part outside around fixes
    every input but not the output: a counterexample without search. With n + k >= d the span may be everything; then
    the result is `vacuous`, with a warning.

    Args:
        f: as in `check_equivariance`.
        x, z: `[n, d]` and `[k, d]`.

    >>> import torch
    >>> x = torch.randn(3, 7, dtype=torch.float64)
    >>> found = recover_coefficients(lambda x: torch.softmax(x @ x.T, -1) @ x, x)
    >>> torch.allclose(found.A, torch.softmax(x @ x.T, -1)), found.unique
    (True, True)
    >>> recover_coefficients(lambda x: x + 1.0, x).counterexample.move
    'reflection that fixes every row of X and Z'
    """
    callee = Callee(f, batched=batched)
    x, z = _rows("x", x), None if z is None else _rows("z", z)
    if z is not None and z.shape[-1] != x.shape[-1]:
        raise InvalidArgument(f"z of shape {tuple(z.shape)}, expected (k, {x.shape[-1]}) to go with x")
    with undisturbed(f):
        result = recover(callee, x, z)
    if result.vacuous:
        warnings.warn(
            f"vacuous: {len(x) + (0 if z is None else len(z))} vectors span all of R^{x.shape[-1]}, so any output is a combination of "
            "them; take fewer than d",
            stacklevel=2,
        )
    return result


def coefficient_function(
    f: Function, d: int, *, k: int = 0, batched: bool | None = None
) -> Callable[[Tensor], Coefficients]:
    r"""The coefficients as a function of the Gram matrix alone: $G = \tilde X \tilde X^T \mapsto (A, B)$.

    G is factored as $LL^T$ by eigenvectors, f is called on $[L, 0]$ and its coefficients are read off. So an equivariant f of
    dimension d acts on vectors of any dimension, as long as G has rank d at most: `g(x @ x.T).combine(x)`.

    Args:
        k: how many of the last rows of G belong to knowledge.

    >>> import torch
    >>> g = coefficient_function(lambda x: torch.softmax(x @ x.T, -1) @ x, d=5)
    >>> x = torch.randn(3, 11, dtype=torch.float64)  # f knows vectors of size 5 alone
    >>> torch.allclose(g(x @ x.T).combine(x), torch.softmax(x @ x.T, -1) @ x)
    True
    """
    callee = Callee(f, batched=batched)

    def coefficients(gram: Tensor) -> Coefficients:
        size = gram.shape[-1]
        if gram.dim() != 2 or gram.shape[0] != size or size <= k:
            raise InvalidArgument(f"gram must be square with more than k = {k} rows; got {tuple(gram.shape)}")
        gram = gram.detach().to("cpu", torch.float64)
        if not bool(gram.isfinite().all()):
            raise InvalidArgument("gram holds numbers that are not finite; give inner products of finite vectors")
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        top = max(float(values[-1]), 1e-300)
        if float((gram - gram.mT).abs().max()) > 1e-6 * top or float(values[0]) < -1e-6 * top:
            raise InvalidArgument("gram must be symmetric without negative eigenvalues: a matrix of inner products")
        if size > d and float(values[-d - 1]) > 1e-9 * top:
            rank = int((values > 1e-9 * top).sum())
            raise InvalidArgument(f"gram has rank {rank}, but f takes vectors of size {d}; take {d} vectors at most")
        factor = (vectors * values.clamp_min(0.0).sqrt())[:, -d:]
        rows = torch.nn.functional.pad(factor, (0, d - factor.shape[-1]))
        with undisturbed(f):
            return recover(callee, rows[: size - k], rows[size - k :] if k else None)

    return coefficients


def symmetrize(
    f: Callable[..., Tensor], group: Group = "O", *, samples: int = 32, seed: int = 0
) -> Callable[..., Tensor]:
    r"""f averaged over random group elements: $\bar f(X, Z) = \frac1S \sum_s f(XQ_s^T, ZQ_s^T)\,Q_s$.

    An equivariant f is unchanged; of another the average comes closer to equivariant like $1/\sqrt S$. The elements
    are the same at every call, gradients pass through, and inputs may have any leading axes.

    >>> import torch
    >>> even = symmetrize(torch.relu, samples=64)
    >>> from heedful.lens.symmetry import check_equivariance
    >>> errors = [check_equivariance(f, d=3, trials=20, shrinking=False).quantile(0.5) for f in (torch.relu, even)]
    >>> errors[1] < errors[0] / 3
    True
    """
    check_group(group)
    if group == "translation":
        raise InvalidArgument("translations have no average; subtract the mean token and add it to the output instead")
    check_whole(samples=samples)
    elements: dict[int, list[Tensor]] = {}

    def averaged(*inputs: Tensor) -> Tensor:
        d = inputs[0].shape[-1]
        if d not in elements:
            generator = torch.Generator().manual_seed(seed)
            signs = [-1 if at % 2 and group != "SO" else 1 for at in range(samples)]
            elements[d] = [draw(group, d, generator, sign).data for sign in signs]
        turns = [matrix.to(inputs[0]) for matrix in elements[d]]
        outputs = (f(*(rows @ q.mT for rows in inputs)) @ q for q in turns)
        return reduce(torch.add, outputs) / samples

    return averaged


def _rows(name: str, rows: Tensor) -> Tensor:
    rows = torch.as_tensor(rows).detach().to("cpu", torch.float64)
    if rows.dim() != 2 or rows.shape[0] == 0:
        raise InvalidArgument(
            f"{name} must have shape (rows, d), one sequence without a batch; got {tuple(rows.shape)}"
        )
    if not bool(rows.isfinite().all()):
        raise InvalidArgument(f"{name} holds numbers that are not finite; give another input")
    return rows


def recover(callee: Callee, x: Tensor, z: Tensor | None) -> Coefficients:
    rows = x if z is None else torch.cat((x, z))
    out = torch.atleast_2d(callee(x, z))
    if out.shape[-1] != x.shape[-1]:
        raise InvalidArgument(f"{callee.name} returns {tuple(out.shape)}, not vectors of size d = {x.shape[-1]}")
    if not bool(out.isfinite().all()):
        raise InvalidArgument(f"{callee.name} returns numbers that are not finite; give another input")
    values = torch.linalg.svdvals(rows)
    rank = int((values > values[0] * max(rows.shape) * torch.finfo(rows.dtype).eps).sum())
    inverse = torch.linalg.pinv(rows)
    joint = out @ inverse
    rest = out - joint @ rows
    size = max(float(out.norm()), 1e-300)
    residual = float(rest.norm()) / size
    allowed = max(OUTSIDE, 50 * torch.finfo(callee.dtype).eps)
    example = None
    if residual > allowed:
        move = reflection(rest[rest.norm(dim=-1).argmax()])
        moved_z = None if z is None else move.z(z)
        got, expected = torch.atleast_2d(callee(move.x(x), moved_z)), move.x(out)
        error = float((got - expected).norm()) / size
        example = Counterexample(move.name, move.data, x, z, got, expected, error, allowed)
    condition = float(values[0] / values[rank - 1]) if rank else float("inf")
    a, b = joint[:, : len(x)], None if z is None else joint[:, len(x) :]
    return Coefficients(a, b, residual, rank, condition, rank == x.shape[-1], example)
