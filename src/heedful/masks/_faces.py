"""The faces: masks as torch, `nn.MultiheadAttention` and Hugging Face speak of them, to and fro."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import lasting
from heedful.masks.algebra import Mask, _Dense, _Keys, causal, lower_right


def from_sdpa(attn_mask: Mask | Tensor | None, is_causal: bool = False) -> Mask | None:
    """A mask as `scaled_dot_product_attention` takes it: True = attend; floats are added, and hide where they are lowest."""
    mask: Mask | None = None
    if isinstance(attn_mask, Mask):
        mask = attn_mask
    elif isinstance(attn_mask, Tensor):
        attn_mask = attn_mask if attn_mask.dim() > 1 else attn_mask.reshape(1, -1)
        if not attn_mask.is_floating_point() and attn_mask.dtype != torch.bool:
            raise InvalidArgument(
                f"attn_mask must be boolean (True = may attend) or floating (added to the score); got {attn_mask.dtype}. "
                "For a 0/1 mask of tokens use masks.from_transformers, or mask.bool()"
            )
        mask = _Dense(attn_mask)
    elif attn_mask is not None:
        raise InvalidArgument(f"attn_mask must be a tensor or a heedful mask; got {type(attn_mask).__name__}")
    if is_causal:
        mask = causal if mask is None or mask is causal else causal & mask
    return mask


def from_multihead(
    attn_mask: Mask | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    num_heads: int = 1,
) -> Mask | None:
    """A mask as `nn.MultiheadAttention` takes it: True = ignore; floats are added."""
    if isinstance(attn_mask, Tensor):
        if attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        if attn_mask.dim() == 3:
            if attn_mask.shape[0] % num_heads:
                raise InvalidArgument(
                    f"attn_mask has shape {tuple(attn_mask.shape)}; expected (batch * heads, queries, keys) with {num_heads} heads"
                )
            attn_mask = attn_mask.unflatten(0, (-1, num_heads))  # [B * H, Q, K] -> [B, H, Q, K]
    mask = from_sdpa(attn_mask, is_causal)
    if key_padding_mask is not None:
        if key_padding_mask.dtype == torch.bool:
            return _with_keys(mask, key_padding_mask)
        if key_padding_mask.is_floating_point():
            hidden = _Dense(key_padding_mask[:, None, None, :])  # [B, 1, 1, K]
            return hidden if mask is None else mask & hidden
        raise InvalidArgument(
            f"key_padding_mask must be boolean (True = ignore) or floating; got {key_padding_mask.dtype}"
        )
    return mask


def _with_keys(mask: Mask | None, ignored: Tensor) -> Mask:
    """With keys hidden. All layers that are given this tensor get one mask, so that what follows from it is found once."""

    def made() -> Mask:
        hidden = _Keys(~ignored)
        return hidden if mask is None else mask & hidden

    stream = lasting(ignored.device) if mask is None or mask is causal else None
    if stream is None or ignored.is_inference():
        return made()
    known = OF_IGNORED.setdefault(ignored, {})
    now = ignored.data_ptr(), ignored._version
    then, found = known.get((mask, stream), (None, None))
    if then != now or found is None:
        with torch.inference_mode(False):  # a later call may record gradients
            found = made()
        known[mask, stream] = now, found
    return found


# Masks by the tensor that says which keys are ignored.
OF_IGNORED = WeakTensorKeyDictionary()


def from_transformers(attention_mask: Tensor | None) -> Mask | None:
    """A mask as Hugging Face models take it: (batch, keys) of 0 and 1, or (batch, heads, queries, keys) boolean or added."""
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:
        return _Keys(attention_mask != 0)
    if attention_mask.dim() != 4:
        raise InvalidArgument(
            "attention_mask must have shape (batch, keys) or (batch, heads, queries, keys); "
            f"got {tuple(attention_mask.shape)}"
        )
    return from_sdpa(attention_mask)


def to_sdpa(mask: Mask, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Written out for `scaled_dot_product_attention`: True = attend."""
    return _written_out(mask, shape, device)


def to_multihead(mask: Mask, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Written out for `nn.MultiheadAttention`'s `attn_mask`: True = ignore; (batch * heads, queries, keys)."""
    return ~_written_out(mask, shape, device).expand(*shape).flatten(0, -3)


def to_transformers(
    mask: Mask, shape: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Written out for Hugging Face's eager attention: 0 = attend, the lowest float = ignore."""
    keep = _written_out(mask, shape, device)
    return torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill(~keep, torch.finfo(dtype).min)


def _written_out(mask: Mask, shape: Sequence[int], device: torch.device | str) -> Tensor:
    if mask.factors is not None:
        raise InvalidArgument(
            "this mask holds a bias of low rank (low_rank), which no boolean mask can say; add it there"
        )
    return mask.dense(shape, device)


def grid_of(
    attention_mask: Any, shape: tuple[int, int, int, int], device: torch.device, *, causal: bool, flash: bool = False
) -> Tensor | None:
    """What an attention function of Hugging Face's is called with, as one tensor that broadcasts to (batch, heads, queries, keys).

    A mask of tokens, as flash attention takes it, or none at all there, leaves causality to the module; FlexAttention's is a function.
    """
    if attention_mask is None:
        return lower_right.dense(shape[2:], device) if flash and causal else None
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        # The same tensor where it fits: who watches knows by it that layers share a mask.
        return attention_mask if attention_mask.shape[-1] == shape[3] else attention_mask[..., : shape[3]]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        tokens = attention_mask[:, None, None, :].bool()
        return tokens & lower_right.dense(shape[2:], device) if causal else tokens
    if hasattr(attention_mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(attention_mask.mask_mod, *shape, device=str(device))
    raise Unsupported(f"attention is masked by a {type(attention_mask).__name__}, which cannot be read")


def split_transformers(attention_mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Who may attend to whom, True = attend, and what is added to the score; None for all, and for nothing."""
    if attention_mask.dtype == torch.bool:
        return attention_mask, None
    hidden = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
    bias = attention_mask.masked_fill(hidden, 0.0)
    return ~hidden if hidden.any() else None, bias if bias.any() else None


def join_transformers(attention_mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One mask for `attend` from a mask of Hugging Face's and a bias of positions: booleans, or floats with the lowest one where a key is hidden."""
    if attention_mask is not None and attention_mask.is_floating_point():
        # A position bias that a model added to the lowest float moves it a little, and hidden must stay hidden.
        lowest = torch.finfo(attention_mask.dtype).min
        hidden = attention_mask <= lowest / 2
        return (attention_mask if bias is None else attention_mask + bias).masked_fill(hidden, lowest)
    if attention_mask is None or bias is None:
        return bias if attention_mask is None else attention_mask
    return bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)


def tokens_of(attention_mask: object, batch: int, tokens: int) -> Tensor:
    """`[batch, tokens]`, True for tokens, from a mask of Hugging Face's; one that is not the same for all queries is refused."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() not in (2, 4):
        raise Unsupported(
            f"the padding cannot be read from a {type(attention_mask).__name__}; set_attn_implementation('sdpa') gives a plain mask"
        )
    mask = attention_mask
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
    return mask.bool().expand(batch, tokens)
