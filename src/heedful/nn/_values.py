"""How the embedding evolves behind a combination of rows: equations 5.1 to 5.3 of Ma & Ying (2023)."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.nn._module import ACTIVATIONS, Activation, Module, learned

Value = Literal["linear", "identity", "mlp"]


class ValueModule(Module):
    r"""A module whose heads' outcomes $H_h = A_h X$ evolve and are summed.

    `"identity"` leaves them: $\sum_h H_h$; `"linear"` is $\sum_h H_h U_h^\top V_h^\top$ (5.1), `"mlp"` $\sum_h \sigma(H_h U_h^\top) V_h^\top$ (5.2).
    """

    def _make_values(
        self,
        value: Value,
        num_heads: int,
        embed_dim: int,
        inner: dict[str, int],
        activation: Activation,
        out_dim: int | None,
        residual: bool,
        place: dict[str, Any],
    ) -> None:
        """`inner` has the number of rows of U for `"linear"` and for `"mlp"`."""
        check_choice(Value, value=value)
        check_choice(Activation, activation=activation)
        check_whole(optional=True, out_dim=out_dim)
        self.value, self.activation, self.residual = value, activation, residual
        self.out_dim = embed_dim if out_dim is None else out_dim
        if value == "identity" and self.out_dim != embed_dim:
            raise InvalidArgument("value='identity' leaves the embedding as it is; out_dim needs 'linear' or 'mlp'")
        if residual and self.out_dim != embed_dim:
            raise InvalidArgument(f"residual adds tokens of size {embed_dim} to an outcome of {self.out_dim}")
        plain = value == "identity"
        self.value_rows = None if plain else learned(num_heads, inner[value], embed_dim, **place)
        self.value_columns = None if plain else learned(num_heads, self.out_dim, inner[value], **place)

    def _values(self, rows: Tensor) -> Tensor:
        """Rows `[B, 1 or H, m, d]` as they are combined, `[B, 1 or H, m, p]`."""
        return rows if self.value_rows is None else rows @ self.value_rows.mT

    def _evolved(self, heads: Tensor, x: Tensor) -> Tensor:
        """Combinations `[B, H, n, p]` as the outcome `[B, n, out_dim]`."""
        if self.value == "mlp":
            heads = ACTIVATIONS[self.activation](heads)
        if self.value_columns is not None:
            heads = heads @ self.value_columns.mT
        out = heads.sum(dim=1)
        return x + out if self.residual else out
