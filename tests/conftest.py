"""One thread per worker, fixed seeds, Triton's interpreter where there is no GPU, and no address outside this machine."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Read once, when triton is imported: fused kernels then run on CPU tensors, in float32.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=300, help="random calls of attend to try (tests/attend/test_fuzz.py)")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
