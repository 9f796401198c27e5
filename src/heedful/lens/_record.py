"""One call of attention, and what the model read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful._attend import attend
from heedful._errors import HeedfulError, InvalidArgument, Unsupported
from heedful._plot import Axes, heat_map
from heedful._result import Result
from heedful._text import quantity
from heedful.kernels import Kernel
from heedful.masks import join_transformers


@dataclass(frozen=True)
class Tokens:
    """What one side of a model read: token strings, which are special, which are no padding."""

    strings: tuple[tuple[str, ...], ...]
    special: Tensor  # [B, n]
    valid: Tensor  # [B, n]

    @staticmethod
    def unnamed(batch: int, length: int) -> Tokens:
        """Places in the sequence, where there are no tokens to name."""
        places = tuple(map(str, range(length)))
        none = torch.zeros(batch, length, dtype=torch.bool)
        return Tokens((places,) * batch, none, ~none)


@dataclass(frozen=True, repr=False)
class LayerRecord(Result):
    """One call of attention. Tensors are read, and weights computed, when they are asked for.

    Attributes:
        index: its place in the order of execution.
        name: the module that attended, as in `model.named_modules()`.
        kind: `"self"`, or `"cross"` where keys and values come from elsewhere.
        side: `"input"`, or `"decoder"` in the decoder of an encoder-decoder model.
        batch, heads, key_heads, queries_len, keys_len: sizes.
        causal: whether no query sees a later key.
        upper_left: whether that is so by a rule, beside the recorded mask: query i sees keys 0..i.
        kernel: what a coefficient is; None where only the weights themselves could be recorded.
    """

    index: int
    name: str
    kind: str
    side: str
    batch: int
    heads: int
    key_heads: int
    queries_len: int
    keys_len: int
    causal: bool
    upper_left: bool
    kernel: Kernel | None
    _keep: tuple[str, ...]
    # Numbers of the masks that it may share with other layers.
    _shared: Mapping[str, int]
    _tensors: Mapping[str, Tensor]

    @property
    def queries(self) -> Tensor:
        """`[B, H, Q, D]`, as they met the keys: projected, rotated."""
        return self._kept("queries")

    @property
    def keys(self) -> Tensor:
        """`[B, G, K, D]`; G divides H where heads share keys."""
        return self._kept("keys")

    @property
    def values(self) -> Tensor:
        """`[B, G, K, E]`."""
        return self._kept("values")

    @property
    def inputs(self) -> Tensor:
        """`[B, n, d]`: what the module read."""
        return self._kept("inputs")

    @property
    def outputs(self) -> Tensor:
        """`[B, H, Q, E]`: what the heads gave, before the output map."""
        return self._kept("outputs")

    @property
    def mask(self) -> Tensor | None:
        """True where a query may attend to a key; broadcasts to `[B, H, Q, K]`. None where all may."""
        seen = self._tensors.get("mask")
        if not self.upper_left:
            return seen
        causal = torch.ones(self.queries_len, self.keys_len, dtype=torch.bool).tril()[None, None]
        return causal if seen is None else seen & causal

    @property
    def weights(self) -> Tensor:
        """`[B, H, Q, K]`: the coefficients that combined the values, before dropout; computed anew on every access.

        A query that may attend to nothing has a row of zeros.
        """
        return self.weights_of()

    def weights_of(
        self,
        heads: slice | int | None = None,
        *,
        sequence: slice | int | None = None,
        queries: slice | int | None = None,
    ) -> Tensor:
        """A part of the weights, without writing out the rest.

        An integer takes its axis away, as in indexing: `record.weights_of(3, sequence=0)` is `[Q, K]`.
        """
        if "weights" not in self._keep:
            raise self._missing("weights")
        indices = [slice(None) if part is None else part for part in (sequence, heads, queries)]
        sizes = (self.batch, self.heads, self.queries_len)
        for name, part, size in zip(("sequence", "heads", "queries"), indices, sizes, strict=True):
            if isinstance(part, int) and not -size <= part < size:
                raise InvalidArgument(f"{name} {part} is out of range: layer {self.index} has {size}")
        at = [range(size)[part] for part, size in zip(indices, sizes, strict=True)]
        spans = [[one] if isinstance(one, int) else list(one) for one in at]
        gone = tuple(axis for axis, one in enumerate(at) if isinstance(one, int))
        weights = self._weights(*spans)
        return weights[tuple(0 if axis in gone else slice(None) for axis in range(3))]

    def _weights(self, sequences: list[int], heads: list[int], queries: list[int]) -> Tensor:
        if "weights" in self._tensors:
            return self._tensors["weights"][sequences][:, heads][:, :, queries]
        kernel = self.kernel
        assert kernel is not None
        if kernel.of_pairs is not kernel or kernel.tensors():
            # Queries that move together, or parameters per head: only the whole is right.
            whole = attend.coefficients(
                self._tensors["queries"],
                self._tensors["keys"],
                self._join_transformers(),
                enable_gqa=True,
                kernel=kernel,
            )
            return whole[sequences][:, heads][:, :, queries]
        query = self._tensors["queries"][sequences][:, heads][:, :, queries]
        groups = self.heads // self.key_heads
        key = self._tensors["keys"][sequences][:, [head // groups for head in heads]]
        return attend.coefficients(query, key, self._join_transformers(sequences, heads, queries), kernel=kernel)

    def _join_transformers(
        self, sequences: list[int] | None = None, heads: list[int] | None = None, queries: list[int] | None = None
    ) -> Tensor | None:
        """The mask for `attend`, of some rows: booleans, or floats with the lowest one where a key is hidden."""

        def rows(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x = x[(None,) * (4 - x.dim())]
            for axis, chosen in enumerate((sequences, heads, queries)):
                if chosen is not None and x.shape[axis] > 1:
                    x = x.index_select(axis, torch.tensor(chosen))
            return x

        seen, bias = rows(self._tensors.get("mask")), rows(self._tensors.get("bias"))
        if self.upper_left:
            at = torch.arange(self.queries_len) if queries is None else torch.tensor(queries)
            causal = torch.arange(self.keys_len) <= at[:, None]
            seen = causal[None, None] if seen is None else seen & causal
        return join_transformers(seen, bias)

    def _kept(self, name: str) -> Tensor:
        if name not in self._keep or name not in self._tensors:
            raise self._missing(name)
        return self._tensors[name]

    def _missing(self, name: str) -> HeedfulError:
        if name in self._keep:
            return Unsupported(f"layer {self.index} ({self.name}) has no {name} that could be recorded")
        return InvalidArgument(f"{name} were not kept; observe(..., keep=({name!r}, ...)) keeps them")

    def plot(self, head: int = 0, *, sequence: int = 0, ax: Axes | None = None) -> Axes:
        """Draws one head's weights, queries down and keys across."""
        ax = heat_map(ax, self.weights_of(head, sequence=sequence).float(), "weight")
        ax.set(xlabel="key", ylabel="query", title=f"layer {self.index}, head {head}")
        return ax

    def __repr__(self) -> str:
        sizes = f"{self.batch} x {quantity(self.heads, 'head')} x {self.queries_len} x {self.keys_len}"
        kind = f"{self.kind}{', causal' if self.causal else ''}"
        return f"LayerRecord({self.index}, {self.name}, {kind}, {sizes})"
