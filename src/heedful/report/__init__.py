"""What people see: blocks that a lens is told in, and the terminal, the page and the pictures that are made of them."""

from heedful.report.blocks import (
    Block,
    Columns,
    Figure,
    Finding,
    Graph,
    Items,
    Link,
    Map,
    Mark,
    Note,
    Prose,
    Section,
    Table,
    Text,
    plain_text,
)

__all__ = [
    "Block",
    "Columns",
    "Figure",
    "Finding",
    "Graph",
    "Items",
    "Link",
    "Map",
    "Mark",
    "Note",
    "Prose",
    "Section",
    "Table",
    "Text",
    "plain_text",
]
