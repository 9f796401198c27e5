"""Padding of any content, on any side, changes nothing; a sequence of padding alone is zeros."""

import pytest
import torch

from heedful.nn import PrimalAttention, ksvd_loss

F64 = {"dtype": torch.float64}
HEADS, WIDTH, RANK = 3, 5, 4
EMBED = HEADS * WIDTH
FORMS = [
    {},
    {"sampling": "stride"},
    {"max_len": 5},
    {"max_len": 5, "sampling": "stride"},
    {"causal": "prefix"},
    {"causal": "cummean"},
]


def make(**more):
    return PrimalAttention(EMBED, HEADS, RANK, **({"max_len": 60, **F64} | more))


@pytest.mark.parametrize("more", FORMS, ids=str)
@pytest.mark.parametrize("content", [0.0, 1e3, torch.nan, torch.inf])
@pytest.mark.parametrize(("left", "right"), [(0, 7), (7, 0), (3, 2)])
def test_padding_changes_nothing(more, content, left, right):
    layer = make(**more)
    x = torch.randn(2, 11, EMBED, **F64, requires_grad=True)
    padded = torch.nn.functional.pad(x, (0, 0, left, right), value=content)
    hidden = torch.nn.functional.pad(torch.zeros(2, 11, dtype=torch.bool), (left, right), value=True)
    found, results = [], []
    for given, mask in ((x, None), (padded, hidden)):
        out = layer(given, mask)
        loss = [layer.ksvd_loss(), layer.ksvd_loss("batch")]
        if layer.causal != "prefix":
            loss += [layer.ksvd_loss(trace="data"), layer.ksvd_loss(penalty="kkt")]
            loss.append(layer.kkt_residual(given, mask).sum())
        if mask is not None:
            assert (out[mask] == 0).all()
            out = out[~mask].reshape(2, 11, EMBED)
        results.append(torch.cat([out.flatten(), torch.stack(loss)]))
        leaves = [x, *layer.parameters()]
        total = (out * torch.arange(EMBED)).sum() + sum(loss)
        found.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("more", FORMS, ids=str)
def test_sequences_do_not_meet(more):
    """A batch of unequal lengths is each sequence alone, and the loss the mean over them."""
    layer = make(**more)
    lengths = [11, 1, 7]
    x = torch.randn(3, 11, EMBED, **F64)
    hidden = torch.arange(11) >= torch.tensor(lengths)[:, None]
    out, loss = layer(x, hidden), layer.ksvd_loss()
    losses = []
    for b, n in enumerate(lengths):
        torch.testing.assert_close(out[b, :n], layer(x[b : b + 1, :n])[0], rtol=1e-10, atol=1e-10)
        losses.append(layer.ksvd_loss())
    torch.testing.assert_close(loss, torch.stack(losses).mean())


@pytest.mark.parametrize("more", FORMS, ids=str)
@pytest.mark.parametrize("content", [1.0, torch.nan])
def test_padding_alone_is_zeros(more, content):
    layer = make(**more)
    x = torch.randn(2, 7, EMBED, **F64)
    x[1] = content
    x.requires_grad_()
    hidden = torch.tensor([[False] * 7, [True] * 7])
    out, loss = layer(x, hidden), layer.ksvd_loss()
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[0], layer(x[:1])[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, layer.ksvd_loss())
    (out.sum() + loss).backward()
    assert (x.grad[1] == 0).all()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    out = layer(x, torch.ones(2, 7, dtype=torch.bool))
    assert (out == 0).all()
    assert [loss.item() for loss in (layer.ksvd_loss(), layer.ksvd_loss("batch"), ksvd_loss(layer))] == [0.0] * 3


def test_an_empty_sequence():
    for more in FORMS:
        layer = make(**more)
        assert layer(torch.zeros(2, 0, EMBED, **F64)).shape == (2, 0, EMBED)
        assert layer.ksvd_loss().item() == 0.0
        assert layer(torch.zeros(0, 5, EMBED, **F64)).shape == (0, 5, EMBED)
        assert layer.ksvd_loss().item() == 0.0
