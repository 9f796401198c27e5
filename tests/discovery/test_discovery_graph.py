"""The graph object: paths by their definitions, separation, exports that read back, what it says about itself."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from brute_force import brute_dsep, random_dag, simple_paths
from heedful import InvalidArgument
from heedful.discovery import ARROW, CIRCLE, NONE, PAG, TAIL, Edge, discover, structure_confidence
from heedful.discovery.confidence import confidences
from heedful.discovery.paths import Links, bits, mask_of, reachable_sets
from heedful.lens import causes


def graph(n, *edges, **fields):
    marks = np.zeros((n, n), np.int8)
    for a, b, at_a, at_b in edges:
        marks[b, a], marks[a, b] = at_a, at_b
    return PAG(marks, **fields)


def chain():
    # 0 o-> 2 <-o 1, 2 -> 3, 3 <-> 4, 4 <-> 5
    return graph(
        6,
        (0, 2, CIRCLE, ARROW),
        (1, 2, CIRCLE, ARROW),
        (2, 3, TAIL, ARROW),
        (3, 4, ARROW, ARROW),
        (4, 5, ARROW, ARROW),
        names=("a", "b", "c", "d", 'e "x"', "f<&>"),
    )


def random_pag(seed):
    rng = np.random.default_rng(seed)
    parents, observed, selection = random_dag(
        rng, int(rng.integers(4, 8)), int(rng.integers(0, 4)), int(rng.integers(0, 2)), rng.uniform(1.5, 4)
    )
    return PAG.from_dag(parents, observed, selection)


def test_possible_dsep_is_its_definition():
    compared = 0
    for seed in range(300):
        pag = random_pag(seed)
        for x in range(pag.n):
            assert set(pag.dsep_tree(x).nodes) == brute_dsep(pag.marks, x)
            compared += 1
    assert compared > 1500


def test_possible_dsep_needs_directed_pairs():
    pag = graph(
        6,
        (0, 2, CIRCLE, ARROW),
        (4, 2, CIRCLE, ARROW),
        (2, 3, TAIL, ARROW),
        (2, 5, TAIL, ARROW),
        (4, 3, TAIL, ARROW),
        (4, 5, TAIL, ARROW),
    )
    assert pag.dsep_tree(3).nodes == (0, 2, 4, 5)


@pytest.mark.parametrize("seed", range(12))
def test_tree_holds_shortest_paths(seed):
    pag = random_pag(seed)
    for x in range(pag.n):
        lengths: dict[int, int] = {}
        for path in simple_paths(pag.marks, x):
            triples = zip(path, path[1:], path[2:], strict=False)
            if all(pag.marks[u, w] or pag.marks[u, v] == pag.marks[w, v] == ARROW for u, v, w in triples):
                lengths[path[-1]] = min(len(path) - 1, lengths.get(path[-1], 99))
        tree = pag.dsep_tree(x)
        assert tree.depth == lengths
        assert all(tree.depth.get(p, 0) < tree.depth[v] for v, each in tree.parents.items() for p in each)
        near = pag.dsep_tree(x, radius=1)
        assert near.nodes == pag.adjacent(x)


@pytest.mark.parametrize("seed", range(8))
def test_sets_around_a_node_by_their_definition(seed):
    pag = random_pag(seed)
    for x in range(pag.n):
        for size in (1, 2, 3):
            expected = set()
            for chosen in combinations([v for v in range(pag.n) if v != x], size):
                part = PAG(pag.marks[np.ix_([x, *chosen], [x, *chosen])])
                if len(part.dsep_tree(0).nodes) == size:
                    expected.add(chosen)
            pool = mask_of(pag.dsep_tree(x).nodes)
            sets = reachable_sets(Links.of(pag.marks), x, pool, size, 10**6)
            assert {tuple(bits(one)) for one in sets} == expected
    assert reachable_sets(Links.of((1 - np.eye(9)).astype(np.int8)), 0, -1, 4, 10) is None
    assert reachable_sets(Links.of(np.zeros((3, 3), np.int8)), 0, -1, 1, 10) == []


@pytest.mark.parametrize("seed", range(8))
def test_ancestors_by_listed_paths(seed):
    marks = random_pag(seed).marks
    pag = PAG(marks)
    for x in range(pag.n):
        possible, definite = set(), set()
        for start in range(pag.n):
            for path in simple_paths(marks, start):
                if path[-1] != x:
                    continue
                ends = [(marks[v, u], marks[u, v]) for u, v in pairwise(path)]
                if all(at_u != ARROW and at_v != TAIL for at_u, at_v in ends):
                    possible.add(start)
                if all((at_u, at_v) == (TAIL, ARROW) for at_u, at_v in ends):
                    definite.add(start)
        assert set(pag.possible_ancestors(x)) == possible
        assert set(pag.definite_ancestors(x)) == definite


def test_edges_and_groups():
    pag = chain()
    assert [str(edge) for edge in pag.edges()] == [
        "a o-> c",
        "b o-> c",
        "c --> d",
        'd <-> e "x"',
        'e "x" <-> f<&>',
    ]
    assert str(Edge(0, 1, TAIL, CIRCLE)) == "0 --o 1"
    assert pag.latent_pairs() == [(3, 4), (4, 5)]
    assert pag.adjacent(2) == (0, 1, 3)
    assert pag.density == pytest.approx(5 / 15)
    assert repr(pag).startswith("PAG(6 nodes, 5 edges: a o-> c, b o-> c")
    assert list(pag) == pag.edges()
    assert not pag.marks.flags.writeable


def test_small_graphs():
    for n in (0, 1, 2):
        pag = discover(np.eye(n), samples=50)
        assert (pag.n, pag.edges(), pag.density) == (n, [], 0.0)
        assert PAG.from_dict(json.loads(json.dumps(pag.to_dict()))).n == n
        assert pag.trust().level == ("none" if n < 2 else "good")


def test_dict_reads_back():
    rng = np.random.default_rng(0)
    data = rng.standard_normal((200, 5))
    data[:, 2] += data[:, 0] + data[:, 1]
    data[:, 4] = data[:, 3]  # a p-value of zero
    pag = discover(data=data, names=list("abcde"), order=[1, 0, 2, 3, 4])
    told = json.loads(json.dumps(pag.to_dict(), allow_nan=False))
    back = PAG.from_dict(told)
    assert back.to_dict() == pag.to_dict()
    np.testing.assert_array_equal(back.marks, pag.marks)
    assert list(back.tests) == list(pag.tests)
    assert (back.sepsets, back.order, back.learner) == (pag.sepsets, pag.order, "ordered icd")
    assert -np.inf in back.tests.log_p
    with pytest.raises(InvalidArgument, match="to_dict"):
        PAG.from_dict({"names": []})


def test_dot():
    text = chain().to_dot()
    assert '4 [label="e \\"x\\""];' in text
    assert "0 -> 2 [arrowtail=odot, arrowhead=normal];" in text
    assert "2 -> 3 [arrowtail=none, arrowhead=normal];" in text
    assert text.count("->") == 5


def test_graphml():
    space = {"g": "http://graphml.graphdrawing.org/xmlns"}
    pag = chain()
    root = ElementTree.fromstring(PAG(pag.marks, (*pag.names[:5], "f<&>\x07")).to_graphml())
    assert [node.find("g:data", space).text for node in root.iterfind(".//g:node", space)][5] == "f<&>\ufffd"
    edges = root.findall(".//g:edge", space)
    assert [[data.text for data in edge] for edge in edges][:3] == [["circle", "arrow"]] * 2 + [["tail", "arrow"]]
    networkx = pytest.importorskip("networkx")
    assert networkx.parse_graphml(pag.to_graphml()).number_of_edges() == 5


def test_networkx():
    pytest.importorskip("networkx")
    found = chain().to_networkx()
    assert found.edges[0, 2]["mark"] == "arrow"
    assert found.edges[2, 0]["mark"] == "circle"
    assert found.nodes[4]["name"] == 'e "x"'
    assert found.number_of_edges() == 10


def test_causallearn_and_back():
    pytest.importorskip("causallearn")
    pag = chain()
    theirs = pag.to_causallearn()
    assert (theirs.graph[2, 0], theirs.graph[0, 2]) == (1, 2)
    back = PAG.from_causallearn(theirs)
    np.testing.assert_array_equal(back.marks, pag.marks)
    assert back.names == pag.names
    np.testing.assert_array_equal(PAG.from_causallearn(theirs.graph).marks, pag.marks)
    with pytest.raises(InvalidArgument, match="GeneralGraph"):
        PAG.from_causallearn(np.full((2, 2), 7))


def test_confidence_by_its_formula():
    rng = np.random.default_rng(0)
    data = rng.standard_normal((80, 4))
    data[:, 1] += data[:, 0]
    pag = discover(data=data, alpha=0.05)
    p = np.exp(pag.tests.log_p)
    each = 1 - np.exp(-np.abs(np.log(p) - np.log(0.05)))
    np.testing.assert_allclose(confidences(pag.tests, 0.05), each, rtol=1e-12)
    assert pag.confidence == pytest.approx(each.mean())
    assert pag.confidence == structure_confidence(pag.tests, 0.05)
    table = pag.edge_confidence()
    np.testing.assert_array_equal(table, table.T)
    for x, y in combinations(range(4), 2):
        mine = (pag.tests.x == x) & (pag.tests.y == y)
        assert table[x, y] == pytest.approx(each[mine].min())
    assert PAG.from_dag([[], [0]], [0, 1]).confidence is None
    with pytest.raises(InvalidArgument, match="alpha"):
        structure_confidence(pag.tests, 1.0)


def test_trust_is_plain():
    complete = (1 - np.eye(5)).astype(np.int8)
    assert PAG(complete).trust().level == "none"
    assert "Every one of the 10 pairs" in str(PAG(complete).trust())
    almost = complete.copy()
    almost[0, 1] = almost[1, 0] = NONE
    assert "near-complete" in str(PAG(almost).trust())
    some = chain().marks
    assert PAG(some).trust().level == "good"
    doubt = PAG(some, conflicts=1, stopped="Stopped before sets of 3 variables.").trust()
    assert doubt.level == "limited"
    assert doubt.sentences == (
        "Stopped before sets of 3 variables.",
        "The rules disagreed on 1 mark: the tests contradict one another there.",
    )
    assert doubt.to_dict() == {"level": "limited", "sentences": list(doubt.sentences)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PAG(np.zeros((2, 3))), "square"),
        (lambda: PAG(np.array([[0, 4], [1, 0]])), "0 .none."),
        (lambda: PAG(np.array([[0, 1], [0, 0]])), "both ends"),
        (lambda: PAG(np.eye(2)), "to itself"),
        (lambda: PAG(np.zeros((2, 2)), ("a",)), "as many names"),
        (lambda: chain().dsep_tree(6), r"0 \.\.\. 5"),
        (lambda: chain().adjacent(-1), r"0 \.\.\. 5"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_sets_as_bits():
    assert list(bits(mask_of([5, 0, 130]))) == [0, 5, 130]
    assert list(bits(0)) == []


def test_the_shelf_holds_what_it_names():
    for name in causes.__all__:
        assert getattr(causes, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = causes.nothing
