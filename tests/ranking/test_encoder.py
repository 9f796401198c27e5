"""The network of result lists beside its equations, its symmetries, and the authors' forward written apart."""

import math

import pytest
import torch
from torch import nn

from heedful import Gaussian, InvalidArgument
from heedful.ranking.encoder import ListEncoder, authors_state


def small(**options):
    torch.manual_seed(0)
    encoder = (
        ListEncoder(**{"anchors": 7, "embed_dim": 12, "num_heads": 3, "dropout": 0.0, "drop_path": 0.0} | options)
        .double()
        .eval()
    )
    with torch.no_grad():
        for part in encoder.parameters():
            part.add_(0.3 * torch.randn_like(part))
    return encoder


def tables(lists=3, members=11, anchors=7):
    return torch.rand(lists, members, anchors, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernel", ["softmax", Gaussian(2.0), "none"])
def test_scores_move_with_the_members(kernel):
    encoder, A = small(kernel=kernel), tables()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(2))
    moved = torch.cat((A[:, :1], A[:, 1:][:, order]), dim=1)
    assert (encoder.scores(moved) - encoder.scores(A)[:, order]).abs().max() < 1e-10
    assert (encoder.scores(A[:, :, torch.arange(6, -1, -1)]) - encoder.scores(A)).abs().max() > 1e-3


def test_the_published_size():
    assert sum(part.numel() for part in ListEncoder().parameters()) == 14_963_456


def published(state, A, heads, depth):
    """The forward of the authors' code, in its names, one list at a time."""
    scores = []
    for table in A:
        x = table @ state["topk_proj.weight"].T + state["topk_proj.bias"]
        for block in range(depth):
            name = f"blocks.{block}."
            y = nn.functional.layer_norm(
                x, x.shape[-1:], state[name + "norm1.weight"], state[name + "norm1.bias"], 1e-5
            )
            q, k, v = (y @ state[name + "attn.qkv.weight"].T + state[name + "attn.qkv.bias"]).chunk(3, dim=-1)
            out = []
            for head in range(heads):
                part = slice(head * x.shape[1] // heads, (head + 1) * x.shape[1] // heads)
                weights = torch.softmax(q[:, part] @ k[:, part].T / math.sqrt(x.shape[1] // heads), dim=-1)
                out.append(weights @ v[:, part])
            x = x + torch.cat(out, dim=1) @ state[name + "attn.proj.weight"].T + state[name + "attn.proj.bias"]
            y = nn.functional.layer_norm(
                x, x.shape[-1:], state[name + "norm2.weight"], state[name + "norm2.bias"], 1e-5
            )
            y = y @ state[name + "mlp.fc1.weight"].T + state[name + "mlp.fc1.bias"]
            y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
            x = x + y @ state[name + "mlp.fc2.weight"].T + state[name + "mlp.fc2.bias"]
        x = x / x.norm(dim=1, keepdim=True)
        scores.append(x[1:] @ x[0])
    return torch.stack(scores)


def test_the_authors_weights_give_their_scores():
    generator = torch.Generator().manual_seed(3)
    sizes = {"topk_proj": (12, 7), "feature_align.layers.0": (7, 12)}
    for block in ("blocks.0.", "blocks.1."):
        sizes |= {
            block + "norm1": (12,),
            block + "norm2": (12,),
            block + "attn.qkv": (36, 12),
            block + "attn.proj": (12, 12),
        }
        sizes |= {block + "mlp.fc1": (48, 12), block + "mlp.fc2": (12, 48)}
    state = {
        f"{name}.weight": 0.4 * torch.randn(size, dtype=torch.float64, generator=generator)
        for name, size in sizes.items()
    }
    state |= {
        f"{name}.bias": 0.4 * torch.randn(size[0], dtype=torch.float64, generator=generator)
        for name, size in sizes.items()
    }
    encoder = small()
    encoder.load_state_dict(authors_state(state))
    assert (encoder.scores(tables()) - published(state, tables(), 3, 2)).abs().max() < 1e-10
    with pytest.raises(InvalidArgument, match="none of the published"):
        authors_state({"head.weight": torch.zeros(1)})


@pytest.mark.parametrize("garbage", [math.nan, 1e30, -math.inf])
def test_members_that_are_not_there_do_not_matter(garbage):
    """In rows and in columns, in scores, losses and gradients."""
    encoder, A = small(), tables()
    padding = torch.zeros(3, 11, dtype=torch.bool)
    padding[0, 8:], padding[1, 4:], relevant = True, True, torch.rand(3, 10) < 0.4
    hidden = A.clone()
    hidden[padding] = garbage
    for row, first in ((0, 8), (1, 4)):
        hidden[row, :, first:7] = garbage
    grads = []
    for part in (A, hidden):
        encoder.zero_grad()
        contrast, distance = encoder.losses(part, relevant, padding)
        (contrast + distance).sum().backward()
        grads.append([each.grad.clone() for each in encoder.parameters()])
        assert torch.isfinite(contrast + distance).all()
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    scores = encoder.scores(hidden, padding)
    torch.testing.assert_close(scores, encoder.scores(A, padding), rtol=0, atol=0)
    assert (scores == -math.inf).equal(padding[:, 1:])
    # Alone, a list without its padding has the same scores.
    alone = A[1:2, :4, :4]
    assert (encoder.scores(alone) - scores[1:2, :3]).abs().max() < 1e-12


def test_losses_beside_their_formulas():
    encoder, A = small(), tables()
    relevant = torch.tensor([[1, 0] * 5, [0] * 10, [1] * 10], dtype=torch.bool)
    F = nn.functional.normalize(encoder(A), dim=-1)
    rows = torch.einsum("bkd,bd->bk", F, F[:, 0])
    for own in (True, False):
        contrast, distance = encoder.losses(A, relevant, temperature=1.3, own=own)
        for number in range(3):
            e = (rows[number] / 1.3).exp()[0 if own else 1 :]
            y = torch.cat((torch.ones(1), relevant[number]))[0 if own else 1 :]
            wanted = -torch.log((e * y).sum() / e.sum()) if y.any() else torch.zeros(())
            assert abs(contrast[number] - wanted) < 1e-12
        back = nn.functional.normalize(encoder.align(encoder(A)), dim=-1)
        apart = (nn.functional.normalize(A, dim=-1) - back).norm(dim=-1).mean(1)
        assert (distance - apart).abs().max() < 1e-12


def test_identities_of_the_losses():
    """Equal rows score 1 and cost -log(positives / members); the least contrast and the least distance are not 0."""
    encoder = small(depth=0, anchors=12, embed_dim=12)
    with torch.no_grad():
        encoder.project.weight.copy_(torch.eye(12))
        encoder.align.weight.copy_(torch.eye(12))
        encoder.project.bias.zero_()
        encoder.align.bias.zero_()
    relevant = torch.tensor([[1, 1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    same = torch.rand(1, 1, 12, dtype=torch.float64).expand(1, 8, 12)
    assert (encoder.scores(same) - 1).abs().max() < 1e-12
    contrast, distance = encoder.losses(same, relevant)
    assert abs(contrast.item() + math.log(3 / 8)) < 1e-12
    assert abs(distance.item() - 0.01) < 1e-12
    apart = torch.zeros(1, 8, 12, dtype=torch.float64)
    apart[0, :3, 0], apart[0, 3:, 0] = 1, -1
    for temperature in (2.0, 0.5):
        floor = math.log(1 + 5 / 3 * math.exp(-2 / temperature))
        assert abs(encoder.losses(apart, relevant, temperature=temperature)[0].item() - floor) < 1e-12
    A = tables(anchors=12)
    wanted = torch.cosine_similarity(A[:, :1], A[:, 1:], dim=-1)
    assert (encoder.scores(A) - wanted).abs().max() < 1e-12


def test_fewer_and_more_anchors_than_the_network_has():
    encoder, A = small(), tables(anchors=9)
    assert torch.equal(encoder(A), encoder(A[:, :, :7]))
    few = torch.cat((A[:, :, :4], torch.zeros(3, 11, 3, dtype=torch.float64)), dim=2)
    assert torch.equal(encoder(A[:, :, :4]), encoder(few))
    with pytest.raises(InvalidArgument, match="must be"):
        encoder(A[0])


def test_a_dropped_branch_adds_nothing_or_its_share():
    """In training each case's branch is there, scaled, or not at all; its mean is what it is in evaluation."""
    from heedful.nn import Block

    torch.manual_seed(0)
    block = Block(8, 2, hidden=0, drop_path=0.25).double()
    x = torch.randn(4000, 3, 8, dtype=torch.float64)
    out = block.train()(x) - x
    whole = block.eval()(x) - x
    ratio = (out / whole).flatten(1)
    assert ((ratio.abs() < 1e-9) | ((ratio - 4 / 3).abs() < 1e-6)).all()
    assert (ratio.std(1) < 1e-6).all()
    assert abs((ratio[:, 0] > 0).double().mean() - 0.75) < 0.03


@pytest.mark.parametrize("kernel", ["softmax", "none"])
def test_it_compiles_into_one_graph(kernel):
    torch.compiler.reset()
    encoder, A = small(kernel=kernel), tables()
    padding, relevant = torch.zeros(3, 11, dtype=torch.bool), torch.rand(3, 10) < 0.4
    padding[0, 8:] = True
    calls = (lambda: encoder.scores(A, padding), lambda: torch.stack(encoder.losses(A, relevant, padding)))
    for call in calls:
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(), call(), rtol=0, atol=1e-12)
    single = encoder.to(torch.bfloat16).scores(A.to(torch.bfloat16))
    assert single.dtype == torch.bfloat16
    assert torch.isfinite(single).all()
