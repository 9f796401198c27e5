"""Sets for retrieval: what is in them, from stand-ins of the files that no checkout carries; and how lists are judged."""

import numpy as np
import pytest
from experiments import rerank_baselines, reranking, retrieval

from heedful import Unsupported
from heedful.ranking import cosine, mean_average_precision, precision_at, relevance_by_label


@pytest.fixture
def beside(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    folder = tmp_path / "beside"
    folder.mkdir()
    vectors = {f"X_{part}": rng.normal(size=(n, 5)).astype(np.float32) for part, n in (("train", 7), ("test", 3))}
    labels = {f"y_{part}": np.arange(n, dtype=np.int16) for part, n in (("train", 7), ("test", 3))}
    np.savez(folder / "omniglot_hog64.npz", **vectors, **labels)
    images = rng.integers(0, 255, (900, 28, 28), dtype=np.uint8)
    np.savez(folder / "fashion_mnist_900.npz", images=images, labels=np.repeat(np.arange(10), 90))
    monkeypatch.setattr(retrieval, "BESIDE", folder)
    return folder


def test_images(beside, tmp_path, monkeypatch):
    work = tmp_path / "work"
    assert retrieval.omniglot(work, "train").X.shape == (7, 5)
    assert retrieval.omniglot(work).y.tolist() == [0, 1, 2]
    clothes = retrieval.fashion(work)
    assert clothes.X.shape == (900, 64)
    np.testing.assert_allclose(np.linalg.norm(clothes.X, axis=1), 1)
    # Copied, they are found without the data folder.
    monkeypatch.setattr(retrieval, "BESIDE", tmp_path / "nowhere")
    assert len(retrieval.fashion(work).y) == 900
    with pytest.raises(Unsupported, match=r"there is no omniglot_hog64\.npz in"):
        retrieval.omniglot(tmp_path / "other")


def test_drawn_worlds():
    for draw in (retrieval.clusters, retrieval.arcs):
        items = draw(2, 5, 3, 7)
        assert items.X.shape == (15, 7)
        assert items.y.tolist() == [number // 3 for number in range(15)]
        np.testing.assert_allclose(np.linalg.norm(items.X, axis=1), 1)
        assert np.array_equal(items.X, draw(2, 5, 3, 7).X)
        assert not np.array_equal(items.X, draw(3, 5, 3, 7).X)


def test_sentences():
    texts, numbers = retrieval.sentences("scipy", ("fft", "special"))
    assert len(texts) == len(set(texts)) == len(numbers)
    assert set(numbers) == {0, 1}
    assert all(20 <= len(text) <= 200 for text in texts)
    assert "Compute the 1-D discrete Fourier Transform." in texts
    # The paragraph after the signature of a compiled function, without its name.
    assert any(text.startswith("Bessel function of the first kind") for text in texts)
    assert not any(text.startswith("jv(") or " jv " in text for text in texts)


def test_vectors_of_texts_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "SCIPY", ("fft",))
    texts, numbers = retrieval.sentences("scipy", ("fft",))

    class Sentences:
        def encode(self, given):
            assert given == texts
            return np.eye(len(given), dtype=np.float32)

    monkeypatch.setattr("heedful.bridges.sentences.Sentences", Sentences)
    assert retrieval.docstrings(tmp_path).X.shape == (len(texts), len(texts))
    monkeypatch.setattr("heedful.bridges.sentences.Sentences", None)
    assert retrieval.docstrings(tmp_path).y.tolist() == numbers.tolist()


def test_every_reference_names_a_method_and_its_options():
    from heedful.ranking import METHODS

    items = retrieval.clusters(2, 5, 3, 7).X
    named = {(m, s) for rows in rerank_baselines.REFERENCE.values() for m, s, _ in rows} | set(rerank_baselines.COMMON)
    assert set(rerank_baselines.REFERENCE) == set(rerank_baselines.SETS)
    for method, setting in named:
        ranking = METHODS[method.removesuffix(" alone")](None, items, **rerank_baselines._options(method, *setting))
        assert ranking.order.shape == (15, 14)


def test_figures_of_all_queries_at_once_are_those_of_the_package():
    X, y = retrieval.clusters(5, 7, 6, 11)
    order = cosine(None, X).order
    relevant = relevance_by_label(y)
    found = reranking.judged(order, y)
    assert found["map"] == pytest.approx(100 * mean_average_precision(order, relevant), abs=1e-10)
    assert found["first"] == pytest.approx(100 * precision_at(order, relevant, 1), abs=1e-10)
    # An item that is alone in its class asks in vain and counts for nothing.
    alone = np.append(y[:-1], 99)
    expected = 100 * mean_average_precision(order, relevance_by_label(alone))
    assert reranking.judged(order, alone)["map"] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("affinity", ["cosine", "jaccard"])
def test_one_pass_of_the_network_gives_the_figures_of_every_weight(affinity):
    pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")
    from heedful.ranking import ListReranker

    options = {} if affinity == "cosine" else {"affinity_options": {"k1": 5, "k2": 2}}
    learn, test = retrieval.clusters(6, 9, 6, 11), retrieval.clusters(7, 9, 6, 11)
    model = ListReranker(
        17,
        embed_dim=16,
        num_heads=2,
        epochs=1,
        affinity=affinity,
        random_state=0,
        progress=False,
        device="cpu",
        **options,
    ).fit(learn.X, learn.y)
    found = reranking.weighted(model, test)
    for weight in reranking.WEIGHTS:
        order = model.set_params(weight=weight).rerank(test.X).order
        assert found[f"{weight:g}"] == pytest.approx(reranking.judged(order, test.y), abs=1e-9)
