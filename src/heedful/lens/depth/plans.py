"""What a plan holds: the shape, what it costs, and the runners-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from heedful._errors import MissingExtra
from heedful._plot import Axes
from heedful._result import Result
from heedful._text import quantity
from heedful.bridges import configs
from heedful.lens.depth.law import Law
from heedful.lens.depth.shape import Shape

LATENCY = "Depth runs layer after layer: at equal size a deeper model answers later and trains slower per step."


def notes(*remarks: str) -> list[str]:
    """Remarks and the one on latency, as lines of a terminal."""
    return [
        part for line in (*remarks, LATENCY) for part in wrap(line, 78, initial_indent="- ", subsequent_indent="  ")
    ]


def folded(*lines: str) -> list[str]:
    """Lines of 80 columns at most."""
    return [part for line in lines for part in wrap(line, 80, subsequent_indent="  ")]


def in_bands(sigma: float | None, distance: float) -> str:
    """
    >>> in_bands(None, 1.25)
    '6 %'
    """
    return f"{distance:.1f} σ" if sigma is not None else f"{5 * distance:.0f} %"  # noqa: RUF001


@dataclass(frozen=True)
class Choice(Result):
    """One shape for the budget: `off` is its distance from the budget, `distance` that from the law (see `Law.distance`).

    `time` is that of a step, relative to the plan's.
    """

    shape: Shape
    off: float
    distance: float
    time: float = 1.0

    _not = ("shape",)

    def to_dict(self) -> dict[str, Any]:
        sizes = {"layers": self.shape.layers, "width": self.shape.width, "params": self.shape.layer_params}
        return sizes | super().to_dict()


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """A shape for a budget, what the law says beside it, and the runners-up."""

    shape: Shape
    law: Law
    budget: float
    depth_star: float
    width_star: float
    sigma: float | None
    choices: tuple[Choice, ...]
    seq_len: int
    flags: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())
    order: str = ""  # what the choices are ranked by, in words

    _also = ("flops_per_token", "alternatives")
    _not = ("law", "depth_star", "width_star", "sigma", "choices", "order")

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def heads(self) -> int:
        return self.shape.heads

    @property
    def ffn(self) -> int:
        return self.shape.ffn

    @property
    def params(self) -> int:
        """Matrices and embeddings; `params_as` counts the norms and biases of a family as well."""
        return self.shape.params

    @property
    def flops_per_token(self) -> float:
        return self.shape.flops_per_token(self.seq_len)

    @property
    def alternatives(self) -> tuple[Choice, ...]:
        """The runners-up, best first."""
        return self.choices[1:]

    def params_as(self, kind: str) -> int:
        """Every parameter of the model that `to_hf(kind)` configures, norms and biases included; needs transformers.

        >>> from heedful.lens.depth import plan
        >>> plan("85M").params_as("gpt2") - plan("85M").params  # positions, norms and biases
        763200
        """
        params = configs.count(self.to_config(kind))
        if params is None:
            raise MissingExtra("transformers", "hf")
        return params

    def to_hf(self, kind: str) -> Any:
        """A Hugging Face configuration: gpt2, bert, llama, mistral, qwen2 or qwen3.

        >>> from heedful.lens.depth import plan
        >>> plan("85M", gated=True).to_hf("llama").num_hidden_layers
        23
        """
        return configs.make(kind, self._sizes())

    def to_config(self, kind: str) -> dict[str, Any]:
        """What config.json of that kind needs to hold; transformers is not needed."""
        keys = configs.keys(kind, self._sizes())
        return {"model_type": kind, "architectures": [configs.KINDS[kind]]} | keys

    def _sizes(self) -> dict[str, Any]:
        return vars(self.shape) | {"context": self.seq_len}

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "law": self.law.name,
            "optimum": {"depth": self.depth_star, "width": self.width_star, "sigma_depth": self.sigma},
            "kv_cache_bytes": self.shape.kv_cache_bytes(self.seq_len),
            "activation_bytes": self.shape.activation_bytes(self.seq_len),
            "extrapolated": list(self.shape.outside(self.law)),
        }

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the law with its band, the plan and its runners-up."""
        shapes = [(f"{c.shape.layers} x {c.shape.width}", c.shape.layers, c.shape.width) for c in self.choices[:1]]
        ax = self.law.plot(ax, shapes)
        for choice in self.alternatives:
            ax.plot(choice.shape.width, choice.shape.layers, "o", color="gray", markersize=3)
        return ax

    def __str__(self) -> str:
        shape = self.shape
        band = "" if self.sigma is None else f" ± {self.sigma:.1f}"
        lines = [
            *folded(
                f"{quantity(shape.layers, 'layer')} x {shape.width}: {quantity(shape.heads, 'head')} of {shape.head_dim}, "
                f"feed-forward {shape.ffn}" + (" (gated)" if shape.gated else ""),
                f"the law ({self.law.name}) says {self.depth_star:.1f}{band} layers of {self.width_star:.0f}",
            ),
            "",
            " layers  width  params in layers     off  from law  step time",
        ]
        for choice in self.choices:
            far = in_bands(self.sigma, choice.distance)
            lines.append(
                f"{choice.shape.layers:>7}  {choice.shape.width:>5}  {choice.shape.layer_params:>16,}"
                f"  {choice.off:>+6.1%}  {far:>8}  {choice.time:>8.2f}x"
            )
        if self.alternatives:
            lines += folded(f"ranked {self.order}")
        memory, cache = shape.activation_bytes(self.seq_len), shape.kv_cache_bytes(self.seq_len)
        lines += [
            "",
            *folded(
                f"with embeddings {shape.params:,} parameters (vocabulary {shape.vocab:,}{', tied' if shape.tied else ''})",
                f"{self.flops_per_token:.3g} FLOPs a token forward at {self.seq_len} tokens; per sequence",
                f"{cache / 2**20:,.0f} MiB key-value cache and about {memory / 2**20:,.0f} MiB activations, in 16 bit",
            ),
        ]
        return "\n".join(lines + notes(*shape.words(self.law, self.flags), *self.notes))

    def __repr__(self) -> str:
        return (
            f"Plan({self.layers} x {self.width}, {quantity(self.heads, 'head')}, {self.shape.layer_params:,} in layers)"
        )
