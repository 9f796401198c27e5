"""Attention that a module computes by itself, seen at the linear maps of its queries, keys and values.

ViLT, VisualBERT, LXMERT and BLIP multiply their matrices in their own code. What their maps gave, and the mask they were called with,
make the same call in our form; it counts only where it gives the module's own output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heedful.bridges.calls import Watched, agrees
from heedful.bridges.structure import HEADS, OUTWARD, QUERIES_KEYS_VALUES
from heedful.kernels import Softmax
from heedful.masks import split_transformers

# What modules call the factor of their scores, where it is not one over the root of the head size.
SCALES = ("scaling", "scale", "softmax_scale")


class Mapped(NamedTuple):
    """What a linear map read, and what it gave."""

    read: Tensor
    gave: Tensor


def maps_of(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[nn.Module, int]]:
    """Every linear map of queries (0), keys (1), values (2) or outputs (3), with the attention module it is part of.

    >>> from transformers import ViltConfig, ViltModel
    >>> sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    >>> len(maps_of(ViltModel(ViltConfig(**sizes, image_size=8, patch_size=4)).modules()))
    6
    """
    found: dict[nn.Module, tuple[nn.Module, int]] = {}
    for module in modules:
        if len(module._modules) < 3:
            continue
        children = {name: part for name, part in module._modules.items() if isinstance(part, nn.Linear)}
        names = next((names for names in QUERIES_KEYS_VALUES if set(names) <= set(children)), ())
        found |= {children[name]: (module, at) for at, name in enumerate(names)}
        found |= {children[name]: (module, 3) for name in OUTWARD if names and name in children}
    return found


def call_of(module: nn.Module, maps: Mapping[int, Mapped], arguments: Mapping[str, Any], output: Any) -> Watched | None:
    """The module's attention as softmax attention of what its maps gave; None where that is not what it computed."""
    heads = next((getattr(module, name) for name in HEADS if isinstance(getattr(module, name, None), int)), 0)
    # What goes into the map of outputs, where that is part of the module, or else what the module gave.
    given = maps[3].read if 3 in maps else output[0] if isinstance(output, tuple) and output else output
    if not {0, 1, 2} <= set(maps) or not heads or not isinstance(given, Tensor) or given.dim() != 3:
        return None
    parts = [maps[at].gave for at in range(3)]
    size = parts[0].shape[-1] // heads
    if any(part.dim() != 3 or part.shape[-1] % size for part in parts) or parts[0].shape[-1] != heads * size:
        return None
    query, key, value = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    if given.shape != (query.shape[0], query.shape[2], heads * size) or query.shape[0] != key.shape[0]:
        return None
    context = given.unflatten(-1, (heads, size)).transpose(1, 2)
    calls = (replace(call, output=context) for call in _told(module, query, key, value, arguments))
    call = next(filter(agrees, calls), None)
    return call and replace(call, inputs=maps[0].read, cross=maps[0].read is not maps[1].read)


def _told(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
) -> Iterator[Watched]:
    """The calls that it may have been: with each mask it was given, or none, and each scale that it names."""
    shape = (*query.shape[:3], key.shape[2])
    given = [
        value for name, value in arguments.items() if "mask" in name and isinstance(value, Tensor) and value.dim() == 4
    ]
    masks = [mask for mask in given if _fits(mask, shape)]
    named = (getattr(module, name, None) for name in SCALES)
    scales = dict.fromkeys((None, *(float(one) for one in named if isinstance(one, int | float)), 1.0))
    for scale in scales:
        for mask in (*masks, None):
            seen, bias = (None, None) if mask is None else split_transformers(mask)
            yield Watched("", query, key, value, query, Softmax(scale), seen, bias)


def _fits(mask: Tensor, shape: tuple[int, ...]) -> bool:
    try:
        return torch.broadcast_shapes(mask.shape, shape) == shape
    except RuntimeError:
        return False
