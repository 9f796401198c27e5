"""What the figures must reach, read off a result: each bar is met, MISSED, or refused where there is no figure to judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy import BOUNDS
from benchmarks.contestants import UNNORMALISED, Setting

SHAPES = ((8, 16, 2048, 64), (2, 16, 8192, 64), (2, 16, 8192, 128), (1, 8, 32768, 64))
BARS = [Setting("bar", shape) for shape in SHAPES]
CAUSAL = Setting("causal", (2, 16, 8192, 64), is_causal=True)
LINEAR = [Setting("linear", (1, 8, 65536, 64), is_causal=causal) for causal in (False, True)]

TIMED = (*UNNORMALISED, "Gaussian", "Softmax", "linear elu")


@dataclass(frozen=True)
class Bar:
    """One bar: `value` against `bound`, from below or from above."""

    setting: str
    what: str
    bound: float
    at_least: bool = True
    value: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is not None:
            reached = self.value >= self.bound if self.at_least else self.value <= self.bound
            return "met" if reached else "MISSED"
        return "no peer" if self.note.startswith("no peer") else "refused"

    @property
    def fails(self) -> bool:
        return self.verdict in ("MISSED", "refused")


class NoFigure(Exception):
    """Why there is none."""


def row_of(result: dict[str, Any], setting: Setting, contestant: str) -> dict[str, Any]:
    """What was found of a contestant in a setting."""
    for contest in result["contests"]:
        if contest["name"] == setting.name:
            for row in contest["rows"]:
                if row["contestant"] == contestant:
                    return row
            raise NoFigure(f"{contestant} did not take part")
    raise NoFigure("not run")


def milliseconds(row: dict[str, Any], direction: str) -> float:
    if direction in row:
        return row[direction]["median"]
    keys = ["refused", "skipped", f"skipped {direction}"] + (["refused backward"] if "backward" in direction else [])
    raise NoFigure(next((f"{row['contestant']}: {row[key]}" for key in keys if key in row), "not timed"))


def table(result: dict[str, Any]) -> list[Bar]:
    """Every bar of the project's own, in the order of its list."""
    made = []
    for setting in BARS:
        for name in UNNORMALISED:
            one = f"heedful {name}"
            made.append(_ratio(result, setting, one, "FlexAttention softmax", "forward", 1.0))
            if setting.shape[-1] == 64:
                made.append(_ratio(result, setting, one, "cuDNN SDPA", "forward", 0.95))
            made.append(_ratio(result, setting, one, "FlexAttention softmax", "backward", 0.9))
            made.append(_memory(result, setting, one))
            made.append(_ratio(result, setting, one, f"compiled {name}", "forward", 3.0, may_lack_room=True))
        for direction in ("forward", "backward"):
            made.append(_ratio(result, setting, "heedful Gaussian", "cuDNN SDPA", direction, 0.85))
    for name in (*UNNORMALISED, "Gaussian"):
        for direction in ("forward", "backward"):
            made.append(_gain(result, f"heedful {name}", direction))
    for setting in LINEAR:
        made.append(_ratio(result, setting, "heedful linear elu", "cuDNN SDPA", "forward+backward", 15.0))
    for dtype in BOUNDS:
        if dtype == "float16" and not any(row["dtype"] == dtype for row in result["accuracy"]):
            continue  # the project has no bar of its own there
        for name in TIMED:
            made.append(_error(result, name, dtype, ("out",), "output"))
            made.append(_error(result, name, dtype, ("dq", "dk", "dv"), "gradients"))
    return made


def _ratio(
    result: dict[str, Any],
    setting: Setting,
    one: str,
    peer: str,
    direction: str,
    bound: float,
    *,
    may_lack_room: bool = False,
) -> Bar:
    """How many times faster than a peer."""
    what = f"{one}, {direction}: speed / {peer}"
    try:
        mine = milliseconds(row_of(result, setting, one), direction)
        other = row_of(result, setting, peer)
        if may_lack_room and str(other.get("skipped", "")).startswith("memory"):
            return Bar(setting.name, what, bound, note=f"no peer: {other['skipped']}")
        return Bar(setting.name, what, bound, value=milliseconds(other, direction) / mine)
    except NoFigure as reason:
        return Bar(setting.name, what, bound, note=str(reason))


def _memory(result: dict[str, Any], setting: Setting, one: str) -> Bar:
    what = f"{one}: memory beyond inputs, output and gradients / them"
    try:
        row = row_of(result, setting, one)
        milliseconds(row, "backward")
        value = share(row)
        if value is None:
            raise NoFigure("memory was not measured")
        return Bar(setting.name, what, 0.05, at_least=False, value=value)
    except NoFigure as reason:
        return Bar(setting.name, what, 0.05, at_least=False, note=str(reason))


def share(row: dict[str, Any]) -> float | None:
    """Peak memory of forward and backward beyond inputs, output and gradients, relative to them."""
    if "memory" not in row:
        return None
    return row["memory"]["extra"]["forward+backward"] / sum(row["memory"]["needed"].values())


def _gain(result: dict[str, Any], one: str, direction: str) -> Bar:
    what = f"{one}, {direction}: causal speed / not causal"
    try:
        whole = next(setting for setting in BARS if setting.shape == CAUSAL.shape)
        slow, fast = (milliseconds(row_of(result, s, one), direction) for s in (whole, CAUSAL))
        return Bar(CAUSAL.name, what, 1.7, value=slow / fast)
    except NoFigure as reason:
        return Bar(CAUSAL.name, what, 1.7, note=str(reason))


def worst(result: dict[str, Any], variant: str, dtype: str, names: tuple[str, ...]) -> tuple[float, str] | None:
    """The largest of these errors, and the case it was met in."""
    found = [
        (float(row["errors"][name]), row["case"])
        for row in result["accuracy"]
        if (row["variant"], row["dtype"]) == (variant, dtype)
        for name in names
        if name in row.get("errors", {})
    ]
    # What is not a number is the worst of all.
    return max(found, key=lambda pair: (pair[0] != pair[0], pair[0]), default=None)


def _error(result: dict[str, Any], variant: str, dtype: str, names: tuple[str, ...], told: str) -> Bar:
    what = f"heedful {variant}: largest error of {told}"
    bound = BOUNDS[dtype]
    mine = [row for row in result["accuracy"] if (row["variant"], row["dtype"]) == (variant, dtype)]
    broken = next((row for row in mine if row["verdict"] == "MISSED" and "errors" not in row), None)
    found = worst(result, variant, dtype, names)
    if broken or not found:
        reasons = [row["reason"] for row in ([broken] if broken else mine) if row and row.get("reason")]
        return Bar(dtype, what, bound, at_least=False, note=reasons[0] if reasons else "not run")
    return Bar(dtype, what, bound, at_least=False, value=found[0], note=found[1])
