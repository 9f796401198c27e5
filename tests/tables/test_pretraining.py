"""Training on synthetic tables: the stream, its loss beside a loop, that nothing is left behind; and one table said in several ways."""

import itertools
import math

import pytest
import torch

from heedful import InvalidArgument
from heedful.tables._draws import Draws
from heedful.tables._variants import Variants
from heedful.tables.in_context import InContextNetwork
from heedful.tables.pretraining import SyntheticTables, losses, pretrain
from heedful.tables.prior import TARGETS, Shape, Synthetic, draw

SMALL = {"embed_dim": 8, "num_heads": 2, "layers": 1}


def little(draws):
    return Shape(draws.common.randint(20, 40), 13, draws.common.randint(1, 5))


def batches(**options):
    return list(SyntheticTables(3, 2_000, size=little, **options))


def same(one, other):
    parts = zip(one, other, strict=True)
    return all(
        torch.equal(a.values.nan_to_num(9.0), b.values.nan_to_num(9.0)) and torch.equal(a.target, b.target)
        if a.values.shape == b.values.shape
        else False
        for a, b in parts
    )


def test_seed_and_epoch_decide_the_tables():
    first = batches(seed=1)
    assert len(first) == 3
    assert same(first, batches(seed=1))
    assert not same(first, batches(seed=2))
    stream = SyntheticTables(3, 2_000, size=little, seed=1)
    stream.set_epoch(1)
    assert not same(first, list(stream))


def test_first_epochs_have_small_tables():
    wide = {"size": lambda draws: Shape(400, 200, 40), "steps": 1, "cells": 40_000, "easy": 1}
    easy, later = (next(iter(SyntheticTables(epoch=epoch, **wide))) for epoch in (0, 1))
    assert easy.context == 130
    assert easy.values.shape[2] == 1 + 40 % 12
    assert (later.context, later.values.shape[2]) == (400, 40)


def test_other_processes_draw_the_same_tables():
    assert same(batches(seed=1), batches(seed=1, workers=2))


def test_two_columns_count_as_one_where_they_share_a_vector():
    wide = {"size": lambda draws: Shape(40, 20, 13), "steps": 1, "cells": 12_000}
    alone, paired, narrow = (
        next(iter(SyntheticTables(**wide, paired=paired))).values.shape for paired in (None, 12, 13)
    )
    assert alone == narrow == (12_000 // (60 * 14), 60, 13)
    assert paired == (12_000 // (60 * 8), 60, 13)


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"steps": 1, "cells": 0}, {"steps": 1, "easy": -1}, {"steps": 1, "workers": -1}]
)
def test_streams_refuse_bad_numbers(bad):
    with pytest.raises(InvalidArgument):
        SyntheticTables(**bad)


def test_the_loss_is_of_rows_whose_class_the_context_has():
    torch.manual_seed(0)
    made = InContextNetwork(3, **SMALL).double().eval()
    with torch.no_grad():
        for part in made.parameters():
            part.add_(0.2 * torch.randn_like(part))
    values = torch.randn(3, 11, 2, dtype=torch.float64)
    target = torch.randint(2, (3, 11))
    target[:, :2] = torch.arange(2)
    target[0, 8], target[1, :] = -1, 0  # a class that is new, and a table of one class
    tables = Synthetic(values, torch.zeros(3, 2, dtype=torch.bool), target, torch.tensor([2, 1, 2]), 7)
    torch.manual_seed(5)
    each, counts = losses(made, tables)
    torch.manual_seed(5)
    logs = made(values, target[:, :7], tables.classes, tables.is_category)
    for table, row in itertools.product(range(3), range(4)):
        asked = int(target[table, 7 + row])
        counted = asked >= 0 and table != 1
        assert bool(counts[table, row]) == counted
        assert each[table, row] == (-logs[table, row, asked] if counted else 0.0)


def test_training_learns_and_leaves_the_network_as_it_was_made(tmp_path):
    torch.manual_seed(0)
    network = InContextNetwork(10, **SMALL)
    before = {name: part.clone() for name, part in network.state_dict().items()}
    seen = []
    training = pretrain(
        network, epochs=2, steps=3, cells=3_000, lr=3e-3, average=0.5, held_out=2, size=little, progress=lambda *at: seen.append(at),
        checkpoint=tmp_path / "at",
    )  # fmt: skip
    assert len(training.epochs) == 2
    assert all(math.isfinite(epoch.loss) for epoch in training.epochs)
    assert network.state_dict().keys() == before.keys()
    assert any(not torch.equal(part, before[name]) for name, part in network.state_dict().items())
    assert not any("_first" in vars(module) or "_evolve" in vars(module) for module in network.modules())
    assert seen
    with pytest.raises(InvalidArgument, match="easy"):
        pretrain(network, easy=1.5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_training_goes_on_to_the_same_weights(workers, tmp_path):
    def trained(name, stop=None):
        torch.manual_seed(3)
        network = InContextNetwork(10, **SMALL, paired=3)

        def progress(done, total, text):
            if done == stop:
                raise KeyboardInterrupt

        training = pretrain(
            network, epochs=3, steps=2, cells=2_000, average=0.5, held_out=1, size=little, workers=workers, progress=progress, checkpoint=tmp_path / name,
        )  # fmt: skip
        return network.state_dict(), training.resumed

    whole, resumed = trained("whole")
    assert resumed == 0
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", stop=2)
    parts, resumed = trained("stopped")
    assert resumed == 1
    assert all(torch.equal(part, whole[name]) for name, part in parts.items())


def test_a_table_said_in_other_words():
    variants = Variants.draw(5, [0, 4, 0], 3, 16, seed=3)
    values = torch.tensor([[0.5, 3.0, -1.0], [math.nan, 0.0, 2.0], [7.0, math.nan, 0.0]])
    cells = variants.cells(values)
    assert all(sorted(columns.tolist()) == [0, 1, 2] for columns in variants.columns)
    assert len({tuple(columns.tolist()) for columns in variants.columns}) > 1
    for which, row, place in itertools.product(range(5), range(3), range(3)):
        column = int(variants.columns[which, place])
        wanted = values[row, column]
        if column == 1 and not wanted.isnan():
            wanted = variants.codes[which, place, int(wanted)]
        assert torch.equal(cells[which, row, place].nan_to_num(99.0), wanted.nan_to_num(99.0))
    assert torch.equal(variants.is_category, variants.columns == 1)
    for codes in variants.codes[variants.is_category]:
        assert sorted(codes[:4].tolist()) == [0, 1, 2, 3]
    assert all(sorted(names.tolist()) == [0, 1, 2] for names in variants.names)


def test_answers_are_the_mean_over_all_ways(monkeypatch):
    torch.manual_seed(1)
    made = InContextNetwork(4, **SMALL).double().eval()
    with torch.no_grad():
        for part in made.parameters():
            part.add_(0.2 * torch.randn_like(part))
    variants = Variants.draw(3, [0, 4], 3, made.identity, seed=0).to(torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(19, 2, dtype=torch.float64, generator=generator)
    values[:, 1] = torch.randint(4, (19,), generator=generator)
    target = torch.arange(13) % 3
    context = variants.remember(made, values[:13], target)
    found = variants.answer(made, values[13:], context).exp()
    cells, wanted = variants.cells(values), torch.zeros(6, 3, dtype=torch.float64)
    for which in range(3):
        one = made(
            cells[which][None], variants.names[which][target][None], torch.tensor([3]),
            variants.is_category[which][None], variants.identity[which][None],
        ).exp()[0]  # fmt: skip
        for name in range(3):
            wanted[:, name] += one[:, variants.names[which, name]] / 3
    assert (found.mean(0) - wanted).abs().max() < 1e-12
    monkeypatch.setattr("heedful.tables._variants.AT_ONCE", 1)
    assert (variants.answer(made, values[13:], context).exp() - found).abs().max() < 1e-12
    parts = [
        part.answer(made, values[13:], part.remember(made, values[:13], target)).exp() for part in variants.split(2)
    ]
    assert (torch.cat(parts) - found).abs().max() < 1e-12


def test_each_way_has_columns_of_its_own():
    variants = Variants.draw(6, [0, 4, 0, 2, 0, 0, 3], 2, 5, seed=1, most=3)
    assert variants.columns.shape == (6, 3)
    assert len({tuple(row) for row in variants.columns.tolist()}) > 1
    values = torch.tensor([[0.0, 3.0, 2.0, 1.0, 4.0, 5.0, 2.0]])
    cells = variants.cells(values)
    for which, place in itertools.product(range(6), range(3)):
        column = int(variants.columns[which, place])
        is_level = column in (1, 3, 6)
        assert bool(variants.is_category[which, place]) == is_level
        wanted = variants.codes[which, place, int(values[0, column])] if is_level else values[0, column]
        assert cells[which, 0, place] == wanted


def test_numbers_are_shares_of_two_steps():
    made = InContextNetwork(41, numbers=True, **SMALL).double()
    known = torch.tensor([[1.0, 2.0, 4.0, 9.0], [0.0, 0.5, 0.1, 0.2]], dtype=torch.float64)
    asked = torch.tensor([[3.3, -6.0, 9.9], [0.21, 0.7, 0.1]], dtype=torch.float64)
    shares = made.shares(asked, known)
    assert (shares.sum(-1) - 1).abs().max() < 1e-12
    assert ((shares > 0).sum(-1) <= 2).all()
    assert (made.means(shares.log(), known) - asked).abs().max() < 1e-9
    # Beyond five deviations there is no step.
    far = made.shares(torch.full((2, 1), 1e30, dtype=torch.float64), known)
    assert (far[..., -1] == 1).all()
    # Where all targets are one number, so are the answers.
    alike = torch.full((1, 5), 7.0, dtype=torch.float64)
    assert made.means(torch.full((1, 2, 41), -math.log(41), dtype=torch.float64), alike).allclose(alike[:, :2])


def test_the_loss_of_numbers_and_their_training():
    torch.manual_seed(0)
    made = InContextNetwork(21, numbers=True, **SMALL)
    tables = next(iter(SyntheticTables(1, 2_000, size=little, numbers=True)))
    assert tables.target.is_floating_point()
    known, asked = tables.target[:, : tables.context], tables.target[:, tables.context :]
    with torch.no_grad():
        torch.manual_seed(3)
        each, counts = losses(made, tables)
        torch.manual_seed(3)
        logs = made(tables.values, known, tables.classes, tables.is_category)
    assert counts.all()
    for table, row in itertools.product(range(2), range(5)):
        mean, spread = known[table].mean(), known[table].std(correction=0)
        place = float(((asked[table, row] - mean) / spread).clamp(-5, 5) + 5) * 2
        low = min(int(place), 19)
        wanted = -(1 - place + low) * logs[table, row, low] - (place - low) * logs[table, row, low + 1]
        assert float(each[table, row]) == pytest.approx(float(wanted), abs=1e-4)
    training = pretrain(made, epochs=1, steps=3, cells=2_000, held_out=1, size=little)
    assert math.isfinite(training.epochs[0].held_out["loss"])


@pytest.mark.parametrize("kind", TARGETS)
def test_numbers_of_every_kind(kind):
    tables = draw(9, Shape(97, 31, 4), Draws(5), part=2, targets=[kind], numbers=True)
    assert tables.target.isfinite().all()
    assert tables.target.mean(1).abs().max() < 1e-2  # one number for all rows is its own mean but for rounding
    assert len(tables.target.unique()) > 9
