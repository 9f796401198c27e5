"""Folders of `config.json` + `model.safetensors`: how everything here is saved, and loaded without unpickling."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful import __version__
from heedful._errors import CorruptModel, InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes both files, each complete or not at all; `config.json` records the checksum of the other."""
    from safetensors.torch import save

    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"cannot save to {folder}: a file of that name is there; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    weights = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    text = json.dumps({**config, "heedful": __version__, "sha256": hashlib.sha256(weights).hexdigest()}, indent=2)
    _replace(folder / WEIGHTS, weights)
    _replace(folder / CONFIG, text.encode())


def read_folder(folder: str | Path, *, expects: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads both files; anything missing, truncated or altered raises `CorruptModel` naming the file and what to do."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(folder)
    if not folder.is_dir():
        raise CorruptModel(f"no saved folder at {folder}; give a folder that save_pretrained wrote")
    config_file, weights_file = folder / CONFIG, folder / WEIGHTS
    try:
        config = json.loads(config_file.read_text())
    except FileNotFoundError:
        raise CorruptModel(
            f"{config_file} is missing; {folder} was not written by save_pretrained, or not wholly"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptModel(f"{config_file} is not valid JSON ({error}); save the model again") from None
    if not isinstance(config, dict) or expects not in config or not isinstance(config.get("sha256"), str):
        raise CorruptModel(
            f"{config_file} does not describe a heedful {expects}: 'heedful', 'sha256' and '{expects}' expected"
        )
    try:
        weights = weights_file.read_bytes()
    except FileNotFoundError:
        raise CorruptModel(f"{weights_file} is missing; copy it beside {CONFIG}, or save the model again") from None
    if hashlib.sha256(weights).hexdigest() != config["sha256"]:
        raise CorruptModel(
            f"{weights_file} was truncated or altered: its checksum differs from the one in {CONFIG}; "
            "copy it again, or save the model again"
        )
    try:
        return config, load(weights)
    except (SafetensorError, ValueError) as error:
        raise CorruptModel(f"{weights_file} cannot be read as safetensors ({error}); save the model again") from None


def _replace(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
