"""Attention between tokens by what they are: a table of queries, one of keys and one of values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heedful import masks
from heedful._attend import attend
from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Softmax
from heedful.nn._module import Module, layer_mask, learned
from heedful.ops import IMPLEMENTATIONS


class TokenAttention(Module):
    r"""Attention whose scores depend on which tokens meet, and on how far apart they are, alone:

    $$A^h_{ij} = \mathrm{softmax}_j\bigl(\beta\, q^h_{t_i} \cdot k^h_{t_j} + b^h_{j - i}\bigr), \qquad
    y_i = \frac1H \sum_h \sum_j A^h_{ij}\, v_{t_j}$$

    for token ids $t_1 \ldots t_n$. This is softmax attention over the projection $M = O S O^\top$ of a matrix $S = Q K^\top$ between
    all tokens to those of a sequence (Mehta 2025, section 3), computed by `attend` from rows of the tables. Where the paper puts
    one matrix for query and key, both are here: a symmetric S that is not positive needs two. `corpus.CorpusAttention.module()`
    fills the tables with what a corpus says; gradients train them on.

    Args:
        num_tokens: V, the size of the vocabulary.
        rank: columns of queries and keys, all heads together; head h has the h-th block of them.
        embed_dim: the size of a value.
        num_heads: H. Outputs of heads are averaged.
        beta: what scores are multiplied by.
        exclude_self: no token attends to its own place.
        reach: distances up to this one have a bias each, on either side; those beyond it have none.

    >>> import torch
    >>> layer = TokenAttention(11, rank=4, embed_dim=3, num_heads=2)
    >>> layer(torch.tensor([[1, 5, 2], [7, 7, 0]])).shape
    torch.Size([2, 3, 3])
    """

    def __init__(
        self,
        num_tokens: int,
        rank: int,
        embed_dim: int,
        num_heads: int = 1,
        *,
        beta: float = 1.0,
        exclude_self: bool = True,
        reach: int = 0,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(num_tokens=num_tokens, rank=rank, embed_dim=embed_dim, num_heads=num_heads)
        check_whole(0, reach=reach)
        check_number(beta=beta)
        check_choice((True, False), exclude_self=exclude_self)
        check_choice(("auto", *IMPLEMENTATIONS), impl=impl)
        if rank % num_heads:
            raise InvalidArgument(f"rank must be a multiple of num_heads; got rank={rank}, num_heads={num_heads}")
        self.num_tokens, self.rank, self.embed_dim, self.num_heads = num_tokens, rank, embed_dim, num_heads
        self.beta, self.exclude_self, self.reach, self.impl = beta, exclude_self, reach, impl
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.queries, self.keys = (learned(num_tokens, rank, **place) for _ in range(2))
        self.values = learned(num_tokens, embed_dim, **place)
        self.bias = nn.Parameter(torch.zeros(num_heads, 2 * reach + 1, **place)) if reach else None

    def project(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys `[B, H, n, rank / H]` and values `[B, H, n, embed]` of token ids `[B, n]`."""
        self._check(ids)
        # Not table[ids], which takes -1 for the last token.
        query, key, value = (F.embedding(ids.long(), table) for table in (self.queries, self.keys, self.values))
        query, key = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (query, key))
        value = value[:, None].expand(-1, self.num_heads, -1, -1)
        return query, key, value

    def _check(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            got = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise InvalidArgument(f"ids must be whole numbers of shape (batch, seq); got {got}")

    def _mask(self, ids: Tensor, padding: Tensor | None, is_causal: bool) -> masks.Mask | Tensor | None:
        """What may be attended to, and with `reach` what the distance adds to the score."""
        batch, n = ids.shape
        mask = layer_mask(batch, self.num_heads, n, n, None, padding, is_causal)
        at = torch.arange(n, device=ids.device)
        if self.exclude_self:
            others = masks.dense(at[:, None] != at)
            mask = others if mask is None else mask & others
        if self.bias is None:
            return mask
        apart = at - at[:, None]  # j - i
        added = self.bias[:, apart.clamp(-self.reach, self.reach) + self.reach]  # [H, n, n]
        added = added.masked_fill(apart.abs() > self.reach, 0.0)
        if mask is None:
            return added[None]
        seen = mask.dense((batch, self.num_heads, n, n), ids.device)
        return added.masked_fill(~seen, -torch.inf)

    def coefficients(self, ids: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """A, `[B, H, n, n]`."""
        query, key, _ = self.project(ids)
        mask = self._mask(ids, key_padding_mask, is_causal)
        return attend.coefficients(query, key, mask, kernel=Softmax(self.beta))

    def forward(self, ids: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Token ids `[B, n]` to vectors `[B, n, embed]`; `key_padding_mask` `[B, n]` is True for what is ignored.

        A token that may attend to nothing gets zeros.
        """
        query, key, value = self.project(ids)
        mask = self._mask(ids, key_padding_mask, is_causal)
        return attend(query, key, value, mask, kernel=Softmax(self.beta), impl=self.impl).mean(dim=1)

    def extra_repr(self) -> str:
        return f"{self.num_tokens}, rank={self.rank}, embed_dim={self.embed_dim}, num_heads={self.num_heads}, beta={self.beta}"
