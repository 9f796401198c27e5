"""What an explanation can be asked for: one set of settings for `explain`, `CausalExplainer` and `heedful explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heedful._checks import check_choice, check_number, check_whole, is_whole
from heedful._errors import InvalidArgument
from heedful._settings import option

LEARNERS = ("auto", "icd", "ordered icd", "fci", "pc")
COVARIANCES = ("attention", "value", "output", "centered")
# Words that a graph is learned over unless others are asked for, and the most there may be.
CANDIDATES, MOST_CANDIDATES = 32, 256


def _read_heads(text: str) -> Any:
    try:
        return text if text == "all" else [int(part) for part in text.split(",")]
    except ValueError:
        return text


def _read_samples(text: str) -> Any:
    return int(text) if text.lstrip("-").isdigit() else text.replace("-", "_")


@dataclass(frozen=True)
class ExplainSettings:
    """How `explain` works, checked when it is made; its docstring says what each setting does."""

    task: str = option("auto", "auto, classification, mlm, next-token; embedding leaves the head out.")
    layer: int = option(-1, "Whose attention; -1 is the last.")
    heads: str | int | Sequence[int] = option("all", "all, or numbers: 0,3.", read=_read_heads)
    alpha: float = option(0.01, "Words with a larger p-value are independent.")
    n_samples: str | int = option(
        "hidden_size", "N of the tests: hidden_size, head_dim or a number.", name="--samples", read=_read_samples
    )
    covariance: str = option("attention", "attention, centered, value or output.")
    learner: str = option("auto", "auto, icd, fci or pc.")
    replace: str = option("auto", "What a word becomes: auto, mask, drop or pad.")
    merge: str = "words"
    max_size: int = option(5, "No sets larger than this.")
    max_sets: int = option(10, "List so many sets of the smallest size; of single words all.")
    max_calls: int = option(2000, "Ask about so many inputs at most.")
    radius: int | None = None
    candidates: int | None = option(None, "Words that take part, the most attended.", shown=str(CANDIDATES))
    order: str = "effect"
    slack: float = 0.8
    patience: int | None = None
    prune: bool = True
    baselines: bool | str = option(True, "Whether to compare with other methods.", name="--baselines/--no-baselines")
    seed: int = 0
    batch_size: int = 32
    truncate: bool = option(False, "Of a text that is too long, read as much as the model can.", name="--truncate")

    def __post_init__(self) -> None:
        check_graph(self)
        counts = {name: getattr(self, name) for name in ("max_size", "max_sets", "max_calls", "batch_size")}
        check_whole(**counts)
        check_whole(optional=True, radius=self.radius, patience=self.patience)
        check_whole(1, MOST_CANDIDATES, optional=True, candidates=self.candidates)
        check_whole(0, seed=self.seed)
        check_number(least=0, slack=self.slack)
        check_choice(("auto", "mask", "drop", "pad"), replace=self.replace)
        check_choice(("words", "tokens"), merge=self.merge)
        check_choice(("effect", "depth"), order=self.order)
        check_choice((True, False, "exhaustive"), baselines=self.baselines)
        check_choice((True, False), truncate=self.truncate, prune=self.prune)
        if not is_whole(self.layer):
            raise InvalidArgument(f"layer must be a whole number, -1 for the last; got {self.layer!r}")
        numbers = [self.heads] if is_whole(self.heads) else self.heads
        several = not isinstance(numbers, str) and hasattr(numbers, "__iter__") and [*map(is_whole, numbers)]
        if not (several and all(several)) and not (isinstance(numbers, str) and numbers == "all"):
            raise InvalidArgument(f"heads must be 'all', the number of a head or several numbers; got {self.heads!r}")


def check_graph(of: Any) -> None:
    """Refuses settings of a graph's learner that cannot be meant, before any work."""
    check_number(0, 1, alpha=of.alpha)
    check_choice(LEARNERS, learner=of.learner)
    check_choice(COVARIANCES, covariance=of.covariance)
    n = of.n_samples
    if not (n in ("hidden_size", "head_dim") if isinstance(n, str) else is_whole(n) and n >= 4):
        raise InvalidArgument(f"n_samples must be hidden_size, head_dim or a number from 4 on; got {n!r}")
