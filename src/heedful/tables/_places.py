"""Places that classes are carried to: centres in space, and the point of a cloud around them that each row is paired with."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from heedful._checks import check_choice, check_number
from heedful._errors import InvalidArgument
from heedful.transport import assignment

Geometry = Literal["simplex", "circle", "lda"]
Pairing = Literal["mean", "ot", "random"]

SEPARATION = 12.0
"""Distance of two centres, in standard deviations of the clouds around them."""

# Steps of the search for places on a sphere that are far from one another.
STEPS = 500


def check_geometry(geometry: Any, separation: Any) -> None:
    """Refuses what is no geometry, before data is touched."""
    check_number(0, optional=True, separation=separation)
    if isinstance(geometry, str):
        check_choice(Geometry, geometry=geometry)
        return
    try:
        centres = np.asarray(geometry, dtype=np.float64)
    except (TypeError, ValueError):
        centres = np.empty(0)
    if centres.ndim != 2 or 0 in centres.shape or not np.isfinite(centres).all():
        raise InvalidArgument(
            f"geometry must be simplex, circle, lda or an array (classes, columns) of finite numbers; got {geometry!r:.100}"
        )
    if separation is not None:
        raise InvalidArgument("separation belongs to a named geometry; an array of centres has its own")


def centres_of(geometry: Any, separation: float | None, points: np.ndarray, codes: np.ndarray) -> np.ndarray:
    r"""Centres `(classes, width)` for the standardised rows `points` `(n, width)` with classes `codes`.

    - `"simplex"`: all pairs `separation` apart, in classes - 1 dimensions; where there are fewer, as far apart on a sphere as a search finds.
    - `"circle"`: $m_c = \rho (\sin 2\pi c/k, \cos 2\pi c/k, 0, \dots)$ with $\rho = 3k$, or with neighbours `separation` apart.
    - `"lda"`: the means of classes where rows of a class are whitened (discriminant analysis), with a mean distance of `separation`.
    """
    count, width = int(codes.max()) + 1, points.shape[1]
    if not isinstance(geometry, str):
        centres = np.asarray(geometry, dtype=np.float64)
        if centres.shape != (count, width):
            raise InvalidArgument(
                f"geometry has shape {centres.shape}; expected (classes, columns) = {(count, width)}, categories counted by level"
            )
        nearest = distances(centres).min()
        if nearest <= 1e-9 * np.abs(centres).max():
            raise InvalidArgument("two centres in geometry are equal, so that their classes could not be told apart")
        return centres
    if geometry == "circle":
        if width < 2:
            raise InvalidArgument(
                "geometry='circle' needs two columns or more: on a line the centres of two classes coincide. Take 'simplex'"
            )
        radius = 3 * count if separation is None else separation / (2 * np.sin(np.pi / count))
        angle = 2 * np.pi * np.arange(count) / count
        return _padded(radius * np.stack((np.sin(angle), np.cos(angle)), axis=1), width)
    separation = SEPARATION if separation is None else separation
    if geometry == "lda":
        found = _padded(_whitened_means(points, codes), width)
        between = distances(found)
        if between.min() <= 1e-6 * between.max():
            raise InvalidArgument(
                "geometry='lda' puts two classes at one place: their rows have the same mean. Take 'simplex'"
            )
        return found * separation / between.mean()
    return _padded(_simplex(count, min(count - 1, width)) * separation, width)


def distances(centres: np.ndarray) -> np.ndarray:
    """Of all pairs, `(pairs,)`."""
    one, two = np.triu_indices(len(centres), 1)
    return np.linalg.norm(centres[one] - centres[two], axis=1)


def targets_of(
    pairing: Pairing,
    centres: np.ndarray,
    points: np.ndarray,
    codes: np.ndarray,
    *,
    p: float,
    deviation: float,
    batch: int,
    seed: int,
) -> np.ndarray:
    r"""Where each row is to go, `(n, width)`.

    `"mean"`: to the centre of its class. `"ot"` and `"random"`: to a point of its own of a cloud $N(m_c, \sigma^2 I)$ that is drawn around it, by the cheapest
    pairing in class, of `batch` rows at a time, or by a random one.
    """
    if pairing == "mean":
        return centres[codes]
    random = np.random.default_rng(seed)
    places = np.empty_like(points)
    for code, centre in enumerate(centres):
        rows = random.permutation(np.flatnonzero(codes == code))
        for begin in range(0, len(rows), batch):
            part = rows[begin : begin + batch]
            cloud = centre + deviation * random.normal(size=(len(part), len(centre)))
            places[part] = (
                cloud if pairing == "random" else assignment(points[part], cloud, p, method="exact").map(cloud)
            )
    return places


def _padded(centres: np.ndarray, width: int) -> np.ndarray:
    return np.pad(centres[:, :width], ((0, 0), (0, max(0, width - centres.shape[1]))))


def _simplex(count: int, size: int) -> np.ndarray:
    """Places one apart, `(count, size)`; where there is no room for that, the least distance is one."""
    if size == count - 1:
        # The corners of the unit cube's axes, about their mean, in the space they span.
        corners = np.eye(count) - 1 / count
        axes = np.linalg.svd(corners)[2][:size]
        return corners @ axes.T / np.sqrt(2)
    warnings.warn(
        f"{count} classes in {size} columns: equal distances need {count - 1}, so some centres are nearer than others",
        stacklevel=2,
    )
    if size == 1:
        return np.arange(count)[:, None] - (count - 1) / 2
    # Charges that repel one another on a sphere.
    places = np.random.default_rng(0).normal(size=(count, size))
    places /= np.linalg.norm(places, axis=1, keepdims=True)
    for step in range(STEPS):
        between = places[:, None] - places
        squares = np.square(between).sum(-1) + np.eye(count)
        force = (between / squares[..., None] ** 4).sum(1)
        force /= np.linalg.norm(force, axis=1).max()
        places += 0.3 * (1 - step / STEPS) * force / np.sqrt(count)
        places /= np.linalg.norm(places, axis=1, keepdims=True)
    return places / distances(places).min()


def _whitened_means(points: np.ndarray, codes: np.ndarray) -> np.ndarray:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    count = int(codes.max()) + 1
    means = np.stack([points[codes == code].mean(0) for code in range(count)])
    if len(points) <= count or not np.ptp(means, axis=0).any():
        return means
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # collinear columns do not matter here
        return LinearDiscriminantAnalysis().fit(points, codes).transform(means)
