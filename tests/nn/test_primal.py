"""Primal-Attention: against plain loops, its symmetries, its loss, its types, and what it refuses."""

import pytest
import torch
from torch.func import functional_call

from heedful import Cosine, FeatureMap, InvalidArgument, Kernel
from heedful.nn import PrimalAttention
from heedful.ops import primal as ops
from primal_layers import EMBED, F64, HEADS, RANK, SAMPLINGS, WIDTH, make


def rows_by_hand(tokens, rows, sampling):
    """F of one sequence, row by row; tokens are the valid ones alone."""
    n = len(tokens)
    made = []
    for m in range(rows):
        if sampling == "stride":
            made.append(tokens[m * (n - 1) // (rows - 1) if rows > 1 else 0])
        else:
            first = m * n // rows
            stop = max(first + 1, (m + 1) * n // rows)
            made.append(sum(tokens[first:stop]) / (stop - first))
    return torch.stack(made)


def by_hand(layer, x, keep=None):
    """Outputs `[B, n, d]` and J `[B]` by loops over sequences, heads and tokens, of the layers that are not causal."""
    batch, n, _ = x.shape
    out, objectives = torch.zeros_like(x), []
    for b in range(batch):
        valid = [i for i in range(n) if keep is None or keep[b, i]]
        total = 0.0
        heads = torch.zeros(n, HEADS, WIDTH, **F64)
        for h in range(HEADS):
            part = slice(h * WIDTH, (h + 1) * WIDTH)
            w_e, w_r = layer.w_e[h], layer.w_r[h]
            if layer.weights == "data":
                sample = rows_by_hand([x[b, i, part] for i in valid], w_e.shape[0], layer.sampling)
                w_e, w_r = sample.T @ w_e, sample.T @ w_r
            total = total - (layer.w_e[h] * layer.w_r[h]).sum() / HEADS
            for i in valid:
                both = layer.in_proj.weight @ x[b, i] + (layer.in_proj.bias if layer.bias else 0.0)
                query, key = both[:EMBED][part], both[EMBED:][part]
                e, r = (query / query.norm()) @ w_e, (key / key.norm()) @ w_r
                total = total + 0.5 * ((layer.lam[h] * e).norm() ** 2 + (layer.lam[h] * r).norm() ** 2) / (
                    HEADS * len(valid)
                )
                heads[i, h] = layer.head_proj(torch.cat((e, r)))
        for i in valid:
            out[b, i] = layer.out_proj(heads[i].flatten())
        objectives.append(total)
    return out, torch.stack(objectives)


@pytest.mark.parametrize(
    ("n", "rows", "more"),
    [
        *(
            (n, rows, {"sampling": s})
            for s in SAMPLINGS
            for n, rows in ((13, 8), (7, 7), (5, 8), (16, 8), (1, 3), (11, 1))
        ),
        (7, 7, {"weights": "static"}),
        (7, 5, {"bias": False}),
    ],
)
def test_forward_and_loss_are_the_plain_loops(n, rows, more):
    layer = make(rows, **more)
    x = torch.randn(2, n, EMBED, **F64)
    wanted, objective = by_hand(layer, x)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.ksvd_loss(), objective.square().mean(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.ksvd_loss("batch"), objective.mean().square(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_padded_forward_and_loss_are_the_plain_loops(sampling):
    layer = make(4, sampling=sampling)
    x = torch.randn(3, 11, EMBED, **F64)
    keep = torch.ones(3, 11, dtype=torch.bool)
    keep[0, 7:], keep[1, :5], keep[2, [2, 3, 9]] = False, False, False
    wanted, objective = by_hand(layer, x, keep)
    torch.testing.assert_close(layer(x, ~keep), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.ksvd_loss(), objective.square().mean(), rtol=1e-10, atol=1e-12)


def test_sampled_positions_in_whole_numbers():
    x = torch.arange(22.0).reshape(1, 22, 1)
    assert ops.sample(x, 6, "stride").flatten().tolist() == [0, 4, 8, 12, 16, 21]
    assert ops.sample(x[:, :7], 3, "segment_mean").flatten().tolist() == [0.5, 2.5, 5.0]
    assert ops.sample(x[:, :2], 5, "segment_mean").flatten().tolist() == [0, 0, 0, 1, 1]
    assert ops.sample(x[:, :2], 5, "stride").flatten().tolist() == [0, 0, 0, 0, 1]
    assert ops.sample(x[:, :0], 5, "stride").flatten().tolist() == [0.0] * 5


def test_number_of_parameters():
    """2(d^2 + d) + (d^2 + d) + 2 H n' s + H s + p (2 s + 1)."""
    d, heads, rank, rows = 24, 4, 3, 9
    layer = PrimalAttention(d, heads, rank, max_len=100, rank_multi=3)
    wanted = 3 * (d * d + d) + 2 * heads * rows * rank + heads * rank + d // heads * (2 * rank + 1)
    assert sum(p.numel() for p in layer.parameters()) == wanted


@pytest.mark.parametrize(("n", "rows"), [(13, 5), (7, 7), (5, 8)])
def test_which_tokens_are_seen(n, rows):
    """d y_0 / d x_j is zero exactly where j is not sampled by stride, nowhere for segment means, everywhere for static."""
    x = torch.randn(1, n, EMBED, **F64, requires_grad=True)
    seen = {}
    for name, more in {"stride": {"sampling": "stride"}, "segment_mean": {}, "static": {"weights": "static"}}.items():
        gradient = torch.autograd.grad(make(rows, **more)(x)[0, 0].square().sum(), x)[0][0]
        seen[name] = {j for j in range(n) if gradient[j].abs().max() > 0}
    assert seen["stride"] == {0, *(m * (n - 1) // (rows - 1) for m in range(rows))}
    assert seen["segment_mean"] == set(range(n))
    assert seen["static"] == {0}


def test_start():
    """20 seeds: J starts near 1/3, heads have unit norm and are orthogonal to one another."""
    values = []
    for seed in range(20):
        torch.manual_seed(seed)
        layer = PrimalAttention(64, 4, 20, max_len=50)
        layer(torch.randn(8, 50, 64))
        values.append(ops.objective(layer._last, layer.lam).mean())
        flat = layer.w_e.flatten(1)
        torch.testing.assert_close(flat @ flat.T, torch.eye(4), rtol=0, atol=1e-5)
        assert layer.w_e.shape == (4, 50, 20)
    assert 0.28 <= torch.stack(values).mean().item() <= 0.40


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("more", [{}, {"weights": "static"}, {"feature_map": "elu"}])
def test_fold_is_unfold_and_gram_is_direct(masked, more):
    """Without scores as with them, outputs, loss and every gradient."""
    layer = make(6, **more)
    x = torch.randn(2, 13, EMBED, **F64, requires_grad=True)
    hidden = torch.arange(13).expand(2, -1) >= torch.tensor([[13], [8]]) if masked else None
    keep = torch.ones(2, 13, dtype=torch.bool) if hidden is None else ~hidden
    for trace in ("param", "data"):
        scores = layer.scores(x, hidden)
        out = layer.head_proj(torch.cat((scores.e, scores.r), -1)).transpose(1, 2).flatten(-2)
        out = layer.out_proj(out) * keep[..., None]
        lam = layer.lam[:, None]
        quadratic = ((lam * scores.e).square() + (lam * scores.r).square()).sum((-2, -1)) / 2 / keep.sum(-1)[:, None]
        w_e, w_r = layer.w_e, layer.w_r
        if trace == "data" and layer.weights == "data":
            sample = layer.features(x, hidden)[2]
            w_e, w_r = sample.mT @ w_e, sample.mT @ w_r
        objective = (quadratic - (w_e * w_r).sum((-2, -1))).mean(-1)
        found = layer(x, hidden)
        torch.testing.assert_close(found, out, rtol=1e-10, atol=1e-10)
        loss, wanted = layer.ksvd_loss(trace=trace), objective.square().mean()
        torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-12)
        probe = torch.randn_like(out)
        leaves = [x, *layer.parameters()]
        for a, b in zip(
            torch.autograd.grad((found * probe).sum() + loss, leaves),
            torch.autograd.grad((out * probe).sum() + wanted, leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sampling": "stride"},
        {"weights": "static", "feature_map": "identity"},
        {"causal": "prefix", "max_len": 11},
        {"causal": "cummean"},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(more, masked):
    with pytest.warns(UserWarning, match="mixes no tokens") if more.get("weights") else _nothing():
        layer = PrimalAttention(4, 2, 2, **({"max_len": 3} | more), **F64)
    hidden = torch.tensor([[False] * 5, [True, False, False, True, True]]) if masked else None
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        out = functional_call(layer, given, (x, hidden))
        # The loss reads lambda from the layer, which outside of functional_call is the old one.
        loss = [ops.penalty(layer._last, given["lam"], reduction) for reduction in ("per_sample", "batch")]
        if not layer.causal:
            loss.append(ops.penalty(layer._last, given["lam"], kind="kkt"))
        return out, *loss

    leaves = [
        torch.randn(2, 5, 4, **F64, requires_grad=True),
        *(p.detach().requires_grad_() for p in layer.parameters()),
    ]
    assert torch.autograd.gradcheck(run, leaves)


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


def test_scale_symmetries():
    """Without biases: the length of queries does not matter, and E grows with X."""
    layer = make(6, bias=False)
    x = torch.randn(2, 13, EMBED, **F64)
    e = layer.scores(x).e
    torch.testing.assert_close(layer.scores(3.0 * x).e, 3.0 * e)
    with torch.no_grad():
        layer.in_proj.weight.mul_(7.0)
    torch.testing.assert_close(layer.scores(x).e, e)


def test_rotation_symmetry():
    """One head: X -> X Q^T with W_q -> Q W_q Q^T, W_k likewise, leaves scores."""
    layer = PrimalAttention(5, 1, 3, max_len=4, bias=False, **F64)
    x = torch.randn(2, 9, 5, **F64)
    turn = torch.linalg.qr(torch.randn(5, 5, **F64))[0]
    before = layer.scores(x)
    with torch.no_grad():
        layer.in_proj.weight.copy_(torch.cat([turn @ w @ turn.T for w in layer.in_proj.weight.chunk(2)]))
    after = layer.scores(x @ turn.T)
    torch.testing.assert_close(after.e, before.e, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(after.r, before.r, rtol=1e-10, atol=1e-12)


def test_positions_are_in_the_weights():
    """Tokens may be permuted if the rows of the weights are too; static weights have no positions."""
    order = torch.randperm(7)
    x = torch.randn(2, 7, EMBED, **F64)
    layer = make(7)
    wanted = layer(x)[:, order]
    assert float((layer(x[:, order]) - wanted).detach().abs().max()) > 1e-3
    with torch.no_grad():
        layer.w_e.copy_(layer.w_e[:, order])
        layer.w_r.copy_(layer.w_r[:, order])
    torch.testing.assert_close(layer(x[:, order]), wanted, rtol=1e-10, atol=1e-12)
    static = make(7, weights="static")
    torch.testing.assert_close(static(x[:, order]), static(x)[:, order], rtol=1e-10, atol=1e-12)


class Halved(Kernel):
    """A map of one's own: half as many features."""

    def coefficients(self, query, key):
        left, right = self.features(query, key)
        return left @ right.mT

    def features(self, query, key):
        return query[..., ::2], key[..., ::2]

    def feature_size(self, head_dim):
        return (head_dim + 1) // 2


@pytest.mark.parametrize(
    ("name", "phi"),
    [
        ("cosine", lambda z: z / z.norm(dim=-1, keepdim=True)),
        ("elu", lambda z: torch.nn.functional.elu(z) + 1),
        ("relu", lambda z: z.relu()),
        ("identity", lambda z: z),
        (Cosine(), lambda z: z / z.norm(dim=-1, keepdim=True)),
    ],
)
def test_feature_maps(name, phi):
    layer = make(6, feature_map=name)
    x = torch.randn(2, 9, EMBED, **F64)
    query, key = (layer._heads(part) for part in layer.in_proj(x).chunk(2, -1))
    sample = layer._heads(ops.sample(x, 6, "segment_mean"))
    scores = layer.scores(x)
    torch.testing.assert_close(scores.e, phi(query) @ sample.mT @ layer.w_e)
    torch.testing.assert_close(scores.r, phi(key) @ sample.mT @ layer.w_r)


def test_maps_that_change_the_size_take_static_weights():
    for feature_map, size in (("random", 256), (FeatureMap("random", features_count=7), 7), (Halved(), 3)):
        layer = make(weights="static", feature_map=feature_map)
        assert layer.w_e.shape == (HEADS, size, RANK)
        assert layer(torch.randn(2, 9, EMBED, **F64)).isfinite().all()
        with pytest.raises(InvalidArgument, match=f"as many features as a head is wide, 5; .* has {size}"):
            make(feature_map=feature_map)
    assert make(feature_map=FeatureMap("random", features_count=5))(torch.randn(1, 9, EMBED, **F64)).isfinite().all()


def test_a_zero_vector_has_zero_features():
    layer = make(6, bias=False)
    x = torch.randn(1, 9, EMBED, **F64)
    x[0, 4] = 0.0
    scores = layer.scores(x)
    assert (scores.e[0, :, 4] == 0).all()
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("before", "after"), [(20, 40), (40, 20), (23, 31)])
def test_resizing_keeps_what_slow_sequences_give(sampling, before, after):
    layer = PrimalAttention(EMBED, HEADS, RANK, max_len=before, rank_multi=100, sampling=sampling, **F64)
    smooth = torch.linspace(0, 3, before, **F64)[:, None].add(torch.arange(RANK)).sin()
    with torch.no_grad():
        layer.w_e.copy_(smooth)
        layer.w_r.copy_(smooth.flip(0))
    x = torch.linspace(0, 1, 240, **F64)[:, None].add(torch.arange(EMBED)).cos()[None]
    wanted = layer.scores(x).e
    layer.w_e.requires_grad_(False)
    layer.resize_(after)
    assert layer.w_e.shape == (HEADS, after, RANK)
    assert layer.max_len == layer.arguments()["max_len"] == after
    assert [layer.w_e.requires_grad, layer.w_r.requires_grad] == [False, True]
    assert ((layer.scores(x).e - wanted).norm() / wanted.norm()).item() < 0.03


def test_half_precision_sums_in_float32():
    """Scores, sums and J of bfloat16 inputs are those of float64 to the rounding of the inputs, not of the sums."""
    torch.manual_seed(1)
    wide_layer = PrimalAttention(32, 2, 5, max_len=700, **F64)
    x = torch.randn(2, 700, 32)
    for dtype in (torch.bfloat16, torch.float16):
        layer = PrimalAttention(32, 2, 5, max_len=700).to(dtype)
        layer.load_state_dict(wide_layer.state_dict())
        wide_layer.load_state_dict(layer.state_dict())
        scores, wanted = layer.scores(x.to(dtype)), wide_layer.scores(x.to(dtype).double())
        assert scores.e.dtype == torch.float32
        assert ((scores.e - wanted.e).norm() / wanted.e.norm()).item() < 1e-2
        out = layer(x.to(dtype))
        assert out.dtype == dtype
        wide_layer(x.to(dtype).double())
        assert layer.ksvd_loss().dtype == torch.float32
        torch.testing.assert_close(layer.ksvd_loss().double(), wide_layer.ksvd_loss(), rtol=3e-3, atol=0)


def test_autocast_reaches_the_linear_maps_alone():
    layer = PrimalAttention(32, 2, 5, max_len=100)
    x = torch.randn(2, 100, 32)
    wanted, loss = layer(x), layer.ksvd_loss()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        assert out.dtype == torch.bfloat16
        assert layer.scores(x).e.dtype == torch.float32
        assert layer._last.energy.dtype == layer.ksvd_loss().dtype == torch.float32
        torch.testing.assert_close(layer.ksvd_loss(), loss, rtol=2e-2, atol=0)
        layer.ksvd_loss().backward()
    assert ((out - wanted).norm() / wanted.norm()).item() < 2e-2
