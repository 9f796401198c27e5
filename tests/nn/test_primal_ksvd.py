"""The asymmetric kernel SVD behind primal layers: primal and dual, the exact solver, what J = 0 says and what it does not."""

import pytest
import torch

from heedful import InvalidArgument
from heedful.nn import PrimalAttention
from heedful.ops import ksvd

F64 = {"dtype": torch.float64}
HEADS, WIDTH, RANK = 3, 5, 4
EMBED = HEADS * WIDTH


def make(**more):
    """A layer of seven sampled rows."""
    return PrimalAttention(EMBED, HEADS, RANK, **({"max_len": 7, **F64} | more))


def random_features(n=17, m=19, p=5, rows=7):
    return torch.randn(n, p, **F64), torch.randn(m, p, **F64), torch.randn(rows, p, **F64)


def test_primal_is_dual():
    query, key, sample = random_features()
    kernel = query @ sample.T @ sample @ key.T
    h_e, h_r = torch.randn(17, 3, **F64), torch.randn(19, 3, **F64)
    weights = ksvd.primal_weights(h_e, h_r, query, key, sample)
    assert float((query @ sample.T @ weights.e - kernel @ h_r).abs().max()) < 1e-10
    assert float((key @ sample.T @ weights.r - kernel.T @ h_e).abs().max()) < 1e-10
    scores = ksvd.dual_scores(h_e, h_r, query, key, sample)
    torch.testing.assert_close(scores.e, kernel @ h_r)
    torch.testing.assert_close(scores.r, kernel.T @ h_e)
    back = ksvd.dual_variables(*weights, query, key, sample)
    assert max(float(back.residual_e), float(back.residual_r)) < 1e-12
    torch.testing.assert_close(kernel @ back.h_r, kernel @ h_r)
    assert float(back.h_r.norm()) < float(h_r.norm())


def test_weights_without_a_dual_say_so_and_score_the_same():
    query, key, sample = random_features()
    w_e, w_r = torch.randn(2, 7, 3, **F64)
    dual = ksvd.dual_variables(w_e, w_r, query, key, sample)
    basis = torch.linalg.qr(sample)[0]
    wanted = (w_e - basis @ (basis.T @ w_e)).norm() / w_e.norm()
    torch.testing.assert_close(dual.residual_e, wanted)
    assert float(wanted) > 0.1
    torch.testing.assert_close(ksvd.dual_scores(dual.h_e, dual.h_r, query, key, sample).e, query @ sample.T @ w_e)


@pytest.mark.parametrize("sampled", [False, True])
def test_thin_solver_is_the_svd(sampled):
    query, key, sample = random_features()
    sample = sample if sampled else None
    kernel = query @ key.T if sample is None else query @ sample.T @ sample @ key.T
    found = ksvd.ksvd(query, key, sample)
    torch.testing.assert_close(found.values, torch.linalg.svdvals(kernel)[:5], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.left * found.values @ found.right.T, kernel, rtol=1e-11, atol=1e-11)
    for vectors in (found.left, found.right):
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(5, **F64), rtol=0, atol=1e-13)
    assert ksvd.ksvd(query, key, sample, rank=2).values.shape == (2,)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_triplets_have_zero_objective_and_are_stationary(rank):
    query, key, sample = random_features()
    found = ksvd.ksvd(query, key, sample, rank)
    for scale in (1.0, 3.0):
        w_e, w_r = (
            (scale * w).requires_grad_() for w in ksvd.primal_weights(found.left, found.right, query, key, sample)
        )
        call = query, key, w_e, w_r, 1 / found.values, sample
        objective = ksvd.objective_sum(*call)
        assert abs(objective.item()) < 1e-9 * found.values.sum().item()
        gradients = torch.autograd.grad(objective, (w_e, w_r))
        assert max(float(g.abs().max()) for g in gradients) < 1e-9
        assert ksvd.kkt_residual(*call).item() < 1e-18
        moved = w_e.detach().clone()
        moved[0, 0] += 0.1
        assert abs(ksvd.objective_sum(query, key, moved, w_r, 1 / found.values, sample).item()) > 1e-6
        assert ksvd.kkt_residual(query, key, moved, w_r, 1 / found.values, sample).item() > 1e-9


def test_zero_objective_is_no_kernel_svd():
    """Random weights, Lambda rescaled until J = 0: the residual stays near one. So do zero weights."""
    for _ in range(5):
        query, key, sample = random_features()
        w_e, w_r = torch.randn(2, 7, 3, **F64)
        w_r = w_r * (w_e * w_r).sum().sign()
        ones = torch.ones(3, **F64)
        trace = (w_e * w_r).sum()
        weights = ones * trace / (ksvd.objective_sum(query, key, w_e, w_r, ones, sample) + trace)
        assert abs(float(ksvd.objective_sum(query, key, w_e, w_r, weights, sample))) < 1e-12
        assert float(ksvd.kkt_residual(query, key, w_e, w_r, weights, sample)) > 0.5
    assert float(ksvd.kkt_residual(query, key, 0 * w_e, 0 * w_r, weights, sample)) == 1.0


@pytest.mark.filterwarnings("ignore:.*mixes no tokens")
@pytest.mark.parametrize("more", [{}, {"sampling": "stride"}, {"weights": "static"}, {"causal": "cummean"}])
@pytest.mark.parametrize("batch", [1, 3])
def test_fitted_layer_is_a_kernel_svd(more, batch):
    layer = make(**more)
    x = torch.randn(batch, 13, EMBED, **F64)
    hidden = torch.arange(13).expand(batch, -1) >= 10 if batch == 3 else None
    assert layer.kkt_residual(x, hidden, "batch").min().item() > 0.5
    assert layer.fit_ksvd_(x, hidden) is layer
    with pytest.raises(InvalidArgument, match="no forward pass was run"):
        layer.ksvd_loss()
    assert layer.kkt_residual(x, hidden, "batch").max().item() < 1e-18
    layer(x, hidden)
    assert layer.ksvd_loss("batch").item() < 1e-20
    assert layer.ksvd_loss("batch", penalty="kkt").item() < 1e-18
    torch.testing.assert_close(
        layer.w_e.square().sum((1, 2)) + layer.w_r.square().sum((1, 2)), torch.full((HEADS,), 2.0, **F64)
    )
    if batch == 1:
        values = torch.linalg.svdvals(layer.kernel_matrix(x)[0])[:, :RANK]
        torch.testing.assert_close(13 / layer.lam.square(), values, rtol=1e-9, atol=1e-9)


def test_fit_leaves_components_beyond_the_rank_at_zero():
    layer = PrimalAttention(6, 2, 5, max_len=9, **F64).fit_ksvd_(torch.randn(1, 9, 6, **F64))
    assert layer.w_e.shape == (2, 9, 5)
    assert (layer.w_e[..., 3:] == 0).all()
    assert (layer.lam[:, 3:] == 0).all()
    assert (layer.lam[:, :3] > 0).all()
    with pytest.raises(InvalidArgument, match="kernel of x is zero"):
        layer.fit_ksvd_(torch.zeros(1, 9, 6, **F64))
    nothing = torch.ones(2, 9, dtype=torch.bool)
    for x, hidden in ((torch.zeros(0, 9, 6), None), (torch.zeros(2, 0, 6), None), (torch.zeros(2, 9, 6), nothing)):
        with pytest.raises(InvalidArgument, match="one token or more"):
            layer.fit_ksvd_(x.double(), hidden)
    with pytest.raises(InvalidArgument, match="takes finite numbers"):
        layer.fit_ksvd_(torch.full((1, 9, 6), torch.nan, **F64))


def test_the_layer_as_its_dual():
    layer = make()
    x = torch.randn(2, 13, EMBED, **F64)
    hidden = torch.arange(13).expand(2, -1) >= torch.tensor([[13], [8]])
    kernel, dual, scores = layer.kernel_matrix(x, hidden), layer.to_dual(x, hidden), layer.scores(x, hidden)
    assert kernel.shape == (2, HEADS, 13, 13)
    torch.testing.assert_close(kernel @ dual.h_r, scores.e)
    torch.testing.assert_close(kernel.mT @ dual.h_e, scores.r)
    assert (kernel[1, :, 8:] == 0).all()
    assert (dual.h_r[1, :, 8:] == 0).all()
    assert int(torch.linalg.matrix_rank(kernel[0]).max()) <= WIDTH
    assert dual.residual_e.shape == (2, HEADS)


def test_penalties_pull_where_they_say():
    """From the same start, descent on the KKT residual finds a kernel SVD; descent on J^2 finds J = 0 and no more."""
    x = torch.randn(1, 13, EMBED, **F64)
    found = {}
    for penalty in ("objective", "kkt"):
        torch.manual_seed(0)
        layer = make()
        optimizer = torch.optim.Adam([layer.w_e, layer.w_r, layer.lam], 0.02)
        for _ in range(400):
            optimizer.zero_grad()
            layer(x)
            layer.ksvd_loss(penalty=penalty).backward()
            optimizer.step()
        layer(x)
        found[penalty] = float(layer.ksvd_loss().detach()), float(layer.kkt_residual(x).detach().mean())
    assert found["objective"][0] < 1e-8
    assert found["objective"][1] > 0.5
    assert found["kkt"][1] < 0.05
