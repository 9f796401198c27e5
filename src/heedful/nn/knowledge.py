"""Attention that also reads from knowledge: f(X, Z) = A X + B Z."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from heedful import masks
from heedful._attend import attend
from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Kernel, Softmax
from heedful.masks import Mask
from heedful.nn._module import KernelModule, check_input, layer_mask, learned

Coordinates = Literal["learned", "inputs", "knowledge"]
Readout = Literal["x+z", "x|z", "x"]
Value = Literal["linear", "identity", "mlp"]


class Coefficients(NamedTuple):
    """A `[B, heads, n, n]` on the tokens and B `[B, heads, n, k]` on the knowledge (None where it is not read)."""

    x: Tensor
    z: Tensor | None


class KnowledgeAttention(KernelModule):
    r"""Every orthogonally equivariant sequence function with knowledge: $f(X, Z) = A X + B Z$ (Ma & Ying 2023, Prop. 3.2).

    Coefficients come from a kernel of *coordinates*, which are inner products:

    | `coordinates` | query | key of a token or knowledge vector y |
    |---|---|---|
    | `"learned"` | W_Q x | W_K y; W_Q and W_K are knowledge that is only compared with (the paper's Z = [W_Q, W_K]) |
    | `"inputs"` | x | y; no parameters |
    | `"knowledge"` | Z x | Z y |

    Knowledge Z is `knowledge` learned vectors, vectors given at call time (shared `(k, d)` or batched `(B, k, d)`), or both.
    `readout="x+z"` divides rows over tokens and knowledge together, `"x|z"` computes A X + gamma B Z with a learned gamma per
    head, `"x"` reads tokens alone. Each head's outcome evolves and heads are summed (eq. 5.3): `value="identity"` leaves it,
    `"linear"` is eq. 5.1 with W = W_O W_V of rank `head_dim`, `"mlp"` is eq. 5.2, V gelu(U .) with `hidden` units. With
    `"identity"` and coordinates from inputs or knowledge the layer is exactly equivariant: f(XQ, ZQ) = f(X, Z) Q.

    The number of parameters does not depend on the length of the sequence.

    >>> import torch, heedful
    >>> layer = heedful.nn.KnowledgeAttention(16, coordinates="inputs", value="identity")
    >>> x, z = torch.randn(2, 5, 16), torch.randn(3, 16)
    >>> layer(x, z).shape, layer.coefficients(x, z).z.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 1, 5, 3]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        knowledge: int = 0,
        kernel: Kernel | None = None,
        coordinates: Coordinates = "learned",
        readout: Readout = "x+z",
        value: Value = "linear",
        head_dim: int | None = None,
        hidden: int | None = None,
        residual: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_whole(embed_dim=embed_dim, num_heads=num_heads)
        check_whole(optional=True, head_dim=head_dim, hidden=hidden)
        super().__init__(kernel, num_heads, dropout, impl, device)
        check_choice(Coordinates, coordinates=coordinates)
        check_choice(Readout, readout=readout)
        check_choice(Value, value=value)
        check_whole(0, knowledge=knowledge)
        if head_dim is None and embed_dim % num_heads:
            raise InvalidArgument(
                f"embed_dim must be a multiple of num_heads unless head_dim is given; got {embed_dim} and {num_heads}"
            )
        self.embed_dim, self.num_heads, self.knowledge = embed_dim, num_heads, knowledge
        self.coordinates, self.readout, self.value = coordinates, readout, value
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.hidden = 4 * embed_dim if hidden is None else hidden
        self.residual = residual

        def rows(count: int) -> nn.Parameter:
            return learned(num_heads, count, embed_dim, device=device, dtype=dtype)

        def columns(count: int) -> nn.Parameter:
            return learned(num_heads, embed_dim, count, device=device, dtype=dtype)

        self.query_rows = rows(self.head_dim) if coordinates == "learned" else None
        self.key_rows = rows(self.head_dim) if coordinates == "learned" else None
        inner = {"identity": None, "linear": self.head_dim, "mlp": self.hidden}[value]
        self.value_rows = None if inner is None else rows(inner)
        self.value_columns = None if inner is None else columns(inner)
        self.vectors = learned(knowledge, embed_dim, device=device, dtype=dtype) if knowledge else None
        self.gamma = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype)) if readout == "x|z" else None

    @classmethod
    def from_multihead(cls, layer: nn.MultiheadAttention) -> KnowledgeAttention:
        """The same function as a bias-free `nn.MultiheadAttention` on one sequence: the paper's block form."""
        plain = isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None
        if not plain or layer.in_proj_bias is not None or layer.bias_k is not None or layer.add_zero_attn:
            raise InvalidArgument(
                "from_multihead takes nn.MultiheadAttention(..., bias=False) without kdim, vdim, add_bias_kv, add_zero_attn"
            )
        weight = layer.in_proj_weight
        place = {"device": weight.device, "dtype": weight.dtype}
        knowledge = cls(layer.embed_dim, layer.num_heads, readout="x", dropout=layer.dropout, **place)
        query, key, value = (part.unflatten(0, (layer.num_heads, -1)) for part in weight.detach().chunk(3))
        out = layer.out_proj.weight.detach().unflatten(1, (layer.num_heads, -1)).transpose(0, 1)  # [H, d, p]
        knowledge.load_state_dict({"query_rows": query, "key_rows": key, "value_rows": value, "value_columns": out})
        return knowledge

    def to_multihead(self) -> nn.MultiheadAttention:
        """The bias-free `nn.MultiheadAttention` that computes the same."""
        if (self.coordinates, self.value) != ("learned", "linear") or self.head_dim * self.num_heads != self.embed_dim:
            raise InvalidArgument(
                "to_multihead takes coordinates='learned', value='linear' and head_dim = embed_dim / num_heads; got "
                f"{self.coordinates!r}, {self.value!r}, head_dim={self.head_dim}"
            )
        if self.kernel not in (Softmax(), Softmax(self.head_dim**-0.5)) or self.residual or self.knowledge:
            raise InvalidArgument(
                f"to_multihead takes kernel=Softmax() without learned knowledge or residual; got {self.kernel!r}, "
                f"knowledge={self.knowledge}, residual={self.residual}"
            )
        parts = (self.query_rows, self.key_rows, self.value_rows)
        assert self.value_columns is not None
        weight = torch.cat([part.detach().flatten(0, 1) for part in parts if part is not None])
        place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        layer = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, bias=False, batch_first=True, **place
        )
        out = self.value_columns.detach().transpose(0, 1).flatten(1)
        layer.load_state_dict({"in_proj_weight": weight, "out_proj.weight": out})
        return layer

    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        z_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """f(x, z): `(B, n, d)` -> `(B, n, d)`. Masks are True = ignore; `z_padding_mask` `(B, k)` is about the given z."""
        vectors = self._vectors(x, z, z_padding_mask)
        query, key = self._coordinates(x, vectors)
        mask, z_mask = self._masks(x, key_padding_mask, z_padding_mask, attn_mask, is_causal)
        kernel, dropout = self.kernel, self.dropout if self.training else 0.0
        rows = self._rows(x, vectors)
        value = rows[:, None] if self.value_rows is None else rows[:, None] @ self.value_rows.mT  # [B, H, n + k, p]
        value = value.expand(-1, self.num_heads, -1, -1)
        n = x.shape[1]
        if self.gamma is not None and vectors is not None:
            heads = attend(query, key[..., :n, :], value[..., :n, :], mask, dropout, kernel=kernel, impl=self.impl)
            read = attend(query, key[..., n:, :], value[..., n:, :], z_mask, dropout, kernel=kernel, impl=self.impl)
            heads = heads + self.gamma[:, None, None] * read
        else:
            heads = attend(
                query, key, value, self._joined(mask, z_mask, x, key), dropout, kernel=kernel, impl=self.impl
            )
        if self.value == "mlp":
            heads = nn.functional.gelu(heads)
        if self.value_columns is not None:
            heads = heads @ self.value_columns.mT
        out = heads.sum(dim=1)
        return x + out if self.residual else out

    def coefficients(
        self,
        x: Tensor,
        z: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        z_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Coefficients:
        """A and B of the same call, per head; with `value="identity"`, f(x, z) is the sum over heads of A x + B z."""
        vectors = self._vectors(x, z, z_padding_mask)
        query, key = self._coordinates(x, vectors)
        mask, z_mask = self._masks(x, key_padding_mask, z_padding_mask, attn_mask, is_causal)
        kernel, n = self.kernel, x.shape[1]
        if self.gamma is not None and vectors is not None:
            read = attend.coefficients(query, key[..., n:, :], z_mask, kernel=kernel)
            own = attend.coefficients(query, key[..., :n, :], mask, kernel=kernel)
            return Coefficients(own, self.gamma[:, None, None] * read)
        joint = attend.coefficients(query, key, self._joined(mask, z_mask, x, key), kernel=kernel)
        return Coefficients(joint[..., :n], joint[..., n:] if key.shape[-2] > n else None)

    def _vectors(self, x: Tensor, z: Tensor | None, z_padding_mask: Tensor | None) -> Tensor | None:
        """All knowledge `[B, k, d]`: the learned vectors, then the given ones, zero where they are hidden."""
        check_input("x", x, self.embed_dim)
        parts: list[Tensor] = [] if self.vectors is None else [self.vectors]
        if z is not None:
            if z.dim() not in (2, 3) or z.shape[-1] != self.embed_dim or (z.dim() == 3 and z.shape[0] != x.shape[0]):
                raise InvalidArgument(
                    f"z must have shape (k, {self.embed_dim}) or ({x.shape[0]}, k, {self.embed_dim}); got {tuple(z.shape)}"
                )
            z = z.expand(x.shape[0], *z.shape[-2:])
            if z_padding_mask is not None:
                if not isinstance(z_padding_mask, Tensor) or z_padding_mask.dtype != torch.bool:
                    got = getattr(z_padding_mask, "dtype", type(z_padding_mask).__name__)
                    raise InvalidArgument(f"z_padding_mask must be boolean (True = ignore); got {got}")
                if z_padding_mask.shape != z.shape[:2]:
                    raise InvalidArgument(
                        f"got z_padding_mask of shape {tuple(z_padding_mask.shape)}, expected (batch, k) = {tuple(z.shape[:2])}"
                    )
                z = z.masked_fill(z_padding_mask[..., None], 0.0)
            parts.append(z)
        elif z_padding_mask is not None:
            raise InvalidArgument(f"got z_padding_mask of shape {tuple(z_padding_mask.shape)}, but no z was given")
        vectors = torch.cat([part.expand(x.shape[0], *part.shape[-2:]) for part in parts], dim=1) if parts else None
        if self.coordinates == "knowledge" and (vectors is None or vectors.shape[1] == 0):
            raise InvalidArgument(
                "coordinates='knowledge' compares with knowledge: give z, or knowledge=k learned vectors"
            )
        return vectors

    def _rows(self, x: Tensor, vectors: Tensor | None) -> Tensor:
        """What is combined, `[B, n + k, d]`: tokens, then knowledge if it is read."""
        return x if vectors is None or self.readout == "x" else torch.cat((x, vectors), dim=1)

    def _coordinates(self, x: Tensor, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries `[B, H, n, p]` and keys `[B, H, n + k, p]`, or n keys where knowledge is not read."""
        rows = self._rows(x, vectors)
        if self.query_rows is not None and self.key_rows is not None:
            return x[:, None] @ self.query_rows.mT, rows[:, None] @ self.key_rows.mT
        if self.coordinates == "knowledge" and vectors is not None:
            x, rows = x @ vectors.mT, rows @ vectors.mT
        return tuple(part[:, None].expand(-1, self.num_heads, -1, -1) for part in (x, rows))  # type: ignore[return-value]

    def _masks(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        z_padding_mask: Tensor | None,
        attn_mask: Mask | Tensor | None,
        is_causal: bool,
    ) -> tuple[Mask | None, Mask | None]:
        """The masks over tokens and over knowledge, of which the learned part is always seen."""
        batch, n, _ = x.shape
        mask = layer_mask(batch, self.num_heads, n, n, attn_mask, key_padding_mask, is_causal)
        if z_padding_mask is None:
            return mask, None
        return mask, masks.keys(nn.functional.pad(~z_padding_mask, (self.knowledge, 0), value=True))

    def _joined(self, mask: Mask | None, z_mask: Mask | None, x: Tensor, key: Tensor) -> Mask | None:
        extra = key.shape[-2] - x.shape[1]
        return masks.beside(mask, x.shape[1], z_mask, extra) if extra else mask

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, knowledge={self.knowledge}, coordinates={self.coordinates!r}, "
            f"readout={self.readout!r}, value={self.value!r}"
        )
