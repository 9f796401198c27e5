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

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported
from heedful._savable import decode, encode
from heedful.nn import PrimalAttention

__all__ = [
    "Call",
    "Recorded",
    "Site",
    "Slot",
    "described",
    "find_sites",
    "hidden",
    "put",
    "read",
    "rebuilt",
    "recorded",
]

PROJECTIONS = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
OUTPUTS = ("o_proj", "out_proj", "out_lin", "dense")
HEADS = ("num_attention_heads", "num_heads", "n_heads")


@dataclass(frozen=True)
class Site:
    """A self-attention module by name: its maps, the linear map whose output a primal layer gives instead, its block."""

    name: str
    query: str
    key: str
    output: str
    block: str
    heads: int
    width: int

    @property
    def inside(self) -> bool:
        """Whether the output map is part of the module, as in ViT, or beside it, as in BERT."""
        return self.output.startswith(f"{self.name}.")


def find_sites(model: nn.Module) -> list[Site]:
    """Every self-attention of an encoder that a primal layer can replace, in the order of the model.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    >>> [site.name for site in find_sites(BertModel(config))]
    ['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self']
    """
    config = getattr(model, "config", None)
    for flag in ("is_decoder", "is_encoder_decoder"):
        if getattr(config, flag, False):
            raise Unsupported(
                f"{type(model).__name__} is a decoder or has one ({flag}); give an encoder, as BertModel or ViTModel"
            )
    modules = dict(model.named_modules())
    found = [_site(name, module, modules) for name, module in modules.items()]
    sites = [site for site in found if site is not None]
    if not sites:
        raise Unsupported(
            f"{type(model).__name__} has no self-attention of a known structure: linear maps {PROJECTIONS[0]}, {PROJECTIONS[1]} or "
            f"{PROJECTIONS[2]} of one width, and an output map; BERT, RoBERTa, DistilBERT, ViT, DeiT and their kin have it"
        )
    return sites


def _site(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Site | None:
    if isinstance(module, Slot):
        return None
    children = {child: part for child, part in module.named_children() if isinstance(part, nn.Linear)}
    maps = next((names for names in PROJECTIONS if set(names) <= set(children)), None)
    if maps is None:
        return None
    around = name.rpartition(".")[0]
    outputs = [f"{name}.{own}" for own in OUTPUTS if own in children] + [f"{around}.output.dense"]
    output = next((place for place in outputs if isinstance(modules.get(place), nn.Linear)), None)
    width = children[maps[0]].in_features
    square = all((children[own].in_features, children[own].out_features) == (width, width) for own in maps)
    heads = next((getattr(module, own) for own in HEADS if isinstance(getattr(module, own, None), int)), None)
    heads = heads or getattr(getattr(module, "config", None), HEADS[0], None)
    # The layer is the innermost ancestor that stands in a list of layers.
    parts = name.split(".")
    block = next((".".join(parts[:at]) for at in range(len(parts) - 1, 0, -1) if parts[at - 1].isdigit()), None)
    if output is None or not square or not heads or block is None or width % heads:
        return None
    return Site(name, f"{name}.{maps[0]}", f"{name}.{maps[1]}", output, block, heads, width)


class Slot(nn.Module):
    """A primal layer where a model's own attention was: takes what that took, gives what that gave.

    There are no weights to return: `output_attentions` has no entry for this layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.primal = layer

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        call = Call.of(args, kwargs)
        return self.primal(call.inputs, None if call.keep is None else ~call.keep), None


@dataclass(frozen=True)
class Call:
    """What an attention module was called with: its input `[B, n, d]`, and where there are tokens `[B, n]`."""

    inputs: Tensor
    keep: Tensor | None

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        inputs = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(inputs, Tensor) or inputs.dim() != 3:
            raise Unsupported("a primal layer reads hidden states (batch, tokens, width) as the first argument")
        for name in ("encoder_hidden_states", "past_key_values"):
            if kwargs.get(name) is not None:
                raise Unsupported(f"a primal layer attends to its own sequence alone; leave {name} out")
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        return Call(inputs, None if mask is None else _keep(mask, inputs))


def _keep(mask: Any, inputs: Tensor) -> Tensor:
    """`[B, n]`, True for tokens, from a mask of transformers; one that is not the same for all queries is refused."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise Unsupported(
            f"the padding cannot be read from a {type(mask).__name__}; set_attn_implementation('sdpa') gives a plain mask"
        )
    if mask.dim() == 4:
        rows = mask.shape[-2] > 1 and mask.stride(-2) != 0 and not torch.compiler.is_compiling()
        if rows and not torch.equal(mask, mask[..., :1, :].expand_as(mask)):
            raise Unsupported(
                "the attention mask differs between queries; a primal layer has no coefficient per pair to hide"
            )
        mask = mask[:, 0, 0, :]
        if mask.is_floating_point():
            # Added to scores: the lowest number hides a key.
            mask = mask > torch.finfo(mask.dtype).min / 2
    return mask.bool().expand(inputs.shape[:2])


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

    call: Call
    output: Tensor  # [B, n, d], after the output map
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor  # [B, n, d]


@torch.no_grad()
def recorded(model: nn.Module, site: Site, batches: Iterable[Mapping[str, Any]]) -> Iterator[Recorded]:
    """Runs the model on each batch and tells what happened at the site, also where a slot stands there."""
    seen: dict[str, Any] = {}
    attention = model.get_submodule(site.name)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["call"] = Call.of(args, kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen["output"] = first(output)

    def ended(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen["block"] = args, kwargs, first(output)

    handles = [
        attention.register_forward_pre_hook(enter, with_kwargs=True),
        (attention if isinstance(attention, Slot) else model.get_submodule(site.output)).register_forward_hook(leave),
        model.get_submodule(site.block).register_forward_hook(ended, with_kwargs=True),
    ]
    try:
        for batch in batches:
            seen.clear()
            model(**batch)
            if len(seen) < 3:
                raise Unsupported(f"{site.name} did not run on this input; give what the model reads")
            yield Recorded(seen["call"], seen["output"], *seen["block"])
    finally:
        for handle in handles:
            handle.remove()


def first(output: Any) -> Tensor:
    """The tensor that a block returns, alone or before others."""
    found = output if isinstance(output, Tensor) else output[0]
    assert isinstance(found, Tensor)
    return found


def hidden(output: Any) -> Tensor:
    """What a model says of its input: its last hidden states, or logits where it has a head."""
    for name in ("last_hidden_state", "logits"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return first(output)


def read(given: Any, tokenizer: Any, batch_size: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Batches that a model is called with: from texts, sorted by length so that padding is short, or as they were given."""
    given = list(given)
    if given and all(isinstance(one, str) for one in given):
        if tokenizer is None:
            raise InvalidArgument("texts need a tokenizer to be read: primalize(model, texts, tokenizer=...)")
        given = sorted(given, key=len)
        parts = [given[at : at + batch_size] for at in range(0, len(given), batch_size)]
        batches = [dict(tokenizer(part, return_tensors="pt", padding=True, truncation=True)) for part in parts]
    else:
        batches = [dict(one) if isinstance(one, Mapping) else {} for one in given]
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


def rebuilt(told: Mapping[str, Any]) -> nn.Module:
    """The model that `described` describes, with weights still to be loaded."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    made_by = getattr(transformers, str(told["class"]), None)
    if not (isinstance(made_by, type) and issubclass(made_by, transformers.PreTrainedModel)):
        raise CorruptModel(
            f"{told['class']!r} is no model of transformers {transformers.__version__}; it was saved with another one"
        )
    config = transformers.AutoConfig.for_model(**told["config"])
    model = made_by(config)
    sites = {site.name: site for site in find_sites(model)}
    for name, arguments in told["layers"].items():
        if name not in sites:
            raise CorruptModel(f"{told['class']} has no self-attention {name!r}; it has {', '.join(sites)}")
        put(model, sites[name], PrimalAttention(**{key: decode(value) for key, value in arguments.items()}))
    return model
