"""The picture of what a small model sees, drawn small."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")
pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")

SCRIPT = Path(__file__).parents[2] / "gallery" / "plot_captions.py"


def test_the_gallery_draws_captions_with_their_scores(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, value in {"STEPS": 4, "ROUNDS": 2, "TEST": 12, "SHOWN": 3}.items():
        monkeypatch.setattr(script, name, value)
    script.main(tmp_path / "picture.png")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    said = capsys.readouterr().out
    assert "step 4: colour" in said
    assert "highest of four" in said
    bars = [ax for ax in pyplot.gcf().axes if len(ax.patches) == 4]
    assert len(bars) == 3
    green, red = (pyplot.matplotlib.colors.to_rgb(f"tab:{name}") for name in ("green", "red"))
    for ax in bars:
        assert [patch.get_facecolor()[:3] for patch in ax.patches] == [green, red, red, red]
        assert ax.texts[0].get_text() != ax.texts[3].get_text()
    pyplot.close("all")
