"""What estimators of sets of points share: reading, scales, the network, and the check of its symmetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checks import check_choice, check_whole
from heedful._errors import HeedfulError, InvalidArgument
from heedful.bridges.estimator import Estimator, Inputs, device_of, dtype_of, outputs
from heedful.bridges.samples import Samples, validated
from heedful.geometry import _symmetry
from heedful.geometry._cases import Cases, Frames, check_table, read_cases, read_frames
from heedful.geometry._scales import Columns, Scales
from heedful.geometry.network import EquivariantNetwork

BOUND = 1e-8
"""A deviation from the declared symmetry, in float64 and relative to the answers, at which `fit` raises."""
PAIRS = 2**24  # pairs of points that are computed at once


class Points(Estimator):
    """What both have in common: reading sets of points, their scales, the network, and the check of its symmetry."""

    _fitted: ClassVar[tuple[str, ...]] = (
        "n_features_in_", "is_table_", "dim_", "vectors_", "scalars_", "max_points_", "vector_scale_", "scalar_mean_", "scalar_scale_",
        "outputs_", "per_point_", "symmetry_error_", "seed_", "training_",
    )  # fmt: skip
    output: Any = "scalar"
    per_point_: bool
    outputs_: int

    def _check(self) -> None:
        super()._check()
        check_whole(optional=True, dim=self.dim)
        check_whole(0, vectors=self.vectors)
        check_choice((True, False), permutation=self.permutation)
        if not isinstance(self.case, str):
            raise InvalidArgument(f"case must be the name of a column or index level; got {self.case!r:.100}")
        if self.translation == "equivariant" and self.output != "vector":
            raise InvalidArgument(
                "translation='equivariant' is for answers that move along, output='vector'; numbers and classes are 'invariant'"
            )
        # Sizes of layers are checked where layers are made.
        self._make(self.dim or 3, self.vectors, 1, device="meta")

    def _read(
        self, X: Any, y: Any = None, sample_weight: Any = None, groups: Any = None, *, fitting: bool = False
    ) -> Samples:
        if not fitting:
            unseen, _ = self._cases(X)
            return Samples((unseen.values, unseen.lengths))
        frames = read_frames(X, self.case)
        cases = read_cases(X if frames is None else frames.tables)
        self.is_table_ = cases is None
        if cases is None:
            check_table(X, y, self.case)
            values, y = validated(self, X, y)
            cases = Cases(values[:, None], np.ones(len(values), dtype=int))
        else:
            if y is None:
                raise InvalidArgument(f"{type(self).__name__} requires y to be passed, but the target y is None")
            self.n_features_in_ = cases.values.shape[2]
            self.__dict__.pop("feature_names_in_", None)
        if frames is not None:
            sample_weight, groups = frames.aligned(sample_weight, "sample_weight"), frames.aligned(groups, "groups")
            if frames.names is not None:
                self.feature_names_in_ = np.array(frames.names, dtype=object)
        self._lay_out()
        self.max_points_ = int(cases.lengths.max())
        return Samples((cases.values, cases.lengths), self._read_target(y, cases, frames), sample_weight, groups)

    def _read_target(self, y: Any, cases: Cases, frames: Frames | None) -> np.ndarray:
        raise NotImplementedError

    def _lay_out(self) -> None:
        """What the columns of X are."""
        columns = int(self.n_features_in_)
        self.vectors_ = 0 if self.is_table_ and self.dim is None else int(self.vectors)
        if not self.vectors_:
            self.dim_ = 1
            if self.output == "vector" or self.translation is not None:
                raise InvalidArgument(
                    "X is a table, a case of one point with scalars alone in each row, and output='vector' or translation needs vectors; give "
                    "an array (cases, points, columns), or dim=... if the first columns of a row are a vector"
                )
        elif self.dim is None:
            self.dim_, rest = divmod(columns, self.vectors_)
            if rest:
                raise InvalidArgument(
                    f"X has {columns} columns, which are not vectors={self.vectors_} vectors of equal size; dim=... says how many numbers a "
                    "vector has, and columns behind the vectors are scalars"
                )
        else:
            self.dim_ = int(self.dim)
        self.scalars_ = columns - self.vectors_ * self.dim_ if self.vectors_ else columns
        if self.scalars_ < 0:
            raise InvalidArgument(
                f"X has {columns} columns; vectors={self.vectors_} of dim={self.dim_} numbers need {self.vectors_ * self.dim_} or more"
            )

    def _cases(self, X: Any) -> tuple[Cases, Frames | None]:
        """What X holds, checked against what `fit` saw."""
        frames = read_frames(X, self.case)
        if frames is not None:
            frames = frames.ordered(getattr(self, "feature_names_in_", None))
        cases = read_cases(X if frames is None else frames.tables)
        if cases is not None and self.is_table_:
            raise InvalidArgument(
                f"X holds sets of points, and {type(self).__name__} was fitted on a table (cases, columns)"
            )
        if cases is None:
            values = validated(self, X, reset=False, features=self.is_table_)
            if not self.is_table_:
                raise InvalidArgument(
                    f"X is a table (rows, columns), and {type(self).__name__} was fitted on sets of points (cases, points, columns); one case "
                    "(points, columns) is given in a list, [X]"
                )
            cases = Cases(values[:, None], np.ones(len(values), dtype=int))
        if cases.values.shape[2] != self.n_features_in_:
            raise InvalidArgument(
                f"X has {cases.values.shape[2]} features, but {type(self).__name__} is expecting {self.n_features_in_} features as input: "
                "the columns of each point"
            )
        most = int(cases.lengths.max())
        if not self.permutation and most > self.max_points_:
            raise InvalidArgument(
                f"case {int(cases.lengths.argmax())} has {most} points, more than any of the training ({self.max_points_}); with "
                "permutation=False each place has weights of its own, and there are none for later ones"
            )
        return cases, frames

    @property
    def _columns(self) -> Columns:
        return Columns(self.dim_, self.vectors_, self.translation is not None)

    def _scale(self, samples: Samples) -> None:
        scales = Scales.of(Cases(*samples.inputs), self._columns)
        self.vector_scale_, self.scalar_mean_, self.scalar_scale_ = scales.vectors, scales.mean, scales.scale

    def _tensors(self, samples: Samples) -> Inputs:
        return Scales(self.vector_scale_, self.scalar_mean_, self.scalar_scale_).tensors(
            Cases(*samples.inputs), self._columns
        )

    def _parts(self, samples: Samples, learn: np.ndarray, held: np.ndarray) -> dict[str, Any]:
        lengths = samples.inputs[1]
        unequal = {} if (lengths == lengths[0]).all() else {"lengths": lengths[learn]}
        return super()._parts(samples, learn, held) | unequal

    def _network(self) -> EquivariantNetwork:
        return self._make(self.dim_, self.vectors_, self.scalars_, self.max_points_, self.outputs_, self.per_point_)

    def _make(
        self,
        dim: int,
        vectors: int,
        scalars: int,
        points: int = 1,
        outputs: int = 1,
        per_point: bool = False,
        device: Any = None,
    ) -> EquivariantNetwork:
        return EquivariantNetwork(
            dim, vectors, scalars, outputs=outputs, per_point=per_point, max_points=None if self.permutation else points,
            output=self.output, group=self.group, translation=self.translation, permutation=self.permutation, layers=self.layers,
            channels=self.channels, width=self.width, units=self.units, depth=self.depth, device=device,
        )  # fmt: skip

    def _run(self, inputs: Inputs) -> Tensor:
        device = device_of(self.device)
        size = max(1, min(256, PAIRS // inputs[0].shape[1] ** 2))
        return outputs(self.network_, inputs, device, dtype_of(self.predict_dtype, device), size)

    def _loss(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Tensor:
        return super()._loss(network, *self._trimmed(inputs, target), weight)

    def _measure(self, network: nn.Module, inputs: Inputs, target: Any, weight: Any) -> Mapping[str, Tensor]:
        return super()._measure(network, *self._trimmed(inputs, target), weight)

    def _trimmed(self, inputs: Inputs, target: Tensor) -> tuple[Inputs, Tensor]:
        """A batch without the places behind its longest case."""
        n = int((~inputs[-1]).sum(1).max())
        return tuple(part[:, :n] for part in inputs), target[:, :n] if self.per_point_ else target

    def _verify(self, network: nn.Module, samples: Samples) -> None:
        rng = np.random.default_rng(self.seed_)
        places = _symmetry.some(rng, samples.inputs[1])
        cases = Cases(*samples[places].inputs)
        moving = self.translation is not None
        shift = float(self.vector_scale_[0]) if moving else 0.0
        moves = [
            _symmetry.draw(
                rng,
                cases,
                self.dim_,
                mirror=self.group == "O" and at % 2 == 1,
                shift=shift,
                permutation=self.permutation,
            )
            for at in range(_symmetry.TRIALS)
        ]
        self.symmetry_error_, rounding = _symmetry.deviation(
            lambda moved: self._answers(network, moved), cases, moves, self.vectors_,
            per_point=self.per_point_, vector=self.output == "vector",
            unit=shift if self.translation == "equivariant" else None,
        )  # fmt: skip
        if not self.symmetry_error_ <= max(BOUND, 100 * rounding):
            raise HeedfulError(
                f"answers deviate from the declared symmetry by {self.symmetry_error_:.1e}, where rounding gives {rounding:.1e}: this is a "
                "mistake in heedful; please report it with these parameters"
            )

    def _answers(self, network: nn.Module, cases: Cases) -> np.ndarray:
        """What the network says in float64, in its own units; of vectors that move along, from where the points are."""
        inputs = self._tensors(Samples((cases.values, cases.lengths)))
        values = outputs(network, inputs, torch.device("cpu"), torch.float64).numpy()
        if self.translation != "equivariant":
            return values
        return values + beside(self._columns.vectors_of(cases)[1] / self.vector_scale_[0], values)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def beside(centre: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A centre for each case, (cases, dim), against values (cases, ..., dim)."""
    return centre.reshape(len(centre), *[1] * (values.ndim - 2), -1)
