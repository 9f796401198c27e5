"""The projections of Levine et al. 2020 for the GPT-3 models, recomputed from the fitted law.

ln d = 5.039 + 0.0555 L, solved together with 12 L d² = N; printed values are those of arXiv 2006.12467 v3. Public models follow,
with the depth that the law gives for their width and its standard error.
"""

from __future__ import annotations

from typing import Any

from experiments.recipe import Block, Setting, Table
from heedful.lens import depth
from heedful.lens.depth.known import CONFIGS


def run(setting: Setting) -> dict[str, Any]:
    audits = [depth.audit(name).to_dict() for name in CONFIGS]
    return {"projections": [row.to_dict() for row in depth.published_table()], "audits": audits}


def tables(result: dict[str, Any]) -> list[Block]:
    projections = [
        [
            row["name"],
            f"{row['params']:.3g}",
            f"{row['layers']} x {row['width']}" if row["layers"] else "",
            f"{row['printed_depth']}, {row['printed_width']}",
            f"{row['depth']:.2f}, {row['width_at_depth']:.0f}",
        ]
        for row in result["projections"]
    ]
    audits = [
        [
            one["name"],
            f"{one['shape']['layers']} x {one['shape']['width']}",
            f"{one['params']:,}",
            f"{one['depth_for_width']:.1f} ± {one['sigma_depth']:.1f}",
            one["verdict"],
        ]
        for one in result["audits"]
    ]
    columns = ["model", "12 L d²", "trained L x d", "printed L, d", "ours L, d"]
    return [
        Table(columns, projections, paper="printed L, d"),
        Table(["model", "L x d", "parameters", "L for its width", "verdict"], audits),
    ]
