"""What estimators of series by the kernel method share: its parameters, its fit, its scores and its evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from heedful._checks import check_choice, check_whole
from heedful._errors import InvalidArgument
from heedful._progress import bar
from heedful._runtime import device_of
from heedful.bridges.estimator import seed_of
from heedful.bridges.samples import Samples, check_is_fitted
from heedful.series._machine import Machine, Plan
from heedful.series._reading import SeriesReader
from heedful.series.evidence import Evidence

KernelName = Literal["linear", "softmax", "linear+softmax"]


def check_place(device: Any, random_state: Any) -> None:
    """Refuses a device that is not there, and what is no seed, before data is touched."""
    device_of(device)
    if random_state is not None and not isinstance(random_state, np.random.RandomState):
        seed_of(random_state)


class KernelMethod(SeriesReader):
    """An estimator with a `machine_`; it has parameters `kernel`, `segments`, `features`, `random_state`, `device`, `progress`."""

    machine_: Machine
    loo_score_: float

    def _check_kernel(self) -> None:
        check_choice(KernelName, kernel=self.kernel)
        check_whole(segments=self.segments)
        check_whole(84, optional=True, features=self.features)
        check_place(self.device, self.random_state)

    def _fit_machine(self, samples: Samples, target: np.ndarray, error: Callable[[Tensor], float]) -> Tensor:
        """Learns `machine_`; what it predicts for each case without that case."""
        self.seed_ = seed_of(self.random_state)
        self._scale(samples)
        x, lengths = self._inputs(samples)
        weights = torch.ones(len(x)) if samples.weights is None else torch.from_numpy(samples.weights)
        plan = Plan(tuple(self.kernel.split("+")), int(self.segments), self.features, self.seed_)
        with bar(wanted=self.progress, stays=True) as progress, torch.no_grad():
            answers = torch.from_numpy(target).to(x.device)
            machine, unseen = Machine.fit(x, lengths, answers, weights.to(x.device), plan, error, progress)
        self.machine_ = machine.to(torch.device("cpu"))
        return unseen.cpu()

    def _machine_scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "machine_")
        x, lengths = self._inputs(self._read(X))
        with torch.no_grad():
            return self.machine_.to(x.device).scores(x, lengths).cpu().numpy()

    def evidence(self, X: Any) -> Evidence:
        """What each segment and channel of each series adds to its scores; see `Evidence`. Of the kernel method alone."""
        if hasattr(self, "network_"):
            raise InvalidArgument("evidence is of method='kernel'; this model was fitted by method='network'")
        check_is_fitted(self, "machine_")
        samples = self._read(X)
        x, lengths = self._inputs(samples)
        with torch.no_grad():
            values, base = (part.cpu().numpy() for part in self.machine_.to(x.device).evidence(x, lengths))
        names = None if self.is_table_ else getattr(self, "feature_names_in_", None)
        channels = tuple(map(str, range(self.channels_) if names is None else names))
        outputs = tuple(getattr(self, "classes_", np.arange(values.shape[3])).tolist())
        return Evidence(values, base, outputs, channels, lengths.cpu().numpy(), samples.inputs[0])

    def _tensors_saved(self) -> dict[str, Tensor]:
        return self.machine_.state() if hasattr(self, "machine_") else super()._tensors_saved()

    def _load(self, weights: dict[str, Tensor]) -> None:
        self.machine_ = Machine.of(weights)
