"""Training by Lightning: one loop for every estimator, early stopping, checkpoints that survive a kill."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from heedful._errors import CorruptModel, InvalidArgument, MissingExtra
from heedful.bridges.estimator import Epoch, Recipe, Training

try:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import Callback, Checkpoint, EarlyStopping
    from pytorch_lightning.plugins import TorchCheckpointIO
    from pytorch_lightning.plugins.environments import LightningEnvironment
except ImportError:
    raise MissingExtra("pytorch-lightning", "train") from None

__all__ = ["train"]

Tensors = tuple[Tensor, ...]
Loss = Callable[..., Tensor]
Measure = Callable[..., Mapping[str, Tensor]]

HELD_OUT_LOSS = "held_out_loss"
# Data of up to so many bytes lies on the GPU while it is trained on.
RESIDENT = 2**30


def train(
    network: nn.Module,
    data: Tensors,
    held_out: Tensors | None,
    *,
    loss: Loss,
    measure: Measure,
    recipe: Recipe,
    device: torch.device,
    progress: bool = False,
    checkpoint: Path | None = None,
) -> Training:
    """Trains a network in place and leaves it on the CPU, in eval mode, with the weights of the best epoch.

    `data` and `held_out` are tensors with one row per case. `loss(network, *batch)` is the batch's mean loss;
    `measure(network, *batch)` gives per-case values, among them `"loss"`, whose mean over the held-out part decides which
    epoch is best and when to stop. Without a held-out part the last epoch is kept.

    Order of cases and dropout of an epoch depend on the seed and the epoch's number alone. With `checkpoint`, a file, the
    state after each epoch is written there, whole or not at all; where the file exists, training goes on from it, to the
    same weights that an uninterrupted run reaches. The file is deleted at the end. It is read with `weights_only`, so no
    code in it is run. The random state of the caller, its signal handlers and its working directory are left as they were.
    """
    order = _Order(len(data[0]), recipe)
    if device.type == "cuda" and sum(tensor.nbytes for tensor in (*data, *(held_out or ()))) < RESIDENT:
        data = tuple(tensor.to(device) for tensor in data)
        held_out = held_out and tuple(tensor.to(device) for tensor in held_out)
    record = _Record(order, network, recipe)
    stopping = [_Stopping(recipe.patience)] if held_out is not None and recipe.patience is not None else []
    with _quietly(), _unmoved(device):
        trainer = lightning.Trainer(
            accelerator={"cuda": "gpu"}.get(device.type, device.type),
            devices=[device.index or 0] if device.type == "cuda" else 1,
            max_epochs=recipe.epochs,
            gradient_clip_val=recipe.clip,
            callbacks=[
                record,
                *stopping,
                *([_Keeper(checkpoint)] if checkpoint else []),
                *([_Bar()] if progress else []),
            ],
            # One process, whatever a cluster's environment variables say.
            plugins=[LightningEnvironment(), _Whole()],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            # Inference tensors that a layer caches while it is validated could not be trained with.
            inference_mode=False,
            enable_checkpointing=checkpoint is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        trainer.fit(
            _Task(network.train(), loss, measure, recipe),
            DataLoader(_Rows(data), sampler=order, batch_size=None),
            None if held_out is None else _batches(held_out),
            ckpt_path=checkpoint if checkpoint and checkpoint.exists() else None,
        )
    network.cpu().load_state_dict(record.weights)
    network.eval()
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return Training(tuple(record.epochs), record.best, record.resumed)


class _Rows(Dataset[Tensors]):
    """Tensors with one row per case, read by lists of indices."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: list[int]) -> Tensors:
        return tuple(tensor[rows] for tensor in self.tensors)


def _batches(tensors: Tensors, size: int = 256) -> DataLoader[Tensors]:
    rows = range(len(tensors[0]))
    parts = [list(rows[start : start + size]) for start in rows[::size]]
    return DataLoader(_Rows(tensors), sampler=parts, batch_size=None)


class _Order(Sampler[list[int]]):
    """The batches of an epoch, an order that (seed, epoch) alone decides."""

    def __init__(self, count: int, recipe: Recipe) -> None:
        self.count, self.recipe, self.epoch = count, recipe, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.count // self.recipe.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(_mixed(self.recipe.seed, self.epoch, 0))
        return iter(
            [part.tolist() for part in torch.randperm(self.count, generator=generator).split(self.recipe.batch_size)]
        )


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


class _Task(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, network: nn.Module, loss: Loss, measure: Measure, recipe: Recipe) -> None:
        super().__init__()
        self.network, self.loss, self.measure, self.recipe = network, loss, measure, recipe

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensors, index: int) -> Tensor:
        # Not once per epoch: between epochs Lightning draws numbers, and others after a restart.
        torch.manual_seed(_mixed(self.recipe.seed, self.current_epoch, 1 + index))
        loss = self.loss(self.network, *batch)
        self.losses.append(loss.detach() * len(batch[0]))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.measured: list[Mapping[str, Tensor]] = []

    def validation_step(self, batch: Tensors, index: int) -> None:
        self.measured.append(self.measure(self.network, *batch))

    def on_validation_epoch_end(self) -> None:
        self.means = {
            name: torch.cat([part[name] for part in self.measured]).cpu().double().mean().item()
            for name in self.measured[0]
        }
        self.log(HELD_OUT_LOSS, self.means["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        made = getattr(torch.optim, self.recipe.optimizer)
        return made(self.network.parameters(), lr=self.recipe.lr, weight_decay=self.recipe.weight_decay)


class _Record(Callback):  # type: ignore[misc]
    """Every epoch's numbers and the weights of the best one; both are part of a checkpoint."""

    def __init__(self, order: _Order, network: nn.Module, recipe: Recipe) -> None:
        self.order, self.network, self.recipe = order, network, recipe
        self.epochs: list[Epoch] = []
        self.weights: dict[str, Tensor] = {}
        self.best = self.resumed = 0

    def on_train_epoch_end(self, trainer: Any, task: _Task) -> None:
        held_out = dict(task.means) if trainer.val_dataloaders else {}
        epoch = Epoch(float(torch.stack(task.losses).sum()) / self.order.count, held_out)
        if not np.isfinite([epoch.loss, *held_out.values()]).all():
            raise InvalidArgument(
                f"the loss of epoch {len(self.epochs) + 1} is not finite (training {epoch.loss}, held out "
                f"{held_out.get('loss', 'none')}); a smaller learning rate than {self.recipe.lr:g} may help"
            )
        self.epochs.append(epoch)
        if not held_out or self.best == 0 or held_out["loss"] < self.epochs[self.best - 1].held_out["loss"]:
            self.best = len(self.epochs)
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in self.network.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        epochs = [{"loss": epoch.loss, "held_out": dict(epoch.held_out)} for epoch in self.epochs]
        return {"epochs": epochs, "best": self.best, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = [Epoch(epoch["loss"], epoch["held_out"]) for epoch in state["epochs"]]
        self.best, self.weights, self.resumed = state["best"], state["weights"], len(state["epochs"])
        # Lightning fetches the first batch after a restart before it tells the sampler which epoch it is.
        self.order.set_epoch(self.resumed)


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
        part = f"{path}.part"
        super().save_checkpoint(checkpoint, part, storage_options)
        os.replace(part, path)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        # A damaged file raises by a dozen classes.
        except Exception as error:
            told = " ".join(str(error).split())
            raise CorruptModel(
                f"the checkpoint {path} cannot be read ({told:.120}); delete it to train from the start"
            ) from None


class _Bar(Callback):  # type: ignore[misc]
    """One line on standard error that tells epoch, losses and the time left."""

    def on_train_start(self, trainer: Any, task: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.line = self.bar.add_task("", total=trainer.max_epochs, completed=trainer.current_epoch)
        self.bar.start()

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        (record,) = (callback for callback in trainer.callbacks if isinstance(callback, _Record))
        last = record.epochs[-1]
        told = ", ".join(f"{name} {value:.3f}" for name, value in last.held_out.items())
        self.bar.update(
            self.line, advance=1, description=f"loss {last.loss:.3f}" + (f", held-out {told}" if told else "")
        )

    def teardown(self, trainer: Any, task: Any, stage: str) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()

    on_exception = teardown


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
