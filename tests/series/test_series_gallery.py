"""The picture of evidence, drawn small."""

import importlib.util
import re
from pathlib import Path

import pytest

pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")

SCRIPT = Path(__file__).parents[2] / "gallery" / "plot_evidence.py"


def test_the_gallery_draws_its_picture(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("plot_evidence", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "SERIES", 80)
    script.main(tmp_path / "picture.png")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    said = capsys.readouterr().out
    found = re.search(r"has most evidence in ([\d.]+)%", said)
    assert found
    assert float(found[1]) > 50, "chance is 4"
    assert f"written to {tmp_path / 'picture.png'}" in said
