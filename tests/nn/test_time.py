"""Bochner's features: invariance, the kernel and its error, phases that survive any origin and precision, the scale of data."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from heedful import InvalidArgument, Unsupported
from heedful.nn import BochnerTime, MercerTime, Module
from trained import disturbed

SPECTRA = ["free", "normal", "mixture", "flow"]
WIDE = (2 * math.pi, 2 * math.pi)  # a deviation of one radian for each unit of time


def encodings(dtype=torch.float64, **more):
    yield from (disturbed(BochnerTime(22, spectrum, dtype=dtype, **more)) for spectrum in SPECTRA)
    yield disturbed(MercerTime(3, 5, dtype=dtype, **more))


def gram(features):
    return features @ features.mT


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("spectrum", [*SPECTRA, "mlp"])
def test_features_are_cosines_and_sines(spectrum, layout):
    layer = disturbed(BochnerTime(14, spectrum, components=3, layout=layout, dtype=torch.float64))
    times = 100 * torch.rand(2, 3, dtype=torch.float64) - 50
    rates, amplitudes = layer.rates().tolist(), layer.amplitudes().tolist()
    assert len(rates) == len(amplitudes) == 7
    assert math.isclose(sum(a * a for a in amplitudes), 1)
    out = layer(times)
    for b in range(2):
        for n in range(3):
            pairs = [
                (a * math.cos(2 * math.pi * r * times[b, n].item()), a * math.sin(2 * math.pi * r * times[b, n].item()))
                for r, a in zip(rates, amplitudes, strict=True)
            ]
            flat = (
                [*(c for c, _ in pairs), *(s for _, s in pairs)] if layout == "half" else [x for p in pairs for x in p]
            )
            torch.testing.assert_close(out[b, n], torch.tensor(flat, dtype=torch.float64), atol=1e-12, rtol=0)


def test_rates_are_what_the_parameters_say():
    z = torch.special.ndtri((torch.arange(7, dtype=torch.float64) + 0.5) / 7)
    free = disturbed(BochnerTime(14, periods=[3.0, 5.0], period_range=(2.0, 200.0), dtype=torch.float64))
    first = torch.tensor([3.0, 5.0, *(2 * 10 ** (i / 2) for i in range(5))], dtype=torch.float64)
    torch.testing.assert_close(free.rates(), 1 / first + free.law.shift / 50)
    normal = disturbed(BochnerTime(14, "normal", period_range=(4.0, 25.0), dtype=torch.float64))
    wanted = normal.law.shift / 6.25 + normal.law.log_deviation.exp() / 10 * z
    torch.testing.assert_close(normal.rates(), wanted)
    mixture = disturbed(
        BochnerTime(14, "mixture", components=3, periods=[7.3], period_range=(4.0, 25.0), dtype=torch.float64)
    )
    law = mixture.law
    means = torch.tensor([1 / 7.3, 1 / 4, 1 / 25], dtype=torch.float64) + law.shift / 6.25
    deviations = torch.tensor([0.25 / 6.25, 0.5 / 4, 0.5 / 25], dtype=torch.float64) * law.log_deviation.exp()
    counts, weights = [3, 2, 2], law.logits.softmax(0)
    for i in range(7):
        q, at = i % 3, (i // 3 + 0.5) / counts[i % 3]
        rate = means[q] + deviations[q] * torch.special.ndtri(torch.tensor(at, dtype=torch.float64))
        torch.testing.assert_close(mixture.rates()[i], rate)
        torch.testing.assert_close(mixture.amplitudes()[i], (weights[q] / counts[q]).sqrt())
    flow = BochnerTime(14, "flow", period_range=(4.0, 25.0), dtype=torch.float64)
    u = (torch.arange(7, dtype=torch.float64) + 0.5) / 7
    torch.testing.assert_close(flow.periods(), 4 * (25 / 4) ** u)
    one = disturbed(flow).rates()[3]
    hidden = torch.tanh(flow.law.inner.weight[:, 0] * 0.5 + flow.law.inner.bias)
    torch.testing.assert_close(
        one, torch.exp(-(math.log(10) + flow.law.outer.weight[0] @ hidden + flow.law.outer.bias[0]))
    )


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gradients_of_parameters_and_times(spectrum):
    layer = disturbed(BochnerTime(10, spectrum, components=2, period_range=(2.0, 30.0), dtype=torch.float64))
    times = (30 * torch.rand(2, 3, dtype=torch.float64)).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def call(times, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (times,))

    values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    assert torch.autograd.gradcheck(call, (times, *values))
    assert all(p.grad is None for p in layer.parameters())


def test_gradients_do_not_grow_with_the_number_of_turns():
    """A second's phase in two years moves as a year's does: by one turn over the horizon."""
    layer = BochnerTime(4, periods=[1.0, 3.2e7], normalize=False).calibrate(torch.tensor([[0.0, 1.0, 6.4e7]]))
    layer.turns(torch.tensor(6.4e7, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(layer.law.shift.grad, torch.tensor([1.0, 1.0]), atol=0.03, rtol=0)


def test_inner_products_depend_on_differences_alone():
    """Check 1 of the sheet."""
    start, later = 20 * torch.rand(2, 41, dtype=torch.float64)
    for layer in encodings(period_range=(1.0, 500.0)):
        wanted = layer(start) @ layer(later).mT
        for shift in (1.0, 777.7, 1e5):
            torch.testing.assert_close(layer(start + shift) @ layer(later + shift).mT, wanted, atol=1e-9, rtol=0)
    start, later = torch.randint(0, 64_000, (2, 41)) / 64.0
    start, later = start.double(), later.double()
    for layer in encodings(period_range=(5.0, 500.0)):
        far = layer(start + 1.7e9) @ layer(later + 1.7e9).mT
        torch.testing.assert_close(far, layer(start) @ layer(later).mT, atol=1e-6, rtol=0)


def test_features_have_norm_one_and_gram_matrices_are_positive():
    times = 1e4 * torch.rand(200, dtype=torch.float64)
    for layer in encodings():
        products = gram(layer(times))
        if isinstance(layer, BochnerTime):
            torch.testing.assert_close(products.diagonal(), torch.ones(200, dtype=torch.float64), atol=1e-12, rtol=0)
        assert torch.linalg.eigvalsh(products).min() >= -1e-8
        torch.testing.assert_close(layer.kernel(times[:, None] - times), products, atol=1e-9, rtol=0)
    plain = BochnerTime(22, normalize=False, dtype=torch.float64)
    torch.testing.assert_close(gram(plain(times)).diagonal(), torch.full((200,), 11.0, dtype=torch.float64))


def errors(rates, tau):
    """sup over tau of the distance to exp(-tau^2 / 2), for rates `(draws, F)`."""
    cosines = torch.stack([(2 * math.pi * rates * t).cos().mean(-1) for t in tau.tolist()], -1)
    return (cosines - (-(tau**2) / 2).exp()).abs().amax(-1)


def test_quantile_points_are_close_and_random_ones_by_the_root_of_their_number():
    """Check 2 of the sheet."""
    tau = torch.linspace(0, 10, 201, dtype=torch.float64)
    layer = BochnerTime(2048, "normal", period_range=WIDE, dtype=torch.float64)
    assert (layer.kernel(tau) - (-(tau**2) / 2).exp()).abs().max() <= 0.0015
    sizes = 2 ** torch.arange(4, 11)
    drawn = (
        BochnerTime(2 * 1024 * 40, "normal", sampler="random", period_range=WIDE, dtype=torch.float64).rates().detach()
    )
    means = torch.stack([errors(drawn[: 40 * n].view(40, n), tau[::5]).mean() for n in sizes.tolist()])
    slope = np.polyfit(sizes.log().numpy(), means.log().numpy(), 1)[0]
    assert abs(slope + 0.5) <= 0.1


def test_the_theorem_holds_for_drawn_frequencies():
    """Check 3 of the sheet: uniformly in 300 draws of 4,096, and at single elapsed times in 20,000 draws of 64."""
    bound = 4 * math.sqrt(10 / 0.2) * math.exp(-4096 * 0.04 / 16) + 2 * math.exp(-4096 * 0.04 / 8)
    assert math.isclose(bound, 0.00101, abs_tol=5e-6)
    layer = BochnerTime(8192, "normal", sampler="random", resample="train", period_range=WIDE)
    tau = torch.linspace(0, 10, 41)
    exact = (-(tau**2) / 2).exp()
    worst = []
    for _ in range(300):
        layer.law.redraw()
        angles = (2 * math.pi * layer.rates().detach()).float()
        worst.append(((tau[:, None] * angles).cos().mean(-1) - exact).abs().max().item())
    assert len(set(worst)) == 300
    assert max(worst) < 0.2
    rates = (
        BochnerTime(2 * 64 * 20_000, "normal", sampler="random", period_range=WIDE).rates().detach().view(20_000, 64)
    )
    for t in (1.0, 3.0):
        off = (torch.cos(2 * math.pi * rates * t).mean(-1) - math.exp(-t * t / 2)).abs()
        for epsilon in (0.1, 0.2, 0.3):
            assert (off >= epsilon).double().mean() <= 2 * math.exp(-64 * epsilon**2 / 2)


def turns_of(time, period):
    """Exactly."""
    return float(Fraction(time) / Fraction(period) % 1)


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16", "float16"])
def test_phases_survive_unix_times(precision):
    """Check 10 of the sheet: periods from a second to a year, times in seconds and in milliseconds."""
    periods = [1.0, 60.0, 3600.0, 86400.0, 604800.0, 31557600.0]
    cases = [
        (torch.tensor(1388533518.993, dtype=torch.float64), periods),
        (torch.tensor(1388533518993), [1000 * p for p in periods]),
    ]
    for time, each in cases:
        exact = torch.tensor([turns_of(Fraction("1388533518.993"), p) for p in periods], dtype=torch.float64)
        wanted = torch.stack(((2 * math.pi * exact).cos(), (2 * math.pi * exact).sin()), -1).flatten()
        bochner = BochnerTime(12, periods=each, normalize=False, trainable=False)
        mercer = MercerTime(each, 1, trainable=False)
        if precision in ("bfloat16", "float16"):
            bochner, mercer = (m.to(getattr(torch, precision)) for m in (bochner, mercer))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            out, turns = bochner(time), mercer.turns(time)
        assert out.dtype == turns.dtype == torch.float32
        assert (out.double() - wanted).abs().max() <= 2e-6
        assert ((2 * math.pi * turns.double()).cos() - wanted[::2]).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_another_dtype_keeps_the_exact_numbers(spectrum, dtype):
    times = torch.rand(3, 19, dtype=torch.float64).cumsum(1) * 1e8
    layer = BochnerTime(10, spectrum, components=3).calibrate(times)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter).bfloat16())
    before = layer.rates(), layer(times)
    layer.to(dtype)
    if spectrum != "flow":  # whose weights in float16 may round
        torch.testing.assert_close(layer.rates(), before[0], atol=0, rtol=1e-15)
    assert layer(times).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(layer(times).float(), before[1], atol=1e-5, rtol=0)


def test_saved_and_loaded_it_is_the_same(tmp_path):
    times = torch.rand(3, 19, dtype=torch.float64).cumsum(1) * 1e8
    for at, layer in enumerate(
        [*encodings(torch.float32), BochnerTime(6, "normal", sampler="random", dtype=torch.bfloat16)]
    ):
        disturbed(layer.calibrate(times, periods=None if at == 2 else ["1d", "7d"])).eval()
        layer.save_pretrained(tmp_path / str(at))
        again = Module.from_pretrained(tmp_path / str(at))
        assert torch.equal(again(times + 1.4e9), layer(times + 1.4e9))
        assert torch.equal(again.rates(), layer.rates())
        assert again.arguments() == layer.arguments()


@pytest.mark.parametrize(("spectrum", "resample"), [("free", "never"), ("flow", "train")])
def test_it_compiles_whole(spectrum, resample):
    torch.compiler.reset()
    layer = disturbed(BochnerTime(10, spectrum, components=2, resample=resample)).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    times = 1e6 * torch.rand(3, 7, dtype=torch.float64)
    torch.testing.assert_close(compiled(times), layer(times))
    weights = torch.randn(3, 7, 10)
    wanted = torch.autograd.grad((layer(times) * weights).sum(), list(layer.parameters()))
    found = torch.autograd.grad((compiled(times) * weights).sum(), list(layer.parameters()))
    torch.testing.assert_close(found, wanted)
    layer.train()
    assert torch.equal(compiled(times), compiled(times)) == (resample == "never")


def test_drawn_anew_while_training_and_never_else():
    times = torch.rand(5, dtype=torch.float64)
    for sampler in ("quantile", "random"):
        layer = BochnerTime(22, "normal", sampler=sampler, resample="train", period_range=(0.5, 2.0))
        first, second = layer(times), layer(times)
        assert not torch.equal(first, second)
        assert torch.equal(layer.turns(times), layer.turns(times))  # of the last draw
        (first.sum() + second.sum()).backward()
        assert torch.equal(layer.eval()(times), layer(times))
        same = BochnerTime(22, "normal", sampler=sampler, period_range=(0.5, 2.0))
        assert torch.equal(layer(times), same(times)) == (sampler == "quantile")
    assert "law.drawn" not in layer.state_dict()


def test_authors_form():
    """Check 6 of the sheet: [beta sin(t 10^-s) | beta' cos(t 10^-s')] for any values of its parameters."""
    layer = BochnerTime(14, init="authors")
    torch.testing.assert_close(layer.law.exponents.detach(), torch.linspace(0, 8, 7).repeat(2))
    assert torch.equal(layer.scales, torch.ones(14))
    times = 20 * torch.rand(3, 5, dtype=torch.float64)
    wanted = layer(times) @ layer(times).mT
    torch.testing.assert_close(layer.kernel(times[:, :, None] - times[:, None]), wanted, atol=1e-5, rtol=0)
    disturbed(layer)
    s, beta = layer.law.exponents.detach().double(), layer.scales.detach().double()
    parts = beta[:7] * torch.sin(times[..., None] * 10 ** -s[:7]), beta[7:] * torch.cos(times[..., None] * 10 ** -s[7:])
    torch.testing.assert_close(layer(times).double(), torch.cat(parts, -1), atol=1e-6, rtol=0)
    assert layer.rates().shape == layer.amplitudes().shape == (14,)
    with pytest.raises(Unsupported, match="no pairs to turn"):
        layer.turns(times)
    trained = layer.state_dict()["scales"].clone()
    layer.calibrate(times.sort(1).values)
    torch.testing.assert_close(layer.law.exponents.detach(), torch.linspace(0, 8, 7).repeat(2))
    assert not torch.equal(trained, layer.scales)


def scale_of(sequences):
    """The sheet's 2.6 by hand: periods from twice the 1st percentile of positive gaps to four times the 99th of spans."""
    gaps = np.concatenate([np.diff(s) for s in sequences])
    spans = [s[-1] - s[0] for s in sequences]
    return 2 * np.percentile(gaps[gaps > 0], 1), 4 * np.percentile(spans, 99)


def test_calibration_reads_the_data_and_not_the_padding():
    rng = np.random.default_rng(0)
    sequences = [np.cumsum(1 + rng.exponential(5.0, n)) + 1.3e9 for n in (7, 19, 2, 13)]
    sequences[1][5] = sequences[1][4]
    times, mask = torch.zeros(4, 19, dtype=torch.float64), torch.zeros(4, 19, dtype=torch.bool)
    for row, s in enumerate(sequences):
        # Real events may have padding before, between and behind them.
        places = np.sort(rng.choice(19, len(s), replace=False))
        times[row, places], mask[row, places] = torch.from_numpy(s), True
    times[~mask] = torch.nan
    low, high = scale_of(sequences)
    layer = BochnerTime(10).calibrate(times, mask)
    torch.testing.assert_close(layer.periods()[[0, -1]], torch.tensor([low, high], dtype=torch.float64))
    np.testing.assert_allclose(layer.periods().detach().log().diff().diff(), 0, atol=1e-9)
    # Another unit (64, which rounds nothing): other periods, the same features.
    other = BochnerTime(10).calibrate(64 * times, mask)
    torch.testing.assert_close(other.periods(), 64 * layer.periods())
    torch.testing.assert_close(other(64 * times[mask]), layer(times[mask]), atol=1e-6, rtol=0)
    whole = BochnerTime(10).calibrate((times * 1000).nan_to_num(0).round().long(), mask)
    torch.testing.assert_close(whole.periods(), 1000 * layer.periods(), rtol=2e-3, atol=0)


def test_given_periods_stay_and_found_ones_come_before_the_rest():
    times = torch.tensor([[0.0, 1.0, 100.0]])
    layer = BochnerTime(12, periods=["1min", 7.3]).calibrate(times, periods=[11.0])
    low, high = 2 * np.percentile([1.0, 99.0], 1), 400.0
    wanted = torch.tensor([60.0, 7.3, 11.0, low, math.sqrt(low * high), high], dtype=torch.float64)
    torch.testing.assert_close(layer.periods(), wanted)
    many = BochnerTime(4).calibrate(times, periods=[3.0, 5.0, 7.0])
    torch.testing.assert_close(many.periods(), torch.tensor([3.0, 5.0], dtype=torch.float64))
    fixed = BochnerTime(4, period_range=("1h", "1d")).calibrate(times)
    torch.testing.assert_close(fixed.periods(), torch.tensor([3600.0, 86400.0], dtype=torch.float64))
    assert fixed.law.horizon.view(torch.float64) == 100
    law = BochnerTime(12, "mixture", components=3).calibrate(times, periods=[11.0]).law
    torch.testing.assert_close(law.means.view(torch.float64)[0], torch.tensor(1 / 11, dtype=torch.float64))
    assert BochnerTime(12, "flow").calibrate(times, periods=[11.0]).periods().isfinite().all()
    trained = disturbed(BochnerTime(12)).calibrate(times)
    assert torch.equal(trained.law.shift, torch.zeros(6))
    assert not any(p.requires_grad for s in SPECTRA for p in BochnerTime(12, s, trainable=False).parameters())


def test_a_gradient_finds_a_period_that_is_near():
    """cos(2 pi t / 7.3) over a span of 100, from 7.1: within half a turn over the span."""
    torch.manual_seed(1)
    times = 100 * torch.rand(256, dtype=torch.float64)
    layer = BochnerTime(2, periods=[7.1], normalize=False).calibrate(times.sort().values[None])
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        (layer(times)[:, 0] - torch.cos(2 * math.pi * times / 7.3).float()).square().mean().backward()
        optimizer.step()
    assert abs(layer.periods().item() / 7.3 - 1) < 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BochnerTime(7), "dim must be even, a cosine and a sine for each frequency; got 7"),
        (lambda: BochnerTime(0), "dim must be a whole number from 2 on; got 0"),
        (lambda: BochnerTime(4, "gauss"), "spectrum must be one of free, normal, mixture, flow, mlp; got 'gauss'"),
        (lambda: BochnerTime(4, periods=[0.0]), "period must be a number above 0; got 0.0"),
        (lambda: BochnerTime(4, periods=[math.inf]), "period must be a number above 0; got inf"),
        (lambda: BochnerTime(4, periods=["3 moons"]), "'3 moons' is no period: give a number in the unit of the times"),
        (lambda: BochnerTime(4, periods="1d"), "periods must be a list of numbers or of strings as '7d'; got '1d'"),
        (lambda: BochnerTime(4, periods=[1, 2, 3]), "takes at most 2 periods to start at; got 3"),
        (lambda: BochnerTime(4, "flow", periods=[1]), "takes at most 0 periods to start at; got 1"),
        (lambda: BochnerTime(4, "mixture", components=3), "dim=4 has 2 frequencies, too few for components=3"),
        (lambda: BochnerTime(4, period_range=(5, 2)), r"period_range is \(shortest, longest\); got \(5, 2\)"),
        (lambda: BochnerTime(4, period_range=3), r"period_range must be 'auto' or \(shortest, longest\) period; got 3"),
        (lambda: BochnerTime(4, resample="train"), "spectrum='free' trains each frequency and has no base points"),
        (lambda: BochnerTime(4, init="authors", periods=[3]), "init='authors' is one fixed form"),
    ],
)  # fmt: skip
def test_what_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(
    ("times", "mask", "message"),
    [
        (torch.tensor([[0.0, math.nan, 2.0]]), None, "1 of 3 times are NaN or infinite: drop these events, or mask them"),
        (torch.tensor([[0.0, math.inf]]), None, "1 of 2 times are NaN or infinite"),
        (torch.tensor([[0.0], [3.0]]), None, "no sequence has two events at different times in order"),
        (torch.tensor([[3.0, 3.0]]), None, "give period_range=\\(shortest, longest\\)"),
        (torch.zeros(0, 5), None, "no sequence has two events"),
        (torch.tensor([[0.0, 1.0]]), torch.tensor([True, True]), r"mask must be boolean .* of shape \(1, 2\), as times"),
        (torch.zeros(1, 2, 3), None, r"times must have shape \(sequences, events\); got \(1, 2, 3\)"),
        ([[0.0, 1.0]], None, "times must be a tensor of float64 or whole numbers .*; got list"),
        (torch.zeros(1, 2).half(), None, "got torch.float16"),
    ],
)  # fmt: skip
def test_what_calibration_refuses(times, mask, message):
    layer = BochnerTime(4)
    before = layer.periods()
    with pytest.raises(InvalidArgument, match=message):
        layer.calibrate(times, mask)
    assert torch.equal(layer.periods(), before)


def test_times_that_are_no_numbers_are_refused():
    for bad in (math.nan, -math.inf):
        with pytest.raises(InvalidArgument, match="times hold NaN or infinite values"):
            BochnerTime(4)(torch.tensor([1.0, bad]))
    with pytest.raises(InvalidArgument, match=r"got torch.bfloat16"):
        BochnerTime(4)(torch.zeros(2, dtype=torch.bfloat16))


def test_spectrum_and_pictures():
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    tau = torch.linspace(0, 300, 23, dtype=torch.float64)
    for layer in encodings(period_range=(3.0, 200.0)):
        spectrum = layer.spectrum()
        assert (np.diff(spectrum.weights) <= 0).all()
        np.testing.assert_allclose(spectrum.kernel(tau.numpy()), layer.kernel(tau).detach(), atol=1e-9)
        assert f"kernel {layer.kernel(0.0).item():.4g} at 0" in str(spectrum)
        assert spectrum.to_dict()["constant"] == spectrum.constant
        assert len(spectrum.plot().lines[0].get_xdata()) == len(layer.rates())
        ax = layer.plot(longest=250.0)
        x, y = ax.lines[0].get_data()
        np.testing.assert_allclose(y, layer.kernel(torch.from_numpy(x)).detach(), atol=1e-9)
        marks = sorted(line.get_xdata()[0] for line in ax.lines[1:])
        np.testing.assert_allclose(marks, sorted(p for p in layer.periods().tolist() if p <= 250))
    assert "and 3 periods of no larger weight" in str(BochnerTime(22).spectrum())
    assert BochnerTime(8).plot().get_xscale() == "log"
    with pytest.raises(InvalidArgument, match="no period to draw"):
        BochnerTime(2, "normal").plot()


def test_a_given_range_needs_no_gaps():
    encoding = BochnerTime(8, period_range=(1.0, 5.0)).calibrate(torch.ones(2, 3, dtype=torch.float64))
    assert 1.0 <= float(encoding.periods().min()) <= float(encoding.periods().max()) <= 5.0 * (1 + 1e-9)
    with pytest.raises(InvalidArgument, match="NaN or infinite"):
        encoding.calibrate(torch.full((2, 3), torch.nan, dtype=torch.float64))
