"""Laws of edges that are listed several times: one rule for all readers."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

import silograph as sg
from mistakes import raises_code
from runs import same_bits, weights_of
from silograph.core.errors import ConfigError, DataError
from silograph.graph.datasets import load
from silograph.graph.graph import Graph, fingerprint
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.csv import from_csv
from silograph.graph.read.in_memory import from_networkx, from_pyg
from silograph.graph.read.tables import RepeatedEdges
from silograph.graph.silos.read import read_silo, read_silos

RULES: tuple[RepeatedEdges, ...] = get_args(RepeatedEdges)
N = 5
# Halves: sums and means of a few are exact.
WEIGHTS = st.integers(0, 40).map(lambda half: half / 2)
EDGES = st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1), WEIGHTS), max_size=30)
Edge = tuple[int, int, float]


def by_hand(edges: Sequence[Edge], rule: str) -> dict[frozenset[int], float]:
    """Return the weight of each edge, listed values one by one."""
    listed: dict[frozenset[int], list[float]] = {}
    for a, b, weight in edges:
        if a != b:
            listed.setdefault(frozenset((a, b)), []).append(weight)
    combine: dict[str, Any] = {
        "mean": lambda values: sum(values) / len(values),
        "sum": sum,
        "count": len,
        "last": lambda values: values[-1],
        "first": lambda values: values[0],
    }
    return {pair: float(combine[rule](values)) for pair, values in listed.items()}


def weights_in(graph: Graph) -> dict[frozenset[int], float]:
    """Return the weight of each edge, alike in both directions."""
    values = torch.ones(graph.adj.nnz) if graph.edge_weight is None else graph.edge_weight
    weights: dict[frozenset[int], float] = {}
    for (a, b), weight in zip(graph.edge_index.T.tolist(), values.tolist(), strict=True):
        assert weights.setdefault(frozenset((a, b)), weight) == weight
    return weights


def arrays(edges: Sequence[Edge], **options: Any) -> Graph:
    index = np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2).T
    weight = [edge[2] for edge in edges]
    return from_arrays(edge_index=index, edge_weight=weight, y=[0, 1, 0, 1, 0], **options)


@given(EDGES, st.sampled_from(RULES))
def test_each_rule_is_what_one_writes_by_hand(edges: list[Edge], rule: RepeatedEdges) -> None:
    graph = arrays(edges, repeated_edges=rule)
    assert weights_in(graph) == by_hand(edges, rule)
    assert graph.edge_weight is None or rule == "mean" or not bool((graph.edge_weight == 1).all())


@given(EDGES, st.sampled_from(RULES))
def test_edges_without_weights_count_one(edges: list[Edge], rule: RepeatedEdges) -> None:
    index = np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2).T
    graph = from_arrays(edge_index=index, y=[0, 1, 0, 1, 0], repeated_edges=rule)
    assert weights_in(graph) == by_hand([(a, b, 1.0) for a, b, _ in edges], rule)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.floats(0, 2.0**100, width=32)),
        max_size=30,
    )
)
def test_the_default_is_the_mean_to_the_bit(edges: list[Edge]) -> None:
    """The mean as it was before there were rules."""
    graph = arrays(edges)
    assert fingerprint(graph) == fingerprint(arrays(edges, repeated_edges="mean"))
    index = np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2).T
    low, high = (index.min(axis=0), index.max(axis=0)) if edges else (index[0], index[1])
    once = low < high
    pair, weight = (low * N + high)[once], np.array([e[2] for e in edges], dtype=np.float64)[once]
    if (weight == 1).all():
        assert graph.edge_weight is None
        return
    order = np.lexsort((weight, pair))
    pair, weight = pair[order], weight[order]
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    last = np.append(first[1:], len(pair)) - 1
    mean = np.add.reduceat(weight, first) / (last - first + 1)
    mean = np.where(weight[first] != weight[last], mean, weight[first])
    expected = {
        frozenset(divmod(number, N)): value
        for number, value in zip(pair[first].tolist(), mean.tolist(), strict=True)
    }
    assert weights_in(graph) == expected


@given(EDGES, st.sampled_from(["sum", "mean", "count"]), st.randoms(use_true_random=False))
def test_sums_do_not_depend_on_the_order_of_the_list(
    edges: list[Edge], rule: RepeatedEdges, random: Any
) -> None:
    thirds = [(a, b, weight / 3) for a, b, weight in edges]
    shuffled = [(b, a, w) if random.random() < 0.5 else (a, b, w) for a, b, w in thirds]
    random.shuffle(shuffled)
    assert fingerprint(arrays(thirds, repeated_edges=rule)) == fingerprint(
        arrays(shuffled, repeated_edges=rule)
    )


def test_weights_of_one_all_together_are_none_in_the_fingerprint() -> None:
    """Also where the weights of directions, which it does not read, are others."""
    both_ways, one_way = [(0, 1, 0.0), (1, 0, 1.0)], [(0, 1, 0.0), (0, 1, 1.0)]
    graphs = [arrays(edges, repeated_edges="sum") for edges in (both_ways, one_way)]
    assert graphs[0].directed_weight is not None
    assert fingerprint(graphs[0]) == fingerprint(graphs[1])


LISTED: list[Edge] = [(0, 1, 2.0), (1, 2, 1.0), (1, 0, 0.5), (0, 1, 4.0), (3, 4, 1.5), (2, 2, 9.0)]


@pytest.mark.parametrize("rule", RULES)
def test_all_readers_have_the_same_rule(rule: RepeatedEdges, tmp_path: Path) -> None:
    expected = arrays(LISTED, repeated_edges=rule)
    index = np.array([edge[:2] for edge in LISTED]).T
    weight = np.array([edge[2] for edge in LISTED])
    labels = np.array([0, 1, 0, 1, 0])
    # Tables, and a list of edges.
    rows = "".join(f"{a},{b},{w}\n" for a, b, w in LISTED)
    (tmp_path / "nodes.csv").write_text("id,label\n0,0\n1,1\n2,0\n3,1\n4,0\n")
    (tmp_path / "edges.csv").write_text(f"source,target,weight\n{rows}")
    (tmp_path / "list.txt").write_text(rows.replace(",", " "))
    tables = {"nodes": tmp_path / "nodes.csv", "edges": tmp_path / "edges.csv"}
    np.savez(tmp_path / "a.npz", edge_index=index, edge_weight=weight, y=labels)
    directed: Any = nx.MultiDiGraph()
    directed.add_nodes_from((node, {"y": node % 2}) for node in range(N))
    directed.add_weighted_edges_from(LISTED)
    data = Data(
        edge_index=torch.from_numpy(index),
        edge_weight=torch.from_numpy(weight),
        y=torch.from_numpy(labels),
        num_nodes=N,
    )
    graphs = {
        "csv": from_csv(**tables, repeated_edges=rule),  # type: ignore[arg-type]
        "folder": load(tmp_path, repeated_edges=rule),
        "list": load(tmp_path / "list.txt", columns="weight=column_3", repeated_edges=rule),
        "npz": load(tmp_path / "a.npz", repeated_edges=rule),
        "networkx": from_networkx(directed, repeated_edges=rule),
        "pyg": from_pyg(data, repeated_edges=rule),
    }
    if rule == "last":  # networkx lists its edges node by node
        del graphs["networkx"]
    for name, graph in graphs.items():
        assert fingerprint(graph) == fingerprint(expected), name
    joined = from_pyg([data, data], repeated_edges=rule)
    own = {pair: w for pair, w in weights_in(joined).items() if max(pair) < N}
    assert own == weights_in(expected)


def test_lists_in_both_directions_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    both = [(0, 1, 1.0), (1, 0, 1.0), (2, 1, 3.0), (1, 2, 3.0)]
    assert weights_in(arrays(both, repeated_edges="count", name="mine")) == {
        frozenset((0, 1)): 2.0,
        frozenset((1, 2)): 2.0,
    }
    assert "mine: every edge is listed in both directions, and repeated_edges=count" in caplog.text
    caplog.clear()
    arrays(LISTED, repeated_edges="sum")
    assert not caplog.records


def test_rules_that_are_none_and_sums_that_are_too_large_are_refused() -> None:
    with raises_code(DataError, "option-value", option="repeated_edges", got="max"):
        arrays(LISTED, repeated_edges="max")
    large = [(0, 1, 3e38), (1, 0, 3e38)]
    assert weights_in(arrays(large)) == {frozenset((0, 1)): 3e38}
    with pytest.raises(DataError, match="expected sums of edge weights from 0 to"):
        arrays(large, repeated_edges="sum")


def test_runs_carry_the_rule(tmp_path: Path) -> None:
    rows = "".join(f"{row},{row % 2},{row / 8}\n" for row in range(40))
    (tmp_path / "nodes.csv").write_text(f"id,label,a\n{rows}")
    edges = [*itertools.pairwise(range(40)), *itertools.pairwise(range(0, 40, 2))]
    edges += [edge for edge in edges if edge[0] % 3 == 0]
    (tmp_path / "edges.csv").write_text("s,t\n" + "".join(f"{a},{b}\n" for a, b in edges))
    options: dict[str, Any] = {"clients": 2, "rounds": 2, "hidden": 4, "partition": "random"}
    out = tmp_path / "run"
    result = sg.run(tmp_path, repeated_edges="sum", out=str(out), **options)
    assert result.config.repeated_edges == "sum"
    assert 'repeated_edges = "sum"' in (out / "config.toml").read_text()
    graph = load(tmp_path, repeated_edges="sum")
    assert graph.edge_weight is not None
    assert same_bits(weights_of(sg.run(graph, **options)), weights_of(result))
    # A file of the model has the rule, so that predictions read the edges as training did.
    assert sg.load_model(out).preprocessing.repeated_edges == "sum"
    multigraph: Any = nx.MultiGraph(edges)
    for node in multigraph:
        multigraph.nodes[node].update(x=[node / 8], y=node % 2)
    again = sg.run(multigraph, repeated_edges="sum", **options)
    assert same_bits(weights_of(again), weights_of(result))
    with raises_code(ConfigError, "unread-option", option="repeated_edges", part="graph in memory"):
        sg.run(graph, repeated_edges="sum", **options)
    with raises_code(ConfigError, "unread-option", option="repeated_edges", part="digits"):
        sg.run("digits", repeated_edges="sum", **options)


# --- Silos ---------------------------------------------------------------------------------------


def write_silo(folder: Path, name: str, edges: str, cross: str, more: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "silo.toml").write_text(f'name = "{name}"\nfeatures = 1\nclasses = 2\n{more}')
    (folder / "nodes.csv").write_text("id,label\na,0\nb,1\nc,0\n")
    (folder / "features.csv").write_text("id,x\na,1\nb,2\nc,3\n")
    (folder / "edges.csv").write_text(f"source,target,weight\n{edges}")
    (folder / "cross_edges.csv").write_text(f"own,silo,remote,weight\n{cross}")
    return folder


@pytest.mark.parametrize("rule", RULES)
def test_silos_have_rules_of_their_own(rule: str, tmp_path: Path) -> None:
    edges = "a,b,2\nb,a,0.5\na,b,4\nb,c,1\n"
    silo = read_silo(write_silo(tmp_path / "s", "s", edges, "", f'repeated_edges = "{rule}"\n'))
    listed = [(0, 1, 2.0), (1, 0, 0.5), (0, 1, 4.0), (1, 2, 1.0)]
    assert weights_in(silo.graph) == by_hand(listed, rule)


@pytest.mark.parametrize("rule", ["sum", "mean", "count"])
def test_both_owners_of_an_edge_combine_it_alike(rule: str, tmp_path: Path) -> None:
    more = f'repeated_edges = "{rule}"\n'
    one = "a,south,b,0.1\na,south,b,0.7\na,south,b,0.3\nb,south,c,2\n"
    other = "b,north,a,0.7\nc,north,b,2\nb,north,a,0.3\nb,north,a,0.1\n"
    write_silo(tmp_path / "silos" / "north", "north", "a,b,1\n", one, more)
    write_silo(tmp_path / "silos" / "south", "south", "a,b,1\n", other, more)
    silos = read_silos(tmp_path / "silos")
    expected = {"sum": 0.1 + 0.3 + 0.7, "mean": (0.1 + 0.3 + 0.7) / 3, "count": 3.0}[rule]
    weights = [silo.cross.weight for silo in silos.members]
    assert all(weight is not None and expected in weight.tolist() for weight in weights)
    assert all(len(silo.cross.row) == 2 for silo in silos.members)
    split = "0.4/0.3/0.3"
    sg.run(tmp_path / "silos", rounds=1, hidden=2, split=split)  # they agree
    (tmp_path / "silos" / "south" / "cross_edges.csv").write_text(
        "own,silo,remote,weight\n" + other.removesuffix("b,north,a,0.1\n")
    )
    with raises_code(DataError, "silos-disagree", what="edges", silo="north", other="south"):
        sg.run(tmp_path / "silos", rounds=1, hidden=2, split=split)


def test_what_silos_cannot_agree_on_is_refused(tmp_path: Path) -> None:
    twice = "a,south,b,1\na,south,b,2\n"
    with raises_code(DataError, "bad-cell", row=3, column="remote", got="b"):
        read_silo(write_silo(tmp_path / "a", "a", "", twice))
    for number, rule in enumerate(("first", "last")):
        folder = tmp_path / f"b{number}"
        with pytest.raises(DataError, match=r"line 3: .* each silo lists them in its own order"):
            read_silo(write_silo(folder, "a", "", twice, f'repeated_edges = "{rule}"\n'))
    write_silo(tmp_path / "silos" / "a", "a", "a,b,1\n", "")
    with pytest.raises(ConfigError, match=r"expected it in the silo\.toml of each silo"):
        sg.run(tmp_path / "silos", repeated_edges="sum")
