"""Random calls against an oracle of their own: a few here, `make fuzz N=100000` for many."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzzing import FAMILIES, Drawing, Truth, check, fused, implementations
from heedful.ops import linear, stream

SHARDS = 4


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", {"cpu": 23})
    monkeypatch.setattr(stream, "LEAST_ROWS", 2)
    monkeypatch.setattr(linear, "CHUNK", 3)


def many(count, number, one, phases=tuple(Phase)):
    """Runs `one` on so many sources of chance, another set for every number."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    run = given(st.randoms(use_true_random=False))(one)
    run = settings(max_examples=count, deadline=None, database=None, phases=phases, suppress_health_check=checks)(run)
    seed(number)(run)()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls(family, shard, request):
    count = max(1, request.config.getoption("--fuzz") // (SHARDS * len(FAMILIES)))

    passed = 0

    def one(random):
        nonlocal passed
        drawn = Drawing(random, family).one()
        truth = Truth(drawn)
        for impl in implementations(drawn, random):
            try:
                check(drawn, truth, impl)
            except AssertionError as error:
                raise AssertionError(f"{impl}: {error}\n{drawn}") from None
        passed += 1

    many(count, 1000 * shard + count, one)
    assert passed >= count


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter, which runs where there is no GPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["dot", "distance", "composed"])
def test_random_calls_of_fused_kernels(family, request):
    pytest.importorskip("triton", reason="the fused kernels need triton, which exists for Linux")
    served, wanted = 0, max(4, request.config.getoption("--fuzz") // 1000)

    def one(random):
        nonlocal served
        drawn = Drawing(random, family, torch.float32).one()
        if served < wanted and fused(drawn):
            served += 1
            try:
                check(drawn, Truth(drawn), "triton")
            except AssertionError as error:
                raise AssertionError(f"{error}\n{drawn}") from None

    # A case takes half a second in the interpreter: too long to look for a smaller one, or to check all of some dozens.
    many(30 * wanted, 7, one, [Phase.generate])
    assert served == wanted
