"""Training many models at once is training each; and what a crossover says of its own evidence."""

import json
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from experiments import stacked
from experiments.crossover import Cell, Crossover, Trained, run_crossover
from experiments.recipe import text
from experiments.stacked import OutOfTime, Protocol
from experiments.store import Store

from heedful import InvalidArgument

QUICK = Protocol(vocabulary=29, context=7, batch=5, steps=11, warmup=3)
TEXT = torch.randint(29, (503,), generator=torch.Generator().manual_seed(5))


class Plain(torch.nn.Module):
    """The same model, one at a time, the usual way."""

    def __init__(self, layers, width, heads, seed):
        super().__init__()
        drawn = stacked.initial(layers, width, QUICK, [seed])
        self.weights = torch.nn.ParameterDict({name: part.squeeze(-3) for name, part in drawn.items()})
        self.layers, self.heads = layers, heads

    def forward(self, tokens):
        w = self.weights
        x = self.norm(w["embedding"][tokens] + w["position"])
        for at in range(self.layers):
            query, key, value = (self.norm(x) @ w["qkv"][at]).chunk(3, dim=-1)
            split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)]
            scores = split[0] @ split[1].mT / math.sqrt(split[0].shape[-1])
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ split[2]
            x = x + mixed.transpose(1, 2).flatten(-2) @ w["out"][at]
            x = x + F.gelu(self.norm(x) @ w["up"][at], approximate="tanh") @ w["down"][at]
        return self.norm(x) @ w["embedding"].T

    @staticmethod
    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def plain_loop(layers, width, heads, rate, seed):
    model = Plain(layers, width, heads, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: QUICK.factors()[min(at, QUICK.steps - 1)])
    for starts in stacked._starts(len(TEXT), QUICK, seed):
        window = torch.stack([TEXT[at : at + QUICK.context + 1] for at in starts])
        optimizer.zero_grad()
        F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), QUICK.clip)
        optimizer.step()
        schedule.step()
    windows = torch.stack([TEXT[at : at + 8] for at in range(0, len(TEXT) - 7, 7)])
    with torch.no_grad():
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item()


def test_many_models_at_once_are_each_trained_alone():
    rates, seeds = [3e-3, 3e-2], [0, 4]
    together = stacked.train(3, 10, 2, rates, seeds, TEXT, TEXT, QUICK)
    alone = [[plain_loop(3, 10, 2, rate, seed) for seed in seeds] for rate in rates]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=2e-5, atol=0)
    assert len({round(loss, 4) for row in together for loss in row}) == 4


def test_a_model_that_diverges_leaves_the_others_alone():
    fine = stacked.train(1, 6, 2, [1e-2], [0], TEXT, TEXT, QUICK)
    both = stacked.train(1, 6, 2, [1e-2, math.inf], [0], TEXT, TEXT, QUICK)
    assert both[0] == pytest.approx(fine[0], rel=1e-5)
    assert both[1] == [math.inf]


def test_finished_cells_are_kept_and_not_trained_again(tmp_path):
    store = Store(tmp_path, lambda line: None)
    cells = [Cell(1e3, 1, 6, 2, (1e-3, 1e-2, 1e-1)), Cell(1e3, 2, 4, 2, (1e-3, 1e-2, 1e-1))]
    first = run_crossover(TEXT, TEXT, cells[:1], protocol=QUICK, store=store, extend=False)
    kept = {file: file.read_text() for file in tmp_path.iterdir()}
    both = run_crossover(TEXT, TEXT, cells, protocol=QUICK, store=store, extend=False)
    assert all(file.read_text() == text for file, text in kept.items())
    assert len(list(tmp_path.iterdir())) == 2
    assert both.cells[0] == first.cells[0]
    assert Crossover.from_dict(json.loads(json.dumps(both.to_dict()))) == both


def test_a_best_rate_at_the_edge_is_sought_further_out(tmp_path):
    cells = [Cell(1e3, 1, 6, 2, (1e-5, 1e-4))]
    result = run_crossover(TEXT % 3, TEXT % 3, cells, protocol=QUICK, store=Store(tmp_path, lambda line: None))
    assert result.cells[0].rates == pytest.approx((1e-5, 1e-4, 2e-4, 4e-4, 8e-4, 16e-4))
    assert len(json.loads(next(tmp_path.iterdir()).read_text())["rates"]) == 6


def test_time_that_runs_out_leaves_what_is_done(monkeypatch):
    def slow(layers, width, *rest, seconds, **more):
        if width == 4:
            raise OutOfTime("too long")
        return [[3.0, 3.1], [2.0, 2.1], [3.0, 3.1]]

    monkeypatch.setattr(stacked, "train", slow)
    cells = [Cell(1e3, 1, 6, 2, (1.0, 2.0, 3.0)), Cell(1e3, 2, 4, 2, (1.0, 2.0, 3.0))]
    result = run_crossover(TEXT, TEXT, cells, seconds=10)
    assert [cell.width for cell in result.cells] == [6]
    assert not result.complete
    assert not result.is_evidence


def test_the_time_of_all_steps_is_foretold():
    with pytest.raises(OutOfTime, match="1 x 4 needs"):
        stacked.train(1, 4, 1, [1e-3], [0], TEXT, TEXT, Protocol(vocabulary=29, context=7, batch=2), seconds=0.01)


def test_a_cell_says_whether_it_is_evidence():
    inner = Trained(1e6, 2, 8, 1, (1.0, 2.0, 4.0), ((3.0, 3.2), (2.0, 2.2), (math.inf, 2.0)))
    assert (inner.loss, inner.edge, inner.is_evidence) == (pytest.approx(2.1), None, True)
    assert inner.error == pytest.approx(0.1)
    assert inner.to_dict()["losses"][2][0] is None
    one_seed = Trained(1e6, 2, 8, 1, (1.0, 2.0, 4.0), ((3.0,), (2.0,), (3.0,)))
    assert (one_seed.error, one_seed.is_evidence) == (None, False)
    edge = Trained(1e6, 3, 8, 1, (1.0, 2.0), ((3.0, 3.0), (2.5, 2.5)))
    assert (edge.edge, edge.is_evidence) == ("highest", False)
    result = Crossover((inner, edge))
    assert "2.500↑" in str(result.table())
    assert "**2.100**" in str(result.table())
    assert "not evidence" in str(result)
    assert "not evidence" not in str(Crossover((inner,)))
    assert result.winners()[1e6] is inner
    assert result.rows() == [(2, 8, 2.0, 0), (2, 8, 2.2, 1), (3, 8, 2.5, 0), (3, 8, 2.5, 1)]


def test_depths_within_the_noise_of_the_best():
    cells = [
        Trained(1e6, layers, 8, 1, (1.0, 2.0, 4.0), ((9.0, 9.0), (loss - 0.1, loss + 0.1), (9.0, 9.0)))
        for layers, loss in ((1, 2.5), (2, 2.0), (3, 2.2))
    ]
    assert Crossover(tuple(cells)).as_good(1e6) == [2, 3]


# Check 14.
def test_the_smoke_recipe_tells_every_rate_and_that_it_is_no_evidence(tmp_path, monkeypatch):
    from experiments.recipe import Setting, recipe

    module = recipe("depth-smoke")
    from experiments import corpus

    (tmp_path / "depth-crossover").mkdir()
    (tmp_path / "depth-smoke").mkdir()

    def prepare(folder, say):
        for part in ("train", "valid"):
            numpy.save(folder / f"{part}.npy", numpy.random.default_rng(0).integers(2000, size=900, dtype="uint16"))
        return {"sources": {"noise": 900}, "train_tokens": 900}

    monkeypatch.setattr(corpus, "prepare", prepare)
    lines = []
    result = module.run(Setting(True, "cpu", tmp_path / "depth-smoke", lines.append))
    told = text(module, json.loads(json.dumps(result)))
    assert "not evidence" in told
    assert sum(line.startswith(("| 1 |", "| 2 |", "| 4 |")) for line in told.splitlines()) == 9
    assert len(lines) == 3


# Check 13, on the figures that the repository keeps.
def test_the_crossover_that_was_run():
    from experiments.recipe import recipe

    from heedful.cli.reproduce import root

    kept = json.loads((root() / "experiments" / "results" / "depth-crossover.json").read_text())
    found = Crossover.from_dict(kept["result"])
    assert found.is_evidence
    assert len(found.cells) == 20
    assert all(len(cell.rates) >= 4 for cell in found.cells)
    winners = [cell.layers for cell in found.winners().values()]
    assert winners == sorted(winners)
    assert winners[0] <= 3
    assert winners[-1] >= 6
    deepest = found.of(0.25e6)[-1]
    assert deepest.layers == 12
    assert deepest.loss - found.winners()[0.25e6].loss > 0.2
    assert "**" in text(recipe("depth-crossover"), kept["result"])


def test_wrong_shapes_and_texts_are_refused():
    with pytest.raises(InvalidArgument, match="3 heads do not divide width 8"):
        stacked.train(1, 8, 3, [1e-3], [0], TEXT, TEXT, QUICK)
    with pytest.raises(InvalidArgument, match="shorter than the context"):
        stacked.train(1, 8, 2, [1e-3], [0], TEXT[:5], TEXT, QUICK)
    with pytest.raises(InvalidArgument, match="one shape at least"):
        run_crossover(TEXT, TEXT, [])
