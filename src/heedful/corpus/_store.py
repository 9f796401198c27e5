"""A folder in which a long count keeps what it has done, so that it goes on after a kill.

Parts of the corpus and sums of counts are files that are written whole; `journal.json`, replaced as a whole after each of them, says
which of them count. What the journal does not name was under way when the process ended, and is done again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from heedful._checks import check_whole
from heedful._errors import CorruptModel, InvalidArgument
from heedful._files import located, new_file, write
from heedful.corpus._documents import Shard, check_words, kind_of, numbers_of
from heedful.corpus._pairs import sparse

JOURNAL = "journal.json"
FORMAT = 1
# Entries of a matrix that are summed at once where sums lie on disk.
BLOCK = 2**21


@dataclass(frozen=True)
class Record:
    """What is known of a part of the corpus: its documents and tokens, and a digest by which it is known again."""

    documents: int
    tokens: int
    digest: str


def digest_of(batch: Sequence[Any]) -> str:
    """A digest of documents: texts, lists of words or arrays of numbers."""
    known = hashlib.blake2b(digest_size=16)
    for document in batch:
        if isinstance(document, str):
            known.update(b"t" + document.encode("utf-8", "surrogatepass"))
        elif kind_of(document) == "words":
            check_words(document)
            known.update(b"w" + "\x1f".join(document).encode("utf-8", "surrogatepass"))
        else:
            known.update(b"n" + numbers_of(document).astype("<i8").tobytes())
        known.update(b"\x1e")
    return known.hexdigest()


class Store:
    """Parts of a corpus and sums of their counts, on disk.

    Args:
        folder: made where there is none; one that holds a count with other settings is refused.
        settings: JSON, what decides the counts.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]) -> None:
        self.folder = located(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(
                f"cannot make the folder {self.folder}: {error.strerror}; give another folder"
            ) from None
        self.settings = settings
        self.shards: list[Record] = []
        # Each sum is of counts up to a part of the corpus.
        self.sums: list[int] = []
        # Of how many parts the corpus had when its vocabulary was settled.
        self.of: int | None = None
        # The journal as it was last read or written here, and how many callers hold the lock.
        self._noted: str | None = None
        self._depth = 0
        with self.at_work():
            if (self.folder / JOURNAL).exists():
                self._read()
            elif any(file.suffix == ".npy" for file in self.folder.iterdir()):
                raise InvalidArgument(f"{self.folder} holds other files; give a new or empty folder")
            else:
                self._note()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """One counter at a time; the system lets go of the lock when a process ends, however it does."""
        with ExitStack() as stack:
            if not self._depth:
                stack.enter_context(self._lock())
                self._check_journal()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def _lock(self) -> IO[str]:
        try:
            handle = (self.folder / "lock").open("w")
        except OSError as error:
            raise InvalidArgument(
                f"cannot write to the folder {self.folder}: {error.strerror}; give another folder"
            ) from None
        with suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                handle.close()
                raise InvalidArgument(
                    f"another counter is at work in {self.folder}; wait for it, or give another folder"
                ) from None
        return handle

    def _check_journal(self) -> None:
        """Another counter may have been here since."""
        journal = self.folder / JOURNAL
        if self._noted is not None and (not journal.exists() or journal.read_text() != self._noted):
            raise InvalidArgument(f"another counter has changed {self.folder} meanwhile; fit the whole corpus again")

    def _read(self) -> None:
        try:
            self._noted = (self.folder / JOURNAL).read_text()
            held = json.loads(self._noted)
            self.shards = [Record(**record) for record in held["shards"]]
            self.sums, self.of = list(held["sums"]), held["of"]
            known, settings = held["format"], held["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptModel(
                f"{self.folder / JOURNAL} cannot be read ({error}); delete the folder to count anew"
            ) from None
        if known != FORMAT:
            raise InvalidArgument(
                f"{self.folder} is of format {known}, this release reads {FORMAT}; give another folder"
            )
        for name, value in self.settings.items():
            # Folders of the first release name a function without its code.
            early = value.partition("#") if name == "tokenizer" else ("", "", "")
            if settings.get(name) != value and not (early[1] and settings.get(name) == early[0] != "words"):
                raise InvalidArgument(
                    f"{self.folder} holds a count with another {name}: {settings.get(name)!r:.60} instead of {value!r:.60}; "
                    "give another folder, or delete it"
                )

    def _note(self) -> None:
        held = {
            "format": FORMAT,
            "settings": self.settings,
            "shards": [asdict(record) for record in self.shards],
            "sums": self.sums,
            "of": self.of,
        }
        self._noted = json.dumps(held)
        write(self.folder / JOURNAL, self._noted)

    def check(self, place: int, batch: Sequence[Any]) -> Record:
        """The record of a part that the folder knows, if this is the one."""
        record = self.shards[place]
        if len(batch) != record.documents or digest_of(batch) != record.digest:
            raise InvalidArgument(
                f"{self.folder} holds a count of other documents: part {place + 1} of {len(self.shards)} differs; give another "
                "folder, or delete it"
            )
        return record

    def put_shard(self, record: Record, shard: Shard | None = None, words: Sequence[str] = ()) -> None:
        """Notes a part of the corpus; with its numbers and the words that are new in it, where they are kept."""
        if shard is not None:
            name = f"part-{len(self.shards):06d}"
            self._save(f"{name}-ids", shard.ids)
            self._save(f"{name}-lengths", shard.lengths)
            kind = None if shard.words is None else list(words)
            write(self.folder / f"{name}-words.json", json.dumps(kind))
        self.shards.append(record)
        if shard is not None:
            self._note()

    def shard(self, place: int, seen: Collection[str] | None = None) -> tuple[Shard, list[str]]:
        """A part of the corpus, its numbers mapped from disk, and the words that are new in it; checked against those seen before, if given."""
        name = f"part-{place:06d}"
        file = self.folder / f"{name}-words.json"
        try:
            words = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise self._damaged(f"{file.name} cannot be read, {error}") from None
        shard = Shard(self._load(f"{name}-ids"), self._load(f"{name}-lengths"), None if words is None else [])
        if seen is not None:
            self._check_shard(place, shard, words, seen)
        return shard, words or []

    def _check_shard(self, place: int, shard: Shard, words: Any, seen: Collection[str]) -> None:
        """Refuses a part that is not as it was written."""
        record, ids, lengths = self.shards[place], shard.ids, shard.lengths
        if ids.shape != (record.tokens,) or lengths.shape != (record.documents,) or lengths.sum() != len(ids):
            raise self._damaged(f"part {place + 1} has other sizes than were noted")
        if words is None:
            return
        if not isinstance(words, list) or any(not isinstance(word, str) or word in seen for word in words):
            raise self._damaged(f"the words of part {place + 1} are not those that were written")
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(seen) + len(words):
            raise self._damaged(f"part {place + 1} has numbers of words that are not there")

    def _damaged(self, what: str) -> CorruptModel:
        return CorruptModel(f"the folder {self.folder} is damaged: {what}; delete it and count again")

    def put_sums(
        self, matrices: Sequence[Any], upto: int, of: int | None, occurrences: np.ndarray | None = None
    ) -> None:
        """Keeps sums of counts; parts of the corpus up to `upto` are counted by then."""
        name = f"sums-{len(self.sums):06d}"
        for place, matrix in enumerate(matrices):
            for part in ("indptr", "indices", "data"):
                self._save(f"{name}-{place}-{part}", getattr(matrix, part))
        if occurrences is not None:
            self._save(f"{name}-occurrences", occurrences)
        self.sums.append(upto)
        self.of = of
        self._note()

    def drop_sums(self) -> None:
        """Forgets sums, which belong to a vocabulary that has changed."""
        self.sums, self.of = [], None
        self._note()
        for file in self.folder.glob("sums-*.npy"):
            file.unlink()

    def occurrences(self, place: int) -> np.ndarray:
        """How often each word occurred in the parts of one sum."""
        return self._load(f"sums-{place:06d}-occurrences")

    def total(self, number: int, size: int) -> list[Any]:
        """The sum of all sums, matrix by matrix, some rows at a time."""
        return [self._summed(place, size) for place in range(number)]

    def _summed(self, place: int, size: int) -> Any:
        parts = []
        for run in range(len(self.sums)):
            name = f"sums-{run:06d}-{place}"
            data, indices, indptr = (self._load(f"{name}-{part}") for part in ("data", "indices", "indptr"))
            parts.append(sparse().csr_array((data, indices, np.asarray(indptr)), shape=(size, size), copy=False))
        # Pages of memory that are never written to are never there.
        most = sum(part.nnz for part in parts)
        data, indices, indptr = np.empty(most, np.int64), np.empty(most, np.int32), np.zeros(size + 1, np.int64)
        for start, stop in _row_blocks(parts):
            block = sum((part[start:stop] for part in parts[1:]), parts[0][start:stop])
            before = indptr[start]
            indptr[start + 1 : stop + 1] = before + block.indptr[1:]
            data[before : before + block.nnz] = block.data
            indices[before : before + block.nnz] = block.indices
        return sparse().csr_array((data[: indptr[-1]], indices[: indptr[-1]], indptr), shape=(size, size), copy=False)

    def _save(self, name: str, array: np.ndarray) -> None:
        with new_file(self.folder / f"{name}.npy") as part, part.open("wb") as out:
            np.save(out, array, allow_pickle=False)

    def _load(self, name: str) -> np.ndarray:
        file = self.folder / f"{name}.npy"
        try:
            return np.load(file, mmap_mode="r" if file.stat().st_size > 2**12 else None, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(f"{file.name} cannot be read, {error}") from None


def size_of(memory: int | str) -> int:
    """A size in bytes, from a number or a text with its unit.

    >>> size_of("1.5GB"), size_of(2048)
    (1500000000, 2048)
    """
    if isinstance(memory, str):
        units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
        text = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)\s*", memory.upper())
        if text is None:
            raise InvalidArgument(f"max_memory must be bytes or a text such as '500MB' or '2GB'; got {memory!r:.100}")
        return int(float(text[1]) * units[text[2]])
    check_whole(max_memory=memory)
    return memory


def _row_blocks(parts: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Ranges of rows with no more than `BLOCK` entries in all parts together, or one row."""
    entries: np.ndarray = np.stack([part.indptr for part in parts]).sum(axis=0, dtype=np.int64)
    start, rows = 0, len(entries) - 1
    while start < rows:
        stop = int(np.searchsorted(entries, entries[start] + BLOCK, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        yield start, stop
        start = stop
