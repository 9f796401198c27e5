"""Which counters can be added up."""

from __future__ import annotations

from typing import Any

from heedful._errors import InvalidArgument
from heedful.corpus._documents import described

NAMES = ("window", "weighting", "max_vocabulary", "min_count", "unknown", "subsample", "seed", "per_distance")


def check_same(one: Any, other: Any) -> None:
    """Refuses to merge what is no counter, or one with other settings."""
    if not hasattr(other, "_settled"):
        raise InvalidArgument(f"merge takes another {type(one).__name__}; got {type(other).__name__}")
    if one.folder is not None:
        raise InvalidArgument("a folder keeps documents that were given; merge into a counter without one")
    for name in NAMES:
        if getattr(one, name) != getattr(other, name):
            raise InvalidArgument(
                f"counters of one {name} can be merged; got {getattr(one, name)!r} and {getattr(other, name)!r}"
            )
    names = [described(counter.tokenizer) for counter in (one, other)]
    if names[0] != names[1]:
        raise InvalidArgument(f"counters of one tokenizer can be merged; got {names[0]} and {names[1]}")
    if (one._settled is None) != (other._settled is None) or one._settled != other._settled:
        raise InvalidArgument("counters of one vocabulary can be merged; give both the same vocabulary=...")
