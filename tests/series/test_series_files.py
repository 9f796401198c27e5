"""Files of series: what they hold comes back, what is wrong with them is told."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from heedful import InvalidArgument, MissingExtra, Unsupported
from heedful.series import SeriesData, archive, read

TS = """# A comment
@problemName Small
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true left right
@data
1,2.5,?:-1,NaN,3e2:left
4,5:6,7: right
"""


def test_a_npz_gives_the_part_that_is_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    parts = {"X_train": rng.normal(size=(5, 2, 7)), "X_test": rng.normal(size=(3, 2, 7)).astype(np.float32)}
    labels = {"y_train": np.array(list("abbab")), "y_test": np.array([b"a", b"b", b"b"])}
    np.savez(tmp_path / "both.npz", **parts, **labels)
    np.savez(tmp_path / "one.npz", X=parts["X_train"][:, 0])
    for split in ("train", "test"):
        data = read(tmp_path / "both.npz", split)
        np.testing.assert_array_equal(data.X, parts[f"X_{split}"])
        np.testing.assert_array_equal(data.y, labels[f"y_{split}"].astype(str))
        alone = read(str(tmp_path / "one.npz"), split)
        assert (alone.X.shape, alone.y) == ((5, 7), None)
    assert repr(read(tmp_path / "both.npz")) == "both: 5 series of 2 channels, 7 steps, 2 classes"
    assert repr(alone) == "one: 5 series of 1 channel, 7 steps"


def test_a_ts_file_gives_unequal_series(tmp_path):
    (tmp_path / "small.ts").write_text(TS)
    data = read(tmp_path / "small.ts")
    assert isinstance(data.X, list)
    np.testing.assert_array_equal(data.X[0], [[1, 2.5, np.nan], [-1, np.nan, 300]])
    np.testing.assert_array_equal(data.X[1], [[4, 5], [6, 7]])
    assert data.y.tolist() == ["left", "right"]
    assert repr(data) == "small: 2 series of 2 channels, 2 to 3 steps, 2 classes"
    unlabelled = (
        TS.replace("@classLabel true left right", "@classLabel false").replace(":left", "").replace(": right", ",8")
    )
    (tmp_path / "small.ts").write_text(unlabelled)
    data = read(tmp_path / "small.ts")
    np.testing.assert_array_equal(data.X[1], [[4, 5, np.nan], [6, 7, 8]])
    assert data.y is None


def savez(**arrays):
    def write(file):
        np.savez(file, **arrays)

    return write


def altered(change):
    """A .npz whose bytes were changed after it was written."""

    def write(file):
        np.savez_compressed(file, X=np.random.default_rng(0).normal(size=(5, 2, 70)), y=np.arange(5))
        data = bytearray(file.read_bytes())
        file.write_bytes(bytes(change(data)))

    return write


def flipped(data):
    data[len(data) // 3] ^= 255
    return data


def pickled(file):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(file.with_name("run")),)

    with zipfile.ZipFile(file, "w") as made:
        array = io.BytesIO()
        np.lib.format.write_array_header_1_0(array, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        made.writestr("X.npy", array.getvalue() + pickle.dumps(Evil()))


GOOD = np.zeros((4, 2, 5))


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (savez(Y=GOOD), r"has no array X_train or X; it holds Y"),
        (savez(), "it holds nothing"),
        (savez(X=np.zeros(5)), r"must be numbers of shape .*; got float64 of shape \(5,\)"),
        (savez(X=np.zeros((0, 2, 5))), r"got float64 of shape \(0, 2, 5\)"),
        (savez(X=np.zeros((2, 2, 2, 2))), r"got float64 of shape \(2, 2, 2, 2\)"),
        (savez(X=np.full((4, 5), "a")), r"got <U1 of shape \(4, 5\)"),
        (savez(X=GOOD.astype(complex)), "got complex128"),
        (savez(X=GOOD, y=np.zeros(3)), r"one label for each of the 4 series; got shape \(3,\)"),
        (savez(X=GOOD, y=np.zeros((4, 1))), r"got shape \(4, 1\)"),
        (savez(X=GOOD, y=np.array([0, 1, np.nan, 1])), "y in .* is NaN at case 2"),
        (savez(X=GOOD, y=np.zeros(4, dtype="M8[s]")), "must be numbers or strings; got datetime64"),
        (savez(X=GOOD, y=np.array([None, 1, 2, 3])), "it holds Python objects, which are not read"),
        (pickled, "it holds Python objects, which are not read"),
        (altered(lambda data: data[:-30]), "cannot be read as .npz"),
        (altered(lambda data: data[:40]), "cannot be read as .npz"),
        (altered(flipped), "cannot be read as .npz"),
        (lambda file: file.write_bytes(b""), "cannot be read as .npz"),
        (lambda file: file.write_bytes(b"hello"), "cannot be read as .npz: it is something else"),
        (lambda file: file.write_bytes(pickle.dumps([1])), "cannot be read as .npz: it is something else"),
        (lambda file: np.save(file.open("wb"), GOOD), "it holds one array, not several by name"),
        (lambda file: file.mkdir(), "there is no file"),
    ],
)
def test_a_bad_npz_is_told(write, told, tmp_path):
    file = tmp_path / "series.npz"
    write(file)
    with pytest.raises(InvalidArgument, match=told) as error:
        read(file)
    assert str(file) in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (("@timeStamps false", "@timeStamps true"), Unsupported, "has time stamps"),
        (("@classLabel true left right", "@targetLabel true"), InvalidArgument, "numbers to predict, and not all are"),
        (("4,5:6,7", "4,5"), InvalidArgument, "line 11: expected 2 channels with : behind each; got 1"),
        (("4,5", "4,five"), InvalidArgument, "line 11: could not convert string to float: 'five'"),
        (("@data\n", ""), InvalidArgument, "line 9: expected a line @name value or @data"),
        (("@dimensions 2\n", ""), None, ""),
        ((TS, ""), InvalidArgument, "holds no series: there is no line @data"),
        ((TS[TS.index("1,2.5") :], ""), InvalidArgument, "holds no series: there is nothing behind @data"),
    ],
)
def test_a_bad_ts_is_told(change, kind, told, tmp_path):
    file = tmp_path / "series.ts"
    file.write_text(TS.replace(*change))
    if kind is None:
        assert len(read(file)) == 2
        return
    with pytest.raises(kind, match=told):
        read(file)


def test_channels_of_a_ts_file_must_agree(tmp_path):
    (tmp_path / "a.ts").write_text(TS.replace("@dimensions 2\n", "").replace("4,5:6,7", "4,5"))
    with pytest.raises(InvalidArgument, match="differ in their number of channels"):
        read(tmp_path / "a.ts")
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(InvalidArgument, match=r"neither .npz nor .ts; save X and y by numpy.savez"):
        read(tmp_path / "a.csv")
    with pytest.raises(InvalidArgument, match="there is no file"):
        read(tmp_path / "b.npz")


def test_the_archive_of_a_package(monkeypatch):
    pytest.importorskip("sktime", reason="the extra 'archive' is not installed")
    for name, counts, shape, classes in (("JapaneseVowels", (270, 370), 12, 9), ("BasicMotions", (40, 40), 6, 4)):
        train, test = archive(name)
        assert isinstance(train, SeriesData)
        assert (len(train), len(test)) == counts
        assert {len(case) for data in (train, test) for case in data.X} == {shape}
        assert set(train.y) == set(test.y)
        assert len(set(train.y)) == classes
        assert not any(np.isnan(case).any() for case in train.X)
    lengths = [{case.shape[1] for case in data.X} for data in archive("JapaneseVowels")]
    assert [(min(part), max(part)) for part in lengths] == [(7, 26), (7, 29)]
    with pytest.raises(InvalidArgument, match=r"no data set 'Nothing' .*; they carry .*BasicMotions"):
        archive("Nothing")
    monkeypatch.setattr("heedful.series.files.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"heedful\[archive\]"):
        archive("BasicMotions")
