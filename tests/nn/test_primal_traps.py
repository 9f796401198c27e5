"""Where the authors' code goes wrong: their behaviour in a few lines, the property it breaks, and our layer keeping it."""

import pytest
import torch

from heedful.nn import PrimalAttention
from heedful.ops import primal as ops

F64 = {"dtype": torch.float64}
EMBED, HEADS, RANK = 15, 3, 4


def their_positions(length, rows):
    return torch.linspace(0, length - 1, rows, dtype=torch.int64)


def their_sample(x, rows):
    return x[:, their_positions(x.shape[1], rows)]


def their_objective(e, r, w_e, w_r, lam):
    """Means over every position, padding included."""
    squares = ((lam[:, None] * e).square() + (lam[:, None] * r).square()).sum(-1)
    return squares.mean((1, 2)) / 2 - (w_e * w_r).sum((1, 2)).mean()


def their_means(q):
    """Means over the past `[B, n, d]`, padding included."""
    return q.cumsum(1) / torch.arange(1, q.shape[1] + 1)[:, None]


def padded(x, left=0, right=0):
    hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
    return (torch.nn.functional.pad(t, (*((0, 0) * (t.dim() - 2)), left, right), value=1) for t in (x, hidden))


def test_padding_is_not_sampled():
    x = torch.randn(2, 11, EMBED, **F64)
    long, hidden = padded(x, right=9)
    assert not torch.equal(their_sample(long, 5), their_sample(x, 5))
    for how in ("stride", "segment_mean"):
        torch.testing.assert_close(ops.sample(long, 5, how, ~hidden), ops.sample(x, 5, how))


def test_padding_has_no_part_in_the_loss():
    layer = PrimalAttention(EMBED, HEADS, RANK, max_len=11, **F64)
    x = torch.randn(2, 11, EMBED, **F64)
    long, hidden = padded(x, right=9)
    layer(x)
    ours = ops.objective(layer._last, layer.lam)
    rest = layer.w_e, layer.w_r, layer.lam
    scores = layer.scores(x)
    torch.testing.assert_close(their_objective(scores.e, scores.r, *rest), ours)
    # The same tokens with the same sample, and nine positions that hold nothing.
    empty = (torch.nn.functional.pad(part, (0, 0, 0, 9)) for part in (scores.e, scores.r))
    assert float((their_objective(*empty, *rest) - ours).detach().abs().min()) > 1e-2
    layer(long, hidden)
    torch.testing.assert_close(ops.objective(layer._last, layer.lam), ours)


def test_padding_has_no_part_in_the_mean_over_the_past():
    layer = PrimalAttention(EMBED, HEADS, RANK, causal="cummean", **F64)
    x = torch.randn(2, 11, EMBED, **F64)
    long, hidden = padded(x, left=9)
    queries, whole = layer.in_proj(x)[..., :EMBED], layer.in_proj(long)[..., :EMBED]
    assert float((their_means(whole)[:, 9:] - their_means(queries)).detach().abs().max()) > 1e-2
    torch.testing.assert_close(layer(long, hidden)[:, 9:], layer(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer._queries_keys(x, None)[0].transpose(1, 2).flatten(-2), their_means(queries))


def test_generation_remembers():
    """Their language model ignores its incremental state: the mean starts anew at every token."""
    layer = PrimalAttention(EMBED, HEADS, RANK, causal="cummean", **F64)
    x = torch.randn(2, 7, EMBED, **F64)
    wanted = layer(x)
    theirs = torch.cat([layer(token) for token in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(theirs[:, 0], wanted[:, 0])
    assert float((theirs - wanted)[:, 1:].detach().abs().max()) > 1e-3
    state, outs = None, []
    for token in x.split(1, dim=1):
        out, state = layer.step(token, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), wanted, rtol=1e-10, atol=1e-10)


def test_any_length_is_taken():
    """Their index has rank * rank_multi entries even where the weights have fewer rows, or is left out for all tokens."""
    layer = PrimalAttention(EMBED, HEADS, RANK, max_len=9, rank_multi=5, **F64)
    assert layer.w_e.shape[1] == 9
    x = torch.randn(2, 9, EMBED, **F64)
    with pytest.raises(RuntimeError, match="size"):
        layer._heads(their_sample(x, RANK * 5)).mT @ layer.w_e
    with pytest.raises(RuntimeError, match="size"):
        layer._heads(x[:, :6]).mT @ layer.w_e
    for n in (1, 6, 9, 20):
        assert layer(torch.randn(2, n, EMBED, **F64)).shape == (2, n, EMBED)


def test_positions_are_whole_numbers():
    """A position rounded in floating point misses floor(m (n - 1) / (n' - 1)); it also waits for the host on a GPU."""
    missed = []
    for n, rows in ((43, 39), (46, 34), (51, 23), (55, 27)):
        wanted = [m * (n - 1) // (rows - 1) for m in range(rows)]
        missed.append(their_positions(n, rows).tolist() != wanted)
        tokens = torch.arange(n, **F64).reshape(1, n, 1)
        assert ops.sample(tokens, rows, "stride").flatten().tolist() == wanted
        long, hidden = padded(tokens, left=4, right=6)
        assert ops.sample(long, rows, "stride", ~hidden).flatten().tolist() == wanted
    assert any(missed)


def test_orthonormal_columns_per_head_are_another_start():
    """torch flattens the trailing axes: whoever makes columns orthonormal instead starts with J near s / 3, not 1/3."""
    layer = PrimalAttention(64, 4, 20, max_len=50)
    x = torch.randn(8, 50, 64)
    layer(x)
    ours = ops.objective(layer._last, layer.lam).mean().item()
    with torch.no_grad():
        for weight in (layer.w_e, layer.w_r):
            for head in weight:
                torch.nn.init.orthogonal_(head)
    layer(x)
    theirs = ops.objective(layer._last, layer.lam).mean().item()
    assert 0.2 < ours < 0.5
    assert 20 / 4 < theirs < 20 / 2
