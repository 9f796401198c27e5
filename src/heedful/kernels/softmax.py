"""exp(scale q.k), each row divided by its sum."""

from __future__ import annotations

from torch import Tensor

from heedful.kernels.base import Kernel, check_parameter, default_scale, per_head, wide
from heedful.kernels.forms import Folded, FusedForm, Parameter, Traits


class Softmax(Kernel):
    r"""Softmax attention: $\kappa(q, k) = e^{s\, q \cdot k} / \sum_{k'} e^{s\, q \cdot k'}$.

    `scale` s is a number or a tensor per head; the default is 1/sqrt(head size), as in Vaswani et al. (2017), eq. 1.

    >>> from heedful import Softmax
    >>> Softmax(scale=0.5)
    Softmax(scale=0.5)
    """

    scale: Parameter | None = None

    def __post_init__(self) -> None:
        check_parameter(self, "scale", optional=True)

    @property
    def traits(self) -> Traits:
        return Traits(exponential=True, division="sum", nonnegative=True, invariant=True)

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        return (query * default_scale(self.scale, query)) @ key.mT

    def fold(self, query: Tensor, key: Tensor) -> Folded:
        if not isinstance(self.scale, Tensor):
            return Folded(query, key, None, query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        scaled = wide(query) * per_head(self.scale, wide(query))
        return Folded(scaled.to(query.dtype), key, None, 1.0)

    def _undivided(self) -> Kernel:
        from heedful.kernels.elementwise import Exponential

        return Exponential(self.scale) if type(self) is Softmax else super()._undivided()

    @property
    def is_plain_softmax(self) -> bool:
        return not isinstance(self.scale, Tensor)

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm("exp", self.scale, division="sum")
