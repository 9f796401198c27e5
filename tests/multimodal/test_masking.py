"""Which words and image tokens are hidden."""

import time

import pytest
import torch

from heedful import InvalidArgument
from heedful.multimodal import attention_mask_tokens, mask_words, random_mask_tokens


def test_hidden_with_one_are_those_it_attends_to_most():
    attention = torch.rand(7, 11, 11).softmax(-1)
    first = torch.tensor([3, 0, 10, 5, 5, 1, 2])
    mask = attention_mask_tokens(attention, 4, first)
    for row, p in enumerate(first.tolist()):
        others = [at for at in sorted(range(11), key=lambda at: -attention[row, p, at].item()) if at != p]
        assert set(mask[row].nonzero()[:, 0].tolist()) == {p, *others[:3]}


def test_attention_to_oneself_hides_the_lowest_others():
    for p in range(9):
        mask = attention_mask_tokens(torch.eye(9)[None], 4, torch.tensor([p]))
        wanted = {p, *[at for at in range(9) if at != p][:3]}
        assert set(mask[0].nonzero()[:, 0].tolist()) == wanted


def test_masks_are_exact_fast_and_never_of_padding():
    attention = torch.rand(10_000, 64, 64)
    began = time.perf_counter()
    mask = attention_mask_tokens(attention, 8)
    took = time.perf_counter() - began
    assert (mask.sum(1) == 8).all()
    assert took < 1
    # p itself is drawn evenly.
    first = attention_mask_tokens(torch.eye(64).expand(10_000, 64, 64), 1)
    assert (first.float().mean(0) - 1 / 64).abs().max() < 0.008
    valid = torch.rand(200, 64) < 0.5
    attention[:200][~valid[:, None].expand(-1, 64, -1)] = 1e30
    for mask in (attention_mask_tokens(attention[:200], 8, valid=valid), random_mask_tokens(200, 64, 8, valid=valid)):
        assert not (mask & ~valid).any()
        assert (mask.sum(1) == 8).all()
    few = torch.zeros(1, 5, dtype=torch.bool)
    few[0, 2:4] = True
    assert torch.equal(random_mask_tokens(1, 5, 4, valid=few), few)
    assert abs(random_mask_tokens(5000, 7, 3).float().mean(0) - 3 / 7).max() < 0.03


def test_words_are_hidden_as_bert_hides_them():
    torch.manual_seed(1)
    ids = torch.randint(5, 49, (2600, 53))
    ids[:, 0], ids[:, 40], ids[:, 41:] = 1, 2, 0
    words = 2600 * 39
    hidden, labels = mask_words(ids, mask_id=3, vocab_size=49, special=range(5), probability=0.15)
    chosen = labels != -100
    assert abs(chosen.sum() / words - 0.15) < 0.005
    assert not chosen[ids < 5].any()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(hidden[~chosen], ids[~chosen])
    assert chosen.any(1).all()
    masked, kept = hidden[chosen] == 3, hidden[chosen] == ids[chosen]
    assert abs(masked.float().mean() - 0.8) < 0.01
    # Any word is the right one now and then.
    assert abs(kept.float().mean() - (0.1 + 0.1 / 44)) < 0.01
    assert hidden[chosen][~masked].min() >= 5


def test_at_least_one_word_is_hidden():
    ids = torch.tensor([[1, 7, 2, 0], [1, 2, 0, 0], [1, 8, 9, 2]])
    hidden, labels = mask_words(ids, mask_id=3, vocab_size=20, special=(0, 1, 2, 3, 4), probability=0.0)
    assert (labels != -100).sum(1).tolist() == [1, 0, 1]
    assert torch.equal(hidden[1], ids[1])
    # Special tokens may lie anywhere.
    ids = torch.full((300, 5), 7)
    hidden, _ = mask_words(ids, mask_id=9, vocab_size=12, special=(0, 9, 11), probability=1.0)
    assert set(hidden.unique().tolist()) == set(range(12)) - {0, 11}


def test_refused_in_words():
    with pytest.raises(InvalidArgument, match="tokens, tokens"):
        attention_mask_tokens(torch.rand(2, 3, 4), 2)
    with pytest.raises(InvalidArgument, match="from 1 to 5; got 6"):
        attention_mask_tokens(torch.rand(2, 5, 5), 6)
    with pytest.raises(InvalidArgument, match="no words to hide"):
        mask_words(torch.tensor([[1]]), mask_id=0, vocab_size=2, special=(0, 1))
