"""What the symmetry laboratory says of a model in the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heedful._errors import HeedfulError, Unsupported
from heedful._runtime import undisturbed
from heedful.bridges.structure import OUTWARD, Call, attention_roles, calls_of, positions_of
from heedful.lens.sections import Subject
from heedful.lens.symmetry._report import Report
from heedful.lens.symmetry.equivariance import CAUSAL, check_equivariance, check_permutation
from heedful.report import Items, Prose, Section, Table

# Short inputs and few moves keep the section near a second; errors are of size one or of rounding, seldom between.
TOKENS, SHUFFLES, TURNS = 24, 4, 2

# Turning the weights of a layer costs d^3: so much is spent on all layers, and above the widest nothing.
WORK, WIDEST = 6 * 384**3, 1024


@dataclass(frozen=True)
class LayerRow:
    """What was found of one layer."""

    name: str
    position: Report
    moved: Report | None
    held: Report | None
    why: str

    def cells(self) -> list[str]:
        """The table row."""
        position = _verdict(self.position) if self.position.passed else f"does not hold: {self.why}"
        return [self.name, position, _verdict(self.moved), _verdict(self.held)]


def section(subject: Subject) -> Section:
    """Position and embedding symmetry of every attention layer, on the model's own activations for the text."""
    calls = _calls(subject)
    turned = _spread(len(calls), calls[0].x.shape[-1]) if calls else set()
    rows, refused = [], {}
    for at, call in enumerate(calls):
        subject.progress(at, len(calls), "symmetry")
        try:
            rows.append(_row(call, turn=at in turned))
        except HeedfulError as error:
            refused[call.name] = " ".join(str(error).split())
    if not rows:
        why = next(iter(refused.values()), "it was not called with a sequence of vectors")
        raise Unsupported(f"no attention layer of {type(subject.model).__name__} runs by itself: {why}")
    norms, places = _norms(subject.model, rows[0].position.d), positions_of(subject.model)
    head = ["attention layer", "position", "embedding, parameters moved", "embedding, parameters held"]
    sentences = _sentences(rows, norms, places)
    sentences += [f"{name} could not be run by itself: {why}" for name, why in refused.items()]
    blocks = [
        Prose(sentences[0]),
        Table(head, [row.cells() for row in rows], shown="page"),
        Items(sentences[1:]),
    ]
    data = {
        "layers": [
            {"name": row.name, "why": row.why, **{part: _data(getattr(row, part)) for part in ("position", "moved", "held")}}
            for row in rows
        ],
        "norms": [{"kind": kind, "count": count, "error": report.largest, "passed": report.passed} for kind, count, report in norms],
        "positions": places,
        "refused": refused,
    }  # fmt: skip
    return Section("Symmetry", blocks, data, result=tuple(rows), plain=_plain(rows, places))


def _plain(rows: list[LayerRow], places: list[str]) -> str:
    """The section in one sentence."""
    blind, count = sum(row.position.passed for row in rows), len(rows)
    if blind < count:
        reasons = sorted({row.why for row in rows if row.why})
        return f"{count - blind} of {count} attention layers know the order of the tokens by themselves: {', '.join(reasons)}."
    source = f"; it comes from {', '.join(places[:2])}" if places else ""
    return f"The attention layers do not know the order of the tokens: when their input is shuffled, their output is shuffled the same way{source}."


def _spread(layers: int, d: int) -> set[int]:
    """The layers whose embedding is turned: all of them, or as many as the work allows, evenly spread."""
    count = min(layers, max(1, WORK // d**3)) if d <= WIDEST else 0
    return {round(at * (layers - 1) / max(1, count - 1)) for at in range(count)}


def _row(call: Call, *, turn: bool) -> LayerRow:
    shared: dict[str, Any] = {"d": call.x.shape[-1], "sampler": [call.x], "arguments": call.arguments,
                              "batched": True, "shrinking": False}  # fmt: skip
    position = check_permutation(call.module, trials=SHUFFLES, **shared)
    roles = attention_roles(call.module) if turn else None
    moved = held = None
    if roles is not None:
        # A module that ends before the output projection returns heads, where nothing turns.
        shared["output"] = "rows" if any(name.split(".")[0] in OUTWARD for name in roles) else "scalar"
        moved = check_equivariance(call.module, roles=roles, trials=TURNS, **shared)
        held = check_equivariance(call.module, trials=TURNS, **shared)
    reasons = []
    if CAUSAL in position.notes:
        reasons.append("causal mask")
    if call.arguments.get("position_embeddings") is not None:
        reasons.append("rotary positions")
    if call.arguments.get("position_bias") is not None or getattr(call.module, "has_relative_attention_bias", False):
        reasons.append("position bias")
    return LayerRow(
        call.name, position, moved, held, "" if position.passed else " and ".join(reasons) or "the order is read"
    )


def _calls(subject: Subject) -> list[Call]:
    """The arguments of every observed attention module, caught while the model reads the first tokens."""
    model: Any = subject.model
    inputs = subject.beginning(TOKENS) or subject.inputs
    if not inputs:
        raise Unsupported(
            "there are no inputs to run the model on again; try heedful.lens.symmetry.audit on its layers"
        )
    with undisturbed(model):
        return calls_of(model, inputs, [record.name for record in subject.observation])


def _norms(model: nn.Module, d: int) -> list[tuple[str, int, Report]]:
    """The kinds of norm over the embedding, how many of each, and whether the first commutes with rotations."""
    kinds: dict[str, list[Any]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.shape == (d,):
            kinds.setdefault(type(module).__name__, []).append(module)
    if d > WIDEST:
        return []
    norms = []
    for kind, same in kinds.items():
        # Gains that are all equal commute; the most uneven norm shows what the kind can do.
        worst = max(same, key=lambda module: float(module.weight.detach().double().std()))
        # Hugging Face norms compute in float32 whatever they are given.
        report = check_equivariance(worst, d=d, n=3, trials=TURNS, dtype=torch.float32, shrinking=False)
        norms.append((kind, len(same), report))
    return norms


def _sentences(rows: list[LayerRow], norms: list[tuple[str, int, Report]], places: list[str]) -> list[str]:
    count = len(rows)
    ordered = [row for row in rows if row.position.passed]
    lines = [
        f"Each of {count} attention layers was run again on its own input, moved at random.",
        f"Position symmetry, f(PX) = P f(X), holds in {len(ordered)} of {count} attention layers"
        + (
            "."
            if len(ordered) == count
            else f"; broken by {' and '.join(sorted({row.why for row in rows if row.why}))}."
        ),
    ]
    if places:
        lines.append(
            f"Where the model learns about positions: {', '.join(places[:4])}{' and more' if len(places) > 4 else ''}."
        )
    turned = [row for row in rows if row.moved is not None and row.moved.passed]
    tested = sum(row.moved is not None for row in rows)
    if tested:
        held = max((row.held.largest for row in rows if row.held is not None), default=0.0)
        lines.append(
            f"Embedding symmetry, group O(d), holds in {len(turned)} of {tested} layers turned together with their parameters: these are "
            f"knowledge (Ma & Ying 2023). With parameters held fixed the output differs from the turned one {_by(held)}."
        )
    else:
        lines.append(
            "Embedding symmetry was not tested: the projections are not recognised, or the embedding is too wide."
        )
    weak = [r for row in rows for r in (row.position, row.moved) if r is not None and r.weak]
    if weak:
        widest = max(report.tolerance for report in weak)
        lines.append(f"{len(weak)} of these hold weakly: rounding hides errors up to {widest:.1%}.")
    for kind, number, report in norms:
        if report.passed:
            lines.append(f"{kind} ({number} times) commutes with rotations: its gains are all equal.")
        else:
            why = "its gain, and the mean it subtracts," if kind == "LayerNorm" else "its gain"
            lines.append(
                f"{kind} ({number} times) does not commute with rotations (the output differs {_by(report.largest)}): {why} single out coordinates."
            )
    return lines


def _verdict(report: Report | None) -> str:
    if report is None:
        return "not tested"
    if report.weak:
        return f"holds weakly, rounding hides errors up to {report.tolerance:.1%}"
    return "holds" if report.passed else f"does not hold: the output differs {_by(report.largest)}"


def _by(error: float) -> str:
    """A relative error in words."""
    return f"by up to {error:.0%} of its size" if math.isfinite(error) else "by more than can be measured"


def _data(report: Report | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {name: value for name, value in report.to_dict().items() if name not in ("counterexample", "moved")}
