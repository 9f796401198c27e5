"""Launches made again with other tensors: what is kept is a form, not a call."""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from heedful.ops.fused import prepared
from heedful.ops.fused._blocks import Terms
from heedful.ops.fused.prepared import Prepared, Recorder


class Kernel:
    """Stands for a compiled kernel: notes what it is launched with, by Triton's handle or by its launcher in C."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    function, packed_metadata = 99, (4, 1, 0)

    def __init__(self):
        self.launches, self.raw = [], []
        self.metadata = self.run = self

    tensordesc_meta = ({"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 4], "fp4_padded": False},)

    def __getitem__(self, grid):
        if len(grid) == 1:
            return lambda *args, **options: self
        return lambda *args, stream: self.launches.append((grid, args, stream))

    def launch(self, *args):
        self.raw.append(args)


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)


def recorded(kernel, x, y):
    recorder = Recorder((x, None, y))
    out = recorder.made(torch.empty(2, 3))
    half = recorder.made(torch.empty(5), is_scratch=True)
    recorder.launch(
        kernel, (5,), TensorDescriptor(x, [2, 4], [4, 1], [1, 4]), y, out, half, torch.empty(0), 11,
        Terms(1, 1, 2, 2, y, hk=x), num_warps=4,
    )  # fmt: skip
    assert recorder.whole
    return recorder


def test_addresses_are_those_of_the_next_call(stream, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    kernel = Kernel()
    recorder = recorded(kernel, torch.zeros(2, 4), torch.zeros(3))
    x, y = torch.ones(2, 4), torch.ones(3)
    (out,) = Prepared(recorder).run((x, None, y), torch.device("cpu"))
    (grid, (tile, second, third, _, nothing, number, terms), given), *more = kernel.launches
    assert not more
    assert (grid, number, given, nothing) == ((5, 1, 1), 11, 7, 0)
    assert tile.base.data_ptr() == x.data_ptr()
    assert (tile.shape, tile.strides, tile.block_shape) == ([2, 4], [4, 1], [1, 4])
    assert (second, third) == (y.data_ptr(), out.data_ptr())
    assert terms == Terms(1, 1, 2, 2, y.data_ptr(), hk=x.data_ptr())
    assert out.shape == (2, 3)
    # Each call has a result of its own.
    assert Prepared(recorder).run((x, None, y), torch.device("cpu"))[0] is not out


def test_the_launcher_in_c_is_given_what_its_wrapper_would_give(stream, monkeypatch):
    """Descriptors are encoded once for an address, and another address has another one."""
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    encoded = []
    driver = type(
        "Driver",
        (),
        {"utils": type("Utils", (), {"fill_tma_descriptor": lambda *a: encoded.append(a) or len(encoded)})},
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver, raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: driver), raising=False)
    kernel = Kernel()
    known = Prepared(recorded(kernel, torch.zeros(2, 4), torch.zeros(3)))
    x, other, y = torch.ones(2, 4), torch.ones(2, 4), torch.ones(3)
    for one in (x, x, other):
        (out,) = known.run((one, None, y), torch.device("cpu"))
    assert [call[0] for call in encoded] == [x.data_ptr(), other.data_ptr()]
    first, second, third = kernel.raw
    assert first[:13] == (5, 1, 1, 7, 99, False, False, None, None, (4, 1, 0), None, None, None)
    assert first[13:18] == (1, 2, 4, 4, 1)  # the descriptor, its shape and its strides
    assert (second[13], third[13]) == (1, 2)
    assert third[18:20] == (y.data_ptr(), out.data_ptr())
    assert third[21:23] == (0, 11)
    assert third[23] == Terms(1, 1, 2, 2, y.data_ptr(), hk=other.data_ptr())


@pytest.mark.parametrize("version", ["3.6.0", "4.0.0"])
def test_no_tensor_of_the_first_call_is_kept(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    driver = type("Driver", (), {"utils": type("Utils", (), {"fill_tma_descriptor": None})})
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: driver), raising=False)
    tensors = [torch.zeros(2, 4), torch.zeros(3)]
    gone = [weakref.ref(x) for x in tensors]
    known = Prepared(recorded(Kernel(), *tensors))
    tensors.clear()
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert known.launches


def test_scratch_memory_is_nobody_elses(stream, monkeypatch):
    """It is held until all is launched: what is made meanwhile lies elsewhere."""
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    kernel, x = Kernel(), torch.zeros(2, 4)
    recorder = Recorder((x,))
    scratch = [recorder.made(torch.empty(512), is_scratch=True) for _ in range(2)]
    recorder.launch(kernel, (1,), *scratch, *(recorder.made(torch.empty(1024)) for _ in range(4)))
    known = Prepared(recorder)
    for _ in range(20):
        known.run((x,), torch.device("cpu"))
        first, second, *made = kernel.launches[-1][1]
        assert second - first >= 4 * 512
        assert all(at + 4096 <= first or at >= first + 4096 for at in made)


def test_launches_are_bound_once_for_a_set_of_addresses(stream, monkeypatch):
    """A stream or a form of its own, as another address, has launches of its own; sets that never come back are forgotten."""
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    monkeypatch.setattr(prepared, "BOUND", 4)
    monkeypatch.setattr(prepared, "LAUNCHES", {})
    kernel, tensors, bound = Kernel(), [torch.zeros(2, 4) for _ in range(5)], []
    recorder = Recorder((tensors[0],))
    recorder.launch(kernel, (1,), tensors[0])
    known, other, right = Prepared(recorder), Prepared(recorder), prepared.Launch.bound
    monkeypatch.setattr(prepared.Launch, "bound", lambda self, *given: bound.append(given) or right(self, *given))
    for at in (0, 1, 0, 1, 0):
        known.run((tensors[at],), torch.device("cpu"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 8, raising=False)
    known.run((tensors[0],), torch.device("cpu"))
    other.run((tensors[0],), torch.device("cpu"))
    places = [x.data_ptr() for x in tensors]
    assert bound == [([places[0]], 7), ([places[1]], 7), ([places[0]], 8), ([places[0]], 8)]
    assert [args for _, args, _ in kernel.launches] == [(places[at],) for at in (0, 1, 0, 1, 0, 0, 0)]
    assert [stream for _, _, stream in kernel.launches] == [7, 7, 7, 7, 7, 8, 8]
    for x in tensors[2:]:
        known.run((x,), torch.device("cpu"))
        assert len(prepared.LAUNCHES) <= 4


def test_launches_that_a_profiler_watches_are_tritons_own(monkeypatch):
    assert not prepared.is_watched()
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert prepared.is_watched()


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
