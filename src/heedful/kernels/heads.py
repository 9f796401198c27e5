"""One kernel for each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.kernels.base import Kernel
from heedful.kernels.forms import Division, Parameter, Traits
from heedful.kernels.softmax import Softmax


class PerHead(Kernel):
    r"""A kernel of its own for each head: coefficients of head h are those of `kernels[h]`, as Ma & Ying (2023), eq. 5.3, allows.

    `attend(..., kernel=[a, b, c])` means the same. There are as many kernels as heads of the query; those that are equal run
    together. Tensors inside have one entry (or no axis), that of their head. Every word of the algebra acts on each kernel:
    `0.5 * kernel`, `kernel + other`, `kernel * other`, `normalized()`, `averaged()`, `symmetric()`.

    >>> import torch
    >>> from heedful import Gaussian, PerHead, Sigmoid, Softmax, attend
    >>> x = torch.randn(1, 3, 5, 4)
    >>> y = attend(x, x, x, kernel=PerHead((Softmax(), Gaussian(2.0), Sigmoid())))
    >>> y[:, 1:2].allclose(attend(x[:, 1:2], x[:, 1:2], x[:, 1:2], kernel=Gaussian(2.0)))
    True
    """

    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        if isinstance(self.kernels, list):
            object.__setattr__(self, "kernels", tuple(self.kernels))
        if not isinstance(self.kernels, tuple) or not self.kernels:
            raise InvalidArgument(
                f"PerHead: kernels must be a list of kernels, one per head; got {self.kernels!r:.100}"
            )
        for head, kernel in enumerate(self.kernels):
            if not isinstance(kernel, Kernel) or isinstance(kernel, PerHead):
                raise InvalidArgument(f"PerHead: the kernel of head {head} must be one kernel; got {kernel!r:.100}")
            for name, tensor in kernel.of_pairs.tensors().items():
                if tensor.dim() and tensor.shape[0] != 1:
                    raise InvalidArgument(
                        f"PerHead: {name} of head {head} has {tensor.shape[0]} entries; expected 1, that head's own"
                    )

    @property
    def traits(self) -> Traits:
        each = [kernel.traits for kernel in self.kernels]
        divisions = {traits.division for traits in each}
        return Traits(
            division=divisions.pop() if len(divisions) == 1 else None,
            nonnegative=all(traits.nonnegative for traits in each),
            stationary=all(traits.stationary for traits in each),
            invariant=all(traits.invariant for traits in each),
        )

    @property
    def of_pairs(self) -> Kernel:
        return self._each(lambda kernel: kernel.of_pairs)

    def check(self, query: Tensor, key: Tensor) -> None:
        heads = query.shape[-3] if query.dim() > 2 else 1
        if len(self.kernels) != heads:
            raise InvalidArgument(
                f"{len(self.kernels)} kernels given, one per head, and query {tuple(query.shape)} has {heads} heads; "
                f"give {heads} kernels"
            )
        for kernel in self.kernels:
            kernel.check(query[..., :1, :, :] if query.dim() > 2 else query, key)

    def _each(self, change: Callable[[Kernel], Kernel]) -> PerHead:
        return PerHead(tuple([change(kernel) for kernel in self.kernels]))

    def _beside(self, other: Any) -> list[tuple[Kernel, Any]]:
        """Every kernel, and what of `other` is its head's."""
        count = len(self.kernels)
        of_heads = isinstance(other, Tensor) and other.dim() == 1 and other.shape[0] == count
        parts = other.unbind() if of_heads else other.kernels if isinstance(other, PerHead) else (other,) * count
        if len(parts) != count:
            raise InvalidArgument(f"{count} kernels, one per head, do not combine with {len(parts)}")
        return list(zip(self.kernels, parts, strict=True))

    def coefficients(self, query: Tensor, key: Tensor) -> Tensor:
        raise InvalidArgument(f"{self!r} acts on all heads of a call; call attend, or attend.coefficients")

    def with_scale(self, scale: float | None) -> Kernel:
        return self if scale is None else self._each(lambda kernel: kernel.with_scale(scale))

    def symmetric(self) -> Kernel:
        return self._each(lambda kernel: kernel.symmetric())

    def _divided(self, by: Division) -> Kernel:
        return self._each(lambda kernel: kernel._divided(by))

    def __mul__(self, other: Kernel | Parameter) -> Kernel:
        return PerHead(tuple([one * part for one, part in self._beside(other)]))

    __rmul__ = __mul__

    def __add__(self, other: Kernel) -> Kernel:
        if not isinstance(other, Kernel):
            return NotImplemented
        return PerHead(tuple([one + part for one, part in self._beside(other)]))


def as_kernel(kernel: Kernel | Sequence[Kernel] | None) -> Kernel:
    """A kernel as `attend` takes it: one for all heads, a list with one per head (`PerHead`), or None for `Softmax()`.

    >>> from heedful.kernels import Sigmoid, Softmax, as_kernel
    >>> as_kernel([Softmax(), Sigmoid()])
    PerHead(kernels=(Softmax(), Sigmoid(bias=0.0)))
    """
    if kernel is None:
        return Softmax()
    if isinstance(kernel, list | tuple):
        return PerHead(tuple(kernel))
    if not isinstance(kernel, Kernel):
        raise InvalidArgument(f"kernel must be a heedful kernel such as Softmax(); got {kernel!r:.100}")
    return kernel
