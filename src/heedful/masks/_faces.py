"""The faces: masks as torch, `nn.MultiheadAttention` and Hugging Face speak of them, to and fro."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful.masks.algebra import Mask, _Dense, _Keys, causal


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
        mask = causal if mask is None else causal & mask
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
            hidden: Mask = _Keys(~key_padding_mask)
        elif key_padding_mask.is_floating_point():
            hidden = _Dense(key_padding_mask[:, None, None, :])  # [B, 1, 1, K]
        else:
            raise InvalidArgument(
                f"key_padding_mask must be boolean (True = ignore) or floating; got {key_padding_mask.dtype}"
            )
        mask = hidden if mask is None else mask & hidden
    return mask


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
