"""Equation 3.2 of the symmetry paper with its own matrix between every two factors, as matrix products."""

import pytest
import torch

from heedful import Gaussian, HigherOrder, InvalidArgument, Kernel, Polynomial, Sigmoid, Tanh, attend, masks
from heedful.nn import Attention
from listed import inputs

MASKS = {
    "none": (None, torch.ones(2, 1, 11, 11, dtype=torch.float64)),
    "causal": (masks.causal, torch.ones(2, 1, 11, 11, dtype=torch.float64).tril()),
    "padding": (masks.padding([11, 5]), (torch.arange(11) < torch.tensor([11, 5])[:, None])[:, None, None].double()),
}
ORDERS = [6, 8, (2, 4), (4, 6), (2, 4, 6), (2, 6)]


def matrices(count, *shape):
    generator = torch.Generator().manual_seed(2)
    made = torch.randn(count, *shape, 7, 7, generator=generator, dtype=torch.float64) / 7
    return tuple(made.unbind())


def scores(query, key, mixes, orders, seen):
    """Sum over orders of Q K^T/n K M1 K^T/n K M2 ... K^T, where every inner K^T K is a mean over what the row sees."""
    seen = seen.expand(2, 1, 11, 11)
    left, total = query, 0
    if 2 in orders:
        total = left @ key.mT
    for n, mix in enumerate(mixes):
        left = (left @ key.mT * seen / seen.sum(-1, keepdim=True)) @ key @ mix
        if 2 * n + 4 in orders:
            total = total + left @ key.mT
    return total


def answers(function, leaves):
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("heads", [(), (3,)], ids=["shared", "per head"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_one_matrix_between_every_two_factors(order, mask, heads):
    """Values and every gradient to 1e-10, inside one activation."""
    orders = order if isinstance(order, tuple) else (order,)
    mixes = matrices(max(orders) // 2 - 1, *heads)
    leaves = [x.requires_grad_() for x in (*inputs(11, 11), *mixes)]
    hiding, seen = MASKS[mask]

    def direct(query, key, value, *mixes):
        return (torch.tanh(0.3 * scores(query, key, mixes, orders, seen) + 0.1) * seen) @ value

    wanted = answers(direct, leaves)
    for impl in ("reference", "stream", "auto"):

        def ours(query, key, value, *mixes, impl=impl):
            return attend(query, key, value, hiding, kernel=HigherOrder(Tanh(0.3, 0.1), order, mixes), impl=impl)

        for one, other in zip(answers(ours, leaves), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_matrices_stand_in_their_order():
    """Negative control: the same matrices the other way round, or one of them twice, give something else."""
    query, key, value = inputs(11, 11)
    first, second = matrices(2)
    out = attend(query, key, value, kernel=HigherOrder(Tanh(), 6, (first, second)))
    for other in ((second, first), (first, first), first):
        assert (attend(query, key, value, kernel=HigherOrder(Tanh(), 6, other)) - out).abs().max() > 1e-3
    both = attend(query, key, value, kernel=HigherOrder(Tanh(), 6, (first, first)))
    torch.testing.assert_close(both, attend(query, key, value, kernel=HigherOrder(Tanh(), 6, first)))


def test_orders_add_inside_the_activation():
    query, key, value = inputs(11, 11)
    whole = HigherOrder(Polynomial(1), (2, 4, 6))
    parts = [Polynomial(1), HigherOrder(Polynomial(1), 4), HigherOrder(Polynomial(1), 6)]
    wanted = sum(attend(query, key, value, kernel=kernel) for kernel in parts)
    torch.testing.assert_close(attend(query, key, value, kernel=whole), wanted)
    # Of distances, it is the one distance to the sum of the moved queries.
    moved = query + (query @ key.mT / 11) @ key
    wanted = attend(moved, key, value, kernel=Gaussian(3.0))
    torch.testing.assert_close(attend(query, key, value, kernel=HigherOrder(Gaussian(3.0), (2, 4))), wanted)


def test_several_matrices_are_data(tmp_path):
    kernel = HigherOrder(Sigmoid(), [2, 6], [torch.eye(3), torch.ones(3, 3, requires_grad=True)])
    assert list(kernel.tensors()) == ["mix.0", "mix.1"]
    again = Kernel.from_json(kernel.to_json())
    assert again == kernel
    assert hash(again) == hash(kernel)
    assert again.tensors()["mix.1"].requires_grad
    assert "mix=(tensor(1, 0, 0, 0, ...; shape=(3, 3)), tensor(1, 1, 1, 1" in repr(kernel)
    assert kernel != HigherOrder(Sigmoid(), (2, 6), (torch.eye(3), torch.zeros(3, 3)))
    assert kernel != HigherOrder(Sigmoid(), (2, 6), torch.eye(3))
    assert kernel.with_tensors({"mix.0": torch.ones(3, 3)}).mix[0].sum() == 9
    kernel.save_pretrained(tmp_path)
    assert Kernel.from_pretrained(tmp_path) == kernel
    assert not kernel.traits.invariant
    assert HigherOrder(Sigmoid(), (2, 6)).traits.invariant


def test_a_layer_learns_every_matrix():
    mixes = tuple(torch.nn.Parameter(torch.eye(4)) for _ in range(2))
    layer = Attention(12, 3, kernel=HigherOrder(Sigmoid(), (2, 4, 6), mixes))
    x = torch.randn(2, 5, 12)
    layer(x, x, x)[0].square().sum().backward()
    assert all(mix.grad is not None and mix.grad.abs().max() > 0 for mix in mixes)


@pytest.mark.parametrize("mask", [None, masks.causal], ids=["none", "causal"])
def test_orders_compile_with_their_gradients(mask):
    torch.compiler.reset()
    leaves = [x.float().requires_grad_() for x in (*inputs(11, 11), *matrices(2))]

    def run(query, key, value, *mixes):
        return attend(query, key, value, mask, kernel=HigherOrder(Sigmoid(), (2, 4, 6), mixes))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(answers(run, leaves), answers(compiled, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_matrices_that_do_not_fit_are_refused_before_work():
    x = torch.randn(1, 3, 5, 7)
    with pytest.raises(InvalidArgument, match=r"mix has shape \(4, 4\); expected \(\.\.\., 7, 7\)"):
        attend.plan(x, x, x, kernel=HigherOrder(order=6, mix=(torch.eye(7), torch.eye(4))))
    with pytest.raises(InvalidArgument, match="mix has 2 matrices; expected 1 or heads = 3"):
        attend(x, x, x, kernel=HigherOrder(mix=torch.ones(2, 7, 7)))
