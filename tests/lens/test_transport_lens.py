"""Points on their way: a tracker that leaves training alone, and the tokens of a finished model from layer to layer."""

import copy
import gc
import importlib.util
import itertools
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import heedful
from heedful import InvalidArgument, Unsupported
from heedful.lens.transport import TransportTracker, between_layers, distinct_moves
from heedful.lens.transport.layers import measure_layers

pytest.importorskip("scipy", reason="the extra 'transport' is not installed")

N, T, R = 5, 7, 11


class Branches(nn.Module):
    """Residual branches with a LayerNorm at their ends, as in the study: x + LN(attention(x)), then + LN(network)."""

    def __init__(self, width, normed=True, heads=1):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) if normed else nn.Identity() for _ in range(2))
        self.dropout = nn.Dropout(0.3)
        self.network = nn.Sequential(nn.Linear(width, 13), nn.ReLU(), nn.Linear(13, width))

    def forward(self, x):
        x = x + self.norm1(self.dropout(self.attention(x, x, x, need_weights=False)[0]))
        return x + self.norm2(self.network(x))


class Classifier(nn.Module):
    """Dropout, BatchNorm and attention: what a careless look would disturb."""

    def __init__(self, width=R, classes=3):
        super().__init__()
        self.blocks = nn.ModuleList([Branches(width), Branches(width)])
        self.batch = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.batch(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.dropout(x))


def data(seed=0, count=N, tokens=T, width=R):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, tokens, width, generator=generator), torch.arange(count) % 3


def trained(epochs=4, watch=None, model=None):
    """Losses, weights and buffers of a short training; `watch(model)` gives a tracker."""
    torch.manual_seed(1)
    model = Classifier() if model is None else model
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2)
    x, y = data()
    losses = []
    tracker = None if watch is None else watch(model)
    for _ in range(epochs):
        # Gradients of two halves are summed, with a look in between.
        optimizer.zero_grad()
        for half in (slice(0, 3), slice(3, None)):
            loss = nn.functional.cross_entropy(model(x[half]).flatten(0, 1), y[half].repeat_interleave(T))
            loss.backward()
            if tracker is not None:
                tracker.record()
        optimizer.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, state, torch.rand(3), tracker


def looking(**options):
    return lambda model: TransportTracker(model, "block", data()[0], data()[1], **options)


@pytest.mark.parametrize(
    "options", [{}, {"store": "disk"}, {"every": 2}, {"side": "input"}, {"start": "output"}], ids=str
)
def test_training_goes_on_as_if_nobody_looked(options):
    """Check 6 of the sheet, bit for bit, with dropout, BatchNorm and accumulated gradients."""
    losses, state, drawn, _ = trained()
    seen_losses, seen_state, seen_drawn, tracker = trained(watch=looking(**options))
    assert len(tracker) == 8 // options.get("every", 1)
    assert seen_losses == losses
    assert torch.equal(seen_drawn, drawn)
    for name, value in state.items():
        assert torch.equal(value, seen_state[name]), name


def test_a_model_is_left_as_it_was():
    model, (x, _) = Classifier(), data()
    model.train()
    model.blocks[0].eval()
    model(x).sum().backward()
    before, gradients = copy.deepcopy(model), [one.grad.clone() for one in model.parameters()]
    tracker = TransportTracker(model, model.blocks[1], x)
    tracker.record()
    for (name, one), other in zip(before.named_modules(), model.modules(), strict=True):
        assert one.training == other.training, name
        assert not other._forward_hooks
        assert not other._forward_pre_hooks
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)
        assert parameter.requires_grad
    assert all(map(torch.equal, before.buffers(), model.buffers()))
    assert torch.is_grad_enabled()


def test_buffers_that_change_while_a_model_is_evaluated_are_set_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.linear = nn.Linear(R, R)

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    model = Counting()
    TransportTracker(model, model, data()[0]).record()
    assert model.calls == 0


def test_hooks_are_gone_after_an_exception():
    model, (x, _) = Classifier(), data()
    tracker = TransportTracker(model, "blocks.0", x)
    state = torch.get_rng_state()
    model.head.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError), tracker:
        tracker.record()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(InvalidArgument, match="closed"):
        tracker.record()
    assert len(tracker) == 0
    assert tracker, "an empty tracker is a tracker"


def test_snapshots_are_the_probe_and_what_the_module_returns():
    model, (x, _) = Classifier(), data()
    taps = {
        "name": "blocks.1",
        "module": model.blocks[1],
        "block": "block",
        "function": lambda model, x: model.blocks[1](model.blocks[0](x)),
    }
    trackers = {name: TransportTracker(model, tap, x) for name, tap in taps.items()}
    with torch.no_grad():
        model.head.weight += 1
        model.blocks[0].norm1.weight *= 2
    model.eval()
    expected = model.blocks[1](model.blocks[0](x)).detach().numpy()
    model.train()
    for name, tracker in trackers.items():
        tracker.record()
        assert tracker.trajectory.shape == (2, N, T, R), name
        assert np.array_equal(tracker.trajectory[0], x.numpy()), name
        np.testing.assert_allclose(tracker.trajectory[1], expected, atol=1e-6, err_msg=name)
        assert tracker.origin == "the probe"
    assert repr(trackers["name"]) == (
        "TransportTracker(blocks.1 (Branches), 1 snapshot of 5 x 7 points with 11 features, from the probe)"
    )


def test_the_input_of_a_module_can_be_tapped():
    """In front of a pre-norm network: the stream of tokens after attention and its residual sum."""
    model, x = heedful.nn.Block(R + 1, 3), torch.randn(N, T, R + 1)
    tracker = TransportTracker(model, "norm2", x, side="input")
    tracker.record()
    normed = model.norm1(x)
    expected = x + model.self_attn(normed, need_weights=False)[0]
    np.testing.assert_allclose(tracker.trajectory[1], expected.detach().numpy(), atol=1e-6)


def test_where_the_probe_has_another_shape_the_tapped_input_is_the_start():
    model = nn.Sequential(nn.Embedding(31, R), nn.Linear(R, R), nn.Linear(R, 3))
    ids = torch.arange(N * T).view(N, T) % 31
    tracker = TransportTracker(model, "1", ids)
    start = model[0](ids).detach().numpy()
    with torch.no_grad():
        model[0].weight.zero_()
    tracker.record()
    assert tracker.origin == "the tapped module's input before training"
    assert np.array_equal(tracker.trajectory[0], start)
    np.testing.assert_allclose(tracker.trajectory[1], np.broadcast_to(model[1].bias.detach(), (N, T, R)), atol=1e-6)
    with pytest.raises(
        InvalidArgument, match=r"2 \(Linear\), which reads \(5, 7, 11\), gives \(5, 7, 3\).*start='output'"
    ):
        TransportTracker(model, "2", ids)
    wide = TransportTracker(model, "2", ids, start="output")
    wide.record()
    assert np.array_equal(wide.trajectory[0], wide.trajectory[1])
    assert wide.summary().optimality == 1


def test_unequal_shapes_are_refused():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.linear = N, nn.Linear(R, R)

        def forward(self, x):
            return self.linear(x)[: self.rows]

    model = Growing()
    tracker = TransportTracker(model, model, torch.randn(N, R))
    model.rows = 3
    with pytest.raises(InvalidArgument, match=r"gave \(3, 11\) for the probe and \(5, 11\) before"):
        tracker.record()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model must be a torch.nn.Module; got int"),
        ({"tap": "nowhere"}, "tap 'nowhere' is no module of this Classifier; there are blocks, blocks.0"),
        ({"tap": nn.Linear(2, 2)}, "a Linear that is no part of the model"),
        ({"tap": 3}, "tap must be a module, its name"),
        ({"tap": lambda model, x: model(x).argmax(-1)}, "returned no tensor of floating numbers"),
        ({"tap": lambda model, x: x[None]}, r"shape \(1, 5, 7, 11\)"),
        ({"probe": {}}, "probe must be a tensor, a tuple"),
        ({"y": torch.zeros(N + 1)}, r"of shape \(5,\) or \(5, 7\); got \(6,\)"),
        ({"every": 0}, "every must be a whole number from 1"),
        ({"store": "tape"}, "store must be one of cpu, disk"),
        ({"tap": lambda model, x: x, "side": "input"}, "side='input' is what a tapped module reads"),
    ],
)
def test_errors_say_what_to_give(arguments, message):
    given = {"model": Classifier(), "tap": "block", "probe": data()[0]} | arguments
    with pytest.raises(InvalidArgument, match=message):
        TransportTracker(**given)


def test_a_module_that_does_not_run_is_refused():
    model = Classifier()
    model.idle = nn.Linear(2, 2)
    with pytest.raises(InvalidArgument, match=r"idle \(Linear\) did not run on the probe"):
        TransportTracker(model, "idle", data()[0])
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(InvalidArgument, match="has no shape yet"):
        TransportTracker(lazy, "0", data()[0])
    with pytest.raises(InvalidArgument, match="no list of layers"):
        TransportTracker(nn.Linear(R, R), "block", data()[0])
    tracker = TransportTracker(model, "block", data()[0])
    with pytest.raises(InvalidArgument, match="no snapshot yet"):
        tracker.summary()


def test_of_a_large_probe_the_same_points_are_kept_each_time():
    model, (x, y) = Classifier(), data(count=29)
    with pytest.warns(UserWarning, match=r"203 points, more than max_points=100: 98 of them are kept"):
        tracker = TransportTracker(model, "block", x, y, max_points=100)
    with pytest.warns(UserWarning, match="max_points"):
        other = TransportTracker(model, "block", x, y, max_points=100)
    tracker.record()
    other.record()
    assert tracker.trajectory.shape == (2, 14, T, R)
    assert np.array_equal(tracker.trajectory, other.trajectory)
    rows = [int((x == torch.from_numpy(one)).all(-1).all(-1).nonzero()[0, 0]) for one in tracker.trajectory[0]]
    assert rows == sorted(set(rows))
    assert tracker.y.tolist() == y[rows].repeat_interleave(T).tolist()
    whole = TransportTracker(model, "block", x)
    whole.record()
    assert np.array_equal(whole.trajectory[:, rows], tracker.trajectory)
    with pytest.warns(UserWarning, match="3 of them are kept"):
        few = TransportTracker(model, "block", x, max_points=3)
    assert few.trajectory.shape == (1, 1, 3, R)


def test_snapshots_on_disk_are_those_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    on_disk, in_memory = (trained(watch=looking(store=store))[-1] for store in ("disk", "cpu"))
    assert isinstance(on_disk.trajectory, np.memmap)
    assert np.array_equal(on_disk.trajectory, in_memory.trajectory)
    assert on_disk.summary() == in_memory.summary()
    del on_disk
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_labels_of_tokens_and_of_instances():
    model, (x, y) = Classifier(), data()
    one, other = (TransportTracker(model, "block", x, labels) for labels in (y.numpy(), y[:, None].expand(N, T)))
    assert one.y.tolist() == other.y.tolist() == y.repeat_interleave(T).tolist()


def test_the_summary_is_that_of_the_trajectory():
    tracker = trained(watch=looking())[-1]
    expected = heedful.transport.transport_metrics(tracker.trajectory, data()[1])
    assert tracker.summary() == expected
    thesis = tracker.summary(metrics="thesis")
    assert thesis == heedful.transport.transport_metrics(tracker.trajectory, data()[1], metrics="thesis")
    assert thesis.efficiency < expected.efficiency
    assert tracker.summary(p=1).p == 1


def brute_force(start, now, labels, p):
    """direct, ot and centred optimality by every permutation within the classes."""
    direct = np.mean(np.linalg.norm(now - start, axis=1) ** p)
    ot = inner = least = 0.0
    for label in set(labels):
        at = [place for place, one in enumerate(labels) if one == label]
        a, b = start[at], now[at]
        orders = [list(order) for order in itertools.permutations(range(len(at)))]
        ot += min(sum(np.linalg.norm(a - b[order], axis=1) ** p) for order in orders) / len(labels)
        a, b = a - a.mean(0), b - b.mean(0)
        inner += np.square(a - b).sum()
        least += min(np.square(a - b[order]).sum() for order in orders)
    return direct, ot, np.sqrt(least / inner)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_curve_is_every_snapshot_by_itself(p):
    rng = np.random.default_rng(0)
    points = np.concatenate((np.zeros((1, 11, 3)), rng.normal(size=(6, 11, 3)))).cumsum(0) + rng.normal(size=(11, 3))
    labels = np.array([0, 1] * 5 + [1])

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.at = 0

        def forward(self, x):
            return torch.from_numpy(points[self.at])

    model = Moving()
    tracker = TransportTracker(model, model, torch.from_numpy(points[0]), labels, every=2)
    for model.at in range(1, 7):
        tracker.record()
        tracker.record()
    curve = tracker.curve(p)
    assert curve.steps == (2, 4, 6, 8, 10, 12)
    assert len(curve) == 6
    for at in range(1, 7):
        direct, ot, centred = brute_force(points[0], points[at], labels, p)
        assert curve.direct[at - 1] == pytest.approx(direct, rel=1e-12)
        assert curve.ot[at - 1] == pytest.approx(ot, rel=1e-12)
        assert curve.optimality[at - 1] == pytest.approx((ot / direct) ** (1 / p), rel=1e-12)
        way = np.linalg.norm(np.diff(points[: at + 1], axis=0), axis=-1).sum()
        straight = np.linalg.norm(points[at] - points[0], axis=-1).sum()
        assert curve.efficiency[at - 1] == pytest.approx(straight / way, rel=1e-12)
        summary = heedful.transport.transport_metrics(points[: at + 1], labels, p=p)
        assert curve.matching[at - 1] == summary.matching
        if p == 2:
            assert curve.centred_optimality[at - 1] == pytest.approx(centred, rel=1e-12)
    assert curve.is_exact
    assert (curve.centred_optimality is None) == (p != 2)
    assert "optimality" in str(curve)
    assert curve.to_dict()["steps"] == [2, 4, 6, 8, 10, 12]


def test_a_common_shift_is_optimal_at_every_snapshot():
    x = torch.randn(N, R, dtype=torch.float64)
    shift = nn.Linear(R, R, dtype=torch.float64)
    with torch.no_grad():
        shift.weight.copy_(torch.eye(R))
    tracker = TransportTracker(shift, shift, x)
    for step in range(1, 4):
        with torch.no_grad():
            shift.bias.fill_(step)
        tracker.record()
    curve = tracker.curve()
    assert curve.optimality == pytest.approx((1, 1, 1), abs=1e-12)
    assert curve.centred_optimality == (1, 1, 1)
    assert curve.efficiency == pytest.approx((1, 1, 1), abs=1e-12)


def far(branch, scale=1e4):
    """Outputs so large that the eps of a LayerNorm does not count."""
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter *= scale
    return branch


def test_a_layer_norm_of_two_features_moves_tokens_by_two_vectors():
    """Check 7 of the sheet: 45 x 20 tokens."""
    torch.manual_seed(3)
    block, x = Branches(2), torch.randn(45, 20, 2)
    far(block.attention)

    def attended(model, x):
        return x + model.norm1(model.attention(x, x, x, need_weights=False)[0])

    with pytest.warns(UserWarning, match="ends in a LayerNorm over 2 features, which leaves two values"):
        tracker = TransportTracker(block, attended, x)
    tracker.record()
    assert distinct_moves(*tracker.trajectory) == 2
    block.norm1 = nn.Identity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free = TransportTracker(block, attended, x)
    free.record()
    assert distinct_moves(*free.trajectory) > 890


@pytest.mark.parametrize(("width", "warned"), [(1, "one value"), (2, "two values"), (3, "a circle"), (4, None)])
def test_a_layer_norm_at_the_end_is_warned_of(width, warned):
    def caught(make, tap="0"):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            TransportTracker(nn.Sequential(make), tap, torch.randn(N, T, width))
        return [str(one.message) for one in found]

    for normed in (Branches(width), nn.LayerNorm(width), nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.5))):
        messages = caught(normed)
        assert len(messages) == bool(warned)
        assert all("LayerNorm over" in one and warned in one for one in messages)
    for free in (Branches(width, normed=False), nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))):
        assert caught(free) == []


def test_distinct_moves():
    points = np.zeros((4, 2))
    assert distinct_moves(points, [[1, 0], [1, 0.001], [-0.001, 0], [0, 0]]) == 2
    assert distinct_moves(points, [[1, 0], [1, 0.001], [-0.001, 0], [0, 0]], decimals=3) == 4
    with pytest.raises(InvalidArgument, match=r"got \(4, 2\) and \(3, 2\)"):
        distinct_moves(points, points[:3])


def test_compiled_and_wrapped_models_are_looked_into():
    model, (x, _) = Classifier(), data()
    inner = TransportTracker(model, "blocks.0", x)
    inner.record()
    compiled = torch.compile(model, backend="eager")
    around = TransportTracker(compiled, "blocks.0", x)
    around.record()
    assert np.array_equal(inner.trajectory, around.trajectory)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model(x)
    within = TransportTracker(model, "blocks.0.network", x)
    within.record()
    assert within.trajectory.shape == (2, N, T, R)


def test_a_model_of_half_precision_reads_the_probe():
    model, (x, _) = Classifier().bfloat16(), data()
    tracker = TransportTracker(model, "block", x)
    tracker.record()
    assert np.array_equal(tracker.trajectory[0], x.numpy())
    assert np.isfinite(tracker.trajectory).all()


def test_mappings_and_tuples_are_probes():
    model, (x, _) = Branches(R), data()
    trackers = [TransportTracker(model, model, probe) for probe in ({"x": x}, (x,))]
    for tracker in trackers:
        tracker.record()
        assert tracker.origin == "the tapped module's input before training"
    assert np.array_equal(trackers[0].trajectory, trackers[1].trajectory)


def test_the_callback_records_after_each_epoch():
    lightning = pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.network = Classifier()

        def training_step(self, batch, index):
            return self.network(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(task, *callbacks):
        torch.manual_seed(2)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            max_epochs=3, num_sanity_val_steps=0, accelerator="cpu", callbacks=list(callbacks), **quiet
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data()[0]), 2, shuffle=True)
            trainer.fit(task, loader)
        return task.state_dict()

    task = Task()
    tracker = TransportTracker(task.network, "blocks.1", data()[0])
    with_tracker, without = fit(task, tracker.callback()), fit(Task())
    assert len(tracker) == 3
    assert all(torch.equal(value, without[name]) for name, value in with_tracker.items())


# Tokens of a finished model


def encoder(layers=3, width=12, **options):
    layer = nn.TransformerEncoderLayer(width, 3, 17, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def test_the_states_between_layers_are_the_models():
    hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    sizes = {
        "vocab_size": 31,
        "hidden_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 17,
    }
    ids = torch.arange(2, 16).view(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    gpt2 = hf.GPT2Config(vocab_size=31, n_embd=12, n_layer=3, n_head=3)
    t5 = hf.T5Config(vocab_size=31, d_model=12, d_kv=4, d_ff=17, num_layers=3, num_heads=3)
    models = (
        hf.BertModel(hf.BertConfig(**sizes)),
        hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)),
        hf.GPT2LMHeadModel(gpt2),
        hf.T5EncoderModel(t5),
    )
    for model in models:
        model.train()
        inputs = {"input_ids": ids, "attention_mask": mask}
        found = between_layers(model, inputs, massive=None)
        assert model.training
        assert found.trajectory.shape == (4, 12, 12), type(model).__name__  # [L + 1, tokens that are no padding, d]
        with torch.no_grad():
            hidden = model.eval()(**inputs, output_hidden_states=True).hidden_states
        kept = mask.bool()
        for at in range(3):  # transformers normalises the last one
            np.testing.assert_allclose(found.trajectory[at], hidden[at][kept].double(), atol=1e-6)
        assert len(found.tokens) == 12
        assert len(found) == 3


def test_what_is_said_of_layers_is_so():
    """Against plain loops; a random walk is as straight as right angles are, nearly."""
    torch.manual_seed(0)
    walk = torch.randn(6, 1, 17, 5, dtype=torch.float64).cumsum(0)
    names = [f"layers.{at}" for at in range(5)]
    found = measure_layers("Walk", names, list(walk), None)
    x = walk[:, 0].numpy()
    steps = [[np.linalg.norm(x[at + 1, i] - x[at, i]) for i in range(17)] for at in range(5)]
    ends = [np.linalg.norm(x[5, i] - x[0, i]) for i in range(17)]
    assert found.straightness == pytest.approx(sum(ends) / np.sum(steps), rel=1e-12)
    angles = sum(np.sqrt(sum(steps[at][i] ** 2 for at in range(5))) for i in range(17))
    assert found.right_angles == pytest.approx(angles / np.sum(steps), rel=1e-12)
    assert found.travelled == pytest.approx([0, *np.cumsum(np.mean(steps, axis=1))])
    assert found.distance[-1] == pytest.approx(np.mean(ends))
    for at, move in enumerate((*found.moves, found.whole)):
        a, b = (x[at], x[at + 1]) if at < 5 else (x[0], x[5])
        shift = (b - a).mean(0)
        assert move.common == pytest.approx(17 * shift @ shift / np.square(b - a).sum(), rel=1e-12)
        assert move.length == pytest.approx(np.median(np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1)))
        expected = heedful.transport.transport_metrics(np.stack((a, b)))
        for name in ("optimality", "centred_optimality", "baseline", "centred_baseline", "matching"):
            assert getattr(move, name) == getattr(expected, name)
        assert 0 < move.exchanged <= 1
    assert "right angles" in str(found)
    assert "trajectory" not in found.to_dict()


def test_exchanged_moves_show_what_is_built_in():
    """Short moves are optimal whoever makes them; moves that gather all tokens at a point suit their tokens alone."""
    torch.manual_seed(0)
    x = torch.randn(1, 23, 3, dtype=torch.float64)
    short, gathered = x + 0.01 * torch.randn_like(x), 0.05 * x
    found = measure_layers("Model", ["a"], [x, short], None).whole
    assert (found.matching, found.exchanged_matching) == (1, 1)
    found = measure_layers("Model", ["a"], [x, gathered], None).whole
    assert found.matching == 1
    assert found.centred_optimality == pytest.approx(1)
    assert found.exchanged_matching < 0.6
    assert found.exchanged < 0.9


def test_massive_tokens_are_left_out_and_named():
    x = torch.randn(1, 13, 5)
    after = x.clone()
    after[0, 0] *= 1000
    found = measure_layers("Model", ["a"], [x.double(), after.double()], None)
    assert found.left_out == ("0",)
    assert found.tokens == tuple(map(str, range(1, 13)))
    assert "left out" in str(found)
    assert measure_layers("Model", ["a"], [x.double(), after.double()], None, massive=None).left_out == ()


def test_models_that_cannot_be_followed_say_why():
    with pytest.raises(Unsupported, match="no list of layers"):
        between_layers(nn.Linear(3, 3), torch.randn(1, 5, 3))
    with pytest.raises(InvalidArgument, match=r"must be a torch\.nn\.Module; got str"):
        between_layers("model", torch.randn(1, 5, 3))
    with pytest.raises(Unsupported, match="three of them or more; there are 2"):
        between_layers(encoder(), torch.randn(1, 2, 12))
    model = encoder()
    with torch.no_grad():
        model.layers[1].linear1.bias.fill_(torch.nan)
    with pytest.raises(Unsupported, match="not finite"):
        between_layers(model, torch.randn(1, 5, 12))

    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Branches(R), Branches(R)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x)[:, ::2])

    with pytest.raises(Unsupported, match=r"change their number or width between layers|passes on"):
        between_layers(Halving(), torch.randn(1, 9, R))
    assert len(between_layers(encoder(1), torch.randn(2, 5, 12))) == 1


def test_the_section_says_what_chance_says_too():
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from answering import TEXT, masked, wordpiece
    from heedful.bridges import reading
    from heedful.lens import Subject, observe

    section = import_module("heedful.lens.transport.section")
    model, tokenizer = masked(), wordpiece(64)
    inputs = reading.inputs_of(model, tokenizer, TEXT)
    subject = Subject(model, tokenizer, None, TEXT, observe(model, inputs, tokenizer=tokenizer), inputs=inputs)
    shown = section.section(subject)
    found = shown.result
    assert f"{1 / found.straightness:.1f} times the straight line" in shown.plain
    text = shown.summary
    for figure in (found.whole.optimality, found.whole.centred_optimality, found.whole.centred_baseline):
        assert f"{figure:.3f}" in text
    assert "at random" in text
    assert len(shown.data["moves"]) == 2
    long = Subject(model, tokenizer, None, TEXT, subject.observation, inputs={})
    with pytest.raises(Unsupported, match="nothing to run"):
        section.section(long)


def test_the_section_reads_the_beginning_of_a_long_text(monkeypatch):
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    from answering import TEXT, gpt2, wordpiece
    from heedful.bridges import reading
    from heedful.lens import Subject, observe

    section = import_module("heedful.lens.transport.section")
    monkeypatch.setattr(section, "TOKENS", 8)
    model, tokenizer = gpt2(), wordpiece(64, marks=False)
    inputs = reading.inputs_of(model, tokenizer, TEXT)
    subject = Subject(model, tokenizer, None, TEXT, observe(model, inputs, tokenizer=tokenizer), inputs=inputs)
    shown = section.section(subject)
    assert len(shown.result.tokens) + len(shown.result.left_out) == 8
    assert "the first 8 tokens" in shown.summary


@pytest.mark.parametrize(
    ("straight", "words"), [(0.2, "undo part"), (0.45, "direction of its own"), (0.9, "similar directions")]
)
def test_the_plain_line_follows_the_straightness(straight, words):
    from dataclasses import replace

    section = import_module("heedful.lens.transport.section")
    found = measure_layers("Walk", ["a", "b"], list(torch.randn(3, 1, 5, 4, dtype=torch.float64)), None)
    assert words in section._plain(replace(found, straightness=straight, right_angles=0.45))


def test_plots():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    tracker = trained(watch=looking())[-1]
    assert len(tracker.plot().lines) == 4
    ax = tracker.plot_paths(most=9)
    assert sum(len(line.get_xdata()) == 9 for line in ax.lines) == len(ax.lines) == 9
    assert "of the spread" in ax.get_ylabel()
    assert len(ax.get_legend().get_texts()) == 3
    plane = TransportTracker(nn.Linear(2, 2), lambda model, x: model(x), torch.randn(N, 2))
    plane.record()
    assert plane.plot_paths().get_ylabel() == "feature 2"
    line = TransportTracker(nn.Linear(1, 1), lambda model, x: model(x), torch.randn(N, 1))
    line.record()
    assert line.plot_paths().get_xlabel() == "snapshot"
    found = between_layers(encoder(), torch.randn(1, 7, 12))
    assert len(found.plot().lines) == 3
    assert [text.get_text() for text in found.plot_paths().texts] == [str(at) for at in range(7)]
    pyplot.close("all")


def test_the_gallery_draws_its_picture(tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    script = Path(__file__).parents[2] / "gallery" / "plot_paths.py"
    spec = importlib.util.spec_from_file_location("plot_paths", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, small in (("INSTANCES", 9), ("TOKENS", 5), ("EPOCHS", 3)):
        monkeypatch.setattr(module, name, small)
    module.main(tmp_path / "picture.png")
    picture = pyplot.imread(tmp_path / "picture.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05
    assert "45 points, 3 steps" in capsys.readouterr().out
    pyplot.close("all")
