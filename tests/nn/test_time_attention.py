"""Attention between events at times, against a second form of it: loops over pairs of events in float64."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from heedful import InvalidArgument
from heedful.nn import _timing, time
from heedful.nn._frequencies import number
from timed import F64, INTERACTIONS, INVARIANT, B, E, H, M, N, made, moments

NAN = float("nan")


def drawn(*shape):
    return torch.randn(*shape, **F64)


# The second form: one pair of events after the other.


def features(layer, time):
    rates = layer.encoding.rates()
    parts = torch.stack(((2 * math.pi * rates * time).cos(), (2 * math.pi * rates * time).sin()), dim=-1)
    return parts.flatten() / math.sqrt(len(rates))


def joined(layer, event, time):
    if layer.interaction in INVARIANT:
        return event
    known = features(layer, time)
    if layer.interaction == "add":
        return event + layer.joining.time_map.weight @ known
    both = torch.cat((event, known))
    if layer.interaction == "concat":
        return both
    inner = both
    for at in (0, 2):
        inner = (layer.joining.time_map[at].weight @ inner + layer.joining.time_map[at].bias).clamp(min=0)
    inner = layer.joining.time_map[4].weight @ inner + layer.joining.time_map[4].bias
    return inner + layer.joining.skip.weight @ both if layer.interaction == "residual" else inner


def turned(x, angles):
    first, second = x.chunk(2)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()))


def bucket(elapsed, layer):
    unit, step = number(layer.constants).tolist()
    place = min(int(math.log2(1 + abs(float(elapsed.detach())) / unit) / step), layer.buckets // 2 - 1)
    return place + layer.buckets // 2 if elapsed < 0 else place


def score(layer, head, query, key, elapsed):
    angles = 0 if layer.encoding is None else 2 * math.pi * layer.encoding.rates() * elapsed
    if layer.interaction == "rotary":
        return turned(query, angles[head::H]) @ key / math.sqrt(len(query))
    plain = query @ key / math.sqrt(len(query))
    if layer.interaction == "bias":
        return plain + layer.cosine[head] @ angles.cos() + layer.sine[head] @ angles.sin()
    if layer.interaction == "decay":
        return plain - softplus(layer.decay[head]) / number(layer.constants)[head] * elapsed
    if layer.interaction == "bucket":
        return plain + layer.table[head, bucket(elapsed, layer)]
    return plain


def by_pairs(layer, query, times, key, key_times, keep, wanted):
    """The layer's output for the `wanted` queries `[B, m]`, where `keep` `[B, H, m, n]` says who sees whom."""
    rows = []
    weights = layer.in_proj_weight.unflatten(0, (3, H, -1))
    biases = layer.in_proj_bias.unflatten(0, (3, H, -1))
    for batch, i in wanted.nonzero().tolist():
        heads = []
        for head in range(H):
            q = weights[0, head] @ joined(layer, query[batch, i], times[batch, i]) + biases[0, head]
            scores, values = [], []
            for j in keep[batch, head, i].nonzero()[:, 0].tolist():
                other = joined(layer, key[batch, j], key_times[batch, j])
                elapsed = times[batch, i] - key_times[batch, j]
                k, v = (weights[part, head] @ other + biases[part, head] for part in (1, 2))
                if layer.rotate_values:
                    v = turned(v, -2 * math.pi * layer.encoding.rates()[head::H] * elapsed)
                scores.append(score(layer, head, q, k, elapsed))
                values.append(v)
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values) if scores else torch.zeros_like(q))
        rows.append(layer.out_proj.weight @ torch.cat(heads) + layer.out_proj.bias)
    return torch.stack(rows)


def both_ways(layer, query, times, key, key_times, keep, call, rows):
    """Outputs at `rows` and all gradients, by the layer and by pairs."""
    found = []
    parameters = dict(layer.named_parameters())
    for form in ("layer", "pairs"):
        leaves = {"query": query, "times": times} | ({} if key is None else {"key": key, "key_times": key_times})
        leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        if form == "layer":
            out = layer(**leaves, **call)[rows]
        else:
            events = {"key": leaves.get("key", leaves["query"]), "key_times": leaves.get("key_times", leaves["times"])}
            out = by_pairs(layer, leaves["query"], leaves["times"], **events, keep=keep, wanted=rows)
        given = leaves | parameters
        probe = torch.linspace(-1, 1, out.numel(), **F64).reshape(out.shape).sin()
        gradients = torch.autograd.grad((out * probe).sum(), list(given.values()), allow_unused=True)
        found.append((out, dict(zip(given, gradients, strict=True))))
    return found


def assert_alike(found, leaves_alone, bound=1e-9):
    (out, gradients), (wanted, wanted_gradients) = found
    torch.testing.assert_close(out, wanted, rtol=bound, atol=bound)
    for name, gradient in gradients.items():
        expected = wanted_gradients[name]
        if expected is None or gradient is None:
            # Nothing but times may be left out on one side alone, where they cancel.
            assert name in leaves_alone
            assert all(x is None or float(x.abs().max()) < bound for x in (gradient, expected))
            continue
        torch.testing.assert_close(
            gradient, expected, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", INTERACTIONS)
def test_events_among_themselves(name):
    """Causal, the second sequence padded with garbage."""
    layer = made(name)
    x, times = drawn(B, N, E), moments(B, N)
    padding = torch.arange(N) >= torch.tensor([N, 4])[:, None]
    times[1, 4], times[1, 5], times[1, 6] = NAN, 1e30, -math.inf
    x[1, 5] = 1e30
    keep = (torch.ones(N, N).tril().bool() & ~padding[:, None, None, :]).expand(B, H, N, N)
    call = {"key_padding_mask": padding, "is_causal": True}
    found = both_ways(layer, x, times, None, None, keep, call, ~padding)
    assert_alike(found, {"times"})
    torch.testing.assert_close(found[0][1]["query"][padding], torch.zeros(3, E, **F64))


@pytest.mark.parametrize("name", INTERACTIONS)
def test_queries_at_times_of_their_own(name):
    """A mask for each head, sequences padded from the left, an event that nobody sees, and a query that sees nothing."""
    layer = made(name)
    query, times, key, key_times = drawn(B, M, E), 9 * torch.rand(B, M, **F64), drawn(B, N, E), moments(B, N)
    hidden = torch.rand(B * H, M, N) > 0.6
    hidden[:, :, 4], hidden[:, 3] = True, True
    padding = torch.arange(N) < torch.tensor([0, 2])[:, None]
    key_times[:, 4], key_times[1, 0], key_times[1, 1] = NAN, 1e30, NAN
    key[:, 4] = 1e30
    keep = ~hidden.unflatten(0, (B, H)) & ~padding[:, None, None, :]
    call = {"key_padding_mask": padding, "attn_mask": hidden}
    found = both_ways(layer, query, times, key, key_times, keep, call, torch.ones(B, M).bool())
    assert_alike(found, {"times", "key_times"})
    torch.testing.assert_close(found[0][0].unflatten(0, (B, M))[:, 3], layer.out_proj.bias.expand(B, E))
    again = layer.coefficients(query, times, key, key_times, **call)
    assert again.shape == (B, H, M, N)
    assert bool((again[~keep] == 0).all())
    torch.testing.assert_close(again.sum(-1), keep.any(-1).double())


@pytest.mark.parametrize("name", INTERACTIONS)
def test_what_a_query_does_not_see_never_matters(name):
    """Later events and times change earlier outputs and gradients by exactly nothing."""
    layer, x, times = made(name, dtype=torch.float32), torch.randn(B, N, E), moments(B, N)
    found = []
    for filler in (None, 1.0, -7.0, 1e12):
        other, late = x.clone(), times.clone()
        if filler is not None:
            other[:, 4:], late[:, 4:] = math.copysign(2, filler), filler
        out = layer(other, late, is_causal=True)[:, :4]
        found.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", INTERACTIONS)
def test_times_that_are_not_finite(name):
    """An error where values may be looked at, and NaN for who sees them where they may not."""
    layer, x, times = made(name, dtype=torch.float32), torch.randn(1, N, E), moments(1, N)
    times[0, 3] = NAN
    with pytest.raises(
        InvalidArgument, match="times must be finite wherever they count; got nan in sequence 0 at place 3"
    ):
        layer(x, times, is_causal=True)
    with pytest.raises(InvalidArgument, match="key_times must be finite"):
        layer(x, times.nan_to_num(), x, times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_timing, "readable", lambda x: False)
        patch.setattr(time, "readable", lambda x: False)
        out = layer(x, times, is_causal=True)
    assert bool(out[:, :3].isfinite().all())
    assert bool(out[:, 3:].isnan().all())


# Numbers.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["rotate_values", "bias", "decay"])
def test_coordinates_are_the_explicit_bias(name, dtype):
    """Folded into coordinates, or a bias of n x n numbers: the same, with causal and padding masks (sheet, check 7)."""
    torch.manual_seed(1)
    n, padding = 37, torch.arange(37) >= torch.tensor([37, 29])[:, None]
    layer, x, times = made(name, 24, 4, dtype), torch.randn(2, n, 24, dtype=dtype), moments(2, n)
    bound = 1e-5 if dtype == torch.float32 else 1e-11
    parameters = list(layer.parameters())
    out = layer(x, times, key_padding_mask=padding, is_causal=True)[~padding]
    found = [out, *torch.autograd.grad(out.square().mean(), parameters)]
    wide = layer.double() if dtype == torch.float32 else layer
    wanted = explicit(wide, x.double(), times, padding)[~padding]
    wanted = [wanted, *torch.autograd.grad(wanted.square().mean(), list(wide.parameters()))]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=bound)


def explicit(layer, x, times, padding):
    """All pairs at once, with everything that depends on them written out."""
    heads = layer.num_heads
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    elapsed = (times[:, :, None] - times[:, None, :])[:, None]
    scale = q.shape[-1] ** -0.5
    if layer.interaction == "decay":
        scores = q @ k.mT * scale - layer.decays()[:, None, None] * elapsed
    else:
        angles = 2 * math.pi * layer.encoding.rates() * elapsed[..., None]
        if layer.interaction == "bias":
            amplitudes = [a[:, None, None] for a in (layer.cosine, layer.sine)]
            added = (amplitudes[0] * angles.cos() + amplitudes[1] * angles.sin()).sum(-1)
            scores = q @ k.mT * scale + added
        else:
            angles = angles.squeeze(1).unflatten(-1, (-1, heads)).permute(0, 4, 1, 2, 3)  # [B, H, n, n, D / 2]
            pairs = [torch.complex(*part.chunk(2, -1)) for part in (q, k, v)]
            turns = torch.complex(angles.cos(), angles.sin())
            scores = torch.einsum("bhir,bhijr,bhjr->bhij", pairs[0], turns, pairs[1].conj()).real * scale
    keep = torch.ones(x.shape[1], x.shape[1]).tril().bool() & ~padding[:, None, None, :]
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    if layer.rotate_values:
        out = torch.einsum("bhij,bhijr,bhjr->bhir", weights.to(turns.dtype), turns.conj(), pairs[2])
        out = torch.cat((out.real, out.imag), -1)
    else:
        out = weights @ v
    return layer.out_proj(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("name", INTERACTIONS)
def test_a_shift_of_all_times(name):
    """A billion seconds change nothing where only elapsed times count, and something where features of raw times are joined."""
    layer, x, times = made(name, dtype=torch.float32), torch.randn(2, 19, E), (64 * moments(2, 19)).round() / 64
    call = {"is_causal": True, "key_padding_mask": torch.arange(19) >= torch.tensor([19, 11])[:, None]}
    out, late = layer(x, times, **call), layer(x, times + 1e9, **call)
    error = float((out - late).abs().max())
    assert error < 1e-5 if name in INVARIANT else error > 1e-2
    whole = (1000 * times).long()
    torch.testing.assert_close(
        layer(x, whole + 10**12, **call), layer(x, whole, **call), rtol=0, atol=1e-5 if name in INVARIANT else 9
    )


@pytest.mark.parametrize("name", INTERACTIONS)
def test_a_change_of_unit(name):
    """Times and the data that the layer is calibrated with, both in another unit (sheet, check 8)."""
    x, times = torch.randn(2, 19, E), moments(2, 19)
    outs = [
        made(name, dtype=torch.float32).calibrate(unit * times)(x, unit * times, is_causal=True)
        for unit in (1.0, 86400.0)
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", INTERACTIONS)
def test_padding_changes_nothing(name):
    layer, x, times = made(name, dtype=torch.float32), torch.randn(1, N, E), moments(1, N)
    alone = layer(x, times, is_causal=True)
    longer = torch.cat((x, torch.randn(1, 4, E)), 1), torch.cat((times, torch.zeros(1, 4, **F64)), 1)
    padding = torch.arange(N + 4)[None] >= N
    torch.testing.assert_close(
        layer(*longer, is_causal=True, key_padding_mask=padding)[:, :N], alone, rtol=0, atol=1e-6
    )


def test_equal_times_keep_the_order_of_the_input():
    for name in INTERACTIONS:
        weights = made(name).coefficients(drawn(1, N, E), torch.zeros(1, N, dtype=torch.int64), is_causal=True)
        assert bool((weights.triu(1) == 0).all())
        assert bool((weights.tril() > 0).sum() == H * N * (N + 1) / 2)
