"""A corpus as documents, documents as tokens: files, texts, lists of words, arrays of token numbers."""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from heedful._errors import InvalidArgument

# Letters of any alphabet, with an apostrophe inside.
WORDS = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
ENDINGS = (".txt", ".txt.gz")
# Characters of a batch, about; of a token that is no text, six.
BATCH = 2**22


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters, and apostrophes between them.

    >>> words("It's 5 o'clock, Zoë!")
    ["it's", "o'clock", 'zoë']
    """
    return WORDS.findall(text.lower())


def documents(corpus: Any) -> Iterator[Any]:
    """The documents of a corpus: lines of a file or of the files of a folder, or what an iterable holds, files in it read."""
    if isinstance(corpus, str | Path):
        yield from _lines(Path(corpus).expanduser(), corpus)
        return
    if isinstance(corpus, Mapping) or hasattr(corpus, "columns"):
        name = type(corpus).__name__
        raise InvalidArgument(
            f"a corpus is an iterable of documents; got a {name}, which gives its names: "
            + ("give its values()" if isinstance(corpus, Mapping) else "give a column of it, as frame['text']")
        )
    if isinstance(corpus, bytes) or not isinstance(corpus, Iterable):
        raise InvalidArgument(
            f"a corpus is a file, a folder or an iterable of texts, lists of words or arrays of token numbers; got {type(corpus).__name__}"
        )
    for document in corpus:
        if isinstance(document, Path):
            yield from _lines(document, document)
        else:
            yield document


def batches(corpus: Any, sizes: Iterable[int] = ()) -> Iterator[list[Any]]:
    """Documents in batches: first of these sizes, then of about so many characters that their counts fit well into memory."""
    everything = documents(corpus)
    for size in sizes:
        batch = list(islice(everything, size))
        if not batch:
            return
        yield batch
    batch, length = [], 0
    for document in everything:
        flat = not isinstance(document, str) and getattr(document, "ndim", 1) == 0
        if flat or not hasattr(document, "__len__"):
            raise InvalidArgument(
                f"a document is a text, a list of words or an array of token numbers; got {document!r:.100}"
            )
        batch.append(document)
        length += len(document) + 8 if isinstance(document, str) else 6 * len(document) + 8
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _lines(path: Path, given: Any) -> Iterator[str]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS))
        if not files:
            raise InvalidArgument(f"the folder {path} holds no {' or '.join(ENDINGS)}; give files, as Path")
        for file in files:
            yield from _lines(file, file)
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            yield from lines
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise InvalidArgument(f"{path} is no text in UTF-8: {error}") from None
    except OSError as error:
        hint = "; a text itself goes into a list: fit([text])" if isinstance(given, str) else ""
        raise InvalidArgument(f"cannot read {str(given)!r:.100}: {error.strerror}{hint}") from None


def kind_of(document: Any) -> str:
    """`"text"`, `"words"` or `"ids"`: what a document is."""
    if isinstance(document, str):
        return "text"
    if isinstance(document, np.ndarray) or hasattr(document, "detach"):
        kind: str = np.asarray(document).dtype.kind
    else:
        first = next(iter(document), "") if isinstance(document, list | tuple) else None
        kind = "U" if isinstance(first, str) else "i" if isinstance(first, int | np.integer) else "?"
    if kind not in "iuU":
        raise InvalidArgument(
            f"a document is a text, a list of words or an array of token numbers; got {document!r:.100}"
        )
    return "words" if kind == "U" else "ids"


@dataclass(frozen=True)
class NotKept:
    """In place of a tokenizer that is not saved: what it was called."""

    name: str

    def __call__(self, text: str) -> list[str]:
        raise InvalidArgument(
            f"texts were split by a tokenizer that is not kept, {self.name.split('#')[0]}; "
            "from_pretrained(folder, tokenizer=...) takes it, or give lists of words"
        )


def described(tokenizer: Any) -> str:
    """A name by which a tokenizer is known again: `"words"`, or that of a function or class, with a digest of code written in Python."""
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer or "words"
    if isinstance(tokenizer, NotKept):
        return tokenizer.name
    name = str(getattr(tokenizer, "__qualname__", type(tokenizer).__name__))
    code = getattr(tokenizer, "__code__", None)
    return f"{name}#{blake2b(_plain(code).encode(), digest_size=8).hexdigest()}" if isinstance(code, CodeType) else name


def _plain(value: Any) -> str:
    """Code and its constants as text that is the same in each process: no addresses, sets in order."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {_plain(value.co_consts)}"
    if isinstance(value, tuple | frozenset):
        parts = [_plain(part) for part in value]
        return str(parts if isinstance(value, tuple) else sorted(parts))
    return repr(value)


class Tokens:
    """Texts as tokens: words by default, by a function of the user's, or by a tokenizer of Hugging Face, which gives numbers.

    `numbers` says that it gives numbers; `vocabulary` is then a list of its tokens.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self.vocabulary: list[str] | None = None
        self._split: Callable[[list[str]], list[Any]]
        if tokenizer is None or (isinstance(tokenizer, str) and tokenizer == "words"):
            self._split = partial(_each, words)
        elif hasattr(tokenizer, "convert_ids_to_tokens"):
            self.vocabulary = _distinct(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
            self._split = partial(_hugging_face, tokenizer)
        elif hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "id_to_token"):
            self.vocabulary = _distinct([tokenizer.id_to_token(place) for place in range(tokenizer.get_vocab_size())])
            self._split = partial(_fast, tokenizer)
        elif callable(tokenizer):
            self._split = partial(_each, tokenizer)
        else:
            raise InvalidArgument(
                f"tokenizer must be 'words', a function from a text to a list of words, or a tokenizer of Hugging Face; got {tokenizer!r:.100}"
            )

    @property
    def numbers(self) -> bool:
        return self.vocabulary is not None

    def __call__(self, batch: list[Any]) -> list[Any]:
        """Tokens of each document, lists of words or arrays of numbers."""
        texts = [document for document in batch if isinstance(document, str)]
        if len(texts) == len(batch):
            return self._split(texts)
        split = iter(self._split(texts)) if texts else iter(())
        return [next(split) if isinstance(document, str) else document for document in batch]


def _distinct(names: list[Any]) -> list[str]:
    """Names of tokens, each once; a number that has none, or one that is taken, is called by itself."""
    taken: dict[str, int] = {}
    for place, name in enumerate(names):
        taken.setdefault(name if isinstance(name, str) else f"<{place}>", place)
    places = {place: name for name, place in taken.items()}
    return [places.get(place, f"<{place}>") for place in range(len(names))]


@dataclass
class Shard:
    """Documents as one array of numbers: places in `words`, or token numbers themselves where there are no words."""

    ids: np.ndarray
    lengths: np.ndarray
    words: list[str] | None


def shard_of(batch: list[Any], tokens: Tokens) -> Shard:
    """The tokens of a batch of documents, which are all words or all numbers."""
    split = tokens(batch)
    numbers = [kind_of(document) == "ids" for document in split]
    lengths = np.array([len(document) for document in split], dtype=np.int64)
    if not any(numbers):
        places: defaultdict[str, int] = defaultdict()
        places.default_factory = places.__len__
        try:
            ids = np.fromiter(map(places.__getitem__, chain.from_iterable(split)), np.int64, int(lengths.sum()))
        except TypeError:  # something in a document has no hash
            check_words(chain.from_iterable(split))
            raise
        check_words(places)
        return Shard(ids, lengths, list(places))
    if not all(number or not length for number, length in zip(numbers, lengths, strict=True)):
        raise InvalidArgument("some documents are words and others token numbers; give all of one kind")
    return Shard(np.concatenate([numbers_of(document) for document in split]), lengths, None)


def check_words(words: Iterable[Any]) -> None:
    """Refuses what is no string among words."""
    for word in words:
        if not isinstance(word, str):
            raise InvalidArgument(f"a document is a list of words, each a string; got {word!r:.60} among them")


def numbers_of(document: Any) -> np.ndarray:
    """A document of token numbers as an array."""
    try:
        numbers = np.asarray(document)
    except ValueError:  # lists of several lengths
        numbers = np.zeros((0, 0))
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"a document of token numbers is one list or array `(n,)` of whole numbers; got {document!r:.100}"
        )
    return numbers.astype(np.int64)


def _each(function: Callable[[str], Any], texts: list[str]) -> list[Any]:
    return [function(text) for text in texts]


def _hugging_face(tokenizer: Any, texts: list[str]) -> list[Any]:
    return [np.asarray(ids, dtype=np.int64) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _fast(tokenizer: Any, texts: list[str]) -> list[Any]:
    return [np.asarray(one.ids, dtype=np.int64) for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
