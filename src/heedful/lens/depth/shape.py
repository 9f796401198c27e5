"""The sizes of a Transformer, and what they cost: parameters, arithmetic, memory."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass

from heedful._checks import check_whole, is_number, shown
from heedful._errors import InvalidArgument
from heedful._result import Result
from heedful.bridges.configs import ENCODERS
from heedful.lens.depth.law import Law

FLAGS = {
    "depth_inefficient": "too deep for its width: above the law by more than its band",
    "width_inefficient": "too shallow for its width: below the law by more than its band",
    "vocab_bottleneck": "the embedding's rank is below the width: widening buys little, deepening still does",
    "inner_dim_bottleneck": "heads x head size differs from the width: what is above it is redundant, below it a bottleneck",
    "extrapolated": "outside of what the law was fitted on",
    "embedding_dominates": "more than half of the parameters are embeddings",
    "head_dim_unusual": "a head size that is no multiple of 8 between 32 and 256 runs slowly",
}

LARGEST = 2**31 - 1

# Bytes per channel, layer and token that training keeps in 16 bit with fused attention (Korthikanti et al. 2022, eq. 2).
ACTIVATION_BYTES = 34


@dataclass(frozen=True)
class Shape(Result):
    r"""Sizes of a Transformer and what follows from them.

    Matrices of a layer: $2 d h e + 2 d h_{kv} e$ for attention and $2 d f$ (gated: $3 d f$) for the feed-forward, times E with
    E experts and $d E$ for their router. Norms, biases, positions and the like are left out: `params` is an estimate.
    Layers that share weights (ALBERT) are executed `layers` times and stored `stored_layers` times. `cross_layers` attend to an
    encoder as well. For images `patch` is the number of values in a patch and stands for the vocabulary. `part` says which one
    of an encoder and a decoder this is.

    >>> small = Shape(12, 768, 12, vocab=50257, context=1024)
    >>> small.layer_params, small.kappa
    (84934656, 12.0)
    """

    layers: int
    width: int
    heads: int
    kv_heads: int = 0  # these, and stored_layers: as many as the sizes above say
    head_dim: int = 0
    ffn: int = 0
    gated: bool = False
    vocab: int = 0
    tied: bool = True
    context: int = 0
    embedding_rank: int | None = None
    stored_layers: int = 0
    experts: int = 0
    active_experts: int = 0
    cross_layers: int = 0
    patch: int = 0
    causal: bool = True
    family: str = ""
    part: str = ""

    _also = ("layer_params", "executed_params", "embedding_params", "params", "kappa")

    def __post_init__(self) -> None:
        check_whole(1, LARGEST, layers=self.layers, width=self.width, heads=self.heads)
        if not self.head_dim and self.width % self.heads:
            raise InvalidArgument(f"{self.heads} heads do not divide width {self.width}; give a divisor or a head_dim")
        fill = {"kv_heads": self.heads, "head_dim": self.width // self.heads, "ffn": 4 * self.width}
        for name, value in (fill | {"stored_layers": self.layers}).items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise InvalidArgument(
                f"{self.kv_heads} key heads cannot be shared by {self.heads} query heads; give a divisor of {self.heads}"
            )

    @property
    def inner(self) -> int:
        """Heads times head size."""
        return self.heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """The matrices of one attention."""
        return 2 * self.width * self.inner + 2 * self.width * self.kv_heads * self.head_dim

    @property
    def ffn_params(self) -> int:
        """The matrices of one feed-forward, of one expert where there are several."""
        return (3 if self.gated else 2) * self.width * self.ffn

    def _stack(self, layers: int, experts: int) -> int:
        router = self.width * self.experts
        feed = experts * self.ffn_params + router if self.experts else self.ffn_params
        return layers * (self.attention_params + feed) + self.cross_layers * self.attention_params

    @property
    def layer_params(self) -> int:
        """The matrices inside layers, as stored: the law's N."""
        return self._stack(self.stored_layers, self.experts)

    @property
    def executed_params(self) -> int:
        """The matrices that a token passes: shared layers as often as they run, active experts alone."""
        return self._stack(self.layers, self.active_experts)

    @property
    def kappa(self) -> float:
        """Executed matrices per layer and squared width; 12 for GPT-2 and BERT."""
        return self.executed_params / (self.layers * self.width**2)

    @property
    def embedding_params(self) -> int:
        """Token (or patch) embeddings, twice where the output has its own, and the map from a factorised size."""
        if self.patch:
            return self.patch * self.width
        rank = self.embedding_rank or 0
        return self.vocab * (rank or self.width) * (1 if self.tied else 2) + rank * self.width

    @property
    def params(self) -> int:
        """Matrices and tables: all parameters but norms, biases, positions and what is on top."""
        return self.layer_params + self.embedding_params

    @property
    def rank(self) -> int | None:
        """The highest rank that the embedding can have: $\\min(V, r_E)$, or the values of a patch."""
        known = [size for size in (self.vocab, self.patch, self.embedding_rank) if size]
        return min(known) if known else None

    def flops_per_token(self, seq_len: int | None = None) -> float:
        """Forward arithmetic: $2 N + 4 L T h e$ (half of it under a causal mask) $+ 2 V d$; training takes three times as much."""
        length = seq_len or self.context or 1
        attention = 4 * self.layers * length * self.inner * (0.5 if self.causal else 1.0)
        return 2.0 * self.executed_params + attention + 2.0 * self.vocab * self.width

    def kv_cache_bytes(self, seq_len: int | None = None, bytes_each: int = 2) -> int:
        """Keys and values of one sequence."""
        return 2 * self.layers * (seq_len or self.context or 1) * self.kv_heads * self.head_dim * bytes_each

    def activation_bytes(self, seq_len: int | None = None) -> int:
        """About what training keeps of one sequence: 34 bytes per channel and layer."""
        return ACTIVATION_BYTES * self.layers * self.width * (seq_len or self.context or 1)

    def step_time(self, tokens: int = 16_384, per_layer: float = 1e-4, peak: float = 4e14) -> float:
        """Seconds of a training step on one device, roughly: $L (c_0 + 6 \\kappa d^2 T / peak)$; depth is sequential."""
        return self.layers * (per_layer + 6 * self.kappa * self.width**2 * tokens / peak)

    def outside(self, law: Law) -> tuple[str, ...]:
        """Why the law is extrapolated to this shape, in words; nothing where it was fitted on such shapes.

        >>> from heedful.lens.depth import find_law
        >>> Shape(24, 1024, 16, gated=True).outside(find_law("levine2020"))
        ('gated feed-forward layers, and levine2020 was fitted on plain GPT-type decoders',)
        """
        strange = {
            "images": self.patch,
            "attention to an encoder": self.cross_layers,
            "mixtures of experts": self.experts,
            "gated feed-forward layers": self.gated,
            "no decoder": not (self.causal or self.patch) and (self.family in ENCODERS or not self.family),
            f"{self.family} is not known as a decoder": not self.causal
            and not self.patch
            and self.family not in ENCODERS,
        }
        kinds = [what for what, holds in strange.items() if holds]
        reason = f"{', '.join(kinds)}, and {law.name} was fitted on {law.models}"
        return (*([reason] if kinds and law.models else []), *law.outside(self.layers, self.width))

    def words(self, law: Law, flags: tuple[str, ...]) -> list[str]:
        """Flags in words, `extrapolated` with its reasons."""
        why = {"extrapolated": "; ".join(self.outside(law))}
        return [f"{name}: {FLAGS[name]}{f' ({why[name]})' if name in why else ''}" for name in flags]

    def flags(self, law: Law, vocab_rank: int | None = None) -> tuple[str, ...]:
        """Names from `FLAGS` that hold for this shape."""
        best, band = law.optimal_depth(self.width), law.band(self.width)
        rank = self.rank if vocab_rank is None else vocab_rank
        holds = {
            # Far below its range the law gives no depth at all.
            "depth_inefficient": 0 < best < self.layers - band,
            "width_inefficient": best > self.layers + band,
            "vocab_bottleneck": rank is not None and rank < self.width,
            "inner_dim_bottleneck": self.inner != self.width,
            "extrapolated": bool(self.outside(law)),
            "embedding_dominates": 2 * self.embedding_params > self.params,
            "head_dim_unusual": self.head_dim % 8 != 0 or not 32 <= self.head_dim <= 256,
        }
        return tuple(name for name in FLAGS if holds[name])


def parse_count(value: str | float, name: str) -> float:
    """A number such as 1.3e9, "1.3B", "350M" or "1,300,000,000", and for memory "80GB" or "80GiB".

    >>> parse_count("1.3B", "params"), parse_count("2KiB", "memory")
    (1300000000.0, 2048.0)
    """
    scales = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
    if name == "memory":
        sizes = {unit: scale for unit, scale in scales.items() if unit != "B"}
        binary = {f"{unit}I": 1024.0 ** (at + 1) for at, unit in enumerate(sizes)}
        scales = {f"{unit}{end}": scale for unit, scale in (sizes | binary).items() for end in ("", "B")} | {"B": 1.0}
    number: float = math.nan
    if isinstance(value, str):
        text = value.strip().upper()
        unit = max((unit for unit in scales if text.endswith(unit)), key=len, default="")
        digits = text.removesuffix(unit).strip()
        if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", digits):
            digits = digits.replace(",", "")
        with suppress(ValueError):
            number = float(digits) * scales.get(unit, 1.0)
    elif is_number(value):
        with suppress(OverflowError):
            number = float(value)
    if not 0 < number < math.inf:
        such = "8e10, '80GB' or '80GiB'" if name == "memory" else "1.3e9, '1.3B' or '350M'"
        raise InvalidArgument(f"{name} must be a positive number such as {such}; got {shown(value)}")
    return number
