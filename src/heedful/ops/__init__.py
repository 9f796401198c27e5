"""The same mathematics, faster: implementations of `attend`, behind one registry."""

from heedful.ops import fold, fused, linear, reference, stream
from heedful.ops.fused import short
from heedful.ops.linear import LinearState, Step
from heedful.ops.request import Cost, Implementation, Request

__all__ = ["IMPLEMENTATIONS", "Cost", "Implementation", "LinearState", "Request", "Step"]

IMPLEMENTATIONS: dict[str, Implementation] = {
    module.IMPLEMENTATION.name: module.IMPLEMENTATION for module in (short, fold, linear, fused, stream, reference)
}
"""Every way to attend, in the order in which `auto` asks."""
