"""Parts of `series-rivals` on drawn series: it runs and goes on, tokens know nothing of unseen series, and what its tables say."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")

from experiments import networks, rockets, series, series_rivals
from experiments.recipe import Setting, text


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder with two small sets of unequal lengths, and no data but those."""
    monkeypatch.setattr(series, "BESIDE", tmp_path / "nowhere")
    monkeypatch.setattr(series, "PACKAGED", ())
    monkeypatch.setattr(series_rivals, "PACKAGED", ())
    draw = np.random.default_rng(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for name, channels in (("GunPoint", 1), ("ERing", 2)):
        X, y = draw.standard_normal((38, channels, 31)), np.arange(38) % 2
        X[:, 0] += 2 * np.sin(np.arange(31) * (0.4 + 0.5 * y[:, None]))
        X[::3, :, 27:] = np.nan
        np.savez(folder / f"{name}.npz", X_train=X[:24], y_train=y[:24], X_test=X[24:], y_test=y[24:])
    return tmp_path


def test_it_runs_and_resumes(work, monkeypatch):
    monkeypatch.setattr(series_rivals, "_scaled", lambda size: series_rivals.scale(*size))
    (work / "rivals").mkdir()
    rival = {"method": "MiniRocket", "set": "ERing", "seed": 0, "accuracy": 50.0, "fit": 1.0, "predict": 0.5}
    rockets.part(work, "MiniRocket", "ERing", 0).write_text(json.dumps(rival))
    setting = Setting(True, "cpu", work, lambda line: None)
    result = series_rivals.run(setting)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert {row["method"] for row in result["fits"]} == set(series_rivals.OURS)
    assert {row["set"] for row in result["networks"]} == {"ERing"}
    assert result["rivals"] == [rival]
    assert series_rivals.run(setting) == result
    shown = text(series_rivals, result)
    assert "| ERing | 24 / 14 |" in shown
    assert "Points above MiniRocket in the mean of 1 sets: +" in shown


def test_networks_are_trained_where_they_have_no_figures(work):
    assert series_rivals._short(work / "data", "GunPoint")
    assert not series_rivals._short(work / "data", "ERing"), "primal-uea has it"
    rows = networks.measured_before()
    assert {row["seed"] for row in rows} == {0, 1, 2, 3, 4}
    assert len(rows) == 5 * len({row["set"] for row in rows})


@pytest.mark.parametrize("kind", networks.TOKENS)
def test_tokens_know_nothing_of_unseen_series(work, monkeypatch, kind):
    monkeypatch.setattr(networks, "FEATURES", 168)
    monkeypatch.setitem(networks.TOKENS, kind, 5)
    train, test = series.load(work / "data", "ERing")
    own, unseen = networks.tokens(train.X, test.X, kind, 0)
    assert own.shape == (24, 5, 8)
    assert unseen.shape == (14, 5, 8)
    alone, fewer = networks.tokens(train.X, test.X[:3], kind, 0)
    np.testing.assert_array_equal(own, alone)
    np.testing.assert_allclose(unseen[:3], fewer, atol=1e-4)


def test_a_network_learns_from_features_with_and_without_attention(work, monkeypatch):
    monkeypatch.setattr(networks, "FEATURES", 168)
    monkeypatch.setitem(networks.TOKENS, networks.TOKEN, 5)
    monkeypatch.setattr(networks, "epochs", lambda count: 2)
    rows = networks.fit_on_features(work / "data", "GunPoint", 1)
    assert [row["method"] for row in rows] == list(networks.ON_FEATURES)
    assert all((row["set"], row["seed"]) == ("GunPoint", 1) and 0 <= row["accuracy"] <= 100 for row in rows)
    held_out = networks.hold_out(work / "data", "GunPoint", networks.TOKEN)
    assert held_out["tokens"] == networks.TOKEN
    row = series_rivals.fit(work / "data", "GunPoint", "network", 0)
    assert row["method"] == "network"
    assert row["fit"] > 0


def test_its_table_says_what_features_gain():
    """Two of the larger sets: 2 and 4 points below the kernel method, above and below the network, level without attention."""
    first, control = networks.ON_FEATURES
    values = {
        "Libras": {"ours": 95.0, "network": 84.0, first: 93.0, control: 93.0},
        "PLAID": {"ours": 96.0, first: 92.0, control: 91.0},
        "OSULeaf": {"ours": 98.0, "network": 99.0},
    }
    accuracy = {
        method: {name: own[method] for name, own in values.items() if method in own}
        for method in ("ours", "network", first, control)
    }
    held_out = [{"set": "Libras", "tokens": kind, "accuracy": 80.0 + at} for at, kind in enumerate(networks.TOKENS)]
    shown = "\n".join(map(str, networks.blocks({"held_out": held_out}, accuracy)))
    assert "| Libras | 95.0 | 84.0 | 93.0 | 93.0 |" in shown
    assert "| PLAID | 96.0 | | 92.0 | 91.0 |" in shown
    assert "OSULeaf" not in shown
    assert (
        "steps less the kernel method, on all sets that have both: -5.0 points in the mean of 2 sets, above on 1, below on 1."
        in shown
    )
    assert "features less the kernel method: -3.0 points in the mean of 2 sets, above on 0, below on 2." in shown
    assert "less the network on steps: +9.0 points in the mean of 1 sets, above on 1, below on 0." in shown
    assert "less the same without attention: +0.5 points in the mean of 2 sets, above on 1, below on 0." in shown
    assert "64 components 80.0, 256 components 81.0, 256 sums 82.0; taken: " in shown
    assert networks.blocks({"held_out": []}, {"ours": {"Libras": 95.0}}) == []


def test_bursts_lie_where_they_are_said_to():
    X, labels, places = series_rivals.bursts(np.random.default_rng(0), 60, channels=3, missing=0.1)
    assert {"burst", "none"} == set(labels)
    rose = []
    for x, label, (segment, channel) in zip(X, labels, places, strict=True):
        if label == "burst":
            # Fast waves: what differs from the step before last.
            change = np.nan_to_num(np.abs(x[:, 2:] - x[:, :-2]))
            sums = [part.sum(1) for part in np.array_split(change, 8, axis=1)]
            rose.append(np.unravel_index(np.argmax(sums), (8, 3)) == (segment, channel))
    assert np.mean([np.all(one) for one in rose]) > 0.8
