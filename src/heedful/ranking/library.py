"""A folder of documents that can be searched: an index in one file, updated where files changed, lists re-ranked by their context."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument, MissingExtra
from heedful._files import located
from heedful._progress import Progress, silent
from heedful.bridges.reading import DEMO, check_text
from heedful.bridges.sentences import Sentences
from heedful.ranking._store import HOME, FileState, Row, Store
from heedful.ranking.hits import Hit, Hits, Neighbour, Update
from heedful.ranking.passages import ENDINGS, Passage, read_passages

if TYPE_CHECKING:
    import torch

    from heedful.ranking.search import Index

__all__ = ["Library", "index_path"]

# So many passages are encoded between two writes: what a kill loses at most is the work on these.
CHUNK = 128
# Folders that hold nothing to read.
ASIDE = {"__pycache__", "node_modules"}
# What "auto" stands for here. A question has few right answers, and its own cosine must go on deciding: with the weight that suits
# lists of one kind, 0.3, first places get worse (docs/search.md).
AUTO: tuple[str, Mapping[str, Any]] = ("k-reciprocal", {"k1": 10, "k2": 3, "weight": 0.9})
# A result may be vouched for by so many others, found among so many of the best, at least.
VOUCHING, AMONG = 3, 10


def index_path(folder: str | Path, sentences: Sentences) -> Path:
    """Where the index of a folder is kept if nothing else is said: in the user's cache, so that nothing is written among the documents.

    `$XDG_CACHE_HOME/heedful/indexes`, or `~/.cache/heedful/indexes`; one file for each folder and model.
    """
    place = located(folder).resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().joinpath(*HOME)
    known = hashlib.sha256(f"{place}\n{sentences.digest}".encode()).hexdigest()[:12]
    return cache / f"{place.name or 'root'}-{known}.sqlite"


@dataclass
class _Work:
    """Files that wait for their vectors."""

    files: list[tuple[str, FileState, list[Passage]]] = field(default_factory=list)
    size: int = 0


class Library:
    """Documents of a folder in passages with their vectors, in one SQLite file.

    A question is answered in two steps: the passages nearest to it by the cosine of their vectors, searched exactly; then these
    are ordered anew by how they resemble one another (`heedful.ranking.rerank`). The second step sees the first list alone, so
    its cost does not grow with the library.

    `update` reads what is new or changed, by size, time and SHA-256. All that belongs to a document is written in one transaction
    of SQLite's write-ahead log: a process that is killed leaves every document as it was or as it is now, and the next update
    goes on from there.

    Args:
        file: the index; made where there is none.
        sentences: the model; by default the one the index was built with, all-MiniLM-L6-v2 for a new one.
        rebuild: begin anew instead of reading an index that is damaged, or of another model. The old one stays until the first
            `update` is done; meanwhile the new one is `FILE.new`.
        device: where the model runs that the index names; `sentences` has its own.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "sea.md").write_text("# Sea\\n\\nTides follow the moon.\\n\\n# Land\\n\\nHills are old.\\n")
    ...     with Library(Path(folder, "sea.sqlite")) as library:
    ...         print(library.update(folder))
    ...         best = library.search("Why does the water rise and fall?").hits[0]
    ...     print(best.file, best.start, best.text)
    1 document, 2 passages: 1 added
    sea.md 3 Tides follow the moon.
    """

    def __init__(
        self,
        file: str | Path,
        sentences: Sentences | None = None,
        *,
        rebuild: bool = False,
        device: str | torch.device = "auto",
    ) -> None:
        self._store = Store(file, rebuild=rebuild)
        try:
            held = self._store.meta
            self.sentences = sentences or Sentences(held.get("model", DEMO), device=device, dtype="auto")
            if held.get("digest", self.sentences.digest) != self.sentences.digest:
                raise InvalidArgument(
                    f"the index {self.file} was built with {held['name']} in {held['model']}, not with {self.sentences.name} in "
                    f"{self.sentences.folder}; give that model, another index, or rebuild=True to build it anew"
                )
        except BaseException:
            self._store.close()
            raise
        self._version: tuple[int, int] | None = None
        self._numbers, self._vectors = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)

    @property
    def file(self) -> Path:
        """The index."""
        return self._store.file

    def __len__(self) -> int:
        return self._store.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection to the file."""
        self._store.close()

    def update(self, folder: str | Path, *, batch_size: int = 32, progress: Progress = silent) -> Update:
        """Brings the index to the state of a folder: files that are new or changed are read, files that are gone are removed.

        Hidden files and folders, `__pycache__` and `node_modules` are passed by, and links to folders are not followed. A document
        that cannot be read is skipped, and named with the reason. A folder without any document is refused, so that one which
        is not mounted does not empty the index; so is another folder than before, unless that one is gone.
        """
        check_whole(batch_size=batch_size)
        place = located(folder).resolve()
        if not place.is_dir():
            raise InvalidArgument(f"there is no folder {str(folder)!r}; give a folder of documents")
        there, closed = _documents(place)
        if not there:
            raise InvalidArgument(f"{folder} holds no documents; they end in {', '.join(sorted(ENDINGS))}")
        self._settle(place)
        begun = perf_counter()
        known = self._store.files()
        removed = tuple(path for path in known if path not in there and not path.startswith(tuple(closed)))
        if removed:
            self._store.remove(removed)
        skipped = {path: known[path].state for path in there if path in known and known[path].state}
        waiting = [path for path, (size, time) in there.items() if path not in known or known[path][:2] != (size, time)]
        written: list[str] = []
        same: dict[str, FileState] = {}
        work = _Work()
        for done, path in enumerate(waiting):
            skipped.pop(path, None)
            try:
                state = FileState(*there[path], hashlib.sha256((place / path).read_bytes()).hexdigest())
                if path in known and known[path].sha256 == state.sha256:
                    same[path] = state
                    if known[path].state:
                        skipped[path] = known[path].state
                    continue
                passages = _read(place / path)
            except (OSError, MissingExtra) as error:
                # What is wrong here may be right the next time: nothing is noted, and what was stored stays.
                skipped[path] = error.strerror or str(error) if isinstance(error, OSError) else str(error)
                continue
            except InvalidArgument as error:
                skipped[path] = str(error)
                state, passages = state._replace(state=str(error)), []
            written.append(path)
            work.files.append((path, state, passages))
            work.size += len(passages)
            if work.size >= CHUNK:
                work = self._write(
                    work, batch_size, _share(progress, done + 1 - len(work.files), done + 1, len(waiting))
                )
        self._write(work, batch_size, _share(progress, len(waiting) - len(work.files), len(waiting), len(waiting)))
        if same:
            self._store.touch(same)
        if self._store.finish():
            self._version = None
        read = [path for path in written if path not in skipped]
        return Update(
            added=tuple(path for path in read if path not in known),
            changed=tuple(path for path in read if path in known),
            removed=removed,
            unchanged=len(there) - len(read) - len(skipped),
            skipped=dict(sorted((skipped | closed).items())),
            documents=self._store.count("files"),
            passages=len(self),
            seconds=perf_counter() - begun,
        )

    def search(
        self,
        query: str,
        *,
        top: int = 10,
        first: int = 100,
        method: str = "auto",
        reranker: Any = None,
        index: str | Index | None = None,
        **options: Any,
    ) -> Hits:
        """The passages that answer a question best, in the order that their context gives them.

        Passages with the same words count once; the others are named as `copies` of the first.

        Args:
            query: a question, or any text that resembles what is wanted.
            top: how many to return.
            first: how many the first list has, which is then re-ranked.
            method: any of `heedful.ranking.METHODS`; `"cosine"` leaves the first order. `"auto"` is k-reciprocal re-ranking with settings
                that left first places as they were in our tests: `k1=10, k2=3, weight=0.9`.
            reranker: a fitted `ListReranker` in place of `method`.
            index: where the first list comes from, see `heedful.ranking.nearest`.
            options: of the method.
        """
        from heedful.ranking.methods import METHODS, rerank

        check_text(query)
        check_whole(top=top, first=first)
        check_choice(("auto", *METHODS), method=method)
        if not len(self):
            raise InvalidArgument(f"the index {self.file} holds no passages; update it with a folder of documents")
        self.sentences.load()
        begun = perf_counter()
        asked = self.sentences.encode([query], kind="query")
        rows, copies, cosines, vectors = self._first(asked, max(first, top), index)
        if reranker is None:
            name, chosen = AUTO if method == "auto" else (method, {})
            ranking = rerank(asked, vectors, name, normalize=False, device="cpu", **{**chosen, **options})
        else:
            name, ranking = type(reranker).__name__, reranker.rerank(asked, vectors)
        ordered = [int(place) for place in ranking.order[0] if place >= 0]
        scores = dict(zip(ordered, map(float, ranking.scores[0]), strict=False))
        # What a method leaves out keeps its first order, behind the others.
        order = [*ordered, *(place for place in range(len(rows)) if place not in scores)]
        vouching = _neighbours(vectors, order, max(top, AMONG))
        hits = [
            Hit(
                file=rows[at].path,
                start=rows[at].start,
                heading=rows[at].heading,
                text=rows[at].text,
                place=new,
                first_place=at + 1,
                score=scores.get(at),
                cosine=float(cosines[at]),
                neighbours=tuple(
                    Neighbour(other + 1, rows[order[other]].path, similarity) for other, similarity in vouching[new - 1]
                ),
                copies=copies[at],
            )
            for new, at in enumerate(order[:top], 1)
        ]
        return Hits(query, tuple(hits), name, len(order), len(self._numbers), perf_counter() - begun)

    def _first(
        self, asked: np.ndarray, count: int, index: str | Index | None
    ) -> tuple[list[Row], list[tuple[str, ...]], np.ndarray, np.ndarray]:
        """The first list: distinct passages, where else each stands, its cosine, its vector."""
        from heedful.ranking.search import nearest

        while True:
            self._refresh()
            found = nearest(asked, self._vectors, count, normalize=False, index=index)
            cosines, places = (part[0].cpu().numpy() for part in found)
            cosines, places = cosines[places >= 0], places[places >= 0]
            rows = self._store.rows(self._numbers[places])
            # Fewer where another process has replaced some since the vectors were read.
            if len(rows) == len(places):
                break
        rows, copies, chosen = _distinct(rows)
        return rows, copies, cosines[chosen], self._vectors[places[chosen]]

    def _settle(self, folder: Path) -> None:
        """Notes model and folder of a new index; refuses another folder."""
        held = self._store.meta
        before = held.get("folder")
        if before is not None and Path(before) != folder and Path(before).is_dir():
            raise InvalidArgument(
                f"the index {self.file} is of the folder {before}, not of {folder}; give another index, or rebuild=True to use it "
                "for this folder"
            )
        model = self.sentences
        known = {"model": str(model.folder), "name": model.name, "digest": model.digest, "folder": str(folder)}
        # The dimension is known once the model is loaded, which an update without changes has no need of.
        if any(held.get(key) != value for key, value in known.items()):
            self._store.set_meta(**known)

    def _write(self, work: _Work, batch_size: int, progress: Progress) -> _Work:
        """Encodes and stores what waits, each document in a transaction of its own."""
        texts = [str(passage) for _, _, passages in work.files for passage in passages]
        if texts and "dim" not in self._store.meta:
            self._store.set_meta(dim=str(self.sentences.dim))
        vectors = np.zeros((0, 0), np.float32)
        if texts:
            vectors = self.sentences.encode(texts, batch_size=batch_size, progress=progress)
        at = 0
        for path, state, passages in work.files:
            self._store.replace(path, state, passages, vectors[at : at + len(passages)])
            at += len(passages)
        return _Work()

    def _refresh(self) -> None:
        """Reads vectors where the file has changed, by whichever process."""
        version = self._store.version
        if version != self._version:
            self._numbers, self._vectors = self._store.vectors()
            self._version = version


def _documents(folder: Path) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Documents below a folder by their paths from it, with size and time; and folders that cannot be read, with the reason."""
    found: dict[str, tuple[int, int]] = {}
    closed: dict[str, str] = {}

    def note(error: OSError) -> None:
        closed[f"{Path(error.filename).relative_to(folder).as_posix()}/"] = error.strerror or str(error)

    for place, folders, files in os.walk(folder, onerror=note):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ASIDE]
        for name in files:
            path = Path(place, name)
            if name.startswith(".") or path.suffix.lower() not in ENDINGS or not path.is_file():
                continue
            state = path.stat()
            found[path.relative_to(folder).as_posix()] = state.st_size, state.st_mtime_ns
    return dict(sorted(found.items())), closed


def _share(progress: Progress, before: int, after: int, total: int) -> Progress:
    """Progress of the texts in some documents as progress in all documents."""

    def move(done: int, texts: int, what: str = "") -> None:
        progress(before + (after - before) * done // texts, total, "documents read")

    return move


def _read(file: Path) -> list[Passage]:
    passages = read_passages(file)
    if not passages:
        raise InvalidArgument(f"{file.name} holds no words")
    return passages


def _distinct(rows: list[Row]) -> tuple[list[Row], list[tuple[str, ...]], list[int]]:
    """Rows without those whose text came before; the files of these, for each; and the places of what is left."""
    held: dict[str, int] = {}
    copies: list[list[str]] = []
    for at, row in enumerate(rows):
        if held.setdefault(row.text, at) == at:
            copies.append([])
        else:
            copies[list(held).index(row.text)].append(row.path)
    chosen = list(held.values())
    return [rows[at] for at in chosen], [tuple(paths) for paths in copies], chosen


def _neighbours(vectors: np.ndarray, order: list[int], among: int) -> list[list[tuple[int, float]]]:
    """For each of the best, by its new place: the places and cosines of those among them that resemble it most."""
    best = vectors[order[:among]]
    similar = best @ best.T
    np.fill_diagonal(similar, -np.inf)
    nearest = np.argsort(-similar, axis=1, kind="stable")[:, : min(VOUCHING, len(best) - 1)]
    return [[(int(other), float(row[other])) for other in others] for row, others in zip(similar, nearest, strict=True)]
