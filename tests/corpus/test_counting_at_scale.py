"""Counts under a limit of memory, after a kill, by several processes and on a cluster: the same bits as one process gives."""

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from heedful import CorruptModel, InvalidArgument
from heedful.corpus import Cooccurrence, Vocabulary, _work

KINDS = 211


def drawn(number, seed=0):
    """Lines of words by Zipf's law."""
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{word % KINDS:03d}" for word in draw.zipf(1.4, draw.integers(3, 31))) for _ in range(number)]


def assert_same(one, other):
    assert one.vocabulary_ == other.vocabulary_
    assert (one.word_counts_ == other.word_counts_).all()
    assert (one.tokens_, one.documents_) == (other.tokens_, other.documents_)
    first, second = one.counts(), other.counts()
    assert first.nnz > 1000
    assert (first.indptr == second.indptr).all()
    assert (first.indices == second.indices).all()
    assert (first.data == second.data).all()


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr("heedful.corpus._documents.BATCH", 2**12)
    monkeypatch.setattr("heedful.corpus._work.GROUP", 2**10)
    monkeypatch.setattr("heedful.corpus._work.EVERY", 2**11)
    monkeypatch.setattr("heedful.corpus._store.BLOCK", 2**9)


@pytest.mark.parametrize("per_distance", [False, True])
@pytest.mark.parametrize("settled", [False, True])
def test_what_does_not_fit_goes_to_disk(small_parts, per_distance, settled, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    lines = drawn(401)
    words = Cooccurrence(5, min_count=3, tokenizer=str.split, progress=False).fit(lines).vocabulary_
    options = {"vocabulary": Vocabulary(words.words)} if settled else {"min_count": 3}
    options |= {"window": 5, "tokenizer": str.split, "per_distance": per_distance, "progress": False}
    whole = Cooccurrence(**options).fit(lines)
    assert whole._store is None
    spilled = Cooccurrence(**options, max_memory="20KB").fit(lines)
    assert len(spilled._store.sums) > 3
    assert_same(spilled, whole)
    spilled.partial_fit(lines)
    assert_same(spilled, Cooccurrence(**options).fit(lines + lines))
    # Nothing is left behind.
    folder = spilled._store.folder
    assert folder.exists()
    del spilled
    gc.collect()
    assert not folder.exists()


def counting(pipe, folder, lines, options, slow):
    """What is killed: a count whose reading or counting takes its time."""
    count = _work.Work.count

    def slowly(self, *arguments):
        time.sleep(0.02 if slow == "counting" else 0)
        return count(self, *arguments)

    def split(text):
        time.sleep(0.0005 if slow == "reading" else 0)
        return text.split()

    _work.Work.count = slowly
    counter = Cooccurrence(5, **options, tokenizer=split, folder=folder, progress=False)
    pipe.send("ready")
    counter.fit(lines)
    counter.save_pretrained(folder.with_name("result"))


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process, which starts in no time; runs on Linux")
@pytest.mark.parametrize(("settled", "slow"), [(False, "reading"), (False, "counting"), (True, "counting")])
def test_a_killed_count_goes_on(small_parts, settled, slow, tmp_path):
    """Killed again and again, each time a little later, until it gets through; the journal grows and the result is the same."""
    lines = drawn(1601, 1)
    folder = tmp_path / "count"
    options = {"vocabulary": Vocabulary(f"w{i:03d}" for i in range(7, 211))} if settled else {"min_count": 3}
    fork, known = multiprocessing.get_context("fork"), 0
    files = "part-*-ids.npy" if slow == "reading" else "sums-*-0-data.npy"
    for patience in (2, 1, 3, None):
        here, there = fork.Pipe()
        process = fork.Process(
            target=counting, args=(there, folder, lines, options, "no" if patience is None else slow)
        )
        process.start()
        assert here.recv() == "ready"
        if patience is not None:
            # It has got so much farther than the one before it.
            while process.is_alive() and len(list(folder.glob(files))) < known + patience:
                time.sleep(0.001)
            process.kill()
        process.join(60)
        assert process.exitcode == (0 if patience is None else -signal.SIGKILL)
        known = len(list(folder.glob(files)))
    whole = Cooccurrence(5, **options, tokenizer=str.split, progress=False).fit(lines)
    assert_same(Cooccurrence.from_pretrained(tmp_path / "result"), whole)


def test_a_folder_knows_its_corpus(small_parts, tmp_path):
    lines = drawn(301, 2)
    options = {"min_count": 2, "window": 3, "progress": False, "folder": tmp_path / "count"}
    first = Cooccurrence(**options).partial_fit(lines[:151]).partial_fit(lines[151:])
    counts = first.counts()
    # The same calls again read what is there.
    second = Cooccurrence(**options, tokenizer=None)
    second.partial_fit(lines[:151])
    with pytest.raises(InvalidArgument, match="holds a count of 150 more documents than were given"):
        second.counts()
    assert (second.partial_fit(lines[151:]).counts() != counts).nnz == 0
    with second._store.at_work(), pytest.raises(InvalidArgument, match="another counter is at work"):
        Cooccurrence(**options).fit(lines)
    second.partial_fit(["w001 w002 w001"])
    plain = Cooccurrence(3, min_count=2, progress=False).fit([*lines, "w001 w002 w001"])
    assert (second.counts() != plain.counts()).nnz == 0
    with pytest.raises(InvalidArgument, match="holds a count of other documents: part 1 of"):
        Cooccurrence(**options).fit(lines[1:])
    with pytest.raises(InvalidArgument, match="holds a count with another window: 3 instead of 4"):
        Cooccurrence(**options | {"window": 4}).fit(lines)
    with pytest.raises(InvalidArgument, match="merge into a counter without one"):
        second.merge(plain)
    (tmp_path / "count" / "journal.json").write_text("{")
    with pytest.raises(CorruptModel, match=r"journal\.json cannot be read"):
        Cooccurrence(**options).fit(lines)
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other" / "mine.npy", np.zeros(3))
    with pytest.raises(InvalidArgument, match="holds other files"):
        Cooccurrence(**options | {"folder": tmp_path / "other"}).fit(lines)
    with pytest.raises(InvalidArgument, match="max_memory must be bytes or a text such as"):
        Cooccurrence(max_memory="much")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settled", [False, True])
def test_a_finished_counter_leaves_its_folder_to_others(small_parts, settled, tmp_path):
    lines = drawn(151, 5)
    plain = Cooccurrence(3, tokenizer=str.split, progress=False).fit(lines)
    options = {"vocabulary": Vocabulary(plain.vocabulary_.words)} if settled else {}
    options |= {"window": 3, "tokenizer": str.split, "progress": False, "folder": tmp_path / "count"}
    first = Cooccurrence(**options).fit(lines)
    second = Cooccurrence(**options).fit(lines)
    assert_same(first, plain)
    assert_same(second, plain)
    first.partial_fit(lines[:7])
    assert_same(first, Cooccurrence(**options | {"folder": None}).fit(lines + lines[:7]))
    with pytest.raises(InvalidArgument, match=r"another counter has changed .* meanwhile; fit the whole corpus again"):
        second.partial_fit(lines)
    assert_same(second.fit(lines + lines[:7]), first)
    del first, second
    gc.collect()


def test_a_damaged_folder(tmp_path):
    lines = ["the sea is wide", "the sand is warm"]
    options = {"folder": tmp_path / "count", "progress": False}
    Cooccurrence(**options).fit(lines)
    words, ids = (tmp_path / "count" / f"part-000000-{name}" for name in ("words.json", "ids.npy"))
    whole = {file: file.read_bytes() for file in (words, ids)}
    np.save(tmp_path / "ids.npy", np.load(ids) + 3)
    np.save(tmp_path / "short.npy", np.load(ids)[1:])
    for file, content in (
        (words, whole[words][:9]),
        (words, None),
        (words, b"3"),
        (words, b"[]"),
        (ids, (tmp_path / "ids.npy").read_bytes()),
        (ids, (tmp_path / "short.npy").read_bytes()),
        (ids, b""),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(CorruptModel, match=r"the folder .*count is damaged: .*; delete it and count again"):
            Cooccurrence(**options).fit(lines)
        file.write_bytes(whole[file])
    assert Cooccurrence(**options).fit(lines).tokens_ == 8


def test_arrays_of_words_in_a_folder(tmp_path):
    counter = Cooccurrence(folder=tmp_path, progress=False).fit([np.array(["sea", "sand"]), np.array(["sea"])])
    assert counter.vocabulary_.words == ["sea", "sand"]


def test_a_folder_knows_its_tokenizer_by_its_code(tmp_path):
    lines, options = ["The sea is wide", "the sand is warm"], {"folder": tmp_path, "progress": False}
    Cooccurrence(**options, tokenizer=lambda text: text.split()).fit(lines)
    # The same code, made again.
    Cooccurrence(**options, tokenizer=lambda text: text.split()).fit(lines)
    for other in (lambda text: text.rsplit(), lambda text: text.split("i"), str.split):
        with pytest.raises(InvalidArgument, match="holds a count with another tokenizer"):
            Cooccurrence(**options, tokenizer=other).fit(lines)
    # As written by the first release.
    journal = tmp_path / "journal.json"
    held = json.loads(journal.read_text())
    held["settings"]["tokenizer"] = held["settings"]["tokenizer"].split("#")[0]
    journal.write_text(json.dumps(held))
    Cooccurrence(**options, tokenizer=lambda text: text.split()).fit(lines)


def test_token_numbers_in_a_folder(small_parts, tmp_path):
    draw = np.random.default_rng(3)
    documents = [draw.integers(0, 97, draw.integers(0, 41)) for _ in range(101)]
    whole = Cooccurrence(5, progress=False).fit(documents)
    for vocabulary in (None, len(whole.vocabulary_)):
        folder = tmp_path / str(vocabulary)
        for _ in range(2):
            counter = Cooccurrence(5, vocabulary=vocabulary, folder=folder, progress=False).fit(documents)
            assert_same(counter, whole)


@pytest.mark.parametrize("settled", [False, True])
def test_two_processes_count_as_one(small_parts, settled):
    lines = drawn(301, 4)
    options = {"vocabulary": Vocabulary(f"w{i:03d}" for i in range(100))} if settled else {"min_count": 3}
    options |= {"window": 5, "tokenizer": str.split, "progress": False}
    assert_same(Cooccurrence(**options, n_jobs=2).fit(lines), Cooccurrence(**options).fit(lines))


@pytest.mark.parametrize("parts", [(60, 30, 20, 15, 12), None])
def test_numba_counts_as_numpy(parts):
    pytest.importorskip("numba", reason="comes with the extra numba")
    from heedful.corpus import _compiled, _pairs

    draw = np.random.default_rng(5)
    lengths = draw.integers(0, 13, 97)
    lengths[[0, 5, 96]] = 0, 0, 31
    ids = draw.integers(-1, 23, lengths.sum())
    first = _pairs.count_pairs(ids, lengths, 29, 5, parts)
    second = _compiled.count_pairs(ids, lengths, 29, 5, parts)
    assert len(first) == len(second) == (5 if parts is None else 1)
    for one, other in zip(first, second, strict=True):
        assert one.nnz > 100
        assert (one.indptr == other.indptr).all()
        assert (one.indices == other.indices).all()
        assert (one.data == other.data).all()
    named = Cooccurrence(5, engine="numba", progress=False).fit([["a", "b", "a"]])
    assert named.counts().toarray().tolist() == [[0.5, 1.0], [1.0, 0.0]]


def test_a_cluster_counts_as_one_process_though_a_worker_is_killed(small_parts, tmp_path):
    distributed = pytest.importorskip("distributed", reason="comes with the extra dask")
    from dask import bag, config

    lines = drawn(397, 6)
    expected = Cooccurrence(5, min_count=3, tokenizer=str.split, progress=False).fit(lines)
    started = tmp_path / "started"
    started.mkdir()

    def slowly(text, folder=str(started)):
        """Notes which process works, so that one of them can be ended in the midst of it."""
        (open(f"{folder}/{os.getpid()}", "w")).close()
        time.sleep(0.004)
        return text.split()

    def kill():
        """Ends a worker once it has begun."""
        while not list(started.iterdir()):
            time.sleep(0.01)
        time.sleep(0.2)
        killed.append(int(min(started.iterdir()).name))
        os.kill(killed[0], signal.SIGKILL)

    killed = []
    quiet = {"distributed.logging.distributed": "critical", "distributed.worker.daemon": True}
    with (
        config.set(quiet),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50, local_directory=str(tmp_path)
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        workers = {worker["pid"] for worker in client.run(lambda: {"pid": os.getpid()}).values()}
        killer = threading.Thread(target=kill)
        killer.start()
        counter = Cooccurrence.from_dask(
            bag.from_sequence(lines, npartitions=8), window=5, min_count=3, tokenizer=slowly, progress=False
        )
        killer.join()
    assert killed[0] in workers
    assert len(list(started.iterdir())) >= 3, "another process did the rest"
    assert_same(counter, expected)


def test_dask_without_a_cluster():
    bags = pytest.importorskip("dask.bag", reason="comes with the extra dask")
    lines = drawn(101, 7)
    expected = Cooccurrence(5, per_distance=True, max_vocabulary=97, progress=False).fit(
        [line.split() for line in lines]
    )
    bag = bags.from_sequence([line.split() for line in lines], npartitions=3)
    options = {"window": 5, "per_distance": True, "progress": False}
    from dask import config

    with config.set(scheduler="synchronous"):
        assert_same(Cooccurrence.from_dask(bag, max_vocabulary=97, **options), expected)
        given = Cooccurrence.from_dask(bag, vocabulary=Vocabulary(expected.vocabulary_.words), **options)
        assert_same(given, expected)
        ids = bags.from_sequence([expected.vocabulary_.encode(line.split()) for line in lines], npartitions=5)
        numbers = Cooccurrence.from_dask(ids, **options)
        assert (numbers.counts() != expected.counts()).nnz == 0
    with pytest.raises(InvalidArgument, match="leave folder and n_jobs out"):
        Cooccurrence.from_dask(bag, n_jobs=2)
    with pytest.raises(InvalidArgument, match=r"a dask\.bag\.Bag is expected"):
        Cooccurrence.from_dask(lines)
