"""The mask algebra against index arithmetic, its faces, its laziness, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from heedful import FeatureMap, Gaussian, HigherOrder, InvalidArgument, Sigmoid, Softmax, Unsupported, attend, masks
from heedful.masks import Parts, Region
from heedful.ops import stream
from listed import block_mask, factors, inputs, relative_error

SHAPE = (2, 3, 19, 23)
ROWS, COLS = torch.arange(19)[:, None], torch.arange(23)
IDS = torch.arange(23) // 4
LENGTHS = torch.tensor([23, 9])
KEPT = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(2)) > 0.5
SEQUENCE, KEY_SEQUENCE = (
    torch.tensor([0] * 4 + [2] * 7 + [3] * 6 + [-1] * 2),
    torch.tensor([0] * 3 + [1] * 6 + [3] * 14),
)

WANTED = {
    "causal": (masks.causal, COLS <= ROWS),
    "lower_right": (masks.lower_right, COLS <= ROWS + 4),
    "window": (masks.window(2, 5), (COLS >= ROWS - 2) & (COLS <= ROWS + 5)),
    "window-symmetric": (masks.window(3), (COLS - ROWS).abs() <= 3),
    "window-end": (masks.window(1, 0, align="end"), (COLS - ROWS - 4 <= 0) & (COLS - ROWS - 4 >= -1)),
    "padding": (masks.padding(LENGTHS), LENGTHS[:, None, None, None] > COLS),
    "keys": (masks.keys(COLS.expand(2, -1) % 3 == 0), (COLS % 3 == 0)),
    "document": (masks.document(IDS[:19], IDS), IDS[:19, None] == IDS),
    "dense": (masks.dense((ROWS + COLS) % 2 == 0), (ROWS + COLS) % 2 == 0),
    "packed": (masks.packed([0, 4, 4, 11, 17], [0, 3, 9, 9, 23]), SEQUENCE[:, None] == KEY_SEQUENCE),
    "packed-causal": (
        masks.packed(torch.tensor([0, 7, 12, 19])) & masks.causal,
        ((ROWS < 7) | (COLS >= 7)) & ((ROWS < 12) | (COLS >= 12)) & (COLS <= ROWS),
    ),
    "blocks": (masks.blocks(KEPT, 5), KEPT[..., (ROWS // 5), (COLS // 5)]),
    "blocks-oblong": (masks.blocks(KEPT[1, 0, :3, :2], (7, 12)), KEPT[1, 0][(ROWS // 7), (COLS // 12)]),
    "low-rank": (masks.low_rank(torch.randn(19, 2), torch.randn(3, 23, 2)), ROWS >= 0),
    "and": (masks.causal & masks.window(4), (COLS <= ROWS) & (COLS >= ROWS - 4)),
    "or": (masks.causal | masks.padding(LENGTHS), (COLS <= ROWS) | (LENGTHS[:, None, None, None] > COLS)),
    "not": (~masks.causal, COLS > ROWS),
    "nested": (~(masks.window(2) | ~masks.causal), ((COLS - ROWS).abs() > 2) & (COLS <= ROWS)),
}


@pytest.mark.parametrize("name", WANTED)
def test_masks_are_their_index_arithmetic(name):
    mask, wanted = WANTED[name]
    full = mask.dense(SHAPE).expand(SHAPE)
    assert full.dtype == torch.bool
    assert torch.equal(full, wanted.expand(SHAPE))


@pytest.mark.parametrize("name", WANTED)
def test_a_block_is_a_piece_of_the_whole(name):
    mask, wanted = WANTED[name]
    at = Region(((1, 2), (0, 2)), (5, 12), (7, 20), SHAPE, torch.device("cpu"))
    piece = wanted.expand(SHAPE)[1:2, 0:2, 5:12, 7:20]
    assert torch.equal(mask.block(at).expand(piece.shape), piece)


@pytest.mark.parametrize("name", WANTED)
def test_a_span_hides_nothing_visible(name):
    mask, wanted = WANTED[name]
    for start in range(0, 19, 5):
        stop = min(start + 5, 19)
        first, last = mask.span((start, stop), SHAPE)
        outside = torch.ones(23, dtype=torch.bool)
        outside[first:last] = False
        assert not wanted.expand(SHAPE)[..., start:stop, :][..., outside].any()


@pytest.mark.parametrize("name", WANTED)
def test_reach_is_any_over_visible_keys(name):
    mask, wanted = WANTED[name]
    marked = torch.rand(2, 3, 23) > 0.8
    reached = (wanted.expand(SHAPE) & marked[..., None, :]).any(-1)
    assert torch.equal(mask.reach(marked, SHAPE).expand(SHAPE[:-1]), reached)


def test_spans_are_tight_where_they_can_be():
    assert masks.causal.span((4, 8), SHAPE) == (0, 8)
    assert masks.window(2, 1).span((4, 8), SHAPE) == (2, 9)
    assert (masks.causal & masks.window(2)).span((10, 12), SHAPE) == (8, 12)
    assert masks.padding([9, 4]).span((0, 8), SHAPE) == (0, 9)
    assert masks.packed([0, 4, 11, 17], [0, 3, 9, 23]).span((5, 8), SHAPE) == (3, 9)
    assert masks.packed([0, 4, 4, 17], [0, 3, 9, 23]).span((2, 5), SHAPE) == (0, 23)
    assert masks.packed([0, 4, 11]).span((11, 19), SHAPE) == (0, 0)


@pytest.mark.parametrize("name", WANTED)
def test_seen_keys_are_those_that_somebody_sees(name):
    mask, wanted = WANTED[name]
    seen = mask.seen_keys(SHAPE, torch.device("cpu"))
    truly = wanted.expand(SHAPE).any(-2)
    assert truly.all() if seen is None else torch.equal(seen.expand(2, 3, 23), truly)


def test_stream_never_expands_a_lazy_mask(monkeypatch):
    """Every block that `stream` asks for is small, in forward and in backward."""
    asked = []
    kind = type(masks.causal)
    block = kind.block

    def counted(self, at):
        made = block(self, at)
        asked.append(made.numel())
        return made

    monkeypatch.setattr(kind, "block", counted)
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 2**12})
    monkeypatch.setattr(stream, "LEAST_ROWS", 8)
    n = 257
    x = torch.randn(1, 2, n, 8, requires_grad=True)
    attend(x, x, x, masks.causal & masks.padding([200]), impl="stream").sum().backward()
    assert len(asked) > 10
    assert max(asked) <= 2**12 < n * n


def test_beside_masks_two_groups_of_keys():
    mask = masks.beside(masks.causal, 19, masks.keys(torch.tensor([[True, False, True, True]] * 2)), 4)
    full = mask.dense(SHAPE).expand(SHAPE)
    assert torch.equal(full[..., :19], (COLS[:19] <= ROWS).expand(2, 3, 19, 19))
    assert torch.equal(full[0, 0, 0, 19:], torch.tensor([True, False, True, True]))
    at = Region(((0, 1), (0, 3)), (2, 7), (15, 22), SHAPE, torch.device("cpu"))
    assert torch.equal(mask.block(at), full[0:1, :, 2:7, 15:22])
    assert masks.beside(None, 3, None, 4) is None


def test_faces_agree():
    """One mask, said to torch's function, to torch's module and to Hugging Face, and read back."""
    mask = masks.causal & masks.padding(LENGTHS)
    full = mask.dense(SHAPE).expand(SHAPE)
    assert torch.equal(masks.to_sdpa(mask, SHAPE).expand(SHAPE), full)
    assert torch.equal(masks.to_multihead(mask, SHAPE), ~full.flatten(0, 1))
    added = masks.to_transformers(mask, SHAPE, dtype=torch.float16)
    assert added.dtype == torch.float16
    assert torch.equal(added.expand(SHAPE) == 0, full)
    for back in (
        masks.from_sdpa(full),
        masks.from_multihead(masks.to_multihead(mask, SHAPE), num_heads=3),
        masks.from_transformers(added),
    ):
        assert torch.equal(back.dense(SHAPE).expand(SHAPE), full)
    tokens = (LENGTHS[:, None] > COLS).long()
    assert torch.equal(
        masks.from_transformers(tokens).dense(SHAPE).expand(SHAPE), masks.padding(LENGTHS).dense(SHAPE).expand(SHAPE)
    )
    ignored = masks.from_multihead(key_padding_mask=tokens == 0, is_causal=True)
    assert torch.equal(ignored.dense(SHAPE).expand(SHAPE), full)
    assert masks.from_transformers(None) is None
    assert masks.from_sdpa(None) is None


def test_a_float_mask_adds_and_hides():
    bias = torch.tensor([[0.5, -torch.inf, torch.finfo(torch.float32).min]])
    mask = masks.from_sdpa(bias)
    assert torch.equal(mask.dense((1, 1, 1, 3)), torch.tensor([[True, False, False]]))
    for lowest in (torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min):
        for dtype in (torch.float32, torch.float64):
            assert not masks.from_sdpa(torch.full((1, 3), lowest, dtype=dtype)).dense((1, 1, 1, 3)).any()
    assert not masks.from_sdpa(torch.full((1, 3), -65504.0, dtype=torch.float16)).dense((1, 1, 1, 3)).any()
    assert mask.bias is bias
    both = mask & masks.causal
    assert both.bias is bias


def test_what_low_rank_masks_add():
    """The same as their product given as a float mask, alone, summed, beside other keys, and under hiding masks."""
    query, key, value = inputs(19, 23)
    one, other = factors(19, 23), masks.low_rank(*torch.randn(2, 2, 3, 23, 2, dtype=torch.float64).unbind())
    (left, right), whole = one.factors, (2, 3, 19, 23)
    other = masks.low_rank(other.left[..., :19, :], other.right)
    split = masks.beside(masks.low_rank(left, right[..., :14, :]), 14, masks.low_rank(left, -right[..., 14:, :]), 9)
    assert one.hiding is None
    assert (one & masks.causal & other).hiding is masks.causal
    assert split.hiding is None
    assert one.factors[0] is left
    assert (one & other).factors[0].shape == (2, 3, 19, 6)
    signs = torch.ones(23, dtype=torch.float64).masked_fill(COLS >= 14, -1.0)
    sums = {
        "one": (one, left @ right.mT),
        "two": (one & other, left @ right.mT + other.left @ other.right.mT),
        "beside": (split & masks.causal, left @ right.mT * signs),
        "float": (masks.from_sdpa(signs[None]) & one, left @ right.mT + signs),
    }
    for mask, added in sums.values():
        bias = added.expand(whole).masked_fill(~mask.dense(whole), -torch.inf)
        for kernel in (Softmax(), Sigmoid(), FeatureMap("elu")):
            wanted = attend(query, key, value, bias, kernel=kernel, impl="reference")
            for impl in ("auto", "stream", "reference"):
                torch.testing.assert_close(attend(query, key, value, mask, kernel=kernel, impl=impl), wanted)
        coefficients = (attend.coefficients(query, key, given) for given in (mask, bias))
        torch.testing.assert_close(*coefficients)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.numel = max(
            [self.numel, *(x.untyped_storage().nbytes() // x.itemsize for x in made if torch.is_tensor(x))]
        )
        return out


@pytest.mark.parametrize(("impl", "kernel"), [("stream", Sigmoid()), ("sdpa", Softmax()), ("sdpa", Gaussian(2.0))])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_of_queries_times_keys_is_made_of_low_rank(impl, kernel, is_causal, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 2**14})
    n = 512
    leaves = [torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3)]
    both = [torch.randn(2, n, 5, requires_grad=True) for _ in range(2)]
    with Largest() as largest:
        mask = masks.low_rank(*both)
        attend(*leaves, mask, is_causal=is_causal, kernel=kernel, impl=impl).sum().backward()
    assert 2 * n * 16 <= largest.numel < n * n / 4
    assert all(x.grad.abs().sum() > 0 for x in (*leaves[:2], *both))


def test_second_derivatives_of_low_rank(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 20})
    monkeypatch.setattr(stream, "LEAST_ROWS", 2)
    query, key, value = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    left, right = (torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run(query, key, value, left, right):
        return attend(query, key, value, masks.low_rank(left, right) & masks.causal, kernel=Sigmoid(), impl="stream")

    assert torch.autograd.gradcheck(run, (query, key, value, left, right))
    assert torch.autograd.gradgradcheck(run, (query, key, value, left, right), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 0.125, 0.0, -0.3, 3.0])
def test_a_folded_bias_of_low_rank_stays_exact_in_16_bit(dtype, scale):
    """Large biases, of 16-bit factors; a head size whose scale is no power of two."""
    query, key, value = (torch.randn(1, 2, 67, 40).to(dtype) for _ in range(3))
    mask, fine = (
        masks.low_rank(*(8 * torch.randn(2, 67, 5).to(kind) for _ in range(2))) for kind in (dtype, torch.float)
    )
    kernel = Softmax(scale)
    wide = masks.low_rank(*(x.double() for x in mask.factors))
    wanted = attend(query.double(), key.double(), value.double(), wide, kernel=kernel, impl="reference")
    out = attend(query, key, value, mask, kernel=kernel, impl="sdpa")
    assert relative_error(out, wanted) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    with pytest.raises(Unsupported, match="must be of that dtype, or folding it would round it"):
        attend(query, key, value, fine, kernel=kernel, impl="sdpa")
    wanted = attend(*(x.double() for x in (query, key, value)), fine, kernel=kernel, impl="reference")
    assert relative_error(attend(query, key, value, fine, kernel=kernel), wanted) < 1e-2


@pytest.mark.parametrize(("impl", "kernel"), [("stream", Sigmoid()), ("reference", Sigmoid()), ("sdpa", Softmax())])
def test_factors_that_are_not_finite(impl, kernel):
    """Hidden, they leak nowhere, not even into gradients; seen, they show in the rows that see them and no other."""
    found = []
    for bad in (0.0, torch.nan, torch.inf):
        left, right = (x.clone() for x in factors(19, 19).factors)
        right[1, :, 11:] = bad
        leaves = [x.requires_grad_() for x in (*inputs(), left, right)]
        out = attend(*leaves[:3], masks.low_rank(left, right) & masks.padding([19, 11]), kernel=kernel, impl=impl)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
    left, right = (x.clone() for x in factors(19, 19).factors)
    right[0, :, 12] = torch.nan
    out = attend(*inputs(), masks.low_rank(left, right) & masks.causal, kernel=kernel, impl=impl)
    assert out[0, :, 12:].isnan().all()
    assert out[0, :, :12].isfinite().all()
    assert out[1].isfinite().all()


def test_kernels_of_the_whole_sequence_move_without_factors():
    query, key, value = inputs(19, 23)
    mask = factors(19, 23)
    bias = mask.factors[0] @ mask.factors[1].mT
    for kernel in (HigherOrder(Softmax(), order=4), HigherOrder(Sigmoid(), order=6)):
        wanted = attend(query, key, value, bias, kernel=kernel, impl="reference")
        for impl in ("auto", "stream", "reference"):
            torch.testing.assert_close(attend(query, key, value, mask, kernel=kernel, impl=impl), wanted)


def test_linear_refuses_low_rank():
    with pytest.raises(Unsupported, match="low rank"):
        attend(*inputs(), factors(19, 19), kernel=FeatureMap("elu"), impl="linear")


def rebuilt(found, shape):
    """The mask that the parts describe, written out by index arithmetic."""
    *lead, queries, keys = shape
    ahead = torch.arange(keys) - torch.arange(queries)[:, None]
    keep = torch.ones(shape, dtype=torch.bool)
    if found.low is not None:
        keep &= ahead >= found.low
    if found.high is not None:
        keep &= ahead <= found.high
    if found.lengths is not None:
        lengths = found.lengths
        keep &= torch.arange(keys) < lengths.reshape(*lengths.shape, *(1,) * (len(shape) - lengths.dim()))
    if found.ids is not None:
        mine, theirs = (x.reshape(*x.shape[:-1], *(1,) * (len(lead) + 1 - x.dim()), x.shape[-1]) for x in found.ids)
        assert (mine.shape[-1], theirs.shape[-1]) == (queries, keys)
        keep &= mine[..., :, None] == theirs[..., None, :]
    if found.blocks is not None:
        kept, (rows, cols) = found.blocks
        kept = kept.repeat_interleave(rows, dim=-2).repeat_interleave(cols, dim=-1)
        keep &= kept[..., :queries, :keys]
    return keep if found.keep is None else keep & found.keep


GRID = (2, 3, 7, 9)
seeds = st.integers(0, 10**6)


def drawn(seed, *shape, high=2):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


LEAVES = st.one_of(
    st.sampled_from([masks.causal, masks.lower_right]),
    st.builds(masks.window, st.integers(0, 4), st.integers(0, 4), align=st.sampled_from(["start", "end"])),
    st.builds(lambda seed, axes: masks.padding(drawn(seed, *GRID[:axes], high=10)), seeds, st.integers(1, 2)),
    st.builds(lambda seed: masks.keys(drawn(seed, 2, 9) > 0), seeds),
    st.builds(
        lambda seed, axes: masks.document(drawn(seed, *GRID[:axes], 7), drawn(seed, 9)), seeds, st.integers(0, 2)
    ),
    st.builds(lambda seed: masks.document(drawn(seed, 2, 1), drawn(seed, 2, 9).float()), seeds),
    st.builds(
        lambda seed: masks.packed(*(drawn(seed, 4, high=7).sort()[0] * torch.arange(4).clamp(max=1),) * 2), seeds
    ),
    st.builds(lambda seed: masks.packed([0, 2, 2, 7], [0, 1, 5, 8 + seed % 2]), seeds),
    st.builds(lambda seed: masks.blocks(drawn(seed, 3, 4, 3) > 0, (2, 4)), seeds),
    st.builds(lambda seed: masks.blocks(drawn(seed, 2, 1, 3, 3) > 0, 3), seeds),
    st.builds(lambda seed, rows: masks.dense(drawn(seed, 2, 1, rows, 9) > 0), seeds, st.sampled_from([1, 7])),
)
BIASED = st.builds(
    lambda seed: masks.from_sdpa(torch.where(drawn(seed, 7, 9) > 0, 0.5, -torch.inf)), seeds
) | st.builds(lambda seed: masks.low_rank(drawn(seed, 7, 2).float(), drawn(seed, 3, 9, 2).float()), seeds)
BOOLEAN = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.builds(lambda a, b: a & b, part, part),
        st.builds(lambda a, b: a & b, part, part),
        st.builds(lambda a, b: a | b, part, part),
        st.builds(lambda a: ~a, part),
        st.builds(lambda a: masks.beside(masks.causal, 5, masks.dense(drawn(3, 7, 4) > 0), 4) & a, part),
    ),
    max_leaves=8,
)
TREES = st.recursive(BOOLEAN | BIASED, lambda part: st.builds(lambda a, b: a & b, part, part), max_leaves=4)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TREES)
def test_parts_together_are_the_mask(mask):
    assert torch.equal(rebuilt(masks.parts(mask, GRID), GRID), mask.dense(GRID).expand(GRID))


def test_parts_are_arithmetic_where_they_can_be():
    lengths, more = torch.tensor([5, 9]), torch.tensor([[9, 3, 9], [2, 9, 9]])
    mask = masks.lower_right & masks.window(3, 4) & masks.padding(lengths) & masks.padding(more)
    found = masks.parts(mask & masks.low_rank(torch.ones(7, 1), torch.ones(9, 1)), GRID)
    assert (found.low, found.high) == (-3, 2)
    assert torch.equal(found.lengths, torch.minimum(lengths[:, None], more))
    assert found[3:] == (None, None, None)
    assert masks.parts(None, GRID) == Parts() == (None,) * 6
    found = masks.parts(masks.packed([0, 2, 5]) & block_mask() & block_mask(), (2, 3, 19, 23))
    assert found.keep is None
    assert torch.equal(found.ids[0], torch.tensor([0, 0, 1, 1, 1] + [-1] * 14))
    assert torch.equal(found.ids[1], torch.tensor([0, 0, 1, 1, 1] + [-2] * 18))
    assert torch.equal(found.blocks[0], block_mask().keep)
    assert found.blocks[1] == (5, 6)
    found = masks.parts(masks.document(torch.arange(7), torch.arange(9)) & masks.packed([0, 2, 5]), GRID)
    assert found.keep.shape == (7, 9)


def test_parts_may_be_traced():
    def run(query, key, cu_seqlens, lengths):
        mask = masks.packed(cu_seqlens) & masks.lower_right & masks.window(3, align="end") & masks.padding(lengths)
        found = masks.parts(mask, (*query.shape[:-1], key.shape[-2]), query.device)
        return found.low + query, found.high + query, found.lengths, found.ids, found.keep

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    sizes = []
    for n in (9, 14, 20):
        given = torch.zeros(2, 3, n, 1), torch.zeros(2, 3, n + 4, 1), torch.tensor([0, 3, n]), torch.tensor([n, 5])
        ours, theirs = compiled(*given), run(*given)
        torch.testing.assert_close(ours[:3], theirs[:3])
        torch.testing.assert_close(ours[3], theirs[3])
        sizes.append(ours[3][1].shape[0])
    assert sizes == [13, 18, 24]
    with FakeTensorMode():
        made = run(*(torch.empty(*x.shape, dtype=x.dtype) for x in given))
        assert made[3][0].shape == (20,)


MASKED = {
    "packed": lambda bounds, left, right: masks.packed(bounds) & masks.causal,
    "blocks": lambda bounds, left, right: masks.blocks((left[..., None, :4, 0] > 0) | (right[0, :, :4, :1] > -1), 5),
    "low-rank": lambda bounds, left, right: masks.low_rank(left, right),
    "low-rank-causal": lambda bounds, left, right: masks.low_rank(left, right) & masks.causal & masks.packed(bounds),
}


KERNELS = {"sdpa": Softmax(), "stream": Sigmoid(), "reference": Gaussian(2.0)}
# Every mask once, and the one that holds all parts with every implementation.
COMPILED = [("packed", "sdpa"), ("blocks", "stream"), ("low-rank", "reference")]
COMPILED += [("low-rank-causal", impl) for impl in KERNELS]


@pytest.mark.parametrize(("name", "impl"), COMPILED)
def test_masks_made_inside_a_compiled_graph(name, impl, monkeypatch):
    kernel = KERNELS[impl]
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 19 * 7 * 3})
    monkeypatch.setattr(stream, "LEAST_ROWS", 11)

    def run(query, key, value, bounds, left, right):
        return attend(query, key, value, MASKED[name](bounds, left, right), kernel=kernel, impl=impl)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in inputs()]
    both = [x.requires_grad_() for x in factors(19, 19).factors]
    for bounds in (torch.tensor([0, 5, 5, 12, 17]), torch.tensor([0, 2, 9, 13, 19])):
        out, wanted = (f(*leaves, bounds, *both) for f in (compiled, run))
        torch.testing.assert_close(out, wanted)
        asked = [*leaves, *both] if name.startswith("low") else leaves
        ours, theirs = (torch.autograd.grad(y.square().sum(), asked) for y in (out, wanted))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: masks.window(-1), "before must be a whole number from 0 on; got -1"),
        (lambda: masks.window(2, 1.5), "after must be a whole number"),
        (lambda: masks.window(2, align="middle"), "align must be one of start, end"),
        (lambda: masks.padding([1.5, 2.0]), "lengths must be integers"),
        (lambda: masks.padding(torch.tensor(3)), r"shape \(batch,\)"),
        (lambda: masks.keys(torch.ones(2, 3)), "must be a boolean tensor, True = may attend; got torch.float32"),
        (lambda: masks.dense("all"), "got str"),
        (lambda: masks.causal & torch.ones(2, 2, dtype=torch.bool), "wrap a tensor in masks.dense"),
        (lambda: ~masks.from_sdpa(torch.zeros(2, 2)), "combines with & alone"),
        (lambda: masks.from_sdpa(torch.zeros(2, 2, dtype=torch.long)), "must be boolean .* got torch.int64"),
        (lambda: masks.from_sdpa([[True]]), "must be a tensor or a heedful mask; got list"),
        (lambda: masks.from_multihead(key_padding_mask=torch.zeros(2, 3, dtype=torch.long)), "True = ignore"),
        (lambda: masks.from_transformers(torch.zeros(2, 3, 4)), r"got \(2, 3, 4\)"),
        (lambda: masks.padding([-1, 2]), "must not be negative; got -1"),
        (lambda: masks.padding(None), "must be a tensor or a list of numbers; got None"),
        (lambda: masks.document("ab"), "ids must be a tensor or a list"),
        (lambda: masks.padding([3]).dense((5, 5)), r"\(\*leading, queries, keys\) = \(5, 5\)"),
        (lambda: masks.keys(torch.ones(5, 5, dtype=torch.bool)).dense((5, 5)), "keys: got shape"),
        (lambda: masks.from_multihead(torch.zeros(7, 2, 2, dtype=torch.bool), num_heads=4), "batch \\* heads"),
        (lambda: masks.padding([1, 2, 3]).dense(SHAPE), r"got shape \(3,\), expected \(batch,\) = \(2,\)"),
        (lambda: masks.keys(torch.ones(2, 5, dtype=torch.bool)).dense(SHAPE), r"expected \(batch, keys\) = \(2, 23\)"),
        (lambda: masks.document(torch.zeros(7)).dense(SHAPE), r"\(batch, queries\)"),
        (lambda: masks.dense(torch.ones(4, 4, dtype=torch.bool)).dense(SHAPE), "does not broadcast"),
        (lambda: masks.packed([0.0, 3.0]), r"cu_seqlens must be integers .* got torch.float32 \(2,\)"),
        (lambda: masks.packed(torch.zeros(2, 3, dtype=torch.int32)), r"\(sequences \+ 1,\); got torch.int32 \(2, 3\)"),
        (lambda: masks.packed([]), "must be integers"),
        (lambda: masks.packed([0, 5, 3]), r"must start at 0 and never decrease; got \[0, 5, 3\]"),
        (lambda: masks.packed([0, 5], [1, 5]), "key_cu_seqlens must start at 0"),
        (lambda: masks.packed([0, 5], [0, 3, 5]), "as many sequences; got 1 and 2"),
        (lambda: masks.packed([0, 20]).dense(SHAPE), "cu_seqlens ends at 20, but there are 19 queries"),
        (lambda: masks.packed([0, 5], [0, 24]).dense(SHAPE), "key_cu_seqlens ends at 24, but there are 23 keys"),
        (lambda: masks.blocks(torch.ones(2, 2), 5), "blocks: keep must be a boolean tensor"),
        (lambda: masks.blocks(torch.ones(3, dtype=torch.bool), 5), "an axis of rows and one of columns"),
        (lambda: masks.blocks(KEPT, 0), "size must be a positive integer or a pair of them; got 0"),
        (lambda: masks.blocks(KEPT, (5, 2.5)), r"got \(5, 2.5\)"),
        (lambda: masks.blocks(KEPT, 6).dense(SHAPE), r"must broadcast to \(2, 3, 4, 4\)"),
        (lambda: masks.blocks(KEPT.expand(2, 2, 4, 5), 5).dense(SHAPE), r"must broadcast to \(2, 3, 4, 5\)"),
        (lambda: masks.low_rank(torch.ones(19, 2), [[1.0]]), r"right must be a floating tensor .* got list"),
        (lambda: masks.low_rank(torch.ones(19, 2).long(), torch.ones(23, 2)), "left must be a floating tensor"),
        (lambda: masks.low_rank(torch.ones(19, 2), torch.ones(23, 3)), "share their last axis"),
        (lambda: masks.low_rank(torch.ones(19, 0), torch.ones(23, 0)), "of at least 1"),
        (lambda: masks.low_rank(torch.ones(23, 2), torch.ones(23, 2)).dense(SHAPE), r"left .* expected \(..., 19, 2\)"),
        (lambda: masks.low_rank(torch.ones(19, 2), torch.ones(2, 23, 2)).dense(SHAPE), r"broadcast to \(2, 3\)"),
        (lambda: ~masks.low_rank(torch.ones(19, 2), torch.ones(23, 2)), "combines with & alone"),
        (lambda: masks.causal | (masks.low_rank(torch.ones(9, 2), torch.ones(9, 2)) & masks.causal), "& alone"),
        (lambda: masks.to_sdpa(masks.low_rank(torch.ones(19, 2), torch.ones(23, 2)), SHAPE), "no boolean mask can say"),
    ],
)
def test_bad_masks_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()
