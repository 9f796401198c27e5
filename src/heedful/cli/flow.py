"""`heedful flow`: how much attention goes between kinds of tokens."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from heedful._errors import InvalidArgument
from heedful._files import write
from heedful._plot import save_picture
from heedful._progress import bar
from heedful._text import cut, printable
from heedful.bridges.reading import DEMO
from heedful.cli.arguments import AsJson, Model, Overwrite, check_outputs

# Signs of a line, and of a text or a group that is shown.
WIDE, SHOWN = 98, 120

QUESTION = {
    "question": "Why did the animal not cross the street?",
    "context": "The animal did not cross the street because it was too tired. The farmer, who had slept well, walked over to it.",
}


def flow(
    model: Model = DEMO,
    image: Annotated[list[Path] | None, typer.Option(help="A picture that the model reads; may be repeated.")] = None,
    text: Annotated[
        str | None, typer.Option(help="What it reads beside the picture, or the text that holds the groups.")
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="A group of words: question=..., context=@FILE. Repeat it for each part.",
            show_default="an example",
        ),
    ] = None,
    messages: Annotated[
        Path | None, typer.Option(help="A chat as JSON, [{role, content}, ...], grouped by role.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="fraction; norm weighs by what keys hand over; flow follows all layers down.")
    ] = "fraction",
    special: Annotated[
        str | None,
        typer.Option(
            help="keep or exclude [CLS] and the like; beside groups they are kept as a group.",
            show_default="exclude for groups, else keep",
        ),
    ] = None,
    reduce: Annotated[str, typer.Option(help="macro or micro average over heads and samples.")] = "macro",
    rho: Annotated[float, typer.Option(help="With --mode flow: what stays with each token.")] = 0.0,
    start: Annotated[str, typer.Option(help="With --mode flow: uniform, first or last token.")] = "uniform",
    check: Annotated[
        bool, typer.Option("--check", help="Zero heads and tell whether those that attend across matter more.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write a page to look at here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw shares by layer here: .png, .svg, .pdf.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measures how much attention goes between kinds of tokens.

    Picture and text of a model that reads both (--image, --text), or groups of
    words of any text model: question and context, the roles of a chat, passages
    that were retrieved (--groups, --messages). Every share stands beside that of
    even attention. Reads this disk alone, never the network.
    """
    from heedful.cli.look import model_folder

    files = check_outputs([out], [plot], overwrite=overwrite, reads=[*(image or ()), messages, *_read_by(groups)])
    if messages is not None and (groups or text is not None or image):
        raise InvalidArgument("--messages holds the whole text; leave --groups, --text and --image out")
    if image and groups:
        raise InvalidArgument("--image and --groups say in two ways what the kinds are; give one of them")
    if image and text is None:
        raise InvalidArgument("--image needs a --text that the model reads beside it")
    if text is not None and not image and not groups:
        raise InvalidArgument("--text alone is of one kind; name its groups with --groups NAME=TEXT, or give --image")
    if check and mode == "flow":
        raise InvalidArgument("--check zeroes heads, which --mode flow averages; give --mode fraction or norm")
    chosen: Any = None
    if not image:
        chosen = _messages(messages) if messages is not None else _groups(groups) if groups else QUESTION
    folder = model_folder(model, "flow")
    # All that can be checked without torch is checked by now.
    from heedful.bridges import reading
    from heedful.bridges.pictures import inputs_with, load_seeing, open_pictures
    from heedful.lens import flows
    from heedful.lens.flows.section import html_of, over_picture

    options: dict[str, Any] = {"mode": mode, "special": special, "reduce": reduce, "rho": rho, "start": start}
    if image:
        import heedful.multimodal.processing  # noqa: F401 (so that folders of our own models are known)

        pictures = open_pictures(image)
        opened, processor = load_seeing(folder)
        inputs: Any = inputs_with(opened, processor, text or "", pictures)
        options |= {"tokenizer": getattr(processor, "tokenizer", None)}
    else:
        opened, tokenizer = reading.load(folder)
        inputs, options = text, options | {"groups": chosen, "tokenizer": tokenizer}
    with bar() as progress:
        result = flows.flow(opened, inputs, **options)
        checked = flows.causal_check(opened, inputs, progress=progress, **options) if check else None
    if out is not None:
        over = over_picture(result, opened, inputs) if image else []
        write(
            out,
            html_of(
                result,
                over,
                title=f"{reading.title_of(folder)}: attention between kinds of tokens",
                quote=text or _quoted(chosen),
            ),
        )
    if plot is not None:
        save_picture(plot, result.plot)
    if as_json:
        whole = result.to_dict() | {
            "heads": [one.to_dict() for one in (result.heads() if result.layers and mode != "flow" else ())]
        }
        typer.echo(json.dumps(whole | ({"check": checked.to_dict()} if checked else {}), indent=2))
        return
    if not image:
        typer.echo(f"{reading.title_of(folder)} on")
        for line in _listed(chosen, text):
            typer.echo(line)
    typer.echo(str(result))
    if checked is not None:
        typer.echo(f"\n{checked}")
    for path in files:
        typer.echo(f"written to {path}")


def _listed(groups: Any, text: str | None) -> list[str]:
    """The text and its groups, each from its beginning."""
    parts = [(one["role"], one["content"]) for one in groups] if isinstance(groups, list) else list(groups.items())
    named = [(str(name), " ".join([part] if isinstance(part, str) else part)) for name, part in parts]
    told = [] if text is None else [f'"{cut(" ".join(text.split()), SHOWN)}"']
    told += [f"{name}: {cut(' '.join(part.split()), SHOWN)}" for name, part in named]
    return [
        line
        for one in told
        for line in textwrap.wrap(printable(one), WIDE, initial_indent="  ", subsequent_indent="    ")
    ]


def _quoted(groups: Any) -> str:
    """Groups as they are quoted on a page."""
    if isinstance(groups, list):
        return " ".join(f"{one['role']}: {one['content']}" for one in groups)
    return " ".join(
        f"{name}: {' '.join([part] if isinstance(part, str) else part)}" for name, part in (groups or {}).items()
    )


def _groups(parts: Sequence[str]) -> dict[str, list[str]]:
    """Parts of a text by name; @FILE reads one from a file.

    >>> _groups(["question=Who?", "passage=One.", "passage=Two."])
    {'question': ['Who?'], 'passage': ['One.', 'Two.']}
    """
    groups: dict[str, list[str]] = {}
    for part in parts:
        name, equals, text = part.partition("=")
        if not equals or not name.strip() or not text.strip():
            raise InvalidArgument(f"--groups takes NAME=TEXT, as question='Who sat?'; got {part!r}")
        groups.setdefault(name.strip(), []).append(_file(Path(text[1:])) if text.startswith("@") else text)
    return groups


def _read_by(groups: Sequence[str] | None) -> list[Path]:
    """The files that groups name."""
    texts = [part.partition("=")[2] for part in groups or ()]
    return [Path(text[1:]) for text in texts if text.startswith("@")]


def _messages(file: Path) -> list[Any]:
    try:
        chat = json.loads(_file(file))
    except ValueError as error:
        raise InvalidArgument(f"{file} is not JSON ({error}); give a list of messages with role and content") from None
    if (
        not isinstance(chat, list)
        or not chat
        or not all(isinstance(one, dict) and {"role", "content"} <= set(one) for one in chat)
    ):
        raise InvalidArgument(f"{file} holds no chat; give a JSON list of messages, each with role and content")
    return chat


def _file(file: Path) -> str:
    try:
        return file.expanduser().read_bytes().decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{file} is not text in UTF-8; convert it first") from None
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}; give another file") from None
