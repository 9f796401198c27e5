"""What a kernel's traits say of turning the embedding is what the audit of a layer made of it finds."""

import pytest
import torch

from heedful import (
    Exponential,
    FeatureMap,
    Gaussian,
    HigherOrder,
    Matern,
    PerHead,
    RationalQuadratic,
    Sigmoid,
    Silu,
    Softmax,
    Tanh,
    attend,
)
from heedful.lens.symmetry import check_equivariance

MIX = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
INVARIANT = [
    Tanh(bias=0.3),
    Silu(),
    Exponential(0.1),
    Matern(2.5, 2.0),
    RationalQuadratic(0.7),
    HigherOrder(Sigmoid(), (2, 4, 6)),
    Softmax().symmetric(),
    Sigmoid().symmetric(),
    PerHead((Softmax(), Gaussian(2.0).symmetric())),
]
NOT_INVARIANT = [
    HigherOrder(Tanh(), (2, 6), (MIX, MIX)),
    HigherOrder(Sigmoid(), mix=MIX).symmetric(),
    FeatureMap("elu").symmetric(),
    PerHead((Softmax(), FeatureMap("relu"))),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", [*INVARIANT, *NOT_INVARIANT], ids=repr)
def test_the_audit_agrees_with_the_traits(kernel, is_causal):
    heads = len(kernel.kernels) if isinstance(kernel, PerHead) else 1

    def layer(x):
        x = x.expand(heads, *x.shape)
        return attend(x, x, x, is_causal=is_causal, kernel=kernel).sum(dim=0)

    report = check_equivariance(layer, group="O", d=4, trials=20)
    assert report.passed == kernel.traits.invariant == (kernel in INVARIANT)
