"""What `observe` is given, made into a call of the model and names for what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import InvalidArgument
from heedful.lens._record import Tokens

# Arguments that say which tokens are padding; True where a token counts.
PADDING = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}


def read_inputs(
    model: nn.Module, inputs: Any, tokenizer: Any
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tokens]]:
    """Positional arguments, named arguments, and the tokens of each side that has any."""
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
    first = args[0] if args else named.get("input_ids", named.get("src"))
    valid, sides = _valid(named), {}
    if isinstance(first, Tensor) and not first.is_floating_point() and first.dim() == 2:
        sides["input"] = _tokens(model, first, tokenizer, valid)
    elif valid is not None:
        places = Tokens.unnamed(*valid.shape)
        sides["input"] = Tokens(places.strings, places.special, valid)
    written = named.get("decoder_input_ids")
    if isinstance(written, Tensor) and written.dim() == 2:
        shown = named.get("decoder_attention_mask")
        sides["decoder"] = _tokens(model, written, tokenizer, None if shown is None else shown.bool())
    return args, named, sides


def _tokenized(model: nn.Module, texts: list[str], tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        raise InvalidArgument("a text needs a tokenizer to be read; observe(model, text, tokenizer=...)")
    try:
        encoded = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1)
    except ValueError as error:
        raise InvalidArgument(f"the tokenizer cannot read these texts: {' '.join(str(error).split())}") from error
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    named = {name: value.to(device) for name, value in encoded.items()}
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and start is not None:
        # A decoder must read something; its start says least.
        named["decoder_input_ids"] = torch.full((len(texts), 1), start, device=device)
    return named


def _valid(named: dict[str, Any]) -> Tensor | None:
    for name, counts in PADDING.items():
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not (mask.is_floating_point() and not counts):
            return (mask.bool() if counts else ~mask.bool()).cpu()
    return None


def _tokens(model: nn.Module, ids: Tensor, tokenizer: Any, valid: Tensor | None) -> Tokens:
    ids = ids.cpu()
    valid = torch.ones_like(ids, dtype=torch.bool) if valid is None or valid.shape != ids.shape else valid.cpu()
    if tokenizer is not None:
        strings = tuple(tuple(tokenizer.convert_ids_to_tokens(row)) for row in ids.tolist())
        # An unknown word is a word all the same.
        marks = set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}
    else:
        strings = tuple(tuple(map(str, row)) for row in ids.tolist())
        config = getattr(model, "config", None)
        known = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "cls", "sep"))
        marks = {one for mark in known if mark is not None for one in (mark if isinstance(mark, list) else [mark])}
    special = torch.isin(ids, torch.tensor(sorted(marks), dtype=ids.dtype))
    return Tokens(strings, special, valid)
