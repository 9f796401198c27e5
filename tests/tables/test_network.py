"""The network of rows beside its equations in float64, its symmetries, and what hidden cells may not do."""

import math

import pytest
import torch

from heedful.tables import Rows, TableNetwork
from heedful.tables._masking import Masking, feature_loss, target_losses, tradeoff_at

LEVELS = (0, 3, 0, 2, 0)
CLASSES = 3


def drawn(n=11, batch=1, seed=0, levels=LEVELS, outputs=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, n, len(levels), generator=generator, dtype=torch.float64)
    for place, count in enumerate(levels):
        if count:
            values[..., place] = torch.randint(count, (batch, n), generator=generator).double()
    missing = torch.rand(batch, n, len(levels), generator=generator) < 0.2
    target = torch.randint(max(1, outputs), (batch, n), generator=generator)
    target = target if outputs else torch.randn(batch, n, generator=generator, dtype=torch.float64)
    return Rows(values, missing, target, torch.rand(batch, n, generator=generator) < 0.4)


def network(outputs=CLASSES, seed=0, **options):
    torch.manual_seed(seed)
    settings = {"embed_dim": 6, "num_heads": 2, "layers": 2, "dropout": 0.0} | options
    return TableNetwork(LEVELS, outputs, **settings).double().eval()


FORMS = {
    "published": {},
    "authors": {"norm_kv": False, "scale": "width", "eps": 1e-12},
    "latent": {"row_encoder": "latent", "row_tokens": 2},
    "rows alone": {
        "row_encoder": "latent", "row_tokens": 2, "between_columns": False, "numbers": "periodic", "linear": True, "residual": "identity",
    },
}  # fmt: skip
FORMS["votes"] = FORMS["rows alone"] | {"votes": True}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def by_hand(model, rows):
    """Loops over cells and the equations of the sheet, for `row_encoder="flatten"`, from the model's own numbers."""
    state = dict(model.state_dict())
    e, order = model.embed_dim, [0, 2, 4, 1, 3]
    n = rows.values.shape[1]
    cells = torch.zeros(n, 1 + len(LEVELS), e, dtype=torch.float64)
    starts = {1: 0, 3: 4}
    for i in range(n):
        code = 0 if rows.hidden[0, i] else 1 + rows.target[0, i]
        cells[i, 0] = state["target_embedding.table.weight"][code]
        for at, place in enumerate(order):
            gone = bool(rows.missing[0, i, place])
            if LEVELS[place]:
                row = starts[place] + (0 if gone else 1 + int(rows.values[0, i, place]))
                cells[i, 1 + at] = state["embedding.table.weight"][row]
            else:
                inputs = torch.tensor([0.0 if gone else rows.values[0, i, place], float(gone)], dtype=torch.float64)
                cells[i, 1 + at] = inputs @ state["embedding.weight"][at] + state["embedding.bias"][at]
        for at in range(1 + len(LEVELS)):
            kind = [1, 0, 0, 0, 1, 1][at]
            cells[i, at] += state["index"][at] + state["kind"][kind]
    for layer in range(model.layers):
        flat = cells.reshape(n, -1)
        cells = block(state, f"rows.{layer}.block.", flat, model).reshape(n, -1, e)
        cells = torch.stack([block(state, f"columns.{layer}.block.", cells[i], model) for i in range(n)])
    answers = cells[:, 0] @ state["target_head.weight"].T + state["target_head.bias"]
    features, at = [], 0
    for column, place in enumerate(order):
        size = LEVELS[place] or 1
        weight = state["feature_head.weight"][at : at + size]
        features.append(cells[:, 1 + column] @ weight.T + state["feature_head.bias"][at : at + size])
        at += size
    return answers, torch.cat(features, dim=1)


def block(state, name, items, model):
    def part(which):
        return state[f"{name}{which}.weight"], state[f"{name}{which}.bias"]

    def affine(which, x):
        weight, bias = part(which)
        return x @ weight.T + bias

    def norm(which, x):
        weight, bias = part(which)
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.var(-1, unbiased=False, keepdim=True) + model.eps).sqrt() * weight + bias

    width = items.shape[-1]
    heads = math.gcd(2, width)
    source = norm("norm1", items) if model.norm_kv else items
    q, k, v = affine("query", norm("norm1", items)), affine("key", source), affine("value", source)
    size = width // heads
    tau = math.sqrt(width) if model.scale == "width" else math.sqrt(size)
    parts = []
    for head in range(heads):
        part_of = slice(head * size, (head + 1) * size)
        scores = q[:, part_of] @ k[:, part_of].T / tau
        parts.append(scores.softmax(-1) @ v[:, part_of])
    mixed = affine("skip", items) + affine("out", torch.cat(parts, dim=-1))
    return mixed + affine("linear2", torch.nn.functional.gelu(affine("linear1", norm("norm2", mixed))))


@pytest.mark.parametrize("form", [FORMS["published"], FORMS["authors"]], ids=["published", "authors"])
def test_the_network_is_its_equations(form):
    model, rows = network(**form), drawn()
    answers, features = by_hand(model, rows)
    out = model(rows)
    torch.testing.assert_close(out.target[0], answers, rtol=0, atol=1e-10)
    torch.testing.assert_close(out.features[0], features, rtol=0, atol=1e-10)
    other = network()
    other.load_state_dict(model.state_dict())
    assert form == {} or (other(rows).target - out.target).abs().max() > 1e-3


@every_form
def test_permuted_rows_give_permuted_answers(form):
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = network(**form).to(dtype)
        rows = drawn(17)
        rows = rows._replace(values=rows.values.to(dtype))
        out = model(rows)
        for seed in range(5):
            order = torch.randperm(17, generator=torch.Generator().manual_seed(seed))
            again = model(rows.take(order))
            assert (again.target - out.target[:, order]).abs().max() <= bound
            assert (again.features - out.features[:, order]).abs().max() <= bound


@every_form
def test_rows_that_come_twice_change_nothing(form):
    model, rows = network(**form), drawn()
    twice = Rows(*(torch.cat((part, part), dim=1) for part in rows))
    torch.testing.assert_close(model(twice).target[:, :11], model(rows).target, rtol=0, atol=1e-10)
    assert torch.isfinite(model(rows.take(torch.tensor([3]))).target).all()


@every_form
def test_rows_meet_only_between_rows(form):
    rows = drawn()
    moved = rows._replace(values=rows.values.clone(), missing=torch.zeros_like(rows.missing))
    plain = moved._replace(values=rows.values.clone())
    moved.values[0, 4, 0] += 1.0
    others = torch.arange(11) != 4
    apart = network(between_rows=False, **form)
    assert torch.equal(apart(moved).target[0, others], apart(plain).target[0, others])
    together = network(**form)
    assert (together(moved).target[0, others] - together(plain).target[0, others]).abs().min() > 0
    if together.votes:
        return
    for layer in together.rows:
        layer.block.value.weight.data.zero_()
        layer.block.value.bias.data.zero_()
    assert torch.equal(together(moved).target[0, others], together(plain).target[0, others])


@every_form
@pytest.mark.parametrize("garbage", [float("nan"), 1e30, -1.0])
def test_what_is_hidden_never_matters(form, garbage):
    model, rows = network(outputs=0, **form), drawn(outputs=0)
    filled = rows._replace(
        values=rows.values.masked_fill(rows.missing, garbage), target=rows.target.masked_fill(rows.hidden, garbage)
    )
    values, gradients = [], []
    for one in (rows, filled):
        out = model(one)
        model.zero_grad()
        (out.target.sum() + out.features.square().sum()).backward()
        values.append(out.target)
        gradients.append([part.grad.clone() for part in model.parameters() if part.grad is not None])
    assert torch.equal(*values)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@every_form
def test_stored_rows_answer_alike_whoever_else_is_asked(form):
    model, stored, asked = network(**form), drawn(13), drawn(7, seed=1)
    asked = asked._replace(hidden=torch.ones_like(asked.hidden))
    memory = model.remember(stored)
    answers = model(asked, memory=memory).target
    alone = torch.cat([model(asked.take(torch.tensor([i])), memory=memory).target for i in range(7)], dim=1)
    torch.testing.assert_close(alone, answers, rtol=0, atol=1e-12)
    # The same by one call, in which the asked rows are there and seen by none.
    both = Rows(*(torch.cat(parts, dim=1) for parts in zip(stored, asked, strict=True)))
    unseen = torch.arange(20)[None] >= 13
    torch.testing.assert_close(model(both, unseen).target[:, 13:], answers, rtol=0, atol=1e-12)
    weights = model.coefficients(asked, memory=memory, layer=0)
    assert weights.shape == (1, 2, 7, 13)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 7, dtype=torch.float64))


def test_tables_of_a_batch_are_apart():
    model, rows = network(**FORMS["rows alone"]), drawn(9, batch=3)
    hidden = torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.5
    together = model(rows, hidden).target
    for table in range(3):
        one = Rows(*(part[table : table + 1] for part in rows))
        torch.testing.assert_close(model(one, hidden[table : table + 1]).target[0], together[table], rtol=0, atol=1e-12)


def test_masks_are_drawn_as_they_should():
    torch.manual_seed(0)
    rows = drawn(200_000)
    masking = Masking(0.15, 0.5, 0.1, LEVELS, CLASSES)
    out = masking.draw(rows)
    there = ~rows.missing
    share = out.cells[there].double().mean()
    noised = out.cells & ~out.rows.missing
    assert abs(share - 0.15) < 0.002
    assert abs(noised.sum() / out.cells.sum() - 0.10) < 0.003
    assert not (out.cells & rows.missing).any()
    assert torch.equal(out.rows.missing, rows.missing | (out.cells & ~noised))
    unchanged = there & ~noised
    assert torch.equal(out.rows.values[unchanged], rows.values[unchanged])
    for place, count in enumerate(LEVELS):
        if count:
            assert set(out.rows.values[..., place][noised[..., place]].unique().tolist()) == set(range(count))
    drawn_targets = out.targets
    assert not (drawn_targets & rows.hidden).any()
    assert abs(drawn_targets[~rows.hidden].double().mean() - 0.5) < 0.005
    shown = drawn_targets & ~out.rows.hidden
    assert abs(shown.sum() / drawn_targets.sum() - 0.10) < 0.005
    every = Masking(0.15, 1.0, 0.1, LEVELS, CLASSES).draw(rows)
    assert every.rows.hidden.all()
    assert torch.equal(every.targets, ~rows.hidden)


def test_one_target_at_least_is_asked_for():
    rows = drawn(5)._replace(hidden=torch.tensor([[True, True, False, True, True]]))
    out = Masking(0.0, 1e-9, 0.0, LEVELS, CLASSES).draw(rows)
    assert out.targets.tolist() == [[False, False, True, False, False]]


def test_the_loss_is_a_mean_of_votes():
    """Six rows of four cells and a target, longhand."""
    levels = (0, 2, 0, 3)
    torch.manual_seed(1)
    model = TableNetwork(levels, 2, embed_dim=4, num_heads=2, layers=1, dropout=0.0).double()
    rows = drawn(6, levels=levels, outputs=2)
    cells = (torch.rand(1, 6, 4) < 0.5) & ~rows.missing
    out = model(rows)
    total, count = 0.0, 0
    features = out.features[0].tolist()
    for i in range(6):
        for at, (place, start) in enumerate(zip([0, 2, 1, 3], [0, 1, 2, 4], strict=True)):
            if not cells[0, i, place]:
                continue
            count += 1
            value = rows.values[0, i, place].item()
            if at < 2:
                total += (features[i][start] - value) ** 2
            else:
                logits = features[i][start : start + levels[place]]
                total += math.log(sum(math.exp(one) for one in logits)) - logits[int(value)]
    loss = feature_loss(out, rows, cells, model.order, levels)
    assert abs(loss.item() - total / count) < 1e-12
    logits = out.target[0].tolist()
    for i, value in enumerate(target_losses(out.target, rows.target)[0].tolist()):
        expected = math.log(sum(math.exp(one) for one in logits[i])) - logits[i][rows.target[0, i]]
        assert abs(value - expected) < 1e-12
    assert [tradeoff_at(0.5, "linear", step, 4) for step in (0, 2, 4, 9)] == [0.5, 0.25, 0.0, 0.0]
    assert tradeoff_at(0.5, "constant", 9, 4) == 0.5


def test_votes_are_those_of_near_rows_and_of_no_row_without_a_target():
    model, rows = network(**FORMS["votes"]), drawn(9)
    vectors = model(rows).row[0] @ model.vote.weight.T + model.vote.bias
    distances = torch.cdist(vectors, vectors).square()
    speaks = ~rows.hidden[0]
    weights = (-distances / 8).masked_fill(~speaks, -torch.inf).softmax(-1)
    labels = torch.nn.functional.one_hot(rows.target[0], CLASSES).double() * speaks[:, None]
    shares = 0.98 * labels.sum(0) / speaks.sum() + 0.02 / CLASSES
    said = (0.98 * weights @ labels + 0.02 * shares).log() - shares.log()
    plain = model.embedding.dense(rows.values, rows.missing)[0] @ model.linear_head.weight.T
    expected = model.target_head.bias + plain + model.gate.exp() * said
    torch.testing.assert_close(model(rows).target[0], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(model.coefficients(rows)[0, 0], weights, rtol=0, atol=1e-10)
    numbers, rows = network(outputs=0, **FORMS["votes"]), drawn(9, outputs=0)
    numbers.linear_head.weight.data.normal_()
    plain = (numbers.embedding.dense(rows.values, rows.missing)[0] @ numbers.linear_head.weight.T)[:, 0]
    weights = numbers.coefficients(rows)[0, 0]
    rest = torch.where(rows.hidden[0], 0.0, rows.target[0] - plain)
    own = (numbers(rows).row[0] @ numbers.target_head.weight.T + numbers.target_head.bias)[:, 0]
    expected = own + plain + weights @ rest
    torch.testing.assert_close(numbers(rows).target[0, :, 0], expected, rtol=0, atol=1e-10)
