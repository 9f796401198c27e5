"""Torch's attention of more sequences than a GPU launches at once."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops.fold import in_parts


@pytest.mark.parametrize("shared", [(), ("key", "value"), ("query",)], ids=str)
@pytest.mark.parametrize("mask", [None, (19, 23), (7, 1, 19, 23), (1, 3, 1, 23)], ids=str)
def test_parts_of_a_batch_are_the_whole(mask, shared):
    torch.manual_seed(0)
    sizes = {"query": (7, 3, 19, 5), "key": (7, 3, 23, 5), "value": (7, 3, 23, 5)}
    given = [torch.randn(1 if name in shared else 7, *size[1:], dtype=torch.float64) for name, size in sizes.items()]
    leaves = [x.requires_grad_() for x in given]
    hidden = None if mask is None else torch.rand(mask) < 0.7
    wanted = scaled_dot_product_attention(*leaves, hidden, scale=0.3)
    found = in_parts(3, *leaves, hidden, scale=0.3)
    weight = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    for one, other in zip(
        torch.autograd.grad(found, leaves, weight), torch.autograd.grad(wanted, leaves, weight), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
