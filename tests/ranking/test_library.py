"""A library: found what brute force finds, updated where files changed, whole after a kill, damaged indexes named."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bag_of_words import Words
from heedful import HeedfulError, InvalidArgument
from heedful.ranking import METHODS, rerank
from heedful.ranking.library import AUTO, CHUNK, Library, index_path
from heedful.ranking.passages import read_passages

TOPICS = {
    "sea": "tide moon salt wave shore ship sail harbour",
    "land": "hill stone valley field plough barn fence path",
    "sky": "cloud wind star comet orbit light dawn dusk",
}


def fill(folder, seed=0, count=7):
    """Documents of few words, several for each topic."""
    draw = np.random.default_rng(seed)
    for topic, words in TOPICS.items():
        for number in range(count):
            text = " ".join(draw.choice(words.split(), 11))
            (folder / topic).mkdir(exist_ok=True)
            (folder / topic / f"{number}.md").write_text(f"# {topic} {number}\n\nabout {text} {number}.\n")
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "docs").mkdir()
    return fill(tmp_path / "docs")


@pytest.fixture
def library(folder, tmp_path):
    with Library(tmp_path / "docs.sqlite", Words()) as library:
        library.update(folder)
        yield library


def contents(file):
    """Every passage of an index with its file, read by SQLite alone."""
    base = sqlite3.connect(file)
    rows = base.execute("SELECT path, place, text, vector FROM passages JOIN files ON files.id = file").fetchall()
    assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    base.close()
    return sorted(rows)


def test_the_first_list_is_brute_force(library, folder):
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    texts = [str(read_passages(folder / path)[0]) for path in paths]
    words = Words()
    for query in ("tide and moon", "stone", "wind of dawn"):
        cosines = words.encode(texts).astype(np.float64) @ words.encode([query])[0]
        order = np.argsort(-cosines, kind="stable")
        answer = library.search(query, top=5, method="cosine")
        assert [hit.file for hit in answer.hits] == [paths[at] for at in order[:5]]
        np.testing.assert_allclose([hit.cosine for hit in answer.hits], cosines[order[:5]], atol=1e-6)
        assert [(hit.place, hit.first_place) for hit in answer.hits] == [(at, at) for at in range(1, 6)]
        assert (answer.passages, answer.ranked) == (len(paths), len(paths))


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_the_new_order_is_that_of_the_method_on_the_first_list(library, method):
    first = library.search("tide and moon", top=13, first=13, method="cosine")
    answer = library.search("tide and moon", top=13, first=13, method=method)
    words = Words()
    database = words.encode([f"{hit.heading}\n{hit.text}" for hit in first.hits])
    name, options = AUTO if method == "auto" else (method, {})
    wanted = rerank(words.encode(["tide and moon"]), database, name, normalize=False, device="cpu", **options)
    assert answer.method == name
    assert [hit.first_place - 1 for hit in answer.hits] == wanted.order[0].tolist()
    np.testing.assert_allclose([hit.score for hit in answer.hits], wanted.scores[0], atol=1e-6)


def test_options_are_the_methods(library):
    plain = library.search("tide and moon", method="k-reciprocal", weight=1.0)
    assert [hit.first_place for hit in plain.hits] == [hit.place for hit in plain.hits]
    with pytest.raises(TypeError, match="wieght"):
        library.search("tide and moon", wieght=1.0)


def test_neighbours_are_the_most_similar_of_the_best(library):
    answer = library.search("tide and moon", top=3)
    more = library.search("tide and moon", top=10)
    vectors = Words().encode([f"{hit.heading}\n{hit.text}" for hit in more.hits])
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -1)
    for at, hit in enumerate(answer.hits):
        wanted = np.argsort(-similar[at], kind="stable")[:3]
        assert [each.place - 1 for each in hit.neighbours] == wanted.tolist()
        assert [each.file for each in hit.neighbours] == [more.hits[other].file for other in wanted]
        np.testing.assert_allclose([each.similarity for each in hit.neighbours], similar[at][wanted], atol=1e-6)


def test_a_list_of_one_and_a_reranker_of_ones_own(library, tmp_path):
    class Backwards:
        def rerank(self, queries, database):
            order = np.arange(len(database))[::-1][None, :-2]
            return type("Ranking", (), {"order": order, "scores": -order.astype(float)})

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("alone")
    with Library(tmp_path / "one.sqlite", Words()) as one:
        one.update(tmp_path / "one")
        (hit,) = one.search("alone").hits
        assert (hit.file, hit.start, hit.heading, hit.neighbours) == ("a.txt", 1, "", ())
    answer = library.search("tide", top=7, first=7, reranker=Backwards())
    # The two that it left out come behind, in their first order.
    assert [hit.first_place for hit in answer.hits] == [7, 6, 5, 4, 3, 1, 2]
    assert [hit.score is None for hit in answer.hits] == [False] * 5 + [True] * 2
    assert answer.method == "Backwards"


def test_equal_passages_count_once(library, folder):
    for name in ("copy", "copy2"):
        (folder / f"{name}.md").write_text("# other heading\n\n" + "tide moon tide moon tide.\n")
    (folder / "aaa.md").write_text("# a heading\n\ntide moon tide moon tide.\n")
    library.update(folder)
    answer = library.search("tide moon", top=30, method="cosine")
    (hit,) = (hit for hit in answer.hits if hit.copies)
    assert {hit.file, *hit.copies} == {"aaa.md", "copy.md", "copy2.md"}
    assert len({hit.text for hit in answer.hits}) == len(answer) == 22


def test_an_update_reads_what_changed(library, folder):
    words = library.sentences
    before = contents(library.file)
    words.read.clear()
    same = library.update(folder)
    assert (same.added, same.changed, same.removed, same.unchanged, words.read) == ((), (), (), 21, [])
    assert str(same) == "21 documents, 21 passages: nothing changed"
    # A new time alone is no change, and is noted.
    os.utime(folder / "sea" / "0.md", ns=(7, 7))
    assert library.update(folder).unchanged == 21
    assert words.read == []
    assert contents(library.file) == before
    (folder / "sea" / "0.md").write_text("# sea 0\n\nabout the zeppelin.\n")
    (folder / "sea" / "1.md").unlink()
    (folder / "new.rst").write_text("orbit")
    (folder / ".hidden.md").write_text("orbit")
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "a.md").write_text("orbit")
    update = library.update(folder)
    assert (update.added, update.changed, update.removed) == (("new.rst",), ("sea/0.md",), ("sea/1.md",))
    assert (update.unchanged, update.documents, update.passages) == (19, 21, 21)
    assert words.read == ["orbit", "sea 0\nabout the zeppelin."]
    assert library.search("sea 0 about the zeppelin", top=1, method="cosine").hits[0].file == "sea/0.md"


def test_another_connection_sees_the_update(library, folder):
    library.search("tide")
    with Library(library.file, Words()) as other:
        (folder / "new.md").write_text("zebra zebra zebra")
        other.update(folder)
    assert library.search("zebra", top=1, method="cosine").hits[0].file == "new.md"


def test_what_cannot_be_read_is_skipped_with_its_reason(library, folder, monkeypatch):
    (folder / "a.txt").write_bytes(b"\0")
    (folder / "b.txt").write_text(" ")
    (folder / "c.pdf").write_text("x")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    for _ in range(2):
        update = library.update(folder)
        assert list(update.skipped) == ["a.txt", "b.txt", "c.pdf"]
        assert update.skipped["a.txt"] == "a.txt is no text: it holds zero bytes"
        assert "heedful[pdf]" in update.skipped["c.pdf"]
        assert (update.unchanged, update.documents) == (21, 21)
        assert "3 skipped\nskipped a.txt: a.txt is no text" in str(update)
    (folder / "a.txt").write_text("whale")
    assert library.update(folder).changed == ("a.txt",)
    assert library.update(folder).documents == 22
    assert library.search("whale", top=1, method="cosine").hits[0].file == "a.txt"


def test_what_cannot_be_opened_keeps_what_was_stored(library, folder, monkeypatch):
    before = contents(library.file)
    read = Path.read_bytes

    def refused(path):
        if path.name == "0.md":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    os.utime(folder / "sea" / "0.md", ns=(7, 7))
    assert library.update(folder).skipped == {"sea/0.md": "Permission denied"}
    walk = os.walk

    def closed(top, onerror):
        onerror(PermissionError(13, "Permission denied", f"{top}/land"))
        return ((place, folders, files) for place, folders, files in walk(top) if not place.endswith("land"))

    monkeypatch.setattr(os, "walk", closed)
    update = library.update(folder)
    assert update.skipped["land/"] == "Permission denied"
    assert update.removed == ()
    assert contents(library.file) == before


def test_senseless_questions_and_folders_are_named(library, folder, tmp_path):
    for given, message in (
        ({"query": " "}, "the text is empty"),
        ({"query": "a", "top": 0}, "top must be a whole number from 1 on"),
        ({"query": "a", "method": "magic"}, "method must be one of auto, cosine"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            library.search(**given)
    with pytest.raises(InvalidArgument, match="there is no folder"):
        library.update(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=r"holds no documents; they end in \.markdown"):
        library.update(tmp_path / "empty")
    fill(tmp_path / "empty")
    with pytest.raises(InvalidArgument, match=r"is of the folder .*docs, not of .*empty; give another index"):
        library.update(tmp_path / "empty")
    with Library(tmp_path / "none.sqlite", Words()) as none, pytest.raises(InvalidArgument, match="holds no passages"):
        none.search("a")
    # A folder that was moved is the same one.
    folder.rename(tmp_path / "moved")
    assert library.update(tmp_path / "moved").unchanged == 21


def test_another_model_is_named(library, tmp_path):
    with pytest.raises(InvalidArgument, match=r"was built with bag of 61 .*, not with bag of 31 .*rebuild=True"):
        Library(library.file, Words(31))
    library.close()
    with Library(library.file, Words(31), rebuild=True) as again:
        assert len(again) == 0


def spoil_header(file):
    content = file.read_bytes()
    file.write_bytes(b"garbage " * 12 + content[96:])


def spoil_pages(file):
    content = bytearray(file.read_bytes())
    content[4096 : len(content) - 4096] = b"\xa5" * (len(content) - 8192)
    file.write_bytes(bytes(content))


def cut_off(file):
    file.write_bytes(file.read_bytes()[: 4096 * 2])


def shorten_a_vector(file):
    with sqlite3.connect(file) as base:
        base.execute("UPDATE passages SET vector = x'00' WHERE id = 3")
    base.close()


def spoil_the_dimension(file):
    with sqlite3.connect(file) as base:
        base.execute("UPDATE meta SET value = 'many' WHERE key = 'dim'")
    base.close()


def drop_a_table(file):
    with sqlite3.connect(file) as base:
        base.execute("DROP TABLE passages")
    base.close()


@pytest.mark.parametrize(
    "spoil", [spoil_header, spoil_pages, cut_off, shorten_a_vector, spoil_the_dimension, drop_a_table]
)
def test_a_damaged_index_is_named_and_rebuilt(library, folder, spoil):
    library.close()
    spoil(library.file)

    def use():
        with Library(library.file, Words()) as damaged:
            damaged.update(folder)
            damaged.search("tide")

    with pytest.raises(InvalidArgument, match=r"the index .*docs\.sqlite is damaged \(.*\); give rebuild=True"):
        use()
    with Library(library.file, Words(), rebuild=True) as again:
        assert len(again.update(folder).added) == 21
    assert len(contents(library.file)) == 21


class Interrupted(Words):
    """Stops when it is asked for the vectors of the second batch."""

    calls = 0

    def encode(self, *arguments, **options):
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt
        return super().encode(*arguments, **options)


def test_a_rebuild_leaves_the_old_index_until_it_is_done(library, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("heedful.ranking.library.CHUNK", 5)
    before = contents(library.file)
    (tmp_path / "empty").mkdir()
    for wrong in ("empty", "nowhere"):
        with Library(library.file, Words(), rebuild=True) as again, pytest.raises(InvalidArgument):
            again.update(tmp_path / wrong)
        assert contents(library.file) == before
    with Library(library.file, Interrupted(), rebuild=True) as again, pytest.raises(KeyboardInterrupt):
        again.update(folder)
    assert contents(library.file) == before
    library.close()
    assert [path.name for path in tmp_path.glob("docs.sqlite*")] == ["docs.sqlite"]
    # What a kill leaves beside it is passed by.
    Path(f"{library.file}.new").write_bytes(library.file.read_bytes()[:9000])
    fill(folder, seed=1)
    with Library(library.file, Words(), rebuild=True) as again:
        assert len(again.update(folder).added) == len(again) == 21
        assert again.search("tide").passages == 21
        assert again.update(folder).unchanged == 21
    assert [path.name for path in tmp_path.glob("docs.sqlite*")] == ["docs.sqlite"]
    assert contents(library.file) != before


def test_one_rebuild_at_a_time(library):
    with (
        Library(library.file, Words(), rebuild=True),
        pytest.raises(InvalidArgument, match="another process is building the index"),
    ):
        Library(library.file, Words(), rebuild=True)


def test_an_index_in_the_cache_is_rebuilt_though_nothing_of_it_is_left(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = index_path(folder, Words())
    file.parent.mkdir(parents=True)
    with Library(file, Words()) as library:
        library.update(folder)
    file.write_bytes(b"garbage" * 999)
    with pytest.raises(HeedfulError, match=file.stem):
        Library(file, Words())
    with Library(file, Words(), rebuild=True) as again:
        again.update(folder)
    assert len(contents(file)) == 21


def test_a_rebuild_takes_the_place_of_an_index_in_use(library, folder):
    """The journal of the old index is not read as one of the new."""
    fill(folder, seed=1)
    library.update(folder)
    fill(folder, seed=2)
    with Library(library.file, Words(), rebuild=True) as again:
        again.update(folder)
    now = {read_passages(file)[0].text for file in folder.rglob("*.md")}
    assert {text for _, _, text, _ in contents(library.file)} == now


def test_what_is_no_index_is_left_alone(tmp_path):
    note, other = tmp_path / "note.txt", tmp_path / "other.sqlite"
    note.write_text("mine")
    (tmp_path / "mine.sqlite").write_text("important")
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE mine (a)")
    base.close()
    spoilt = tmp_path / "spoilt.sqlite"
    spoilt.write_bytes(other.read_bytes()[:100] + b"\xa5" * 5000)
    for file in (note, other, spoilt, tmp_path / "mine.sqlite"):
        content = file.read_bytes()
        for rebuild in (False, True):
            with pytest.raises(InvalidArgument):
                Library(file, Words(), rebuild=rebuild)
            assert file.read_bytes() == content
    with pytest.raises(InvalidArgument, match=r"other\.sqlite is a database of something else"):
        Library(other, Words())
    with pytest.raises(InvalidArgument, match=r"note\.txt is no index; give another"):
        Library(note, Words())


def test_a_later_format_is_named(library):
    library.close()
    with sqlite3.connect(library.file) as base:
        base.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    base.close()
    with pytest.raises(InvalidArgument, match="has the format 99, this release reads 1; give rebuild=True"):
        Library(library.file, Words())


def test_the_place_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = index_path(tmp_path / "my docs", Words())
    assert place.parent == tmp_path / "heedful" / "indexes"
    assert place.name.startswith("my docs-")
    assert place != index_path(tmp_path / "my docs", Words(31)) != index_path(tmp_path / "others", Words())


# Replaces what each document says and is killed: between writes, or in the middle of the transaction of one.
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from bag_of_words import Words
from heedful.ranking import library, _store
folder, file, when, count = *sys.argv[2:5], int(sys.argv[5])
library.CHUNK = 1
replace, insert = _store.Store.replace, _store.Passage
seen = []
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def rows(passages):
    yield from passages[:1]
    die()
def counted(self, path, state, passages, vectors):
    seen.append(path)
    if len(seen) == count and when == "inside":
        class Dying(list):
            def __iter__(self):
                return rows(passages)
        passages = Dying(passages)
    replace(self, path, state, passages, vectors)
    if len(seen) == count and when == "between":
        die()
_store.Store.replace = counted
library.Library(file, Words()).update(folder)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.parametrize(("when", "count"), [("between", 5), ("inside", 1), ("inside", 11)])
def test_a_kill_loses_nothing_that_was_there(library, folder, when, count):
    assert CHUNK > 1
    before = {path: text for path, _, text, _ in contents(library.file)}
    library.close()
    fill(folder, seed=1)
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[1]), folder, library.file, when, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    # Every document is as it was or as it is now.
    after = {path: text for path, _, text, _ in contents(library.file)}
    now = {path: read_passages(folder / path)[0].text for path in before}
    new = [path for path in before if after[path] != before[path]]
    assert len(new) == (count if when == "between" else count - 1)
    assert all(after[path] == now[path] for path in new)
    with Library(library.file, Words()) as again:
        update = again.update(folder)
        assert (len(update.changed), update.unchanged, update.added) == (21 - len(new), len(new), ())
    whole = contents(library.file)
    assert {path: text for path, _, text, _ in whole} == now
    assert len(whole) == len(now)
    assert [path.name for path in library.file.parent.glob("docs.sqlite*")] == ["docs.sqlite"]


def test_searching_needs_no_scikit_learn():
    code = "import heedful.ranking.library, heedful.ranking.methods, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "heedful.ranking.reciprocal" in loaded
    assert not loaded & {"sklearn", "pandas", "transformers", "pytorch_lightning", "matplotlib"}
