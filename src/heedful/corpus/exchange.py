"""Word vectors and counts in the files of other programs: word2vec's and GloVe's text, GloVe's records, gensim's objects."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from heedful._checks import check_whole
from heedful._errors import InvalidArgument, MissingExtra
from heedful._files import check_place, new_file
from heedful.corpus._pairs import sparse
from heedful.corpus.associations import counted

__all__ = ["read_glove_counts", "write_glove_counts"]

# As the C programs have it: numbers of the two words from 1 on, and what was counted.
RECORD = np.dtype([("first", "<i4"), ("second", "<i4"), ("value", "<f8")])
# Records that are converted at once.
BLOCK = 2**20


def write_glove_counts(counts: Any, file: str | Path) -> Path:
    """Writes counts `(V, V)` as the records that GloVe's `shuffle` and `glove` read: int32, int32, float64, words from 1 on.

    What `cooccur` writes is symmetric: give `Cooccurrence.counts(directed=False)`, and beside it the words with their counts, a
    line each, as `vocab_count` does.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     read_glove_counts(write_glove_counts([[0.0, 1.5], [1.5, 0.0]], Path(folder) / "cooccurrence.bin")).toarray()
    array([[0. , 1.5],
           [1.5, 0. ]])
    """
    matrix = counted(counts)
    if max(matrix.shape) >= 2**31:
        raise InvalidArgument(f"GloVe's records number words in 31 bits; got {max(matrix.shape)} words")
    place = check_place(Path(file).expanduser())
    matrix.sort_indices()
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    with new_file(place) as part, part.open("wb") as out:
        for start in range(0, matrix.nnz, BLOCK):
            held = slice(start, start + BLOCK)
            records = np.empty(len(rows[held]), RECORD)
            records["first"], records["second"] = rows[held] + 1, matrix.indices[held] + 1
            records["value"] = matrix.data[held]
            out.write(records.tobytes())
    return place


def read_glove_counts(file: str | Path, size: int | None = None) -> Any:
    """Reads what GloVe's `cooccur` wrote: a sparse matrix `(V, V)`; V is `size`, or the largest number there."""
    check_whole(optional=True, size=size)
    path = Path(file).expanduser()
    try:
        length = path.stat().st_size
        if length % RECORD.itemsize:
            raise InvalidArgument(
                f"{path} has {length} bytes, no multiple of the {RECORD.itemsize} of a record of GloVe"
            )
        records = np.fromfile(path, RECORD)
    except OSError as error:
        raise InvalidArgument(f"cannot read {str(file)!r:.100}: {error.strerror}; give another file") from None
    places = np.stack([records["first"], records["second"]]).astype(np.int64) - 1
    largest = int(places.max(initial=-1)) + 1
    if places.min(initial=0) < 0 or (size is not None and largest > size):
        raise InvalidArgument(f"numbers of words must be from 1 to {size or 'V'}; got up to {largest} in {path}")
    return counted(sparse().coo_array((records["value"], tuple(places)), shape=(size or largest,) * 2))


def write_text(words: list[str], vectors: np.ndarray, file: str | Path, header: bool) -> Path:
    """A line for each word, its name and its numbers; the header says how many words and numbers there are."""
    place = check_place(Path(file).expanduser())
    for word in words:
        if not word or any(sign.isspace() for sign in word):
            raise InvalidArgument(f"the format has spaces between words and numbers; {word!r:.100} cannot be written")
    with new_file(place) as part, part.open("w", encoding="utf-8") as out:
        if header:
            out.write(f"{len(words)} {vectors.shape[1]}\n")
        for word, vector in zip(words, vectors, strict=True):
            # repr of a float is the shortest text that gives it back.
            out.write(f"{word} {' '.join(map(repr, vector.tolist()))}\n")
    return place


def read_text(file: str | Path) -> tuple[list[str], np.ndarray]:
    """Words and vectors of a text file of word2vec's, with a header, or of GloVe's, without."""
    path = Path(file).expanduser()
    try:
        with path.open(encoding="utf-8") as lines:
            return _parsed(path, lines)
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is no text in UTF-8; is it the binary format? gensim reads that") from None
    except OSError as error:
        raise InvalidArgument(f"cannot read {str(file)!r:.100}: {error.strerror}; give another file") from None


def _parsed(path: Path, lines: Iterator[str]) -> tuple[list[str], np.ndarray]:
    first = next(lines, "").split()
    header = [int(part) for part in first] if len(first) == 2 and all(part.isdigit() for part in first) else None
    words, rows = [], []
    rest = lines if header is not None or not first else chain([" ".join(first)], lines)
    for number, line in enumerate(rest, 1 + (header is not None)):
        word, *numbers = line.rstrip("\n").rstrip(" ").split(" ")
        try:
            rows.append(np.array(numbers, dtype=np.float64))
        except ValueError:
            raise InvalidArgument(f"line {number} of {path} must be a word and numbers; got {line!r:.60}") from None
        if not numbers or len(rows[-1]) != len(rows[0]):
            raise InvalidArgument(
                f"line {number} of {path} has {len(numbers)} numbers; {len(rows[0]) or 'some'} are expected"
            )
        words.append(word)
    if not words or (header is not None and header != [len(words), len(rows[0])]):
        says = f"its first line says {header[0]} words of {header[1]} numbers, and it" if header else "it"
        raise InvalidArgument(f"{path} was cut or is no file of vectors: {says} has {len(words)} words")
    return words, np.stack(rows)


def to_gensim(words: list[str], vectors: np.ndarray, counts: np.ndarray) -> Any:
    """gensim's KeyedVectors, in float32."""
    try:
        from gensim.models import KeyedVectors
    except ImportError:
        raise MissingExtra("gensim", "gensim") from None
    keyed = KeyedVectors(vectors.shape[1])
    keyed.add_vectors(words, vectors.astype(np.float32))
    for word, count in zip(words, counts.tolist(), strict=True):
        keyed.set_vecattr(word, "count", count)
    return keyed


def from_gensim(keyed: Any) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Words, vectors and counts of gensim's KeyedVectors, or of a model that has some."""
    keyed = getattr(keyed, "wv", keyed)
    if not hasattr(keyed, "index_to_key") or not hasattr(keyed, "vectors"):
        raise InvalidArgument(f"KeyedVectors of gensim are expected; got {type(keyed).__name__}")
    words = list(keyed.index_to_key)
    counts = [keyed.get_vecattr(word, "count") if "count" in keyed.expandos else 0 for word in words]
    return words, np.asarray(keyed.vectors, dtype=np.float64), np.array(counts, dtype=np.int64)
