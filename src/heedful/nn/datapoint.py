"""Attention between the rows of a table and between its columns (Kossen et al. 2021, Non-Parametric Transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from heedful._checks import check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Kernel
from heedful.masks import Mask
from heedful.nn._module import Module
from heedful.nn.datapoint_block import DatapointBlock, Remembered, Residual, Scale


class Options(TypedDict, total=False):
    """The arguments of `DatapointBlock` beside its width and heads."""

    hidden: int | None
    dropout: float
    attention_dropout: float | None
    norm_kv: bool
    scale: Scale
    residual: Residual
    eps: float
    kernel: Kernel | Sequence[Kernel] | None
    impl: str
    inducing: int | None
    device: Any
    dtype: Any


class DatapointAttention(Module):
    """Attention between the rows of tables: each row, all its cells in a line, is one item of a `DatapointBlock`.

    `(B, n, columns, e)` -> `(B, n, columns e)` -> block of width w = `columns` e -> `(B, n, columns, e)` (Kossen et al. 2021,
    section 2.4, ABD). With `columns` all columns of the table this is the published layer, of $13 w^2 + 14 w$ parameters; with r learned
    tokens in front of each row that hold what the row has to say, `columns = r` and far fewer. A permutation of rows
    permutes the output; rows that come twice change nothing. Other options are those of `DatapointBlock`.

    >>> import torch, heedful
    >>> layer = heedful.nn.DatapointAttention(5, 8, 4, dropout=0.0)
    >>> table = torch.randn(2, 7, 5, 8)
    >>> order = torch.randperm(7)
    >>> layer(table)[:, order].allclose(layer(table[:, order]), atol=1e-5)
    True
    >>> layer.coefficients(table).shape
    torch.Size([2, 4, 7, 7])
    """

    def __init__(self, columns: int, embed_dim: int, num_heads: int, **options: Unpack[Options]) -> None:
        super().__init__()
        check_whole(columns=columns, embed_dim=embed_dim)
        self.columns, self.embed_dim = columns, embed_dim
        self.block = DatapointBlock(columns * embed_dim, num_heads, **options)

    def arguments(self) -> dict[str, Any]:
        return {**self.block.arguments(), "columns": self.columns, "embed_dim": self.embed_dim}

    def remember(self, key: Tensor, key_padding_mask: Tensor | None = None) -> Remembered:
        """Keys and values of rows `(B, n, columns, e)`: see `DatapointBlock.remember`."""
        return self.block.remember(self._flat("key", key), key_padding_mask)

    def forward(
        self,
        cells: Tensor,
        key: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        *,
        remembered: Remembered | None = None,
    ) -> Tensor:
        """`(B, m, columns, e)` -> the same; rows attend to themselves, to `key` `(B, n, columns, e)` or to what is `remembered`.

        Masks are those of `DatapointBlock`, of rows.
        """
        other = None if key is None else self._flat("key", key)
        out = self.block(self._flat("cells", cells), other, key_padding_mask, attn_mask, remembered=remembered)
        return out.unflatten(-1, (self.columns, self.embed_dim))

    def coefficients(
        self,
        cells: Tensor,
        key: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        *,
        remembered: Remembered | None = None,
    ) -> Tensor:
        """How much each row takes of each other row in the same call, `[B, heads, m, n]`."""
        other = None if key is None else self._flat("key", key)
        rows = self._flat("cells", cells)
        return self.block.coefficients(rows, other, key_padding_mask, attn_mask, remembered=remembered)

    def _flat(self, name: str, cells: Tensor) -> Tensor:
        check_cells(name, cells, self.columns, self.embed_dim)
        return cells.flatten(-2)


class ColumnAttention(Module):
    """Attention between the columns of each row: the cells of a row are the items of a `DatapointBlock`, the same for every row.

    `(B, n, d, e)` -> `(B n, d, e)` -> block of width e -> `(B, n, d, e)` (Kossen et al. 2021, section 2.4, ABA). Rows do not meet.
    Options are those of `DatapointBlock`.

    >>> import torch, heedful
    >>> layer = heedful.nn.ColumnAttention(8, 4)
    >>> layer(torch.randn(2, 7, 5, 8)).shape
    torch.Size([2, 7, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Unpack[Options]) -> None:
        super().__init__()
        self.block = DatapointBlock(embed_dim, num_heads, **options)

    def arguments(self) -> dict[str, Any]:
        return self.block.arguments()

    def forward(self, cells: Tensor, column_padding_mask: Tensor | None = None) -> Tensor:
        """`(B, n, d, e)` -> the same; columns of table b where `column_padding_mask` `(B, d)` is True are ignored."""
        rows, padding = self._rows(cells, column_padding_mask)
        return self.block(rows, key_padding_mask=padding).unflatten(0, cells.shape[:2])

    def coefficients(self, cells: Tensor, column_padding_mask: Tensor | None = None) -> Tensor:
        """How much each cell takes of each cell of its row, `[B, n, heads, d, d]`."""
        rows, padding = self._rows(cells, column_padding_mask)
        return self.block.coefficients(rows, key_padding_mask=padding).unflatten(0, cells.shape[:2])

    def _rows(self, cells: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        check_cells("cells", cells, None, self.block.embed_dim)
        if padding is not None:
            if padding.dtype != torch.bool or padding.shape != (cells.shape[0], cells.shape[2]):
                raise InvalidArgument(
                    f"column_padding_mask must be boolean (True = ignore) of shape (batch, columns) = "
                    f"{(cells.shape[0], cells.shape[2])}; got {padding.dtype} {tuple(padding.shape)}"
                )
            padding = padding[:, None].expand(-1, cells.shape[1], -1).flatten(0, 1)
        return cells.flatten(0, 1), padding


def check_cells(name: str, cells: Tensor, columns: int | None, width: int) -> None:
    fits = isinstance(cells, Tensor) and cells.dim() == 4 and cells.shape[-1] == width
    if not fits or (columns is not None and cells.shape[-2] != columns):
        got = tuple(cells.shape) if isinstance(cells, Tensor) else type(cells).__name__
        raise InvalidArgument(
            f"{name} must have shape (batch, rows, {'columns' if columns is None else columns}, {width}); got {got}"
        )
