"""The recipe of ListOps: its generator, batches that are cut, trainings that survive a stop, and what its table says."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
import torch
from experiments.recipe import Setting, text

from heedful.cli.reproduce import root

sys.path.insert(0, str(root()))
from experiments import listops, primal_listops


def quiet(line):
    pass


def plain_trees(seed, most_parts=10, max_depth=10, shortest=501, longest=1_999):
    """The generator as it is told: nested lists, the standard library's draws, no shortcut."""
    source = random.Random(seed)

    def tree(depth):
        if (source.random() if depth < max_depth else 1) > 0.25:
            return source.choice(range(10))
        parts = [tree(depth + 1) for _ in range(source.randint(2, most_parts))]
        return [source.choice(["MIN", "MAX", "MED", "SM"]), *parts]

    def symbols(node):
        return (
            [node] if isinstance(node, int) else ["[" + node[0], *(s for part in node[1:] for s in symbols(part)), "]"]
        )

    while True:
        found = symbols(tree(1))
        if shortest <= len(found) <= longest:
            yield found


def stack_value(symbols):
    """What a list is worth, read from left to right."""
    stack = []
    for symbol in symbols:
        if symbol != "]":
            stack.append(symbol)
            continue
        parts = []
        while isinstance(stack[-1], int):
            parts.append(stack.pop())
        operation = stack.pop()
        stack.append(
            {"[MIN": min, "[MAX": max, "[MED": lambda p: int(np.median(p)), "[SM": lambda p: sum(p) % 10}[operation](
                parts
            )
        )
    (value,) = stack
    return value


def named(tokens):
    table = [None, *range(10), *("[" + name for name in listops.OPERATIONS), "]"]
    return [table[token] for token in tokens]


def test_listops_draws_what_the_plain_generator_draws():
    ours, told = listops.draw(random.Random("seed")), plain_trees("seed")
    for _ in range(60):
        tokens, value = next(ours)
        symbols = next(told)
        assert named(tokens) == symbols
        assert value == stack_value(symbols)


@pytest.mark.parametrize("most_parts", [2, 3, 5, 9, 17, 18, 40])
def test_listops_draws_any_number_of_parts(most_parts, monkeypatch):
    sizes = {"max_depth": 4, "shortest": 3, "longest": 300}
    for name, value in {"MAX_PARTS": most_parts, **{name.upper(): value for name, value in sizes.items()}}.items():
        monkeypatch.setattr(listops, name, value)
    ours, told = listops.draw(random.Random("parts")), plain_trees("parts", most_parts, **sizes)
    for _ in range(60):
        assert named(next(ours)[0]) == next(told)


def test_listops_values_and_shares():
    """Check 13 of the sheet."""
    data = listops.generate(1_000, seed=0)
    starts = [0, *data.ends]
    rows = [bytes(data.tokens[a:b]) for a, b in zip(starts, data.ends, strict=False)]
    assert len(set(rows)) == 1_000
    assert [stack_value(named(row)) for row in rows] == data.values.tolist()
    lengths = np.diff(starts)
    assert lengths.min() > 500
    assert lengths.max() < 2_000
    shares = np.bincount(data.values, minlength=10) / 1_000
    assert 0.13 <= shares[0] <= 0.20
    assert 0.13 <= shares[9] <= 0.20
    assert shares.max() == max(shares[0], shares[9])
    tokens, cut, values = data.padded(3, 2, 2_000)
    assert bytes(tokens[1, : cut[1]]) == rows[4]
    assert not tokens[1, cut[1] :].any()
    assert values.tolist() == data.values[3:5].tolist()


def test_listops_file_depends_on_the_seed_alone(tmp_path):
    many = listops.generate(21, seed=5, size=7, jobs=2)
    one = listops.generate(21, seed=5, size=7, jobs=1)
    assert all(np.array_equal(a, b) for a, b in zip(many, one, strict=True))
    first = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        listops.prepare(folder, 5, seed=3, say=quiet)
        listops.prepare(folder, 5, seed=4, say=quiet)
        first.append([file.read_bytes() for file in sorted(folder.iterdir())])
    assert first[0] == first[1]
    assert first[0][0] != first[0][1]
    assert np.array_equal(listops.prepare(folder, 5, seed=3).values, listops.generate(5, seed=3).values)


def test_listops_keeps_no_tree_twice(monkeypatch):
    monkeypatch.setattr(listops, "SHORTEST", 1)
    monkeypatch.setattr(listops, "LONGEST", 4)
    data = listops.generate(150, seed=1, size=40)
    rows = {bytes(row) for row in np.split(data.tokens, data.ends[:-1])}
    assert len(rows) == 150


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Short sequences, few steps."""
    monkeypatch.setattr(listops, "SHORTEST", 11)
    monkeypatch.setattr(listops, "LONGEST", 127)
    monkeypatch.setattr(primal_listops, "KEPT_EVERY", 2)
    protocol = primal_listops.Protocol(steps=7, warmup=2, evaluate=2, batch=5, samples=(30, 11, 13))
    return tmp_path, protocol


@pytest.mark.parametrize("name", ["primal", "softmax+primal", "none"])
def test_a_cut_batch_gives_what_the_whole_one_gives(name, tiny):
    folder, protocol = tiny
    data = listops.prepare(folder, sum(protocol.samples), say=quiet)
    split = primal_listops.splits(data, protocol.samples, "cpu")[0]
    network = primal_listops.Network(primal_listops.FORMS[name]).eval()
    tokens, padding, values = split.batch(np.arange(5))
    assert tokens.shape[1] % 64 == 0
    assert tokens.shape[1] < primal_listops.POSITIONS
    whole = split.tokens[:5].long()
    wanted = network(whole, whole == 0)
    assert wanted.std(dim=0).max() > 0
    assert torch.allclose(network(tokens, padding), wanted, atol=1e-6)
    assert values.tolist() == data.values[:5].tolist()


def test_every_pass_takes_every_sample_once():
    protocol = primal_listops.Protocol(steps=12, batch=5)
    rows = primal_listops.order(30, protocol, seed=1)
    assert rows.shape == (12, 5)
    assert sorted(rows[:6].flatten()) == sorted(rows[6:].flatten()) == list(range(30))
    assert not np.array_equal(rows[:6], rows[6:])
    assert not np.array_equal(rows, primal_listops.order(30, protocol, seed=2))


def test_a_stopped_training_ends_as_if_it_had_not_been(tiny, monkeypatch):
    folder, protocol = tiny
    arguments = "softmax+primal", 1, protocol, folder, "cpu"
    wanted = primal_listops.train(*arguments)
    step = primal_listops.Run.step

    def breaks(self, batch):
        if self.done == 5:
            raise KeyboardInterrupt
        step(self, batch)

    monkeypatch.setattr(primal_listops.Run, "step", breaks)
    with pytest.raises(KeyboardInterrupt):
        primal_listops.train(*arguments)
    seen = []
    monkeypatch.setattr(primal_listops.Run, "step", lambda self, batch: (seen.append(self.done), step(self, batch)))
    again = primal_listops.train(*arguments)
    assert seen == [4, 5, 6]
    assert {**again, "seconds": 0} == {**wanted, "seconds": 0}
    assert not list(folder.glob("*.pt"))
    assert wanted["steps"] == 7
    assert wanted["test"] == pytest.approx(100 * round(wanted["test"] * 13 / 100) / 13)


def test_listops_counts_under_the_first_token():
    minimum, maximum = listops.FIRST_OPERATION, listops.FIRST_OPERATION + 1
    roots, values = [minimum, minimum, minimum, maximum, minimum, maximum, maximum], [0, 0, 5, 9, 5, 9, 8]
    tokens = np.array([[root, 3, listops.END] for root in roots], dtype=np.uint8).ravel()
    data = listops.Listed(tokens, np.arange(3, 22, 3), np.array(values))
    found = primal_listops.first_token(data, (4, 1, 2))
    assert found == {"train": 75.0, "dev": 0.0, "test": 50.0}


def test_listops_quick_run_and_its_table(tiny, monkeypatch):
    folder, protocol = tiny
    monkeypatch.setattr(primal_listops, "QUICK", protocol)
    result = primal_listops.run(Setting(True, "cpu", folder, quiet))
    assert json.loads(json.dumps(result)) == result
    assert [row["attention"] for row in result["runs"]] == list(primal_listops.FORMS)
    table = text(primal_listops, result)
    assert "A quick run: no evidence." in table
    assert "majority floor" in table
    rows = [
        {"attention": name, "seed": seed, "test": test, "dev": 40.0}
        for name, test in (("primal", 37.0), ("softmax", 35.9), ("none", 37.1))
        for seed in (0, 1)
    ]
    table = text(primal_listops, result | {"quick": False, "runs": rows, "wanted": 15})
    assert "Accuracy of primal, %: 37.0, wanted >= 36: met" in table
    assert "Accuracy of softmax, %: 35.9, wanted >= 36: MISSED" in table
    assert "The network without any attention, 37.1 %, is as good as every other." in table
    assert "Incomplete: 6 of 15 trainings." in table
