"""What a fitted `NextEvent` answers: the next type, if it happens at a time, when, and simulated futures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.bridges.estimator import Inputs, device_of, dtype_of, placed, seed_of
from heedful.bridges.frames import Frames
from heedful.bridges.samples import check_is_fitted
from heedful.events._sequences import Columns, numbers_of_times, read_sequences
from heedful.events._windows import EventSamples, Windows
from heedful.events.cycles import as_wait
from heedful.events.density import LogNormalMixture
from heedful.events.network import EventNetwork
from heedful.events.results import Curve, Evaluation, Futures

LATEST = 9.2e12  # seconds since 1970
CELLS = 2**24  # logits that are computed at once


class Answering:
    """The methods of `NextEvent` that need a fitted network."""

    if TYPE_CHECKING:
        classes_: np.ndarray
        network_: Any
        history: int
        device: str
        predict_dtype: str
        least_gap_: float
        is_dated_: bool
        seed_: int

        sequence: str
        sort: bool

        def _read(self, X: Any) -> EventSamples: ...
        def _columns(self) -> Columns: ...

    @torch.no_grad()
    def predict_proba(self, X: Any, at: Any = None) -> np.ndarray:
        """The probability of each of `classes_` to be next `(sequences, types)`; if it happens at the times `at`, one for each sequence."""
        samples, network = self._unseen(X), self._ready()
        times = self._target_times(at, samples)
        shares = np.empty((len(samples), network.types))
        for rows, states, inputs, last in self._last(network, samples):
            chosen = None if times is None else torch.from_numpy(times[rows]).to(states.device)
            shares[rows] = self._shares(network, states, inputs, last, chosen).cpu().numpy()
        return shares

    def predict(self, X: Any, at: Any = None) -> np.ndarray:
        """The likeliest next type of each sequence; if it happens at the times `at`, one for each."""
        shares = self.predict_proba(X, at)
        return self.classes_[shares.argmax(1)]

    @torch.no_grad()
    def predict_time(self, X: Any, quantile: float | str = 0.5) -> np.ndarray:
        """When the next event happens: its median time, another `quantile` between 0 and 1, or the `"mean"`; of dates datetime64."""
        if quantile != "mean":
            check_number(0, 1, quantile=quantile)
        samples, network = self._unseen(X), self._ready()
        waits = np.empty(len(samples))
        for rows, states, _, last in self._last(network, samples):
            law = self._law(network, states, last)
            waits[rows] = (law.mean() if quantile == "mean" else law.quantile(float(quantile))).numpy()
        return self._dates(samples.last_times + waits)

    @torch.no_grad()
    def evaluate(self, X: Any, *, at: str | None = None) -> Evaluation:
        """How well every event of X is foreseen from those before it; `at="true"` gives each one's time, None does not."""
        check_choice(("true",), optional=True, at=at)
        samples, network = self._unseen(X), self._ready()
        right, type_nll, time_nll, targets = 0, 0.0, 0.0, 0
        levels = []
        for inputs, target, rest in self._batches(Windows(samples, int(self.history))):
            following, waits, counts = target[..., 0].long(), target[..., 1], target[..., 2] > 0
            states = network.states(*inputs)
            hidden = states if at is None else self._targets(network, states, inputs, inputs[1] + waits)
            wanted = following[counts]
            known = wanted < network.types
            own, correct = judged(network, hidden[counts], wanted, known=at is not None)
            right += int(correct.sum())
            # A type that was never learned has no probability; it counts as one of all, and one more.
            type_nll -= float(torch.where(known, own, -np.log(network.types + 1)).sum())
            targets += len(wanted)
            law = network.waits(states)
            if law is not None:
                last = (~inputs[2]).sum(1) - 1
                ends = law.at((torch.arange(len(last), device=last.device), last)).log_survival(rest[:, 0]) * rest[:, 1]
                floor = positive(waits[counts], self.least_gap_)
                time_nll -= float(law.at(counts).log_prob(floor).double().sum() + ends.double().sum())
                # Events at one time are no draws of a density: they say nothing of its calibration.
                levels.append(law.at(counts).cdf(floor)[waits[counts] > 0].double().cpu().numpy())
        if not targets:
            raise InvalidArgument("no sequence of X has two events or more, so there is none to foresee")
        typed = network.types > 1
        return Evaluation(
            at, targets, right / targets if typed else None, type_nll / targets if typed else None, time_nll / targets if levels else None,
            np.sort(np.concatenate(levels)) if levels else np.empty(0),
        )  # fmt: skip

    def score(self, X: Any, y: Any = None, *, at: str | None = None) -> float:
        """The accuracy of `evaluate`: of the type of every event, from those before it, its time known (`at="true"`) or not (None).

        Where events have no types, it is the mean log-density of the waits.
        """
        result = self.evaluate(X, at=at)
        if result.accuracy is None:
            assert result.time_nll is not None
            return -result.time_nll
        return result.accuracy

    def evaluations(self, X: Any) -> list[Evaluation]:
        """`evaluate` with the time of each event unknown and, where the model has answers for that, known."""
        ways = (None, "true") if self.network_.targets is not None else (None,)
        return [self.evaluate(X, at=at) for at in ways]

    def times_at(self, X: Any, at: str) -> np.ndarray:
        """Times for `at` of each sequence from text: one number or date for all, or `"+5"` and `"+1d"`, a wait behind each last event."""
        samples = self._unseen(X)
        if at.startswith("+"):
            if not self.is_dated_ and at.strip()[-1:].isalpha():
                raise InvalidArgument(
                    f"times are numbers of an unknown unit, so a wait is a number too, as +5; got {at!r}"
                )
            return self._dates(samples.last_times + as_wait(at[1:]))
        try:
            time = _date(at) if self.is_dated_ else float(at)
        except ValueError:
            kind = "a date as 2026-01-31T12:00" if self.is_dated_ else "a number"
            raise InvalidArgument(f"at must be {kind}, or a wait as +5 or +1d; got {at!r}") from None
        return np.full(len(samples), time)

    def columns_beside(self, X: Any) -> dict[str, list[str]]:
        """What a table of predictions says besides: the name of each sequence, and the median time of its next event."""
        names = read_sequences(X, self._columns(), sort=bool(self.sort)).names
        named = {} if names is None else {self.sequence: [str(name) for name in names]}
        if not self.network_.components:
            return named
        times = self.predict_time(X)
        zone = "Z" if self.is_dated_ else ""
        return named | {"median time": [f"{time}{zone}" for time in (times.astype("datetime64[s]") if zone else times)]}

    @torch.no_grad()
    def probability_curve(self, X: Any, grid: Any = None) -> Curve:
        """The probability of each type if the next event happens after each wait of `grid`; of one sequence.

        By default 200 waits up to the 95th percentile of the predicted wait. Keys are computed once: only queries differ between waits.
        """
        samples = self._unseen([X] if isinstance(X, tuple) and len(X) == 2 else X)
        if len(samples) != 1:
            raise InvalidArgument(f"probability_curve takes one sequence; got {len(samples)}")
        network = self._ready()
        _, states, inputs, last = next(self._last(network, samples))
        law = network.waits(states[:, -1])
        waits = self._grid(grid, law)
        after = torch.from_numpy(waits).to(states.device)
        hidden = self._targets(network, states, inputs, inputs[1][:, -1:] + after, last)
        shares = network.logits(hidden[0], known=True).double().softmax(-1)
        density = None if law is None else law.log_prob(positive(after, self.least_gap_)).double().exp().cpu().numpy()
        return Curve(waits, shares.cpu().numpy(), self.classes_, density)

    @torch.no_grad()
    def sample(self, X: Any, steps: int = 10, draws: int = 1, random_state: Any = None) -> Futures:
        """Simulates `steps` further events of each sequence, `draws` times: a wait by its law, then a type if it happens then.

        Marks of simulated events are not known: they are read as the mean of a number, and as no level of a text.
        """
        check_whole(steps=steps, draws=draws)
        samples, network = self._unseen(X), self._ready()
        generator = torch.Generator().manual_seed(self.seed_ if random_state is None else seed_of(random_state))
        size = len(samples) * draws
        now = samples[np.repeat(np.arange(len(samples)), draws)]
        types, times = np.empty((size, steps), dtype=np.int64), np.empty((size, steps))
        for step in range(steps):
            for rows, states, inputs, last in self._last(network, now):
                waits = self._law(network, states, last).sample(generator).clamp_min(self.least_gap_)
                after = torch.from_numpy(now.last_times[rows]) + waits
                known = None if network.targets is None else after.to(states.device)
                shares = self._shares(network, states, inputs, last, known).cpu()
                types[rows, step] = torch.multinomial(shares, 1, generator=generator)[:, 0].numpy()
                times[rows, step] = after.numpy()
            marks = np.zeros((size, now.inputs[2].shape[1]), dtype=np.float32)
            new: tuple[np.ndarray, ...] = (types[:, step], times[:, step], marks, *now.inputs[3:])
            now = now.joined(EventSamples(new, offsets=np.arange(size + 1)))
        shape = (len(samples), draws, steps)
        return Futures(self.classes_[types].reshape(shape), self._dates(times.reshape(shape)))

    def _unseen(self, X: Any) -> EventSamples:
        check_is_fitted(self, "network_")
        return self._read(X)

    def _ready(self) -> EventNetwork:
        device = device_of(self.device)
        network = placed(self.network_, device, dtype_of(self.predict_dtype, device))
        assert isinstance(network, EventNetwork)
        return network

    def _batches(self, windows: Windows) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """Batches on the device; times and waits stay float64."""
        device = device_of(self.device)
        for rows in windows.batches():
            inputs, target, rest = windows.batch(rows)
            yield tuple(part.to(device) for part in inputs), target.to(device), rest.to(device)

    def _last(
        self, network: EventNetwork, samples: EventSamples
    ) -> Iterator[tuple[np.ndarray, Tensor, Inputs, Tensor]]:
        """Of batches of sequences: which they are, the states of their last events, the inputs, and the place of the last event."""
        windows = Windows(samples, int(self.history), last=True)
        for rows, (inputs, _, _) in zip(windows.batches(), self._batches(windows), strict=True):
            yield rows, network.states(*inputs), inputs, (~inputs[2]).sum(1) - 1

    @staticmethod
    def _law(network: EventNetwork, states: Tensor, last: Tensor) -> LogNormalMixture:
        law = network.waits(states[torch.arange(len(last), device=last.device), last])
        if law is None:
            raise InvalidArgument("the model was fitted with components=0 and has no density of waits")
        return law.cpu()

    def _shares(
        self, network: EventNetwork, states: Tensor, inputs: Inputs, last: Tensor, times: Tensor | None
    ) -> Tensor:
        """Probabilities of the next types `[B, K]`, if it happens at `times` where they are given."""
        if times is None:
            logits = network.logits(states[torch.arange(len(last), device=last.device), last])
        else:
            logits = network.logits(self._targets(network, states, inputs, times[:, None], last)[:, 0], known=True)
        return logits.double().softmax(-1)

    @staticmethod
    def _targets(
        network: EventNetwork, states: Tensor, inputs: Inputs, times: Tensor, last: Tensor | None = None
    ) -> Tensor:
        if network.targets is None:
            why = "time='order'" if network.time == "order" else "target_layers=0"
            raise InvalidArgument(f"the model was fitted with {why} and has no answers for a known time; give at=None")
        return network.read(states, inputs[1], times, inputs[2], last=last)

    def _target_times(self, at: Any, samples: EventSamples) -> np.ndarray | None:
        """The times of the next events, one for each sequence and none before its last event."""
        if at is None:
            return None
        if isinstance(at, str) and at == "true":
            raise InvalidArgument(
                "the event after the last one of X has no true time; give at=None or a time for each sequence, or call score or evaluate "
                "with at='true', which foresee the events of X themselves"
            )
        if samples.names is not None:
            at = Frames([], None, samples.names, nouns=("columns", "sequences")).aligned(at, "at")
        if isinstance(at, list | tuple):
            at = np.array(at, dtype=object if any(hasattr(one, "isoformat") for one in at) else None)
        times, dated = numbers_of_times(at if getattr(at, "ndim", 0) == 1 else np.atleast_1d(at), "at")
        if len(times) != len(samples):
            raise InvalidArgument(f"at must have a time for each of the {len(samples)} sequences; got {len(times)}")
        if not np.isfinite(times).all():
            raise InvalidArgument(
                f"at is {times[~np.isfinite(times)][0]} for sequence {int((~np.isfinite(times)).argmax())}; give a finite time"
            )
        if dated != self.is_dated_:
            raise InvalidArgument(f"at holds {sort_of(dated)}, and times were {sort_of(self.is_dated_)} in fit")
        early = times < samples.last_times
        if early.any():
            raise InvalidArgument(
                f"at is before the last event of sequence {int(early.argmax())}; the next event comes after it"
            )
        return times

    def _grid(self, grid: Any, law: LogNormalMixture | None) -> np.ndarray:
        if grid is None:
            if law is None:
                raise InvalidArgument(
                    "the model has no density of waits (components=0), so grid must be given: waits of 0 or more"
                )
            return np.linspace(0.0, float(law.quantile(0.95)), 200)
        waits = np.asarray(grid)
        waits = waits / np.timedelta64(1, "s") if waits.dtype.kind == "m" else waits.astype(np.float64)
        if waits.ndim != 1 or not len(waits) or not np.isfinite(waits).all() or (waits < 0).any():
            raise InvalidArgument("grid must be waits of 0 or more, in units of time behind the last event")
        return waits

    def _dates(self, times: np.ndarray) -> np.ndarray:
        if not self.is_dated_:
            return times
        # Beyond what datetime64 holds a heavy tail's mean is the latest date that there is.
        return np.round(np.clip(times, -LATEST, LATEST) * 1e6).astype("datetime64[us]")


def positive(waits: Tensor, least: float) -> Tensor:
    """Waits with the least positive gap of the training in place of 0, at which no density is."""
    return torch.where(waits > 0, waits, least)


@torch.no_grad()
def judged(network: EventNetwork, states: Tensor, wanted: Tensor, known: bool) -> tuple[Tensor, Tensor]:
    """log p of the wanted types in float64 and whether each is the likeliest, of some states `[N, embed]` after others: memory does not grow with N K."""
    own, right = [], []
    rows = max(1, CELLS // network.types)
    for some, types in zip(states.split(rows), wanted.split(rows), strict=True):
        logits = network.logits(some, known=known).double()
        place = types.clamp_max(network.types - 1)[:, None]
        own.append(logits.gather(1, place)[:, 0] - logits.logsumexp(1))
        right.append(logits.argmax(1) == types)
    return (
        (torch.cat(own), torch.cat(right))
        if own
        else (states.new_zeros(0).double(), wanted.new_zeros(0, dtype=torch.bool))
    )


def _date(text: str) -> np.datetime64:
    """A date in UTC, which it is also without a zone."""
    import pandas

    stamp = pandas.Timestamp(text)
    return (stamp if stamp.tzinfo is None else stamp.tz_convert("UTC").tz_localize(None)).to_datetime64()


def sort_of(dated: bool) -> str:
    """What times are called in errors."""
    return "dates" if dated else "numbers"
