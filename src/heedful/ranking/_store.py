"""One SQLite file that holds documents in passages, their vectors, and from which state of each file they are."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from heedful._errors import InvalidArgument
from heedful._files import check_place, located
from heedful.ranking.passages import Passage

FORMAT = 1
# Says of a SQLite file that it is one of ours: "heed".
OURS = 0x68656564
# Folders of the user's cache in which nothing but indexes lies.
HOME = ("heedful", "indexes")
# How long to wait for another process that is writing, in seconds.
PATIENCE = 30.0
# What SQLite keeps beside a file.
JOURNALS = ("-wal", "-shm")
# How every SQLite file begins; what stands in the first page of an index, so long.
SQLITE, TABLES, PAGE = b"SQLite format 3\0", b"CREATE TABLE passages", 4096

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
    sha256 TEXT NOT NULL, state TEXT NOT NULL
);
CREATE TABLE passages (
    id INTEGER PRIMARY KEY, file INTEGER NOT NULL REFERENCES files (id) ON DELETE CASCADE, place INTEGER NOT NULL,
    start INTEGER NOT NULL, heading TEXT NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL, UNIQUE (file, place)
);
"""


class FileState(NamedTuple):
    """A file as it was when it was read; `state` is empty, or why it has no passages."""

    size: int
    mtime_ns: int
    sha256: str
    state: str = ""


class Row(NamedTuple):
    """A stored passage and its file."""

    path: str
    start: int
    heading: str
    text: str


class Store:
    """The file. What belongs to a document is replaced in one transaction, so a kill leaves the old or the new, never a part.

    Args:
        file: where it is, or where a new one is to be.
        rebuild: begin anew, in a file beside it, `FILE.new`, that takes its place with `finish`; `close` without that leaves the old
            one as it was. A file that is no index and was none is refused.
    """

    def __init__(self, file: str | Path, *, rebuild: bool = False) -> None:
        self.file = check_place(located(file))
        self._new: Path | None = None
        if rebuild:
            self._check_replaceable()
            self._new = Path(f"{self.file.resolve()}.new")
            self._check_unused(self._new)
            _delete(self._new)
        self._open()

    def _open(self) -> None:
        at = self._new or self.file
        new = not at.exists() or not at.stat().st_size
        with self._named():
            # Transactions are ours: autocommit outside of them. One connection serves several threads, one at a time.
            self._base = sqlite3.connect(at, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
            try:
                if self._new is not None:
                    # Held until it is closed, so that no other process rebuilds the same index.
                    self._base.execute("PRAGMA locking_mode = EXCLUSIVE")
                if new:
                    self._create()
                self._check()
            except BaseException:
                self._base.close()
                raise

    def finish(self) -> bool:
        """Puts what was built anew in the place of the old index; False where nothing was."""
        if self._new is None:
            return False
        # The last connection folds the journal into the file.
        self._base.close()
        place = self.file.resolve()
        # A journal of the old index must not be read as one of the new; folded in first, so that a kill here loses nothing.
        if place.exists():
            with suppress(sqlite3.Error), closing(sqlite3.connect(place, timeout=PATIENCE)) as old:
                old.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        for ending in JOURNALS:
            Path(f"{place}{ending}").unlink(missing_ok=True)
        os.replace(self._new, place)
        self._new = None
        self._open()
        return True

    def close(self) -> None:
        """Ends the connection; SQLite then folds its journal into the one file. What was built anew and not finished is deleted."""
        self._base.close()
        if self._new is not None:
            _delete(self._new)
            self._new = None

    def _create(self) -> None:
        self._base.execute("PRAGMA journal_mode = WAL")
        with self.transaction():
            # Another process may have been first.
            if self._pragma("application_id") == OURS:
                return
            for statement in filter(str.strip, SCHEMA.split(";")):
                self._base.execute(statement)
            self._base.execute("INSERT INTO meta VALUES ('format', ?)", (str(FORMAT),))
            self._base.execute(f"PRAGMA application_id = {OURS}")

    def _check(self) -> None:
        if self._pragma("application_id") != OURS:
            raise InvalidArgument(f"{self.file} is a database of something else; give another index")
        held = self.meta.get("format")
        if held != str(FORMAT):
            raise InvalidArgument(
                f"the index {self.file} has the format {held}, this release reads {FORMAT}; give rebuild=True to build it anew"
            )
        for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self._base.execute(f"PRAGMA {setting}")

    def _pragma(self, name: str) -> int:
        return int(self._base.execute(f"PRAGMA {name}").fetchone()[0])

    def _check_replaceable(self) -> None:
        """Refuses what is no index, sound or damaged."""
        if not self.file.exists() or not self.file.stat().st_size:
            return
        try:
            with closing(sqlite3.connect(self.file)) as base:
                base.execute("SELECT count(*) FROM sqlite_master")
                ours = base.execute("PRAGMA application_id").fetchone()[0] == OURS
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise InvalidArgument(f"another process is writing to {self.file}; wait until it is done") from error
            ours = self._was_index()
        if not ours:
            raise InvalidArgument(f"{self.file} is no index, and is not replaced; give another index")

    def _was_index(self) -> bool:
        """Whether a file that SQLite cannot read still has marks of an index: its place in the user's cache, our tables, or SQLite's first bytes and the ending.

        Of most other databases it is known by bytes 68 to 71 that they are no index: the application is 0 there.
        """
        if self.file.absolute().parent.parts[-2:] == HOME:
            return True
        with self.file.open("rb") as file:
            begin = file.read(PAGE)
        named = self.file.suffix == ".sqlite" and begin.startswith(SQLITE)
        return TABLES in begin or (named and any(begin[68:72]))

    def _check_unused(self, file: Path) -> None:
        """Refuses a file that another process is building; one that a killed process left is not held."""
        if not file.exists():
            return
        try:
            with closing(sqlite3.connect(file, timeout=0)) as base:
                base.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise InvalidArgument(
                    f"another process is building the index {self.file} anew; wait until it is done"
                ) from error
        except sqlite3.DatabaseError:
            pass

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What SQLite finds wrong, with the file's name and what to do."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise InvalidArgument(
                    f"another process is writing to the index {self.file}; wait until it is done"
                ) from error
            if "no such" not in str(error):
                raise InvalidArgument(
                    f"the index {self.file} cannot be opened or written: {error}; give another index"
                ) from error
            raise self._damaged(error) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def _damaged(self, why: object) -> InvalidArgument:
        if "not a database" in str(why) and not self._was_index():
            return InvalidArgument(f"{self.file} is no index; give another index")
        return InvalidArgument(f"the index {self.file} is damaged ({why}); give rebuild=True to build it anew")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing."""
        with self._named():
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    @property
    def meta(self) -> dict[str, str]:
        """What is known of the whole: format, model, its digest, dimensions, folder."""
        with self._named():
            return dict(self._base.execute("SELECT key, value FROM meta"))

    def set_meta(self, **values: str) -> None:
        """Notes values of `meta`."""
        with self.transaction():
            self._base.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    @property
    def version(self) -> tuple[int, int]:
        """Another value after every change, by this connection or another."""
        with self._named():
            return self._pragma("data_version"), self._base.total_changes

    def files(self) -> dict[str, FileState]:
        """Every file by its path."""
        with self._named():
            rows = self._base.execute("SELECT path, size, mtime_ns, sha256, state FROM files ORDER BY path")
            return {path: FileState(*state) for path, *state in rows}

    def count(self, what: Literal["files", "passages"] = "passages") -> int:
        """How many passages there are, or files that have some."""
        counted = "passages" if what == "passages" else "files WHERE state = ''"
        with self._named():
            return int(self._base.execute(f"SELECT count(*) FROM {counted}").fetchone()[0])

    def replace(self, path: str, state: FileState, passages: Sequence[Passage], vectors: np.ndarray) -> None:
        """Puts a file and its passages in the place of what was stored of it."""
        with self.transaction():
            self._base.execute("DELETE FROM files WHERE path = ?", (path,))
            file = self._base.execute(
                "INSERT INTO files (path, size, mtime_ns, sha256, state) VALUES (?, ?, ?, ?, ?)", (path, *state)
            ).lastrowid
            rows = (
                (file, place, each.start, each.heading, each.text, np.asarray(vector, "<f4").tobytes())
                for place, (each, vector) in enumerate(zip(passages, vectors, strict=True))
            )
            self._base.executemany(
                "INSERT INTO passages (file, place, start, heading, text, vector) VALUES (?, ?, ?, ?, ?, ?)", rows
            )

    def touch(self, states: Mapping[str, FileState]) -> None:
        """Notes new times of files whose content is as before."""
        with self.transaction():
            self._base.executemany(
                "UPDATE files SET size = ?, mtime_ns = ? WHERE path = ?",
                [(state.size, state.mtime_ns, path) for path, state in states.items()],
            )

    def remove(self, paths: Sequence[str]) -> None:
        """Deletes files with their passages."""
        with self.transaction():
            self._base.executemany("DELETE FROM files WHERE path = ?", [(path,) for path in paths])

    def vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (n,) and vectors (n, dim) of all passages, by path and place."""
        with self._named():
            rows = self._base.execute(
                "SELECT passages.id, vector FROM passages JOIN files ON files.id = file ORDER BY path, place"
            ).fetchall()
        held = self.meta.get("dim", "0")
        if not (held.isascii() and held.isdigit()):
            raise self._damaged(f"its dimension is {held!r:.40}, no whole number")
        dim = int(held)
        if any(len(vector) != 4 * dim for _, vector in rows):
            raise self._damaged(f"a vector has not {dim} numbers")
        matrix = np.frombuffer(bytearray().join(vector for _, vector in rows), "<f4").reshape(len(rows), dim)
        if not np.isfinite(matrix).all():
            raise self._damaged("a vector is not finite")
        return np.fromiter((number for number, _ in rows), np.int64, len(rows)), matrix

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The passages of these numbers, in their order."""
        with self._named():
            marks = ", ".join("?" * len(numbers))
            found = {
                number: Row(*row)
                for number, *row in self._base.execute(
                    f"SELECT passages.id, path, start, heading, text FROM passages JOIN files ON files.id = file "
                    f"WHERE passages.id IN ({marks})",
                    tuple(map(int, numbers)),
                )
            }
        return [found[number] for number in map(int, numbers) if number in found]


def _delete(file: Path) -> None:
    for ending in ("", *JOURNALS):
        Path(f"{file}{ending}").unlink(missing_ok=True)
