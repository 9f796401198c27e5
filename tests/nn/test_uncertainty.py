"""Gaussian process attention: its factors, its KL, its draws, and what the authors' factors lose."""

import copy

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from heedful import InvalidArgument
from heedful.nn import GaussianProcessAttention, PrimalAttention, kl_loss, ksvd_loss, mc_predict

F64 = {"dtype": torch.float64}
HEADS, WIDTH, RANK = 3, 5, 4
EMBED = HEADS * WIDTH


def make(**more):
    layer = GaussianProcessAttention(EMBED, HEADS, RANK, **({"max_len": 9, **F64} | more))
    with torch.no_grad():
        for parameter in (layer.log_l, layer.mean, layer.log_diagonal, layer.lower):
            parameter.copy_(torch.randn_like(parameter) / 2)
    return layer


def their_factors(layer):
    """The triangle taken in the last two of three axes, of which the last then becomes the channel."""
    return (layer.lower.tril(-1) + layer.log_diagonal.exp().diag_embed()).permute(0, 3, 1, 2)


def test_factors_are_triangular_and_of_full_rank():
    layer = make()
    factors = layer.factors
    assert (factors.triu(1) == 0).all()
    assert (factors.diagonal(dim1=-2, dim2=-1) > 0).all()
    assert (torch.linalg.matrix_rank(factors) == RANK).all()
    # Theirs lose one more direction with every channel, while the KL reads the same diagonal.
    assert torch.linalg.matrix_rank(their_factors(layer)).tolist() == [[4, 3, 2, 1]] * HEADS


def test_kl_is_that_of_the_distributions():
    layer = make()
    wanted = 0.0
    for h in range(HEADS):
        # Lambda^2 = l^-4 are the prior's variances.
        prior = MultivariateNormal(torch.zeros(RANK, **F64), torch.diag((-4 * layer.log_l[h]).exp()))
        for c in range(RANK):
            posterior = MultivariateNormal(layer.mean[h, :, c], scale_tril=layer.factors[h, c])
            wanted = wanted + kl_divergence(posterior, prior)
    torch.testing.assert_close(layer.kl(), wanted, rtol=1e-10, atol=1e-10)
    assert layer.kl().item() > 0
    with torch.no_grad():
        for parameter in (layer.log_l, layer.mean, layer.log_diagonal, layer.lower):
            parameter.zero_()
    assert layer.kl().item() == 0.0


def test_kl_is_shared_among_the_training_set():
    layer = make()
    model = torch.nn.Sequential(layer, make())
    torch.testing.assert_close(kl_loss(model, 50), (model[0].kl() + model[1].kl()) / 50)
    torch.testing.assert_close(kl_loss(layer, 50, kl_scale=0.1), layer.kl() / 500)
    assert kl_loss(torch.nn.Linear(3, 3), 50).item() == 0.0
    with pytest.raises(InvalidArgument, match="train_size must be a whole number from 1 on"):
        kl_loss(layer, 0)


@pytest.mark.parametrize("more", [{}, {"causal": "prefix"}, {"causal": "cummean"}])
def test_marginal_is_the_plain_loops(more):
    layer = make(**more)
    x = torch.randn(2, 7, EMBED, **F64)
    scores, found = layer.scores(x), layer.marginal(x)
    for h in range(HEADS):
        v = (scores.e + scores.r)[:, h] * layer.log_l[h].exp() ** 2
        for c in range(RANK):
            torch.testing.assert_close(found.mean[:, h, :, c], v @ layer.mean[h, :, c])
            torch.testing.assert_close(found.std[:, h, :, c], (v @ layer.factors[h, c]).norm(dim=-1))


def test_draws_have_the_mean_and_the_spread():
    layer = make().eval()
    x = torch.randn(1, 5, EMBED, **F64)
    mean, std = layer.marginal(x)
    with torch.no_grad():
        draws = layer(x.expand(4000, -1, -1))[:, None]  # noise differs between sequences too
        wanted = layer.head_proj(mean).transpose(1, 2).flatten(-2)
        variance = (std.square() @ layer.head_proj.weight.square().T).transpose(1, 2).flatten(-2)
    error = (draws.mean(0) - wanted) / (variance / 4000).sqrt()
    assert float(error.abs().max()) < 5
    torch.testing.assert_close(draws.var(0), variance, rtol=0.15, atol=0)


def test_scores_and_their_loss_are_those_of_the_primal_layer():
    layer, primal = make(), PrimalAttention(EMBED, HEADS, RANK, max_len=9, **F64)
    with torch.no_grad():
        for name in ("in_proj.weight", "in_proj.bias", "w_e", "w_r"):
            primal.get_parameter(name).copy_(layer.get_parameter(name))
        primal.lam.copy_(layer.log_l.exp())
    x = torch.randn(2, 7, EMBED, **F64)
    layer(x), primal(x)
    torch.testing.assert_close(layer.scores(x).e, primal.scores(x).e)
    for call in ({}, {"reduction": "batch"}, {"penalty": "kkt"}):
        torch.testing.assert_close(ksvd_loss(layer, **call), primal.ksvd_loss(**call))


def test_a_generator_repeats_the_draw():
    layer = make().eval()
    x = torch.randn(2, 7, EMBED, **F64)
    assert not torch.equal(layer(x), layer(x))
    outs = []
    for _ in range(2):
        layer.generator = torch.Generator().manual_seed(3)
        outs.append(layer(x))
    assert torch.equal(*outs)
    assert copy.deepcopy(layer).generator is None


def test_gradients_of_the_marginal_and_the_kl():
    layer = GaussianProcessAttention(4, 2, 2, max_len=3, **F64)
    names = [name for name, _ in layer.named_parameters() if "head_proj" not in name]

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return *self.layer.marginal(x), self.layer.kl()

    def run(x, *parameters):
        given = {f"layer.{name}": value for name, value in zip(names, parameters, strict=True)}
        return torch.func.functional_call(Reading(), given, (x,))

    leaves = [layer.get_parameter(name).detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, [torch.randn(1, 4, 4, **F64, requires_grad=True), *leaves])


def test_padding_changes_nothing():
    layer = make()
    x = torch.randn(2, 7, EMBED, **F64)
    long = torch.nn.functional.pad(x, (0, 0, 2, 3), value=torch.nan)
    hidden = torch.nn.functional.pad(torch.zeros(2, 7, dtype=torch.bool), (2, 3), value=True)
    for found, wanted in zip(layer.marginal(long, hidden), layer.marginal(x), strict=True):
        torch.testing.assert_close(found[..., 2:9, :], wanted, rtol=1e-10, atol=1e-10)
    out = layer(long, hidden)
    assert (out[hidden] == 0).all()
    assert out.isfinite().all()


def test_saved(tmp_path):
    layer = make()
    layer.save_pretrained(tmp_path)
    again = GaussianProcessAttention.from_pretrained(tmp_path)
    x = torch.randn(2, 7, EMBED, **F64)
    for found, wanted in zip(again.marginal(x), layer.marginal(x), strict=True):
        assert torch.equal(found, wanted)


def classifier():
    layer = GaussianProcessAttention(8, 2, 3, max_len=5)
    return torch.nn.Sequential(torch.nn.Dropout(0.5), layer, torch.nn.Flatten(), torch.nn.Linear(40, 4))


def test_prediction_by_draws():
    model, x = classifier().train(), torch.randn(6, 5, 8)
    state = torch.get_rng_state()
    first, second = (mc_predict(model, x, mc_samples=7, seed=1) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.logits, second.logits)
    assert first.logits.shape == (7, 6, 4)
    assert model.training
    assert model[1].generator is None
    torch.testing.assert_close(first.probabilities, first.logits.mean(0).softmax(-1))
    by_probability = mc_predict(model, x, mc_samples=7, seed=1, average="probs")
    torch.testing.assert_close(by_probability.probabilities, first.logits.softmax(-1).mean(0))
    assert not torch.equal(mc_predict(model, x, seed=2).logits[:7], first.logits)
    assert not torch.equal(mc_predict(model, x).logits, mc_predict(model, x).logits)
    draws = first.logits.softmax(-1)
    wanted = -(draws.mean(0) * draws.mean(0).log()).sum(-1) + (draws * draws.log()).sum(-1).mean(0)
    torch.testing.assert_close(first.disagreement, wanted, rtol=1e-4, atol=1e-6)
    assert first.entropy.shape == (6,)


def test_predictions_are_read_and_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="drawn where matplotlib is installed")
    found = mc_predict(classifier(), torch.randn(6, 5, 8), seed=0)
    assert "10 draws" in repr(found)
    assert set(found.to_dict()) == {"probabilities", "entropy", "disagreement"}
    assert len(found.plot(sample=2).patches) == 4
    pyplot.close("all")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: mc_predict(torch.nn.Linear(3, 3), torch.zeros(1, 3)), "no GaussianProcessAttention"),
        (
            lambda: mc_predict(classifier(), torch.zeros(1, 5, 8), mc_samples=0),
            "mc_samples must be a whole number from 1 on",
        ),
        (
            lambda: mc_predict(classifier(), torch.zeros(1, 5, 8), average="votes"),
            "average must be one of logits, probs",
        ),
        (lambda: GaussianProcessAttention(8, 2), "give max_len"),
        (lambda: kl_loss(classifier(), 0), "train_size must be a whole number from 1 on"),
        (lambda: kl_loss(classifier(), 9, float("nan")), "kl_scale must be a number from 0 on"),
    ],
)
def test_bad_calls_are_refused(call, told):
    with pytest.raises(InvalidArgument, match=told):
        call()


def test_the_kl_of_half_precision_is_summed_in_float32():
    """Float16 ends at 65,504; 2 x 40 x 40 logarithms of -25 sum up to 80,000."""
    layer = GaussianProcessAttention(8, 2, 40, max_len=9)
    with torch.no_grad():
        layer.log_diagonal.fill_(-25.0)
    half = copy.deepcopy(layer).half()
    assert half.kl().dtype == torch.float32
    assert half.kl().item() > 65504
    torch.testing.assert_close(half.kl(), layer.kl(), rtol=1e-3, atol=0)
