"""Synthetic tables: each kind of target and of column is what it says, and there is something to learn."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier

from heedful import InvalidArgument
from heedful.tables import prior
from heedful.tables.prior import (
    ACTIVATIONS,
    CLASSES,
    LEVELS,
    TARGETS,
    Draws,
    Graph,
    Shape,
    by_counts,
    by_group,
    by_products,
    by_rules,
    by_trees,
    classes_of,
    counted,
    draw,
    floored,
    measured,
    nodes,
    powered,
    ranked,
    ranks_of,
    renamed,
    shape,
    skewed,
    standardised,
    weights,
)  # fmt: skip

SIZE = Shape(101, 53, 5)


def test_tables_are_decided_by_their_seed():
    one, same, other = (draw(7, SIZE, Draws(seed), part=3) for seed in (4, 4, 5))
    for left, right in zip(one[:4], same[:4], strict=True):
        assert torch.equal(left.nan_to_num(-99.0), right.nan_to_num(-99.0))
    assert not torch.equal(one.target, other.target)


@pytest.mark.parametrize("name", TARGETS)
def test_a_table_holds_what_it_should(name):
    tables = draw(13, SIZE, Draws(1), part=4, targets=[name])
    assert tables.values.shape == (13, 154, 5)
    known = tables.values[~tables.values.isnan()]
    assert known.abs().max() <= 1e4
    context = tables.target[:, : tables.context]
    assert (context >= 0).all()
    assert ((context.amax(1) + 1) == tables.classes).all()
    assert tables.classes.max() <= CLASSES
    assert (tables.target < tables.classes[:, None]).all()
    for table, category in zip(tables.values, tables.is_category, strict=True):
        for column in table.T[category]:
            assert len(column[~column.isnan()].unique()) <= LEVELS


@pytest.mark.parametrize("name", TARGETS)
def test_there_is_something_to_learn(name):
    """A forest that sees the context knows more of the asked rows than their most frequent class, on average over tables."""
    tables = draw(24, Shape(160, 80, 6), Draws(3), part=1, targets=[name])
    gains = []
    for values, target, classes in zip(tables.values, tables.target, tables.classes, strict=True):
        X, y = values.nan_to_num(0.0).numpy(), target.numpy()
        seen = np.flatnonzero(y[160:] >= 0) + 160
        if classes > 1 and len(seen):
            forest = RandomForestClassifier(20, random_state=0).fit(X[:160], y[:160])
            often = np.bincount(y[:160]).argmax()
            gains.append(forest.score(X[seen], y[seen]) - (y[seen] == often).mean())
    assert np.mean(gains) > 0.02


def test_classes_get_new_names():
    """Those of the context are the first; one that it does not have is -1. Two rows of one class have one class afterwards."""
    target = torch.tensor([[3, 7, 3, 5, 7, 9]])
    new, count = renamed(target, 4, Draws(0))
    assert count.tolist() == [3]
    assert sorted(new[0, [0, 1, 3]].tolist()) == [0, 1, 2]
    assert new[0, 0] == new[0, 2]
    assert new[0, 1] == new[0, 4]
    assert new[0, 5] == -1


def uniform(count=5, rows=97, columns=6, levels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (count, rows, columns), generator=generator).float()


NOTHING = Graph(torch.zeros(1), torch.zeros(1), None)


@pytest.mark.parametrize("target", [by_rules, by_counts])
def test_equal_rows_have_equal_classes(target):
    for seed in range(8):
        x = uniform(seed=seed)
        twice = torch.cat((x, x), dim=1)
        classes = target(twice, NOTHING, 3, Draws(seed))
        assert torch.equal(classes[:, :97], classes[:, 97:])


def test_rules_are_conjunctions():
    """A tree finds them exactly; a line does not."""
    tree, line = [], []
    for seed in range(12):
        x = uniform(1, 300, 6, seed=seed)
        y = by_rules(x, NOTHING, 2, Draws(seed))[0].numpy()
        if 0.1 < y.mean() < 0.9:
            X = np.concatenate([x[0].numpy() == level for level in range(3)], axis=1)
            tree.append(DecisionTreeClassifier(random_state=0).fit(x[0].numpy(), y).score(x[0].numpy(), y))
            line.append(LogisticRegression().fit(X, y).score(X, y))
    assert len(tree) > 3
    assert min(tree) == 1.0
    assert min(line) < 1.0


def test_of_products_no_column_says_anything_by_itself():
    x = torch.randn(6, 4000, 2, generator=torch.Generator().manual_seed(0))
    found = 0
    for seed in range(20):
        draws = Draws(seed)
        y = by_products(x, NOTHING, 2, draws)
        product = (x[..., 0] * x[..., 1]).sign()
        for table in range(6):
            alone = [abs(np.corrcoef(x[table, :, column], y[table])[0, 1]) for column in range(2)]
            both = abs(np.corrcoef(product[table], y[table])[0, 1])
            if both > 0.5:
                found += 1
                assert max(alone) < 0.1
    assert found > 5


def test_a_tree_beside_a_loop():
    """One tree of depth 1: rows are on one of two sides of a value of one column."""
    for seed in range(40):
        x = uniform(1, 50, 3, levels=9, seed=seed)
        y = by_trees(x, NOTHING, 2, Draws(seed))[0]
        parts = [len(set(y[x[0, :, column] == level].tolist())) for column in range(3) for level in range(9)]
        assert max(parts) <= 2
    # Without noise equal rows are of one class.
    x = torch.cat((uniform(3, 40), uniform(3, 40)), dim=1)
    draws = Draws(0)
    scores = torch.cat((x[..., :1], -x[..., :1]), dim=2)
    draws.uniform = lambda *size: torch.full(size, 0.99)  # no table is noisy
    classes = classes_of(scores, 2, draws)
    assert torch.equal(classes[:, :40], classes[:, 40:])


def test_rows_of_a_group_have_its_class():
    groups = torch.randint(7, (3, 50), generator=torch.Generator().manual_seed(0))
    y = by_group(torch.zeros(3, 50, 2), Graph(torch.zeros(1), torch.zeros(1), groups), 3, Draws(0))
    for table in range(3):
        for group in range(7):
            assert len(y[table][groups[table] == group].unique()) <= 1


def test_half_of_the_tables_by_groups_have_as_many_as_classes(monkeypatch):
    groups, classes = [], []

    def nodes_seen(*args):
        groups.append(args[-1])
        return nodes(*args)

    def by_group_seen(x, graph, kinds, draws):
        classes.append(kinds)
        return by_group(x, graph, kinds, draws)

    monkeypatch.setattr(prior, "nodes", nodes_seen)
    monkeypatch.setattr(prior, "by_group", by_group_seen)
    monkeypatch.setitem(TARGETS, "group", (by_group_seen, 1.0))
    draw(400, Shape(7, 5, 2), Draws(0), part=1, targets=["group"])
    alike = sum(one == other for one, other in zip(groups, classes, strict=True))
    # A twentieth of the others have as many by chance.
    assert 0.44 < alike / 400 < 0.61
    assert all(2 <= one <= prior.MOST_GROUPS for one in groups)


def test_ways_of_measuring():
    draws, x = Draws(0), torch.randn(4, 60, 3, generator=torch.Generator().manual_seed(0))
    ranks = ranks_of(x)
    assert (skewed(x, ranks, draws) > 0).all()
    assert torch.equal(powered(x, ranks, draws).sign(), x.sign())
    assert (floored(x, ranks, draws) >= x).all()
    assert torch.equal(ranked(x, ranks, draws), ranks)
    count = counted(x, ranks, draws)
    assert torch.equal(count, count.round())
    assert (count >= 0).all()
    values, is_category = measured(x, draws)
    assert values.shape == x.shape
    assert is_category.shape == (4, 3)
    assert torch.isfinite(values).all()


def test_every_node_has_an_input_and_every_activation_is_finite():
    w = weights(9, 5, 11, Draws(0))
    assert (w != 0).any(1).all()
    x = torch.linspace(-9, 9, 50)[None, :, None].expand(2, 50, 4)
    assert all(torch.isfinite(activation(x)).all() for activation in ACTIVATIONS)
    for seed in range(6):
        graph = nodes(3, 40, 7, Draws(seed))
        assert graph.seen.shape == (3, 40, 7)
        assert graph.hidden.shape[2] >= 12
        assert torch.isfinite(graph.seen).all()
    assert torch.equal(standardised(torch.ones(1, 5, 2)), torch.zeros(1, 5, 2))


def test_shapes_lie_in_the_range():
    draws = Draws(0)
    sizes = [shape(draws) for _ in range(500)]
    assert all(30 <= size.context <= 600 and 1 <= size.columns <= 50 and size.asked >= 48 for size in sizes)
    assert min(size.columns for size in sizes) <= 2
    assert max(size.columns for size in sizes) >= 45


def test_a_kind_that_is_not_there_is_named():
    with pytest.raises(InvalidArgument, match="targets"):
        draw(2, SIZE, Draws(0), targets=["spirals"])
