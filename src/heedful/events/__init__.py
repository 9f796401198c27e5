"""Sequences of events with times: what comes next, what comes next if it happens at time t, and when."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> where it lives: files, networks and densities need no scikit-learn.
_HOMES = {
    "Curve": "results",
    "Evaluation": "results",
    "EventData": "files",
    "EventNetwork": "network",
    "Futures": "results",
    "LogNormalMixture": "density",
    "NextEvent": "next_event",
    "Peak": "cycles",
    "Periodogram": "cycles",
    "periods": "cycles",
    "read": "files",
}

__all__ = [
    "Curve",
    "Evaluation",
    "EventData",
    "EventNetwork",
    "Futures",
    "LogNormalMixture",
    "NextEvent",
    "Peak",
    "Periodogram",
    "periods",
    "read",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.events.cycles import Peak, Periodogram, periods
    from heedful.events.density import LogNormalMixture
    from heedful.events.files import EventData, read
    from heedful.events.network import EventNetwork
    from heedful.events.next_event import NextEvent
    from heedful.events.results import Curve, Evaluation, Futures
