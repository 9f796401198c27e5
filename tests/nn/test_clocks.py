"""Mercer's features, and the encodings of other papers: their formulas, what the data says to them, all of them by name."""

import math

import numpy as np
import pytest
import torch

from heedful import InvalidArgument
from heedful.nn import (
    BochnerTime,
    LinearTime,
    MercerTime,
    Module,
    Positions,
    PositionTime,
    TGATTime,
    Time2Vec,
    TimeEncoding,
    time_encoding,
)
from trained import disturbed

ALL = {
    "bochner": lambda **place: BochnerTime(6, **place),
    "mercer": lambda **place: MercerTime(3, 5, **place),
    "mercer-free": lambda **place: MercerTime([3.0, "1min"], 2, coef="free", **place),
    "mercer-projected": lambda **place: MercerTime(7, 3, output="projected", **place),
    "mercer-authors": lambda **place: MercerTime(7, 3, init="authors", **place),
    "time2vec": lambda **place: Time2Vec(7, **place),
    "tgat": lambda **place: TGATTime(7, **place),
    "tgat-log": lambda **place: TGATTime(7, init="log", **place),
    "linear": lambda **place: LinearTime(7, **place),
    "sinusoidal": lambda **place: PositionTime(7, **place),
    "learned": lambda **place: PositionTime(7, "learned", max_len=19, **place),
}


def bessel(order, x):
    """The modified Bessel function I_n by its integral, to machine precision: the trapezoidal rule on a period."""
    angle = np.linspace(-np.pi, np.pi, 401)[:-1]
    return float(np.mean(np.exp(x * np.cos(angle)) * np.cos(order * angle)))


def von_mises(kappa, degree):
    return [math.exp(-kappa) * bessel(c, kappa) * (2 if c else 1) for c in range(degree + 1)]


@pytest.mark.parametrize(("kappa", "degree", "error"), [(2, 3, 0.016893), (2, 5, 0.000502), (10, 10, 0.001199)])
def test_a_cut_series_is_off_by_what_it_leaves_out(kappa, degree, error):
    """Check 5 of the sheet: exp(kappa (cos theta - 1)) as a Mercer series."""
    layer = MercerTime([7.3], degree, dtype=torch.float64)
    with torch.no_grad():
        layer.log_coefficients.copy_(torch.tensor(von_mises(kappa, degree), dtype=torch.float64).log())
    tau = torch.linspace(-7.3, 7.3, 2001, dtype=torch.float64)
    true = torch.exp(kappa * (torch.cos(2 * math.pi * tau / 7.3) - 1))
    off = (layer.kernel(tau) - true).abs()
    rest = sum(von_mises(kappa, 60)[degree + 1 :])
    assert math.isclose(off.max().item(), rest, abs_tol=1e-12)
    assert math.isclose(off.max().item(), error, abs_tol=1e-6)
    assert off.argmax() in (0, 1000, 2000)


@pytest.mark.parametrize("coef", ["tied", "free"])
def test_mercer_features(coef):
    layer = disturbed(MercerTime([7.3, 11.0], 3, coef=coef, dtype=torch.float64))
    times = 50 * torch.rand(2, 3, dtype=torch.float64)
    assert layer.dim == 14
    rates = (1 / torch.tensor([7.3, 11.0], dtype=torch.float64) + layer.law.shift / 2500).tolist()
    np.testing.assert_allclose(layer.periods().tolist(), [1 / r for r in rates])
    for b in range(2):
        for n in range(3):
            wanted = []
            for j, rate in enumerate(rates):
                a = layer.log_coefficients[j].exp().tolist()
                wanted.append(math.sqrt(a[0]))
                for c in range(1, 4):
                    theta = 2 * math.pi * c * rate * times[b, n].item()
                    of_cosine, of_sine = (a[c], a[c]) if coef == "tied" else (a[2 * c - 1], a[2 * c])
                    wanted += [math.sqrt(of_cosine) * math.cos(theta), math.sqrt(of_sine) * math.sin(theta)]
            np.testing.assert_allclose(layer(times)[b, n].tolist(), wanted, atol=1e-11)
    np.testing.assert_allclose(layer.rates().tolist(), [c * r for r in rates for c in (1, 2, 3)])
    shifted = layer(times + 1.7), layer(times[:, :1] + 1.7)
    invariant = torch.allclose(shifted[0] @ shifted[1].mT, layer(times) @ layer(times[:, :1]).mT, atol=1e-9)
    assert invariant == (coef == "tied")


def mean_product(layer, tau, span, count=20_000):
    """The mean over t of the inner product of features at t and t + tau."""
    t = torch.linspace(0, span, count + 1, dtype=torch.float64)[:-1]
    return (layer(t) * layer(t + tau)).sum(-1).mean()


@pytest.mark.parametrize("output", ["features", "projected"])
def test_the_kernel_is_the_mean_inner_product(output):
    layer = MercerTime(
        [3.0, 5.0], 2, output=output, coef="free" if output == "features" else "tied", dtype=torch.float64
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("law"):
                parameter.add_(torch.randn_like(parameter))
    for tau in (0.0, 0.7, 2.9):
        torch.testing.assert_close(layer.kernel(tau), mean_product(layer, tau, 15.0), atol=1e-9, rtol=0)


def test_projected_authors_form():
    """Check 6 of the sheet: b + sum_c A sin(c t 10^-s) + B cos(c t 10^-s) for any values of the parameters."""
    layer = MercerTime(7, 3, output="projected", init="authors")
    assert layer.dim == 7
    torch.testing.assert_close(layer.law.exponents.detach(), torch.linspace(0, 8, 7))
    assert layer.weight.abs().max() <= math.sqrt(6 / (7 + 6))
    assert not layer.bias.any()
    disturbed(layer)
    times = 20 * torch.rand(3, 5, dtype=torch.float64)
    s, w, b = (p.detach().double() for p in (layer.law.exponents, layer.weight, layer.bias))
    wanted = b.clone().expand(3, 5, 7)
    for c in range(1, 4):
        angle = c * times[..., None] * 10**-s
        wanted = wanted + w[:, c - 1] * angle.sin() + w[:, 3 + c - 1] * angle.cos()
    torch.testing.assert_close(layer(times).double(), wanted, atol=1e-6, rtol=0)


def test_given_periods_of_mercer_stay():
    times = torch.tensor([[0.0, 1.0, 100.0]])
    pinned = MercerTime(["1d", "7d", "1h", "365.25d"], 2, trainable=False)
    assert pinned.periods().tolist() == [86400, 604800, 3600, 31557600]
    disturbed(pinned.calibrate(times, periods=[3.0]), 0)
    assert pinned.periods().tolist() == [86400, 604800, 3600, 31557600]
    assert [name for name, p in pinned.named_parameters() if p.requires_grad] == ["log_coefficients"]
    counted = MercerTime(3, 2).calibrate(times, periods=[7.3])
    low = 2 * np.percentile([1.0, 99.0], 1)
    torch.testing.assert_close(counted.periods(), torch.tensor([7.3, low, 400.0], dtype=torch.float64))
    assert math.isclose(counted.kernel(0.0).item(), 1, abs_tol=1e-6)


def test_sinusoidal_positions_are_bochner_features():
    """Check 4 of the sheet."""
    width = 46
    periods = [2 * math.pi * 10000 ** (2 * i / width) for i in range(width // 2)]
    layer = BochnerTime(width, periods=periods, dtype=torch.float64)
    features = layer(torch.arange(300)) * math.sqrt(width / 2)
    table = Positions(width).table(300)  # sines before cosines
    torch.testing.assert_close(features.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), table, atol=1e-12, rtol=0)
    large = BochnerTime(4096, periods=[2 * math.pi * 10000 ** (2 * i / 4096) for i in range(2048)], dtype=torch.float64)
    limits = torch.tensor([0.973963, 0.741955, 0.616895, 0.436773], dtype=torch.float64)
    torch.testing.assert_close(large.kernel(torch.tensor([1, 5, 20, 100])), limits, atol=2e-4, rtol=0)
    torch.testing.assert_close(
        large.kernel(torch.tensor([1, 5, 20, 100])),
        torch.tensor([0.973850, 0.741781, 0.616747, 0.436749], dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )


def test_formulas_of_the_others():
    times = 100 * torch.rand(2, 3, dtype=torch.float64) - 30
    t = times[..., None]
    vec = disturbed(Time2Vec(7, dtype=torch.float64))
    angles = 2 * math.pi * t * vec.law.rates() + vec.phases[1:]
    line = t / 2500 * vec.slope + vec.phases[0]
    torch.testing.assert_close(vec(times), torch.cat((line, angles.sin()), -1), atol=1e-11, rtol=0)
    graph = TGATTime(7, dtype=torch.float64)
    torch.testing.assert_close(graph(times), torch.cos(t * 10.0 ** -torch.linspace(0, 9, 7, dtype=torch.float64)))
    disturbed(graph)
    angles = t * 10**-graph.law.exponents + graph.phases
    torch.testing.assert_close(graph(times), angles.cos(), atol=1e-11, rtol=0)
    linear = LinearTime(5, dtype=torch.float64).calibrate(torch.tensor([[0.0, 1.0, 101.0]]))
    gap = np.percentile([1.0, 100.0], 1)
    both = torch.stack((times / 101, torch.sign(times) * torch.log(1 + times.abs() / gap)), -1)
    torch.testing.assert_close(linear(times), both @ linear.map.weight.T + linear.map.bias)
    places = PositionTime(5, "learned", max_len=3)
    assert torch.equal(places(times), places.positions.rows.expand(2, 3, 5))
    with pytest.raises(InvalidArgument, match="positions for max_len=3 places; got 4"):
        places(torch.zeros(2, 4))
    with pytest.raises(InvalidArgument, match="an axis of places"):
        places(torch.tensor(3.0))


@pytest.mark.parametrize("name", ALL)
def test_gradients(name):
    layer = disturbed(ALL[name](dtype=torch.float64))
    names = [key for key, p in layer.named_parameters() if p.requires_grad]
    times = (10 * torch.rand(2, 3, dtype=torch.float64) + 0.1).requires_grad_()

    def call(times, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (times,))

    values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    if name == "sinusoidal":
        assert not values
        assert not call(times).requires_grad
    else:
        assert torch.autograd.gradcheck(call, (times, *values))


@pytest.mark.parametrize("name", ALL)
def test_every_encoding_keeps_the_contract(name, tmp_path):
    """Shapes and dtypes, calibration in place, 16 bit and autocast, folders: one call for all of them."""
    layer = ALL[name]()
    assert isinstance(layer, TimeEncoding)
    times = torch.rand(2, 19, dtype=torch.float64).cumsum(1) * 1e6 + 1.4e9
    assert layer.calibrate(times, torch.rand(2, 19) > 0.1, periods=[86400.0]) is layer
    disturbed(layer, 0.1).eval()
    out = layer(times)
    assert (out.shape, out.dtype) == ((2, 19, layer.dim), torch.float32)
    assert layer(times.long()).shape == (2, 19, layer.dim)
    assert layer(times[0, :1].float()).shape == (1, layer.dim)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(times), out)
    layer.save_pretrained(tmp_path)
    again = Module.from_pretrained(tmp_path)
    assert torch.equal(again(times), out)
    assert again.arguments() == layer.arguments()
    assert layer.bfloat16()(times).dtype == torch.float32
    assert layer.double()(times).dtype == torch.float64


@pytest.mark.parametrize("name", ["mercer", "mercer-projected", "time2vec", "linear"])
def test_they_compile_whole(name):
    torch.compiler.reset()
    layer = disturbed(ALL[name]())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    times = 1e6 * torch.rand(3, 7, dtype=torch.float64)
    weights = torch.randn(3, 7, layer.dim)
    torch.testing.assert_close(compiled(times), layer(times))
    wanted = torch.autograd.grad((layer(times) * weights).sum(), list(layer.parameters()))
    torch.testing.assert_close(torch.autograd.grad((compiled(times) * weights).sum(), list(layer.parameters())), wanted)


def test_all_by_name():
    for name, cls in {
        "bochner": BochnerTime, "mercer": MercerTime, "time2vec": Time2Vec, "tgat": TGATTime, "linear": LinearTime,
        "sinusoidal": PositionTime,
    }.items():  # fmt: skip
        layer = time_encoding(name, 32, dtype=torch.float64)
        assert type(layer) is cls
        assert layer(torch.rand(5)).shape == (5, 32)
        assert layer(torch.rand(5)).dtype == torch.float64
    assert time_encoding("learned", 8, max_len=5).kind == "learned"
    assert time_encoding("bochner", 8, spectrum="normal").law.frequencies == 4
    assert time_encoding("mercer", 33, output="features").count == 3
    assert time_encoding("mercer", 2, periods=["1d", "7d"]).periods().tolist() == [86400, 604800]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: time_encoding("fourier", 8), "name must be one of bochner, mercer, time2vec, tgat, .*; got 'fourier'"),
        (lambda: time_encoding("mercer", 32, output="features"), "has 22 features, 11 for each; got dim=32"),
        (lambda: MercerTime(0, 3), "periods must be a whole number from 1 on; got 0"),
        (lambda: MercerTime([], 3), "periods must be a whole number from 1 on; got 0"),
        (lambda: MercerTime([-1.0], 3), "period must be a number above 0; got -1.0"),
        (lambda: MercerTime([3.0], 0), "degree must be a whole number from 1 on; got 0"),
        (lambda: MercerTime(3, 2, coef="both"), "coef must be one of tied, free; got 'both'"),
        (lambda: MercerTime(3, 2, output="row"), "output must be one of features, projected; got 'row'"),
        (lambda: MercerTime(3, 2, output="projected", coef="free"), "has a weight for every cosine and sine"),
        (lambda: MercerTime([3.0], 2, init="authors"), "periods were given"),
        (lambda: MercerTime(3, 2, init="authors", period_range=(1, 2)), "init='authors' has its own periods"),
        (lambda: TGATTime(3, period_range=(1, 2)), "init='authors' has its own periods"),
        (lambda: Time2Vec(1), "dim must be a whole number from 2 on; got 1"),
        (lambda: PositionTime(4, "learned"), "give max_len"),
    ],
)  # fmt: skip
def test_what_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
