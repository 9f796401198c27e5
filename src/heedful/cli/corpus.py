"""`heedful corpus`: words of a text counted, and what counts alone say: vectors, nearest words, attention, gaps filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful._text import quantity
from heedful.cli.arguments import AsJson, Overwrite, check_outputs, echo

if TYPE_CHECKING:
    from heedful.corpus import AttentionMap, Cooccurrence

corpus = typer.Typer(help="Counts which words stand near which, and shows what counts alone say.", no_args_is_help=True)

KINDS = ("ppmi", "pmi", "sppmi", "npmi", "log1p", "log", "conditional")
METHODS = ("svd", "symmetric", "directional", "glove", "glove-adagrad")
SIDES = ("auto", "words", "contexts", "sum", "concat")
FORMS = ("distance", "tucker", "additive", "rotary")

Counts = Annotated[
    Path | None,
    typer.Option(
        help="Counts that `heedful corpus count` wrote; or texts, which are counted.", show_default="an installed text"
    ),
]
Window = Annotated[int, typer.Option(help="How far apart two words may be.")]
Kind = Annotated[str, typer.Option(help=f"{', '.join(KINDS)}.")]
Positions = Annotated[
    str | None, typer.Option(help=f"{', '.join(FORMS)}: how scores depend on the distance.", show_default="they do not")
]  # fmt: skip


@corpus.callback()
def _start() -> None:
    pass


@corpus.command("count")
def count(
    texts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TEXTS", help=".txt and .txt.gz, a line is a document; or folders of them.", show_default="an installed text"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The folder to keep the counts in.", show_default="not kept")] = None,
    window: Window = 10,
    weighting: Annotated[str, typer.Option(help="inverse, linear, uniform or exponential: what a pair at a distance counts.")] = "inverse",
    min_count: Annotated[int, typer.Option(help="Words that occur so often.")] = 5,
    max_vocabulary: Annotated[int | None, typer.Option(help="So many of the most frequent words.", show_default="all")] = None,
    unknown: Annotated[str, typer.Option(help="Other words: squeeze removes them, keep leaves their places.")] = "squeeze",
    subsample: Annotated[float | None, typer.Option(help="Leave words more frequent than this share out at random: 1e-4.", show_default="none")] = None,
    seed: Annotated[int, typer.Option(help="Of --subsample.")] = 0,
    per_distance: Annotated[bool, typer.Option("--per-distance", help="Keep each distance by itself, for --positions.")] = False,
    max_memory: Annotated[str, typer.Option(help="What counts may take; more goes to disk.")] = "1GB",
    folder: Annotated[Path | None, typer.Option(help="Where a long count is kept, to go on after a stop.", show_default="none")] = None,
    n_jobs: Annotated[int, typer.Option(help="Processes; -1 for one on each core.")] = 1,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Counts pairs of words within a window, exactly."""
    _check_new(out)
    for file in texts or ():
        if not file.expanduser().exists():
            raise InvalidArgument(f"there is no file or folder {str(file)!r}; give texts")
    # All that can be checked without torch is checked by now.
    from heedful.corpus import Cooccurrence

    counter = Cooccurrence(
        window, weighting, min_count=min_count, max_vocabulary=max_vocabulary, unknown=unknown, subsample=subsample, seed=seed, per_distance=per_distance,  # type: ignore[arg-type]
        max_memory=max_memory, folder=folder, n_jobs=n_jobs,
    )  # fmt: skip
    given, source = (_every(texts), ", ".join(map(str, texts))) if texts else _installed()
    counter.fit(given)
    if out is not None:
        counter.save_pretrained(out)
    told = {
        "source": source,
        "documents": counter.documents_,
        "tokens": counter.tokens_,
        "words": len(counter.vocabulary_),
        "pairs": counter.counts().nnz,
        "most_frequent": dict(zip(counter.vocabulary_.words[:10], counter.word_counts_[:10].tolist(), strict=True)),
        "folder": None if out is None else str(out),
    }
    echo(told, as_json, _told)


def _told(told: dict[str, Any]) -> str:
    frequent = ", ".join(f"{word} {number:,}" for word, number in told["most_frequent"].items())
    lines = [
        f"{quantity(told['tokens'], 'word')} in {quantity(told['documents'], 'document')} of {told['source']}",
        f"{quantity(told['words'], 'different one')} counted, {quantity(told['pairs'], 'pair')}: {frequent}",
    ]
    kept = f"counts written to {told['folder']}" if told["folder"] else "not kept; --out FOLDER writes them"
    return "\n".join([*lines, kept])


@corpus.command("embed")
def embed(
    counts: Annotated[
        Path | None,
        typer.Argument(metavar="COUNTS", help="A folder of counts; or texts, which are counted.", show_default="an installed text"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The folder to keep the vectors in.", show_default="not kept")] = None,
    dim: Annotated[int, typer.Option(help="Numbers of a vector.")] = 200,
    method: Annotated[str, typer.Option(help="svd, symmetric, directional, glove or glove-adagrad.")] = "svd",
    association: Kind = "ppmi",
    power: Annotated[float, typer.Option(help="Share of singular values that words get, 0 to 1.")] = 0.0,
    sides: Annotated[str, typer.Option(help="auto, words, contexts, sum or concat.")] = "auto",
    sweeps: Annotated[int | None, typer.Option(help="Of GloVe.", show_default="8, of AdaGrad 15")] = None,
    x_max: Annotated[float, typer.Option(help="Of GloVe: counts from here on weigh the same.")] = 100.0,
    random_state: Annotated[int, typer.Option("--seed", help="Seed.")] = 0,
    text: Annotated[Path | None, typer.Option(help="Write word2vec's text format here.", show_default="not written")] = None,
    pairs: Annotated[Path | None, typer.Option(help="Judged pairs: word, word, number.", show_default="not evaluated")] = None,
    questions: Annotated[Path | None, typer.Option("--analogies", help="Questions of four words.", show_default="not evaluated")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Makes word vectors from counts: no training, the same at every run."""
    check_whole(dim=dim)
    check_choice(METHODS, method=method)
    check_choice(KINDS, association=association)
    check_choice(SIDES, sides=sides)
    check_number(least=0, most=1, power=power)
    check_whole(0, optional=True, sweeps=sweeps)
    check_number(0, x_max=x_max)
    check_whole(0, 2**32 - 1, random_state=random_state)
    _check_new(out)
    check_outputs([text], overwrite=overwrite, reads=[counts, pairs, questions])
    for file in (pairs, questions):
        if file is not None and not file.expanduser().is_file():
            raise InvalidArgument(f"there is no file {str(file)!r}; give another")
    from heedful.corpus import WordVectors

    model = WordVectors(
        dim, method, association=association, power=power, sides=sides, sweeps=sweeps, x_max=x_max, random_state=random_state,  # type: ignore[arg-type]
    )  # fmt: skip
    model.fit(_counter(counts))
    told: dict[str, Any] = {
        "words": len(model.vocabulary_),
        "dim": model.vectors_.shape[1],
        "pairs": None if pairs is None else model.evaluate_pairs(pairs),
        "analogies": None if questions is None else model.evaluate_analogies(questions),
        "folder": None if out is None else str(out),
        "text": None if text is None else str(text),
    }
    if out is not None:
        model.save_pretrained(out)
    if text is not None:
        model.save_text(text)
    if as_json:
        echo(told, as_json)
        return
    typer.echo(f"{told['words']:,} vectors of {told['dim']} numbers by {method}")
    for name in ("pairs", "analogies"):
        if told[name] is not None:
            typer.echo(f"{name}: {told[name]}")
    typer.echo(f"vectors written to {out}" if out else "not kept; --out FOLDER writes them")
    if text is not None:
        typer.echo(f"word2vec's text format written to {text}")


@corpus.command("similar")
def similar(
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help="One word, or several for what is near all of them.")],
    minus: Annotated[list[str] | None, typer.Option(help="A word to go away from; may be given again.", show_default="none")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Vectors that `embed` wrote, in a folder or as text, or counts, or texts.", show_default="an installed text")
    ] = None,
    top: Annotated[int, typer.Option(help="How many words to show.")] = 10,
    among: Annotated[int | None, typer.Option(help="Only so many of the most frequent words.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Shows the words whose vectors are nearest; king --minus man woman asks for what is to woman as king to man."""
    check_whole(top=top)
    check_whole(optional=True, among=among)
    from heedful.corpus import WordVectors

    if model is not None and _kind_of(model) == "estimator":
        vectors = WordVectors.from_pretrained(model)
    elif model is not None and _is_vectors(model.expanduser()):
        vectors = WordVectors.from_text(model.expanduser())
    else:
        counter = _counter(model)
        # With as many components as words all are at right angles to one another.
        vectors = WordVectors(max(1, min(200, len(counter.vocabulary_) // 10))).fit(counter)
    echo(vectors.most_similar(words, minus or (), top=top, among=among), as_json)


@corpus.command("attend")
def attend(
    text: Annotated[list[str], typer.Argument(metavar="TEXT", help="A sentence.")],
    counts: Counts = None,
    association: Kind = "ppmi",
    smoothing: Annotated[float, typer.Option(help="Exponent of contexts; 1 for none.")] = 0.75,
    beta: Annotated[float, typer.Option(help="What scores are multiplied by.")] = 1.0,
    directed: Annotated[bool, typer.Option("--directed", help="The order of two words counts.")] = False,
    positions: Positions = None,
    heads: Annotated[str, typer.Option(help="How many, or spectral, or distance.")] = "1",
    rank: Annotated[int, typer.Option(help="Singular vectors, of several heads, tucker and rotary.")] = 200,
    exclude_self: Annotated[bool, typer.Option("--exclude-self/--with-self", help="Whether no word attends to itself.")] = True,
    is_causal: Annotated[bool, typer.Option("--causal", help="No word attends to later ones.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the map here: .png, .svg, .pdf, or .html.", show_default="not drawn")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Draws which words of a text attend to which, by counts alone: rows look, columns are looked at, in percent."""
    sentence = _sentence(text)
    check_choice(KINDS, association=association)
    check_choice(FORMS, optional=True, positions=positions)
    check_number(0, most=1, smoothing=smoothing)
    check_number(beta=beta)
    check_whole(rank=rank)
    number: Any = int(heads) if heads.isdigit() else heads
    if heads.isdigit():
        check_whole(heads=number)
    else:
        check_choice(("spectral", "distance"), heads=heads)
    is_page = out is not None and out.suffix.lower() == ".html"
    check_outputs([out if is_page else None], [None if is_page else out], overwrite=overwrite, reads=[counts])
    from heedful.corpus import AttentionMap, CorpusAttention

    attention = CorpusAttention(
        _counter(counts, per_distance=positions is not None), association, smoothing=smoothing, beta=beta, directed=directed,  # type: ignore[arg-type]
        positions=positions, heads=number, rank=rank, exclude_self=exclude_self, is_causal=is_causal,  # type: ignore[arg-type]
    )  # fmt: skip
    result = AttentionMap.of(attention, sentence)
    if not result.words:
        raise InvalidArgument(f"there is no word in {sentence!r:.100}; give a sentence")
    echo(result, as_json)
    _tell_unknown(result.unknown, all(not known for known in result.known))
    if out is not None:
        if is_page:
            _write_page(out, result, sentence)
        else:
            from heedful._plot import save_picture

            save_picture(out, result.plot)
        typer.echo(f"\nmap drawn to {out}", err=as_json)


@corpus.command("cloze")
def cloze(
    text: Annotated[list[str], typer.Argument(metavar="TEXT", help="A sentence with a gap, ___ or [MASK].")],
    counts: Counts = None,
    association: Kind = "conditional",
    directed: Annotated[bool, typer.Option("--directed", help="The order of two words counts.")] = False,
    positions: Positions = None,
    rank: Annotated[int, typer.Option(help="Singular vectors, of tucker and rotary.")] = 200,
    position: Annotated[int | None, typer.Option(help="The gap is this word, from 0 on; -1 is the last.", show_default="where ___ is")] = None,
    top: Annotated[int, typer.Option(help="How many words to show.")] = 10,
    strength: Annotated[float, typer.Option(help="What associations are multiplied by.")] = 1.0,
    context: Annotated[int | None, typer.Option(help="Words on either side that are read.", show_default="the window")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Fills a gap by counts alone: which words go with those around it."""
    sentence = _sentence(text)
    check_choice(KINDS, association=association)
    check_choice(FORMS, optional=True, positions=positions)
    check_whole(top=top, rank=rank)
    check_whole(optional=True, context=context)
    check_number(strength=strength)
    from heedful.corpus import CorpusAttention

    attention = CorpusAttention(
        _counter(counts, per_distance=positions is not None), association, directed=directed, positions=positions, rank=rank,  # type: ignore[arg-type]
    )  # fmt: skip
    result = attention.predict_masked(sentence, position, top=top, strength=strength, context=context)
    echo(result, as_json)
    around = [word for word in (*result.before, *result.after) if word not in attention.vocabulary]
    _tell_unknown(tuple(dict.fromkeys(around)), len(around) == len(result.before) + len(result.after))


def _sentence(words: list[str]) -> str:
    """The text of the command line, or of standard input."""
    from heedful.cli.look import read_text

    return read_text(words, None) or ""


def _tell_unknown(words: tuple[str, ...], all_of_them: bool) -> None:
    if words:
        typer.echo(
            f"{'no word was' if all_of_them else 'not'} counted: {', '.join(words)}; --counts takes texts like yours",
            err=True,
        )


def _installed() -> tuple[Any, str]:
    from heedful._installed import everyday_texts

    return everyday_texts()


def _every(texts: list[Path]) -> Any:
    """Lines of files and of folders."""
    return [text.expanduser() for text in texts]


def _kind_of(folder: Path) -> str | None:
    """What a folder holds that heedful wrote: counts, an estimator; None where it is no such folder."""
    try:
        described = json.loads((folder.expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return next((kind for kind in ("counts", "estimator") if isinstance(described, dict) and kind in described), None)


def _is_vectors(file: Path) -> bool:
    """Whether a file begins as word2vec's text format does: how many words and numbers, then a word with so many numbers."""
    if not file.is_file():
        return False
    with file.open(encoding="utf-8", errors="replace") as lines:
        header, first = lines.readline().split(), lines.readline().split()
    return len(header) == 2 and all(part.isdecimal() for part in header) and len(first) == 1 + int(header[1])


def _counter(place: Path | None, *, per_distance: bool = False) -> Cooccurrence:
    """Counts that were kept, or of texts, or of an installed text; which one is told on standard error."""
    if place is not None and not place.expanduser().exists():
        raise InvalidArgument(f"there is no file or folder {str(place)!r}; give counts or texts")
    kind = None if place is None else _kind_of(place)
    if kind == "estimator":
        raise InvalidArgument(f"{place} holds vectors; give counts, or texts")
    from heedful.corpus import Cooccurrence

    if kind == "counts":
        assert place is not None
        return Cooccurrence.from_pretrained(place)
    texts, source = _installed() if place is None else (place.expanduser(), str(place))
    counter = Cooccurrence(per_distance=per_distance).fit(texts)
    typer.echo(
        f"counted {counter.tokens_:,} words of {source}; `heedful corpus count --out FOLDER` keeps counts", err=True
    )
    return counter


def _check_new(folder: Path | None) -> None:
    """Refuses a place that holds something already."""
    if folder is None:
        return
    place = folder.expanduser()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InvalidArgument(f"{folder} is there already; give a new or empty folder")


def _write_page(out: Path, result: AttentionMap, sentence: str) -> None:
    """A page with the maps of all heads, which enlarge, and the strongest words of each word as a table."""
    import torch

    from heedful._files import write
    from heedful.report import Map, Section, Table
    from heedful.report.maps import Atlas, Layer, Tile
    from heedful.report.page import page

    weights = torch.from_numpy(result.weights)
    heads, queries, keys = weights.shape
    atlas = Atlas([(heads, queries, keys)])
    atlas.add(weights)
    tiles = []
    for head, own in enumerate(result.weights):
        at = divmod(int(own.argmax()), len(result.words))
        pair = f"{result.words[at[0]]} → {result.words[at[1]]}"
        told = f"head {head}: strongest {pair}, {own.max():.0%}"
        tiles.append(Tile(head, pair, (f"{own.max():.0%}", ""), told, (at[0], at[1])))
    rows = [
        [word, ", ".join(f"{other} {weight:.0%}" for other, weight in result.strongest(at))]
        for at, word in enumerate(result.words)
    ]
    blocks = [
        Map([Layer(0, "counts", result.words, result.words, tiles)], atlas, ["Below each map: its strongest pair."]),
        Table(["word", "attends most to"], rows, "Heads averaged", title="The strongest words"),
    ]
    sections = {"attention": Section("Attention by counts", blocks, result.to_dict())}
    write(out, page(sections, title="Attention by counts", command="corpus attend", quote=sentence))
