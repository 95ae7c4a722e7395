"""Laws of a cut: every edge is internal or reaches the neighbor's owner, whatever the cut.

The expected values come from dense matrices over the nodes of the uncut graph. Partitions are
drawn at random: clients may overlap, and some nodes may be held by nobody.

N: nodes of the graph. C: clients.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.core.payload import offsets
from silograph.graph.block.block import ClientBlock, Route, SparseRows, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import (
    MISSING,
    Graph,
    Split,
    largest_component,
    row_keys,
    row_normalize,
    subgraph,
)
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

# The shared fixtures are plain functions: they need no fresh start for every example.


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, Partition]:
    """Return a seed and a partition of 2 to 25 nodes: clients hold any nonempty sets of them."""
    n = draw(st.integers(2, 25))
    clients = draw(st.integers(1, 5))
    overlap = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    if overlap:
        held = rng.random((clients, n)) < rng.uniform(0.1, 0.9, (clients, 1))
    else:
        held = rng.integers(-1, clients, n)[None, :] == np.arange(clients)[:, None]
    held[held.sum(1) == 0, 0] = True  # an empty client is refused
    nodes = tuple(torch.from_numpy(np.flatnonzero(row)) for row in held)
    return draw(st.integers(0, 99)), Partition(
        tuple(f"c{i}" for i in range(clients)), nodes, n, "drawn"
    )


def dense(matrix: CSR) -> Tensor:
    return torch.from_numpy(matrix.scipy(np.float64).toarray()).double()


def rows_of_x(block: ClientBlock) -> Tensor:
    return dense(block.x.csr) if isinstance(block.x, SparseRows) else block.x


@dataclass(frozen=True, eq=False)
class Part:
    """One client by definition; rows, slots and boundary numbered within the client."""

    x: Tensor
    y: Tensor
    split: Split
    adj: Tensor
    halo: Tensor
    slots: list[int]  # node of every slot
    boundary: list[int]


def drawn_roles(graph: Graph, seed: int) -> Split:
    """Return a split drawn node by node; a client may have no node of a role."""
    role = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, graph.num_nodes))
    return Split(role == 0, role == 1, role == 2)


def parts_of(graph: Graph, partition: Partition, split: Split) -> list[Part]:
    """Return every client from the dense adjacency, without any code of the library."""
    adj, x = dense(graph.adj), dense(graph.x) if isinstance(graph.x, CSR) else graph.x.double()
    known = (graph.y != MISSING).view(graph.num_nodes, -1).any(dim=1)
    held = [set(part.tolist()) for part in partition.nodes]
    owner = [
        next((c for c, mine in enumerate(held) if u in mine), -1) for u in range(graph.num_nodes)
    ]
    slots = [
        sorted({v for u in mine for v in adj[u].nonzero()[:, 0].tolist()
                if v not in mine and owner[v] >= 0})
        for mine in held
    ]  # fmt: skip
    asked = {v for nodes in slots for v in nodes}
    parts = []
    for c, mine in enumerate(partition.nodes):
        masks = [(mask & known)[mine] for mask in (split.train, split.val, split.test)]
        boundary = [i for i, u in enumerate(mine.tolist()) if u in asked and owner[u] == c]
        halo = adj[mine][:, slots[c]]
        parts.append(
            Part(
                x[mine], graph.y[mine], Split(*masks), adj[mine][:, mine], halo, slots[c], boundary
            )
        )
    return parts


def diagonal(blocks: list[Tensor]) -> Tensor:
    return torch.block_diag(*blocks) if blocks else torch.zeros(0, 0)


def check_block(block: ClientBlock, parts: list[Part]) -> None:
    """Assert that a block is its parts, one after the other, exactly."""
    sizes = [len(part.y) for part in parts]
    off = offsets(torch.tensor(sizes, dtype=torch.int64))
    assert torch.equal(block.off, off)
    assert block.client.tolist() == [c for c, size in enumerate(sizes) for _ in range(size)]
    assert torch.equal(rows_of_x(block), torch.cat([part.x for part in parts]))
    if isinstance(block.x, SparseRows):
        assert torch.equal(block.x.off, off)
        assert torch.equal(dense(block.x.stacked), diagonal([part.x for part in parts]))
    assert torch.equal(block.y, torch.cat([part.y for part in parts]))
    for name in ("train", "val", "test"):
        expected = torch.cat([getattr(part.split, name) for part in parts])
        assert torch.equal(getattr(block.split, name), expected)
    assert block.num_train.tolist() == [int(part.split.train.sum()) for part in parts]
    assert torch.equal(dense(block.adj), diagonal([part.adj for part in parts]))
    halo = block.halo
    assert halo.off.tolist() == offsets(torch.tensor([len(p.slots) for p in parts])).tolist()
    assert torch.equal(dense(halo.adj), diagonal([part.halo for part in parts]))
    expected_rows = [int(off[c]) + row for c, part in enumerate(parts) for row in part.boundary]
    assert halo.boundary.tolist() == expected_rows
    lengths = torch.tensor([len(part.boundary) for part in parts])
    assert halo.boundary_off.tolist() == offsets(lengths).tolist()
    for matrix in (block.adj, halo.adj):
        assert matrix.values is not None  # a block is ready for products


@given(
    cut=cuts(), sparse=st.booleans(), multilabel=st.booleans(), missing=st.sampled_from([0, 0.4])
)
def test_a_block_is_made_of_its_clients(
    make_graph: MakeGraph,
    cut: tuple[int, Partition],
    sparse: bool,
    multilabel: bool,
    missing: float,
) -> None:
    seed, partition = cut
    graph = make_graph(
        partition.num_nodes, seed=seed, sparse=sparse, multilabel=multilabel, missing=missing
    )
    split = drawn_roles(graph, seed)
    block, route = make_block(graph, partition, split, torch.float64)
    parts = parts_of(graph, partition, split)
    check_block(block, parts)
    assert block.ids == partition.ids
    assert block.num_clients == len(parts)
    assert block.num_features == graph.num_features

    # Every slot is answered by the one owner's row of the same node.
    node = torch.cat(partition.nodes)
    assert torch.equal(route.boundary_off, block.halo.boundary_off)
    answering = block.halo.boundary[route.target]
    slots = torch.tensor([v for part in parts for v in part.slots], dtype=torch.int64)
    assert torch.equal(node[answering], slots)
    assert torch.equal(block.client[answering], partition.owner[slots])


@given(cut=cuts())
def test_internal_and_halo_sums_make_the_whole_sum(
    make_graph: MakeGraph, cut: tuple[int, Partition]
) -> None:
    seed, partition = cut
    graph = make_graph(partition.num_nodes, seed=seed)
    # Integers make every sum exact, whatever its order.
    numbers = torch.randint(-9, 9, (graph.num_nodes, 3), generator=generator(seed)).double()
    graph = replace(graph, x=numbers)
    block, route = make_block(graph, partition, drawn_roles(graph, seed), torch.float64)
    x = rows_of_x(block)
    halo = x[block.halo.boundary][route.target]
    got = dense(block.adj) @ x + dense(block.halo.adj) @ halo
    somebody_holds = partition.owner >= 0
    # An edge to a node that nobody holds has no one to answer for it.
    expected = dense(graph.adj) @ (numbers * somebody_holds[:, None])
    assert torch.equal(got, expected[torch.cat(partition.nodes)])


def test_an_edge_of_two_clients_that_both_hold_its_ends_stays_inside(
    make_graph: MakeGraph,
) -> None:
    # The path 0 - 1 - 2; node 1 is held twice, its owner is a, the first one.
    adj = CSR.from_pairs(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 2, 1]), (3, 3))
    graph = replace(make_graph(3), adj=adj)
    partition = Partition(("a", "b"), (torch.tensor([0, 1]), torch.tensor([1, 2])), 3, "hand")
    block, route = make_block(graph, partition, drawn_roles(graph, 0))
    path = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
    assert torch.equal(dense(block.adj), diagonal([path, path]))  # b has its own copy of node 1
    assert block.halo.off.tolist() == [0, 1, 2]
    # a asks for node 2, row 3 at b; b asks for node 0, row 0 at a; nobody asks for node 1.
    assert block.halo.boundary[route.target].tolist() == [3, 0]


@given(cut=cuts(), sparse=st.booleans(), data=st.data())
def test_taking_clients_gives_the_block_of_those_clients(
    make_graph: MakeGraph, cut: tuple[int, Partition], sparse: bool, data: st.DataObject
) -> None:
    seed, partition = cut
    graph = make_graph(partition.num_nodes, seed=seed, sparse=sparse)
    split = drawn_roles(graph, seed)
    block, _ = make_block(graph, partition, split, torch.float64)
    parts = parts_of(graph, partition, split)
    chosen = data.draw(
        st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=6, unique=True)
    )
    taken = block.take(torch.tensor(chosen))
    check_block(taken, [parts[c] for c in chosen])
    assert taken.ids == tuple(partition.ids[c] for c in chosen)
    keys = [block.row_key[block.client == c] for c in chosen]
    assert torch.equal(taken.row_key, torch.cat(keys))
    check_block(block.take(torch.arange(len(parts))), parts)
    # Taking from what was taken is taking from the whole.
    again = taken.take(torch.tensor([len(chosen) - 1]))
    check_block(again, [parts[chosen[-1]]])
    assert torch.equal(again.row_key, keys[-1])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def named_keys(graph: Graph, partition: Partition) -> dict[tuple[str, int], int]:
    """Return the row key of every (client, public node key)."""
    block, _ = make_block(graph, partition, drawn_roles(graph, 0))
    names = [
        (name, int(graph.node_id[u]))
        for name, part in zip(partition.ids, partition.nodes, strict=True)
        for u in part.tolist()
    ]
    return dict(zip(names, block.row_key.tolist(), strict=True))


@given(cut=cuts())
def test_row_keys_follow_names_not_positions(
    make_graph: MakeGraph, cut: tuple[int, Partition]
) -> None:
    seed, partition = cut
    n = partition.num_nodes
    graph = make_graph(n, seed=seed)
    keys = named_keys(graph, partition)
    assert len(set(keys.values())) == len(keys)  # no two rows share their draws

    reversed_clients = Partition(partition.ids[::-1], partition.nodes[::-1], n, "drawn")
    assert named_keys(graph, reversed_clients) == keys

    order = torch.randperm(n, generator=generator(seed))
    new_number = torch.argsort(order)
    nodes = tuple(new_number[part].sort().values for part in partition.nodes)
    renumbered = Partition(partition.ids, nodes, n, "drawn")
    assert named_keys(subgraph(graph, order), renumbered) == keys


def test_a_node_at_two_clients_has_two_row_keys(make_graph: MakeGraph) -> None:
    both = Partition(("a", "b"), (torch.arange(9), torch.arange(9)), 9, "hand")
    assert len(set(named_keys(make_graph(9), both).values())) == 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_block_has_one_dtype(
    make_graph: MakeGraph, cut_block: MakeBlock, dtype: torch.dtype, sparse: bool
) -> None:
    block, _ = cut_block(make_graph(sparse=sparse), dtype=dtype)
    csr = [block.adj, block.halo.adj]
    if isinstance(block.x, SparseRows):
        csr.append(block.x.csr)
    else:
        assert block.x.dtype == dtype
    assert {m.values.dtype for m in csr if m.values is not None} == {dtype}


def test_whole_gives_one_client_everything(make_graph: MakeGraph) -> None:
    graph = make_graph(20)
    block, route = make_block(graph, whole(graph), drawn_roles(graph, 0), torch.float64)
    assert block.ids == ("uncut",)
    assert torch.equal(dense(block.adj), dense(graph.adj))
    assert block.halo.adj.num_cols == len(block.halo.boundary) == len(route.target) == 0


def test_a_partition_of_another_graph_is_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(20)
    with pytest.raises(
        DataError, match=r"^expected a partition of this graph's 20 nodes, got one of 21$"
    ):
        make_block(graph, whole(make_graph(21)), drawn_roles(graph, 0))


@given(seed=st.integers(0, 99), sparse=st.booleans(), nodes=st.sets(st.integers(0, 14), min_size=1))
def test_a_subgraph_is_the_matrix_of_its_nodes(
    make_graph: MakeGraph, seed: int, sparse: bool, nodes: set[int]
) -> None:
    graph = make_graph(15, seed=seed, sparse=sparse)
    silo = torch.arange(15) % 2
    graph = replace(graph, split=drawn_roles(graph, seed), silo=silo, silo_names=("a", "b"))
    chosen = torch.tensor(sorted(nodes))[torch.randperm(len(nodes), generator=generator(seed))]
    part = subgraph(graph, chosen)
    assert torch.equal(dense(part.adj), dense(graph.adj)[chosen][:, chosen])
    assert part.adj.values is None
    whole_x = dense(graph.x) if isinstance(graph.x, CSR) else graph.x
    assert torch.equal(dense(part.x) if isinstance(part.x, CSR) else part.x, whole_x[chosen])
    assert torch.equal(part.y, graph.y[chosen])
    assert part.node_id.tolist() == graph.node_id[chosen.numpy()].tolist()
    assert part.silo is not None
    assert torch.equal(part.silo, silo[chosen])
    assert part.split is not None
    assert graph.split is not None
    assert torch.equal(part.split.val, graph.split.val[chosen])


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5])  # seed 4 has two largest ones
def test_largest_component_equals_networkx(make_graph: MakeGraph, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = torch.from_numpy(np.argwhere(np.triu(rng.random((25, 25)) < 0.05, 1)))
    both = torch.cat([pairs, pairs.flip(1)])
    graph = replace(make_graph(25), adj=CSR.from_pairs(both[:, 0], both[:, 1], (25, 25)))
    reference: nx.Graph[int] = nx.Graph(pairs.tolist())
    largest = max(nx.connected_components(reference), key=len)
    sizes = sorted(map(len, nx.connected_components(reference)))
    assert sizes[-1] > sizes[-2]
    part = largest_component(graph)
    assert part.node_id.tolist() == graph.node_id[sorted(largest)].tolist()
    assert part.num_edges == reference.subgraph(largest).number_of_edges()


def test_row_normalize_divides_by_the_sum(make_graph: MakeGraph) -> None:
    graph = make_graph(30, sparse=True)
    assert isinstance(graph.x, CSR)
    x = dense(graph.x).abs()
    x[4] = 0  # a row of zeros stays, and so does one that sums to 0
    x[5] = torch.tensor([1.0, -1.0, 0, 0, 0, 0, 0])
    total = x.sum(dim=1, keepdim=True)
    expected = torch.where(total == 0, x, x / total)

    from_dense = row_normalize(replace(graph, x=x)).x
    assert isinstance(from_dense, Tensor)
    assert torch.equal(from_dense, expected)
    assert float((from_dense.sum(dim=1) - 1)[total[:, 0] != 0].abs().max()) < 1e-10

    rows, cols = x.nonzero().unbind(1)
    pattern = CSR.from_pairs(rows, cols, (30, 7))
    from_sparse = row_normalize(replace(graph, x=replace(pattern, values=x[rows, cols]))).x
    assert isinstance(from_sparse, CSR)
    torch.testing.assert_close(dense(from_sparse), expected, rtol=1e-10, atol=1e-10)


def test_properties_of_a_graph(make_graph: MakeGraph) -> None:
    graph = make_graph(30, missing=0.3)
    adj = dense(graph.adj)
    assert graph.num_nodes == 30
    assert graph.num_edges == int(adj.triu().sum())
    assert graph.num_features == 7
    assert torch.equal(graph.edge_index, adj.nonzero().T)
    assert graph.task == "multiclass"
    assert torch.equal(graph.labeled, graph.y >= 0)
    multi = make_graph(30, missing=0.3, multilabel=True)
    assert multi.task == "multilabel"
    multi.y[0] = torch.tensor([MISSING, 1, MISSING])  # one known bit is enough
    multi.y[1] = MISSING
    assert multi.labeled[:2].tolist() == [True, False]
    assert make_graph(30, sparse=True).num_features == 7


def test_offsets_of_a_block_match_its_rows(make_graph: MakeGraph, cut_block: MakeBlock) -> None:
    block, _ = cut_block(make_graph(), 5)
    mask = torch.from_numpy(np.random.default_rng(0).random(60) < 0.5)
    expected = [int(mask[a:b].sum()) for a, b in pairwise(block.off.tolist())]
    assert block.count(mask).tolist() == expected


def test_a_slot_draws_by_client_and_node(make_graph: MakeGraph) -> None:
    """As if the client held the node: whoever knows its key can tell, and no two slots are one."""
    graph = make_graph()
    partition = make_partition(graph, "random", clients=4, key=Key.of(0))
    split = draw_split(graph, partition, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    block, route = make_block(graph, partition, split)
    nodes = torch.cat(partition.nodes)[block.halo.boundary][route.target]
    for position, name in enumerate(block.ids):
        own = slice(int(route.slot_off[position]), int(route.slot_off[position + 1]))
        expected = row_keys(name, graph.node_id[nodes[own].numpy()])
        assert torch.equal(block.halo.key[own], expected)
        assert torch.equal(block.take(torch.tensor([position])).halo.key, expected)
    assert len(block.halo.key.unique()) == len(route.target)
