"""The picture of rows, drawn small."""

import importlib.util
import re
from pathlib import Path

import pytest
from matplotlib import pyplot

GALLERY = Path(__file__).parents[2] / "gallery"


@pytest.fixture
def script(request):
    spec = importlib.util.spec_from_file_location(request.param, GALLERY / f"{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["plot_prior"], indirect=True)
def test_every_kind_of_synthetic_table_has_a_panel(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "TRIED", 12)
    script.main(tmp_path / "picture.png")
    assert pyplot.imread(tmp_path / "picture.png").std() > 0.05
    titles = [ax.get_title().split(" ")[0] for ax in pyplot.gcf().axes]
    assert titles == list(script.TARGETS)
    pyplot.close("all")


@pytest.mark.parametrize("script", ["plot_rows"], indirect=True)
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
