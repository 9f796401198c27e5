"""The mask algebra against index arithmetic, its faces, its laziness, and what it refuses."""

import pytest
import torch

from heedful import InvalidArgument, attend, masks
from heedful.masks import Block

SHAPE = (2, 3, 19, 23)
ROWS, COLS = torch.arange(19)[:, None], torch.arange(23)
IDS = torch.arange(23) // 4
LENGTHS = torch.tensor([23, 9])

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
    at = Block(((1, 2), (0, 2)), (5, 12), (7, 20), SHAPE, torch.device("cpu"))
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


@pytest.mark.parametrize("name", WANTED)
def test_seen_keys_leave_out_only_what_nobody_sees(name):
    mask, wanted = WANTED[name]
    seen = mask.seen_keys(SHAPE, torch.device("cpu"))
    truly = wanted.expand(SHAPE).any(-2)
    assert seen is None or torch.equal(seen.expand(2, 3, 23) | truly, seen.expand(2, 3, 23))


def test_stream_never_expands_a_lazy_mask(monkeypatch):
    """Every block that `stream` asks for is small, in forward and in backward."""
    from heedful.ops import stream

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
    at = Block(((0, 1), (0, 3)), (2, 7), (15, 22), SHAPE, torch.device("cpu"))
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


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: masks.window(-1), "before must be an integer of at least 0; got -1"),
        (lambda: masks.window(2, 1.5), "after must be an integer"),
        (lambda: masks.window(2, align="middle"), "align must be 'start' or 'end'"),
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
    ],
)
def test_bad_masks_are_refused(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()
