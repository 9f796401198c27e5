"""Where a token stands: footnote 1 of Ma & Ying (2023), and learned positions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.nn._module import Module, check_input

Kind = Literal["sinusoidal", "learned"]


class Positions(Module):
    r"""Adds to each token the vector of its place.

    `kind="sinusoidal"` (Vaswani et al. 2017) has no parameters and serves every length:

    $$P_{t, 2i} = \sin(t / b^{2i/d}), \qquad P_{t, 2i+1} = \cos(t / b^{2i/d})$$

    with `base` b = 10000. Footnote 1 of Ma & Ying (2023) prints a sine twice and the base n; a base that depends on n would change all
    positions with the length. `kind="learned"` has a row of parameters for each of `max_len` places, N(0, 0.02^2) at first.

    Positions are knowledge: turn them with the embedding and the symmetry holds (role `rows`); held fixed they break it, and
    they tell tokens apart, so that renumbering tokens is no symmetry any more.

    >>> import torch
    >>> Positions(4)(torch.zeros(1, 2, 4))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    def __init__(
        self,
        embed_dim: int,
        kind: Kind = "sinusoidal",
        *,
        max_len: int | None = None,
        base: float = 10000.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(embed_dim=embed_dim)
        check_whole(optional=True, max_len=max_len)
        check_choice(Kind, kind=kind)
        check_number(1, base=base)
        self.embed_dim, self.kind, self.max_len, self.base = embed_dim, kind, max_len, base
        if kind == "learned" and max_len is None:
            raise InvalidArgument("kind='learned' has a row for each place: give max_len")
        self.rows = None
        if kind == "learned":
            self.rows = nn.Parameter(0.02 * torch.randn(max_len, embed_dim, device=device, dtype=dtype))  # type: ignore[arg-type]

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x + P for x `(B, n, embed)` whose first token stands at place `start`."""
        check_input("x", x, self.embed_dim)
        check_whole(0, start=start)
        return x + self.table(start + x.shape[1], x.device)[start:].to(x)

    def table(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """P `[length, embed]`."""
        if self.max_len is not None and length > self.max_len:
            raise InvalidArgument(f"there are positions for max_len={self.max_len} places; got {length}")
        if self.rows is not None:
            return self.rows[:length]
        # In float64: single precision loses the phase of far places.
        place = torch.arange(length, dtype=torch.float64, device=device)
        even = torch.arange(0, self.embed_dim, 2, dtype=torch.float64, device=device)
        phase = place[:, None] * self.base ** (-even / self.embed_dim)
        return torch.stack((phase.sin(), phase.cos()), dim=-1).flatten(1)[:, : self.embed_dim]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, kind={self.kind!r}, max_len={self.max_len}"
