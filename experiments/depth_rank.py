"""Separation ranks of the network of Levine et al. 2020, as exact integers beside the bound S(d, L).

Rank over the field of 2^31 - 1 elements, two draws of the weights each; 2 tokens are one on each side. The paper proves bounds and
prints no ranks. The count S is ours; one head and enough tokens attain it, more heads or two tokens do not. Widths in
parentheses have tokens that lie in r dimensions (Wies et al. 2021): their rank is that of width r.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from heedful.lens.depth import sep_bound, separation_rank

if TYPE_CHECKING:
    from heedful.cli.reproduce import Setting

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
    file = setting.work / "ranks.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    cases = CASES[:14] if setting.quick else CASES
    for case in cases[len(done) :]:
        depth, width, *_, inner = case
        began = time.perf_counter()
        ranks = [separation_rank(*case[:4], embedding_rank=inner, seed=seed) for seed in (0, 1)]
        bound = sep_bound(inner or width, depth)
        done.append({"case": list(case), "ranks": ranks, "bound": bound})
        setting.say(f"{case}: {ranks} of {bound}, {time.perf_counter() - began:.1f} s")
        with file.open("a") as stream:
            stream.write(json.dumps(done[-1]) + "\n")
    return {"rows": done[: len(cases)]}


def table(result: dict[str, Any]) -> str:
    lines = ["| L | d | heads | tokens | rank | S(d, L) |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        depth, width, heads, tokens, inner = row["case"]
        wide = f"{width} (r = {inner})" if inner else str(width)
        rank = " / ".join(str(rank) for rank in sorted(set(row["ranks"])))
        lines.append(f"| {depth} | {wide} | {heads} | {tokens} | {rank} | {row['bound']} |")
    return "\n".join(lines)
