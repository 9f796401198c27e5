"""Folders of `config.json` + `model.safetensors`: how everything here is saved, and loaded without unpickling."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from heedful import __version__
from heedful._errors import CorruptModel, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

Kind = TypeVar("Kind")


class Register(Generic[Kind]):
    """Classes that folders name, by module and name.

    A folder may name any module inside heedful, which is then imported. A class of anybody else's must have been imported
    before: no file decides what code is run. `homes` tells where classes live that older folders name without a module.
    """

    def __init__(self, homes: Mapping[str, str] | None = None) -> None:
        self._known: dict[tuple[str, str], type[Kind]] = {}
        self._homes = homes or {}

    def add(self, cls: type[Kind]) -> None:
        self._known[cls.__module__, cls.__name__] = cls

    def named(self, name: str) -> list[type[Kind]]:
        """All classes of this name that are known, the latest last."""
        return [cls for (_, known), cls in self._known.items() if known == name]

    def names(self) -> list[str]:
        return sorted({name for _, name in self._known})

    @staticmethod
    def entry(cls: type[Any]) -> dict[str, str]:
        """What a folder's config says of a class."""
        return {"type": cls.__name__, "module": cls.__module__}

    def find(self, entry: Mapping[str, Any], asked: type[Any]) -> type[Kind] | None:
        """The class that a config's entry means; `asked`, the class somebody loads by, where it has the name."""
        name, module = entry["type"], entry.get("module")
        module = module if isinstance(module, str) else None
        for home in (module, self._homes.get(name)):
            own = _own(home, name)
            if own is not None and own in self._known.values():
                return own
        if asked.__name__ == name:
            return asked
        if module is not None and not _is_own(module):
            return self._known.get((module, name))
        return next(reversed(self.named(name)), None)


def _is_own(module: Any) -> bool:
    # Names such as __main__ are left out: importing that one runs the command line.
    return isinstance(module, str) and re.fullmatch(r"heedful(\.(?!__)\w+)+", module, re.ASCII) is not None


def _own(module: Any, name: str) -> Any:
    """What a module inside heedful calls by a name; None where there is no such module or name."""
    if not _is_own(module):
        return None
    try:
        return getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("heedful"):
            raise
        return None


def write_folder(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes both files, each complete or not at all; `config.json` carries a checksum of both."""
    from safetensors.torch import save

    folder = located(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"cannot save to {folder}: a file of that name is there; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    weights = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    signed = {**config, "heedful": __version__}
    text = json.dumps({**signed, "sha256": digest(signed, weights)}, indent=2)
    _replace(folder / WEIGHTS, weights)
    _replace(folder / CONFIG, text.encode())


def read_folder(folder: str | Path, *, expects: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads both files; anything missing, truncated or altered raises `CorruptModel` naming the file and what to do."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = located(folder)
    if not folder.is_dir():
        raise CorruptModel(f"no saved folder at {folder}; give a folder that save_pretrained wrote")
    text, weights = (_read(folder / name) for name in (CONFIG, WEIGHTS))
    try:
        config = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{folder / CONFIG} is not valid JSON ({error}); save the model again") from None
    _check_version(folder, config)
    if not isinstance(config, dict) or expects not in config or not isinstance(config.get("sha256"), str):
        raise CorruptModel(
            f"{folder / CONFIG} does not describe a heedful {expects}: 'heedful', 'sha256' and '{expects}' expected"
        )
    if digest(config, weights) != config["sha256"]:
        raise CorruptModel(
            f"{CONFIG} or {WEIGHTS} in {folder} was truncated or altered: the checksum in {CONFIG} does not fit; "
            "copy both again, or save the model again"
        )
    try:
        return config, load(weights)
    except (SafetensorError, ValueError) as error:
        raise CorruptModel(
            f"{folder / WEIGHTS} cannot be read as safetensors ({error}); save the model again"
        ) from None


def _check_version(folder: Path, config: Any) -> None:
    """Refuses a folder of a later release, whose config may say what this one would misread."""
    version = config.get("heedful") if isinstance(config, dict) else None
    if isinstance(version, str) and _release(version) > _release(__version__):
        raise Unsupported(
            f"{folder} was written by heedful {version:.40}, and this is {__version__}; pip install 'heedful>={version:.40}' reads it"
        )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release, 1.10 as 1.10.0; what comes behind them, as in 1.2.0rc1, does not count."""
    numbers = re.match(r"\d+(\.\d+)*", version, re.ASCII)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def digest(config: Mapping[str, Any], weights: bytes) -> str:
    """The checksum of a folder: of the weights and of everything else that config.json says."""
    rest = {name: value for name, value in config.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode() + b"\0" + weights).hexdigest()


def located(folder: str | Path) -> Path:
    if not str(folder):
        raise InvalidArgument("the folder's name is empty; give a folder")
    return Path(folder).expanduser()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptModel(f"{path} is missing; copy it there, or save the model again") from None
    except OSError as error:
        raise CorruptModel(f"{path} cannot be read: {error.strerror}") from None


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
