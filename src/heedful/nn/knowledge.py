"""Attention that also reads from knowledge: f(X, Z) = A X + B Z."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from heedful import masks
from heedful._attend import attend
from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Kernel, PerHead, Softmax
from heedful.masks import Mask
from heedful.nn._module import (
    Activation,
    Coefficients,
    KernelModule,
    check_input,
    check_knowledge,
    check_padding,
    kernel_parameters,
    layer_mask,
    learned,
)
from heedful.nn._values import Value, ValueModule

Coordinates = Literal["learned", "inputs", "knowledge"]
Readout = Literal["x+z", "x|z", "x"]


class KnowledgeAttention(ValueModule, KernelModule):
    r"""Every orthogonally equivariant sequence function with knowledge: $f(X, Z) = A X + B Z$ (Ma & Ying 2023, Prop. 3.2).

    Coefficients come from a kernel of *coordinates*, which are inner products:

    | `coordinates` | query | key of a token or knowledge vector y |
    |---|---|---|
    | `"learned"` | W_Q x | W_K y; W_Q and W_K are knowledge that is only compared with (the paper's Z = [W_Q, W_K]) |
    | `"inputs"` | x | y; no parameters |
    | `"knowledge"` | Z x | Z y |
    | `"knowledge"` with `weight` | W^T Z x; for B, Z x where it is apart (`"x|z"`) | Z y of a token; of the l-th knowledge vector the l-th of k learned keys |

    Knowledge Z is `knowledge` learned vectors, vectors given at call time (shared `(k, d)`, batched `(B, k, d)` or for each head
    `(B, heads, k, d)`), or both; with `own_knowledge` every head has learned vectors of its own. `weight=True` is
    $\sigma(Y W Y^\top)$ with $Y = XZ^\top$ and a learned W for every head, and B from $Y W_B$ (sec. 3.3); it needs to know how
    many vectors will be `given`.

    `readout="x+z"` divides rows over tokens and knowledge together, `"x|z"` computes A X + gamma B Z with a learned gamma per
    head, `"x"` reads tokens alone. With `knowledge_kernel` and `"x|z"`, A and B are functions apart: B has this kernel, and with learned
    coordinates also maps of its own.

    Each head's outcome evolves and heads are summed (eq. 5.3): `value="identity"` leaves it, `"linear"` is eq. 5.1 with
    W = W_O W_V of rank `value_dim` (`head_dim` by default; `embed_dim` makes it a full matrix), `"mlp"` is eq. 5.2,
    V activation(U .) with `hidden` units; `out_dim` is another size of the outcome. `kernel` is one kernel, or a list with one
    for each head. With `outputs=m` the queries are m learned ones instead of the tokens', so that f goes from n rows to m.

    With `"identity"` and coordinates from inputs or given knowledge the layer is exactly equivariant: f(XQ, ZQ) = f(X, Z) Q. The
    number of parameters does not depend on the length of the sequence.

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
        given: int | None = None,
        own_knowledge: bool = False,
        kernel: Kernel | Sequence[Kernel] | None = None,
        knowledge_kernel: Kernel | Sequence[Kernel] | None = None,
        coordinates: Coordinates = "learned",
        weight: bool = False,
        readout: Readout = "x+z",
        value: Value = "linear",
        head_dim: int | None = None,
        value_dim: int | None = None,
        hidden: int | None = None,
        activation: Activation = "gelu",
        out_dim: int | None = None,
        outputs: int | None = None,
        residual: bool = False,
        dropout: float = 0.0,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_whole(embed_dim=embed_dim, num_heads=num_heads)
        check_whole(
            optional=True, head_dim=head_dim, value_dim=value_dim, hidden=hidden, out_dim=out_dim, outputs=outputs
        )
        super().__init__(kernel, num_heads, dropout, impl, device)
        check_choice(Coordinates, coordinates=coordinates)
        check_choice(Readout, readout=readout)
        check_whole(0, knowledge=knowledge)
        check_whole(0, optional=True, given=given)
        if head_dim is None and embed_dim % num_heads:
            raise InvalidArgument(
                f"embed_dim must be a multiple of num_heads unless head_dim is given; got {embed_dim} and {num_heads}"
            )
        # W, and learned queries, have a row for each vector: with none announced, none can be given.
        counted = weight or (outputs is not None and coordinates == "knowledge")
        given = 0 if given is None and counted and knowledge else given
        self.embed_dim, self.num_heads, self.knowledge, self.given = embed_dim, num_heads, knowledge, given
        self.own_knowledge, self.coordinates, self.weight = own_knowledge, coordinates, weight
        self.readout, self.outputs, self.residual = readout, outputs, residual
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.hidden = 4 * embed_dim if hidden is None else hidden
        self._check_form(knowledge_kernel)
        place: dict[str, Any] = {"device": device, "dtype": dtype}

        def rows(count: int) -> nn.Parameter:
            return learned(num_heads, count, embed_dim, **place)

        own, apart = coordinates == "learned", knowledge_kernel is not None
        self.knowledge_parameters = None
        if knowledge_kernel is not None:
            self.knowledge_parameters = kernel_parameters(knowledge_kernel, num_heads).to(device)
        self.query_rows = rows(self.head_dim) if own and outputs is None else None
        self.key_rows = rows(self.head_dim) if own else None
        self.knowledge_query_rows = rows(self.head_dim) if own and apart and outputs is None else None
        self.knowledge_key_rows = rows(self.head_dim) if own and apart else None
        count = knowledge + (given or 0)
        size = self.head_dim if own else count
        self.queries = None if outputs is None else learned(num_heads, outputs, size, **place)
        self.mix = learned(num_heads, count, count, **place) if weight and outputs is None else None
        self.knowledge_keys = learned(num_heads, count, count, **place) if weight and readout != "x" else None
        inner = {"linear": self.value_dim, "mlp": self.hidden}
        self._make_values(value, num_heads, embed_dim, inner, activation, out_dim, residual, place)
        shape = (num_heads, knowledge, embed_dim) if own_knowledge else (knowledge, embed_dim)
        self.vectors = learned(*shape, **place) if knowledge else None
        self.gamma = nn.Parameter(torch.ones(num_heads, **place)) if readout == "x|z" else None

    def _check_form(self, knowledge_kernel: Kernel | Sequence[Kernel] | None) -> None:
        """Refuses what contradicts itself."""
        if knowledge_kernel is not None and self.readout != "x|z":
            raise InvalidArgument(f"knowledge_kernel is for readout='x|z', which keeps B apart; got {self.readout!r}")
        if self.readout != "x" and (
            any(kernel.balances for kernel in _each(self.kernel))
            and (knowledge_kernel is None or self.readout == "x+z")
        ):
            raise InvalidArgument("symmetric() takes as many keys as queries, which knowledge has not; give readout='x', "
                                  "or readout='x|z' with a knowledge_kernel of another kind")  # fmt: skip
        if self.weight and self.coordinates != "knowledge":
            raise InvalidArgument(
                f"weight=True is for coordinates='knowledge'; got {self.coordinates!r}"
                + (", where W is W_Q^T W_K already" if self.coordinates == "learned" else "")
            )
        counted = self.knowledge + (self.given or 0) > 0 and (self.given is not None or self.knowledge > 0)
        if (self.weight or (self.outputs and self.coordinates == "knowledge")) and not counted:
            raise InvalidArgument(
                "W and learned queries have a row for each knowledge vector: say how many with knowledge=k or given=k"
            )
        if self.outputs and self.coordinates == "inputs":
            raise InvalidArgument("outputs=m has learned queries; coordinates='inputs' has nothing learned to ask with")
        if self.outputs and self.residual:
            raise InvalidArgument("outputs=m gives m rows, which cannot be added to the tokens; leave residual out")
        if self.own_knowledge and not self.knowledge:
            raise InvalidArgument("own_knowledge=True is about learned vectors: give knowledge=k")

    @property
    def knowledge_kernel(self) -> Kernel | None:
        """The kernel of B where it has its own."""
        return None if self.knowledge_parameters is None else self.knowledge_parameters.kernel

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
        sizes = self.head_dim * self.num_heads, self.value_dim * self.num_heads, self.out_dim
        plain = (self.coordinates, self.value, self.outputs, self.knowledge_kernel) == ("learned", "linear", None, None)
        if not plain or set(sizes) != {self.embed_dim}:
            raise InvalidArgument(
                "to_multihead takes coordinates='learned', value='linear', head_dim = value_dim = embed_dim / num_heads and "
                f"neither outputs, out_dim nor knowledge_kernel; got {self.coordinates!r}, {self.value!r}, "
                f"head_dim={self.head_dim}, value_dim={self.value_dim}, out_dim={self.out_dim}, outputs={self.outputs}"
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
        """f(x, z): `(B, n, d)` -> `(B, n or outputs, out_dim)`. Masks are True = ignore; `z_padding_mask` `(B, k)` is about the given z."""
        rows, readings = self._readings(x, z, key_padding_mask, z_padding_mask, attn_mask, is_causal)
        value = self._values(rows).expand(-1, self.num_heads, -1, -1)
        dropout = self.dropout if self.training else 0.0
        parts = [
            one.factor
            * attend(one.query, one.key, value[..., one.rows, :], one.mask, dropout, kernel=one.kernel, impl=self.impl)
            for one in readings
        ]
        heads = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return self._evolved(heads, x)

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
        _, readings = self._readings(x, z, key_padding_mask, z_padding_mask, attn_mask, is_causal)
        parts = [one.factor * attend.coefficients(one.query, one.key, one.mask, kernel=one.kernel) for one in readings]
        joint, n = torch.cat(parts, dim=-1), x.shape[1]
        return Coefficients(joint[..., :n], joint[..., n:] if joint.shape[-1] > n else None)

    def _readings(
        self,
        x: Tensor,
        z: Tensor | None,
        padding: Tensor | None,
        z_padding: Tensor | None,
        attn_mask: Mask | Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, list[_Reading]]:
        """What is combined, `[B, 1 or H, n + k, d]`, and how: over all rows together, or over tokens and over knowledge."""
        check_input("x", x, self.embed_dim)
        if is_causal and self.outputs:
            raise InvalidArgument("outputs=m has queries without a place in the sequence; is_causal cannot act on them")
        vectors = self._vectors(x, z, z_padding)
        batch, n, _ = x.shape
        tokens, queries = x[:, None], self.outputs or n
        mask = layer_mask(batch, self.num_heads, queries, n, attn_mask, padding, is_causal)
        if vectors is None or self.readout == "x":
            query, key = self._coordinates(tokens, tokens, vectors)
            return tokens, [_Reading(query, key, slice(n), mask, self.kernel)]
        rows = torch.cat((tokens.expand(-1, vectors.shape[1], -1, -1), vectors), dim=-2)
        z_mask = None
        if z_padding is not None:
            z_mask = masks.keys(nn.functional.pad(~z_padding, (self.knowledge, 0), value=True))
        if self.gamma is None:
            query, key = self._coordinates(tokens, rows, vectors)
            if self.knowledge_keys is not None:
                key = torch.cat((key[..., :n, :], self.knowledge_keys.expand(batch, -1, -1, -1)), dim=-2)
            joint = masks.beside(mask, n, z_mask, vectors.shape[-2])
            return rows, [_Reading(query, key, slice(None), joint, self.kernel)]
        query, key = self._coordinates(tokens, tokens, vectors)
        of_z, z_key = self._coordinates(tokens, vectors, vectors, apart=True, query=query)
        if self.knowledge_keys is not None:
            z_key = self.knowledge_keys.expand(batch, -1, -1, -1)
        kernel = self.kernel if self.knowledge_kernel is None else self.knowledge_kernel
        return rows, [
            _Reading(query, key, slice(n), mask, self.kernel),
            _Reading(of_z, z_key, slice(n, None), z_mask, kernel, self.gamma[:, None, None]),
        ]

    def _vectors(self, x: Tensor, z: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """All knowledge `[B, 1 or H, k, d]`: the learned vectors, then the given ones, zero where they are hidden."""
        batch = x.shape[0]
        parts = [] if self.vectors is None else [self.vectors if self.own_knowledge else self.vectors[None]]
        if z is not None:
            if self.given == 0:
                raise InvalidArgument(
                    "this layer was made for learned vectors alone; say given=k to give z beside them"
                )
            z = check_knowledge(z, x, self.given, self.num_heads)
            z = z if z.dim() == 4 else z.unsqueeze(-3) if z.dim() == 3 else z[None, None]
            z = z.expand(batch, -1, -1, -1)
            check_padding(padding, batch, z.shape[-2])
            parts.append(z if padding is None else z.masked_fill(padding[:, None, :, None], 0.0))
        elif padding is not None:
            raise InvalidArgument(f"got z_padding_mask of shape {tuple(padding.shape)}, but no z was given")
        elif self.given:
            raise InvalidArgument(f"this layer expects given={self.given} knowledge vectors; call it with z")
        count = sum(part.shape[-2] for part in parts)
        if not count:
            if self.coordinates == "knowledge":
                raise InvalidArgument(
                    "coordinates='knowledge' compares with knowledge: give z, or knowledge=k learned vectors"
                )
            return None
        heads = max(part.shape[-3] for part in parts)
        return torch.cat([part.expand(batch, heads, *part.shape[-2:]) for part in parts], dim=-2)

    def _coordinates(
        self, tokens: Tensor, rows: Tensor, vectors: Tensor | None, apart: bool = False, query: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries of tokens `[B, H, n or outputs, p]` and keys of rows `[B, H, ..., p]`; with `apart` those of B, of which A's `query` serves
        where B has none of its own.
        """
        batch, heads = tokens.shape[0], self.num_heads
        if self.key_rows is not None:
            ask, tell = self.query_rows, self.key_rows
            if apart and self.knowledge_key_rows is not None:
                ask, tell = self.knowledge_query_rows, self.knowledge_key_rows
            if query is None or ask is not self.query_rows:
                query = None if ask is None else tokens @ ask.mT
            key = rows @ tell.mT
        else:
            if self.coordinates == "knowledge" and vectors is not None:
                tokens, rows = tokens @ vectors.mT, rows @ vectors.mT
            # A asks through W; B has its W in the keys of the knowledge.
            query, key = tokens if self.mix is None or apart else tokens @ self.mix, rows
        if self.queries is not None:
            query = self.queries[None]
        assert query is not None
        return query.expand(batch, heads, -1, -1), key.expand(batch, heads, -1, -1)

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, knowledge={self.knowledge}, coordinates={self.coordinates!r}, "
            f"readout={self.readout!r}, value={self.value!r}"
        )


def _each(kernel: Kernel) -> Sequence[Kernel]:
    return kernel.kernels if isinstance(kernel, PerHead) else (kernel,)


class _Reading(NamedTuple):
    """One call of `attend`: over which rows, by which kernel, times what."""

    query: Tensor
    key: Tensor
    rows: slice
    mask: Mask | None
    kernel: Kernel
    factor: Tensor | float = 1.0
