"""Discrete optimal transport: plans between clouds of points, and how near a movement of points is to the cheapest one."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    **dict.fromkeys(("Plan", "assignment", "wasserstein"), "plans"),
    "gaussian_w2": "gaussians",
    **dict.fromkeys(("monge_gap", "transport_metrics"), "metrics"),
    "TransportMetrics": "result",
}

__all__ = ["Plan", "TransportMetrics", "assignment", "gaussian_w2", "monge_gap", "transport_metrics", "wasserstein"]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.transport.gaussians import gaussian_w2
    from heedful.transport.metrics import monge_gap, transport_metrics
    from heedful.transport.plans import Plan, assignment, wasserstein
    from heedful.transport.result import TransportMetrics
