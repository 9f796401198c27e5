"""Where q, k, v and o are, in whatever names a model has for them."""

import pytest
import torch
from torch import nn

from heedful.bridges.structure import QUERIES_KEYS_VALUES, attention_roles, find_sites, layers_of, positions_of
from heedful.lens.symmetry import check_equivariance

hf = pytest.importorskip("transformers")
BERT = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}


def test_attention_modules_of_hugging_face_are_symmetric_with_their_parameters():
    """GPT-2 keeps transposed weights; BERT's module ends before the output projection, so its heads stay."""
    gpt = hf.GPT2Model(hf.GPT2Config(vocab_size=31, n_embd=24, n_layer=1, n_head=2)).double().h[0].attn
    roles = attention_roles(gpt)
    assert (roles["c_attn.weight"], roles["c_proj.weight"], roles["c_proj.bias"]) == ("cols", "rows", "bias")
    nn.init.normal_(gpt.c_proj.bias)
    assert check_equivariance(gpt, d=24, roles="auto", trials=6).passed
    assert not check_equivariance(gpt, d=24, roles=roles | {"c_proj.weight": "fixed"}, trials=6).passed
    attention = hf.BertModel(hf.BertConfig(**BERT)).double().encoder.layer[0].attention.self
    assert check_equivariance(attention, d=24, roles="auto", invariant=True, trials=6).passed
    assert attention_roles(nn.Linear(3, 3)) is None


@pytest.mark.parametrize("names", QUERIES_KEYS_VALUES, ids="/".join)
def test_every_listed_name_is_a_projection(names):
    module = nn.Module()
    for name in (*names, "dense"):
        setattr(module, name, nn.Linear(6, 6))
    roles = attention_roles(module)
    assert {roles[f"{name}.weight"] for name in names} == {"rows"}
    assert roles["dense.weight"] == "cols"


def test_layers_positions_and_sites_of_an_encoder():
    model = hf.BertModel(hf.BertConfig(**BERT))
    assert [name for name, _ in layers_of(model)] == ["encoder.layer.0", "encoder.layer.1"]
    assert positions_of(model) == ["embeddings.position_embeddings"]
    first = find_sites(model)[0]
    assert (first.query, first.output) == (
        "encoder.layer.0.attention.self.query",
        "encoder.layer.0.attention.output.dense",
    )
    assert (first.heads, first.width, first.inside) == (3, 24, False)
    assert layers_of(torch.nn.Linear(2, 2)) == []
