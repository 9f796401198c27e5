"""Causal primal layers: nothing comes back from the future, and one token at a time is the same as all at once."""

import pytest
import torch

from heedful import InvalidArgument
from heedful.nn import PrimalAttention
from heedful.ops import linear

F64 = {"dtype": torch.float64}
HEADS, WIDTH, RANK = 3, 5, 4
EMBED = HEADS * WIDTH
CAUSAL = ["prefix", "cummean"]


def make(causal, max_len=40, rank_multi=2, **more):
    return PrimalAttention(EMBED, HEADS, RANK, max_len=max_len, rank_multi=rank_multi, causal=causal, **(F64 | more))


def by_hand(layer, x):
    """One sequence `[n, d]` by loops over heads and tokens."""
    n, rows = len(x), layer.w_e.shape[1]
    heads = torch.zeros(n, HEADS, WIDTH, **F64)
    for h in range(HEADS):
        part = slice(h * WIDTH, (h + 1) * WIDTH)
        both = layer.in_proj(x)
        query, key = both[:, :EMBED][:, part], both[:, EMBED:][:, part]
        for t in range(n):
            if layer.causal == "cummean":
                q, k = query[: t + 1].mean(0), key[: t + 1].mean(0)
                w_e, w_r = layer.w_e[h], layer.w_r[h]
            else:
                q, k = query[t], key[t]
                w_e = w_r = torch.zeros(WIDTH, RANK, **F64)
                for j in range(t + 1):
                    row = min(j * rows // layer.max_len, rows - 1)
                    w_e = w_e + torch.outer(x[j, part], layer.w_e[h, row])
                    w_r = w_r + torch.outer(x[j, part], layer.w_r[h, row])
            heads[t, h] = layer.head_proj(torch.cat(((q / q.norm()) @ w_e, (k / k.norm()) @ w_r)))
    return layer.out_proj(heads.flatten(1))


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("n", [1, 13])
def test_forward_is_the_plain_loops(causal, n):
    layer = make(causal)
    x = torch.randn(2, n, EMBED, **F64)
    wanted = torch.stack([by_hand(layer, row) for row in x])
    torch.testing.assert_close(layer(x), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", CAUSAL)
def test_loss_is_that_of_the_scores(causal):
    layer = make(causal)
    x = torch.randn(2, 13, EMBED, **F64)
    scores = layer.scores(x)
    layer(x)
    squares = ((layer.lam[:, None] * scores.e).square() + (layer.lam[:, None] * scores.r).square()).sum(-1)
    objective = squares.mean((1, 2)) / 2 - (layer.w_e * layer.w_r).sum((1, 2)).mean()
    torch.testing.assert_close(layer.ksvd_loss(), objective.square().mean())
    torch.testing.assert_close(layer.ksvd_loss("batch"), objective.mean().square())


@pytest.mark.parametrize("causal", CAUSAL)
def test_nothing_comes_from_the_future(causal):
    layer = make(causal)
    x = torch.randn(1, 11, EMBED, **F64, requires_grad=True)
    out = layer(x)
    for t in range(11):
        gradient = torch.autograd.grad(out[0, t].square().sum(), x, retain_graph=True)[0][0]
        assert (gradient[t + 1 :] == 0).all()
        assert (gradient[: t + 1].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("causal", CAUSAL)
def test_a_token_that_is_not_finite_spoils_no_earlier_one(causal):
    layer = make(causal)
    x = torch.randn(1, 11, EMBED, **F64)
    wanted = layer(x)[:, :6]
    x[0, 6] = torch.nan
    out = layer(x)
    assert torch.equal(out[:, :6], wanted)
    assert out[:, 6].isnan().all()


@pytest.mark.parametrize("causal", CAUSAL)
def test_streaming_is_parallel(causal):
    """257 tokens in float32, one by one and in pieces, from a state that does not grow."""
    layer = make(causal, max_len=300, dtype=torch.float32).eval()
    x = torch.randn(2, 257, EMBED)
    with torch.no_grad():
        wanted = layer(x)
        for cuts in ([1] * 257, [100, 1, 156]):
            state, outs, sizes = None, [], set()
            for piece in x.split(cuts, dim=1):
                out, state = layer.step(piece, state)
                outs.append(out)
                sizes.add(sum(t.numel() for part in state[:3] for t in (part if isinstance(part, tuple) else (part,))))
            found = torch.cat(outs, dim=1)
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-6
            assert len(sizes) == 1
            assert state.length == 257
            assert state.seen.tolist() == [257, 257]


@pytest.mark.parametrize("causal", CAUSAL)
def test_streaming_has_gradients(causal):
    layer = make(causal)
    x = torch.randn(2, 9, EMBED, **F64, requires_grad=True)
    first = layer.step(x[:, :4])
    found = torch.cat((first.output, layer.step(x[:, 4:], first.state).output), dim=1)
    probe = torch.randn_like(found)
    leaves = [x, layer.w_e, layer.in_proj.weight]
    wanted = torch.autograd.grad((layer(x) * probe).sum(), leaves)
    for a, b in zip(torch.autograd.grad((found * probe).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", CAUSAL)
def test_streaming_behind_padding(causal):
    """A prompt padded on the left, then tokens one by one, is the sequence without padding."""
    layer = make(causal)
    x = torch.randn(2, 9, EMBED, **F64)
    hidden = torch.arange(6).expand(2, -1) < torch.tensor([[0], [4]])
    prompt = layer.step(x[:, :6].masked_fill(hidden[..., None], torch.nan), None, hidden)
    rest = layer.step(x[:, 6:], prompt.state)
    assert (prompt.output[1, :4] == 0).all()
    assert rest.state.seen.tolist() == [9, 5]
    alone = layer(x[1:, 4:])[0]
    torch.testing.assert_close(torch.cat((prompt.output[1, 4:], rest.output[1])), alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sampling", ["stride", "segment_mean"])
def test_last_row_of_the_prefix_form_is_that_of_the_whole(sampling):
    layer = make("prefix", max_len=19, rank_multi=19)
    whole = PrimalAttention(EMBED, HEADS, RANK, max_len=19, rank_multi=19, sampling=sampling, **F64)
    whole.load_state_dict(layer.state_dict())
    x = torch.randn(2, 19, EMBED, **F64)
    torch.testing.assert_close(layer(x)[:, -1], whole(x)[:, -1], rtol=1e-6, atol=1e-6)
    assert float((layer(x)[:, 0] - whole(x)[:, 0]).detach().abs().max()) > 1e-3


def test_chunks_of_any_size_agree(monkeypatch):
    layer = make("prefix", max_len=300, dtype=torch.float32)
    x = torch.randn(2, 257, EMBED)
    outs = []
    for size in (16, 64, 257):
        monkeypatch.setattr(linear, "CHUNK", size)
        outs.append(layer(x))
    for out in outs[1:]:
        assert float((out - outs[0]).detach().abs().max() / outs[0].detach().abs().max()) < 1e-5


def test_the_chunks_of_the_operator_serve(monkeypatch):
    """No second scan: the prefix form runs what causal feature maps run."""
    calls = []
    inner = linear._causal
    monkeypatch.setattr(linear, "_causal", lambda *given: calls.append(given[0].shape) or inner(*given))
    layer = make("prefix")
    layer(torch.randn(2, 13, EMBED, **F64))
    assert calls == [(2, HEADS, 13, WIDTH)] * 2
    layer.step(torch.randn(2, 1, EMBED, **F64))
    assert len(calls) == 4


def test_the_fused_chunks_of_the_operator_serve(monkeypatch):
    pytest.importorskip("triton", reason="fused kernels need triton, which exists for Linux alone")
    layer = make("prefix", dtype=torch.float32)
    x, hidden = torch.randn(2, 13, EMBED), torch.arange(13).expand(2, -1) >= torch.tensor([[13], [8]])
    with torch.no_grad():
        wanted = layer(x, hidden)
        monkeypatch.setattr(linear, "FUSED", frozenset({"cpu"}))
        torch.testing.assert_close(layer(x, hidden), wanted, rtol=1e-5, atol=1e-6)


def test_bad_steps_are_refused():
    layer = make("prefix", max_len=4)
    x = torch.randn(2, 3, EMBED, **F64)
    state = layer.step(x).state
    with pytest.raises(InvalidArgument, match="weights for max_len=4 positions; got 6"):
        layer.step(x, state)
    with pytest.raises(InvalidArgument, match="the state is of 2 sequences; x has 1"):
        layer.step(x[:1, :1], state)
    with pytest.raises(InvalidArgument, match="at least one token"):
        layer.step(x[:, :0], state)
