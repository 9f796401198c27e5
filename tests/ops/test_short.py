"""Many short sequences: values and gradients in Triton's interpreter against float64, whatever the strides."""

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernels need triton, which exists for Linux")

from heedful import Gaussian, Softmax, Unsupported, attend, masks
from heedful.ops.fused.short import short_attention
from interpreted import needs_interpreter

pytestmark = [needs_interpreter, pytest.mark.usefixtures("unwritten_is_nan")]


def oracle(query, key, value, scale):
    score = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    return torch.einsum("bhqk,bhke->bhqe", score.exp() / score.exp().sum(-1, keepdim=True), value)


@pytest.mark.parametrize(("queries", "keys", "size", "width"), [(1, 1, 3, 5), (7, 7, 8, 8), (17, 13, 5, 11), (37, 41, 16, 16), (64, 3, 32, 64)])  # fmt: skip
def test_values_and_gradients(queries, keys, size, width):
    generator = torch.Generator().manual_seed(queries)
    shapes = (queries, size), (keys, size), (keys, width)
    given = [torch.randn(3, 2, *shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    above = torch.randn(3, 2, queries, width, dtype=torch.float64, generator=generator)
    narrow = [x.detach().float().requires_grad_() for x in given]
    out = attend(*narrow, scale=0.37, impl="short")
    wanted = oracle(*given, 0.37)
    assert (out - wanted).abs().max() < 1e-5
    got, expected = torch.autograd.grad(out, narrow, above.float()), torch.autograd.grad(wanted, given, above)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() < 1e-5


def test_parts_of_one_tensor():
    """Query, key and value as one map gives them: heads beside one another, no copy."""
    packed = torch.randn(5, 11, 3, 2, 8, requires_grad=True)
    parts = packed.permute(2, 0, 3, 1, 4).unbind()
    out = attend(*parts, impl="short")
    assert out.transpose(1, 2).is_contiguous()
    (gradient,) = torch.autograd.grad(out.square().sum(), packed)
    (wanted,) = torch.autograd.grad(attend(*parts, impl="reference").square().sum(), packed)
    assert (gradient - wanted).abs().max() < 1e-4


def test_large_scores_and_other_axes():
    query = torch.randn(2, 3, 2, 5, 4) * 100
    assert (attend(query, query, query, impl="short") - attend(query, query, query)).abs().max() < 1e-4
    assert attend(query[0, 0, 0], query[0, 0, 0], query[0, 0, 0], impl="short").shape == (5, 4)


def test_not_a_number_stays_in_its_sequence():
    query = torch.randn(3, 2, 5, 4)
    query[1, 0, 2] = torch.nan
    out = attend(query, query, query, impl="short").isnan()
    assert out[1, 0].all()
    assert out.sum() == 20


def test_what_it_refuses():
    x = torch.randn(2, 2, 65, 4)
    for given, why in (({}, "at most 64"), ({"is_causal": True}, "no mask"), ({"kernel": Gaussian()}, "plain softmax")):
        with pytest.raises(Unsupported, match=why):
            attend(x, x, x, impl="short", **given)
    with pytest.raises(Unsupported, match="plain softmax"):
        attend(x[:, :, :9], x[:, :, :9], x[:, :, :9], impl="short", kernel=Softmax(torch.ones(2)))
    y = x[:, :, :9].requires_grad_()
    (first,) = torch.autograd.grad(attend(y, y, y, impl="short").sum(), y, create_graph=True)
    with pytest.raises(Unsupported, match="no second derivatives"):
        first.sum().backward()
    with pytest.raises(Unsupported, match="no mask"):
        attend(y, y, y, masks.window(2), impl="short")


def test_the_operator_as_torch_sees_it():
    given = [torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(short_attention, (*given, 0.5), test_utils=("test_schema", "test_faketensor"))
