"""Four kinds of estimators, by what they predict: classes, numbers, an order within each list, coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from heedful._errors import InvalidArgument, MissingExtra
from heedful.bridges.estimator import Estimator, Inputs
from heedful.bridges.samples import Samples, encoded, hold_out, weights_of

try:
    from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, RegressorMixin, TransformerMixin
    from sklearn.metrics import ndcg_score
    from sklearn.utils.validation import check_is_fitted
except ImportError:
    raise MissingExtra("scikit-learn", "tables") from None

__all__ = ["Classifier", "Ranker", "Regressor", "Transformer"]


class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """An estimator whose network gives one logit for each of `classes_`; the loss is the cross-entropy."""

    metric: ClassVar[str] = "accuracy"
    classes_: np.ndarray

    def _labelled(self, samples: Samples) -> Samples:
        self.classes_, codes = encoded(samples.target)
        if len(self.classes_) < 2:
            raise InvalidArgument(f"y holds one class, {self.classes_[0]}; a classifier needs two or more")
        weights = weights_of(self.classes_, codes, getattr(self, "class_weight", None), samples.weights)
        return replace(samples, target=codes, weights=weights)

    def _split(self, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
        labels = {"codes": samples.target, "groups": samples.groups, "times": samples.times}
        return hold_out(len(samples), self.validation_fraction, self.seed_, **labels)

    def _loss(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Tensor:
        if weight is None:
            return functional.cross_entropy(network(*inputs), target)
        return (weight * functional.cross_entropy(network(*inputs), target, reduction="none")).mean()

    def _measure(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Mapping[str, Tensor]:
        logits = network(*inputs)
        loss = functional.cross_entropy(logits, target, reduction="none")
        return {"loss": _weighted(loss, weight), "accuracy": (logits.argmax(1) == target).float()}

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits `(cases, classes)`; of two classes the second's logit minus the first's, `(cases,)`."""
        logits = self._outputs(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities `(cases, classes)`, in the order of `classes_`."""
        return torch.from_numpy(self._outputs(X)).double().softmax(1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The class of largest probability for each case."""
        best = self._outputs(X).argmax(1)
        return self.classes_[best]


class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """An estimator whose network gives a number for each case, `(cases,)`, or several, `(cases, outputs)`.

    The network learns the standardised target by squared errors; `target_mean_` and `target_scale_` bring it back. Each output has
    its own, and they weigh alike; `multi_output` among scikit-learn's tags says that there may be several.
    """

    metric: ClassVar[str] = "r2"
    _target: ClassVar[tuple[str, ...]] = ("target_mean_", "target_scale_")  # to be listed in `_fitted`
    target_mean_: Any
    target_scale_: Any

    def _labelled(self, samples: Samples) -> Samples:
        if np.asarray(samples.target).dtype.kind in "mM":
            raise InvalidArgument("y holds dates or lengths of time; give numbers, as days since one of them")
        try:
            target = np.array(samples.target, dtype=np.float64)
        except (TypeError, ValueError):
            raise InvalidArgument("y must be numbers; for classes take a classifier") from None
        return replace(samples, target=target, weights=_case_weights(samples))

    def _scale(self, samples: Samples) -> None:
        target = samples.target
        assert target is not None
        # A power of two near the largest: sums and squares do not overflow, and nothing is rounded.
        unit = np.ldexp(1.0, np.frexp(np.abs(target).max(0, initial=0.0))[1] - 1)
        mean, scale = (target / unit).mean(0) * unit, (target / unit).std(0) * unit
        scale = np.where(scale > 0, scale, 1.0)
        one = target.ndim == 1
        self.target_mean_, self.target_scale_ = (float(mean), float(scale)) if one else (mean, scale)

    def _errors(self, network: nn.Module, inputs: Inputs, target: Tensor) -> Tensor:
        """In standard deviations, in the shape of the network's output."""
        output = network(*inputs)
        mean, scale = (torch.as_tensor(part).to(target) for part in (self.target_mean_, self.target_scale_))
        return output - ((target - mean) / scale).to(output)

    def _case_means(self, values: Tensor, inputs: Inputs) -> Tensor:
        """Values in the shape of the network's output, a mean for each case."""
        return values if values.dim() == 1 else values.flatten(1).mean(1)

    def _loss(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Tensor:
        errors = self._errors(network, inputs, target)
        return _weighted(self._case_means(errors.square(), inputs), weight).mean()

    def _measure(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Mapping[str, Tensor]:
        errors = self._errors(network, inputs, target)
        loss = self._case_means(errors.square(), inputs)
        absolute = errors.abs() * torch.as_tensor(self.target_scale_).to(errors)
        return {"loss": _weighted(loss, weight), "absolute_error": self._case_means(absolute, inputs)}

    def predict(self, X: Any) -> np.ndarray:
        """A number for each case, or one for each output."""
        return self._outputs(X).astype(np.float64) * self.target_scale_ + self.target_mean_


class Ranker(Estimator):
    r"""An estimator that orders the members of each list: rows of X with one entry of `groups` are a list, y their relevances.

    The network takes lists `(batch, n, ...)` with `padding` `(batch, n)`, True behind a list's end, and gives a score for each
    member. Loss: $-\sum_i p_i \log \mathrm{softmax}(s)_i$ with $p = y / \sum y$ (Cao et al. 2007, "Learning to rank: from pairwise
    approach to listwise approach"). Batches are of lists of similar lengths; lists are held out whole.
    """

    metric: ClassVar[str] = "ndcg"

    def _labelled(self, samples: Samples) -> Samples:
        if samples.groups is None:
            raise InvalidArgument("a ranker needs groups, the list of each row: fit(X, y, groups=...)")
        if samples.weights is not None:
            raise InvalidArgument("a ranker takes no sample_weight; leave it out")
        target = np.asarray(samples.target, dtype=np.float32)
        if not np.isfinite(target).all() or (target < 0).any():
            raise InvalidArgument("y must be relevances, finite numbers from 0 on")
        return replace(samples, target=target)

    def _lists(self, samples: Samples) -> list[Any]:
        """(inputs, relevances) of each list."""
        assert samples.groups is not None
        inputs = self._tensors(samples)
        target = None if samples.target is None else torch.from_numpy(samples.target)
        places = [np.flatnonzero(samples.groups == group) for group in np.unique(samples.groups)]
        return [(tuple(part[at] for part in inputs), None if target is None else target[at]) for at in places]

    def _parts(self, samples: Samples, learn: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        data = self._lists(samples[learn])
        return {
            "data": data,
            "held_out": self._lists(samples[held]) if len(held) else None,
            "collate": _padded,
            "lengths": [len(target) for _, target in data],
        }

    def _losses(self, scores: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        share = target / target.sum(1, keepdim=True).clamp_min(torch.finfo(target.dtype).tiny)
        return -(share * scores.masked_fill(padding, -torch.inf).log_softmax(1).masked_fill(padding, 0.0)).sum(1)

    def _loss(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Tensor:
        return self._losses(network(*inputs), target, inputs[-1]).mean()

    def _measure(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Mapping[str, Tensor]:
        return {"loss": self._losses(network(*inputs), target, inputs[-1])}

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """A score for each row, the larger the earlier in its list; without `groups` all rows are one list."""
        check_is_fitted(self, "network_")
        samples = self._read(X)
        samples = self._grouped(replace(samples, groups=np.zeros(len(samples)) if groups is None else groups))
        assert samples.groups is not None
        lists = self._lists(replace(samples, target=None))
        inputs = _padded(lists)[0]
        scores = self._run(inputs).numpy()
        result = np.empty(len(samples), dtype=scores.dtype)
        for row, group in zip(scores, np.unique(samples.groups), strict=True):
            places = np.flatnonzero(samples.groups == group)
            result[places] = row[: len(places)]
        return result

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """The mean NDCG of lists with two members or more, one of them relevant."""
        scores, y = self.predict(X, groups), np.asarray(y)
        groups = np.zeros(len(y)) if groups is None else np.asarray(groups)
        lists = [np.flatnonzero(groups == group) for group in np.unique(groups)]
        values = [ndcg_score([y[at]], [scores[at]]) for at in lists if len(at) > 1 and y[at].any()]
        if not values:
            raise InvalidArgument("no list has two members or more and a relevant one; there is no NDCG")
        return float(np.mean(values))


class Transformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Estimator):  # type: ignore[misc]
    """An estimator whose network, or whatever `_outputs` computes, gives coordinates `(cases, dimensions)`; y is ignored."""

    _n_features_out: int

    def _read(self, X: Any, y: Any = None, *weights_and_groups: Any, fitting: bool = False) -> Samples:
        return super()._read(X, None, *weights_and_groups, fitting=fitting)

    def _labelled(self, samples: Samples) -> Samples:
        return replace(samples, weights=_case_weights(samples))

    def transform(self, X: Any) -> np.ndarray:
        """The coordinates of each case."""
        return self._outputs(X)


def _case_weights(samples: Samples) -> np.ndarray | None:
    """A weight for each case where there are no classes to weigh."""
    return weights_of(np.zeros(1), np.zeros(len(samples), dtype=int), None, samples.weights)


def _weighted(loss: Tensor, weight: Tensor | None) -> Tensor:
    return loss if weight is None else weight * loss


def _padded(lists: list[Any]) -> tuple[Any, Tensor | None, None]:
    """Lists of unequal lengths as a batch: inputs with the padding behind them, and relevances, zero behind a list's end."""
    lengths = torch.tensor([len(inputs[0]) for inputs, _ in lists])
    inputs = [
        pad_sequence(list(parts), batch_first=True) for parts in zip(*(inputs for inputs, _ in lists), strict=True)
    ]
    padding = torch.arange(int(lengths.max())) >= lengths[:, None]
    target = None if lists[0][1] is None else pad_sequence([target for _, target in lists], batch_first=True)
    return (*inputs, padding), target, None
