"""The picture of rows, drawn small."""

import importlib.util
import re
from pathlib import Path

import pytest
from matplotlib import pyplot

SCRIPT = Path(__file__).parents[2] / "gallery" / "plot_rows.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("plot_rows", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_draws_its_picture(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "ROWS", 60)
    monkeypatch.setattr(script, "EPOCHS", 2)
    script.main(tmp_path / "picture.png")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    said = capsys.readouterr().out
    looking, apart = (re.findall(r"\(([+-][\d.]+)\)", part) for part in said.split("not looking:"))
    assert float(looking[1]) != 0, "scrambled rows change what looks at them"
    assert apart[:2] == ["+0.0000", "+0.0000"]
    third = pyplot.gcf().axes[2]
    assert len(third.patches) == len(third.texts) == 10
    assert {bar.get_facecolor()[:3] for bar in third.patches} <= {
        pyplot.matplotlib.colors.to_rgb(colour) for colour in script.COLOURS.values()
    }
    assert f"picture: {tmp_path / 'picture.png'}" in said
    pyplot.close("all")
