"""Separation ranks of the network of Levine et al. 2020, as exact integers beside the bound S(d, L).

Rank over the field of 2^31 - 1 elements, two draws of the weights each; 2 tokens are one on each side. The paper proves bounds and
prints no ranks. The count S is ours; one head and enough tokens attain it, more heads or two tokens do not. Widths in
parentheses have tokens that lie in r dimensions (Wies et al. 2021): their rank is that of width r.
"""

from __future__ import annotations

from typing import Any

from experiments.recipe import Block, Setting, Table
from heedful.lens.depth import sep_bound, separation_rank

# depth, width, heads, tokens, rank of the embedding
CASES: list[tuple[int, int, int, int, int | None]] = [
    *((2, d, h, n, None) for d, h in [(2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)] for n in (2, 4)),
    *((2, d, h, n, None) for d, h in [(5, 1), (5, 5), (6, 1), (6, 2), (6, 3), (6, 6)] for n in (2, 4)),
    *((3, d, h, n, None) for d, h in [(1, 1), (2, 1), (2, 2)] for n in (2, 4)),
    *((2, d, h, 4, r) for d, h, r in [(4, 1, 1), (4, 1, 2), (6, 1, 2), (4, 2, 2), (4, 1, 3), (6, 1, 3), (6, 3, 3)]),
    (3, 4, 1, 4, 2),
    (3, 3, 1, 6, None),
]


def run(setting: Setting) -> dict[str, Any]:
    cases = CASES[:14] if setting.quick else CASES
    return {"rows": [setting.store().get(f"case {case}", lambda case=case: ranked(*case)) for case in cases]}


def ranked(depth: int, width: int, heads: int, tokens: int, inner: int | None) -> dict[str, Any]:
    """The ranks of two draws of the weights, and the bound."""
    ranks = [separation_rank(depth, width, heads, tokens, embedding_rank=inner, seed=seed) for seed in (0, 1)]
    return {"case": [depth, width, heads, tokens, inner], "ranks": ranks, "bound": sep_bound(inner or width, depth)}


def tables(result: dict[str, Any]) -> list[Block]:
    rows = []
    for row in result["rows"]:
        depth, width, heads, tokens, inner = row["case"]
        wide = f"{width} (r = {inner})" if inner else width
        rows.append([depth, wide, heads, tokens, " / ".join(map(str, sorted(set(row["ranks"])))), row["bound"]])
    return [Table(["L", "d", "heads", "tokens", "rank", "S(d, L)"], rows)]
