"""Series by convolution features and a ridge: features and kernels against loops, leave-one-out against refits, evidence against scores."""

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")

from heedful import InvalidArgument
from heedful.series import Evidence, SeriesClassifier, SeriesFeatures, SeriesRegressor, _machine, _segments
from heedful.series._convolutions import Contests, Layout, Shares
from heedful.series._ridge import ridge
from heedful.series._views import View, differences

KERNELS = [[2.0 if tap in three else -1.0 for tap in range(9)] for three in combinations(range(9), 3)]


def convolved(x, weights, dilation):
    """(channels, steps) with weights (channels, 9), zero outside; by loops."""
    steps = x.shape[1]
    out = np.zeros(steps)
    for at in range(steps):
        for channel in range(len(x)):
            for tap in range(9):
                place = at + (tap - 4) * dilation
                if 0 <= place < steps:
                    out[at] += weights[channel][tap] * x[channel, place]
    return out


def segment_of(step, length, segments):
    return step * segments // length


@pytest.mark.parametrize(("length", "segments"), [(37, 8), (37, 1), (5, 8), (113, 3)])
def test_every_step_is_in_one_segment(length, segments):
    layout = Layout.of(torch.tensor([length, length - 2]), segments)
    for own, places, inside in zip((length, length - 2), layout.places, layout.inside, strict=True):
        per = len(places) // segments
        found = [(int(place), at // per) for at, place in enumerate(places) if inside[at]]
        assert found == [(step, segment_of(step, own, segments)) for step in range(own)]


def test_counts_of_long_series_do_not_carry():
    """More than 255 words of eight steps in one segment."""
    steps = 2 * 8 * 300 + 3
    layout = Layout.of(torch.tensor([steps]), 2)
    hot = layout.inside[:, None]
    assert layout.counts(hot).tolist() == [[[2402.0, 2401.0]]]


@pytest.fixture(scope="module")
def pair():
    """Two series of two channels and unequal lengths."""
    rng = np.random.default_rng(3)
    lengths = torch.tensor([41, 29])
    x = torch.from_numpy(rng.normal(size=(2, 2, 41))).float()
    x[1, :, 29:] = 0.0
    return x, lengths


@pytest.mark.parametrize("segments", [1, 5])
def test_shares_are_what_a_loop_counts(pair, segments):
    x, lengths = pair
    reads = torch.tensor([[True, False], [True, True]]).repeat(42, 1)[None].repeat(2, 1, 1)
    biases = [torch.linspace(-1, 1, 84 * 2).reshape(84, 2), torch.linspace(-1, 1, 84).reshape(84, 1)]
    shares = Shares([1, 3], reads, biases)
    got = shares(x, Layout.of(lengths, segments))
    for case, length in enumerate(lengths.tolist()):
        own = x[case, :, :length].double().numpy()
        at = 0
        for dilation, bias in zip((1, 3), biases, strict=True):
            for kernel in range(84):
                weights = [np.array(KERNELS[kernel]) * bool(reads[0, kernel, channel]) for channel in range(2)]
                if kernel in (0, 1, 82, 83):
                    values = convolved(own, weights, dilation)
                    steps = [t for t in range(length) if kernel % 2 == 0 or 4 * dilation <= t < length - 4 * dilation]
                    for place in range(bias.shape[1]):
                        wanted = np.zeros(segments)
                        for step in steps:
                            hit = values[step] > bias[kernel, place]
                            wanted[segment_of(step, length, segments)] += hit / len(steps)
                        np.testing.assert_allclose(got[case, :, at + place], wanted, atol=1e-6)
                at += bias.shape[1]


@pytest.mark.parametrize("segments", [1, 3])
def test_contests_are_what_a_loop_counts(pair, segments):
    x, lengths = pair
    rng = np.random.default_rng(5)
    weights = rng.normal(size=(1, 2, 8, 9))
    reads = torch.tensor([[[True, True], [False, True]]])
    got = Contests([2], torch.from_numpy(weights).float(), reads)(x, Layout.of(lengths, segments))
    for case, length in enumerate(lengths.tolist()):
        own = x[case, :, :length].double().numpy()
        wanted = np.zeros((2, 8, 2, segments))
        for group in range(2):
            sides = [[weights[0, group, k] * bool(reads[0, group, c]) for c in range(2)] for k in range(8)]
            values = np.array([convolved(own, side, 2) for side in sides])
            for step in range(length):
                part = segment_of(step, length, segments)
                wanted[group, values[:, step].argmax(), 0, part] += max(values[:, step].max(), 0.0)
                wanted[group, values[:, step].argmin(), 1, part] += 1
        np.testing.assert_allclose(got[case], wanted.reshape(-1, segments).T, atol=1e-4)


def test_differences_know_their_lengths():
    x = torch.tensor([[[1.0, 4.0, 9.0, 0.0]], [[5.0, 0.0, 0.0, 0.0]]])
    change, lengths = differences(x, torch.tensor([3, 1]))
    assert change[:, 0].tolist() == [[3.0, 5.0, 0.0], [0.0, 0.0, 0.0]]
    assert lengths.tolist() == [2, 1]
    assert differences(torch.ones(1, 1, 1), torch.tensor([1]))[0].tolist() == [[[0.0]]]


def test_leaving_one_out_in_closed_form_is_a_refit():
    rng = np.random.default_rng(0)
    for n, width in ((13, 29), (23, 5)):
        z, y = torch.from_numpy(rng.normal(size=(n, width))), torch.from_numpy(rng.normal(size=(n, 2)))
        weights = torch.from_numpy(rng.uniform(0.5, 2, n))
        found = ridge(z, y, weights)
        shared = weights / weights.sum()
        centered = (n * shared).sqrt()[:, None] * (z - shared @ z)
        # The penalty is a multiple of the mean squared length over all cases, and counts against the sum over them.
        penalty = found.penalty * float(centered.square().sum()) / n
        for out in range(n):
            keep = torch.arange(n) != out
            own = (n * shared)[keep]
            mean, center = (part[keep].T @ own / own.sum() for part in (z, y))
            scaled = own.sqrt()[:, None] * (z[keep] - mean)
            gram = scaled.T @ scaled + penalty * torch.eye(width, dtype=torch.float64)
            weight = torch.linalg.solve(gram, scaled.T @ (own.sqrt()[:, None] * (y[keep] - center)))
            torch.testing.assert_close((z[out] - mean) @ weight + center, found.unseen[out], rtol=1e-6, atol=1e-8)


def test_the_kernel_between_segments_is_what_a_loop_sums():
    rng = np.random.default_rng(0)
    kernel = _segments.SegmentKernel(4, 64)
    tokens = {level: torch.from_numpy(rng.normal(size=(5, level, 64))) for level in kernel.levels}
    kernel.keep(tokens, torch.arange(5))
    got = kernel.parts(tokens)

    def pairs(level, a, b, bandwidth):
        z = torch.nn.functional.normalize(tokens[level], dim=2)
        total = np.zeros(level)
        for s in range(level):
            for t in range(level):
                near = np.exp(-(((s - t) / level) ** 2) / 2 / bandwidth**2)
                total[s] += near * np.exp(float(z[a, s] @ z[b, t]) - 1)
        return total

    wanted = np.zeros((5, 5, 4))
    for level in (1, 2, 4):
        for bandwidth in (np.inf, 0.25):
            own = np.array([[pairs(level, a, b, bandwidth) for b in range(5)] for a in range(5)])  # [5, 5, level]
            gram = own.sum(2)
            size = np.trace(gram - gram.mean(0) - gram.mean(1, keepdims=True) + gram.mean()) / 5
            wanted += np.repeat(own, 4 // level, axis=2) / (4 // level) / size / 6
    np.testing.assert_allclose(got.transpose(1, 2), wanted, atol=1e-7)


def waves(count, seed, channels=3):
    """Unequal lengths; in one class the second channel oscillates faster. Some values are missing."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for at in range(count):
        steps = int(rng.integers(40, 71))
        x = rng.normal(size=(channels, steps))
        x[1] += 3 * np.sin(np.arange(steps) * (0.9 if at % 2 else 0.5) + rng.uniform(0, 6))
        x[rng.random(x.shape) < 0.05] = np.nan
        x[:, -1] = rng.normal(size=channels)
        X.append(x)
        y.append("fast" if at % 2 else "slow")
    return X, np.array(y)


@pytest.fixture(scope="module", params=["linear", "softmax", "linear+softmax"])
def fitted(request):
    X, y = waves(50, 0)
    return SeriesClassifier(kernel=request.param, features=840, segments=4, random_state=0).fit(X, y)


def test_it_learns_and_its_evidence_sums_to_its_scores(fitted):
    X, y = waves(30, 1)
    assert fitted.method_ == "kernel"
    assert fitted.score(X, y) > 0.9
    assert fitted.loo_score_ > 0.9
    evidence = fitted.evidence(X)
    assert isinstance(evidence, Evidence)
    assert evidence.values.shape == (30, 4, 3, 2)
    scores = evidence.base + evidence.values.sum((1, 2))
    np.testing.assert_allclose(scores[:, 1] - scores[:, 0], fitted.decision_function(X), atol=1e-9)
    np.testing.assert_array_equal(evidence.scores, scores)
    if fitted.kernel == "linear":
        channels = np.abs(evidence.values.sum(1)[..., 0]).mean(0)
        assert channels.argmax() == 1, "the second channel is the one that differs"


def test_the_mean_training_series_has_no_evidence(fitted):
    X, _ = waves(50, 0)
    np.testing.assert_allclose(fitted.evidence(X).values.mean(0), 0.0, atol=1e-5)


def test_a_series_answers_alike_beside_any_others(fitted):
    X, _ = waves(13, 2)
    together = fitted.decision_function(X)
    alone = np.concatenate([fitted.decision_function([case]) for case in X])
    np.testing.assert_allclose(alone, together, atol=1e-9)
    padded = np.full((13, 3, 100), np.nan)
    for row, case in zip(padded, X, strict=True):
        row[:, : case.shape[1]] = case
    np.testing.assert_allclose(fitted.decision_function(padded), together, atol=1e-9)


@pytest.mark.parametrize("fitted", ["linear+softmax"], indirect=True)
def test_a_saved_model_answers_alike_in_a_fresh_process(fitted, tmp_path):
    X, _ = waves(7, 4)
    array = np.full((7, 3, 71), np.nan)
    for row, case in zip(array, X, strict=True):
        row[:, : case.shape[1]] = case
    fitted.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "X.npy", array)
    code = (
        "import sys, numpy as np; from heedful.bridges.estimator import Estimator\n"
        "model = Estimator.from_pretrained(sys.argv[1] + '/model')\n"
        "np.save(sys.argv[1] + '/there.npy', model.predict_proba(np.load(sys.argv[1] + '/X.npy')))\n"
        "assert model.evidence(np.load(sys.argv[1] + '/X.npy')).values.shape[0] == 7"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "there.npy"), fitted.predict_proba(array))


def test_seeds_decide():
    X, y = waves(20, 0)
    first, again, other = (
        SeriesClassifier(features=168, random_state=seed).fit(X, y).decision_function(X) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-6


def test_many_series_are_compared_with_some(monkeypatch):
    """Nystrom: with as many landmarks as series it is exact, with half of them near."""
    X, y = waves(60, 0)
    wanted = SeriesClassifier(kernel="softmax", features=168, random_state=0).fit(X, y)
    monkeypatch.setattr(_machine, "BASIS", 59)
    monkeypatch.setattr(_machine, "LANDMARKS", 30)
    model = SeriesClassifier(kernel="softmax", features=168, random_state=0).fit(X, y)
    keys = model.machine_.kernels["shares"].tensors
    assert {name for name in keys if name.startswith("keys")} == {"keys.1", "keys.2", "keys.4"}
    assert len(keys["keys.4"]) == 30
    unseen, answers = waves(40, 1)
    assert model.score(unseen, answers) >= wanted.score(unseen, answers) - 0.1


def test_more_series_than_features():
    X, y = waves(400, 0, channels=2)
    model = SeriesClassifier(features=84, random_state=0).fit(X, y)
    unseen, answers = waves(60, 1, channels=2)
    assert model.score(unseen, answers) > 0.85


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_the_shortest_series(steps):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 2, steps)), np.arange(30) % 3
    X[:, 0] += y[:, None]
    model = SeriesClassifier(features=84, random_state=0).fit(X, y)
    assert np.isfinite(model.predict_proba(X)).all()
    assert model.evidence(X).values.shape == (30, 8, 2, 3)


def test_one_number_or_several():
    rng = np.random.default_rng(0)
    y = rng.uniform(1, 5, size=(80, 2))
    X = rng.normal(size=(80, 40)) * 0.3
    X += np.sin(y[:, :1] * np.arange(40) / 4) + y[:, 1:] * (np.arange(40) == 20)
    model = SeriesRegressor(features=840, random_state=0).fit(X[:60], 1000 * y[:60])
    assert model.predict(X[60:]).shape == (20, 2)
    assert model.score(X[60:], 1000 * y[60:]) > 0.6
    evidence = model.evidence(X[60:])
    np.testing.assert_allclose(evidence.scores, model.predict(X[60:]), rtol=1e-7)
    one = SeriesRegressor(features=840, random_state=0).fit(X[:60], y[:60, 0])
    assert one.predict(X[60:]).shape == (20,)
    assert one.loo_score_ > 0.5


def test_weights_and_left_out_cases():
    X, y = waves(40, 0)
    weights = np.where(np.arange(40) < 30, 1.0, 0.0)
    first = SeriesClassifier(features=168, random_state=0).fit(X, y, weights)
    second = SeriesClassifier(features=168, random_state=0).fit(X[:30], y[:30])
    np.testing.assert_allclose(first.decision_function(X), second.decision_function(X), atol=1e-9)


def test_the_method_is_chosen_by_what_is_given():
    X, y = waves(20, 0)
    options = {"embed_dim": 8, "num_heads": 2, "epochs": 1}
    assert SeriesClassifier(features=84).fit(X, y).method_ == "kernel"
    assert SeriesClassifier(**options).fit(X, y).method_ == "network"
    model = SeriesClassifier(method="network", **options).fit(X, y)
    with pytest.raises(InvalidArgument, match="evidence is of method='kernel'"):
        model.evidence(X)
    assert model.set_params(method="kernel", features=84).fit(X, y).method_ == "kernel"
    assert not hasattr(model, "network_")
    assert not hasattr(model, "training_")


def test_features_of_segments_sum_to_those_of_the_whole():
    X, _ = waves(9, 0)
    whole = SeriesFeatures(features=168, random_state=0).fit(X).transform(X)
    parts = SeriesFeatures(features=168, segments=3, random_state=0).fit(X).transform(X).reshape(9, 3, -1)
    np.testing.assert_allclose(parts.sum(1), whole, atol=1e-5)
    shares = SeriesFeatures("shares", features=168, random_state=0).fit_transform(X)
    np.testing.assert_array_equal(shares, whole[:, : shares.shape[1]])
    assert shares.min() >= 0
    assert shares.max() <= 1 + 1e-6


def test_a_feature_counts_to_the_channels_it_reads():
    reads = torch.tensor([[[True, False, False], [True, True, False]]])
    view = View("contests", False, Contests([1], torch.zeros(1, 2, 8, 9), reads))
    weight = _machine.by_channels(view, torch.ones(32, 1, dtype=torch.float64))
    assert weight[0].tolist() == [1.0, 0.0, 0.0]
    assert weight[-1].tolist() == [0.5, 0.5, 0.0]


def test_evidence_tells_itself_and_is_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the extra 'plot' is not installed")
    X, y = waves(20, 0)
    evidence = SeriesClassifier(features=84, random_state=0).fit(X, y).evidence(X)
    assert "8 segments and 3 channels of 20 series for 2 outputs" in str(evidence)
    assert "series" not in evidence.to_dict()
    own = evidence.values[3, ..., 1] - evidence.values[3, ..., 0]
    np.testing.assert_array_equal(evidence.of(3, "slow"), own)
    assert evidence.edges(3)[[0, -1]].tolist() == [0, X[3].shape[1]]
    ax = evidence.plot(3)
    assert len(ax.lines) == 3
    assert ax.collections[0].get_array().size == 24
    pyplot.close("all")
    with pytest.raises(InvalidArgument, match="there is no output 'middle'; there are 'fast', 'slow'"):
        evidence.of(0, "middle")
    with pytest.raises(InvalidArgument, match="case must be a whole number from 0 to 19; got 20"):
        evidence.plot(20)


def test_evidence_finds_a_planted_burst():
    rng = np.random.default_rng(0)
    X, y, places = rng.normal(size=(150, 160)), np.arange(150) % 2, rng.integers(8, size=150)
    for row, has, place in zip(X, y, places, strict=True):
        if has:
            row[20 * place + 4 : 20 * place + 16] += 3 * np.sin(np.pi * np.arange(12) / 2)
    model = SeriesClassifier(features=2520, random_state=0).fit(X[:90], y[:90])
    evidence = model.evidence(X[90:])
    found = np.array([evidence.of(case, 1)[:, 0].argmax() for case in range(60)])
    assert (found == places[90:])[y[90:] == 1].mean() > 0.95


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["linear", "linear+softmax"])
def test_a_gpu_answers_as_the_cpu(kernel, tmp_path):
    """Rounding moves single steps across a bias; a model that was fitted there answers here."""
    X, y = waves(50, 0)
    unseen, _ = waves(30, 1)
    there, here = (
        SeriesClassifier(kernel=kernel, features=840, random_state=0, device=device).fit(X, y)
        for device in ("cuda", "cpu")
    )
    wanted, got = here.decision_function(unseen), there.decision_function(unseen)
    np.testing.assert_allclose(got, wanted, atol=1e-2 * np.abs(wanted).max())
    scores = there.evidence(unseen).scores
    np.testing.assert_allclose(scores[:, 1] - scores[:, 0], got, atol=1e-7)
    there.save_pretrained(tmp_path / "model")
    taken = SeriesClassifier.from_pretrained(tmp_path / "model").set_params(device="cpu")
    np.testing.assert_allclose(taken.decision_function(unseen), got, atol=1e-2 * np.abs(got).max())
