"""Attention and a feed-forward network with residual connections."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

from torch import Tensor, nn
from torch.nn import functional

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument, Unsupported
from heedful.kernels import Kernel, Softmax
from heedful.masks import Mask
from heedful.nn._describe import Description, Knowledge, Layer, Pairs, Primal, Timed, find_layer
from heedful.nn._module import ACTIVATIONS, Activation, Module, check_heads, check_input, check_knowledge
from heedful.nn.attention import Attention
from heedful.nn.knowledge import KnowledgeAttention
from heedful.nn.pair import PairAttention
from heedful.nn.primal import PrimalAttention
from heedful.nn.time_attention import TimeAttention

Norm = Literal["layer", "rms"]

DESCRIBED: dict[type, type[Description]] = {
    KnowledgeAttention: Knowledge,
    PairAttention: Pairs,
    PrimalAttention: Primal,
    TimeAttention: Timed,
}


class Evolved(NamedTuple):
    """Tokens and knowledge behind a layer."""

    x: Tensor
    z: Tensor


class Block(Module):
    """One Transformer layer with any kernel; the state dict of `nn.TransformerEncoderLayer` loads as it is.

    `norm_first` (the default) normalises before attention and network, else after the residual sums. `norm="layer"` is
    LayerNorm; `norm="rms"` is RMSNorm without gain, which keeps orthogonal symmetry where LayerNorm breaks it.

    `kernel` is a kernel (default `Softmax()`), a `Primal()`, `Knowledge()`, `Pairs()` or `Timed()`, or one of the names `"softmax"`, `"linear"` (`FeatureMap("elu")`),
    `"primal"` and `"none"`, which leaves attention out: tokens do not mix, the control of every comparison. A primal layer whose
    weights depend on the data needs `max_len`; `num_kv_heads` and `impl` are for kernels. `hidden=0` leaves the network out: a block of
    attention alone, which with `norm="rms"` and `value="identity"` is as equivariant as its layer. `drop_path` is the share of cases of
    a batch for which, in training, a branch adds nothing.

    Called with knowledge z, a block with a layer that reads it returns both: the tokens, and z evolved by the block's own
    normalisations and network, the map that moves the embedding of the tokens (Ma & Ying 2023, eq. 5.1 and 5.2).

    >>> import torch, heedful
    >>> block = heedful.nn.Block(32, 4, kernel=heedful.Gaussian())
    >>> block(torch.randn(2, 7, 32)).shape
    torch.Size([2, 7, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        *,
        kernel: Layer | None = None,
        activation: Activation = "gelu",
        norm: Norm = "layer",
        norm_first: bool = True,
        bias: bool = True,
        num_kv_heads: int | None = None,
        impl: str = "auto",
        max_len: int | None = None,
        drop_path: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, num_kv_heads)
        check_number(least=0, high=1, dropout=dropout, drop_path=drop_path)
        check_whole(0, optional=True, hidden=hidden)
        layer = Softmax() if kernel is None else find_layer(kernel)
        check_choice(ACTIVATIONS, activation=activation)
        self.embed_dim, self.num_heads, self.activation, self.norm = embed_dim, num_heads, activation, norm
        self.hidden = 4 * embed_dim if hidden is None else hidden
        self.norm_first, self.bias, self.impl = norm_first, bias, impl
        self.dropout, self.drop_path = dropout, drop_path
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.max_len = max_len
        self.self_attn: Attention | PrimalAttention | KnowledgeAttention | PairAttention | TimeAttention | None = None
        if isinstance(layer, Primal):
            self.self_attn = PrimalAttention(
                embed_dim, num_heads, max_len=max_len, bias=bias, **layer.arguments(), **place
            )
        elif isinstance(layer, Knowledge):
            self.self_attn = KnowledgeAttention(
                embed_dim, num_heads, dropout=dropout, impl=impl, **layer.arguments(), **place
            )
        elif isinstance(layer, Pairs):
            self.self_attn = PairAttention(embed_dim, num_heads=num_heads, **layer.arguments(), **place)
        elif isinstance(layer, Timed):
            self.self_attn = TimeAttention(
                embed_dim, num_heads, dropout=dropout, bias=bias, impl=impl, **layer.arguments(), **place
            )
        elif isinstance(layer, Kernel):
            self.self_attn = Attention(
                embed_dim, num_heads, dropout, bias, kernel=layer, num_kv_heads=num_kv_heads, impl=impl, **place
            )
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.linear1 = nn.Linear(embed_dim, self.hidden, bias=bias, **place) if self.hidden else None
        self.linear2 = nn.Linear(self.hidden, embed_dim, bias=bias, **place) if self.hidden else None
        self.norm1 = None if self.self_attn is None else make_norm(norm, embed_dim, bias, **place)
        self.norm2 = make_norm(norm, embed_dim, bias, **place) if self.hidden else None

    @property
    def kernel(self) -> Kernel | Description | Literal["none"]:
        """What mixes the tokens: the kernel, the layer as data, or `"none"`."""
        if self.self_attn is None:
            return "none"
        if isinstance(self.self_attn, Attention):
            return self.self_attn.kernel
        return next(sort for kind, sort in DESCRIBED.items() if isinstance(self.self_attn, kind)).of(self.self_attn)

    @property
    def reads_knowledge(self) -> bool:
        """Whether z, given to `forward`, is read here."""
        layer = self.self_attn
        if isinstance(layer, KnowledgeAttention):
            return layer.readout != "x" or layer.coordinates == "knowledge"
        return isinstance(layer, PairAttention) and layer.knowledge == "given"

    @property
    def reads_times(self) -> bool:
        """Whether `forward` takes times."""
        return isinstance(self.self_attn, TimeAttention)

    def resize_(self, max_len: int) -> Self:
        """Changes `max_len`: see `PrimalAttention.resize_`. Layers whose parameters know no length stay as they are."""
        check_whole(max_len=max_len)
        if isinstance(self.self_attn, PrimalAttention) and self.self_attn.weights == "data":
            self.self_attn.resize_(max_len)
        self.max_len = max_len
        return self

    def forward(
        self,
        x: Tensor,
        attn_mask: Mask | Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        z: Tensor | None = None,
        z_padding_mask: Tensor | None = None,
        times: Tensor | None = None,
        key: Tensor | None = None,
        key_times: Tensor | None = None,
        seen: int | None = None,
    ) -> Any:
        """`(B, n, embed)` -> `(B, n, embed)`; masks as in `Attention`. With z `(k, embed)` or `(B, k, embed)`, tokens and knowledge.

        A block of `Timed()` takes `times` `(B, n)`. With `key` `(B, m, embed)`, there at `key_times` `(B, m)`, x are queries that attend
        to these instead of one another; `key` is what another call of the block takes as x, and is normalised like it. With `seen` all tokens attend to the first
        so many alone, as with `key=x[:, :seen]`.
        """
        if z is None and z_padding_mask is not None:
            raise InvalidArgument(f"got z_padding_mask of shape {tuple(z_padding_mask.shape)}, but no z was given")
        if z is not None:
            check_input("x", x, self.embed_dim)
            check_knowledge(z, x)
        self._check_times(times, key, key_times)
        self._check_seen(seen, x, key)
        if self.norm1 is not None:
            known = None if z is None or not self.reads_knowledge else self._first(z)
            first = self._first(x)
            other = {} if key is None else {"key": self._first(key)}
            other = other if seen is None else {"key": first[:, :seen]}
            at = {name: given for name, given in (("times", times), ("key_times", key_times)) if given is not None}
            x = x + self._attend(first, attn_mask, key_padding_mask, is_causal, known, z_padding_mask, other | at)
            x = x if self.norm_first else self.norm1(x)
        return self._evolve(x) if z is None else Evolved(self._evolve(x), self._evolve(z))

    def _check_times(self, times: Tensor | None, key: Tensor | None, key_times: Tensor | None) -> None:
        """Refuses times where nothing reads them, and another key where there is no attention to it."""
        if self.reads_times and times is None:
            raise InvalidArgument("a block of Timed() needs times, a tensor (batch, seq); got None")
        if not self.reads_times and (times is not None or key_times is not None):
            given = "times" if times is not None else "key_times"
            raise InvalidArgument(f"got {given}, but this block reads none; give kernel=Timed(...) or leave it out")
        if key is not None and not isinstance(self.self_attn, TimeAttention | Attention):
            raise Unsupported(f"a block of {self.kernel!r:.60} mixes x alone; key is for kernels and Timed()")

    def _check_seen(self, seen: int | None, x: Tensor, key: Tensor | None) -> None:
        if seen is None:
            return
        check_whole(seen=seen)
        if key is not None or seen > x.shape[1]:
            got = "key as well" if key is not None else f"{x.shape[1]} tokens"
            raise InvalidArgument(f"seen={seen} says to how many of its own tokens x attends; got {got}")
        if not isinstance(self.self_attn, Attention):
            raise Unsupported(f"a block of {self.kernel!r:.60} takes no seen; it is for kernels")

    def _first(self, x: Tensor) -> Tensor:
        """Tokens as attention takes them, in their own dtype: autocast would write normalised ones out in float32 for maps that read 16 bit."""
        return self.norm1(x).to(x.dtype) if self.norm_first and self.norm1 is not None else x

    def _evolve(self, x: Tensor) -> Tensor:
        """Tokens or knowledge, each by itself, through the network."""
        if self.norm2 is None:
            return x
        return x + self._network(self.norm2(x)) if self.norm_first else self.norm2(x + self._network(x))

    def _attend(
        self,
        x: Tensor,
        attn_mask: Mask | Tensor | None,
        padding: Tensor | None,
        is_causal: bool,
        z: Tensor | None,
        z_padding: Tensor | None,
        events: dict[str, Tensor],
    ) -> Tensor:
        masks: dict[str, Any] = {"key_padding_mask": padding, "attn_mask": attn_mask, "is_causal": is_causal}
        if isinstance(self.self_attn, PrimalAttention):
            _refuse(self.self_attn, attn_mask, is_causal)
            out = self.self_attn(x, padding)
        elif isinstance(self.self_attn, KnowledgeAttention):
            out = self.self_attn(x, z, z_padding_mask=None if z is None else z_padding, **masks)
        elif isinstance(self.self_attn, PairAttention):
            if z is not None and z_padding is not None:
                raise Unsupported(
                    "PairAttention takes as many knowledge vectors as it was made for; none may be hidden"
                )
            out = self.self_attn(x, z, **masks)
        elif isinstance(self.self_attn, TimeAttention):
            out = self.self_attn(x, **events, **masks)
        else:
            assert self.self_attn is not None
            out, _ = self.self_attn(x, need_weights=False, **events, **masks)
        return self._branch(out)

    def _branch(self, out: Tensor) -> Tensor:
        """What a branch adds to the residual stream: with dropout, and in training now and then nothing for a whole case (Huang et al. 2016)."""
        out = functional.dropout(out, self.dropout, self.training)
        if self.training and self.drop_path:
            kept = out.new_empty(len(out), *(1,) * (out.ndim - 1)).bernoulli_(1 - self.drop_path)
            out = out * kept / (1 - self.drop_path)
        return out

    def _network(self, x: Tensor) -> Tensor:
        assert self.linear1 is not None
        assert self.linear2 is not None
        inner = functional.dropout(ACTIVATIONS[self.activation](self.linear1(x)), self.dropout, self.training)
        return self._branch(self.linear2(inner))


def _refuse(layer: PrimalAttention, attn_mask: Mask | Tensor | None, is_causal: bool) -> None:
    """A primal layer has no coefficient per pair to hide."""
    if attn_mask is not None:
        raise Unsupported(
            "a primal layer has no coefficient per pair, so attn_mask cannot act on it; give key_padding_mask for padding, "
            "Primal(causal='prefix') for causality, or a kernel such as Softmax() for this layer"
        )
    if is_causal and not layer.causal:
        raise Unsupported(
            "is_causal=True, but this primal layer sees the whole sequence; make it Primal(causal='prefix') or "
            "Primal(causal='cummean')"
        )


def make_norm(kind: str, size: int, bias: bool, device: Any, dtype: Any) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(size, bias=bias, device=device, dtype=dtype)
    if kind == "rms":
        return nn.RMSNorm(size, elementwise_affine=False, device=device, dtype=dtype)
    raise InvalidArgument(f"norm must be 'layer' or 'rms'; got {kind!r}")
