"""Fused kernels in Triton's interpreter, whose blocks are 16 and 32 long: a length of 37 crosses some and fills none."""

import math

import pytest
import torch

from heedful import Cosine, Gaussian, Polynomial, Relu, ReluSquared, Sigmoid, Softmax
from listed import Comparison

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs Triton's interpreter, which runs where there is no GPU; see test_gpu.py"
)
DEVICE = "cpu"
HEADS = 2
NAN, INF = math.nan, math.inf


def per_head(low=0.5):
    """Numbers that float32 holds exactly."""
    return torch.tensor([low, low + 0.75], dtype=torch.float64)


def shaped(queries=37, keys=41, size=16, width=16, batch=1, heads=HEADS, key_heads=None):
    shapes = [(batch, heads, queries, size), *((batch, key_heads or heads, keys, n) for n in (size, width))]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def assert_same(kernel, *args, bound=1e-5, floor=1.0, **kwargs):
    errors = Comparison(device=DEVICE, floor=floor).errors(kernel, *args, **kwargs)
    # A parameter's gradient is a sum over all pairs that cancels: that of a normalised power's scale is zero.
    bounds = dict.fromkeys(kernel.tensors(), 10 * bound)
    assert not {name: error for name, error in errors.items() if not error < bounds.get(name, bound)}


KERNELS = {
    "softmax": Softmax(per_head(0.25)),
    "gaussian": Gaussian(per_head(2.0)),
    "gaussian-raw": Gaussian(per_head(2.0), normalize=False),
    "sigmoid": Sigmoid(per_head(0.25), per_head(-1.0)),
    "relu": Relu(per_head()),
    "relu-squared": ReluSquared(per_head(0.25)),
    "polynomial-1": Polynomial(1, per_head(), per_head(0.25)),
    "polynomial-3": Polynomial(3, per_head(), per_head(0.25)),
    "cosine": Cosine(),
    "normalized": ReluSquared(per_head(0.25)).normalized(),
    "averaged": Sigmoid(bias=per_head()).averaged(),
    "half": 0.5 * Sigmoid(),
    "scaled": per_head() * Sigmoid(bias=0.25),
    "product": Softmax() * Gaussian(per_head(2.0)),
}
LENGTHS = torch.tensor([41, 11])
# Forms of the operator.
SOFTMAX, GAUSSIAN = {"activation": "exp", "division": 1}, {"activation": "exp", "division": 1, "distance": True}


def fused(query, key, value, **given):
    """The operator with what is not given left out."""
    settings = {
        "block_size": [1, 1],
        "low": None,
        "high": None,
        "activation": "exp",
        "degree": 1,
        "division": 0,
        "distance": False,
    }
    names = ("beta", "left", "right", "bias", "lengths", "query_ids", "key_ids", "keep", "blocks")
    alpha = torch.full((query.shape[1],), 0.25, device=query.device)
    tensors = {name: given.get(name) for name in names}
    tensors = {name: None if x is None else x.to(query.device) for name, x in tensors.items()}
    return query, key, value, alpha, *tensors.values(), *(given.get(name, x) for name, x in settings.items())
