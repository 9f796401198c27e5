"""Matern and rational quadratic kernels where formulas are hard on floats: distance zero, far away, many bandwidths."""

import pytest
import torch

from heedful import Exponential, Gaussian, Laplace, Matern, RationalQuadratic, Softmax, attend, masks
from listed import inputs, per_head

SMOOTH = [Matern(1.5, 2.0), Matern(2.5, 2.0), RationalQuadratic(0.7, 2.0)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kernel", SMOOTH, ids=repr)
def test_gradient_at_distance_zero_is_zero(kernel, normalize):
    """Every key is the query itself: the coefficient is at its maximum, flat to first order."""
    kernel = type(kernel)(*[value for _, value in kernel._items()][:2], normalize)
    query = torch.randn(1, 1, 5, 7, dtype=torch.float64)[..., :1, :].expand(1, 1, 5, 7).clone().requires_grad_()
    key = query.detach().clone().requires_grad_()
    value = torch.randn(1, 1, 5, 3, dtype=torch.float64)
    out = attend(query, key, value, kernel=kernel)
    torch.testing.assert_close(out, (value.mean(-2, keepdim=True) * (1 if normalize else 5)).expand(1, 1, 5, 3))
    for gradient in torch.autograd.grad(out.square().sum(), (query, key)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("kernel", SMOOTH, ids=repr)
def test_gradients_by_differences(kernel):
    query, key, value = (x[:1, :, :5].requires_grad_() for x in inputs())
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x, masks.causal, kernel=kernel, impl="reference"), (query, key, value)
    )


def test_smoothness_lies_between_laplace_and_gaussian():
    """Near zero 1 - kappa falls as r, r^2 with slope 3/2 and 5/6 of (r/l)^2, r^2 / 2."""
    query, key = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 1e-4, dtype=torch.float64)
    lost = lambda kernel: float(1 - attend.coefficients(query, key, kernel=kernel)) / 1e-8  # noqa: E731
    assert lost(Laplace(1.0, normalize=False)) == pytest.approx(1e4, rel=1e-3)
    assert lost(Matern(1.5, 1.0, normalize=False)) == pytest.approx(3 / 2, rel=1e-3)
    assert lost(Matern(2.5, 1.0, normalize=False)) == pytest.approx(5 / 6, rel=1e-3)
    assert lost(Gaussian(1.0, normalize=False)) == pytest.approx(1 / 2, rel=1e-3)
    query, key, _ = inputs()
    wide = attend.coefficients(query, key, kernel=RationalQuadratic(1e7, 1.5))
    torch.testing.assert_close(wide, attend.coefficients(query, key, kernel=Gaussian(1.5)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [Matern(1.5, 0.01), Matern(2.5, 0.01)], ids=repr)
def test_rows_far_from_every_key_are_normalised(kernel):
    """Every coefficient underflows, and the nearest key takes the row."""
    query, key, _ = inputs()
    weights = attend.coefficients(query, key, kernel=kernel)
    raw = attend.coefficients(query, key, kernel=type(kernel)(kernel.smoothness, kernel.bandwidth, normalize=False))
    assert float(raw.max()) < 1e-60
    assert float(raw.min()) == 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 19, dtype=torch.float64))
    assert torch.equal(weights.argmax(-1), torch.cdist(query, key).argmin(-1))


@pytest.mark.parametrize("far", [1e4, 1e9, 1e20, 1e30])
@pytest.mark.parametrize("kernel", SMOOTH, ids=repr)
def test_a_later_key_far_away_moves_no_earlier_row(kernel, far):
    """Values and gradients, of the learned bandwidth as well."""
    results = []
    for last in (0.5, far):
        query, key, value = (x.float() for x in inputs())
        key[..., -1, :] = last
        tensors = [x.requires_grad_() for x in (query, key, value, torch.full((3,), 2.0))]
        own = type(kernel)(kernel._items()[0][1], tensors[3])
        for impl in ("auto", "reference", "stream"):
            out = attend(*tensors[:3], is_causal=True, kernel=own, impl=impl)[..., :-1, :]
            gradients = torch.autograd.grad(out.square().sum(), tensors)
            results.append([out, *(g[..., :-1, :] for g in gradients[:3]), gradients[3]])
    for clean, littered in zip(results[:3], results[3:], strict=True):
        for one, other in zip(clean, littered, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [None, masks.causal, masks.padding([19, 7])], ids=["none", "causal", "padding"])
@pytest.mark.parametrize("kernel", SMOOTH, ids=repr)
def test_precision_far_from_the_origin(kernel, mask):
    leaves = [x + 1000 * (n < 2) for n, x in enumerate(inputs())]
    doubles = [x.float().double().requires_grad_() for x in leaves]
    singles = [x.float().requires_grad_() for x in leaves]
    wanted, out = (attend(*x, mask, kernel=kernel) for x in (doubles, singles))
    assert (out - wanted).norm() < 1e-5 * wanted.norm()
    for one, other in zip(
        torch.autograd.grad(out.square().sum(), singles),
        torch.autograd.grad(wanted.square().sum(), doubles),
        strict=True,
    ):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_exponential_is_softmax_without_its_division():
    query, key, value = inputs()
    kernel = Exponential(per_head(0.2), bias=per_head(-1.0))
    raw = attend.coefficients(query, key, kernel=kernel)
    torch.testing.assert_close(
        raw / raw.sum(-1, keepdim=True), attend.coefficients(query, key, kernel=kernel.normalized())
    )
    # In a product with a normalised kernel, scores add and the whole is softmax attention.
    product = Exponential(0.3) * Softmax(0.2)
    assert attend.plan(query, key, value, kernel=product).chosen == "sdpa"
    torch.testing.assert_close(
        attend(query, key, value, kernel=product),
        attend(query, key, value, kernel=Softmax(0.5)),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("bandwidth", [None, 1.7, torch.tensor([0.5, 2.0, 3.0])], ids=repr)
def test_a_gaussians_remoteness_is_its_score_with_the_origin(bandwidth):
    kernel, (query, _, _) = Gaussian(bandwidth), inputs()
    wanted = -kernel.score(query, torch.zeros_like(query[..., :1, :]))
    torch.testing.assert_close(kernel.remoteness(query), wanted)
    assert not bool(kernel.remoteness(torch.full((1, 3, 2, 7), torch.nan)).max() < 64)
