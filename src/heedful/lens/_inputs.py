"""What `observe` is given, made into a call of the model and names for what it reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument
from heedful.bridges.reading import inputs_of
from heedful.lens._record import Tokens

# Arguments that say which tokens are padding, by side; True where what they mark counts.
PADDING = {
    "": {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False},
    "decoder_": {"decoder_attention_mask": True, "tgt_key_padding_mask": False},
}


def read_inputs(
    model: nn.Module, inputs: Any, tokenizer: Any, *, strings: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tokens]]:
    """Positional arguments, named arguments, and the tokens of each side that has any; their strings, which take long, only where they are wanted."""
    if isinstance(inputs, str) or (isinstance(inputs, list) and inputs and all(isinstance(x, str) for x in inputs)):
        inputs = _tokenized(model, [inputs] if isinstance(inputs, str) else inputs, tokenizer)
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Tensor):
        args = (inputs,)
    elif isinstance(inputs, Mapping):
        named = dict(inputs)
    elif isinstance(inputs, tuple) and inputs:
        args = inputs
    else:
        raise InvalidArgument(
            f"inputs must be a text, a list of texts, a mapping, a tuple or a tensor; got {type(inputs).__name__}"
        )
    return args, named, _sides(model, _by_name(model, args, named), tokenizer, strings)


def _by_name(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments by the names that the model gives them; those without a name by their place."""
    try:
        bound = signature(model.forward).bind_partial(*args, **named)
    except (TypeError, ValueError):
        return named
    tensors: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is Parameter.VAR_KEYWORD:
            tensors |= value
        elif kind is Parameter.VAR_POSITIONAL:
            tensors |= {f"{name}{at}": one for at, one in enumerate(value)}
        else:
            tensors[name] = value
    return tensors


def _sides(model: nn.Module, named: dict[str, Any], tokenizer: Any, strings: bool) -> dict[str, Tokens]:
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    sides: dict[str, Tokens] = {}
    first = tensors.get("input_ids", next(iter(tensors.values()), None))
    for side, prefix, read in (("input", "", first), ("decoder", "decoder_", tensors.get("decoder_input_ids"))):
        valid = _valid(tensors, prefix)
        if read is not None and not read.is_floating_point() and read.dim() == 2:
            tokens = _tokens(model, read.cpu(), tokenizer, strings)
            if valid is not None and valid.shape[1] > read.shape[1] and side == "input":
                sides["cache"] = _with_past(tokens, valid)
            fits = valid is not None and valid.shape[1] >= read.shape[1]
            sides[side] = replace(tokens, valid=valid[:, -read.shape[1] :]) if valid is not None and fits else tokens
        elif valid is not None:
            sides[side] = replace(Tokens.unnamed(*valid.shape), valid=valid)
    return sides


def _with_past(tokens: Tokens, valid: Tensor) -> Tokens:
    """Tokens after those that a cache holds, which are known by their place alone."""
    past = valid.shape[1] - tokens.valid.shape[1]
    strings = tuple((*map(str, range(past)), *row) for row in tokens.strings)
    return Tokens(strings, torch.nn.functional.pad(tokens.special, (past, 0)), valid)


def _tokenized(model: nn.Module, texts: list[str], tokenizer: Any) -> dict[str, Any]:
    named = inputs_of(model, tokenizer, texts)
    device = named["input_ids"].device
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        # A decoder must read something; its start says least.
        start = next((mark for name in ("decoder_start", "bos", "pad") for mark in _marks(config, name)), None)
        if start is None:
            raise InvalidArgument(
                "the config names no token to start the decoder with; give decoder_input_ids yourself"
            )
        named["decoder_input_ids"] = torch.full((len(texts), 1), start, device=device)
    return named


def _marks(config: Any, name: str) -> list[int]:
    """The tokens that a config gives for one purpose: none, one or several, whatever holds them."""
    marks = getattr(config, f"{name}_token_id", None)
    several = marks.tolist() if isinstance(marks, Tensor) else marks
    several = list(several) if isinstance(several, Collection) else [several]
    return [mark for mark in several if mark is not None]


def _valid(tensors: dict[str, Tensor], prefix: str) -> Tensor | None:
    for name, counts in PADDING[prefix].items():
        mask = tensors.get(name)
        if mask is not None and mask.dim() == 2 and (counts or not mask.is_floating_point()):
            return (mask.bool() if counts else ~mask.bool()).cpu()
    return None


def _tokens(model: nn.Module, ids: Tensor, tokenizer: Any, strings: bool) -> Tokens:
    valid = torch.ones_like(ids, dtype=torch.bool)
    rows = ids.tolist() if strings else []
    if tokenizer is not None:
        names = tuple(tuple(tokenizer.convert_ids_to_tokens(row)) for row in rows)
        # An unknown word is a word all the same.
        marks = set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}
    else:
        names = tuple(tuple(map(str, row)) for row in rows)
        config = getattr(model, "config", None)
        marks = {mark for name in ("bos", "eos", "pad", "cls", "sep") for mark in _marks(config, name)}
    special = torch.isin(ids, torch.tensor(sorted(marks), dtype=ids.dtype))
    return Tokens(names, special, valid)
