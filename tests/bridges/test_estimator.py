"""The template of estimators: a room says how it reads, its network, its loss; all else is the base's."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from heedful import InvalidArgument

pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
pytest.importorskip("pytorch_lightning", reason="the extra 'train' is not installed")

from heedful.bridges.estimator import Estimator
from heedful.bridges.samples import hold_out
from small import Coordinates, Numbers, Order, lists, table


def test_a_regressor_learns_numbers_in_their_own_units(tmp_path):
    X, y = table()
    model = Numbers().fit(X, y)
    unseen, wanted = table(seed=1)
    assert model.score(unseen, wanted) > 0.8
    measured = model.training_.measured
    assert measured.keys() == {"loss", "absolute_error"}
    _, held = hold_out(len(X), 0.2, 0)
    assert np.abs(model.predict(X[held]) - y[held]).mean() == pytest.approx(measured["absolute_error"], rel=1e-4)
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(Estimator.from_pretrained(tmp_path).predict(unseen), model.predict(unseen))
    with pytest.raises(InvalidArgument, match="sample_weight must have one number for each of the 120 cases"):
        model.fit(X, y, np.ones(3))


class Several(Numbers):
    """A network with an output for each column of y."""

    def _network(self):
        return self._layers(len(self.target_mean_))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def test_a_regressor_learns_several_numbers_that_weigh_alike(tmp_path):
    X, y = table()
    both = np.stack((y, 1e6 * X[:, 2]), axis=1)
    model = Several(epochs=120).fit(X, both)
    unseen, wanted = table(seed=1)
    predicted = model.predict(unseen)
    assert predicted.shape == (120, 2)
    assert model.score(unseen, np.stack((wanted, 1e6 * unseen[:, 2]), axis=1)) > 0.8
    _, held = hold_out(len(X), 0.2, 0)
    errors = np.abs(model.predict(X[held]) - both[held]) / model.target_scale_
    assert np.square(errors).mean() == pytest.approx(model.training_.measured["loss"], rel=1e-4)
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(Several.from_pretrained(tmp_path).predict(unseen), predicted)


def test_weights_of_zero_leave_cases_out_of_a_regressor_too():
    X, y = table()
    kept = np.arange(120) % 3 > 0
    one = Numbers(epochs=2).fit(X, np.where(kept, y, 1e9), kept)
    two = Numbers(epochs=2).fit(X[kept], y[kept], np.ones(kept.sum()))
    np.testing.assert_array_equal(one.predict(X), two.predict(X))


def test_a_ranker_orders_the_members_of_each_list(tmp_path):
    X, y, groups = lists()
    names = np.array([f"query {group}" for group in groups])
    model = Order(epochs=30, batch_size=4).fit(X, y, groups=names)
    unseen, wanted, asked = lists(seed=1)
    assert model.score(unseen, wanted, asked) > 0.95
    assert Order(epochs=1, lr=1e-6).fit(X, y, groups=names).score(unseen, wanted, asked) < 0.9
    # A member's score depends on its own list alone, whatever lists stand beside it.
    only = asked == 3
    np.testing.assert_allclose(model.predict(unseen, asked)[only], model.predict(unseen[only]), atol=1e-12)
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(Order.from_pretrained(tmp_path).predict(unseen, asked), model.predict(unseen, asked))
    for wrong, message in (
        ({}, "a ranker needs groups"),
        ({"groups": names[:5]}, "groups must have one entry for each"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Order().fit(X, y, **wrong)
    with pytest.raises(InvalidArgument, match="relevances, finite numbers from 0 on"):
        Order().fit(X, -y, groups=names)


def test_the_loss_of_lists_is_its_formula():
    scores, target = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.0, 9.0]]), torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 0.0]])
    padding = torch.tensor([[False, False, False], [False, False, True]])
    wanted = [-2 / 3 * functional.log_softmax(scores[0], 0)[1] - functional.log_softmax(scores[0], 0)[2] / 3]
    wanted.append(-functional.log_softmax(scores[1, :2], 0)[0])
    torch.testing.assert_close(Order()._losses(scores, target, padding), torch.stack(wanted))


def test_a_transformer_gives_coordinates(tmp_path):
    X = np.random.default_rng(0).normal(size=(80, 1)) * np.array([[1.0, 2.0, -1.0, 0.5]])
    model = Coordinates(epochs=80)
    codes = model.fit_transform(X)
    assert codes.shape == (80, 2)
    weight = model.network_.weight.detach().double().numpy()
    assert np.square(codes @ weight - X).mean() < 0.05 * np.square(X).mean()
    assert model.get_feature_names_out().tolist() == ["coordinates0", "coordinates1"]
    model.save_pretrained(tmp_path)
    np.testing.assert_array_equal(Coordinates.from_pretrained(tmp_path).transform(X), codes)


def test_groups_and_times_decide_what_is_held_out():
    groups = np.repeat(np.arange(10), 7)
    learn, held = hold_out(70, 0.2, 0, groups=groups)
    assert not set(groups[learn]) & set(groups[held])
    assert len(set(groups[held])) == 2
    assert sorted([*learn, *held]) == list(range(70))
    times = np.random.default_rng(0).permutation(70)
    learn, held = hold_out(70, 0.2, 0, times=times)
    assert (len(held), times[held].min()) == (14, times[learn].max() + 1)
    assert len(hold_out(7, 0.2, 0, groups=np.zeros(7))[1]) == 0, "one group cannot be split"
    X, y = table(60)
    model = Numbers(epochs=1)
    seen = []
    model._scale = lambda samples: seen.append(samples.groups) or Numbers._scale(model, samples)
    model.fit(X, y, groups=np.repeat(list("abcdef"), 10))
    assert [int(count) for count in np.bincount(seen[0])].count(10) == len(set(seen[0]))
    assert len(seen[0]) < 60
