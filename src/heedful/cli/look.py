"""What `heedful look` needs beyond `heedful.look`: its model, its text, its place to write, a bar, a browser."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from heedful._errors import InvalidArgument

REPORT = Path("report.html")
# What stands on every page of this package.
BRAND = b'<p class="brand">heedful'


def check_options(
    out: Path | None,
    *,
    no_report: bool,
    as_json: bool,
    open_it: bool,
    overwrite: bool = False,
    file: Path | None = None,
) -> Path | None:
    """Where to write the report, checked before any work is done; None for nowhere.

    Where no place was given the last report makes room for this one.

    >>> check_options(None, no_report=False, as_json=True, open_it=False) is None
    True
    """
    from heedful._files import check_free

    if no_report and out is not None:
        raise InvalidArgument(f"--no-report and --out {out} contradict each other; give one of them")
    place = out or (None if no_report or as_json else REPORT)
    if place is None and open_it:
        raise InvalidArgument("--open needs a report; give --out FILE as well, and no --no-report")
    if place is not None:
        check_free(place, overwrite or (out is None and _is_report(place)), reads=[file])
    return place


def _is_report(file: Path) -> bool:
    return file.is_file() and BRAND in file.read_bytes()


def model_folder(model: str, command: str) -> Path:
    """The folder of a model by what the command line calls it; an error says where the model stands on that line.

    >>> model_folder("demo", "look").name
    'model'
    """
    from heedful.bridges.reading import DEMO, demo_model_path, find_model

    if model == DEMO:
        return demo_model_path()
    if not model or (len(model.split()) > 1 and not Path(model).expanduser().exists()):
        raise InvalidArgument(
            f"there is no folder {model!r}; the model comes first, as in: heedful {command} demo 'A text.'"
        )
    return find_model(model)


def read_text(words: Sequence[str] | None, file: Path | None) -> str | None:
    """The text from the command line, from standard input (`-`) or from a file, checked; None where none was given.

    >>> read_text(["two", "words"], None)
    'two words'
    """
    from heedful.bridges.reading import check_text

    if words and file is not None:
        raise InvalidArgument(f"give a text or --file {file}, not both")
    if not words and file is None:
        return None
    try:
        if file is not None:
            text = file.expanduser().read_bytes().decode()
        else:
            text = sys.stdin.buffer.read().decode() if words == ["-"] else " ".join(words or ())
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file or 'standard input'} is not text in UTF-8; convert it first") from None
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}; give another file") from None
    check_text(text)
    return text


def show_page(page: Path) -> None:
    """Opens a page in the browser of whoever sits here."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        raise InvalidArgument(f"no browser can be started here; open {page} by hand")
