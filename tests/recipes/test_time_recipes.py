"""The recipes of events on stand-ins of their data: they run, keep their parts, and their tables say what was measured."""

import json

import numpy as np
import pytest
from experiments import events, movielens, worlds
from experiments.events import Events, Split
from experiments.recipe import Setting, Table, recipe, text

DAYS = 60 * 86400.0


def stand_in(span, names, marks=()):
    """Sequences of the gap switch, their types and times brought to the size of the data they stand for."""
    drawn = worlds.gap_switch(130, 0, n=9)
    drawn = Events(drawn.types % len(names), drawn.times / drawn.times.max() * span, drawn.starts, names)
    columns = {name: (drawn.types + at) % 3 for at, name in enumerate(marks)}
    drawn = Events(drawn.types, drawn.times, drawn.starts, names, columns)
    return Split(*(drawn.take(np.arange(begin, end)) for begin, end in ((0, 45), (45, 85), (85, 130))))


def waits(end):
    split = stand_in(0.9 * end, ("event",))
    return Split(*(Events(part.types, part.times, part.starts, part.names, end=end) for part in split))


@pytest.fixture
def without_data(monkeypatch):
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 12, 61)
    starts = np.append(0, np.cumsum(lengths))
    films = np.concatenate([rng.permutation(np.arange(1, 131))[:length] for length in lengths]).astype(np.int32)
    times = np.concatenate([np.sort(rng.uniform(0, 1e6, length)) for length in lengths])
    ratings = movielens.Ratings(films, starts, ("", *(f"film {at}" for at in range(1, 131))), times)
    marks = ("carrier", "origin", "dest")
    monkeypatch.setattr(events, "badges", lambda work, number: stand_in(DAYS, ("one", "two", "three", "four")))
    monkeypatch.setattr(events, "flights", lambda work, target: stand_in(60 * 1440.0, ("one", "two", "three"), marks))
    monkeypatch.setattr(events, "process", lambda work, name: waits(24.0 if name == "taxi" else 100.0))
    monkeypatch.setattr(movielens, "prepare", lambda work: ratings)


@pytest.mark.parametrize("name", ["time-flights", "time-hawkes", "time-movielens", "time-stackoverflow"])
def test_it_runs_and_keeps_its_parts(name, without_data, tmp_path):
    module, lines = recipe(name), []
    result = module.run(Setting(True, "cpu", tmp_path, lines.append))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    shown = text(module, result)
    assert "A quick run: no evidence." in shown
    assert sum(isinstance(block, Table) for block in module.tables(result)) >= 1
    assert result["fits"]
    assert len(result["fits"]) == result["wanted"]
    assert module.run(Setting(True, "cpu", tmp_path, lines.append)) == result, "finished parts are kept"


def test_one_that_was_stopped_says_so(without_data, tmp_path):
    module = recipe("time-hawkes")
    result = module.run(Setting(True, "cpu", tmp_path, lambda line: None, seconds=0.0))
    assert (result["fits"], result["wanted"]) == ([], 2)
    assert "Incomplete: 0 of 2 fits" in text(module, result)
