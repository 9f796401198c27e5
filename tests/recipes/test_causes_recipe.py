"""`heedful reproduce causal-oracle`: its quick form runs, and what is kept says what the docs claim."""

from __future__ import annotations

import json

import numpy as np
import pytest
from experiments.recipe import recipe, text

from heedful.cli.reproduce import root
from heedful.discovery import orientation


def test_kept_result_holds_the_counts():
    told = json.loads((root() / "experiments" / "results" / "causal-oracle.json").read_text())
    assert told["quick"] is False
    result = told["result"]
    plain, chosen = result["plain"], result["selection"]
    assert plain["graphs"] == plain["icd"] == plain["stable"] == plain["fci"] == plain["ordered"] >= 200
    assert chosen["graphs"] == chosen["icd"] == chosen["stable"] == chosen["fci"] >= 60
    assert plain["ordered_tests"] < plain["icd_tests"]
    for key in ("large", "large_selection"):
        row = result[key]
        assert row["icd"] == row["fci"] == row["both_ours"] == 0
        assert row["icd_is_fci"] == row["graphs"] == 300
    decisions = result["decisions"]
    assert decisions["equal"] + len(decisions["cases"]) == decisions["graphs"] == 60
    assert {one["why"] for one in decisions["cases"]} == {"R4", "conflict"}
    speed = result["speed"]
    assert speed["fci"]["ratio"] >= 30
    assert speed["fci"]["first_skeleton_equal"]
    assert next(one["seconds"] for one in speed["icd"] if one["nodes"] == 40) < 1.5
    assert "false mark" in text(recipe("causal-oracle"), result)


def test_disagreeing_rules_are_named():
    pytest.importorskip("causallearn")
    from experiments.beside import disagreements

    skeleton = np.zeros((6, 6), bool)
    for i, j in ((0, 2), (1, 2), (2, 3), (3, 4), (3, 5)):
        skeleton[i, j] = skeleton[j, i] = True
    sepsets = {(0, 1): (), (4, 5): (), (0, 3): (2,), (1, 3): (2,), (2, 4): (3,), (2, 5): (3,)}
    before = orientation.Oriented, dict(orientation.RULES)
    ours, torn = disagreements(skeleton, sepsets)
    assert (ours.marks == orientation.orient(orientation.open_marks(skeleton), sepsets).marks).all()
    assert torn == {end: {"arrowhead": {"R1"}, "tail": {"R1"}} for end in ((2, 3), (3, 2))}
    assert before == (orientation.Oriented, orientation.RULES)
