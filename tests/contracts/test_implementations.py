"""Every kernel x every implementation that accepts it x every kind of request, against the float64 reference."""

import os
from functools import cache
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from heedful.ops import linear, stream
from listed import CASES, KERNELS, PARAMETER_TOLERANCE, TOLERANCE, accepted, fits, relative_error, results

ACCEPTED = list(accepted())
NUMBER_OF_CASES = 6366
NUMBER_OF_FUSED_CASES = 157 if find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1" else 0


def says_something(impl, case_name, dtype):
    """Not the reference against itself, nor the rounding of `stream`, whose blocks are the reference's."""
    itself = impl == "reference" and dtype == torch.float64 and case_name != "nan-under-mask"
    return not itself and not (impl == "stream" and dtype == torch.bfloat16)


TESTED = [one for one in ACCEPTED if says_something(*one[1:])]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Sizes so small that every case crosses several blocks, chunks and groups of heads."""
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 3 * 7 * 19})
    monkeypatch.setattr(stream, "LEAST_ROWS", 5)
    monkeypatch.setattr(linear, "CHUNK", 5)


@cache
def reference(kernel_name, case_name, dtype):
    """In float64, on inputs rounded to `dtype`: what is left is the error of the implementation."""
    case = CASES[case_name]().to(dtype).to(torch.float64)
    if case_name == "nan-under-mask":
        # What the mask hides is replaced by ordinary numbers: the result must not depend on it.
        with torch.no_grad():
            case.key[1, :, 15:], case.value[1, :, 15:] = 1.0, 2.0
    return results(case, KERNELS[kernel_name](), "reference")


def test_the_suite_is_complete():
    assert sum(impl in ("triton", "short") for _, impl, _, _ in ACCEPTED) == NUMBER_OF_FUSED_CASES
    assert len(ACCEPTED) == NUMBER_OF_CASES + NUMBER_OF_FUSED_CASES
    kernels, _, cases, dtypes = map(set, zip(*ACCEPTED, strict=True))
    assert (kernels, cases, dtypes) == (set(KERNELS), set(CASES), set(TOLERANCE))
    # Every kernel has at least the two implementations that take any kernel, for every case.
    always = set(product(KERNELS, ("reference", "stream"), CASES, TOLERANCE))
    unfit = {(kernel, case) for kernel, case in product(KERNELS, CASES) if not fits(KERNELS[kernel](), CASES[case]())}
    assert {one for one in always if (one[0], one[2]) not in unfit} <= set(ACCEPTED)
    assert {kernel for kernel, _ in unfit} == {name for name in KERNELS if name.startswith("symmetric")}


@pytest.mark.parametrize(
    ("kernel_name", "impl", "case_name", "dtype"), TESTED, ids=[" ".join(map(str, one)) for one in TESTED]
)
def test_values_and_gradients(kernel_name, impl, case_name, dtype):
    out, gradients = results(CASES[case_name]().to(dtype), KERNELS[kernel_name](), impl)
    wanted, wanted_gradients = reference(kernel_name, case_name, dtype)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert relative_error(out, wanted) < TOLERANCE[dtype]
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        bound = TOLERANCE if name in ("query", "key", "value") else PARAMETER_TOLERANCE
        assert relative_error(gradient, wanted_gradients[name]) < bound[dtype], name
