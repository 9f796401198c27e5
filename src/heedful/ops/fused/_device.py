"""Facts about this installation and its chips, in forms that Dynamo can trace."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

# Looked up when heedful is imported, without importing triton: the search for a module cannot be traced.
HAS_TRITON = find_spec("triton") is not None

ROOMY = 160 * 1024
"""Bytes of shared memory that a multiprocessor of a data-centre chip has at least."""


class Chip(NamedTuple):
    """Compute capability, multiprocessors, and the bytes of shared memory of each."""

    major: int
    processors: int
    shared: int


def chip(device: torch.device) -> Chip:
    """What a CUDA device is: torch knows it without asking the device, and Dynamo as a constant (it traces no cache)."""
    facts = torch.cuda.get_device_properties(device)
    return Chip(facts.major, facts.multi_processor_count, getattr(facts, "shared_memory_per_multiprocessor", ROOMY))
