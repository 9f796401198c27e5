"""How deep for how wide: a planner, an auditor, exact separation ranks, and a law of your own runs."""

from __future__ import annotations

from heedful._lazy import lazy

# Name -> the file it lives in. Planning needs neither torch nor numpy, so nothing is imported before it is used.
_HOMES = {
    **dict.fromkeys(("DepthCurve", "DepthLaw", "Law", "find_law"), "law"),
    "Shape": "shape",
    **dict.fromkeys(("Choice", "Plan"), "plans"),
    "plan": "planner",
    **dict.fromkeys(("Audit", "audit"), "auditor"),
    **dict.fromkeys(("Projection", "published_table"), "known"),
    **dict.fromkeys(("Bounds", "log3_sep_curve", "plot_sep_curves", "sep_bound", "theorem_bounds"), "theory"),
    **dict.fromkeys(("FloatRank", "float_separation_rank", "separation_rank"), "rank"),
    "PolynomialAttention": "polynomial",
    "fit_law": "fit",
    **dict.fromkeys(("LayerUse", "Usefulness", "skip_layers"), "skipping"),
}

__all__ = sorted(_HOMES)


__getattr__, __dir__ = lazy(__name__, _HOMES)
