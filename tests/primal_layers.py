"""PrimalAttention layers to test, in float64."""

import pytest
import torch

from heedful.nn import PrimalAttention

F64 = {"dtype": torch.float64}
HEADS, WIDTH, RANK = 3, 5, 4
EMBED = HEADS * WIDTH
SAMPLINGS = ["segment_mean", "stride"]


def make(rows=8, **more):
    """A layer in float64 with biases and lambda away from their start; `rows` is n'."""
    given = {"max_len": rows, "rank_multi": 50, **F64, **more}
    if given.get("weights") == "static" and not given.get("causal"):
        with pytest.warns(UserWarning, match="mixes no tokens"):
            return PrimalAttention(EMBED, HEADS, RANK, **given)
    return PrimalAttention(EMBED, HEADS, RANK, **given)
