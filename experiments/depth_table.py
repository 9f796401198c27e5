"""The projections of Levine et al. 2020 for the GPT-3 models, recomputed from the fitted law.

ln d = 5.039 + 0.0555 L, solved together with 12 L d² = N; printed values are those of arXiv 2006.12467 v3. Public models follow,
with the depth that the law gives for their width and its standard error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heedful.lens import depth
from heedful.lens.depth.known import CONFIGS

if TYPE_CHECKING:
    from heedful.cli.reproduce import Setting


def run(setting: Setting) -> dict[str, Any]:
    audits = [depth.audit(name).to_dict() for name in CONFIGS]
    return {"projections": [row.to_dict() for row in depth.published_table()], "audits": audits}


def table(result: dict[str, Any]) -> str:
    lines = ["| model | 12 L d² | trained L x d | printed L, d | ours L, d |", "|---|---|---|---|---|"]
    for row in result["projections"]:
        trained = f"{row['layers']} x {row['width']}" if row["layers"] else ""
        ours = f"{row['depth']:.2f}, {row['width_at_depth']:.0f}"
        printed = f"{row['printed_depth']}, {row['printed_width']}"
        lines.append(f"| {row['name']} | {row['params']:.3g} | {trained} | {printed} | {ours} |")
    lines += ["", "| model | L x d | parameters | L for its width | verdict |", "|---|---|---|---|---|"]
    for one in result["audits"]:
        shape = one["shape"]
        star = f"{one['depth_for_width']:.1f} ± {one['sigma_depth']:.1f}"
        size = f"{shape['layers']} x {shape['width']}"
        lines.append(f"| {one['name']} | {size} | {one['params']:,} | {star} | {one['verdict']} |")
    return "\n".join(lines)
