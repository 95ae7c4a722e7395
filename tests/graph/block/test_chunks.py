"""Laws of cutting in chunks: no size of chunks changes a cut, and no step holds more than one."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from silograph.core.errors import PartitionError
from silograph.graph import heterogeneity
from silograph.graph.block.block import connect, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.graph.heterogeneity import describe
from silograph.graph.partition import cuts
from silograph.graph.partition.cuts import distinct_numbers, held_edges
from silograph.graph.partition.partition import Partition, make_partition

MakeGraph = Callable[..., Graph]
# Edges and (client, node) pairs of a chunk, at most; a client alone may have more.
SIZES = [(1, 1), (1, 1 << 22), (40, 1 << 22), (1 << 20, 1), (1 << 20, 130), (60, 130)]
CUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("random", 7, {}),
    ("random", 40, {}),
    ("metis", 3, {}),
    ("random", 1, {}),
    ("metis_overlapping", 10, {}),
    ("shares", 4, {"share_mean": 0.2}),
    ("random", 5, {"drop_edges": 0.4}),
    ("metis_overlapping", 10, {"drop_edges": 0.5}),
]


def with_chunks(monkeypatch: pytest.MonkeyPatch, edges: int, places: int) -> None:
    for module in (cuts, heterogeneity):
        monkeypatch.setattr(module, "CHUNK_EDGES", edges)
    monkeypatch.setattr(cuts, "CHUNK_PLACES", places)


def tensors_of(value: object) -> list[tuple[str, Tensor]]:
    """Return every tensor of nested dataclasses with its name."""
    if isinstance(value, Tensor):
        return [("", value)]
    named = [(field.name, getattr(value, field.name)) for field in fields(value)]  # type: ignore[arg-type]
    parts = [
        (name, v) for name, v in named if isinstance(v, Tensor) or hasattr(v, "__match_args__")
    ]
    return [(f"{name}.{more}", t) for name, v in parts for more, t in tensors_of(v)]


def assert_same(one: Sequence[object], other: Sequence[object]) -> None:
    for a, b in zip(one, other, strict=True):
        for (name, first), (_, second) in zip(tensors_of(a), tensors_of(b), strict=True):
            assert first.dtype == second.dtype, name
            assert torch.equal(first.nan_to_num(-7), second.nan_to_num(-7)), name


def weights_of(graph: Graph) -> list[Tensor | None]:
    one = torch.rand(graph.adj.nnz, generator=torch.Generator().manual_seed(0)).double()
    both = torch.stack([one, one.flip(0).masked_fill(one < 0.3, torch.nan)], dim=1)
    return [None, one, both]


@pytest.mark.parametrize(("how", "clients", "options"), CUTS)
def test_no_size_of_chunks_changes_a_cut(
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    clients: int,
    options: dict[str, Any],
) -> None:
    graph = make_graph(60)
    partition = make_partition(graph, how, clients=clients, key=0, **options)
    graphs = [replace(graph, edge_weight=weight) for weight in weights_of(graph)]
    expected = [connect(g, partition) for g in graphs]
    figures = describe(graph, partition)
    for sizes in SIZES:
        with_chunks(monkeypatch, *sizes)
        again = make_partition(graph, how, clients=clients, key=0, **options)
        assert again.hash == partition.hash
        for g, cut in zip(graphs, expected, strict=True):
            assert_same(connect(g, partition), cut)
        assert_same([describe(graph, partition)], [figures])
        assert describe(graph, partition).totals() == figures.totals()


def test_chunks_are_whole_clients_and_all_edges(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(60)
    partition = make_partition(graph, "random", clients=9, key=0)
    dense = torch.from_numpy(graph.adj.scipy().toarray()) > 0
    for sizes in SIZES:
        with_chunks(monkeypatch, *sizes)
        chunks = list(held_edges(graph.adj, partition.nodes))
        assert all(len(chunk.row) <= sizes[0] or _clients(chunk, 60) == 1 for chunk in chunks)
        assert all(chunk.num_places <= sizes[1] or _clients(chunk, 60) == 1 for chunk in chunks)
        row, neighbor = (
            torch.cat([getattr(c, name) for c in chunks]) for name in ("row", "neighbor")
        )
        assert [c.total for c in chunks] == [len(row)] * len(chunks)
        assert [c.start for c in chunks] == [
            sum(len(c.row) for c in chunks[:k]) for k in range(len(chunks))
        ]
        assert torch.equal(torch.stack([row, neighbor]), dense[partition.copies].nonzero().T)


def _clients(chunk: cuts.HeldEdges, num_nodes: int) -> int:
    return chunk.num_places // num_nodes


def test_the_uncut_graph_is_the_cut_into_one_client(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    uncut = whole(graph)
    drops_nothing = replace(uncut, dropped=torch.zeros(graph.adj.nnz, dtype=torch.bool))
    for weight in weights_of(graph):
        weighted = replace(graph, edge_weight=weight)
        assert_same(connect(weighted, uncut), connect(weighted, drops_nothing))


def test_dropped_edges_of_another_graph_are_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    partition = make_partition(graph, "random", clients=3, key=0, drop_edges=0.5)
    with pytest.raises(PartitionError):
        connect(replace(graph, adj=make_graph(60, seed=3).adj), partition)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.integers(0, 50)), more=st.sampled_from([1, 10_000]))
def test_distinct_numbers_are_those_of_torch(numbers: list[int], more: int) -> None:
    values = torch.tensor(numbers, dtype=torch.int64)
    expected = torch.unique(values, return_inverse=True)
    for mine, theirs in zip(distinct_numbers(values, 50 + more), expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


class Largest(TorchDispatchMode):
    """Notes how many values each new tensor has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, tuple | list) else [made]:
            if isinstance(t, Tensor) and not t._is_view():
                self.sizes.append(t.numel())
        return made


def test_no_step_holds_the_edges_of_many_chunks(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, degree, clients = 2000, 20, 50
    ends = torch.randint(n, (2, n * degree // 2), generator=torch.Generator().manual_seed(0))
    graph = replace(make_graph(n), adj=CSR.undirected(ends.numpy(), n))
    partition = make_partition(graph, "random", clients=clients, key=0)
    assert isinstance(partition, Partition)
    with_chunks(monkeypatch, 1500, 2 * n)
    with Largest() as seen:
        _, halo, route = connect(graph, partition)
    bound = 2 * n + 1  # of nodes, rows, edges and places of a chunk
    assert len(route.target) > 7 * bound
    large = [size for size in seen.sizes if size > bound]
    assert set(large) <= {len(route.target), halo.adj.nnz}  # the results themselves
    assert len(large) <= 4
