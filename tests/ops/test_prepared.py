"""Launches made again with other tensors: what is kept is a form, not a call."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.tools.tensor_descriptor import TensorDescriptor

from heedful.ops.fused import prepared
from heedful.ops.fused._blocks import Terms
from heedful.ops.fused.prepared import SLOTS, Prepared, Recorder


class Kernel:
    """Stands for a compiled kernel: notes what it is launched with."""

    def __init__(self):
        self.made, self.launches = [], []

    def __getitem__(self, grid):
        return lambda *args, **options: self.made.append((grid, args)) or Compiled(self)


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, stream: self.kernel.launches.append((grid, args, stream))


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)


def recorded(kernel, x, y):
    recorder = Recorder((x, None, y))
    out = recorder.made(torch.empty(2, 3))
    recorder.launch(
        kernel, (5,), TensorDescriptor(x, [2, 4], [4, 1], [1, 4]), y, out, 11, Terms(1, 1, 2, 2, y, hk=x), num_warps=4
    )
    return recorder


def test_places_are_filled_with_the_tensors_of_the_next_call(stream):
    kernel = Kernel()
    recorder = recorded(kernel, torch.zeros(2, 4), torch.zeros(3))
    assert recorder.whole
    x, y = torch.ones(2, 4), torch.ones(3)
    tensors = Prepared(recorder).run((x, None, y), torch.device("cpu"))
    (grid, (tile, second, out, number, terms), given), *more = kernel.launches
    assert not more
    assert (grid, number, given) == ((5, 1, 1), 11, 7)
    assert tile.base is x
    assert (tile.shape, tile.strides, tile.block_shape) == ([2, 4], [4, 1], [1, 4])
    assert second is y
    assert terms == Terms(1, 1, 2, 2, terms.alpha, hk=terms.hk)
    assert terms.alpha is y
    assert terms.hk is x
    assert out is tensors[SLOTS]
    assert out.shape == (2, 3)
    # Each call has a result of its own.
    assert Prepared(recorder).run((x, None, y), torch.device("cpu"))[SLOTS] is not out


def test_one_tensor_in_two_places_is_not_kept():
    x = torch.zeros(2, 4)
    assert not Recorder((x, x)).whole


def test_a_copy_that_the_call_made_itself_is_not_kept():
    kernel, x = Kernel(), torch.zeros(2, 4)
    recorder = Recorder((x,))
    recorder.launch(kernel, (1,), x.clone())
    assert not recorder.whole


def test_what_did_not_fit_is_forgotten():
    kernel, x = Kernel(), torch.zeros(2, 4)
    recorder = Recorder((x,))
    recorder.launch(kernel, (1,), x)
    mark = recorder.mark()
    recorder.made(torch.empty(9))
    recorder.launch(kernel, (2,), x)
    recorder.back_to(mark)
    assert (len(recorder.launches), recorder.rooms) == (1, [])


def test_forms_differ_by_all_that_a_kernel_is_compiled_for(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    x = torch.zeros(4, 8)
    known = prepared.form((x, None), "forward", 1)
    assert known == prepared.form((torch.ones(4, 8), None), "forward", 1)
    others = [(x.mT, None), (x[:2], None), (x.double(), None), (x, x), (x[None], None)]
    assert len({known, *(prepared.form(other, "forward", 1) for other in others)}) == 6
    assert known != prepared.form((x, None), "backward", 1)
    assert prepared.form((x[0, 1:],), "forward") is None  # begins at four bytes
