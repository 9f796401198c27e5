"""Coefficients that are learned functions of inner products: for rows of any number, and for a fixed number of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful import masks
from heedful._attend import attend
from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Kernel, Relu, Silu, Tanh
from heedful.masks import Mask
from heedful.nn._module import (
    ACTIVATIONS,
    Coefficients,
    Module,
    check_knowledge,
    check_padding,
    layer_mask,
    learned,
)
from heedful.ops import IMPLEMENTATIONS

Activation = Literal["silu", "relu", "tanh"]
Blocks = tuple[Literal["xx", "xz", "zz"], ...]

_UNITS: dict[str, Kernel] = {"silu": Silu(scale=1.0), "relu": Relu(scale=1.0), "tanh": Tanh(scale=1.0)}


class VectorsAndScalars(NamedTuple):
    """Vectors `(B, n, channels, d)` that turn with the input, and scalars `(B, n, s)` that do not."""

    vectors: Tensor
    scalars: Tensor


class InvariantCoefficients(Module):
    r"""$f(X, Z) = A X + B Z$ with A and B learned functions of all inner products (Ma & Ying 2023, Prop. 3.2), for any number of rows.

    Every token carries `channels` vectors $x_{ic}$ of any dimension d, and `scalars` numbers $s_i$. A network of one hidden layer (more
    with `depth`) reads what a pair of rows has of inner products, and its `units` are the coefficients:

    $$\kappa_u(i, j) = \sigma\Big(\alpha_u \cdot r_i + \beta_u \cdot r_j + \tfrac{1}{\sqrt d} \big\langle \textstyle\sum_c a_{uc} x_{ic},
    \sum_c b_{uc} x_{jc} \big\rangle + \gamma_u\Big), \qquad r_i = \big(s_i, \tfrac{1}{\sqrt d} \langle x_{ic}, x_{ic'} \rangle_{c \le c'}\big).$$

    With $p_i$ the mean over the j that i sees of $\kappa_u(i, j)(1, T_u r_j)$, and $D_i$, $g_i$, $h_i$ three parts of a second small network of
    $(r_i, p_i)$, the outcome is

    $$x'_{ic'} = \sum_c D_i^{c'c} x_{ic} + \sum_u O_{c'u}\, g_{iu}\, \frac{1}{n_i} \sum_j \kappa_u(i, j) \sum_c v_{uc} x_{jc}, \qquad s'_i = h_i,$$

    where j goes over tokens and knowledge alike. So the diagonal of A is a function of its own, as in Prop. 4.1, and every coefficient
    depends on all tokens through $p_i$. Turning and mirroring all vectors, X and Z together, turns and mirrors the outcome: exactly, for
    every d with the same parameters. Renumbering tokens renumbers rows.

    With `depth=1` each unit is a head of `attend` with the kernel $\sigma$ on the coordinates $(a x_i, \alpha \cdot r_i + \gamma, 1)$ and
    $(b x_j, 1, \beta \cdot r_j)$, so that masks, blocks and fused kernels serve it; with more, pairs are written out:
    O(n^2 `units`) memory.

    Knowledge z has as many channels as x; with `knowledge=k` its k vectors are told apart by learned scalars, else they are a set.

    >>> import torch, heedful
    >>> layer = heedful.nn.InvariantCoefficients(channels=2, scalars=1, out_scalars=3)
    >>> x, charge = torch.randn(4, 5, 2, 3), torch.randn(4, 5, 1)
    >>> out = layer(x, scalars=charge)
    >>> out.vectors.shape, out.scalars.shape
    (torch.Size([4, 5, 2, 3]), torch.Size([4, 5, 3]))
    >>> turn = torch.linalg.qr(torch.randn(3, 3))[0]
    >>> torch.allclose(layer(x @ turn, scalars=charge).vectors, out.vectors @ turn, atol=1e-5)
    True
    """

    def __init__(
        self,
        channels: int = 1,
        scalars: int = 0,
        *,
        units: int = 8,
        depth: int = 1,
        hidden: int = 32,
        out_channels: int | None = None,
        out_scalars: int = 0,
        knowledge: int = 0,
        activation: Activation = "silu",
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(units=units, depth=depth, hidden=hidden)
        check_whole(0, channels=channels, scalars=scalars, out_scalars=out_scalars, knowledge=knowledge)
        check_whole(0, optional=True, out_channels=out_channels)
        check_choice(Activation, activation=activation)
        check_choice(("auto", *IMPLEMENTATIONS), impl=impl)
        self.channels, self.scalars, self.units, self.depth, self.hidden = channels, scalars, units, depth, hidden
        self.out_channels = channels if out_channels is None else out_channels
        self.out_scalars, self.knowledge, self.activation, self.impl = out_scalars, knowledge, activation, impl
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        invariants = scalars + channels * (channels + 1) // 2
        self.query_rows = learned(units, invariants, **place)
        self.key_rows = learned(units, invariants, **place)
        self.value_rows = learned(units, invariants, **place)
        self.query_mix, self.key_mix, self.value_mix = (learned(units, channels, **place) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(units, **place))
        self.deeper = nn.ModuleList(nn.Linear(units, units, **place) for _ in range(depth - 1))
        self.mix = learned(self.out_channels, units, **place)
        parts = self.out_channels * channels + units + out_scalars
        self.own = nn.Sequential(
            nn.Linear(invariants + 2 * units, hidden, **place), nn.SiLU(), nn.Linear(hidden, parts, **place)
        )
        # What tells the k vectors of knowledge apart: a term in the score of each, and one in its value.
        self.names = learned(2, knowledge, units, **place) if knowledge else None

    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        *,
        scalars: Tensor | None = None,
        z_scalars: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        z_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> VectorsAndScalars:
        """x `(B, n, channels, d)`, or `(B, n, d)` for one channel, and z with k rows in place of n, shared or batched.

        Scalars are `(B, n, scalars)` and `(B, k, scalars)`. Masks are True = ignore; `z_padding_mask` is `(B, k)`.
        """
        rows = self._rows(x, z, scalars, z_scalars, key_padding_mask, z_padding_mask, attn_mask, is_causal)
        rows, poison = self._finite(rows)
        query, key, said = self._coordinates(rows)
        value = torch.cat((_mixed(self.value_mix, rows.vectors), said), dim=-1)  # [B, U, n + k, d + 2]
        if self.depth == 1:
            heads = attend(query, key, value, rows.mask, kernel=self._kernel, impl=self.impl)
        else:
            heads = self._pairs(query, key, rows) @ value
        own, gate, out = self._own(rows, heads[..., -2:])
        vectors = own @ rows.tokens + self.mix @ (gate * heads[..., :-2]).transpose(1, 2)  # [B, n, out_channels, d]
        if poison is not None:
            vectors, out = vectors + poison, out + poison[..., 0]
        return VectorsAndScalars(vectors[:, :, 0] if x.dim() == 3 and self.out_channels == 1 else vectors, out)

    def coefficients(
        self,
        x: Tensor,
        z: Tensor | None = None,
        *,
        scalars: Tensor | None = None,
        z_scalars: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        z_padding_mask: Tensor | None = None,
        attn_mask: Mask | Tensor | None = None,
        is_causal: bool = False,
    ) -> Coefficients:
        """A `[B, out_channels, channels, n, n]` and B `[B, out_channels, channels, n, k]` of the same call, written out."""
        rows = self._rows(x, z, scalars, z_scalars, key_padding_mask, z_padding_mask, attn_mask, is_causal)
        rows, poison = self._finite(rows)
        query, key, said = self._coordinates(rows)
        if self.depth == 1:
            units = attend.coefficients(query, key, rows.mask, kernel=self._kernel)
        else:
            units = self._pairs(query, key, rows)
        own, gate, _ = self._own(rows, units @ said)
        joint = torch.einsum("ou,uc,buij->bocij", self.mix, self.value_mix, units * gate)
        n = rows.tokens.shape[1]
        joint[..., range(n), range(n)] += own.permute(0, 2, 3, 1)
        joint = joint if poison is None else joint + poison[:, None, None, :, 0]
        return Coefficients(joint[..., :n], joint[..., n:] if z is not None else None)

    @property
    def _kernel(self) -> Kernel:
        return _UNITS[self.activation].averaged()

    def _rows(
        self,
        x: Tensor,
        z: Tensor | None,
        scalars: Tensor | None,
        z_scalars: Tensor | None,
        padding: Tensor | None,
        z_padding: Tensor | None,
        attn_mask: Mask | Tensor | None,
        is_causal: bool,
    ) -> _Rows:
        """Tokens and knowledge with their invariants, zero where nobody may see them."""
        tokens = self._vectors("x", x)
        batch, n, _, d = tokens.shape
        mask = layer_mask(batch, 1, n, n, attn_mask, padding, is_causal)
        if padding is not None and padding.dtype != torch.bool:
            raise InvalidArgument(f"key_padding_mask must be boolean (True = ignore); got {padding.dtype}")
        if self.depth > 1 and mask is not None and (mask.bias is not None or mask.factors is not None):
            raise InvalidArgument("depth > 1 has no score to add to; give boolean masks (True = ignore)")
        tokens, numbers = self._hidden(tokens, self._numbers("scalars", scalars, tokens), padding)
        if z is None:
            if self.knowledge or z_scalars is not None or z_padding is not None:
                raise InvalidArgument("give z: this call, or knowledge=k of this layer, is about it")
            return _Rows(tokens, tokens, self._invariants(tokens, numbers), mask)
        if not isinstance(z, Tensor):
            raise InvalidArgument(f"z must be a tensor; got {type(z).__name__}")
        known = self._vectors("z", z[None] if z.dim() == (2 if x.dim() == 3 else 3) else z)
        known = known.expand(batch, *known.shape[1:]) if known.shape[0] == 1 else known
        if known.shape[0] != batch or known.shape[3] != d or (self.knowledge and known.shape[1] != self.knowledge):
            k = self.knowledge or "k"
            raise InvalidArgument(f"z must have shape ({batch}, {k}, {self.channels}, {d}); got {tuple(z.shape)}")
        check_padding(z_padding, batch, known.shape[1])
        known, known_numbers = self._hidden(known, self._numbers("z_scalars", z_scalars, known), z_padding)
        invariants = torch.cat((self._invariants(tokens, numbers), self._invariants(known, known_numbers)), dim=1)
        z_mask = None if z_padding is None else masks.keys(~z_padding)
        joint = masks.beside(mask, n, z_mask, known.shape[1])
        return _Rows(tokens, torch.cat((tokens, known), dim=1), invariants, joint)

    def _vectors(self, name: str, x: Tensor) -> Tensor:
        """`[B, rows, channels, d]`."""
        if isinstance(x, Tensor) and x.dim() == 3 and self.channels == 1:
            x = x[:, :, None]
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[2] != self.channels or not x.shape[3]:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            one = ", or (batch, rows, d)" if self.channels == 1 else ""
            raise InvalidArgument(f"{name} must have shape (batch, rows, {self.channels}, d){one}; got {got}")
        return x

    def _numbers(self, name: str, scalars: Tensor | None, vectors: Tensor) -> Tensor:
        if scalars is None and (not self.scalars or name == "z_scalars"):
            return vectors.new_zeros(*vectors.shape[:2], self.scalars)
        wanted = (*vectors.shape[:2], self.scalars)
        if not isinstance(scalars, Tensor) or scalars.shape != wanted:
            got = tuple(scalars.shape) if isinstance(scalars, Tensor) else type(scalars).__name__
            raise InvalidArgument(f"{name} must have shape {wanted}; got {got}")
        return scalars

    def _hidden(self, vectors: Tensor, numbers: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Zeros where there is no row, whatever stands there: 0 x NaN would be NaN."""
        if padding is None:
            return vectors, numbers
        return vectors.masked_fill(padding[..., None, None], 0.0), numbers.masked_fill(padding[..., None], 0.0)

    def _invariants(self, vectors: Tensor, numbers: Tensor) -> Tensor:
        at = torch.triu_indices(self.channels, self.channels, device=vectors.device)
        gram = vectors @ vectors.mT * vectors.shape[-1] ** -0.5
        return torch.cat((numbers, gram[..., at[0], at[1]]), dim=-1)

    def _coordinates(self, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys `[B, U, rows, d + 2]` whose inner products the units act on, and what is pooled, `[B, U, n + k, 2]`."""
        n, r = rows.tokens.shape[1], rows.invariants  # [B, n + k, m]
        asks = functional.linear(r[:, :n], self.query_rows, self.bias).mT[..., None]  # [B, U, n, 1]
        tells, says = (functional.linear(r, weight).mT[..., None] for weight in (self.key_rows, self.value_rows))
        if self.names is not None:
            tells, says = (
                part + functional.pad(name.mT, (n, 0))[..., None]
                for part, name in zip((tells, says), self.names, strict=True)
            )
        scaled = _mixed(self.query_mix, rows.tokens) * rows.tokens.shape[-1] ** -0.5
        query = torch.cat((scaled, asks, torch.ones_like(asks)), dim=-1)
        key = torch.cat((_mixed(self.key_mix, rows.vectors), torch.ones_like(tells), tells), dim=-1)
        return query, key, torch.cat((torch.ones_like(says), says), dim=-1)

    def _finite(self, rows: _Rows) -> tuple[_Rows, Tensor | None]:
        """Rows without numbers that are not finite, or whose products would not be, and NaN to be added for those who see such."""
        if rows.mask is None:
            return rows, None
        limit = torch.finfo(rows.invariants.dtype).max ** 0.5
        bad = ~(
            (rows.invariants.detach().abs() < limit).all(dim=-1) & rows.vectors.detach().isfinite().all(dim=(-2, -1))
        )
        n, shape = rows.tokens.shape[1], (len(bad), 1, rows.tokens.shape[1], rows.vectors.shape[1])
        poisoned = rows.mask.reach(bad[:, None], shape).expand(shape[:-1])[:, 0, :, None, None]
        vectors = rows.vectors.masked_fill(bad[..., None, None], 0.0)
        clean = _Rows(vectors[:, :n], vectors, rows.invariants.masked_fill(bad[..., None], 0.0), rows.mask)
        return clean, torch.zeros_like(poisoned, dtype=vectors.dtype).masked_fill(poisoned, torch.nan)

    def _pairs(self, query: Tensor, key: Tensor, rows: _Rows) -> Tensor:
        """The coefficients of a deeper network `[B, U, n, n + k]`."""
        activation = ACTIVATIONS[self.activation]
        units = activation(query @ key.mT).movedim(1, -1)  # [B, n, n + k, U]
        for layer in self.deeper:
            units = activation(layer(units))
        units = units.movedim(-1, 1)
        if rows.mask is None:
            return units / key.shape[-2]
        keep = rows.mask.dense(units.shape, units.device)
        return units.masked_fill(~keep, 0.0) / keep.expand(units.shape).sum(-1, keepdim=True).clamp_min(1)

    def _own(self, rows: _Rows, pooled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """D `[B, n, out_channels, channels]`, g `[B, U, n, 1]` and h `[B, n, out_scalars]`."""
        n = rows.tokens.shape[1]
        parts = self.own(torch.cat((rows.invariants[:, :n], pooled.transpose(1, 2).flatten(2)), dim=-1))
        own, gate, out = parts.split((self.out_channels * self.channels, self.units, self.out_scalars), dim=-1)
        return own.unflatten(-1, (self.out_channels, self.channels)), 1 + gate.mT[..., None], out

    def extra_repr(self) -> str:
        return (
            f"channels={self.channels}, scalars={self.scalars}, units={self.units}, depth={self.depth}, "
            f"out_channels={self.out_channels}, out_scalars={self.out_scalars}"
        )


class _Rows(NamedTuple):
    tokens: Tensor  # [B, n, c, d]
    vectors: Tensor  # [B, n + k, c, d]
    invariants: Tensor  # [B, n + k, m]
    mask: Mask | None


def _mixed(mix: Tensor, vectors: Tensor) -> Tensor:
    """One combination of channels for each unit: `[U, c]` of `[B, rows, c, d]` -> `[B, U, rows, d]`."""
    return (mix @ vectors).transpose(1, 2)


class GramCoefficients(Module):
    r"""$f(X, Z) = A X + B Z$ with A and B any functions of the Gram matrices, for a fixed number of rows (Ma & Ying 2023, eq. 3.1).

    $$[A\; B] = g(XX^\top, XZ^\top, ZZ^\top) \in \mathbb{R}^{m \times (n + k)}$$

    with g a network of `layers` hidden layers of `hidden` units, so that f is equivariant under every orthogonal matrix and otherwise
    free: from n = `tokens` rows and k = `knowledge` vectors to m = `outputs` rows (as many as tokens by default), which need not be
    equal. Inner products are multiplied by `scale`, $1 / \sqrt d$ by default. `use` names the blocks that g reads, `read` whether X, Z or both are combined.

    Rows are told apart by their place and the number of parameters grows with it: no permutation symmetry, and no finite information
    in the sense of the paper's Assumption 3.1. `InvariantCoefficients` has both.

    >>> import torch, heedful
    >>> layer = heedful.nn.GramCoefficients(tokens=3, knowledge=12, outputs=1)
    >>> layer(torch.randn(5, 3, 16), torch.randn(5, 12, 16)).shape
    torch.Size([5, 1, 16])
    """

    def __init__(
        self,
        tokens: int,
        knowledge: int = 0,
        outputs: int | None = None,
        *,
        hidden: int = 64,
        layers: int = 2,
        use: Blocks | None = None,
        read: Literal["x", "z", "xz"] | None = None,
        activation: Activation = "relu",
        scale: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_whole(tokens=tokens, hidden=hidden, layers=layers)
        check_whole(0, knowledge=knowledge)
        check_whole(optional=True, outputs=outputs)
        check_choice(Activation, activation=activation)
        check_number(0, optional=True, scale=scale)
        every = ("xx", "xz", "zz") if knowledge else ("xx",)
        use = every if use is None else tuple(use)  # type: ignore[assignment]
        if not use or not set(use) <= set(every):
            raise InvalidArgument(f"use must name some of {', '.join(every)}; got {use!r}")
        check_choice(("x", "z", "xz") if knowledge else ("x",), optional=True, read=read)
        self.tokens, self.knowledge, self.hidden, self.layers = tokens, knowledge, hidden, layers
        self.outputs = tokens if outputs is None else outputs
        self.use, self.activation, self.scale = use, activation, scale
        self.read = read or ("xz" if knowledge else "x")
        inputs = {"xx": tokens * (tokens + 1) // 2, "xz": tokens * knowledge, "zz": knowledge * (knowledge + 1) // 2}
        combined = {"x": tokens, "z": knowledge, "xz": tokens + knowledge}[self.read]
        widths = [sum(inputs[block] for block in use), *[hidden] * layers, self.outputs * combined]
        self.network = nn.ModuleList(nn.Linear(a, b, device=device, dtype=dtype) for a, b in pairwise(widths))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """f(x, z): `(B, tokens, d)` and z `(k, d)` or `(B, k, d)` -> `(B, outputs, d)`."""
        own, read = self.coefficients(x, z)
        return own @ x if read is None or z is None else own @ x + read @ z

    def coefficients(self, x: Tensor, z: Tensor | None = None) -> Coefficients:
        """A `[B, outputs, tokens]` and B `[B, outputs, k]`, zero where `read` leaves one out."""
        self._check(x, z)
        scale, blocks = x.shape[-1] ** -0.5 if self.scale is None else self.scale, []
        for name in self.use:
            left, right = (x if row == "x" or z is None else z.expand(x.shape[0], -1, -1) for row in name)
            gram = left @ right.mT * scale
            at = torch.triu_indices(*gram.shape[1:], device=x.device) if name != "xz" else None
            blocks.append(gram.flatten(1) if at is None else gram[:, at[0], at[1]])
        inner = torch.cat(blocks, dim=1)
        for layer in self.network[:-1]:
            inner = ACTIVATIONS[self.activation](layer(inner))
        joint = self.network[-1](inner).unflatten(1, (self.outputs, -1))
        if self.read == "x":
            return Coefficients(joint, joint.new_zeros(*joint.shape[:2], self.knowledge) if self.knowledge else None)
        if self.read == "z":
            return Coefficients(joint.new_zeros(*joint.shape[:2], self.tokens), joint)
        return Coefficients(joint[..., : self.tokens], joint[..., self.tokens :])

    def _check(self, x: Tensor, z: Tensor | None) -> None:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] != self.tokens:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgument(f"x must have shape (batch, {self.tokens}, d); got {got}")
        if self.knowledge == 0 and z is not None:
            raise InvalidArgument("this layer was made with knowledge=0; leave z out, or make it with knowledge=k")
        if self.knowledge:
            check_knowledge(z, x, self.knowledge)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}, knowledge={self.knowledge}, outputs={self.outputs}, use={self.use}, read={self.read!r}"
