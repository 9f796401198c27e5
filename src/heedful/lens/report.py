"""A report on what a model looks at while it reads a text."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import HeedfulError, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from heedful.lens import AttentionSummary

__all__ = ["LookResult", "ModelFacts", "look"]

SENTENCE = "The animal did not cross the street because it was too tired."


@dataclass(frozen=True)
class ModelFacts:
    """What a model is."""

    folder: str
    name: str
    layers: int
    heads: int
    parameters: int
    dtype: str
    attention: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.layers} layers of {self.heads} heads, {_short(self.parameters)} parameters\n"
            f"in {self.folder}\n"
            f"{self.dtype}, attention implementation {self.attention}"
        )


@dataclass(frozen=True)
class LookResult:
    """The model, the text, and what every head did with it."""

    model: ModelFacts
    text: str
    attention: AttentionSummary

    def plot(self, ax: Axes | None = None) -> Axes:
        """How spread out each head's attention is, layers down and heads across."""
        return self.attention.plot(ax)

    def __repr__(self) -> str:
        return f"LookResult({self.model.name}, {len(self.attention.tokens)} tokens, {self.model.layers} layers)"

    def to_dict(self) -> dict[str, Any]:
        pairs = [asdict(pair) for pair in self.attention.pairs()]
        return {"model": asdict(self.model), "text": self.text, **self.attention.to_dict(), "strongest_pairs": pairs}

    def __str__(self) -> str:
        tokens = self.attention.tokens
        read = textwrap.wrap(" ".join(tokens), 80, initial_indent="  ", subsequent_indent="  ")
        lines = [str(self.model), "", f"Read as {len(tokens)} tokens:", *read, "", str(self.attention)]
        pairs = self.attention.pairs()
        if pairs:
            width = max(len(str(pair)) for pair in pairs)
            lines += ["", "The strongest pairs of two different tokens, special ones left out:"]
            lines += [f"  {pair!s:<{width}}  {pair.weight:.2f}  layer {pair.layer}, head {pair.head}" for pair in pairs]
        return "\n".join(lines)


def look(model: str | Path | None = None, text: str | None = None, *, max_tokens: int | None = None) -> LookResult:
    """Runs a model on a text with heedful's `attend` in it, and sums up what every head looks at.

    Args:
        model: a Hugging Face folder; the demo MiniLM by default.
        text: what the model reads; a sentence of two clauses by default.
        max_tokens: longer texts are refused; the model's own limit by default, which it can only lower.

    Of a model with an encoder and a decoder, the encoder reads the text.

    >>> result = look(text="She poured water into the cup until it was full.")
    >>> result.model.name, len(result.attention.tokens)
    ('BertModel', 13)
    """
    from heedful.bridges.local import demo_model_path, load
    from heedful.lens import summarize

    text = SENTENCE if text is None else text
    if not text.strip():
        raise InvalidArgument("the text is empty; give a sentence for the model to read")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidArgument(f"max_tokens must be at least 1; got {max_tokens}")
    folder = demo_model_path() if model is None else Path(model)
    loaded, tokenizer = load(folder)
    if loaded.main_input_name != "input_ids":
        raise Unsupported(f"{type(loaded).__name__} reads {loaded.main_input_name}; give a model that reads text")
    inputs = tokenizer(text, return_tensors="pt", return_special_tokens_mask=True, verbose=False)
    special = inputs.pop("special_tokens_mask")[0].bool().tolist()
    if all(special):
        raise InvalidArgument(f"the tokenizer in {folder} finds no tokens in {text!r:.60}; give other words")
    _check_length(len(special), _limit(loaded, tokenizer), max_tokens)
    weights = _weights(loaded, inputs)
    facts = ModelFacts(
        folder=str(folder),
        name=type(loaded).__name__,
        layers=len(weights),
        heads=weights[0].shape[0],
        parameters=loaded.num_parameters(),
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention=str(loaded.config._attn_implementation),
    )
    tokens = [_readable(tokenizer, token) for token in tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])]
    return LookResult(facts, text, summarize(weights, tokens, special=special))


def _limit(model: Any, tokenizer: Any) -> int:
    # A tokenizer without a limit carries a huge number, a config without one -1 or nothing.
    positions = getattr(model.config, "max_position_embeddings", None) or -1
    return min(tokenizer.model_max_length, positions) if positions > 0 else tokenizer.model_max_length


def _check_length(count: int, limit: int, max_tokens: int | None) -> None:
    if count > limit:
        raise InvalidArgument(f"the text has {count} tokens, but the model's limit is {limit}; give a shorter text")
    if max_tokens is not None and count > max_tokens:
        raise InvalidArgument(f"the text has {count} tokens, but max_tokens is {max_tokens}; give a shorter text")


def _weights(model: Any, inputs: Any) -> list[Tensor]:
    """The attention weights `[heads, tokens, tokens]` of every layer."""
    import torch

    from heedful.bridges.transformers import restore, use

    reader = model.get_encoder() if model.config.is_encoder_decoder else model
    use(model)
    try:
        with torch.inference_mode():
            recorded = reader(**inputs, output_attentions=True).get("attentions")
    except HeedfulError:
        raise
    # Models fail by every class there is, most often because they want more than a text.
    except Exception as error:
        raise Unsupported(f"{type(model).__name__} fails on this text alone: {' '.join(str(error).split())}") from error
    finally:
        restore(model)
    if not recorded or any(layer is None for layer in recorded):
        raise Unsupported(f"{type(model).__name__} returns no attention weights for some layers; give another model")
    return [layer[0] for layer in recorded]


def _readable(tokenizer: Any, token: str) -> str:
    """A token as a person would write it, on one line."""
    plain = tokenizer.convert_tokens_to_string([token]).strip() or token
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in plain)


def _short(count: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
