r"""How much of a call's attention goes to each kind of keys, without writing the map of pairs.

Attention is linear in its values. With columns $c$ of zeros and ones as values, any kernel returns $\sum_j a_{ij} c_j$: the weight that a
query gives to the keys of a kind, exactly. Backward, $f^T A$ is the gradient of $\langle f, A v \rangle$ by $v$.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heedful import masks
from heedful._attend import attend
from heedful.bridges.watch import Watched

# Cells of a mask that are counted at once.
CELLS = 2**24


def as_values(call: Watched, columns: Tensor) -> Tensor:
    """Columns `[B, 1 or H, K, C]` as the values of a call, for every head of keys; on a GPU wider than they are."""
    assert call.query is not None
    assert call.key is not None
    value, count = columns, columns.shape[-1]
    if call.query.is_cuda:
        # The fastest kernels take values as wide as queries, others widths that are multiples of 16.
        value = nn.functional.pad(value.to(call.query.dtype), (0, max(-count % 16, call.query.shape[-1] - count)))
    heads = call.key.shape[1] if columns.shape[1] == 1 else columns.shape[1]
    value = value.expand(call.output.shape[0], heads, *value.shape[2:])
    return value.contiguous() if value.is_cuda else value


def masses(call: Watched, columns: Tensor, values: Tensor | None = None) -> Tensor:
    r"""$\sum_j a_{ij} c_j$ for columns `[B, 1 or H, K, C]`: `[B, H, Q, C]`.

    `values` are the columns as `as_values` makes them, where layers share them. The model's own kernel runs once more with these columns as values. In 16 bit on a GPU each sum is rounded to 16 bit; on a CPU it is not.
    """
    batch, heads, queries = call.output.shape[:3]
    if call.weights is not None:
        wide = torch.promote_types(call.weights.dtype, torch.float32)
        return call.weights.to(wide) @ columns.to(wide)
    query, key, bias = call.query, call.key, call.bias
    assert query is not None
    assert key is not None
    if query.dtype.itemsize < 4 and query.device.type == "cpu":
        query, key, bias = query.float(), key.float(), None if bias is None else bias.float()
    count = columns.shape[-1]
    value = as_values(call, columns).to(query.dtype) if values is None else values
    mask = masks.join_transformers(call.mask, bias)
    out = attend(query, key, value, mask, is_causal=call.causal, enable_gqa=True, kernel=call.kernel)
    assert out.shape[:3] == (batch, heads, queries)
    return out[..., :count]


def pulled(call: Watched, rows: Tensor) -> Tensor:
    r"""$\sum_h \sum_i f_{hi} a^h_{ij}$ for rows `[B, H, Q]`: `[B, K]`, by one backward pass through the kernel."""
    rows = rows[..., None]
    if call.weights is not None:
        return (call.weights.to(rows.dtype).mT @ rows).sum(1).squeeze(-1)
    # Shares of a long sequence are below what 16 bit can hold.
    size = rows.amax().clamp_min(1e-30)
    keys = call.output.shape[2] if call.key is None else call.key.shape[2]
    with torch.enable_grad():
        column = rows.new_zeros(rows.shape[0], 1, keys, 1, requires_grad=True)
        out = masses(call, column)
        (back,) = torch.autograd.grad(out, column, (rows / size).to(out.dtype))
    return back[:, 0, :, 0].to(rows.dtype) * size


def visible(call: Watched) -> Tensor | None:
    """`[B or 1, K]`: keys that some query may see; None where all may."""
    return None if call.mask is None else _four(call.mask).any(dim=1).any(dim=1)


def uniform(call: Watched, columns: Tensor) -> Tensor:
    """The same sums where every query attends evenly to the keys that it may see: `[B, 1 or H, Q, C]`.

    The last column says which keys there are at all; it is divided by and left out.
    """
    mask = call.mask
    if mask is None and call.weights is not None:
        # What a mask left is what some head gives weight to.
        mask = (call.weights != 0).any(1, keepdim=True)
    queries = call.output.shape[2]
    columns = columns.to(torch.promote_types(columns.dtype, torch.float32))
    if mask is None or mask.shape[-2] == 1:
        seen = columns if mask is None else columns * _four(mask).mT
        # Along the last axis, where a GPU sums many times faster.
        sums = seen.mT.cumsum(-1).mT[:, :, :queries] if call.causal else seen.sum(2, keepdim=True)
    else:
        sums = _counted(_four(mask), columns, call.causal)
    sums = sums.expand(-1, -1, queries, -1)
    return sums[..., :-1] / sums[..., -1:].clamp_min(1e-30)


def _counted(mask: Tensor, columns: Tensor, causal: bool) -> Tensor:
    """A mask of pairs, which the model has made, some rows at a time."""
    queries, keys = mask.shape[-2:]
    step = max(1, CELLS // max(1, mask.shape[0] * mask.shape[1] * keys))
    parts = []
    for first in range(0, queries, step):
        part = mask[:, :, first : first + step]
        if causal:
            at = torch.arange(first, first + part.shape[2], device=mask.device)
            part = part & (torch.arange(keys, device=mask.device) <= at[:, None])
        parts.append(part.to(columns.dtype) @ columns)
    return torch.cat(parts, 2)


def _four(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.dim())]
