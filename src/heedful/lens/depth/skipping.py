"""What each layer of a trained model is good for: the output without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heedful._errors import InvalidArgument, Unsupported
from heedful._plot import Axes, axes
from heedful._result import Result

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class LayerUse:
    """A layer, how far the output moves without it (relative to its norm), and by how much the loss rises, if there is one."""

    layer: int
    name: str
    change: float
    loss_rise: float | None


@dataclass(frozen=True)
class Usefulness(Result):
    """Every layer left out in turn; `loss` is that of the whole model, None where it states none."""

    layers: tuple[LayerUse, ...]
    loss: float | None

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars: the loss that each layer saves, or how far the output moves without it."""
        ax = axes(ax)
        heights = [one.change if one.loss_rise is None else one.loss_rise for one in self.layers]
        ax.bar(range(len(heights)), heights)
        label = "relative change of the output" if self.loss is None else "rise of the loss (nats)"
        ax.set(xlabel="layer left out", ylabel=label, title="What each layer is good for")
        return ax

    def __str__(self) -> str:
        lines = ["layer left out   output moves by" + ("" if self.loss is None else "   loss rises by")]
        for one in self.layers:
            rise = "" if one.loss_rise is None else f"{one.loss_rise:>16.4f}"
            lines.append(f"{one.layer:>14}   {one.change:>15.1%}{rise}")
        return "\n".join(lines)


def skip_layers(model: nn.Module, inputs: Mapping[str, Any]) -> Usefulness:
    r"""Runs a model with each of its layers left out in turn: $|f_{-l}(x) - f(x)| / |f(x)|$, and the loss where labels are given.

    A layer is an element of a `ModuleList` whose elements all hold attention; left out, it passes on what it read. The model
    runs in the mode it is in and is left as it was. A cheap view of what depth buys in a checkpoint, to set beside the verdict
    of `audit`: layers that change little are candidates for a shallower model.

    Args:
        model: a Hugging Face model, or any module that takes `inputs` as keyword arguments.
        inputs: what it is called with; with `labels`, the rise of its loss is told too.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    >>> [one.name for one in skip_layers(model, {"src": torch.randn(1, 5, 8)}).layers]
    ['layers.0', 'layers.1', 'layers.2']
    """
    from heedful._runtime import after_calls, undisturbed
    from heedful.bridges.structure import layers_of

    if not isinstance(inputs, Mapping):
        raise InvalidArgument(f"inputs must be a mapping of keyword arguments; got {type(inputs).__name__}")
    blocks = layers_of(model)
    if not blocks:
        raise Unsupported(f"{type(model).__name__} has no list of layers that hold attention; none can be left out")
    used = []
    with undisturbed(model):
        whole, loss = outcome_of(model(**inputs))
        for at, (name, block) in enumerate(blocks):
            with after_calls([block], _keep_input):
                part, without = outcome_of(model(**inputs))
            change = float((part - whole).norm() / whole.norm().clamp_min(1e-30))
            rise = None if loss is None or without is None else without - loss
            used.append(LayerUse(at, name, change, rise))
    return Usefulness(tuple(used), loss)


def _keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A layer's output in the form it has, with what it read in place of what it computed."""
    read = args[0] if args else next(iter(kwargs.values()))
    return (read, *output[1:]) if isinstance(output, tuple) else read


def outcome_of(output: Any) -> tuple[Tensor, float | None]:
    """The first floating tensor of more than one number, and the loss."""
    from torch import Tensor

    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    loss = getattr(output, "loss", None)
    first = next((value for value in tensors if value.dim() > 0), None)
    if first is None:
        raise Unsupported("the model returns no tensor to compare; give one that returns hidden states or logits")
    return first.detach().double(), None if loss is None else float(loss)
