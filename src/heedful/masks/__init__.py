"""Masks: who may attend to whom.

Inside heedful a mask is boolean and True means *may attend*. Masks compose with `&`, `|` and `~`, and are evaluated block by
block, so that none is expanded to queries x keys unless an implementation asks for all of it. Each face (torch's
`scaled_dot_product_attention`, `nn.MultiheadAttention`, Hugging Face) is converted once, here.

>>> import torch
>>> from heedful import attend, masks
>>> x = torch.randn(2, 3, 7, 4)
>>> mask = masks.causal & masks.padding(torch.tensor([7, 5]))
>>> attend(x, x, x, attn_mask=mask).shape
torch.Size([2, 3, 7, 4])
"""

from heedful.masks._blocks import blocks
from heedful.masks._faces import (
    from_multihead,
    from_sdpa,
    from_transformers,
    grid_of,
    join_transformers,
    split_transformers,
    to_multihead,
    to_sdpa,
    to_transformers,
    tokens_of,
)
from heedful.masks._low_rank import low_rank
from heedful.masks._packed import packed
from heedful.masks._parts import Parts, kind, parts, split_causal, versions
from heedful.masks.algebra import (
    Mask,
    Region,
    beside,
    causal,
    cut,
    dense,
    document,
    keys,
    lower_right,
    padding,
    window,
)

__all__ = [
    "Mask",
    "Parts",
    "Region",
    "beside",
    "blocks",
    "causal",
    "cut",
    "dense",
    "document",
    "from_multihead",
    "from_sdpa",
    "from_transformers",
    "grid_of",
    "join_transformers",
    "keys",
    "kind",
    "low_rank",
    "lower_right",
    "packed",
    "padding",
    "parts",
    "split_causal",
    "split_transformers",
    "to_multihead",
    "to_sdpa",
    "to_transformers",
    "tokens_of",
    "versions",
    "window",
]
