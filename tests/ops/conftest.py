"""What a kernel forgets to write is seen."""

import math

import pytest
import torch


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """What a kernel forgets to write is NaN, not yesterday's result."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
