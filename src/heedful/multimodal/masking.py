"""Which tokens are hidden in pre-training: words by chance, image tokens together with those that attend to one another."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from heedful._checks import check_number, check_whole
from heedful._errors import InvalidArgument

__all__ = ["attention_mask_tokens", "mask_words", "random_mask_tokens"]

# Of chosen words this share becomes [MASK] and this one any word; the rest stays.
HIDDEN, REPLACED = 0.8, 0.1


def attention_mask_tokens(
    attention: Tensor,
    count: int,
    first: Tensor | None = None,
    *,
    valid: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Image tokens that are hidden together: one, and the `count` - 1 to which it attends most (Xue et al. 2021, section 3.3).

    With p drawn uniformly the mask is $\{p\} \cup \operatorname{top}_{K-1} A_{p, \cdot}$, p excluded from the second
    set, equal weights by the lower place.

    Args:
        attention: `(B, n, n)`, the mean over heads of the vision model's last layer.
        count: K, of at most n tokens.
        first: p `(B,)`; drawn by default.
        valid: `(B, n)`, False at tokens that are padding: those are never hidden. A row with fewer than K tokens is
            hidden whole.

    Returns `(B, n)` bool with exactly K ones in each row.

    >>> attention_mask_tokens(torch.eye(5)[None], 3, torch.tensor([3]))
    tensor([[ True,  True, False,  True, False]])
    """
    if attention.ndim != 3 or attention.shape[1] != attention.shape[2]:
        raise InvalidArgument(f"attention must be (batch, tokens, tokens); got shape {tuple(attention.shape)}")
    batch, tokens = attention.shape[:2]
    check_whole(1, tokens, count=count)
    if first is None:
        first = _any_token(batch, tokens, valid, attention.device, generator)
    weights = attention[torch.arange(batch, device=attention.device), first].float()
    weights = weights.scatter(1, first[:, None], torch.inf)
    return _largest(weights, count, valid)


def random_mask_tokens(
    batch: int,
    tokens: int,
    count: int,
    *,
    valid: Tensor | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As many image tokens hidden, each equally likely: the control of `attention_mask_tokens`.

    >>> random_mask_tokens(2, 7, 3).sum(1)
    tensor([3, 3])
    """
    check_whole(1, tokens, count=count)
    return _largest(torch.rand(batch, tokens, device=device, generator=generator), count, valid)


def _any_token(
    batch: int, tokens: int, valid: Tensor | None, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    draws = torch.rand(batch, tokens, device=device, generator=generator)
    return (draws if valid is None else draws.masked_fill(~valid, -1)).argmax(1)


def _largest(weights: Tensor, count: int, valid: Tensor | None) -> Tensor:
    if valid is not None:
        weights = weights.masked_fill(~valid, -torch.inf)
    # Stable: of equal weights the lower place.
    chosen = weights.sort(dim=1, descending=True, stable=True).indices[:, :count]
    mask = torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen, True)
    return mask if valid is None else mask & valid


def mask_words(
    input_ids: Tensor,
    *,
    mask_id: int,
    vocab_size: int,
    special: Iterable[int],
    probability: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Words hidden as BERT hides them, at least one of each text, and what was there.

    Each token that is not `special` is chosen with `probability`; of the chosen, 80 % become `mask_id`, 10 % any token
    that is not special, 10 % stay.

    Returns the changed tokens and labels, both like `input_ids`; a label is -100 where nothing was chosen.

    >>> ids, labels = mask_words(torch.tensor([[1, 7, 8, 2, 0]]), mask_id=3, vocab_size=9, special=(0, 1, 2, 3, 4))
    >>> (labels != -100).sum().item() >= 1, labels[0, [0, 3, 4]].tolist()
    (True, [-100, -100, -100])
    """
    check_number(least=0, most=1, probability=probability)
    apart = sorted(set(special))
    usable = torch.ones_like(input_ids, dtype=torch.bool)
    for number in apart:
        usable &= input_ids != number

    def draw() -> Tensor:
        return torch.rand(input_ids.shape, device=input_ids.device, generator=generator)

    chosen = usable & (draw() < probability)
    # A text with nothing chosen gets its luckiest word.
    best = draw().masked_fill(~usable, -1).argmax(1, keepdim=True)
    alone = torch.zeros_like(chosen).scatter(1, best, True) & usable & ~chosen.any(1, keepdim=True)
    chosen = chosen | alone
    words = _words(vocab_size, tuple(apart), input_ids.device)
    others = words[(draw() * len(words)).long()]
    how = draw()
    changed = torch.where(chosen & (how < HIDDEN), mask_id, input_ids)
    changed = torch.where(chosen & (how >= HIDDEN) & (how < HIDDEN + REPLACED), others, changed)
    return changed, torch.where(chosen, input_ids, -100)


@cache
def _words(vocab_size: int, special: tuple[int, ...], device: torch.device) -> Tensor:
    """The tokens that are not special, on a device, copied there once."""
    words = sorted(set(range(vocab_size)) - set(special))
    if not words:
        raise InvalidArgument(f"all {vocab_size} tokens are special: there are no words to hide")
    return torch.tensor(words, device=device)
