"""Tables: predictions that look at other rows, missing cells filled in, and classes as places that points are carried to."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> where it lives: files and networks need no scikit-learn.
_HOMES = {
    "Corruption": "results",
    "DatapointClassifier": "datapoints",
    "DatapointRegressor": "datapoints",
    "Deletion": "results",
    "InContextClassifier": "untrained",
    "InContextNetwork": "in_context",
    "InContextRegressor": "untrained",
    "RowExplanation": "results",
    "Rows": "network",
    "TableData": "files",
    "TableNetwork": "network",
    "TransportClassifier": "transport",
    "estimator_for": "files",
    "pretrain_head": "heads",
    "read": "files",
}

__all__ = [
    "Corruption",
    "DatapointClassifier",
    "DatapointRegressor",
    "Deletion",
    "InContextClassifier",
    "InContextNetwork",
    "InContextRegressor",
    "RowExplanation",
    "Rows",
    "TableData",
    "TableNetwork",
    "TransportClassifier",
    "estimator_for",
    "pretrain_head",
    "read",
]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.tables.datapoints import DatapointClassifier, DatapointRegressor
    from heedful.tables.files import TableData, estimator_for, read
    from heedful.tables.heads import pretrain_head
    from heedful.tables.in_context import InContextNetwork
    from heedful.tables.network import Rows, TableNetwork
    from heedful.tables.results import Corruption, Deletion, RowExplanation
    from heedful.tables.transport import TransportClassifier
    from heedful.tables.untrained import InContextClassifier, InContextRegressor
