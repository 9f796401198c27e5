"""The network of contexts: what an answer may depend on, its cells beside a loop, and that it learns what synthetic tables have in common."""

import math

import pytest
import torch

from heedful import InvalidArgument
from heedful.tables.in_context import DOUBT, InContextNetwork
from heedful.tables.prior import Draws, Shape, draw


def network(**options):
    torch.manual_seed(0)
    made = InContextNetwork(5, **{"embed_dim": 16, "num_heads": 2, "layers": 2} | options).double().eval()
    with torch.no_grad():
        for part in made.parameters():
            part.add_(0.2 * torch.randn_like(part))
    return made


def table(seed=0, tables=3, context=17, asked=7, columns=4):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tables, context + asked, columns, dtype=torch.float64, generator=generator)
    values[:, :, 1] = values[:, :, 1].round()
    values[torch.rand(values.shape, generator=generator) < 0.1] = math.nan
    target = torch.randint(3, (tables, context), generator=generator)
    target[:, :3] = torch.arange(3)
    identity = torch.randn(tables, columns, 16, dtype=torch.float64, generator=generator)
    return values, target, torch.full((tables,), 3), torch.arange(columns).expand(tables, -1) == 1, identity


def test_asked_rows_do_not_see_one_another():
    made, (values, target, *rest) = network(), table()
    whole = made(values, target, *rest)
    context = made.remember(values[:, :17], target, *rest)
    for row in range(7):
        alone = made.answer(values[:, 17 + row : 18 + row], context)
        assert (alone[:, 0] - whole[:, row]).exp().sub(1).abs()[..., :3].max() < 1e-10
    assert (whole[..., 3:] == -torch.inf).all()
    assert (whole.exp().sum(-1) - 1).abs().max() < 1e-12


def test_the_order_of_rows_and_of_columns_does_not_matter():
    made, (values, target, classes, is_category, identity) = network(), table()
    wanted = made(values, target, classes, is_category, identity)[..., :3]
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    moved = torch.cat((values[:, :17][:, order], values[:, 17:]), dim=1)
    assert (made(moved, target[:, order], classes, is_category, identity)[..., :3] - wanted).abs().max() < 1e-10
    turn = torch.tensor([2, 0, 3, 1])
    turned = made(values[..., turn], target, classes, is_category[:, turn], identity[:, turn])
    assert (turned[..., :3] - wanted).abs().max() < 1e-10
    # With other identities it is another answer.
    assert (made(values, target, classes, is_category, identity.flip(1))[..., :3] - wanted).abs().max() > 1e-4


def test_units_do_not_matter():
    """Columns in other units, and shifted, are the same columns."""
    made, (values, target, *rest) = network(), table()
    other = values * torch.tensor([2.0, 3.0, 1e-3, 1e4], dtype=torch.float64) + 5
    assert (made(values, target, *rest)[..., :3] - made(other, target, *rest)[..., :3]).abs().max() < 1e-5


@pytest.mark.parametrize(("ranks", "waves"), [(True, True), (False, True), (True, False), (False, False)])
def test_cells_beside_a_loop(ranks, waves):
    made, (values, target, classes, is_category, identity) = network(ranks=ranks, waves=waves), table()
    context = made.remember(values[:, :17], target, classes, is_category, identity)
    found = made._inputs(values[:, 17:], context)
    for b in range(3):
        for j in range(4):
            column = [v for v in values[b, :17, j].tolist() if not math.isnan(v)]
            mean = sum(column) / len(column)
            spread = math.sqrt(sum((v - mean) ** 2 for v in column) / len(column))
            for i in range(7):
                v = values[b, 17 + i, j].item()
                parts = [0.0] * (found.shape[-1] - 2)
                if not math.isnan(v):
                    number = max(-6, min(6, (v - mean) / (spread + 1e-8)))
                    rank = (sum(u < v for u in column) + sum(u <= v for u in column)) / (2 * len(column))
                    parts = [number, (rank - 0.5) * math.sqrt(12)][: 1 + ranks]
                    parts += (
                        [f(w * p) for p in tuple(parts) for w in (1, 2, 4) for f in (math.sin, math.cos)]
                        if waves
                        else []
                    )
                wanted = [*parts, float(math.isnan(v)), float(j == 1)]
                assert found[b, i, j].tolist() == pytest.approx(wanted, abs=1e-7)


def test_votes_beside_their_formula():
    made, (values, target, *rest) = network(), table()
    context = made.remember(values[:, :17], target, *rest)
    seen = []
    handle = made.norm.register_forward_hook(lambda module, inputs, out: seen.append(out))
    wanted = made.answer(values[:, 17:], context)
    handle.remove()
    logits = made.head(seen[0])
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        q, k = made.query(seen[0])[..., part], made.key(context.rows)[..., part]
        shares = (q @ k.mT / math.sqrt(8)).softmax(-1)
        votes = torch.stack([(shares * (target == c)[:, None]).sum(-1) for c in range(5)], dim=-1)
        logits = logits + made.weight[head] * (votes + DOUBT).log()
    assert (logits[..., :3].log_softmax(-1) - wanted[..., :3]).abs().max() < 1e-6
    shares = made.attention(values[:, 17:], context)
    assert shares.shape == (3, 7, 17)
    assert (shares.sum(-1) - 1).abs().max() < 1e-10


@pytest.mark.parametrize("columns", [4, 5])
def test_neighbours_share_a_vector(columns):
    """Beside a loop over pairs; the last one of an odd number is alone. In narrow tables each is alone."""
    made, (values, target, classes, is_category, identity) = network(paired=3), table(columns=columns)
    context = made._known(values[:, :17], target, classes, is_category, identity)
    inputs = made._inputs(values, context)
    found = made._cells(values, context, 17)
    assert found.shape[2] == 1 + (columns + 1) // 2
    narrow = made._cells(values[..., :3], made._known(values[:, :17, :3], target, classes, is_category[:, :3], identity[:, :3]), 17)  # fmt: skip
    assert narrow.shape[2] == 4

    def vector(cells, names):
        absent = 2 - len(cells)
        cells = torch.cat([*cells, *[torch.zeros_like(cells[0])] * absent], dim=-1)
        names = torch.cat([*names, *[torch.zeros_like(names[0])] * absent], dim=-1)
        return made.cell(cells) + made.column(names)[:, None]

    for place in range((columns + 1) // 2):
        both = range(2 * place, min(columns, 2 * place + 2))
        wanted = vector([inputs[:, :, j] for j in both], [identity[:, j] for j in both])
        assert (found[:, :, 1 + place] - wanted).abs().max() < 1e-12
    for j in range(3):
        assert (narrow[:, :, 1 + j] - vector([inputs[:, :, j]], [identity[:, j]])).abs().max() < 1e-12
    # Pairs may stand in any order.
    wanted = made(values, target, classes, is_category, identity)[..., :3]
    turn = torch.tensor([2, 3, 0, 1, *range(4, columns)])
    turned = made(values[..., turn], target, classes, is_category[:, turn], identity[:, turn])
    assert (turned[..., :3] - wanted).abs().max() < 1e-10


def test_a_new_network_knows_nothing_of_rows_but_votes():
    """Layers begin as what changes nothing, so no cell has met another row."""
    torch.manual_seed(0)
    made = InContextNetwork(5, embed_dim=16, num_heads=2, layers=2, votes=False).double().eval()
    values, target, *rest = table()
    one = made(values, target, *rest)
    other = made(values, target.flip(1), *rest)
    assert torch.equal(one, other)
    with pytest.raises(InvalidArgument, match="no votes"):
        made.attention(values[:, 17:], made.remember(values[:, :17], target, *rest))


def test_it_learns_what_tables_have_in_common():
    """A minute network, a few steps: better on new tables than the shares of the classes."""
    torch.manual_seed(0)
    made = InContextNetwork(10, embed_dim=32, num_heads=2, layers=2)
    optimizer = torch.optim.Adam(made.parameters(), 3e-3)
    draws = Draws(0)

    def loss(tables):
        logs = made(tables.values, tables.target[:, :60], tables.classes, tables.is_category)
        asked = tables.target[:, 60:]
        known = (asked >= 0) & (tables.classes > 1)[:, None]
        return -logs.gather(2, asked.clamp_min(0)[..., None])[..., 0][known].mean()

    for _ in range(120):
        optimizer.zero_grad()
        loss(draw(8, Shape(60, 20, 2), draws, part=2, targets=["line"])).backward()
        optimizer.step()
    tables = draw(60, Shape(60, 40, 2), Draws(99), part=3, targets=["line"])
    shares = torch.nn.functional.one_hot(tables.target[:, :60], 10).float().mean(1).clamp_min(0.01).log()
    asked = tables.target[:, 60:]
    known = (asked >= 0) & (tables.classes > 1)[:, None]
    chance = -shares[:, None].expand(-1, 40, -1).gather(2, asked.clamp_min(0)[..., None])[..., 0][known].mean()
    with torch.no_grad():
        assert loss(tables) < chance - 0.1


def test_wrong_shapes_are_named():
    made, (values, target, *rest) = network(), table()
    with pytest.raises(InvalidArgument, match="must be"):
        made.remember(values[:, :16], target, *rest)


def test_numbers_are_answered_by_rows_alone():
    """Asked rows do not see one another, the order of rows does not matter, and neither do units of the target."""
    torch.manual_seed(0)
    made = InContextNetwork(11, embed_dim=16, num_heads=2, layers=2, numbers=True).double().eval()
    with torch.no_grad():
        for part in made.parameters():
            part.add_(0.2 * torch.randn_like(part))
    values, _, _, is_category, identity = table()
    target, none = torch.randn(3, 17, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    whole = made(values, target, none, is_category, identity)
    context = made.remember(values[:, :17], target, none, is_category, identity)
    for row in range(7):
        assert (made.answer(values[:, 17 + row : 18 + row], context)[:, 0] - whole[:, row]).abs().max() < 1e-10
    order = torch.randperm(17)
    moved = torch.cat((values[:, :17][:, order], values[:, 17:]), dim=1)
    assert (made(moved, target[:, order], none, is_category, identity) - whole).abs().max() < 1e-10
    other = made(values, 1e3 * target - 4, none, is_category, identity)
    assert (other - whole).abs().max() < 1e-8
    assert (made.means(other, 1e3 * target - 4) - 1e3 * made.means(whole, target) + 4).abs().max() < 1e-6
