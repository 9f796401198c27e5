"""`train` on any data: datasets with a collate function, streams, lengths, schedules, and several processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from heedful import InvalidArgument

pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from heedful.bridges.batches import batches
from heedful.bridges.record import Hyperparameters
from heedful.bridges.training import train

CPU = torch.device("cpu")
X = torch.from_numpy(np.random.default_rng(0).normal(size=(53, 5)).astype(np.float32))
Y = X @ torch.tensor([0.2, -0.4, 0.1, 0.0, 0.6])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1), nn.Flatten(0))


def loss(net, x, y):
    return (net(x) - y).square().mean()


def measure(net, x, y):
    return {"loss": (net(x) - y).square()}


def run(data=None, held_out=None, net=None, **options):
    more = {name: options.pop(name) for name in list(options) if name not in Hyperparameters.__dataclass_fields__}
    hyperparameters = Hyperparameters(**{"epochs": 3, "batch_size": 8, "lr": 0.01, **options})
    net = network() if net is None else net
    data = (X, Y) if data is None else data
    done = train(net, data, held_out, loss=loss, measure=measure, hyperparameters=hyperparameters, device=CPU, **more)
    return net, done


class Cases(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, at):
        return X[at], Y[at]


class Stream(IterableDataset):
    """The rows in the order of tensors trained on with the same seed."""

    def __init__(self, seed=0):
        self.seed, self.told = seed, []

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        order = batches((X, Y), Hyperparameters(seed=self.seed), None, None, shuffle=True)
        order.set_epoch(self.told[-1])
        for rows in order._order():
            yield from ((X[row], Y[row]) for row in rows)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_tensors_datasets_and_streams_are_trained_on_alike():
    wanted, done = run(held_out=(X[:9], Y[:9]))
    assert done.epochs[-1].loss < done.epochs[0].loss
    again, also = run(Cases(), (X[:9], Y[:9]))
    assert same(again, wanted)
    assert also == done
    stream = Stream()
    again, also = run(stream, (X[:9], Y[:9]))
    assert same(again, wanted)
    assert stream.told == [0, 1, 2]
    paired, _ = run(Cases(), collate=lambda cases: [torch.stack(part) for part in zip(*cases, strict=True)])
    assert same(paired, run()[0])


def test_batches_of_similar_lengths_hold_every_case_once():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    rows = (torch.arange(1000),)
    plain, sorted_ = (
        batches(rows, Hyperparameters(batch_size=20), None, which, shuffle=True) for which in (None, lengths)
    )

    def padded(order):
        parts = order._order()
        assert sorted(row for part in parts for row in part) == list(range(1000))
        return sum(lengths[part].max() * len(part) for part in parts) / lengths.sum()

    assert padded(plain) > 1.7
    assert padded(sorted_) < 1.1
    first = sorted_._order()
    assert first == sorted_._order()
    sorted_.set_epoch(1)
    assert first != sorted_._order()
    means = [lengths[part].mean() for part in first]
    assert abs(np.corrcoef(np.arange(50), means)[0, 1]) < 0.5, "batches come in random order"
    with pytest.raises(InvalidArgument, match="1000 cases and 3 lengths"):
        batches(rows, Hyperparameters(), None, [1, 2, 3], shuffle=True)
    with pytest.raises(InvalidArgument, match="a stream comes in its own order"):
        run(Stream(), lengths=[1])


def test_schedules_reach_the_optimizer():
    def moved(**options):
        """How far a weight moves in each epoch by SGD on a constant slope is its learning rate."""
        net = nn.Linear(5, 1, bias=False)
        before = net.weight.detach().clone()
        options = {"epochs": 10, "batch_size": 53, "lr": 1.0, "optimizer": "SGD", "clip": None, **options}
        train(
            net, (torch.ones(53, 5),), None, loss=lambda net, x: net(x).mean(), measure=None, device=CPU,
            hyperparameters=Hyperparameters(**options),
        )  # fmt: skip
        return (before - net.weight).mean().item()

    assert moved() == pytest.approx(10, rel=1e-5)
    for options in (
        {"schedule": "cosine"},
        {"schedule": "flat-cosine"},
        {"warmup": 0.5},
        {"schedule": "cosine", "warmup": 0.2},
    ):
        how = Hyperparameters(**options)
        assert moved(**options) == pytest.approx(sum(how.factor(step, 10) for step in range(10)), rel=1e-4)
    with pytest.raises(InvalidArgument, match="need the number of steps, and this stream has no length"):
        run(Stream(), schedule="cosine")
    factors = [Hyperparameters(schedule="flat-cosine", warmup=0.1).factor(step, 100) for step in range(101)]
    assert (factors[0], factors[10], factors[50], factors[75], factors[100]) == (0.1, 1.0, 1.0, 0.5, 0.0)


class Counted(Stream):
    """The same stream, which knows how long it is."""

    def __len__(self):
        return len(X)


def test_a_stream_with_a_length_has_a_schedule():
    assert same(run(Counted(), schedule="cosine", warmup=0.2)[0], run(schedule="cosine", warmup=0.2)[0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_running_mean_of_the_weights_is_measured_and_kept(accumulate):
    """By SGD on a constant slope a weight is linear in the number of steps, and its mean a sum of powers."""
    net, decay, steps = nn.Linear(1, 1, bias=False), 0.75, 6 // accumulate
    before, seen = net.weight.item(), []

    def measure(net, x):
        seen.append(net.weight.item())
        return {"loss": net(x)[:, 0]}

    train(
        net, (torch.ones(6, 1),), (torch.ones(2, 1),), loss=lambda net, x: net(x).mean(), measure=measure, device=CPU,
        hyperparameters=Hyperparameters(1, 1, 0.5, "SGD", clip=None, accumulate=accumulate, average=decay),
    )  # fmt: skip
    mean = before
    for step in range(1, steps + 1):
        mean = decay * mean + (1 - decay) * (before - 0.5 * step)
    assert net.weight.item() == pytest.approx(mean, abs=1e-6)
    assert seen == [net.weight.item()]


def test_accumulated_batches_are_one_step():
    small, _ = run((X[:48], Y[:48]), batch_size=4, accumulate=2, seed=3)
    large, _ = run((X[:48], Y[:48]), batch_size=8, seed=3)
    for one, other in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_bfloat16_computes_in_it_and_keeps_weights():
    seen = []
    net = network()
    net[0].register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    run(net=net, precision="bfloat16", epochs=1)
    assert set(seen) == {torch.bfloat16}
    assert net[0].weight.dtype == torch.float32
    seen.clear()
    run(net=net, precision="auto", epochs=1)
    assert set(seen) == {torch.float32}, "auto is float32 on a CPU"


SPREAD = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
from heedful.bridges import training
from test_training import X, Y, run
folder, epochs, slow = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
from pathlib import Path
file = Path(folder) / "kept.ckpt"
step = training._Task.on_train_epoch_start
def start(task):
    step(task)
    os.write(1, f"{task.current_epoch} {os.getpid()}\\n".encode())  # one write, so that two processes do not mix
    time.sleep(slow)
training._Task.on_train_epoch_start = start
net, done = run(held_out=(X[:9], Y[:9]), epochs=epochs, checkpoint=file, devices=2, strategy="ddp", schedule="cosine")
if training.is_first():
    weights = [part.sum().item() for part in net.parameters()]
    (Path(folder) / "done.json").write_text(json.dumps(done.to_dict() | {"weights": weights}))
"""


def spread(folder, epochs, slow=0.0, **options):
    """Two processes by torchrun, on the CPU by gloo."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    (folder / "spread.py").write_text(SPREAD)
    call = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(folder / "spread.py"),
    ]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*call, str(folder), str(epochs), str(slow)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


def test_two_processes_reach_the_result_of_one_and_a_kill_of_both_costs_one_epoch(tmp_path):
    """53 cases in batches of 8: the last of 5 is split in 3 and 2."""
    child = spread(tmp_path, 4, slow=0.5)
    processes, begun = {child.pid}, 0
    for line in child.stdout:
        begun, process = map(int, line.split())
        processes.add(process)
        if begun == 2:
            break
    assert len(processes) == 3, "torchrun and two of its own"
    for process in processes:
        os.kill(process, signal.SIGKILL)
    begun = max([begun, *(int(line.split()[0]) for line in child.stdout)])
    child.wait()
    child.stderr.close()
    assert begun < 3
    again = spread(tmp_path, 4)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err[-2000:]
    both = json.loads((tmp_path / "done.json").read_text())
    assert begun <= both["resumed"] <= begun + 1
    net, alone = run(held_out=(X[:9], Y[:9]), epochs=4, schedule="cosine")
    for one, other in zip(both["epochs"], alone.epochs, strict=True):
        assert one["loss"] == pytest.approx(other.loss, abs=1e-6)
        assert one["held_out"]["loss"] == pytest.approx(other.held_out["loss"], abs=1e-6)
    assert both["weights"] == pytest.approx([part.sum().item() for part in net.parameters()], abs=1e-5)
    assert [file.name for file in tmp_path.iterdir() if "ckpt" in file.name] == []
