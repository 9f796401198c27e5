"""The picture of lists before and after, drawn small."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")
pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")

SCRIPT = Path(__file__).parents[2] / "gallery" / "plot_lists.py"


def test_the_gallery_draws_lists_with_frames_of_what_is_right(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "EPOCHS", 1)
    monkeypatch.setattr(script, "CANDIDATES", 20)
    monkeypatch.setattr(script, "SHOWN", 5)
    images, labels = script.load_digits(return_X_y=True)
    monkeypatch.setattr(script, "load_digits", lambda return_X_y: (images[:300], labels[:300]))
    script.main(tmp_path / "picture.png")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    said = dict(re.findall(r"(\S+) +mAP ([\d.]+)", capsys.readouterr().out))
    assert list(said) == [*script.OTHERS, "ListReranker"]
    asked = [label for label in labels[:300] if label > 4]
    # The scatter of all queries, after the thumbnails, says how many.
    last = pyplot.gcf().axes[-1]
    assert last.get_title().startswith(f"{len(asked)} queries")
    assert len(last.collections) == 6
    rows = [pyplot.gcf().axes[6 * at : 6 * at + 6] for at in range(6)]
    frames = {side.get_edgecolor()[:3] for row in rows for ax in row[1:] for side in ax.spines.values()}
    green, red = (pyplot.matplotlib.colors.to_rgb(f"tab:{name}") for name in ("green", "red"))
    assert green in frames
    assert frames <= {green, red}
    pyplot.close("all")
