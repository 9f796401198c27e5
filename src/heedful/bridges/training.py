"""Training by Lightning: one loop for any data, on one device or many, with checkpoints that survive a kill."""

from __future__ import annotations

import logging
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra
from heedful._files import new_file
from heedful._progress import Progress, silent
from heedful._runtime import seed
from heedful.bridges.batches import Share, batches, each, leaves, mixed
from heedful.bridges.optimizers import new_optimizer
from heedful.bridges.record import Epoch, Hyperparameters, Training

try:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import Callback, Checkpoint, EarlyStopping
    from pytorch_lightning.plugins import TorchCheckpointIO
    from pytorch_lightning.plugins.environments import LightningEnvironment
    from pytorch_lightning.strategies import StrategyRegistry
    from pytorch_lightning.utilities import rank_zero_only
except ImportError:
    raise MissingExtra("pytorch-lightning", "train") from None

__all__ = ["STRATEGIES", "AfterEpochs", "is_first", "train"]

Loss = Callable[..., Tensor]
Measure = Callable[..., Mapping[str, Tensor]]

HELD_OUT_LOSS = "held_out_loss"
# How processes work together, as Lightning calls it.
STRATEGIES = tuple(StrategyRegistry.available_strategies())
# Data of up to so many bytes lies on the GPU while it is trained on.
RESIDENT = 2**30


def train(
    network: nn.Module,
    data: Any,
    held_out: Any = None,
    *,
    loss: Loss,
    measure: Measure,
    hyperparameters: Hyperparameters,
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
    lengths: Sequence[int] | None = None,
    progress: Progress = silent,
    checkpoint: Path | None = None,
    devices: Any = 1,
    num_nodes: int = 1,
    strategy: Any = "auto",
) -> Training:
    """Trains a network in place and leaves it on the CPU, in eval mode, with the weights of the best epoch.

    Args:
        data, held_out: tensors with one row per case in a tuple, which may hold tuples and None; or a Dataset of cases, with
            places (`__getitem__`, `__len__`) or a stream (`IterableDataset`; `set_epoch(number)`, where it has one, is called, and
            where it has a length a schedule of the learning rate may be asked for).
        collate: makes a batch of a list of the Dataset's cases; torch's `default_collate` by default.
        lengths: one for each case: batches are of similar lengths, so that little is padded.
        loss: `loss(network, *batch)` is the batch's mean loss.
        measure: `measure(network, *batch)` gives per-case values, among them `"loss"`, whose mean over the held-out part decides
            which epoch is best and when to stop. Without a held-out part the last epoch is kept.
        checkpoint: a file in which the state after each epoch is written, whole or not at all; where the file exists, training
            goes on from it, to the same weights that an uninterrupted run reaches. The file is deleted at the end. It is read
            with `weights_only`, so no code in it is run.
        devices, num_nodes, strategy: Lightning's. Each process takes its part of each batch, and the gradient is that of
            the whole batch, so that the result does not depend on their number but by rounding (and dropout).

    Order of cases and dropout of an epoch depend on the seed and the epoch's number alone. The random state of the caller,
    its signal handlers and its working directory are left as they were.
    """
    alone = devices == 1 and num_nodes == 1 and strategy == "auto"
    if alone and device.type == "cuda" and sum(part.nbytes for part in leaves((data, held_out))) < RESIDENT:
        data, held_out = (each(part, lambda tensor: tensor.to(device)) for part in (data, held_out))
    learning = batches(data, hyperparameters, collate, lengths, shuffle=True)
    measuring = None if held_out is None else batches(held_out, hyperparameters, collate, None, shuffle=False)
    average = None if hyperparameters.average is None else _Average(network, hyperparameters.average)
    record = _Record(learning, network, hyperparameters, progress, average)
    patience = hyperparameters.patience
    bfloat16 = hyperparameters.precision == "bfloat16" or (
        hyperparameters.precision == "auto" and device.type == "cuda"
    )
    with _quietly(), _unmoved(device):
        trainer = lightning.Trainer(
            accelerator={"cuda": "gpu"}.get(device.type, device.type),
            devices=[device.index or 0] if alone and device.type == "cuda" else devices,
            num_nodes=num_nodes,
            strategy=strategy,
            precision="bf16-mixed" if bfloat16 else "32-true",
            max_epochs=hyperparameters.epochs,
            accumulate_grad_batches=hyperparameters.accumulate,
            callbacks=[
                *([average] if average else []),
                record,
                *([_Stopping(patience)] if measuring is not None and patience is not None else []),
                *([_Keeper(checkpoint)] if checkpoint else []),
            ],
            # Where one process was asked for it is one, whatever a cluster's environment variables say.
            plugins=[*([LightningEnvironment()] if alone else []), _Whole()],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            # Inference tensors that a layer caches while it is validated could not be trained with.
            inference_mode=False,
            enable_checkpointing=checkpoint is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        for part in (learning, measuring):
            if part is not None:
                part.trainer = trainer
        trainer.fit(
            _Task(network.train(), loss, measure, hyperparameters),
            learning.loader(),
            None if measuring is None else measuring.loader(),
            ckpt_path=checkpoint if checkpoint and checkpoint.exists() else None,
        )
    network.cpu().load_state_dict(record.weights)
    network.eval()
    if checkpoint is not None and trainer.is_global_zero:
        # A kill may have left part of a file.
        for file in (checkpoint, *checkpoint.parent.glob(f".{checkpoint.name}.*")):
            file.unlink(missing_ok=True)
    return Training(tuple(record.epochs), record.best, record.resumed)


def is_first() -> bool:
    """Whether this process is the first, or the only one, of a training; it alone writes files."""
    return rank_zero_only.rank in (0, None)


class AfterEpochs(Callback):  # type: ignore[misc]
    """A callback for a Trainer of one's own: calls `action()` after each epoch of training, in the first process alone."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        if trainer.is_global_zero:
            self.action()


class _Task(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, network: nn.Module, loss: Loss, measure: Measure, hyperparameters: Hyperparameters) -> None:
        super().__init__()
        self.network, self.loss, self.measure, self.hyperparameters = network, loss, measure, hyperparameters

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []
        self.count = 0

    def training_step(self, part: tuple[Any, int, float], index: int) -> Tensor:
        batch, count, share = part
        # Not once per epoch: between epochs Lightning draws numbers, and others after a restart.
        ranks = (self.trainer.global_rank,) if self.trainer.world_size > 1 else ()
        seed(mixed(self.hyperparameters.seed, self.current_epoch, 1 + index, *ranks), self.device)
        loss = self.loss(self.network, *_arguments(batch))
        self.losses.append(loss.detach() * count)
        self.count += count
        return loss * share

    def mean_loss(self) -> float:
        total, count = self._summed(torch.stack(self.losses).sum()[None], self.count)
        return total.item() / count

    def on_validation_epoch_start(self) -> None:
        self.measured: list[Mapping[str, Tensor]] = []

    def validation_step(self, part: tuple[Any, int, float], index: int) -> None:
        batch, count, _ = part
        values = self.measure(self.network, *_arguments(batch))
        self.measured.append(values if count else {name: value[:0] for name, value in values.items()})

    def on_validation_epoch_end(self) -> None:
        names = list(self.measured[0])
        columns = [torch.cat([part[name] for part in self.measured]).cpu().double() for name in names]
        totals, count = self._summed(torch.stack([column.sum() for column in columns]), len(columns[0]))
        alone = self.trainer.world_size == 1
        self.means = {
            name: (column.mean() if alone else total / count).item()
            for name, column, total in zip(names, columns, totals, strict=True)
        }
        self.log(HELD_OUT_LOSS, self.means["loss"])

    def _summed(self, values: Tensor, count: int) -> tuple[Tensor, int]:
        """Sums over all processes."""
        if self.trainer.world_size == 1:
            return values, count
        both = torch.cat((values.double(), torch.tensor([count], dtype=torch.float64, device=values.device)))
        both = self.trainer.strategy.reduce(both.to(self.device), reduce_op="sum")
        return both[:-1].cpu(), int(both[-1])

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for bound, kind in ((self.hyperparameters.clip_value, "value"), (self.hyperparameters.clip, "norm")):
            if bound is not None:
                self.clip_gradients(optimizer, bound, kind)

    def configure_optimizers(self) -> Any:
        how = self.hyperparameters
        optimizer = new_optimizer(how.optimizer, self.network.parameters(), lr=how.lr, weight_decay=how.weight_decay)
        if not how.scheduled:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise InvalidArgument(
                f"schedule={how.schedule!r} and warmup={how.warmup} need the number of steps, and this stream has no length; take 'flat' and 0"
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: how.factor(step, int(steps)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _arguments(batch: Any) -> Any:
    return batch if isinstance(batch, tuple | list) else (batch,)


class _Record(Callback):  # type: ignore[misc]
    """Every epoch's numbers and the weights of the best one; both are part of a checkpoint."""

    def __init__(
        self,
        order: Share,
        network: nn.Module,
        hyperparameters: Hyperparameters,
        progress: Progress,
        average: _Average | None,
    ) -> None:
        self.order, self.network, self.hyperparameters, self.progress = order, network, hyperparameters, progress
        self.average = average
        self.epochs: list[Epoch] = []
        self.weights: dict[str, Tensor] = {}
        self.best = self.resumed = 0

    def on_train_start(self, trainer: Any, task: _Task) -> None:
        if trainer.is_global_zero:
            self.progress(self.resumed, self.hyperparameters.epochs, "")

    def on_train_epoch_end(self, trainer: Any, task: _Task) -> None:
        held_out = dict(task.means) if trainer.val_dataloaders else {}
        epoch = Epoch(task.mean_loss(), held_out)
        if not np.isfinite([epoch.loss, *held_out.values()]).all():
            raise InvalidArgument(
                f"epoch {len(self.epochs) + 1} is not finite: the loss of training is {epoch.loss}, held out "
                f"{', '.join(f'{name} {value}' for name, value in held_out.items()) or 'none'}; a smaller learning rate than "
                f"{self.hyperparameters.lr:g} may help, or numbers of a smaller size"
            )
        self.epochs.append(epoch)
        if not held_out or self.best == 0 or held_out["loss"] < self.epochs[self.best - 1].held_out["loss"]:
            self.best = len(self.epochs)
            with nullcontext() if self.average is None else self.average.taken():
                self.weights = {name: part.detach().cpu().clone() for name, part in self.network.state_dict().items()}
        if trainer.is_global_zero:
            self.progress(len(self.epochs), self.hyperparameters.epochs, str(epoch))

    def state_dict(self) -> dict[str, Any]:
        return Training(tuple(self.epochs), self.best).to_dict() | {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = Training.from_dict(state)
        self.epochs, self.best, self.resumed = list(before.epochs), before.best, len(before.epochs)
        self.weights = state["weights"]
        # Lightning fetches the first batch after a restart before it tells the sampler which epoch it is.
        self.order.set_epoch(self.resumed)


class _Average(Callback):  # type: ignore[misc]
    """A running mean of the weights over steps, which is measured in their place; it is part of a checkpoint."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network, self.decay = network, decay
        self.means: list[Tensor] = []
        self.steps = 0

    @torch.no_grad()
    def on_train_start(self, trainer: Any, task: Any) -> None:
        device = task.device
        self.means = [x.to(device) for x in self.means] or [x.detach().clone() for x in self.network.parameters()]
        self.steps = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            torch._foreach_lerp_(self.means, list(self.network.parameters()), 1 - self.decay)

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        self._exchange()

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        self._exchange()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The mean in place of the weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, mean in zip(self.network.parameters(), self.means, strict=True):
            last = weight.clone()
            weight.copy_(mean)
            mean.copy_(last)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = state["means"]


class _Stopping(EarlyStopping):  # type: ignore[misc]
    """Lightning's early stopping, which also stops at once where the checkpoint was the last before stopping."""

    def __init__(self, patience: int) -> None:
        super().__init__(HELD_OUT_LOSS, patience=patience)

    def on_train_start(self, trainer: Any, task: Any) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


class _Keeper(Checkpoint):  # type: ignore[misc]
    """Writes the checkpoint after each epoch; Lightning calls it after all other callbacks."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        trainer.save_checkpoint(self.file)


class _Whole(TorchCheckpointIO):  # type: ignore[misc]
    """Checkpoints that are there whole or not at all, and that run no code when they are read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with new_file(path) as part:
            super().save_checkpoint(checkpoint, part, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        # A damaged file raises by a dozen classes.
        except Exception as error:
            why = " ".join(str(error).split())
            raise CorruptModel(
                f"the checkpoint {path} cannot be read ({why:.120}); delete it to train from the start"
            ) from None


@contextmanager
def _quietly() -> Iterator[None]:
    """No notes of Lightning's and no advice; what goes wrong is raised."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", module=r"pytorch_lightning|lightning_fabric|lightning_utilities|torch\.utils"
            )
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _unmoved(device: torch.device) -> Iterator[None]:
    """Leaves random state and signal handlers as they were; an interrupt is a KeyboardInterrupt."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        except SystemExit as stop:
            # Lightning turns an interrupt into the end of the process, notebook and all.
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        finally:
            if main and handler is not None:
                signal.signal(signal.SIGINT, handler)
