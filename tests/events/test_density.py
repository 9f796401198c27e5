"""The log-normal mixture against scipy and against integrals."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from heedful.events import LogNormalMixture


@pytest.fixture
def law():
    torch.manual_seed(0)
    return LogNormalMixture.of(torch.randn(3, 15, dtype=torch.float64), shift=0.7, spread=1.3)


def scipy_law(law, row):
    weights, means, scales = law.log_weights[row].exp(), law.means[row], law.log_scales[row].exp()
    parts = [
        (float(w), stats.lognorm(s=law.spread * float(s), scale=np.exp(law.shift + law.spread * float(m))))
        for w, m, s in zip(weights, means, scales, strict=True)
    ]
    return lambda name, x: sum(weight * getattr(part, name)(x) for weight, part in parts), parts


def test_densities_and_tails_are_those_of_scipy(law):
    waits = torch.tensor([0.03, 1.7, 40.0], dtype=torch.float64)
    for row in range(3):
        whole, parts = scipy_law(law, row)
        one = law.at(row)
        for wait in waits:
            assert one.log_prob(wait).exp().item() == pytest.approx(whole("pdf", wait.item()), rel=1e-10)
            assert one.cdf(wait).item() == pytest.approx(whole("cdf", wait.item()), rel=1e-10)
            assert one.log_survival(wait).exp().item() == pytest.approx(whole("sf", wait.item()), rel=1e-9)
        assert law.mean()[row].item() == pytest.approx(sum(w * part.mean() for w, part in parts), rel=1e-10)
        for share in (0.01, 0.5, 0.93):
            assert whole("cdf", law.quantile(share)[row].item()) == pytest.approx(share, abs=1e-12)
        mass = integrate.quad(
            lambda u, one=one: one.log_prob(torch.tensor(np.exp(u))).exp().item() * np.exp(u), -40, 40, limit=400
        )[0]
        assert mass == pytest.approx(1.0, abs=1e-6)


def test_no_wait_survives_and_far_tails_stay_finite(law):
    assert law.log_survival(torch.zeros(3)).tolist() == [0.0] * 3
    assert law.cdf(torch.zeros(3)).tolist() == [0.0] * 3
    assert torch.isfinite(law.log_survival(torch.full((3,), 1e30, dtype=torch.float64))).all()


def test_draws_follow_the_law(law):
    many = law.at(torch.zeros(4000, dtype=torch.long))
    draws = many.sample(torch.Generator().manual_seed(0))
    assert stats.kstest(draws.numpy(), lambda x: scipy_law(law, 0)[0]("cdf", x)).pvalue > 0.01


def test_gradients_reach_every_number():
    raw = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    waits = torch.rand(5, dtype=torch.float64) + 0.1

    def loss(raw):
        law = LogNormalMixture.of(raw, 0.2, 0.9)
        return law.log_prob(waits) + law.log_survival(waits)

    assert torch.autograd.gradcheck(loss, raw)
