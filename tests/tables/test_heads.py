"""A head trained on drawn clouds: what it learns, what it leaves alone, and a block that carries data to it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from heedful import InvalidArgument
from heedful.tables import pretrain_head

CENTRES = [[-5.0, 0.0], [5.0, 0.0], [0.0, 5.0]]


def head():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3))


@pytest.mark.parametrize("angle", [0.0, 90.0, -37.0])
def test_a_head_knows_the_places_of_its_classes(angle):
    trained = head().train()
    state = torch.random.get_rng_state()
    assert pretrain_head(trained, CENTRES, angle=angle) > 0.95
    assert torch.equal(torch.random.get_rng_state(), state)
    assert trained.training
    assert not any(part.requires_grad for part in trained.parameters())
    turn = torch.deg2rad(torch.tensor(angle))
    matrix = torch.stack((torch.stack((turn.cos(), turn.sin())), torch.stack((-turn.sin(), turn.cos()))))
    places = torch.tensor(CENTRES) @ matrix
    assert trained.eval()(places).argmax(1).tolist() == [0, 1, 2]


def test_what_comes_before_carries_the_data_to_a_frozen_head():
    frozen = head()
    pretrain_head(frozen, CENTRES)
    before = {name: part.clone() for name, part in frozen.state_dict().items()}
    torch.manual_seed(1)
    y = torch.arange(150) % 3
    x = torch.eye(3)[y] @ torch.tensor([[0.0, -1.0], [0.0, 1.0], [1.0, 0.0]]) + 0.2 * torch.randn(150, 2)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2), frozen)
    optimizer = torch.optim.Adam([part for part in model.parameters() if part.requires_grad], lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (model.eval()(x).argmax(1) == y).double().mean() > 0.9
    assert all(torch.equal(part, before[name]) for name, part in frozen.state_dict().items())


def test_the_same_seed_gives_the_same_head_and_freezing_is_a_choice():
    first, second = head(), head()
    pretrain_head(first, CENTRES, random_state=3)
    pretrain_head(second, CENTRES, random_state=3, freeze=False)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert all(part.requires_grad for part in second.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centres": [[0.0, 0.0]]}, "two classes or more"),
        ({"centres": [[0.0, 1.0], [0.0, 1.0]]}, "the same"),
        ({"centres": [[1.0], [2.0]], "angle": 3.0}, "have one"),
        ({"centres": [[0.0, 1.0], [1.0, 0.0]]}, "logits of shape"),
        ({"centres": CENTRES, "n": 3}, "n must be"),
        ({"centres": CENTRES, "covariance": 0.0}, "covariance must be"),
        ({"centres": CENTRES, "random_state": "x"}, "random_state must be"),
    ],
)
def test_heads_that_cannot_be_trained(options, message):
    with pytest.raises(InvalidArgument, match=message):
        pretrain_head(head(), **options)
    with pytest.raises(InvalidArgument, match="no parameters"):
        pretrain_head(nn.ReLU(), CENTRES)
    with pytest.raises(InvalidArgument, match=r"centres must be numbers \(classes, width\).*got 'circle'"):
        pretrain_head(head(), "circle")
