"""Files and folders that are written whole or not at all, and replaced only when that was asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from heedful._errors import InvalidArgument


def located(folder: str | Path) -> Path:
    """The path of a folder, `~` followed."""
    if not str(folder):
        raise InvalidArgument("the folder's name is empty; give a folder")
    return Path(folder).expanduser()


def check_place(path: str | Path) -> Path:
    """The path, its links followed, where a file may be written; an error says why not.

    >>> check_place("report.html").name
    'report.html'
    """
    given, path = path, Path(path).expanduser().resolve()
    if len(os.fsencode(path.name)) > 200:
        raise InvalidArgument(f"the name {path.name[:20]}... is {len(path.name)} characters long; give a shorter one")
    if path.is_dir():
        raise InvalidArgument(f"{given} is a folder; give a file, such as {Path(given) / 'report.html'}")
    if path.exists() and not path.is_file():
        raise InvalidArgument(f"{given} is no ordinary file; give another one to write to")
    if not path.parent.is_dir():
        raise InvalidArgument(f"there is no folder {path.parent} to write {path.name} in; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidArgument(f"cannot write in {path.parent}: permission denied; give another file")
    return path


def check_free(path: str | Path, overwrite: bool = False, reads: Iterable[str | Path | None] = ()) -> Path:
    """The path where a file may be written: none of those that it `reads`, and one that is there only with `overwrite`.

    >>> check_free("answers.csv", reads=["cases.csv"]).name
    'answers.csv'
    """
    place = check_place(path)
    if any(place == Path(one).expanduser().resolve() for one in reads if one is not None):
        raise InvalidArgument(f"{path} is the file that is read; name another file to write to")
    if place.exists():
        check_replaced(path, overwrite)
    return place


def check_replaced(path: str | Path, overwrite: bool, there: str = "is there", kind: str = "file") -> None:
    """Refuses to replace what is there, unless that was asked for."""
    if not overwrite:
        raise InvalidArgument(f"{path} {there}; name another {kind}, or give overwrite=True to replace it")


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A file beside this one to write to, which takes its place when all went well, and is gone when it did not."""
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}; give another file") from error
    part = Path(name)
    try:
        yield part
        part.chmod(0o644)
        part.replace(path)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}; give another file") from error
    finally:
        part.unlink(missing_ok=True)


def write(path: str | Path, content: str | bytes) -> Path:
    """Writes a file as a whole or not at all; one of that name is replaced. Returns where it lies."""
    path = check_place(path)
    with new_file(path) as part:
        part.write_bytes(content.encode("utf-8", "xmlcharrefreplace") if isinstance(content, str) else content)
    return path


@contextmanager
def new_folder(folder: str | Path, *, last: str = "") -> Iterator[Path]:
    """A folder to fill, which becomes this one when all went well, and leaves nothing behind when it did not.

    The folder must be new or empty. `last` names the file whose presence says that the folder is complete.
    """
    folder = located(folder).absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidArgument(f"{folder} is there and not empty; give a new or empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.")
    except OSError as error:
        raise InvalidArgument(f"cannot write to {folder}: {error.strerror}; give another folder") from None
    with beside:
        yield Path(beside.name)
        folder.mkdir(exist_ok=True)
        for file in sorted(Path(beside.name).iterdir(), key=lambda file: file.name == last):
            os.replace(file, folder / file.name)
