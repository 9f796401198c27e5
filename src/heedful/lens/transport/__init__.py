"""How points move: during training at a tapped module, and in a finished model from layer to layer."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    "TransportTracker": "tracker",
    "TransportCurve": "curve",
    **dict.fromkeys(("LayerMove", "LayerTransport"), "result"),
    "between_layers": "layers",
    "distinct_moves": "paths",
}

__all__ = ["LayerMove", "LayerTransport", "TransportCurve", "TransportTracker", "between_layers", "distinct_moves"]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.lens.transport.curve import TransportCurve
    from heedful.lens.transport.layers import between_layers
    from heedful.lens.transport.paths import distinct_moves
    from heedful.lens.transport.result import LayerMove, LayerTransport
    from heedful.lens.transport.tracker import TransportTracker
