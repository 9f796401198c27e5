"""Products of more than two factors, without n x n x n work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from torch import Tensor

from heedful._checks import is_whole
from heedful._errors import InvalidArgument
from heedful.kernels.base import Kernel, _brief, wide
from heedful.kernels.elementwise import Polynomial
from heedful.kernels.forms import Parameter, Traits
from heedful.kernels.softmax import Softmax

# Moves a query through the second moment of the keys it sees: the mean of (q.k) k.
MOVE = Polynomial(degree=1, scale=1.0).averaged()


class HigherOrder(Kernel):
    r"""A score through intermediate tokens: Ma & Ying (2023), eq. 3.2 with `order` factors, or a sum of several orders.

    The query is moved through the second moment of the keys it may attend to, and the inner kernel $\kappa$ acts on
    what comes out. For order 4 and a mask that lets row i see $n_i$ keys,

    $$A_{ij} = \kappa(q_i C_i M,\ k_j), \qquad C_i = \frac{1}{n_i} \sum_{t\ \text{seen by}\ i} k_t^\top k_t,$$

    so that q C k = mean over t of (q.k_t)(k_t.k_j): a product of four factors. Order 6 moves the query twice, and so on.
    q_i C_i is itself attention, with the degree-1 polynomial kernel and the keys as values, so it costs O(n D^2) where that
    kernel runs linearly and never n x n x n. The mean, not the sum, keeps the score from growing with n.

    `mix` is the paper's W between factors: an optional matrix M `[D, D]` or `[heads, D, D]`, which receives gradients and serves
    every move, or a tuple with one for each move. Order 6 with `mix=(M1, M2)` has $q_i C_i M_1 C_i M_2$.

    `order=(2, 4, 6)` adds the moved queries up before the kernel acts, order 2 being the query itself:

    $$A_{ij} = \kappa(q_i + q_i C_i M_1 + q_i C_i M_1 C_i M_2,\ k_j).$$

    Orders have matrices of their own where `mix` is a tuple of tuples, one for each order, with `order / 2` matrices each, the first of
    them in front: `order=(2, 4)` and `mix=((V1,), (W1, W2))` is $\kappa(q_i V_1 + q_i W_1 C_i W_2,\ k_j)$.

    Where the score is linear in the query (`Softmax`, `Sigmoid`, `Polynomial`, ...) that is the sum of the scores of these
    orders inside one activation. A kernel of distances takes the one distance from the key to the sum of the moved queries,
    which is not the sum of their distances; `Cosine` takes the angle to that sum.

    >>> import torch
    >>> from heedful import HigherOrder, Sigmoid
    >>> HigherOrder(Sigmoid(), order=6)
    HigherOrder(kernel=Sigmoid(bias=0.0), order=6)
    >>> HigherOrder(Sigmoid(), order=(2, 4, 6), mix=(torch.eye(2), torch.zeros(2, 2))).moves == HigherOrder(order=6).moves
    True
    """

    kernel: Kernel = field(default_factory=Softmax)
    order: int | tuple[int, ...] = 4
    mix: Tensor | tuple[Tensor, ...] | tuple[tuple[Tensor, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel) or self.kernel.of_pairs is not self.kernel:
            raise InvalidArgument(f"HigherOrder: kernel must be a kernel of pairs; got {self.kernel!r}")
        for name in ("order", "mix"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if isinstance(self.order, tuple):
            right = all(is_whole(one) and one >= 2 and one % 2 == 0 for one in self.order)
            if not right or len(set(self.order)) < len(self.order) or max(self.order, default=0) < 4:
                raise InvalidArgument(
                    f"HigherOrder: several orders must be different even numbers, one of at least 4; got {self.order!r}"
                )
        elif not is_whole(self.order) or self.order < 4 or self.order % 2:
            raise InvalidArgument(f"HigherOrder: order must be an even number of at least 4; got {self.order!r}")
        mixes = self._matrices
        if not all(isinstance(one, Tensor) and one.dim() in (2, 3) for one in mixes):
            raise InvalidArgument(
                "HigherOrder: mix must be a tensor of shape (D, D) or (heads, D, D), or one such tensor for each move; "
                f"got {_brief(self.mix)}"
            )
        if self._apart:
            if not all(isinstance(one, tuple) for one in self.mix):  # type: ignore[union-attr]
                raise InvalidArgument("HigherOrder: mix must be matrices, or a tuple of them for each order; got both")
            if [len(one) for one in self.mix] != [order // 2 for order in self._orders]:  # type: ignore[union-attr]
                raise InvalidArgument(
                    f"HigherOrder: mix with matrices for each order has order / 2 of them: {[o // 2 for o in self._orders]} for "
                    f"order {self.order}; got {[len(one) for one in self.mix]}"  # type: ignore[union-attr]
                )
        elif isinstance(self.mix, tuple) and len(mixes) != len(self.moves):
            raise InvalidArgument(
                f"HigherOrder: order {self.order} moves queries {len(self.moves)} times, so mix must be one tensor or "
                f"{len(self.moves)} of them; got {len(mixes)}"
            )

    @property
    def _orders(self) -> tuple[int, ...]:
        return self.order if isinstance(self.order, tuple) else (self.order,)

    @property
    def _apart(self) -> bool:
        """Whether each order has matrices of its own."""
        return isinstance(self.mix, tuple) and any(isinstance(one, tuple) for one in self.mix)

    @property
    def _matrices(self) -> tuple[Any, ...]:
        """All of `mix`."""
        if self._apart:
            return tuple(one for part in self.mix for one in (part if isinstance(part, tuple) else (part,)))  # type: ignore[union-attr]
        return self.mix if isinstance(self.mix, tuple) else () if self.mix is None else (self.mix,)

    @property
    def traits(self) -> Traits:
        inner = self.kernel.traits
        return inner._replace(stationary=False, invariant=inner.invariant and self.mix is None)

    @property
    def of_pairs(self) -> Kernel:
        return self.kernel

    def coefficients(self, query: Tensor, key: Tensor) -> Tensor:
        raise InvalidArgument(
            f"{self!r} is a kernel of the whole sequence, not of a pair; call attend, or attend.coefficients"
        )

    def check(self, query: Tensor, key: Tensor) -> None:
        size, heads = query.shape[-1], query.shape[-3] if query.dim() > 2 else 1
        for one in self._matrices:
            if one.shape[-2:] != (size, size):
                raise InvalidArgument(f"HigherOrder: mix has shape {tuple(one.shape)}; expected (..., {size}, {size})")
            if one.dim() == 3 and one.shape[0] not in (1, heads):
                raise InvalidArgument(f"HigherOrder: mix has {one.shape[0]} matrices; expected 1 or heads = {heads}")

    def move(self, query: Tensor, key: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        orders = self._orders
        if self._apart:
            return sum(self._moved(query, key, attend, own) for own in self.mix)  # type: ignore[union-attr,arg-type,return-value,misc]
        total = query.to(wide(key).dtype) if 2 in orders else None
        for n, kernel in enumerate(self.moves):
            query = attend(query, key, kernel=kernel)
            mix = self.mix[n] if isinstance(self.mix, tuple) else self.mix
            query = query if mix is None else query @ mix.to(query.dtype)  # type: ignore[union-attr]
            if 2 * n + 4 in orders:
                total = query if total is None else total + query
        assert total is not None
        return total

    def _moved(self, query: Tensor, key: Tensor, attend: Callable[..., Tensor], own: tuple[Tensor, ...]) -> Tensor:
        """q W_1 C W_2 C ... of one order."""
        query = query.to(wide(key).dtype)
        query = query @ own[0].to(query.dtype)
        for mix in own[1:]:
            query = attend(query, key, kernel=MOVE)
            query = query @ mix.to(query.dtype)
        return query

    @property
    def moves(self) -> tuple[Kernel, ...]:
        counts = [order // 2 - 1 for order in self._orders]
        return (MOVE,) * (sum(counts) if self._apart else max(counts))

    def with_scale(self, scale: float | None) -> Kernel:
        return self if scale is None else HigherOrder(self.kernel.with_scale(scale), self.order, self.mix)

    def normalized(self) -> Kernel:
        return HigherOrder(self.kernel.normalized(), self.order, self.mix)

    def averaged(self) -> Kernel:
        return HigherOrder(self.kernel.averaged(), self.order, self.mix)

    def _undivided(self) -> Kernel:
        return HigherOrder(self.kernel._undivided(), self.order, self.mix)

    def __mul__(self, other: Kernel | Parameter) -> Kernel:
        if isinstance(other, Kernel):
            raise InvalidArgument(f"{self!r} acts on the whole sequence; compose inside it, as in HigherOrder(a * b)")
        return HigherOrder(self.kernel * other, self.order, self.mix)

    __rmul__ = __mul__

    def __add__(self, other: Kernel) -> Kernel:
        raise InvalidArgument(f"{self!r} acts on the whole sequence; compose inside it, as in HigherOrder(a + b)")


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(part) for part in value) if isinstance(value, list | tuple) else value
