"""Series: the network against a plain formula, unequal lengths and missing values, a task that needs attention."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from heedful import Gaussian, InvalidArgument
from heedful.nn import Primal
from heedful.series._cases import as_array, cases_of, filled, scales, standardised
from heedful.series.network import SeriesNetwork

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

import pandas as pd

from bumps import two_bumps
from heedful.series import SeriesClassifier

SMALL = {"embed_dim": 8, "num_heads": 2, "rank": 3, "epochs": 2, "random_state": 0}


def network(kernels=("softmax",), head="flatten", **options):
    made = SeriesNetwork(3, 5, 13, 8, 2, kernels, 11, 0.1, head=head, dtype=torch.float64, **options)
    return made.eval()


def plainly(net, x, length):
    """The logits of one series `(n, channels)` with one softmax layer, step by step."""
    state = {name: tensor.detach().numpy() for name, tensor in net.state_dict().items()}
    x = x[:length].numpy()

    def norm(row, name):
        centred = row - row.mean()
        return (
            centred / np.sqrt((row**2).mean() - row.mean() ** 2 + 1e-5) * state[f"{name}.weight"]
            + state[f"{name}.bias"]
        )

    def gelu(row):
        return functional.gelu(torch.from_numpy(row)).numpy()

    hidden = [
        8**0.5 * (state["input.weight"] @ step + state["input.bias"]) + p
        for step, p in zip(x, state["positions"], strict=False)
    ]
    layer = "encoder.layers.0."
    weight, bias = state[layer + "self_attn.in_proj_weight"], state[layer + "self_attn.in_proj_bias"]
    queries, keys, values = (
        [part @ row + b for row in hidden] for part, b in zip(weight.reshape(3, 8, 8), bias.reshape(3, 8), strict=True)
    )
    after = []
    for query, row in zip(queries, hidden, strict=True):
        mixed = np.zeros(8)
        for head in (slice(0, 4), slice(4, 8)):
            scores = np.exp([query[head] @ key[head] / 2 for key in keys])
            mixed[head] = sum(score * value[head] for score, value in zip(scores / scores.sum(), values, strict=True))
        out = state[layer + "self_attn.out_proj.weight"] @ mixed + state[layer + "self_attn.out_proj.bias"]
        row = norm(row + out, layer + "norm1")
        inner = gelu(state[layer + "linear1.weight"] @ row + state[layer + "linear1.bias"])
        row = norm(row + state[layer + "linear2.weight"] @ inner + state[layer + "linear2.bias"], layer + "norm2")
        after.append(gelu(norm(row, "norm")))
    if net.head == "mean":
        return state["output.weight"] @ np.mean(after, axis=0) + state["output.bias"]
    return state["output.weight"][:, : 8 * length] @ np.concatenate(after) + state["output.bias"]


@pytest.mark.parametrize("head", ["flatten", "mean"])
def test_the_network_is_its_formula(head):
    net = network(head=head)
    x, lengths = torch.randn(3, 13, 3, dtype=torch.float64), (13, 7, 1)
    padding = torch.arange(13) >= torch.tensor(lengths)[:, None]
    logits = net(x, padding)
    for row, series, length in zip(logits, x, lengths, strict=True):
        np.testing.assert_allclose(row.detach().numpy(), plainly(net, series, length), atol=1e-10)


@pytest.mark.parametrize("head", ["flatten", "mean"])
@pytest.mark.parametrize(
    "kernels", [("softmax", "primal"), ("linear", "none"), (Primal(3, sampling="stride"), Gaussian())]
)
def test_padding_changes_nothing(kernels, head):
    net = network(kernels, head)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    longer = torch.cat([x, torch.full((2, 6, 3), torch.nan, dtype=torch.float64)], 1)
    padding = torch.arange(13).expand(2, -1) >= 7
    short = net(x, padding[:, :7])
    short.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    long = net(longer, padding)
    long.square().sum().backward()
    torch.testing.assert_close(long, short, atol=1e-12, rtol=1e-12)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-10, rtol=1e-10)


def test_the_network_saves_itself(tmp_path):
    net = network(("softmax", Primal(3)))
    net.save_pretrained(tmp_path)
    again = SeriesNetwork.from_pretrained(tmp_path)
    x, padding = torch.randn(2, 13, 3, dtype=torch.float64), torch.zeros(2, 13, dtype=torch.bool)
    assert torch.equal(again(x, padding), net(x, padding))
    for wrong in (torch.randn(2, 14, 3), torch.randn(2, 13, 4), torch.randn(2, 0, 3)):
        with pytest.raises(InvalidArgument, match=r"x must have shape \(batch, n, 3\) with n from 1 to 13"):
            net(wrong.double(), padding)
    with pytest.raises(InvalidArgument, match="padding must have shape"):
        net(x, padding[:, :5])
    with pytest.raises(InvalidArgument, match="head must be one of flatten, mean"):
        network(head="max")


def test_missing_values_are_interpolated_as_pandas_does():
    pandas = pytest.importorskip("pandas", reason="the extra 'tables' is not installed")
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 3, 19))
    values[rng.random(values.shape) < 0.3] = np.nan
    values[2, 1], values[3, :, 11:] = np.nan, np.nan  # a channel without values, a series that ends
    done = filled(cases_of(values))
    assert done.lengths[3] == 11
    for case in range(7):
        for channel in range(3):
            line = pandas.Series(values[case, channel, : done.lengths[case]])
            wanted = line.interpolate(limit_direction="both").to_numpy()
            np.testing.assert_allclose(done.values[case, channel, : done.lengths[case]], wanted, atol=1e-12)
    x, padding = standardised(done, *scales(done), 19)
    assert not x.isnan().any()
    assert (x[2, :, 1] == 0).all(), "a channel without values is its mean"
    assert padding[3].tolist() == [False] * 11 + [True] * 8
    assert (x[3, 11:] == 0).all()


def test_channels_are_standardised_over_all_steps():
    rng = np.random.default_rng(0)
    series = [rng.normal(3, 2, size=(2, length)) for length in (5, 11, 7)]
    for case in series:
        case[1] = 4.1
    cases = cases_of(as_array(series))
    mean, scale = scales(cases)
    steps = np.concatenate([case[0] for case in series])
    assert (mean[0], scale[0]) == pytest.approx((steps.mean(), steps.std(ddof=1)), abs=1e-12)
    assert scale[1] == 1.0, "a constant channel"
    x, padding = standardised(cases, mean, scale, 11)
    assert x[~padding][:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert x[~padding][:, 0].std() == pytest.approx(1, abs=1e-6)
    assert x[..., 1].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("X", "told"),
    [
        ([np.zeros((2, 5)), np.zeros((3, 5))], "case 0 has 2, case 1 has 3"),
        ([np.zeros((2, 5)), np.zeros((2, 0))], r"case 1 is \(2, 0\)"),
        ([np.zeros((2, 5)), np.zeros((2, 5, 1))], r"case 1 is \(2, 5, 1\)"),
        ([np.zeros((1, 2)), [["a", "b"]]], "case 1 cannot be read as numbers"),
        (np.full((2, 3, 4), np.nan), "case 0 holds no value at all"),
        (np.zeros((2, 3, 4, 5)), "two or three axes"),
        (np.full((2, 3, 4), np.inf), "infinity"),
        ([], "X is empty"),
        (np.zeros((2, 0, 4)), r"one case, one channel and one step or more; got shape \(2, 0, 4\)"),
        (np.zeros((2, 3, 0)), r"got shape \(2, 3, 0\)"),
        (pd.DataFrame({"a": [pd.Series([1.0, 2.0]), pd.Series([3.0])]}), "a data frame of series is not read"),
    ],
)
def test_bad_series_are_told(X, told):
    with pytest.raises(InvalidArgument, match=told):
        SeriesClassifier(**SMALL).fit(X, [0, 1][: len(X)])


@pytest.mark.parametrize("unit", [2.0**1000, 2.0**-1000])
def test_units_do_not_matter(unit, fitted):
    """Squares of such numbers overflow or vanish."""
    X, y, model = fitted
    again = SeriesClassifier(**SMALL).fit(unit * X, y)
    np.testing.assert_array_equal(again.predict_proba(unit * X), model.predict_proba(X))


def test_values_beyond_float32_are_told(fitted):
    X, _, model = fitted
    with pytest.raises(InvalidArgument, match=r"case 0 .* more than 1e\+12 standard deviations .* \(3 such cases\)"):
        model.predict(1e300 * X[:3])
    assert np.isfinite(model.predict_proba(1e9 * X[:3])).all()


@pytest.fixture(scope="module")
def fitted():
    X, y = two_bumps(40, 0)
    return X, y, SeriesClassifier(**SMALL).fit(X, y)


def test_the_same_series_in_any_form(fitted):
    X, y, _ = fitted
    X, y = X[:20].copy(), y[:20]
    X[3, :, 8:], X[5, 1, 2] = np.nan, np.nan
    ragged = [case[:, : 8 if at == 3 else 11] for at, case in enumerate(X)]
    array = SeriesClassifier(**SMALL).fit(X, y)
    wanted = array.predict_proba(X)
    objects = np.empty(20, dtype=object)
    objects[:] = ragged
    for form in (ragged, tuple(ragged), objects, [case.tolist() for case in ragged], torch.from_numpy(X)):
        again = SeriesClassifier(**SMALL).fit(form, y)
        assert again.n_features_in_ == array.n_features_in_ == 2
        assert again.max_len_ == 11
        np.testing.assert_array_equal(again.predict_proba(form), wanted)
    # An answer does not depend on what else is asked; in float32 it does, by rounding.
    np.testing.assert_allclose(array.predict_proba([ragged[3]]), wanted[3:4], atol=1e-6)
    wanted = array.set_params(predict_dtype="float64").predict_proba(X)
    np.testing.assert_allclose(array.predict_proba([ragged[3]]), wanted[3:4], atol=1e-12)


def test_a_table_is_univariate_series(fitted):
    X, y, _ = fitted
    table = SeriesClassifier(**SMALL).fit(X[:, 0], y)
    cube = SeriesClassifier(**SMALL).fit(X[:, :1], y)
    assert (table.n_features_in_, cube.n_features_in_) == (11, 1)
    wanted = table.predict_proba(X[:, 0])
    for model, form in ((table, X[:, :1]), (cube, X[:, :1]), (cube, X[:, 0]), (cube, [case[0] for case in X])):
        np.testing.assert_array_equal(model.predict_proba(form), wanted)
    with pytest.raises(ValueError, match="X has 7 features, but SeriesClassifier is expecting 11 features"):
        table.predict(X[:, 0, :7])
    with pytest.raises(
        InvalidArgument, match=r"X has 2 features, but SeriesClassifier is expecting 1 features as input: .* channels"
    ):
        table.predict(X)
    unequal = [case[0, : 5 + at % 6] for at, case in enumerate(X)]
    assert SeriesClassifier(**SMALL).fit(unequal, y).max_len_ == 10


def test_longer_series_are_cut_with_a_warning(fitted):
    X, y, model = fitted
    longer = np.concatenate([X, X], axis=2)
    with pytest.warns(
        UserWarning, match="40 of 40 series are longer than the longest of the training, 11 steps"
    ) as told:
        answers = model.predict_proba(longer)
    assert told[0].filename == __file__, "the warning points at the caller's line"
    np.testing.assert_array_equal(answers, model.predict_proba(X))
    assert model.predict_proba(X[:, :, :5]).shape == (40, 2)
    # Who asks for fewer steps is not told.
    short = SeriesClassifier(**SMALL, max_len=7).fit(X, y)
    assert short.max_len_ == short.network_.max_len == 7
    np.testing.assert_array_equal(short.predict_proba(X), short.predict_proba(X[:, :, :7]))


@pytest.mark.parametrize("labels", [["b", "a"], [3, -1], [True, False], [0.5 * 2, 2.0], ["c", "a", "b"]])
def test_labels_of_any_kind(labels, fitted):
    X, _, _ = fitted
    y = np.array(labels)[np.arange(40) % len(labels)]
    model = SeriesClassifier(**SMALL, predict_dtype="float64").fit(X, y.tolist())
    np.testing.assert_array_equal(model.classes_, np.unique(y))
    assert set(model.predict(X)) <= set(labels)
    proba, decision = model.predict_proba(X), model.decision_function(X)
    assert proba.shape == (40, len(labels))
    np.testing.assert_allclose(proba.sum(1), 1, atol=1e-12)
    if len(labels) == 2:
        np.testing.assert_allclose(proba[:, 1], 1 / (1 + np.exp(-decision)), atol=1e-12)
    else:
        np.testing.assert_allclose(proba, np.exp(decision) / np.exp(decision).sum(1, keepdims=True), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, ["Softmax", "Primal"]),
        ({"attention": "primal"}, ["Primal", "Primal"]),
        ({"attention": "softmax+primal", "layers": 4}, ["Softmax", "Softmax", "Softmax", "Primal"]),
        ({"attention": "none", "layers": 1}, ["str"]),
        ({"attention": ["linear"]}, ["FeatureMap"]),
        ({"attention": [Gaussian(2.0), Primal(7)]}, ["Gaussian", "Primal"]),
    ],
)
def test_layers_are_what_was_said(options, kinds, fitted):
    X, y, _ = fitted
    model = SeriesClassifier(**SMALL | {"epochs": 1} | options).fit(X, y)
    assert [type(kernel).__name__ for kernel in model.network_.kernels] == kinds
    ranks = [kernel.rank for kernel in model.network_.kernels if isinstance(kernel, Primal)]
    assert ranks == [7 if "Gaussian" in kinds else 3] * kinds.count("Primal")


def test_a_learned_kernel_among_the_parameters_is_left_alone(fitted):
    X, y, _ = fitted
    bandwidth = torch.nn.Parameter(torch.ones(2))
    model = SeriesClassifier([Gaussian(bandwidth)], **SMALL).fit(X, y)
    assert bandwidth.tolist() == [1, 1]
    assert model.network_.kernels[0].bandwidth.tolist() != [1, 1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"attention": "softmax+nothing"}, "attention must be of softmax"),
        ({"attention": 5}, "attention must be names joined by"),
        ({"attention": []}, "attention names 0 layers"),
        ({"attention": ["softmax"], "layers": 2}, "attention names 1 layers and layers=2"),
        ({"attention": "softmax+primal", "layers": 1}, "attention names 2 layers and layers=1"),
        ({"rank": 0}, "rank must be"),
        ({"eta": -1}, "eta must be a number from 0 on"),
        ({"epochs": None}, "epochs must be a whole number from 1 on; got None"),
        ({"batch_size": None}, "batch_size must be a whole number from 1 on; got None"),
        ({"lr": None}, "lr must be a number above 0; got None"),
        ({"random_state": -1}, "random_state must be a whole number from 0"),
        ({"random_state": np.random.default_rng(0)}, "or a RandomState; got Generator"),
        ({"dropout": 1.0}, "dropout must be a number from 0 on, below 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"hidden": -1}, "hidden must be a whole number"),
        ({"max_len": "x"}, "max_len must be a whole number"),
        ({"device": "abacus"}, "device must be 'auto'"),
    ],
)
def test_bad_parameters_are_told_before_work_starts(options, told, fitted, tmp_path):
    X, y, _ = fitted
    model = SeriesClassifier(**SMALL | options, checkpoint_dir=tmp_path / "kept")
    with pytest.raises(InvalidArgument, match=told):
        model.fit(X, y)
    assert not (tmp_path / "kept").exists()
    assert not hasattr(model, "classes_")


def test_a_failed_fit_leaves_no_half_a_model(fitted):
    X, y, _ = fitted
    model = SeriesClassifier(**SMALL).fit(X, y)
    wanted = model.predict_proba(X)
    with pytest.raises(InvalidArgument, match="inconsistent numbers of samples"):
        model.fit(X, y[:-1])
    np.testing.assert_array_equal(model.predict_proba(X), wanted)
    with pytest.raises(InvalidArgument, match="continuous"):
        model.fit(X, np.linspace(0, 1, 40))
    with pytest.raises(InvalidArgument, match="epoch 1 is not finite"):
        SeriesClassifier(**SMALL | {"lr": 1e38}).fit(X, y)


def test_attention_learns_what_no_linear_model_and_no_single_step_can():
    from sklearn.linear_model import LogisticRegression

    (X, y), (unseen, answers) = two_bumps(400, 0), two_bumps(200, 1)
    linear = LogisticRegression(max_iter=1000).fit(X.reshape(400, -1), y).score(unseen.reshape(200, -1), answers)
    options = {"embed_dim": 16, "num_heads": 2, "lr": 0.02, "dropout": 0.0, "batch_size": 32, "random_state": 0}
    scores = {
        name: SeriesClassifier([name], rank=5, epochs=epochs, **options).fit(X, y).score(unseen, answers)
        for name, epochs in (("none", 10), ("softmax", 8), ("primal", 20))
    }
    assert max(linear, scores["none"]) < 0.65
    assert min(scores["softmax"], scores["primal"]) > 0.95, scores


def test_the_primal_loss_is_part_of_the_loss(fitted):
    from heedful.nn import ksvd_loss

    X, y, model = fitted
    inputs, codes = model._tensors(model._read(X)), torch.from_numpy((y == "same").astype(np.int64))
    net = model.network_
    plain = functional.cross_entropy(net(*inputs), codes)
    for eta in (0.0, 0.5):
        model = SeriesClassifier(**SMALL, eta=eta)
        torch.testing.assert_close(model._loss(net, inputs, codes, None), plain + eta * ksvd_loss(net))
    assert ksvd_loss(net) > 0
