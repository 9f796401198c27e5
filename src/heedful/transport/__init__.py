"""Discrete optimal transport: plans between clouds of points, and how near a movement of points is to the cheapest one."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    **dict.fromkeys(("Plan", "assignment", "assignments", "wasserstein"), "plans"),
    "gaussian_w2": "gaussians",
    **dict.fromkeys(("monge_gap", "transport_metrics"), "metrics"),
    "TransportMetrics": "result",
    **dict.fromkeys(("monge_gap_loss", "straightness_loss"), "losses"),
}

__all__ = [
    "Plan",
    "TransportMetrics",
    "assignment",
    "assignments",
    "gaussian_w2",
    "monge_gap",
    "monge_gap_loss",
    "straightness_loss",
    "transport_metrics",
    "wasserstein",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.transport.gaussians import gaussian_w2
    from heedful.transport.losses import monge_gap_loss, straightness_loss
    from heedful.transport.metrics import monge_gap, transport_metrics
    from heedful.transport.plans import Plan, assignment, assignments, wasserstein
    from heedful.transport.result import TransportMetrics
