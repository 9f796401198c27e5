"""Self-attention of Hugging Face encoders, taken out and replaced by primal layers.

What is found is a structure, not a name: three linear maps for queries, keys and values in one module, and the linear map of
the heads' outputs in it or beside it, as BERT, RoBERTa, ELECTRA, DistilBERT, ViT, DeiT, DINOv2 and CLIP have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful import masks
from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported
from heedful._runtime import after_calls, before_calls
from heedful._savable import decode, encode
from heedful.bridges.reading import inputs_of
from heedful.bridges.structure import Site, find_sites
from heedful.nn import PrimalAttention


class Slot(nn.Module):
    """A primal layer where a model's own attention was: takes what that took, gives what that gave.

    There are no weights to return: `output_attentions` has no entry for this layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.primal = layer

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        call = SlotInput.of(args, kwargs)
        return self.primal(call.inputs, None if call.keep is None else ~call.keep), None


@dataclass(frozen=True)
class SlotInput:
    """What an attention module was called with: its input `[B, n, d]`, and where there are tokens `[B, n]`."""

    inputs: Tensor
    keep: Tensor | None

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SlotInput:
        inputs = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(inputs, Tensor) or inputs.dim() != 3:
            raise Unsupported("a primal layer reads hidden states (batch, tokens, width) as the first argument")
        for name in ("encoder_hidden_states", "past_key_values"):
            if kwargs.get(name) is not None:
                raise Unsupported(f"a primal layer attends to its own sequence alone; leave {name} out")
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        return SlotInput(inputs, None if mask is None else masks.tokens_of(mask, *inputs.shape[:2]))


def put(model: nn.Module, site: Site, layer: nn.Module) -> None:
    """Replaces an attention module in place by a layer `(x, key_padding_mask) -> y`; an output map beside it becomes the identity."""
    around, _, own = site.name.rpartition(".")
    setattr(model.get_submodule(around), own, Slot(layer))
    if not site.inside:
        beside, _, own = site.output.rpartition(".")
        setattr(model.get_submodule(beside), own, nn.Identity())


@dataclass(frozen=True)
class Recorded:
    """What one run of a model did at a site: the attention's call and output, and the block's call and result."""

    call: SlotInput
    output: Tensor  # [B, n, d], after the output map
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor  # [B, n, d]


@torch.no_grad()
def recorded(model: nn.Module, site: Site, batches: Iterable[Mapping[str, Any]]) -> Iterator[Recorded]:
    """Runs the model on each batch and tells what happened at the site, also where a slot stands there."""
    seen: dict[str, Any] = {}
    attention = model.get_submodule(site.name)

    output = attention if isinstance(attention, Slot) else model.get_submodule(site.output)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["call"] = SlotInput.of(args, kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        seen["output"] = first(result)

    def ended(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        seen["block"] = args, kwargs, first(result)

    block = model.get_submodule(site.block)
    with before_calls([attention], enter), after_calls([output], leave), after_calls([block], ended):
        for batch in batches:
            seen.clear()
            model(**batch)
            if len(seen) < 3:
                raise Unsupported(f"{site.name} did not run on this input; give what the model reads")
            yield Recorded(seen["call"], seen["output"], *seen["block"])


def first(output: Any) -> Tensor:
    """The tensor that a block returns, alone or before others."""
    tensor = output if isinstance(output, Tensor) else output[0]
    assert isinstance(tensor, Tensor)
    return tensor


def hidden(output: Any) -> Tensor:
    """What a model says of its input: its last hidden states, or logits where it has a head."""
    for name in ("last_hidden_state", "logits"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return first(output)


def read(model: nn.Module, data: Any, tokenizer: Any, batch_size: int) -> list[dict[str, Tensor]]:
    """Batches that a model is called with: from texts, sorted by length so that padding is short, or as they were given."""
    data = list(data)
    if data and all(isinstance(one, str) for one in data):
        data = sorted(data, key=len)
        parts = (data[at : at + batch_size] for at in range(0, len(data), batch_size))
        return [inputs_of(model, tokenizer, part, truncation=True) for part in parts]
    device = next(model.parameters()).device
    batches = [dict(one) if isinstance(one, Mapping) else {} for one in data]
    if not batches or not all(one and all(isinstance(value, Tensor) for value in one.values()) for one in batches):
        raise InvalidArgument(
            "calibration must be texts, or mappings from the model's arguments to tensors, at least one"
        )
    return [{name: value.to(device) for name, value in one.items()} for one in batches]


def described(model: nn.Module) -> dict[str, Any]:
    """What `rebuilt` needs to make a model with primal layers again: its class, its config, its layers."""
    parts = model.named_modules()
    slots = {
        name: part.primal for name, part in parts if isinstance(part, Slot) and isinstance(part.primal, PrimalAttention)
    }
    config: Any = getattr(model, "config", None)
    if not slots or config is None:
        raise InvalidArgument(f"{type(model).__name__} has no primal layers; give what primalize made")
    return {
        "class": type(model).__name__,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "layers": {
            name: {key: encode(value) for key, value in layer.arguments().items()} for name, layer in slots.items()
        },
    }


def rebuilt(description: Mapping[str, Any]) -> nn.Module:
    """The model that `described` describes, with weights still to be loaded."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    made_by = getattr(transformers, str(description["class"]), None)
    if not (isinstance(made_by, type) and issubclass(made_by, transformers.PreTrainedModel)):
        raise CorruptModel(
            f"{description['class']!r} is no model of transformers {transformers.__version__}; it was saved with another one"
        )
    config = transformers.AutoConfig.for_model(**description["config"])
    model = made_by(config)
    sites = {site.name: site for site in find_sites(model)}
    for name, arguments in description["layers"].items():
        if name not in sites:
            raise CorruptModel(f"{description['class']} has no self-attention {name!r}; it has {', '.join(sites)}")
        put(model, sites[name], PrimalAttention(**{key: decode(value) for key, value in arguments.items()}))
    return model
