"""How much of a model's attention is counting: scores of heads beside associations of words in a corpus."""

from typing import TYPE_CHECKING

from heedful._lazy import lazy

# Name -> the file it lives in; nothing is imported before it is used.
_HOMES = {
    **dict.fromkeys(("CountedHead", "CountedHeads"), "result"),
    **dict.fromkeys(("explain_head", "explain_heads"), "heads"),
    "installed_counts": "installed",
}

__all__ = ["CountedHead", "CountedHeads", "explain_head", "explain_heads", "installed_counts"]


__getattr__, __dir__ = lazy(__name__, _HOMES)

if TYPE_CHECKING:
    from heedful.lens.corpus.heads import explain_head, explain_heads
    from heedful.lens.corpus.installed import installed_counts
    from heedful.lens.corpus.result import CountedHead, CountedHeads
