"""What saves itself: one registry, one form of values as JSON, folders of `config.json` + `model.safetensors`, never a pickle."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from heedful import __version__
from heedful._checks import is_number, is_whole
from heedful._errors import CorruptModel, HeedfulError, InvalidArgument, Unsupported
from heedful._files import located, write
from heedful._tasks import HOMES
from heedful._text import with_article

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

_CLASSES: dict[tuple[str, str, str], type[Savable]] = {}  # (kind, module, name)
_CODED: dict[str, type[Any]] = {}

Kind = TypeVar("Kind", bound=type)


class Savable:
    """Something with `save_pretrained` and `from_pretrained`, which its classes are known for by being defined.

    A family has a `_kind`, under which `config.json` describes its members. A member gives `_described()`, which is JSON, and
    `_tensors_saved()`, and its class makes it again by `_remade(description, tensors)`, whatever that raises.
    """

    _kind: ClassVar[str]
    _needs: ClassVar[tuple[str, ...]] = ()  # entries of a description that are mappings

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for other in known(cls._kind, cls.__name__):
            if _is_own(other.__module__) and other.__module__ != cls.__module__:
                raise InvalidArgument(
                    f"a {cls._kind} {cls.__name__} exists in {other.__module__}; give yours another name"
                )
        place = cls._kind, cls.__module__, cls.__name__
        _CLASSES.pop(place, None)  # the latest is the last
        _CLASSES[place] = cls

    def _described(self) -> dict[str, Any]:
        raise NotImplementedError

    def _tensors_saved(self) -> Mapping[str, Tensor]:
        raise NotImplementedError

    @classmethod
    def _remade(cls, description: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes `config.json` (what it is) and `model.safetensors` (its tensors) into a folder."""
        write_folder(folder, {self._kind: self._described()}, self._tensors_saved())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """What `save_pretrained` wrote, made again without unpickling; called on a base, whatever of its kind is there."""
        config, tensors = read_folder(folder, expects=cls._kind)
        entry = config[cls._kind]
        name = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not all(isinstance(entry.get(part), dict) for part in cls._needs):
            wanted = " and ".join(("type", *cls._needs))
            raise CorruptModel(f"{folder}: {CONFIG} has no {wanted} of a heedful {cls._kind}; save it again")
        home = find(cls._kind, entry, cls)
        if home is None:
            place = f" of {entry['module']}" if isinstance(entry.get("module"), str) else ""
            raise CorruptModel(
                f"{folder}: unknown {cls._kind} {name!r}{place}; known: {', '.join(sorted({c.__name__ for c in known(cls._kind)}))}. "
                "One of your own must be defined (imported) before it is loaded"
            )
        if not issubclass(home, cls):
            raise InvalidArgument(
                f"{folder} holds {with_article(name)}, not {with_article(cls.__name__)}; call {name}.from_pretrained"
            )
        with remaking(folder, name):
            return home._remade(entry, tensors)


@contextmanager
def remaking(folder: str | Path, name: str) -> Iterator[None]:
    """Whatever goes wrong while something is made from what a folder says is the folder's fault."""
    try:
        yield
    except CorruptModel:
        raise
    except (HeedfulError, TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise CorruptModel(f"{folder}: {name} cannot be made from what was saved: {error}") from error


def known(kind: str, name: str | None = None) -> list[type[Any]]:
    """The classes of a kind, or those of them that have this name, the latest last."""
    return [cls for (family, _, own), cls in _CLASSES.items() if family == kind and name in (None, own)]


def entry_of(cls: type[Any]) -> dict[str, str]:
    """What a description says of a class."""
    return {"type": cls.__name__, "module": cls.__module__}


def find(kind: str, entry: Mapping[str, Any], caller: type[Any] = object) -> type[Any] | None:
    """The class that a description means; `caller`, the class somebody loads by, where it has the name.

    A folder may name any module inside heedful, which is then imported. A class of anybody else's must have been imported
    before: no file decides what code is run. Folders of the first release name estimators without a module.
    """
    name, module = entry["type"], entry.get("module")
    module = module if isinstance(module, str) else None
    for home in (module, HOMES.get(name)):
        own = _own(home, name)
        if own is not None and own in known(kind):
            return own
    if caller.__name__ == name:
        return caller
    if module is not None and not _is_own(module):
        return _CLASSES.get((kind, module, name))
    return next(reversed(known(kind, name)), None)


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


def coded(tag: str) -> Any:
    """A decorator: values of this class, which has `to_dict` and `from_dict`, are written under this tag."""

    def enrol(cls: Kind) -> Kind:
        _CODED[tag] = cls
        return cls

    return enrol


def encode(value: Any) -> Any:
    """A setting as JSON, from which `decode` makes an equal one: numbers, text, arrays, tensors, mappings, classes that are `coded`.

    >>> encode({"sizes": (3, 5)})
    {'mapping': [['sizes', [3, 5]]]}
    >>> decode(encode(np.array(["a", "b"])))
    array(['a', 'b'], dtype='<U1')
    """
    for tag, cls in _CODED.items():
        if isinstance(value, cls):
            return {tag: value.to_dict()}
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_) or is_number(value):
        # Searches over arrays of settings give numpy's numbers.
        return bool(value) if isinstance(value, np.bool_) else int(value) if is_whole(value) else float(value)
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        learned = value.requires_grad or isinstance(value, torch.nn.Parameter)
        return {"tensor": value.detach().cpu().tolist(), "dtype": kind, "learned": learned}
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in "biufU" or all(isinstance(part, str | int | float) for part in value.tolist())
        if not plain or value.dtype.kind not in "biufUO":
            raise InvalidArgument(f"cannot save an array of {value.dtype}; use numbers or strings, as class labels too")
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, Mapping):
        return {"mapping": [[encode(key), encode(part)] for key, part in value.items()]}
    if isinstance(value, Sequence):
        return [encode(part) for part in value]
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, np.random.RandomState | np.random.Generator):
        # A generator's state is no setting; what it gave is in the weights.
        return None
    raise InvalidArgument(f"cannot save {value!r:.100}: it is no number, text, array, kernel, or collection of them")


def decode(value: Any) -> Any:
    """The setting that `encode` wrote."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    for tag, cls in _CODED.items():
        if tag in value:
            return cls.from_dict(value[tag])
    if "tensor" in value:
        kind = getattr(torch, str(value.get("dtype")), None)
        if not isinstance(kind, torch.dtype):
            raise InvalidArgument(
                f"a tensor has the dtype {value.get('dtype')!r}; a name such as 'float32' is expected"
            )
        return torch.tensor(value["tensor"], dtype=kind, requires_grad=bool(value.get("learned", False)))
    if "array" in value:
        return np.array(value["array"], dtype=np.dtype(value["dtype"]))
    if "mapping" in value:
        return {decode(key): decode(part) for key, part in value["mapping"]}
    raise InvalidArgument(f"{value!r:.100} describes nothing that heedful knows")


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
    write(folder / WEIGHTS, weights)
    write(folder / CONFIG, text)


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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptModel(f"{path} is missing; copy it there, or save the model again") from None
    except OSError as error:
        raise CorruptModel(f"{path} cannot be read: {error.strerror}") from None
