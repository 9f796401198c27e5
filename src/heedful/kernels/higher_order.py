"""Products of more than two factors, without n x n x n work."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from heedful._checks import is_whole
from heedful._errors import InvalidArgument
from heedful.kernels.base import Kernel, Parameter, Traits, _brief
from heedful.kernels.elementwise import Polynomial
from heedful.kernels.softmax import Softmax

# Moves a query through the second moment of the keys it sees: the mean of (q.k) k.
MOVE = Polynomial(degree=1, scale=1.0).averaged()


class HigherOrder(Kernel):
    r"""A score through intermediate tokens: Ma & Ying (2023), eq. 3.2 with `order` factors.

    The query is moved through the second moment of the keys it may attend to, and the inner kernel $\kappa$ acts on
    what comes out. For order 4 and a mask that lets row i see $n_i$ keys,

    $$A_{ij} = \kappa(q_i C_i M,\ k_j), \qquad C_i = \frac{1}{n_i} \sum_{t\ \text{seen by}\ i} k_t^\top k_t,$$

    so that q C k = mean over t of (q.k_t)(k_t.k_j): a product of four factors. Order 6 moves the query twice, and so on.
    q_i C_i is itself attention, with the degree-1 polynomial kernel and the keys as values, so it costs O(n D^2) where that
    kernel runs linearly and never n x n x n. The mean, not the sum, keeps the score from growing with n.

    `mix` M is an optional matrix `[D, D]` or `[heads, D, D]` (the paper's W between factors) that receives gradients.

    >>> from heedful import HigherOrder, Sigmoid
    >>> HigherOrder(Sigmoid(), order=6)
    HigherOrder(kernel=Sigmoid(bias=0.0), order=6)
    """

    kernel: Kernel = Softmax()
    order: int = 4
    mix: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel) or isinstance(self.kernel, HigherOrder):
            raise InvalidArgument(f"HigherOrder: kernel must be a kernel of pairs; got {self.kernel!r}")
        if not is_whole(self.order) or self.order < 4 or self.order % 2:
            raise InvalidArgument(f"HigherOrder: order must be an even number of at least 4; got {self.order!r}")
        if self.mix is not None and not (isinstance(self.mix, Tensor) and self.mix.dim() in (2, 3)):
            raise InvalidArgument(
                f"HigherOrder: mix must be a tensor of shape (D, D) or (heads, D, D); got {_brief(self.mix)}"
            )

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

    def move(self, query: Tensor, key: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        size = query.shape[-1]
        if self.mix is not None and self.mix.shape[-2:] != (size, size):
            raise InvalidArgument(f"HigherOrder: mix has shape {tuple(self.mix.shape)}; expected (..., {size}, {size})")
        for kernel in self.moves:
            query = attend(query, key, kernel=kernel)
            if self.mix is not None:
                query = query @ self.mix.to(query.dtype)
        return query

    @property
    def moves(self) -> tuple[Kernel, ...]:
        return (MOVE,) * (self.order // 2 - 1)

    def with_scale(self, scale: float | None) -> Kernel:
        return self if scale is None else HigherOrder(self.kernel.with_scale(scale), self.order, self.mix)

    def normalized(self) -> Kernel:
        return HigherOrder(self.kernel.normalized(), self.order, self.mix)

    def averaged(self) -> Kernel:
        return HigherOrder(self.kernel.averaged(), self.order, self.mix)

    def __mul__(self, other: Kernel | Parameter) -> Kernel:
        if isinstance(other, Kernel):
            raise InvalidArgument(f"{self!r} acts on the whole sequence; compose inside it, as in HigherOrder(a * b)")
        return HigherOrder(self.kernel * other, self.order, self.mix)

    __rmul__ = __mul__

    def __add__(self, other: Kernel) -> Kernel:
        raise InvalidArgument(f"{self!r} acts on the whole sequence; compose inside it, as in HigherOrder(a + b)")
