"""The network that compares the members of a result list by their similarities to the list's first members (Ouyang et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_number, check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful.nn import Attention, Block, Module

# The authors' names of what a block holds, and ours.
AUTHORS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.qkv": "self_attn.in_proj",
    "attn.proj": "self_attn.out_proj",
    "mlp.fc1": "linear1",
    "mlp.fc2": "linear2",
}
# An "L2 distance" of the authors: squares are clamped to this before the root.
NEAR, FAR = 1e-4, 1e4


class ListEncoder(Module):
    r"""A result list re-scored by its own context: rows of similarities that attend to one another (Ouyang et al. 2021, section 3).

    Member i of a list (0 is the query) is known by its similarities $A_{ij}$ to the list's first members, the anchors (0 is the query
    again), and by nothing else:

    $$H = \mathrm{Blocks}(A W + b), \qquad F_i = H_i / |H_i|, \qquad s_k = F_0 \cdot F_k.$$

    Blocks normalise first; there are no positions and no last normalisation. So the scores move with the members when these are
    permuted. The order of the anchors is all that the network knows of ranks.

    Args:
        anchors: columns of A that the network reads. A table with fewer is filled with zeros, one with more is cut.
        embed_dim, num_heads, depth, hidden: sizes of the blocks; `hidden` is 4 x `embed_dim` by default. With `depth=0` rows are compared as `A W + b`.
        dropout: of similarities, of their projections and within blocks.
        drop_path: share of lists for which a branch of the last block adds nothing in training; it grows linearly from 0 in the first block.
        kernel: how rows are weighed in attention; `"none"` leaves attention out, each member is then scored by its own row.

    >>> encoder = ListEncoder(anchors=8, embed_dim=16, num_heads=2).eval()
    >>> tables = torch.rand(3, 6, 6)
    >>> encoder(tables).shape, encoder.scores(tables).shape
    (torch.Size([3, 6, 16]), torch.Size([3, 5]))
    """

    def __init__(
        self,
        anchors: int = 512,
        embed_dim: int = 768,
        num_heads: int = 12,
        depth: int = 2,
        hidden: int | None = None,
        dropout: float = 0.1,
        drop_path: float = 0.1,
        *,
        kernel: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(anchors=anchors)
        check_whole(0, depth=depth)
        check_number(least=0, high=1, dropout=dropout, drop_path=drop_path)
        self.anchors, self.embed_dim, self.num_heads, self.depth = anchors, embed_dim, num_heads, depth
        self.dropout, self.drop_path = dropout, drop_path
        place = {"device": device, "dtype": dtype}
        self.project = nn.Linear(anchors, embed_dim, **place)
        rates = [drop_path * at / max(depth - 1, 1) for at in range(depth)]
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, hidden, dropout, kernel=kernel, drop_path=rate, **place) for rate in rates
        )
        self.hidden = self.blocks[0].hidden if depth else hidden
        self.kernel = self.blocks[0].kernel if depth else kernel
        self.align = nn.Linear(embed_dim, anchors, **place)
        for name, part in self.named_parameters():
            if part.ndim == 2:
                nn.init.trunc_normal_(part, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(part)

    def forward(self, tables: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Similarities `(B, members, anchors)` -> members `(B, members, embed_dim)`; the mask `(B, members)` is True where there is none."""
        tables = self._read(tables, key_padding_mask)
        out = functional.dropout(tables, self.dropout, self.training)
        out = functional.dropout(self.project(out), self.dropout, self.training)
        for block in self.blocks:
            out = block(out, key_padding_mask=key_padding_mask)
        return out

    def scores(self, tables: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The cosine of every member but the first with the first, `(B, members - 1)`; -inf where there is none."""
        rows = functional.normalize(self(tables, key_padding_mask), dim=-1, eps=1e-12)
        scores = (rows[:, 1:] * rows[:, :1]).sum(-1)
        return scores if key_padding_mask is None else scores.masked_fill(key_padding_mask[:, 1:], -torch.inf)

    def coefficients(self, tables: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention between members, `(B, layers, heads, members, members)`: what each, down, takes of each, across; rows sum to 1.

        >>> ListEncoder(anchors=8, embed_dim=16, num_heads=2).coefficients(torch.rand(3, 6, 6)).shape
        torch.Size([3, 2, 2, 6, 6])
        """
        out = self.project(self._read(tables, key_padding_mask))
        found = []
        for block in self.blocks:
            assert isinstance(block, Block)
            if not isinstance(block.self_attn, Attention):
                raise Unsupported(f"members do not attend to one another by {block.kernel!r:.60}; there are no weights")
            assert block.norm1 is not None
            seen = block.norm1(out)
            weights = block.self_attn(seen, key_padding_mask=key_padding_mask, average_attn_weights=False)[1]
            assert weights is not None
            found.append(weights)
            out = block(out, key_padding_mask=key_padding_mask)
        if not found:
            raise Unsupported("with depth=0 members do not attend to one another; there are no weights")
        return torch.stack(found, dim=1)

    def losses(
        self,
        tables: Tensor,
        relevant: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        temperature: float = 2.0,
        own: bool = True,
    ) -> tuple[Tensor, Tensor]:
        r"""Contrast and reconstruction of each list, `(B,)` both (Ouyang et al. 2021, eq. 5 and 6).

        $$L_{con} = -\log \frac{\sum_k y_k e^{s_k / t}}{\sum_k e^{s_k / t}}, \qquad
        L_{mse} = \mathrm{mean}_i \sqrt{\mathrm{clamp}(|\hat A_i - \widehat{(W' H_i + b')}|^2, 10^{-4}, 10^4)}.$$

        `relevant` `(B, members - 1)` is y. With `own` the query is a positive of itself, as published; without, it is no term of either sum, and a list
        without a positive has contrast 0. What the paper calls a mean square is a distance, never below 0.01.
        """
        hidden = self(tables, key_padding_mask)
        with torch.autocast(tables.device.type, enabled=False):
            hidden = hidden.float() if hidden.dtype in (torch.float16, torch.bfloat16) else hidden
            rows = functional.normalize(hidden, dim=-1, eps=1e-12)
            similar = (rows * rows[:, :1]).sum(-1) / temperature
            positive = torch.cat((relevant.new_full((len(relevant), 1), own, dtype=torch.bool), relevant.bool()), dim=1)
            there = torch.ones_like(positive) if key_padding_mask is None else ~key_padding_mask
            terms = there.clone()
            terms[:, 0] = own
            has = (positive & there).any(1)
            chosen = torch.where(has[:, None], positive & there, terms)
            over = [similar.masked_fill(~part, -torch.inf).logsumexp(1) for part in (terms, chosen)]
            # A list of nothing but a query that is no term has no sum at all.
            contrast = torch.where(terms.any(1), over[0] - over[1], similar.new_zeros(()))
            wanted = functional.normalize(self._read(tables, key_padding_mask).to(hidden), dim=-1, eps=1e-12)
            guess = functional.normalize(
                functional.linear(hidden, self.align.weight.to(hidden), self.align.bias.to(hidden)), dim=-1, eps=1e-12
            )
            distances = (wanted - guess).square().sum(-1).clamp(NEAR, FAR).sqrt()
            distances = torch.where(there, distances, distances.new_zeros(()))
            return contrast, distances.sum(1) / there.sum(1)

    def _read(self, tables: Tensor, padding: Tensor | None) -> Tensor:
        """Tables of as many columns as the network has anchors; zero in rows and columns of members that are not there."""
        if tables.ndim != 3:
            raise InvalidArgument(f"tables must be (batch, members, anchors); got shape {tuple(tables.shape)}")
        columns = min(tables.shape[2], self.anchors)
        tables = tables[:, :, :columns]
        if padding is not None:
            away = padding[:, :, None] | _column_padding(padding, columns)[:, None]
            tables = torch.where(away, tables.new_zeros(()), tables)
        return functional.pad(tables, (0, self.anchors - columns))


def _column_padding(padding: Tensor, columns: int) -> Tensor:
    """Which anchors are not there; those beyond the list's members are."""
    return functional.pad(padding[:, :columns], (0, max(0, columns - padding.shape[1])))


def authors_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a `ListEncoder` from that of the code of Ouyang et al. (2021), in their names.

    >>> sorted(authors_state({"topk_proj.bias": torch.zeros(2), "blocks.0.attn.qkv.weight": torch.zeros(6, 2)}))
    ['blocks.0.self_attn.in_proj_weight', 'project.bias']
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        part, _, kind = name.rpartition(".")
        if part in ("topk_proj", "feature_align.layers.0"):
            found[f"{'project' if part == 'topk_proj' else 'align'}.{kind}"] = tensor
            continue
        home, _, inner = part.removeprefix("blocks.").partition(".")
        if not part.startswith("blocks.") or inner not in AUTHORS:
            raise InvalidArgument(f"{name!r} is none of the published network's parameters")
        ours = AUTHORS[inner]
        found[f"blocks.{home}.{ours}{'_' if ours.endswith('in_proj') else '.'}{kind}"] = tensor
    return found
