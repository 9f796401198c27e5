"""rotate_: models whose embedding is turned compute the same, and what cannot be turned is left untouched."""

import pytest
import torch
from torch import nn

from heedful import InvalidArgument, Unsupported
from heedful.bridges.rotation import llama_plan
from heedful.convert import hadamard, rotate_
from heedful.lens.symmetry import check_equivariance
from heedful.lens.symmetry.moves import haar
from heedful.lens.symmetry.roles import known_roles
from heedful.nn import Block, KnowledgeAttention, PrimalAttention
from turned import F64, MODELS, SIZES, WORDS, encoder_layer, hf, logits, made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rotation", ["random", "hadamard"])
def test_logits_stay(name, rotation):
    model = made(name)
    before, first = logits(model), model.get_input_embeddings().weight.detach().clone()
    done = rotate_(model, rotation, probe=WORDS)
    assert float((logits(model) - before).abs().max()) <= 1e-6
    assert done.change <= 1e-6
    assert float((model.get_input_embeddings().weight.detach() - first).norm() / first.norm()) > 0.5
    assert all((p == 1).all() for key, p in model.named_parameters() if "norm" in key)
    assert done.absorbed == 5
    assert len(done.outliers) == 2


def test_without_absorbing_gains_logits_move():
    model = made("llama")
    before = logits(model)
    rotate_(model, roles=llama_plan(model).roles)
    assert float((logits(model) - before).abs().max()) > 0.01


def test_a_tied_head_is_untied_only_for_a_gain(tmp_path):
    model = made("llama with a tied head")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = logits(model)
    assert rotate_(model).untied
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = hf.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert float((logits(again) - before).abs().max()) <= 1e-6
    plain = made("llama with a tied head", gains=False)
    before = logits(plain)
    assert not rotate_(plain).untied
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert float((logits(plain) - before).abs().max()) <= 1e-6


def test_hadamard_spreads_outliers():
    model = made("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] += 2.0
    found = rotate_(model, "hadamard", probe={"input_ids": WORDS}).outliers
    assert [one.layer for one in found] == ["model.layers.0", "model.layers.1"]
    assert found[0].before > 4.5  # the square root of 24 is the most
    assert found[0].after < 0.6 * found[0].before


def test_the_fast_transform_is_hadamards():
    for size in (1, 2, 8, 12, 20, 24, 28, 56, 384):
        matrix = hadamard(torch.eye(size, **F64)) * size**0.5
        assert set(matrix.unique().tolist()) <= {-1.0, 1.0} or torch.allclose(matrix.abs(), torch.ones_like(matrix))
        torch.testing.assert_close(matrix @ matrix.T, size * torch.eye(size, **F64))
    x = torch.randn(3, 5, 24, **F64)
    torch.testing.assert_close(hadamard(x), x @ hadamard(torch.eye(24, **F64)))
    with pytest.raises(Unsupported, match="no Hadamard matrix of size 18"):
        hadamard(torch.ones(18))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, **F64),
        lambda: KnowledgeAttention(8, 2, knowledge=3, value="mlp", **F64),
        lambda: Block(8, 2, norm="rms", **F64),
        encoder_layer,
    ],
)
def test_layers_turn(make):
    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    # Training mode: torch's fused layer, taken in eval mode, knows LayerNorm alone.
    layer.train().requires_grad_(False)
    x, q = torch.randn(2, 5, 8, **F64), haar(8, torch.Generator().manual_seed(2))

    def run(rows):
        return layer(rows, rows, rows)[0] if isinstance(layer, nn.MultiheadAttention) else layer(rows)

    before = run(x)
    rotate_(layer, q)
    torch.testing.assert_close(run(x @ q.T), before @ q.T, rtol=1e-9, atol=1e-9)
    assert float((run(x) - before).norm()) > 0.1


def bert():
    return hf.BertModel(hf.BertConfig(**SIZES))


def gemma():
    return hf.GemmaForCausalLM(hf.GemmaConfig(**SIZES, head_dim=6))


def with_extra():
    model = made("llama")
    model.extra = nn.Linear(24, 24)
    return model


def integers():
    model = made("llama")
    weight = model.model.layers[1].mlp.up_proj
    weight.weight = nn.Parameter(weight.weight.to(torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "rotation", "told"),
    [
        (bert, "random", r"embeddings\.LayerNorm is a LayerNorm, whose mean and gain"),
        (
            lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=31, n_embd=24, n_layer=1, n_head=2)),
            "random",
            "LayerNorm",
        ),
        (gemma, "random", r"input_layernorm is not gain \* x / rms\(x\)"),
        (lambda: made("llama").model, "random", "nothing comes after it: rotate the model with its head"),
        (with_extra, "random", r"has extra\.weight, which Llama has not"),
        (integers, "random", "rotate before quantising"),
        (lambda: made("llama").to("meta"), "random", "has no weights yet"),
        (lambda: nn.Linear(8, 8), "random", "Linear is not of Llama's shape"),
        (lambda: nn.TransformerEncoderLayer(8, 2, **F64), "random", "norm1 is LayerNorm"),
        (
            lambda: nn.init.normal_((layer := encoder_layer(False)).norm1.weight) is None or layer,
            "random",
            "norm_first=True",
        ),
        (lambda: Block(8, 2, kernel="none", norm="rms"), "random", "its attention is 'none'"),
        (lambda: Block(8, 2, kernel="primal", norm="rms", max_len=5), "random", r"its attention is Primal\(rank=20"),
        (lambda: nn.MultiheadAttention(8, 2, kdim=5), "random", "do not live in the embedding of size 8"),
        (lambda: made("llama"), torch.eye(23), r"shape \(23, 23\), expected \(24, 24\)"),
        (lambda: made("llama"), torch.ones(24, 24), "not orthogonal"),
        (lambda: made("llama"), torch.full((24, 24), torch.nan), "not orthogonal"),
        (lambda: made("llama"), "turn", "must be a matrix, 'random' or 'hadamard'"),
        (lambda: nn.MultiheadAttention(18, 2), "hadamard", "no Hadamard matrix of size 18"),
    ],
)
def test_a_refusal_leaves_the_model_untouched(make, rotation, told):
    model = make()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    with pytest.raises((InvalidArgument, Unsupported), match=told):
        rotate_(model, rotation)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert id(parameter) == before[name][0]
        assert parameter.is_meta or torch.equal(parameter, before[name][1])


def test_given_roles_must_agree():
    with pytest.raises(InvalidArgument, match=r"one size of the embedding; got \[5, 8\]"):
        rotate_(nn.Linear(8, 5), roles={"weight": "rows", "bias": "bias"})
    layer = nn.Linear(8, 8, bias=False, **F64)
    rotate_(layer, roles={"weight": "both"})
    assert check_equivariance(layer, d=8, roles={"weight": "both"}, trials=5).passed


def test_what_was_done_is_told():
    import matplotlib

    matplotlib.use("Agg")
    done = rotate_(made("llama with a tied head"), "hadamard", probe=WORDS)
    assert "head untied" in str(done)
    assert "largest relative change" in str(done)
    assert done.plot().get_xlabel() == "layer"
    assert done.to_dict()["outliers"][0]["layer"] == "model.layers.0"
    with pytest.raises(InvalidArgument, match="probe=inputs"):
        rotate_(nn.MultiheadAttention(8, 2)).plot()


def test_roles_of_a_primal_layer_are_not_guessed():
    for layer in (PrimalAttention(8, 2, max_len=5), Block(8, 2, kernel="primal", max_len=5)):
        with pytest.raises(Unsupported, match="PrimalAttention reads its input head by head"):
            known_roles(layer)
