"""Primal-Attention by fused kernels: what the plain operations give, and nothing written that they would not read again."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernels need triton, which exists for Linux")

from heedful import Unsupported
from heedful.nn import Encoder, PrimalAttention, ksvd_loss
from heedful.ops import primal
from heedful.ops.fused import _device, prepared, primal_ops
from heedful.ops.fused._device import Chip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poisoned(x):
    return x.fill_(torch.nan) if x.is_floating_point() else x


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch):
    monkeypatch.setattr(primal, "FUSED", frozenset({DEVICE}))
    # What a kernel does not write shall be seen.
    empty = prepared.Launcher.empty
    monkeypatch.setattr(prepared.Launcher, "empty", lambda *given, **how: poisoned(empty(*given, **how)))
    torch.manual_seed(0)


def inputs(batch=2, heads=3, n=37, size=8, rows=11, rank=5, width=None, dtype=torch.float32, per_head=False):
    width = rank if per_head else width or size
    reader = (heads, width, rank) if per_head else (width, rank)
    shapes = [
        (batch, n, 2, heads, size),
        (batch, heads, rows, size),
        *[(heads, rows, rank)] * 2,
        *[reader] * 2,
        (width,),
    ]
    return [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]


def outcome(leaves, keep, fused, monkeypatch, parts=True):
    """Output, J and KKT residual, and the gradients of a mixture of them."""
    with monkeypatch.context() as patched:
        if not fused:
            patched.setattr(primal, "FUSED", frozenset())
        out, made = primal.folded_pair(*leaves, keep, parts=parts and "kkt")
    generator = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=generator).to(out)).sum()
    found = [out]
    if parts:
        heads, _, rank = leaves[2].shape
        lam = torch.linspace(0.5, 2.0, heads * rank, device=DEVICE, dtype=made.energy.dtype).view(heads, rank)
        told = [primal.objective(made, lam), primal.objective(made, lam, trace="data"), primal.residual(made, lam)]
        loss = loss + sum((number.square() * 3).sum() for number in told) + 0.7 * primal.penalty(made, lam)
        found += [*told, primal.penalty(made, lam)]
    return found + list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


def assert_same(leaves, keep, monkeypatch, bound, parts=True):
    found = outcome(leaves, keep, True, monkeypatch, parts)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    wanted = outcome(exact, keep, False, monkeypatch, parts)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        error = float(((one.double() - other).norm() / other.norm().clamp_min(1e-3)).detach())
        assert error < bound, error


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"n": 1},
        {"n": 64, "size": 16, "rank": 16},
        {"size": 40, "width": 24, "rank": 13},
        {"per_head": True},
        {"batch": 2, "heads": 1, "rows": 1031, "rank": 33},
    ],
    ids=str,
)
def test_values_and_gradients(sizes, padded, monkeypatch):
    leaves = inputs(**sizes)
    n = leaves[0].shape[1]
    keep = torch.arange(n, device=DEVICE) < torch.tensor([[n], [n // 2]], device=DEVICE) if padded else None
    assert_same(leaves, keep, monkeypatch, 2e-5)


def test_without_parts_bias_or_sample(monkeypatch):
    leaves = inputs()
    assert_same([*leaves[:-1], None], None, monkeypatch, 2e-5)
    assert_same(leaves, None, monkeypatch, 2e-5, parts=False)
    static = inputs(rows=8)
    assert_same([static[0], None, *static[2:]], None, monkeypatch, 2e-5)


@pytest.mark.parametrize(("size", "width", "rank"), [(32, 16, 16), (40, 24, 13)])
def test_values_and_gradients_in_float16(size, width, rank, monkeypatch):
    leaves = inputs(heads=2, n=67, size=size, width=width, rows=37, rank=rank, dtype=torch.float16)
    with torch.no_grad():  # as a layer starts
        for weight in leaves[2:4]:
            weight *= (37 * rank) ** -0.5
    keep = torch.arange(67, device=DEVICE) < torch.tensor([[67], [33]], device=DEVICE)
    assert_same(leaves, keep, monkeypatch, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_vectors_of_length_zero(dtype):
    """phi(0) = 0, as with torch's normalize."""
    leaves = inputs(dtype=dtype)
    with torch.no_grad():
        leaves[0][0, 3] = 0.0
    out, _ = primal.folded_pair(*leaves)
    torch.testing.assert_close(out[0, :, 3], leaves[-1].expand(3, -1))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20])
def test_what_lies_under_padding_does_not_leak(value, dtype, monkeypatch):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 wrongly; needs a CUDA device")
    leaves = inputs(n=19, dtype=dtype)
    keep = torch.arange(19, device=DEVICE) < torch.tensor([[19], [13]], device=DEVICE)
    found = outcome(leaves, keep, True, monkeypatch)
    with torch.no_grad():
        leaves[0][1, 13:] = value
    spoiled = outcome(leaves, keep, True, monkeypatch)
    # Energies, the loss, and the gradients of tokens, that is; outputs at padding are what they are.
    for one, other in zip(found[1:5], spoiled[1:5], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found[5][keep], spoiled[5][keep])


@pytest.mark.parametrize("which", ["weights", "sample", "keep", "heads", "readout"])
def test_what_broadcasts_goes_the_plain_way(which, monkeypatch):
    leaves = [x.detach() for x in inputs()]
    keep = None
    if which == "weights":
        leaves[2], leaves[3] = (torch.stack((x, 2 * x)) for x in leaves[2:4])
    elif which == "sample":
        leaves[1] = leaves[1][:1]
    elif which == "heads":
        leaves[2], leaves[3] = (x[:1] for x in leaves[2:4])
    elif which == "readout":
        leaves[4], leaves[5] = (torch.stack((x, 2 * x))[:, None] for x in leaves[4:6])
    else:
        keep = torch.arange(37, device=DEVICE)[None] < 30
    lam = torch.rand(3, 5, device=DEVICE)
    found, made = primal.folded_pair(*leaves, keep)
    loss = primal.penalty(made, lam)
    monkeypatch.setattr(primal, "FUSED", frozenset())
    wanted, made = primal.folded_pair(*leaves, keep)
    assert torch.equal(found, wanted)
    assert torch.allclose(loss, primal.penalty(made, lam), rtol=1e-5)


@pytest.mark.parametrize("kernel", ["fold", "fold_backward"])
def test_a_smaller_setting_where_the_first_has_no_room(kernel, monkeypatch):
    import triton

    from heedful.ops.fused import primal as kernels

    real, turned_away = getattr(kernels, kernel), []

    class Full:
        arg_names = real.arg_names

        def __getitem__(self, grid):
            def launch(*args, **options):
                if not turned_away:
                    turned_away.append(grid)
                    raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
                return real[grid](*args, **options)

            return launch

    monkeypatch.setattr(_device, "FITS", {})
    leaves = inputs()
    monkeypatch.setattr(kernels, kernel, Full())
    assert_same(leaves, None, monkeypatch, 2e-5)
    assert turned_away
    assert sorted(_device.FITS.values()) == [0, 1]


def test_what_chips_take(monkeypatch):
    def takes(dtype, size, rank):
        query = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 1, 7, size), numel=lambda: 7 * size)
        return primal_ops.usable(query, size, size, rank, frozenset({"cuda"}))

    def on(*facts):
        primal_ops._largest.cache_clear()
        for room in (_device, primal_ops):
            monkeypatch.setattr(room, "chip", lambda device: Chip(*facts))

    half, single, double = torch.bfloat16, torch.float32, torch.float64
    on(9, 132, 233472)
    assert [takes(half, 128, 128), takes(half, 129, 8), takes(single, 64, 64), takes(single, 65, 8)] == [
        True,
        False,
    ] * 2
    on(8, 84, 102400)
    assert [takes(half, 64, 64), takes(half, 65, 8), takes(half, 64, 65), takes(single, 16, 8)] == [True] + [False] * 3
    on(7, 80, 98304)
    assert not takes(half, 16, 8)
    assert not takes(double, 16, 8)
    primal_ops._largest.cache_clear()


@pytest.mark.parametrize("kept", ["all", "beginning", "some", "one sequence"])
@pytest.mark.parametrize(("n", "rows"), [(37, 5), (67, 11), (200, 13), (9, 4)])
def test_means_of_segments_by_one_product(n, rows, kept, monkeypatch):
    x = torch.randn(2, n, 6, dtype=torch.float64, device=DEVICE)
    some = torch.rand(2, n, device=DEVICE) < 0.6
    keep = {
        "all": None,
        "beginning": torch.arange(n, device=DEVICE) < torch.tensor([[n // 2], [n]], device=DEVICE),
        "some": some,
        "one sequence": some & torch.tensor([[False], [True]], device=DEVICE),
    }[kept]
    if kept == "some":
        x = x.masked_fill(~keep[..., None], torch.nan)

    def outcome(fused, dtype=torch.float64):
        monkeypatch.setattr(primal, "FUSED", frozenset({DEVICE}) if fused else frozenset())
        leaf = x.to(dtype).requires_grad_()
        made = primal.sample(leaf, rows, "segment_mean", keep)
        return made, *torch.autograd.grad(made.square().sum(), leaf)

    wanted = outcome(False)
    torch.testing.assert_close(outcome(True), wanted)
    found = [part.double() for part in outcome(True, torch.bfloat16)]
    torch.testing.assert_close(found, list(wanted), atol=0.03, rtol=0.03)


def test_long_segments_of_large_numbers_stay_in_range():
    x = torch.full((1, 5003, 3), 6e4, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(
        primal.sample(x, 7, "segment_mean"), torch.full((1, 7, 3), 6e4, device=DEVICE), rtol=1e-2, atol=0
    )


def test_separate_queries_and_keys(monkeypatch):
    leaves = inputs()
    query, key = (x.transpose(1, 2) for x in leaves[0].unbind(2))
    torch.testing.assert_close(primal.folded(query, key, *leaves[1:]).output, primal.folded_pair(*leaves).output)


def test_the_same_bits_again():
    leaves = inputs(n=67)
    once, again = (torch.autograd.grad(primal.folded_pair(*leaves)[0].sum(), leaves) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_the_layer_takes_them(monkeypatch):
    layer = PrimalAttention(24, 3, rank=4, max_len=50, device=DEVICE)
    x = torch.randn(2, 29, 24, device=DEVICE)
    mask = torch.zeros(2, 29, dtype=torch.bool, device=DEVICE)
    mask[1, 20:] = True
    calls = []
    kernel = primal_ops.fold
    monkeypatch.setattr(primal_ops, "fold", lambda *args: calls.append(1) or kernel(*args))
    found = layer(x, mask), layer.ksvd_loss()
    assert calls
    monkeypatch.setattr(primal, "FUSED", frozenset())
    torch.testing.assert_close(found, (layer(x, mask), layer.ksvd_loss()), rtol=1e-4, atol=1e-5)


def test_the_residual_as_a_penalty_is_asked_for_in_advance(monkeypatch):
    layer = PrimalAttention(24, 3, rank=4, max_len=50, track_loss="kkt", device=DEVICE)
    x = torch.randn(2, 29, 24, device=DEVICE)
    mask = torch.arange(29, device=DEVICE) >= torch.tensor([[29], [20]], device=DEVICE)
    layer(x, mask)
    found, loss = layer.ksvd_loss(penalty="kkt"), layer.ksvd_loss()
    with torch.no_grad():
        assert torch.allclose(layer.kkt_residual(x, mask).mean(), found)
        layer.track_loss = True
        layer(x, mask)
        assert torch.equal(layer.ksvd_loss(), loss)
        with pytest.raises(Unsupported, match="track_loss='kkt'"):
            layer.ksvd_loss(penalty="kkt")
        # Nothing that is kept is as long as the input.
        assert all(29 not in part.shape for part in (*layer._last[:5], *layer._last.data[:2]))
    monkeypatch.setattr(primal, "FUSED", frozenset())
    layer(x, mask)
    torch.testing.assert_close(found, layer.ksvd_loss(penalty="kkt"), rtol=1e-4, atol=1e-5)


def test_an_encoder_trains_through_them():
    model = Encoder(24, 3, ["softmax", "primal"], max_len=40, device=DEVICE)
    (model(torch.randn(2, 17, 24, device=DEVICE)).square().mean() + ksvd_loss(model)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_operators_are_sound():
    leaves = inputs(n=17, heads=2)
    keep = torch.arange(17, device=DEVICE).expand(2, -1) < 13
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for arguments in ((*leaves, keep, True), (leaves[0], None, *inputs(rows=8, heads=2)[2:-1], None, None, False)):
        torch.library.opcheck(torch.ops.heedful.primal_fold.default, arguments, test_utils=tests)
    energy, lam, product = (
        torch.rand(shape, device=DEVICE, requires_grad=True) for shape in ((2, 2, 3, 5), (3, 5), (3,))
    )
    tokens = torch.tensor([7.0, 0.0], device=DEVICE)
    torch.library.opcheck(torch.ops.heedful.primal_penalty.default, (energy, lam, product, tokens), test_utils=tests)


def test_compiles_without_a_graph_break():
    layer = PrimalAttention(24, 3, rank=4, max_len=50, device=DEVICE)

    def step(x):
        return layer(x).square().mean() + layer.ksvd_loss()

    x = torch.randn(2, 29, 24, device=DEVICE)
    wanted = step(x)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(x), wanted)


def test_no_second_derivative():
    leaves = inputs()
    out, _ = primal.folded_pair(*leaves)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(Unsupported, match="second derivatives"):
        first.sum().backward()


def test_what_they_do_not_take():
    x = torch.randn(1, 2, 5, 8, device=DEVICE)
    assert primal_ops.usable(x, 8, 8, 5, frozenset({DEVICE}))
    assert not primal_ops.usable(x, 8, 8, 5, frozenset())
    assert not primal_ops.usable(x.double(), 8, 8, 5, frozenset({DEVICE}))
    assert not primal_ops.usable(x, 8, 129, 5, frozenset({DEVICE}))
    assert not primal_ops.usable(x, 8, 8, 129, frozenset({DEVICE}))
    assert not primal_ops.usable(x[:, :, :0], 8, 8, 5, frozenset({DEVICE}))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bfloat16 wrongly; needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 5e-3), (torch.float32, 2e-5)], ids=str
)
@pytest.mark.parametrize(
    ("size", "width", "rank"),
    [
        (32, 16, 16),
        (32, 32, 20),
        (64, 64, 20),
        (64, 24, 32),
        (48, 64, 64),
        (80, 80, 20),
        (128, 112, 64),
        (64, 128, 100),
    ],
)
def test_many_blocks_on_a_device(size, width, rank, dtype, bound, monkeypatch):
    if dtype == torch.float32 and max(size, width, rank) > 64:
        pytest.skip("in float32 the kernels take sizes up to 64")
    leaves = inputs(heads=4, n=1031, size=size, width=width, rows=200, rank=rank, dtype=dtype)
    assert primal_ops.usable(leaves[0], size, width, rank, frozenset({DEVICE}))
    with torch.no_grad():  # as a layer starts: gradients of J^2 would leave the range of float16
        for weight in leaves[2:4]:
            weight *= (200 * rank) ** -0.5
    keep = torch.arange(1031, device=DEVICE) < torch.tensor([[1031], [700]], device=DEVICE)
    assert_same(leaves, keep, monkeypatch, bound)
    more = [x.detach().repeat(1, 9, 1, 1, 1).requires_grad_() if x.dim() == 5 else x for x in leaves]
    assert_same(more, None, monkeypatch, bound)
