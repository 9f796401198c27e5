"""What can be asked: models that read a text, recommenders, and questions of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from heedful._errors import InvalidArgument
from heedful.bridges import answers
from heedful.bridges.reading import demo_model_path
from heedful.lens.causes.items import Recommender
from heedful.lens.causes.questions import Seen, Task
from heedful.lens.causes.texts import TextModel

__all__ = ["REPLACE", "Recommender", "Seen", "Task", "TextModel", "asked", "asked_in_windows", "opened"]

REPLACE = ("auto", "mask", "drop", "pad")


def opened(model: Any, tokenizer: Any = None, kind: str = "auto") -> Any:
    """What can be asked: something with `ask`, or a `Task` itself, from whatever of the known kinds a model is."""
    if isinstance(model, Task) or hasattr(model, "ask"):
        return model
    if kind == "recommendation":
        raise InvalidArgument("a recommender's marks must be told: explain(Recommender(model, mask_id=...), items)")
    if model is None or isinstance(model, str | Path):
        model, own = answers.open_model(demo_model_path() if model is None else model, kind)
        tokenizer = tokenizer or own
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise InvalidArgument(
            "model must be a Hugging Face folder, a model of transformers with tokenizer=..., a TextModel, a Recommender or "
            f"a Task; got {type(model).__name__}"
        )
    return TextModel(model, tokenizer, kind)


def asked(adapter: Any, text: Any, replace: str = "auto", merge: str = "words", truncate: bool = False) -> Task:
    """The question that an input is to what `opened` gave."""
    _check(replace, merge)
    if truncate and not isinstance(adapter, TextModel):
        raise InvalidArgument("truncate is for models that read texts")
    if not isinstance(adapter, Task):
        return adapter.ask(text, replace, merge, **({"truncate": True} if truncate else {}))
    if text is not None or replace != "auto":
        raise InvalidArgument("a Task holds its input and its way of taking away already; leave text and replace out")
    return adapter


def asked_in_windows(adapter: Any, text: Any, replace: str = "auto", merge: str = "words") -> list[Task]:
    """The questions that the windows of a text are."""
    _check(replace, merge)
    if not isinstance(adapter, TextModel):
        raise InvalidArgument("windows are for models that read texts")
    return adapter.windows(text, replace, merge)


def _check(replace: str, merge: str) -> None:
    if replace not in REPLACE:
        raise InvalidArgument(f"replace must be one of {', '.join(REPLACE)}; got {replace!r}")
    if merge not in ("words", "tokens"):
        raise InvalidArgument(f"merge must be 'words' or 'tokens'; got {merge!r}")
