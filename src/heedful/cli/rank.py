"""`heedful rank`: a folder of documents searched by meaning, the list re-ranked by its own context."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful.cli.arguments import AsJson, echo

if TYPE_CHECKING:
    from heedful.ranking.hits import Hits


def rank(
    query: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="What you look for, in your own words; without it the index is updated."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Documents: .txt, .md, .rst, and .pdf with pypdf; folders in it too.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option(help="The index, one SQLite file.", show_default="in the cache folder of this user")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A folder of sentence-transformers, or a name in the Hugging Face cache.", show_default="MiniLM"),
    ] = None,
    top: Annotated[int, typer.Option(help="How many passages to show.")] = 5,
    first: Annotated[int, typer.Option(help="How many the first list has, which is re-ranked.")] = 100,
    method: Annotated[
        str, typer.Option(help="auto, cosine (no re-ranking), or another method of heedful.ranking.")
    ] = "auto",
    no_update: Annotated[bool, typer.Option("--no-update", help="Search the index as it is.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build the index anew.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Searches a folder of documents by meaning, and re-ranks the list by how its passages resemble one another.

    The first call reads all documents, later ones what has changed. It can be
    stopped at any time and goes on at the next call. Nothing leaves this
    machine.
    """
    check_whole(top=top, first=first)
    if no_update and (rebuild or not query):
        raise InvalidArgument(f"--no-update needs a question{' and no --rebuild' if rebuild else ''}")
    if folder is None and (index is None or not no_update):
        raise InvalidArgument("--folder is missing; give a folder of documents, or --index FILE --no-update")
    if folder is not None and not folder.expanduser().is_dir():
        raise InvalidArgument(f"there is no folder {str(folder)!r}; give a folder of documents")
    if no_update and index is not None and not index.expanduser().exists():
        raise InvalidArgument(f"there is no index {str(index)!r}; leave --no-update out to make it")
    # All that can be checked without torch is checked by now.
    from heedful._progress import bar
    from heedful.bridges.reading import DEMO
    from heedful.bridges.sentences import Sentences
    from heedful.ranking.library import Library, index_path

    if query:
        from heedful.ranking.methods import METHODS

        check_choice(("auto", *METHODS), method=method)
    sentences = Sentences(model or DEMO, device=device, dtype="auto") if model or index is None else None
    if index is None:
        assert folder is not None
        assert sentences is not None
        index = index_path(folder, sentences)
        if no_update and not index.exists():
            raise InvalidArgument(f"{folder} has no index yet; leave --no-update out to make it")
        index.parent.mkdir(parents=True, exist_ok=True)
    with Library(index, sentences, rebuild=rebuild, device=device) as library:
        update, answer = None, None
        if folder is not None and not no_update:
            with bar() as say:
                update = library.update(folder, progress=say)
            if not as_json:
                typer.echo(f"{update}\nindex: {library.file}", err=bool(query))
        if query:
            answer = library.search(" ".join(query), top=top, first=first, method=method)
    if as_json:
        echo({"index": str(index), "update": update, "answer": answer}, as_json)
    elif answer is not None:
        show(answer)


def show(answer: Hits) -> None:
    """Prints an answer for people: titles bold, reasons dim, where the terminal has them."""
    width = min(shutil.get_terminal_size().columns, 110)
    typer.echo(answer.summary)
    for hit in answer.hits:
        title, reason, *text = hit.lines(answer.query, width)
        styled: list[Any] = [typer.style(title, bold=True), typer.style(reason, dim=True), *text]
        typer.echo("\n" + "\n".join(styled))
