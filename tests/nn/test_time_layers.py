"""Attention at times inside blocks and encoders: two streams, saving, precision, implementations, and what is refused."""

import math
import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from heedful import InvalidArgument, Unsupported, attend, masks
from heedful.lens import observe
from heedful.lens.symmetry import check_equivariance
from heedful.nn import (
    Attention,
    Block,
    BochnerTime,
    Encoder,
    LinearTime,
    MercerTime,
    PositionTime,
    Primal,
    TimeAttention,
    Timed,
)
from timed import F64, INTERACTIONS, INVARIANT, E, H, made, moments


def timed(name):
    return Timed("rotary", rotate_values=True) if name == "rotate_values" else Timed(name)


# Two streams: events attend to events, targets attend to events, and no target is a key.


class Streams(torch.nn.Module):
    """Two blocks of events, and two of queries at times of their own that read the states before each."""

    def __init__(self, name, embed_dim=E, heads=H):
        super().__init__()
        torch.manual_seed(3)
        self.events = torch.nn.ModuleList(Block(embed_dim, heads, 24, kernel=timed(name)) for _ in range(2))
        self.targets = torch.nn.ModuleList(Block(embed_dim, heads, 24, kernel=timed(name)) for _ in range(2))

    def forward(self, x, times, targets, target_times, padding=None):
        """All targets at once, the i-th after event i."""
        for own, other in zip(self.events, self.targets, strict=True):
            call = {"key": x, "key_times": times, "key_padding_mask": padding, "is_causal": True}
            targets = other(targets, times=target_times, **call)
            x = own(x, times=times, key_padding_mask=padding, is_causal=True)
        return targets

    def of_prefix(self, x, times, target, target_time):
        """One target `[B, 1, E]` behind a prefix that is read anew."""
        for own, other in zip(self.events, self.targets, strict=True):
            target = other(target, times=target_time, key=x, key_times=times)
            x = own(x, times=times, is_causal=True)
        return target


@pytest.mark.parametrize("name", INTERACTIONS)
def test_two_streams_are_each_prefix_read_anew(name):
    """Sheet, check 9: for every target, to 1e-5 in float32."""
    streams, n = Streams(name).eval(), 23
    x, targets, times = torch.randn(2, n, E), torch.randn(2, n, E), moments(2, n) + 1e9
    target_times = times + torch.rand(2, n, **F64)
    lengths = torch.tensor([n, 17])
    padding = torch.arange(n) >= lengths[:, None]
    garbage = times.masked_fill(padding, math.nan)
    with torch.no_grad():
        found = streams(x, garbage, targets, target_times.masked_fill(padding, math.nan), padding)
        for i in range(n):
            wanted = streams.of_prefix(
                x[:, : i + 1], times[:, : i + 1], targets[:, i : i + 1], target_times[:, i : i + 1]
            )
            real = i < lengths
            torch.testing.assert_close(found[real, i], wanted[real, 0], rtol=0, atol=1e-5)


def test_two_streams_are_ten_times_faster_than_windows():
    """100 events: one pass against a batch of all prefixes as windows of the same length, as the paper's code has them."""
    streams, batch, n, size = Streams("rotary", 32, 2).eval(), 3, 100, 32
    x, targets, times = torch.randn(batch, n, size), torch.randn(batch, n, size), moments(batch, n)
    target_times = times + 0.5

    def windows():
        wide, at = (part.repeat_interleave(n, dim=0) for part in (x, times))  # one of each prefix
        padding = (torch.arange(n) > torch.arange(n)[:, None]).repeat(batch, 1)
        target, then = targets.flatten(0, 1)[:, None], target_times.flatten()[:, None]
        for own, other in zip(streams.events, streams.targets, strict=True):
            target = other(target, times=then, key=wide, key_times=at, key_padding_mask=padding)
            wide = own(wide, times=at, key_padding_mask=padding, is_causal=True)
        return target.unflatten(0, (batch, n))[:, :, 0]

    def at_once():
        return streams(x, times, targets, target_times)

    with torch.no_grad():
        torch.testing.assert_close(at_once(), windows(), rtol=0, atol=1e-5)
        fast, slow = seconds(at_once, 7), seconds(windows, 2)
    print(
        f"{batch} x {n} targets: {fast * 1e3:.1f} ms at once, {slow * 1e3:.0f} ms as windows, {slow / fast:.0f} times"
    )
    assert slow >= 10 * fast


def seconds(call, times):
    """The least processor time of several calls."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


# Precision.


@pytest.mark.parametrize("size", [16, 12])
def test_a_bias_in_bfloat16_is_added_without_rounding(size):
    """Scales that are a power of two and others: beside a bias of 60 between keys, 8 bits of a sum would be off by a half."""
    layer = made("bias", 4 * size, 4, torch.bfloat16, encoding=BochnerTime(10))
    with torch.no_grad():
        layer.cosine.mul_(60)
    x, times = torch.randn(2, 37, 4 * size, dtype=torch.bfloat16), moments(2, 37)
    with torch.no_grad():
        call = layer._call(x, times, None, None, None, None, True)
        left, right = call.mask.factors
        plan = layer.plan(x, times, is_causal=True)
        assert plan.chosen == "sdpa"
        out = attend(call.query, call.key, call.value, call.mask)
        wide = [part.double() for part in (call.query, call.key, call.value)]
        bias = (left.double() @ right.double().mT).masked_fill(~torch.ones(37, 37).tril().bool(), -math.inf)
        assert float(bias.clamp(min=-1e9).max()) > 60
        wanted = sdpa(*wide, attn_mask=bias)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_decay_over_thousands_of_time_constants(dtype):
    """Unix seconds, rates up to 1000 per span: the parts of a column sum to what 24 bits hold."""
    layer = made("decay", dtype=dtype)
    times = 1.4e9 + 1e4 * torch.rand(2, 37, **F64).sort(-1).values
    layer.calibrate(times)
    x = torch.randn(2, 37, E, dtype=dtype)
    assert float(layer.decays()[0].detach() * 1e4) > 1000
    assert layer.plan(x, times, is_causal=True).chosen == "sdpa"
    found = layer.coefficients(x, times, is_causal=True).double()
    call = layer._call(x, times, None, None, None, None, True)
    elapsed = (times[:, :, None] - times[:, None, :])[:, None]
    scores = call.query.double() @ call.key.double().mT * (E // H) ** -0.5
    scores = scores - layer.decays()[:, None, None] * elapsed
    wanted = scores.masked_fill(~torch.ones(37, 37).tril().bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3 if dtype == torch.float32 else 2e-2)
    values = attend(call.query, call.key, call.value, call.mask).double()
    torch.testing.assert_close(
        values, wanted @ call.value.double(), rtol=0, atol=2e-3 if dtype == torch.float32 else 2e-2
    )


@pytest.mark.parametrize("name", INTERACTIONS)
def test_under_autocast_and_in_16_bit(name):
    """Phases are reduced in float64 whatever the model computes in: Unix times cost no more precision than times from zero."""
    x, times = torch.randn(2, 101, E), (64 * moments(2, 101)).round() / 64
    layer = made(name, dtype=torch.float32).calibrate(times)

    def run(x, shift=0.0):
        out = layer(x, times + shift, is_causal=True)
        probe = torch.linspace(0, 9, out.numel()).sin().view_as(out)
        return [out, *torch.autograd.grad((out.float() * probe).sum(), list(layer.parameters()))]

    wanted = run(x)
    with torch.autocast("cpu", torch.bfloat16):
        near, far = run(x), run(x, 1e9)
    layer.bfloat16()
    half = run(x.bfloat16())
    assert near[0].dtype == half[0].dtype == torch.bfloat16
    for found in (near, half):
        for one, other in zip(found, wanted, strict=True):
            assert float((one.float() - other).detach().norm()) < 0.05 * max(1.0, float(other.detach().norm()))
    if name in INVARIANT:
        assert torch.equal(near[0], far[0])


# Implementations.


def test_no_bias_of_all_pairs_is_formed():
    """The plan: torch's fused attention on 2 r further coordinates, memory that grows with n, for masks of every kind."""
    layer = TimeAttention(64, 2, "bias")
    assert layer.cosine.shape == (2, 16)
    bytes_of = {}
    for n in (512, 1024):
        x, times = torch.randn(1, n, 64), torch.arange(n)[None]
        plan = layer.plan(x, times, is_causal=True)
        assert plan.chosen == "sdpa"
        bytes_of[n] = next(one.cost.bytes for one in plan.considered if one.name == "sdpa")
    assert bytes_of[1024] == 2 * bytes_of[512] < 2 * 1024**2 * 4
    for name in ("rotary", "decay"):
        assert TimeAttention(64, 2, name).plan(x, times, is_causal=True).chosen == "sdpa"
    assert TimeAttention(64, 2, "bias", impl="stream").plan(x, times).chosen == "stream"


@pytest.mark.parametrize("name", ["rotate_values", "bias", "decay", "bucket"])
def test_implementations_agree(name):
    x, times = torch.randn(2, 19, E, **F64), moments(2, 19)
    padding = torch.arange(19) >= torch.tensor([19, 11])[:, None]
    outs = [
        made(name, impl=impl)(x, times, key_padding_mask=padding, is_causal=True)
        for impl in ("sdpa", "stream", "reference")
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-11, atol=1e-11)


def test_without_time_it_is_attention():
    """At one time all rotations are alike, and biases add the same to all: `nn.Attention` with the same weights."""
    x, times = torch.randn(2, 19, E, **F64), torch.full((2, 19), 1.7e9, **F64)
    plain = Attention(E, H, **F64)
    for name in INVARIANT:
        layer = made(name)
        layer.load_state_dict({**layer.state_dict(), **plain.state_dict()})
        wanted = plain(x, need_weights=False, is_causal=True)[0]
        torch.testing.assert_close(layer(x, times, is_causal=True), wanted, rtol=1e-9, atol=1e-9)


def test_dropout_acts_while_training_alone():
    layer, x, times = TimeAttention(E, H, "bias", dropout=0.5), torch.randn(2, 19, E), moments(2, 19)
    assert not torch.equal(layer(x, times), layer(x, times))
    layer.eval()
    assert torch.equal(layer(x, times), layer(x, times))


# Encodings.


def test_encodings_that_are_given():
    x, times = torch.randn(2, 7, E), moments(2, 7)
    for encoding in (BochnerTime(E, "mixture", components=2), MercerTime(2, 3)):
        assert TimeAttention(E, H, "rotary", encoding=encoding)(x, times).shape == x.shape
    assert TimeAttention(E, H, "bias", encoding=MercerTime(["1d"], 5)).sine.shape == (H, 5)
    for encoding in (LinearTime(5), MercerTime(2, 3), PositionTime(6), BochnerTime(4, init="authors")):
        for name in ("add", "concat", "concat_mlp", "residual"):
            assert TimeAttention(E, H, name, encoding=encoding)(x, times).shape == x.shape
    places = TimeAttention(E, H, "concat", encoding=PositionTime(6)).eval()
    assert torch.equal(places(x, times), places(x, 2 * times))


def test_frequencies_that_are_drawn_anew_are_the_same_on_both_sides():
    """Queries that are the events: whether as such or as events of their own, one draw serves both."""
    encoding = BochnerTime(6, "normal", sampler="random", resample="train")
    layer = TimeAttention(E, H, "concat", encoding=encoding)
    x, times = torch.randn(2, 7, E), moments(2, 7)
    draws = []
    for key in ({}, {"key": x, "key_times": times}):
        torch.manual_seed(5)
        draws.append(layer(x, times, **key))
    torch.testing.assert_close(*draws)
    assert not torch.equal(layer(x, times), layer(x, times))
    with pytest.raises(InvalidArgument, match="give resample='never'"):
        TimeAttention(6, 1, "rotary", encoding=encoding)


def test_calibration():
    times = torch.tensor([[0.0, 10.0, 1000.0]], **F64)
    assert TimeAttention(E, 1, "bias").calibrate(times).encoding.periods().max() == 4000
    decays = TimeAttention(E, 3, "decay").calibrate(times).decays().detach()
    assert float(decays[-1]) == pytest.approx(1 / 1000)
    assert float(decays[0]) > float(decays[1]) > float(decays[2])
    layer = TimeAttention(E, 1, "bucket", buckets=8).calibrate(times)
    torch.nn.init.normal_(layer.table)
    weights = layer.coefficients(torch.zeros(1, 3, E), times)[0, 0]
    ratios = (weights[2] / weights[2, 2]).log()
    # Zero, 990 (the bucket before the last) and 1000 (where the last begins) after the events.
    torch.testing.assert_close(ratios, layer.table[0, [3, 2, 0]] - layer.table[0, 0])
    with pytest.raises(InvalidArgument, match="interaction='decay' has rates of decay; this layer has 'bucket'"):
        layer.decays()


# Blocks and encoders.


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_block_is_its_layer_with_residual_connections(norm_first):
    block = Block(E, H, 0, kernel=Timed("bias"), norm_first=norm_first)
    x, times, key, key_times = torch.randn(2, 5, E), moments(2, 5), torch.randn(2, 7, E), moments(2, 7)
    first = block.norm1 if norm_first else torch.nn.Identity()
    wanted = x + block.self_attn(first(x), times, first(key), key_times)
    wanted = wanted if norm_first else block.norm1(wanted)
    torch.testing.assert_close(block(x, times=times, key=key, key_times=key_times), wanted)


def test_a_block_of_a_kernel_reads_another_key():
    block, x, key = Block(E, H), torch.randn(2, 5, E), torch.randn(2, 7, E)
    wanted = x + block.self_attn(block.norm1(x), block.norm1(key), need_weights=False)[0]
    torch.testing.assert_close(block(x, key=key), block._evolve(wanted))


@pytest.mark.parametrize("norm_first", [True, False])
def test_tokens_of_a_block_may_see_the_first_ones_alone(norm_first):
    block, x = Block(E, H, norm_first=norm_first), torch.randn(2, 7, E, requires_grad=True)
    found = block(x, seen=3)
    torch.testing.assert_close(found, block(x, key=x[:, :3]))
    # What is not seen does not matter to others, whatever it is.
    garbage = x.detach().clone()
    garbage[:, 5] = torch.nan
    torch.testing.assert_close(block(garbage, seen=3)[:, [0, 1, 2, 3, 4, 6]], found[:, [0, 1, 2, 3, 4, 6]])
    with pytest.raises(InvalidArgument, match="7 tokens"):
        block(x, seen=8)
    with pytest.raises(InvalidArgument, match="key as well"):
        block(x, key=x, seen=3)
    with pytest.raises(Unsupported, match="seen"):
        Block(E, H, kernel="primal", max_len=9)(x, seen=3)


def test_an_encoder_hands_times_to_the_layers_that_read_them(tmp_path):
    encoding = BochnerTime(6, periods=[7.3])
    encoder = Encoder(
        E, H, [Timed("bias", encoding=encoding), "softmax", Timed("concat_mlp", encoding=encoding)]
    ).eval()
    x, times = torch.randn(2, 7, E), moments(2, 7)
    wanted = encoder.layers[0](x, times=times, is_causal=True)
    wanted = encoder.layers[2](encoder.layers[1](wanted, is_causal=True), times=times, is_causal=True)
    out = encoder(x, times=times, is_causal=True)
    torch.testing.assert_close(out, encoder.last_norm(wanted))
    own = [layer.self_attn.encoding for layer in (encoder.layers[0], encoder.layers[2])]
    assert own[0] is not own[1]
    assert own[0] is not encoding
    assert encoder.kernels[2] == Timed("concat_mlp", encoding=own[1], hidden=18)
    for layer in (0, 2):
        encoder.layers[layer].self_attn.calibrate(times, periods=[5.1])
    encoder.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path)
    assert again.layers[0].self_attn.encoding.periods().tolist() == own[0].periods().tolist()
    assert torch.equal(again(x, times=times, is_causal=True), encoder(x, times=times, is_causal=True))


def test_observed_coefficients_are_the_layers_own():
    for name in ("rotate_values", "bias", "bucket", "concat"):
        block, x, times = Block(E, H, kernel=timed(name)).eval(), torch.randn(2, 7, E), moments(2, 7)
        seen = observe(block, {"x": x, "times": times, "is_causal": True})
        wanted = block.self_attn.coefficients(block.norm1(x), times, is_causal=True)
        torch.testing.assert_close(next(iter(seen)).weights, wanted, rtol=1e-5, atol=1e-6)


class At(torch.nn.Module):
    """A layer at given times."""

    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x):
        return self.layer(x, self.times[:, : x.shape[1]])


def test_parameters_that_turn_with_the_embedding():
    for name in [*INVARIANT, "add"]:
        layer = At(made(name), moments(1, 9))
        assert check_equivariance(layer, d=E, roles="auto", trials=5).passed
        assert not check_equivariance(layer, d=E, trials=5).passed
    for name in ("concat", "residual"):
        with pytest.raises(Unsupported, match=f"interaction='{name}' joins features of time to the embedding"):
            check_equivariance(At(made(name), moments(1, 9)), d=E, roles="auto", trials=5)


X, T = torch.zeros(2, 5, E), torch.zeros(2, 5, **F64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: TimeAttention(E, H, "rotate"), InvalidArgument, "interaction must be one of rotary, bias"),
        (lambda: TimeAttention(9, 3), InvalidArgument, "embed_dim / num_heads must be even; got 3"),
        (lambda: TimeAttention(E, H, "bias", rotate_values=True), InvalidArgument, "rotate_values=True is for"),
        (lambda: TimeAttention(E, H, hidden=3), InvalidArgument, "hidden is for interaction='concat_mlp'"),
        (lambda: TimeAttention(E, H, "residual", depth=3), InvalidArgument, "depth must be a whole number from 1 to 2"),
        (lambda: TimeAttention(E, H, "bucket", buckets=7), InvalidArgument, "buckets must be even"),
        (lambda: TimeAttention(E, H, "decay", encoding=BochnerTime(E)), InvalidArgument, "leave encoding out"),
        (lambda: TimeAttention(E, H, encoding="bochner"), InvalidArgument, "encoding must be a TimeEncoding .*; got str"),
        (lambda: TimeAttention(E, H, encoding=BochnerTime(4)), InvalidArgument, r"give BochnerTime\(12\); got 2"),
        (lambda: TimeAttention(E, H, encoding=LinearTime(E)), InvalidArgument, "frequencies of a BochnerTime or Mercer"),
        (lambda: TimeAttention(E, H, "bias", encoding=BochnerTime(4, init="authors")), Unsupported, "no pairs to turn"),
        (lambda: TimeAttention(E, H)(X, T[:, :4]), InvalidArgument, r"times .* \(batch, seq\) = \(2, 5\).*got \(2, 4\)"),
        (lambda: TimeAttention(E, H)(X, None), InvalidArgument, "times .* got None"),
        (lambda: TimeAttention(E, H)(X, T.half()), InvalidArgument, "got torch.float16"),
        (lambda: TimeAttention(E, H)(X, T, X), InvalidArgument, "got key without key_times"),
        (lambda: TimeAttention(E, H)(X, T, None, T), InvalidArgument, "got key_times without key"),
        (lambda: TimeAttention(E, H)(X, T, X[:1], T[:1]), InvalidArgument, "query and key must share the batch; got 2 and 1"),
        (lambda: TimeAttention(E, H)(X, T, X[:, :3], T), InvalidArgument, r"key_times .* = \(2, 3\)"),
        (lambda: TimeAttention(E, H)(X, T, attn_mask=masks.padding([1, 2, 3])), InvalidArgument, "padding"),
        (lambda: Timed("rotate"), InvalidArgument, "interaction must be one of rotary, bias"),
        (lambda: Block(E, H, kernel=Timed())(X), InvalidArgument, r"a block of Timed\(\) needs times"),
        (lambda: Block(E, H)(X, times=T), InvalidArgument, "got times, but this block reads none"),
        (lambda: Block(E, H)(X, key=X, key_times=T), InvalidArgument, "got key_times, but this block reads none"),
        (lambda: Block(E, H, kernel=Primal(4), max_len=5)(X, key=X), Unsupported, "mixes x alone; key is for kernels"),
        (lambda: Encoder(E, H, ["softmax"])(X, times=T), InvalidArgument, "no layer of this encoder reads times"),
        (lambda: Encoder(E, H, [Timed()])(X), InvalidArgument, r"a block of Timed\(\) needs times"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_no_events_and_no_queries():
    for name in INTERACTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            layer, x = made(name, dtype=dtype), X.to(dtype)
            assert layer(x[:, :0], T[:, :0]).shape == (2, 0, E)
            alone = layer(x, T, x[:, :0], T[:, :0])
            torch.testing.assert_close(alone, layer.out_proj.bias.expand(2, 5, E))
