"""Kernel SVD: against numpy's SVD of the written-out matrix, out of sample, under row sums, by scikit-learn's own checks."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from heedful import (
    Cosine,
    FeatureMap,
    Gaussian,
    HigherOrder,
    InvalidArgument,
    Laplace,
    Polynomial,
    Sigmoid,
    Softmax,
    attend,
)
from heedful.bridges.estimator import Estimator
from heedful.decomposition import KernelSVD

N, M, D = 23, 19, 5

KERNELS = [
    Softmax(),
    Softmax(0.3),
    Gaussian(2.0),
    Gaussian(2.0, normalize=False),
    Laplace(),
    Sigmoid(bias=-1.0),
    Polynomial(3, offset=1.0),
    Polynomial(2, offset=0.5),
    Cosine(),
    FeatureMap("elu"),
    FeatureMap("relu", normalize=False),
    FeatureMap("random", features_count=7),
    FeatureMap("elu").averaged(),
    0.5 * Softmax(),
    Softmax() + Cosine(),
    Softmax() * Gaussian(2.0),
    Sigmoid() * Softmax(),
    Sigmoid().normalized(),
    Gaussian(2.0, normalize=False).averaged(),
]


def points(seed=0, n=N, m=M, d=D):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, d)), draw.normal(size=(m, d))


def written_out(kernel, X, Z):
    query, key = (torch.from_numpy(part)[None] for part in (X, Z))
    return attend.coefficients(query, key, kernel=kernel)[0].numpy()


def rebuilt(svd):
    return svd.left_vectors_ * svd.singular_values_ @ svd.right_vectors_.T


def near(a, b, tolerance=1e-9):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_every_kernel_against_numpy(kernel):
    X, Z = points()
    svd = KernelSVD(kernel=kernel).fit(X, Z=Z)
    K = written_out(kernel, X, Z)
    sigma = np.linalg.svd(K, compute_uv=False)
    near(svd.singular_values_, sigma[: len(svd.singular_values_)])
    near(rebuilt(svd), K)
    np.testing.assert_allclose(svd.left_vectors_.T @ svd.left_vectors_, np.eye(len(svd.singular_values_)), atol=1e-9)
    # Small singular values magnify the rounding of u = K v / sigma.
    large = svd.singular_values_ > 1e-6 * sigma[0]
    np.testing.assert_allclose(svd.transform(X)[:, large], svd.left_vectors_[:, large], atol=1e-8)
    np.testing.assert_allclose(svd.transform_right(Z)[:, large], svd.right_vectors_[:, large], atol=1e-8)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_new_points_keep_the_row_sums_of_fit(kernel):
    """u(x) = K(x, Z) v / sigma and v(z) = K(X, z)^T u / sigma, rows divided by their sums over the Z of fit."""
    X, Z = points()
    new_x, new_z = points(1, n=3, m=2)
    svd = KernelSVD(4, kernel).fit(X, Z=Z)
    np.testing.assert_allclose(
        svd.transform(new_x), written_out(kernel, new_x, Z) @ svd.right_vectors_ / svd.singular_values_, atol=1e-9
    )
    # With the points of fit mixed in, in another order, they get what they got before, and so do copies of them.
    mixed = np.concatenate((Z[5:7], new_z, Z[:1]))
    got = svd.transform_right(mixed)
    np.testing.assert_allclose(got[[0, 1, 4]], svd.right_vectors_[[5, 6, 0]], atol=1e-8)
    np.testing.assert_allclose(svd.transform_right(new_z), got[2:4], atol=1e-12)
    assert np.isfinite(got).all()


@pytest.mark.parametrize(
    "kernel", ["linear", Cosine(), FeatureMap("elu"), Polynomial(2, offset=1.0), 2.0 * Cosine()], ids=repr
)
def test_the_primal_solver_equals_the_dense_one(kernel):
    X, Z = points(2, n=101, m=47)
    new_x, new_z = points(3, n=5, m=7)
    primal = KernelSVD(kernel=kernel, solver="primal").fit(X, Z=Z)
    dense = KernelSVD(len(primal.singular_values_), kernel, solver="dense").fit(X, Z=Z)
    assert primal.solver_ == KernelSVD(kernel=kernel).fit(X, Z=Z).solver_ == "primal"
    near(primal.singular_values_, dense.singular_values_)
    near(rebuilt(primal), rebuilt(dense))
    np.testing.assert_allclose(primal.transform(new_x), dense.transform(new_x), atol=1e-7)
    np.testing.assert_allclose(primal.transform_right(new_z), dense.transform_right(new_z), atol=1e-7)


def test_auto_is_dense_where_there_are_more_features_than_points():
    X, _ = points(n=4)
    assert KernelSVD(kernel="linear").fit(X).solver_ == "dense"
    assert KernelSVD(kernel=Gaussian()).fit(points()[0]).solver_ == "dense"


def test_nystrom_is_exact_where_the_landmarks_have_the_rank():
    draw = np.random.default_rng(0)
    K = draw.normal(size=(20, 3)) @ draw.normal(size=(3, 16))
    svd = KernelSVD(3, "precomputed", solver="nystrom", n_landmarks=5, random_state=0).fit(K)
    near(rebuilt(svd), K)
    near(svd.singular_values_, np.linalg.svd(K, compute_uv=False)[:3])
    np.testing.assert_allclose(svd.left_vectors_.T @ svd.left_vectors_, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(svd.transform(K[:4]), svd.left_vectors_[:4], atol=1e-9)
    np.testing.assert_allclose(svd.transform_right(K.T[:4]), svd.right_vectors_[:4], atol=1e-9)


@pytest.mark.parametrize(
    "kernel", [Gaussian(3.0), Softmax(0.3), lambda x, z: np.exp(0.1 * x @ z.T)], ids=["gaussian", "softmax", "callable"]
)
def test_nystrom_is_near_and_exact_with_all_landmarks(kernel):
    X, Z = points(4, n=67, m=53)
    dense = KernelSVD(3, kernel, solver="dense").fit(X, Z=Z)
    every = KernelSVD(3, kernel, solver="nystrom", n_landmarks=67).fit(X, Z=Z)
    near(every.singular_values_, dense.singular_values_, 1e-6)
    some = KernelSVD(3, kernel, solver="nystrom", n_landmarks=29, random_state=0).fit(X, Z=Z)
    near(some.singular_values_, dense.singular_values_, 0.02)
    again = KernelSVD(3, kernel, solver="nystrom", n_landmarks=29, random_state=0).fit(X, Z=Z)
    np.testing.assert_array_equal(some.left_vectors_, again.left_vectors_)
    other = KernelSVD(3, kernel, solver="nystrom", n_landmarks=29, random_state=1).fit(X, Z=Z)
    assert not np.array_equal(some.left_vectors_, other.left_vectors_)
    # Vectors of near singular values may turn; what they rebuild of new points may not.
    every = KernelSVD(None, kernel, solver="dense").fit(X, Z=Z)
    new_x, new_z = points(5, n=5, m=7)
    exact = every.transform(new_x) * every.singular_values_ @ every.right_vectors_.T
    far, least = (
        np.linalg.norm(exact - svd.transform(new_x) * svd.singular_values_ @ svd.right_vectors_.T)
        for svd in (some, dense)
    )
    assert far < 1.05 * least
    exact = every.left_vectors_ * every.singular_values_ @ every.transform_right(new_z).T
    far, least = (
        np.linalg.norm(exact - svd.left_vectors_ * svd.singular_values_ @ svd.transform_right(new_z).T)
        for svd in (some, dense)
    )
    assert far < 1.05 * least


def test_twice_the_rows_keep_nystrom_from_exploding():
    """The formula with a square sample, whose pseudo-inverse magnifies what the sample misses, against ours."""
    X, Z = points(4, n=267, m=253)
    K = written_out(Softmax(0.3), X, Z)
    true = np.linalg.svd(K, compute_uv=False)[:3]
    ours, square = [], []
    for seed in range(20):
        svd = KernelSVD(3, "precomputed", solver="nystrom", n_landmarks=40, random_state=seed).fit(K)
        ours.append(np.abs(svd.singular_values_ / true - 1).max())
        draw = np.random.RandomState(seed)
        rows, columns = draw.choice(267, 40, replace=False), draw.choice(253, 40, replace=False)
        near_k = K[:, columns] @ np.linalg.pinv(K[np.ix_(rows, columns)]) @ K[rows]
        square.append(np.abs(np.linalg.svd(near_k, compute_uv=False)[:3] / true - 1).max())
    assert max(ours) < 0.15
    assert max(square) > 5


def test_nystrom_does_not_write_out_the_matrix():
    asked = []

    def kernel(x, z):
        asked.append((len(x), len(z)))
        return np.exp(-((x[:, None] - z[None]) ** 2).sum(-1))

    X, Z = points(n=40, m=30)
    KernelSVD(2, kernel, solver="nystrom", n_landmarks=7, random_state=0).fit(X, Z=Z)
    assert asked == [(40, 7), (14, 30)]


def test_projections_make_an_attention_matrix():
    """<A x, B z> with points of different widths; with a layer's query and key maps, the layer's own weights."""
    draw = np.random.default_rng(0)
    X, Z, A, B = (draw.normal(size=size) for size in ((23, 5), (19, 7), (3, 5), (3, 7)))
    svd = KernelSVD(left=A, right=B).fit(X, Z=Z)
    near(rebuilt(svd), X @ A.T @ B @ Z.T)
    assert svd.solver_ == "primal"
    assert len(svd.singular_values_) == 3
    soft = KernelSVD(kernel=Softmax(), left=A, right=B).fit(X, Z=Z)
    near(rebuilt(soft), written_out(Softmax(), X @ A.T, Z @ B.T))


def test_one_set_in_two_roles_and_a_symmetric_kernel():
    X, _ = points()
    svd = KernelSVD(4, Gaussian(2.0, normalize=False)).fit(X)
    np.testing.assert_allclose(svd.left_vectors_, svd.right_vectors_, atol=1e-9)
    asymmetric = KernelSVD(4, Softmax()).fit(X)
    assert np.abs(asymmetric.left_vectors_ - asymmetric.right_vectors_).max() > 0.1


def test_components_beyond_the_rank_are_zero_or_left_out():
    K = np.outer(np.arange(1.0, 6), np.arange(1.0, 4))
    assert KernelSVD(kernel="precomputed").fit(K).singular_values_.shape == (1,)
    svd = KernelSVD(2, "precomputed").fit(K)
    assert svd.singular_values_[1] == 0
    assert svd.transform(K).shape == (5, 2)
    np.testing.assert_array_equal(svd.transform(K)[:, 1], 0)
    np.testing.assert_allclose(svd.transform(K), svd.left_vectors_, atol=1e-12)
    assert KernelSVD(9, "precomputed").fit(K).singular_values_.shape == (3,)


def test_large_scores_do_not_overflow():
    X, Z = points()
    svd = KernelSVD(3, Softmax(50.0)).fit(10 * X, Z=10 * Z)
    assert np.isfinite(svd.left_vectors_).all()
    assert np.isfinite(svd.transform_right(10 * Z)).all()


def test_blocks_of_rows_change_nothing(monkeypatch):
    X, Z = points()
    whole = KernelSVD(3, Softmax()).fit(X, Z=Z)
    monkeypatch.setattr("heedful.decomposition.CELLS", 4 * M)
    parts = KernelSVD(3, Softmax()).fit(X, Z=Z)
    np.testing.assert_allclose(whole.left_vectors_, parts.left_vectors_, atol=1e-12)


def test_tensors_frames_and_arrays_are_read_alike():
    pandas = pytest.importorskip("pandas", reason="runs where pandas is installed")
    X, Z = points()
    expected = KernelSVD(2).fit(X, Z=Z).transform(X)
    tensors = KernelSVD(2).fit(torch.tensor(X, requires_grad=True), Z=torch.tensor(Z))
    np.testing.assert_array_equal(tensors.transform(torch.tensor(X)), expected)
    frame = pandas.DataFrame(X, columns=list("abcde"))
    svd = KernelSVD(2).set_output(transform="pandas").fit(frame, Z=Z)
    assert list(svd.transform(frame).columns) == ["kernelsvd0", "kernelsvd1"]
    assert list(svd.feature_names_in_) == list("abcde")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 2.0}, "n_components must be a whole number"),
        ({"kernel": Gaussian(), "solver": "primal"}, "solver='primal' needs a kernel with finite features"),
        ({"kernel": "precomputed", "solver": "primal"}, "solver='primal' needs a kernel with finite features"),
        ({"kernel": HigherOrder()}, "acts on a whole sequence"),
        ({"kernel": Gaussian(torch.ones(3))}, "has parameters per head"),
        ({"left": np.ones((2, 4))}, r"left must have shape \(width, 5\)"),
        ({"left": np.ones((2, 5))}, "points of one width; got 2 for X and 5 for Z"),
        ({"kernel": lambda x, z: np.ones((2, 2))}, r"gave shape \(2, 2\) for 23 and 23 points"),
        ({"kernel": lambda x, z: x @ z.T * np.nan}, "what the kernel returns holds NaN"),
        ({"kernel": lambda x, z: np.zeros((len(x), len(z)))}, "kernel is zero for all these points"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        KernelSVD(**options).fit(points()[0])


def test_points_that_do_not_fit_are_refused():
    X, Z = points()
    with pytest.raises(InvalidArgument, match=r"give points by name: fit\(X, Z=Z\)"):
        KernelSVD().fit(X, Z)
    with pytest.raises(InvalidArgument, match="Z holds NaN"):
        KernelSVD().fit(X, Z=Z * np.nan)
    with pytest.raises(InvalidArgument, match="Z must be real"):
        KernelSVD().fit(X, Z=Z[0])
    with pytest.raises(InvalidArgument, match="there are no points Z"):
        KernelSVD(kernel="precomputed").fit(X, Z=Z)
    with pytest.raises(InvalidArgument, match="Z has 4 columns; expected 5"):
        KernelSVD().fit(X, Z=Z).transform_right(Z[:, :4])
    with pytest.raises(NotFittedError):
        KernelSVD().transform_right(Z)


def test_its_coordinates_are_features_for_another():
    X = np.random.default_rng(0).normal(size=(60, 4))
    y = (np.linalg.norm(X, axis=1) > 1.8).astype(int)
    assert make_pipeline(KernelSVD(20, Gaussian(2.0)), LogisticRegression(C=1e3)).fit(X, y).score(X, y) > 0.9


@pytest.mark.parametrize("kernel", [Gaussian(2.0), "linear", "precomputed"], ids=str)
def test_it_comes_back_equal_from_a_folder(kernel, tmp_path):
    draw = np.random.default_rng(0)
    X, Z = draw.normal(size=(13, 4)), draw.normal(size=(11, 4))
    X, points = (X @ Z.T, {}) if kernel == "precomputed" else (X, {"Z": Z, "left": draw.normal(size=(3, 4))})
    right = {"right": draw.normal(size=(3, 4))} if "left" in points else {}
    svd = KernelSVD(3, kernel, left=points.pop("left", None), **right).fit(X, **points)
    svd.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = Estimator.from_pretrained(tmp_path)
    np.testing.assert_array_equal(again.transform(X), svd.transform(X))
    other = X.T if kernel == "precomputed" else Z
    np.testing.assert_array_equal(again.transform_right(other), svd.transform_right(other))
    assert again.solver_ == svd.solver_
    assert again.get_feature_names_out().tolist() == ["kernelsvd0", "kernelsvd1", "kernelsvd2"]
    with pytest.raises(InvalidArgument, match="cannot save <function"):
        KernelSVD(3, lambda X, Z: X @ Z.T).fit(np.eye(3)).save_pretrained(tmp_path / "new")


def test_without_scikit_learn_the_extra_is_named():
    code = """
import sys
sys.modules["sklearn"] = None
import heedful
try:
    heedful.KernelSVD
except heedful.MissingExtra as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert run.returncode == 0, run.stderr
    assert "pip install 'heedful[tables]'" in run.stdout
