"""A silo's own data, as its folder holds it, and the block of one client that is made of it.

n: nodes of the silo. F: features. X: cross-silo edges. S: halo slots, the remote nodes that they
lead to. C: silos.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.core.payload import offsets, owners
from silograph.graph.block.block import (
    ClientBlock,
    Halo,
    Route,
    Rows,
    SparseRows,
    kinds,
    pairs_of,
    whole,
)
from silograph.graph.column_statistics import (
    EDGE_WEIGHTS,
    FEATURES,
    ClientSums,
    dense_columns,
    join_sums,
    standardize,
    sum_by_client,
    sum_edge_weights,
)
from silograph.graph.csr import CSR
from silograph.graph.graph import (
    Features,
    FeatureSource,
    Graph,
    Split,
    both_directions,
    check_given,
    fingerprint,
    made_features,
    normalized_rows,
    row_keys,
)
from silograph.graph.partition.partition import Partition
from silograph.graph.partition.split import TIME, choose_split, drawn_split
from silograph.graph.read.columns import compact_features, integer_ids

DIRECTIONS = ("out", "in")  # of edges to nodes of other silos: to the remote node, or from it


@dataclass(frozen=True, eq=False)
class CrossEdges:
    """A silo's edges to nodes of others.

    Remote nodes are numbered by slots, in the order in which the list of edges first names them.

    Attributes:
        row: (X,) int64 own node.
        slot: (X,) int64 remote node.
        silo: (S,) names of the silos that hold the remote nodes.
        key: (S,) the nodes' keys there, int64, uint64 or strings.
        weight: (X,) float64 weights of the edges, or None where each counts 1. In a run along
            directions those of `directed_weight`.
        directed_weight: (X, 2) float64 weight of the edge to the remote node and of that from it,
            NaN where there is no such edge; None: edges have no directions.
    """

    row: Tensor
    slot: Tensor
    silo: tuple[str, ...]
    key: np.ndarray
    weight: Tensor | None = None
    directed_weight: Tensor | None = None

    @property
    def keys(self) -> list[str]:
        """The nodes' keys as text."""
        return [str(key) for key in self.key.tolist()]


@dataclass(frozen=True, eq=False, repr=False)
class Silo:
    """The data of one silo.

    Attributes:
        name: the client's name.
        node_id: (n,) own keys of the nodes, int64, uint64 or strings; only other owners of the
            silo's cross-silo edges know them.
        x: (n, F) features as in `Graph`.
        y: labels as in `Graph`, (n,) or (n, T) int64, -1 where missing.
        num_classes: number of classes, or of label bits.
        class_names: their names, or empty.
        feature_names: names of the features, or empty.
        split: the split that came with the data, or None.
        adj: (n, n) without values: internal edges, both directions.
        cross: edges to nodes of other silos.
        edge_weight: weights of internal edges as in `Graph`, or None.
        scale: least and largest rating of a silo with ratings, or None.
        time: (n,) float64 times of nodes or ratings, NaN at users and items and where a time is
            missing; or None.
        time_name: the silo's name of the column of times; a split may name it so or `time`.
        missing: number of cells without a value by feature, in the raw tables; known of folders
            that `silograph prepare` made.
        directed_weight: (nnz,) weights of internal edges by direction, as in `Graph`; None: the
            silo's tables say of no edge where it leads.
    """

    name: str
    node_id: np.ndarray
    x: Features
    y: Tensor
    num_classes: int
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    split: Split | None
    adj: CSR
    cross: CrossEdges
    edge_weight: Tensor | None = None
    scale: tuple[float, float] | None = None
    time: Tensor | None = None
    time_name: str = TIME
    missing: Mapping[str, int] = field(default_factory=dict)
    directed_weight: Tensor | None = None

    @property
    def weighted(self) -> bool:
        """Whether any of its edges have weights."""
        return self.edge_weight is not None or self.cross.weight is not None

    def __repr__(self) -> str:
        """Return name and sizes."""
        return (
            f"Silo({self.name!r}, nodes={len(self.node_id)}, edges={self.adj.nnz // 2}, "
            f"cross={len(self.cross.row)}, features={self.graph.num_features})"
        )

    @property
    def graph(self) -> Graph:
        """The silo's nodes and internal edges, as a graph of their own."""
        return Graph(
            adj=self.adj,
            x=self.x,
            y=self.y,
            num_classes=self.num_classes,
            node_id=self.node_id,
            name=self.name,
            split=self.split,
            class_names=self.class_names,
            feature_names=self.feature_names,
            edge_weight=self.edge_weight,
            directed_weight=self.directed_weight,
            scale=self.scale,
            columns={} if self.time is None else {TIME: self.time, self.time_name: self.time},
        )

    @property
    def keys(self) -> list[str]:
        """The nodes' keys as text, the form in which other silos name them."""
        return [str(key) for key in self.node_id.tolist()]


@dataclass(frozen=True, eq=False)
class Silos:
    """The silos of a federation, all in this process.

    Attributes:
        name: of the federation, in tables and result folders.
        members: the silos; their order is the order of every sum.
    """

    name: str
    members: tuple[Silo, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """The silos' names."""
        return tuple(silo.name for silo in self.members)


def one_sided_edges(
    edges: Mapping[str, Iterable[tuple[str, str, str, str]]],
) -> dict[tuple[str, str], int]:
    """Return how many edges a silo lists that the other silo does not, by both names.

    Args:
        edges: to nodes of other silos, by the silo that lists them: own key, other silo, its key,
            and the direction, one of `DIRECTIONS`, or "" where edges have none. Edges to silos
            that are not there are not looked at.
    """
    listed = {silo: set(own_edges) for silo, own_edges in edges.items()}
    turned = {"": "", **dict(zip(DIRECTIONS, reversed(DIRECTIONS), strict=True))}
    return Counter(
        (silo, other)
        for silo, own_edges in listed.items()
        for own, other, remote, direction in own_edges
        if other in listed and (remote, silo, own, turned[direction]) not in listed[other]
    )


def featured(silo: Silo, source: FeatureSource) -> Silo:
    """Return a silo with features from `source`.

    Its degrees count edges to nodes of other silos, too: where silos hold the parts of one graph,
    they are the degrees in that graph.

    Raises:
        DataError: `source` is `given`, and the silo has no features.
    """
    check_given(source, silo.graph.num_features, silo.name)
    if source == "given":
        return silo
    cross = torch.bincount(silo.cross.row, minlength=len(silo.node_id))
    x = made_features(source, silo.adj.degree + cross)
    return replace(silo, x=x, feature_names=())


def silo_with_directions(silo: Silo) -> Silo:
    """Return a silo whose weights of edges are those of both directions, as `with_directions`.

    Raises:
        DataError: its edges have no directions.
    """
    if silo.directed_weight is None:
        raise DataError(
            f"expected edges with directions in silo {silo.name}, got edges without: "
            "write directed = true in its silo.toml, or leave directed out"
        )
    weight = both_directions(silo.adj, silo.edge_weight, silo.directed_weight)
    cross = replace(silo.cross, weight=silo.cross.directed_weight, directed_weight=None)
    return replace(silo, edge_weight=weight, directed_weight=None, cross=cross)


def silo_without_directions(silo: Silo) -> Silo:
    """Return a silo without the directions of its edges."""
    return replace(silo, directed_weight=None, cross=replace(silo.cross, directed_weight=None))


def silo_split(silo: Silo, how: str, key: Key) -> Split:
    """Return the split of a silo's nodes that `how` names, as `choose_split` does for a graph.

    Shares are drawn from the silo's own keys. Where silos hold the parts of one graph under its
    keys, that is the split of the graph. There may be no training node.

    Returns:
        Masks (n,) bool.

    Raises:
        ConfigError: `how` is neither `public`, `full`, a fold nor ratios.
        DataError: `how` is `public` or `full`, and the silo's nodes came without a split; or it
            goes by times that the silo does not have.
    """
    graph = silo.graph
    if how in ("public", "full"):
        return choose_split(graph, whole(graph), how, key)
    return drawn_split(graph, whole(graph), how, key)


def silo_block(
    silo: Silo,
    split: Split,
    dtype: torch.dtype = torch.float32,
    *,
    normalize: str = "none",
    edge_weights: str = "use",
) -> ClientBlock:
    """Return a silo's block of one client.

    Nothing of it needs the other silos: boundary rows are the rows with cross-silo edges, for
    both owners of such an edge list it.

    Args:
        silo: its data.
        split: which of its nodes train, validate and test; unlabeled ones never do.
        dtype: of features and edges.
        normalize: `row` divides every node's features by their sum; `standard_client` gives every
            feature mean 0 and deviation 1 over the silo's own training nodes; `standard` leaves
            them, with the sums by which `complete_block` does it later; `none` leaves them.
        edge_weights: `scale` adds the sums by which `complete_block` scales weights later.

    Raises:
        DataError: features are sparse, or too large to be standardized.
    """
    n, slots, is_labeled = len(silo.node_id), len(silo.cross.silo), silo.graph.labeled
    # Features, and the sums of training nodes by which they are standardized here or later.
    features = silo.x
    if normalize == "row":
        features = normalized_rows(features)
    sums: dict[str, ClientSums] = {}
    if normalize in ("standard", "standard_client"):
        trains = (split.train & is_labeled).nonzero()[:, 0]
        sums[FEATURES] = sum_by_client(
            dense_columns(features)[trains], torch.zeros_like(trains), clients=1
        )
        sums[FEATURES] = replace(sums[FEATURES], is_sent=normalize == "standard")
    if normalize == "standard_client":
        features = standardize(features, sums[FEATURES].own_statistics().of_client(0))
    off = torch.tensor([0, n])
    x: Rows = SparseRows(features, off) if isinstance(features, CSR) else features
    # Edges: internal ones, and those to halo slots.
    boundary = torch.unique(silo.cross.row)
    edges = silo.graph.weighted_adj
    between = CSR.from_pairs(silo.cross.row, silo.cross.slot, (n, slots), silo.cross.weight)
    if edge_weights == "scale":
        zero = torch.zeros(n, dtype=torch.int64)
        sums[EDGE_WEIGHTS] = sum_edge_weights(edges, between, zero, clients=1)
    block = ClientBlock(
        ids=(silo.name,),
        off=off,
        x=x,
        y=silo.y,
        split=split.map(lambda mask: mask & is_labeled),
        adj=edges,
        row_key=row_keys(silo.name, silo.node_id),
        halo=Halo(
            off=torch.tensor([0, slots]),
            adj=between,
            key=slot_keys(silo),
            boundary=boundary,
            boundary_off=torch.tensor([0, len(boundary)]),
        ),
        sums=sums,
    )
    return block.to("cpu", dtype)


def slot_keys(silo: Silo) -> Tensor:
    """Return the counters of a silo's halo slots, (S,) int64.

    They are those that the remote nodes would have as own ones. Where two nodes have one key at
    different silos, the remote one's silo counts, too.
    """
    cross, words = silo.cross, row_keys(silo.name, silo.cross.key)
    times = Counter([*silo.keys, *cross.keys])
    for slot, (other, key) in enumerate(zip(cross.silo, cross.keys, strict=True)):
        if times[key] > 1:
            words[slot] = row_keys(f"{silo.name}/{other}", cross.key[slot : slot + 1])[0]
    return words


def join_blocks(blocks: Sequence[ClientBlock]) -> ClientBlock:
    """Return blocks of one client each as one block, in their order."""
    off = offsets(torch.tensor([int(block.off[-1]) for block in blocks]))
    halos, splits = [block.halo for block in blocks], [block.split for block in blocks]
    boundary = [halo.boundary + start for halo, start in zip(halos, off.tolist(), strict=False)]
    sparse = [block.x.csr for block in blocks if isinstance(block.x, SparseRows)]
    dense = [block.x for block in blocks if isinstance(block.x, Tensor)]
    return ClientBlock(
        ids=tuple(name for block in blocks for name in block.ids),
        off=off,
        x=SparseRows(CSR.stacked_rows(sparse), off) if sparse else torch.cat(dense),
        y=torch.cat([block.y for block in blocks]),
        split=Split(
            torch.cat([split.train for split in splits]),
            torch.cat([split.val for split in splits]),
            torch.cat([split.test for split in splits]),
        ),
        adj=CSR.block_diagonal([block.adj for block in blocks]),
        row_key=torch.cat([block.row_key for block in blocks]),
        halo=Halo(
            off=offsets(torch.tensor([int(halo.off[-1]) for halo in halos])),
            adj=CSR.block_diagonal([halo.adj for halo in halos]),
            key=torch.cat([halo.key for halo in halos]),
            boundary=torch.cat(boundary),
            boundary_off=offsets(torch.tensor([len(halo.boundary) for halo in halos])),
        ),
        sums={name: join_sums([block.sums[name] for block in blocks]) for name in blocks[0].sums},
        class_weight=blocks[0].class_weight,
    )


def join_silos(silos: Silos, block: ClientBlock, route: Route) -> tuple[Graph, Partition, Split]:
    """Return the joint graph of the silos, its partition, and its split.

    Only a simulation can do that. Nodes are in the order of their keys where these are distinct
    integers, else silo by silo; keys that two silos use are written as silo/key.

    Args:
        silos: their data.
        block: all of them as one block.
        route: who answers for each halo slot.
    """
    node_id = _joined_ids(silos)
    n = len(node_id)
    order = np.arange(n)
    if np.issubdtype(node_id.dtype, np.integer):
        order = np.argsort(node_id, kind="stable")
    number = torch.empty(n, dtype=torch.int64)
    number[torch.from_numpy(order)] = torch.arange(n)
    halo, first = block.halo, silos.members[0]
    remote = halo.boundary[route.target]
    rows = number[torch.cat([block.adj.row, halo.adj.row])]
    columns = number[torch.cat([block.adj.indices.long(), remote[halo.adj.indices.long()]])]
    weighted = any(silo.weighted for silo in silos.members)  # or has directions
    values = torch.cat([_values(block.adj), _values(halo.adj)]) if weighted else None
    adj = CSR.from_pairs(rows, columns, (n, n), values)
    new_order = torch.from_numpy(order)
    x: Features
    if isinstance(block.x, SparseRows):
        sparse = block.x.csr.select_rows(new_order)
        assert sparse.values is not None  # features always carry values
        x = sparse.with_values(torch.from_numpy(compact_features(sparse.values.numpy())))
    else:
        x = torch.from_numpy(compact_features(block.x[new_order].numpy()))
    client_of_row, split = owners(block.off)[new_order], block.split
    graph = Graph(
        adj=replace(adj, values=None),
        edge_weight=adj.values,
        x=x,
        y=block.y[new_order],
        num_classes=first.num_classes,
        node_id=node_id[order],
        name=silos.name,
        silo=client_of_row,
        silo_names=silos.ids,
        class_names=first.class_names,
        feature_names=first.feature_names,
    )
    nodes = tuple((client_of_row == c).nonzero()[:, 0] for c in range(len(silos.ids)))
    partition = Partition(silos.ids, nodes, n, "silo")
    return graph, partition, split.map(lambda mask: mask[new_order])


def _values(adj: CSR) -> Tensor:
    assert adj.values is not None  # blocks carry values of the run's dtype
    return adj.values.double()


def _joined_ids(silos: Silos) -> np.ndarray:
    """Return keys that are distinct over all silos, silo by silo, (n,)."""
    keys = [silo.node_id for silo in silos.members]
    if len({part.dtype for part in keys}) == 1:
        joined = np.concatenate(keys)
    elif all(np.issubdtype(part.dtype, np.integer) for part in keys):
        # Of int64 and uint64 numpy would make floats, in which near keys are the same.
        joined = integer_ids([key for part in keys for key in part.tolist()])
    else:
        joined = np.concatenate([np.array(silo.keys) for silo in silos.members])
    if len(np.unique(joined)) == len(joined):
        return joined
    return np.array([f"{silo.name}/{key}" for silo in silos.members for key in silo.keys])


def silo_fingerprint(silo: Silo) -> str:
    """Return 16 hex digits (BLAKE2b) of everything that training reads of a silo."""
    digest = hashlib.blake2b(f"{silo.name} {fingerprint(silo.graph)}".encode(), digest_size=8)
    digest.update(repr((silo.cross.silo, silo.cross.key.tolist())).encode())
    weights = (silo.cross.weight, silo.directed_weight, silo.cross.directed_weight)
    for part in (silo.cross.row, silo.cross.slot, *(w for w in weights if w is not None)):
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


# --- joined ratings ------------------------------------------------------------------------------
# The graph of ratings that silos hold together: who has one key at two silos is one user or item.
#
# n: nodes of the graph. k: rows of all silos. C: silos.


def join_rating_silos(silos: Silos, block: ClientBlock) -> tuple[Graph, Partition, Split]:
    """Return the joint graph of silos with ratings, its partition, and its split.

    Only a simulation can do that. Nodes are in the order of `sg.ratings`. A pair that two silos
    have rated has a rating of each, and each silo's has the role that it has there.

    Args:
        silos: their data.
        block: all of them as one block.
    """
    keys, client_of_row = (
        np.array([key for silo in silos.members for key in silo.keys]),
        owners(block.off),
    )
    number, ratings = _numbers(block, keys, client_of_row)
    n = int(number.max()) + 1
    row = torch.from_numpy(np.unique(number.numpy(), return_index=True)[1])  # of each node, one
    node_id, twice = keys[row.numpy()], ratings[_repeated(keys[ratings.numpy()])]
    node_id = node_id.astype(np.object_)
    for rating in twice.tolist():
        node_id[number[rating]] = f"{silos.ids[client_of_row[rating]]}/{keys[rating]}"
    edges = number[torch.stack([block.adj.row, block.adj.indices.long()])]
    graph = Graph(
        adj=CSR.undirected(edges.numpy(), n),
        x=kinds(block.x)[row].float(),
        y=block.y[row],
        num_classes=1,
        node_id=node_id.astype(np.str_),
        name=silos.name,
        scale=silos.members[0].scale,  # silos agree on one
    )
    nodes = tuple(part.sort().values for part in number.split(block.off.diff().tolist()))
    cut = Partition(silos.ids, nodes, n, "silo", apart=True)
    return graph, cut, block.split.map(lambda mask: mask[row])


def _numbers(block: ClientBlock, keys: np.ndarray, client_of_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the node of each row, (k,) int64, and the rows of ratings in the order of nodes."""
    number, count, pairs = torch.empty(len(keys), dtype=torch.int64), 0, pairs_of(block)
    for side in kinds(block.x).bool().T:
        names, place = np.unique(keys[side.numpy()], return_inverse=True)
        number[side] = count + torch.from_numpy(place)
        count += len(names)
    order = np.lexsort((client_of_row[pairs.row], number[pairs.item], number[pairs.user]))
    ratings = pairs.row[torch.from_numpy(order)]
    number[ratings] = torch.arange(count, count + len(order))
    return number, ratings


def _repeated(keys: np.ndarray) -> np.ndarray:
    """Return which keys occur several times, bool."""
    _, place, times = np.unique(keys, return_inverse=True, return_counts=True)
    is_repeated: np.ndarray = times[place] > 1
    return is_repeated
