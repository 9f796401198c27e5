"""LAMB, Lookahead, the flat part of the learning rate and clamped gradients, beside their formulas in numpy."""

import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from heedful import InvalidArgument, Unsupported
from heedful.bridges.optimizers import Lamb, Lookahead, MuonAdamW, new_optimizer, orthogonal
from heedful.bridges.record import Hyperparameters

SHAPES = {"matrix": (5, 3), "long": (7,), "zero": (11,), "number": ()}
STEPS = 20


def starts():
    rng = np.random.default_rng(0)
    found = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return found | {"long": 9 * found["long"], "zero": np.zeros(11)}  # beyond the largest norm, and without one


def gradients():
    rng = np.random.default_rng(1)
    drawn = [{name: rng.normal(size=shape) * 3 for name, shape in SHAPES.items()} for _ in range(STEPS)]
    drawn[0]["matrix"] = np.zeros((5, 3))  # an update without a norm
    return drawn


def reference(weight_decay, alpha=None, every=6, slow="initial", max_norm=10.0, lr=0.03):
    """Weights after each step."""
    weights, history = {name: start.copy() for name, start in starts().items()}, []
    mean, square = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    kept = {name: w.copy() for name, w in weights.items()} if slow == "initial" else None
    for step, gradient in enumerate(gradients(), start=1):
        for name, g in gradient.items():
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.999 * square[name] + 0.001 * g * g
            update = mean[name] / (np.sqrt(square[name]) + 1e-6) + weight_decay * weights[name]
            length, wanted = np.sqrt((update**2).sum()), min(np.sqrt((weights[name] ** 2).sum()), max_norm)
            ratio = wanted / length if wanted and length else 1.0
            weights[name] = weights[name] - lr * ratio * update
        if alpha is not None and step % every == 0:
            if kept is None:
                kept = {name: w.copy() for name, w in weights.items()}
            kept = {name: kept[name] + alpha * (weights[name] - kept[name]) for name in kept}
            weights = {name: w.copy() for name, w in kept.items()}
        history.append({name: w.copy() for name, w in weights.items()})
    return history


def parameters():
    return {name: nn.Parameter(torch.tensor(start)) for name, start in starts().items()}


def steps(optimizer, weights, drawn):
    """Weights after each step by these gradients."""
    history = []
    for gradient in drawn:
        for name, weight in weights.items():
            weight.grad = torch.tensor(gradient[name])
        optimizer.step()
        history.append({name: weight.detach().clone().numpy() for name, weight in weights.items()})
    return history


def assert_same(found, wanted, bound=1e-12):
    assert len(found) == len(wanted)
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for name in one:
            assert np.abs(one[name] - other[name]).max() <= bound, (step, name)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_step_by_step(weight_decay):
    weights = parameters()
    optimizer = Lamb(weights.values(), lr=0.03, weight_decay=weight_decay)
    found, wanted = steps(optimizer, weights, gradients()), reference(weight_decay)
    assert_same(found, wanted)
    assert np.linalg.norm(starts()["long"]) > 10
    free = reference(weight_decay, max_norm=math.inf)
    assert np.abs(free[-1]["long"] - wanted[-1]["long"]).max() > 1e-3


@pytest.mark.parametrize("slow", ["initial", "first-sync"])
def test_lookahead_around_lamb_step_by_step(slow):
    weights = parameters()
    optimizer = Lookahead(Lamb(weights.values(), lr=0.03, weight_decay=0.1), alpha=0.5, every=6, slow=slow)
    found, wanted = steps(optimizer, weights, gradients()), reference(0.1, 0.5, 6, slow)
    assert_same(found, wanted)
    alone = reference(0.1)
    assert_same(found[:5], alone[:5])
    moved = np.abs(found[5]["matrix"] - alone[5]["matrix"]).max()
    assert moved > 1e-3 if slow == "initial" else moved <= 1e-12, "the first synchronisation"
    assert np.abs(found[11]["matrix"] - alone[11]["matrix"]).max() > 1e-3


@pytest.mark.parametrize("slow", ["initial", "first-sync"])
@pytest.mark.parametrize("stop", [4, 6, 13])
def test_a_state_dict_goes_on(slow, stop):
    """Through a file that runs no code, into a new optimizer of the weights as they were then."""

    def made(weights):
        return Lookahead(Lamb(weights.values(), lr=0.03), slow=slow)

    weights = parameters()
    optimizer = made(weights)
    steps(optimizer, weights, gradients()[:stop])
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weights": {n: w.detach() for n, w in weights.items()}}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = {name: nn.Parameter(weight) for name, weight in saved["weights"].items()}
    other = made(again)
    other.load_state_dict(saved["optimizer"])
    assert other.param_groups is other.optimizer.param_groups
    assert_same(steps(other, again, gradients()[stop:]), steps(optimizer, weights, gradients()[stop:]), bound=0)


def test_lookahead_shares_groups_and_takes_closures():
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Lookahead(torch.optim.SGD([first], lr=0.5), every=2)
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    optimizer.param_groups[0]["lr"] = 1.0  # as a schedule does

    def closure():
        optimizer.zero_grad()
        loss = first.sum() + second.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    assert (first[0].item(), second[0].item()) == (0.0, 0.75)
    optimizer.step(closure)
    assert (first[0].item(), second[0].item()) == (0.0, 0.75), "half of the way back from -1 and 0.5 to 1"


def test_wrong_arguments_say_what_to_do():
    weight = nn.Parameter(torch.ones(3))
    for call, message in (
        (lambda: Lamb([weight], lr=-1), "lr must be a number from 0 on; got -1"),
        (lambda: Lamb([weight], betas=(0.9, 1.0)), "second_beta must be"),
        (lambda: Lamb([weight], max_norm=0), "max_norm must be a number above 0"),
        (lambda: Lookahead("Lamb"), r"as Lamb\(parameters\); got str"),
        (lambda: Lookahead(Lamb([weight]), every=0), "every must be a whole number from 1 on"),
        (lambda: Lookahead(Lamb([weight]), alpha=0), "alpha must be"),
        (lambda: Lookahead(Lamb([weight]), slow="late"), "slow must be one of initial, first-sync; got 'late'"),
        (lambda: Hyperparameters(optimizer="LAMB"), "class of torch.optim, .* or be one of Lamb, LookaheadLamb, MuonAdamW; got 'LAMB'"),
        (lambda: Hyperparameters(optimizer=None), "got None"),
        (lambda: Hyperparameters(optimizer="Optimizer"), "got 'Optimizer'"),
        (lambda: Hyperparameters(flat=1.1), "flat must be a number from 0 to 1; got 1.1"),
        (lambda: Hyperparameters(clip_value=0), "clip_value must be a number above 0, or None; got 0"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            call()
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(Unsupported, match="SparseAdam"):
        Lamb(table.parameters()).step()
    assert isinstance(new_optimizer("AdamW", [weight], lr=0.1), torch.optim.AdamW)
    assert Hyperparameters(optimizer="Lamb", clip_value=np.float64(1.0)).clip_value == 1.0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("total", [20, 37])
def test_the_learning_rate_is_flat_and_then_falls(share, total):
    how = Hyperparameters(schedule="flat-cosine", flat=share)
    for step in range(total + 1):
        late = (step - share * total) / ((1 - share) * total) if share < 1 else 0.0
        wanted = 1.0 if step < share * total else (1 + math.cos(math.pi * late)) / 2
        assert how.factor(step, total) == pytest.approx(wanted, abs=1e-12), step
    if share == 0.5:
        assert how.factor(10, 20) == 1.0, "where the authors' schedule, a step early, gives 0.9755"


class Stopped(Exception):
    pass


def trained(weight=5.0, **options):
    """How far each weight of a linear map moves by gradients of this size."""
    pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")
    from heedful.bridges.training import train

    net = nn.Linear(3, 1, bias=False)
    before = net.weight.detach().clone()
    how = Hyperparameters(**{"epochs": 1, "batch_size": 7, "lr": 1.0, "optimizer": "SGD", "clip": None, **options})
    slopes = torch.tensor([weight, 0.5, -weight]).expand(7, 3)
    train(
        net, (slopes,), loss=lambda net, x: net(x).mean(), measure=None, hyperparameters=how, device=torch.device("cpu")
    )
    return [round(x, 4) for x in (before - net.weight)[0].tolist()]


def test_gradients_are_clamped_by_entry():
    assert trained() == [5, 0.5, -5]
    assert trained(clip_value=1.0) == [1, 0.5, -1]
    assert trained(clip_value=1.0, clip=0.75) == [0.5, 0.25, -0.5], "the norm of what was clamped is 1.5"
    norm = math.sqrt(50.25)
    assert trained(clip=1.0) == pytest.approx([5 / norm, 0.5 / norm, -5 / norm], abs=1e-3)


@pytest.mark.parametrize("average", [None, 0.9])
def test_a_stopped_training_with_lookahead_goes_on_to_the_same_weights(tmp_path, average):
    pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")
    from heedful.bridges.training import train

    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(53, 5)).astype(np.float32))
    y = x @ torch.tensor([0.2, -0.4, 0.1, 0.0, 0.6])
    # 7 steps an epoch: synchronisations fall within epochs, and one on the end of the sixth.
    how = Hyperparameters(
        epochs=6, batch_size=8, lr=0.03, optimizer="LookaheadLamb", schedule="flat-cosine", flat=0.7, clip=None, clip_value=1.0,
        average=average,
    )  # fmt: skip

    def run(checkpoint=None, stop=None):
        torch.manual_seed(0)
        net, calls = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), nn.Flatten(0)), []

        def loss(net, x, y):
            calls.append(None)
            if stop is not None and len(calls) > 7 * stop + 3:
                raise Stopped
            return (net(x) - y).square().mean()

        done = train(
            net, (x, y), loss=loss, measure=None, hyperparameters=how, device=torch.device("cpu"), checkpoint=checkpoint
        )  # fmt: skip
        return done, [weight.detach() for weight in net.parameters()]

    done, wanted = run()
    assert done.epochs[-1].loss < 0.5 * done.epochs[0].loss
    with pytest.raises(Stopped):
        run(tmp_path / "kept", stop=3)
    again, found = run(tmp_path / "kept")
    assert again.resumed == 3
    assert again.epochs == done.epochs
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_and_adamw_beside_those_of_torch(weight_decay):
    """Matrices as torch's own Muon moves them, each by itself; vectors and small matrices as its AdamW does."""
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "square": (67, 67),
        "twin": (67, 67),
        "tall": (83, 64),
        "wide": (64, 71),
        "thin": (63, 64),
        "vector": (17,),
    }
    starts = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    ours, theirs = ({name: nn.Parameter(start.clone()) for name, start in starts.items()} for _ in range(2))
    matrices = [name for name, size in sizes.items() if len(size) == 2 and min(size) >= 64]
    optimizer = MuonAdamW(ours.values(), lr=0.03, weight_decay=weight_decay)
    muon = torch.optim.Muon(
        [theirs[name] for name in matrices], lr=0.03, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    rest = [theirs[name] for name in sizes if name not in matrices]
    adam = torch.optim.AdamW(rest, lr=0.03, weight_decay=weight_decay, betas=(0.9, 0.98))
    for _ in range(7):
        for name, size in sizes.items():
            ours[name].grad = torch.randn(size, generator=generator)
            theirs[name].grad = ours[name].grad.clone()
        for one in (optimizer, muon, adam):
            one.step()
    for name in sizes:
        bound = 3e-2 if name in matrices else 1e-5  # orthogonal matrices are found in bfloat16
        assert (ours[name] - theirs[name]).abs().max() < bound, name
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 40, 60, generator=generator)).float())
    assert 0.3 < values.min() < values.max() < 1.4


def test_muon_goes_on_from_a_file():
    def weights():
        generator = torch.Generator().manual_seed(1)
        return [nn.Parameter(torch.randn(size, generator=generator)) for size in ((33, 35), (5,))]

    def moved(optimizer, own, count, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            for weight in own:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()

    first = weights()
    optimizer = MuonAdamW(first, lr=0.01)
    moved(optimizer, first, 3, 0)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weights": [weight.detach() for weight in first]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = [nn.Parameter(weight) for weight in saved["weights"]]
    other = MuonAdamW(second, lr=0.01)
    other.load_state_dict(saved["optimizer"])
    moved(optimizer, first, 2, 1)
    moved(other, second, 2, 1)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
