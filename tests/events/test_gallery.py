"""The picture of events, drawn small; the truth beside its curves by simulation."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

SCRIPT = Path(__file__).parents[2] / "gallery" / "plot_events.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("plot_events", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_draws_its_picture(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "SEQUENCES", 60)
    monkeypatch.setattr(script, "EPOCHS", 1)
    script.main(tmp_path / "picture.png")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    said = capsys.readouterr().out
    cycle = re.search(r"cycle found: ([\d.]+) ", said)
    assert cycle
    assert float(cycle[1]) == pytest.approx(script.PERIOD, rel=0.01)
    assert f"written to {tmp_path / 'picture.png'}" in said
    pyplot.close("all")


def test_the_truth_in_the_picture_is_that_of_its_world(script):
    rng, soon, late = np.random.default_rng(0), [0, 0], [0, 0]
    for _ in range(2000):
        kinds, times = script.shop(rng)
        after = np.diff(times)[np.flatnonzero(kinds[:-1] == "order")]
        answers = kinds[1:][kinds[:-1] == "order"]
        for counts, inside in ((soon, after < 0.2), (late, (after > 2.0) & (after < 2.2))):
            counts[0] += int((answers[inside] == "parcel").sum())
            counts[1] += int(inside.sum())
    for (parcels, all_of_them), middle in ((soon, 0.1), (late, 2.1)):
        truth = float(script.parcel_after(np.array(middle)))
        assert parcels / all_of_them == pytest.approx(truth, abs=4 * (truth * (1 - truth) / all_of_them) ** 0.5 + 0.005)
