"""`Graph`: the uncut graph, as a user hands it in and as a simulation cuts it.

n: nodes. F: features a node. T: label bits of a multi-label task.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.errors import DataError, ProtocolError
from silograph.core.key import Key, hash_texts, mix_words, unmix_words
from silograph.core.numeric_state import as_data, standard_numerics
from silograph.core.text import html_table
from silograph.graph.csr import CSR

# --- From public node keys to the 64-bit counters that every draw for a node starts from ---------


def node_words(node_id: np.ndarray) -> Tensor:
    """Return a 64-bit word for every public node key, (n,) int64.

    Integers are mixed, unsigned ones by their 64 bits, strings hashed (BLAKE2b). Neither depends on
    the position of the node.
    """
    if np.issubdtype(node_id.dtype, np.integer):
        return mix_words(torch.from_numpy(node_id.astype(np.int64)))
    digests = b"".join(
        hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in node_id
    )
    return torch.from_numpy(np.frombuffer(digests, dtype="<i8").astype(np.int64))


def row_keys(client_id: str, node_id: np.ndarray) -> Tensor:
    """Return the counters of a client's rows, (n,) int64: they name client and node together."""
    return client_words(hash_texts([client_id]), node_words(node_id))


def client_words(clients: Tensor, words: Tensor) -> Tensor:
    """Return the counters of rows from their clients' hashes (n,) and their keys' words (n,)."""
    return mix_words(words ^ clients)


def words_of_rows(client_id: str, keys: Tensor) -> Tensor:
    """Return the words (n,) of the public keys of a client's rows: `client_words` undone."""
    return unmix_words(keys) ^ hash_texts([client_id]).to(keys.device)


def key_order(node_id: np.ndarray, key: Key) -> Tensor:
    """Return the nodes in the order of one draw each from their public keys, (n,) int64."""
    return drawn_order(node_words(node_id), key)


def drawn_order(words: Tensor, key: Key) -> Tensor:
    """Return the order of one draw for each of the words (n,) int64, (n,) int64."""
    return torch.argsort(key.words(words, 1)[:, 0], stable=True)


# --- The pairs of a rating graph: which rows are ratings, whose, and of what ---------------------
#
# n: rows. p: ratings among them.


@dataclass(frozen=True, eq=False)
class Pairs:
    """The ratings among rows.

    Attributes:
        row: (p,) int64 row of each rating, ascending.
        user: (p,) int64 row of its user.
        item: (p,) int64 row of its item.
    """

    row: Tensor
    user: Tensor
    item: Tensor


def rating_sizes(x: Tensor) -> dict[str, int]:
    """Return how many users, items and ratings rows (n, 2) of kinds are."""
    users, items = (int(kind.sum()) for kind in x.T)
    return {"users": users, "items": items, "ratings": len(x) - users - items}


def pairs_among(x: Tensor, adj: CSR) -> Pairs:
    """Return the ratings among rows.

    Args:
        x: (n, 2) whether a row is a user or an item; ratings are neither.
        adj: (n, n) edges; a rating has those to its user and its item.

    Raises:
        ProtocolError: a rating without a user or an item, or with several.
    """
    row = (x == 0).all(dim=1).nonzero()[:, 0]
    first = adj.indptr[row].long()
    whole = bool((adj.indptr[row + 1] - adj.indptr[row] == 2).all())
    if whole:
        one, other = adj.indices[first].long(), adj.indices[first + 1].long()
        is_swapped = x[other, 0] == 1
        user, item = torch.where(is_swapped, other, one), torch.where(is_swapped, one, other)
        whole = bool((x[user, 0] == 1).all() & (x[item, 1] == 1).all())
    if not whole:
        raise ProtocolError("expected edges from each rating to its user and its item, got others")
    return Pairs(row, user, item)


LabelForm = Literal["multiclass", "multilabel", "node_value", "rating"]
Features = Tensor | CSR
MISSING = -1  # label of a node (or label bit) that is not known


@dataclass(frozen=True, eq=False)
class Split:
    """Which nodes train, choose and judge: three disjoint masks, each (n,) bool."""

    train: Tensor
    val: Tensor
    test: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Split":
        """Return the split of the masks that `change` makes of these."""
        return Split(change(self.train), change(self.val), change(self.test))


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """An undirected graph with node features and node labels.

    Attributes:
        adj: (n, n) without values; both directions of every edge, no self loops, no duplicates.
        x: (n, F), dense or CSR; float32 where that holds every value exactly, else float64.
        y: multi-class (n,) int64 in 0..num_classes-1; multi-label (n, T) int64 of 0 and 1.
            `MISSING` (-1) marks what is not known; such nodes never train or judge. For
            regression (n, T) float64 targets; NaN marks what is not known. For ratings (n,)
            float64, NaN at users and items; see `silograph.graph.read.ratings`.
        num_classes: number of classes, or T for multi-label and regression.
        node_id: (n,) public keys of the nodes, int64, uint64 or strings; they name nodes across
            silos.
        name: what tables and result folders call this graph.
        split: the split that came with the data, or None.
        silo: (n,) int64 index into `silo_names`: who holds the node; or None.
        silo_names: names of the silos, empty when `silo` is None.
        class_names: names of the classes, bits or targets, or empty.
        columns: what is known of nodes besides, (n,) int64 codes or float64 numbers by name, for
            ways of cutting and splitting; -1 or NaN where nothing is. No model reads them.
        feature_names: names of the features in their order, or empty.
        edge_weight: (nnz,) float64 >= 0, the weight of every stored edge of `adj`, alike in both
            directions; None: every edge counts 1. In a run along directions (nnz, 2), as
            `with_directions` makes it.
        scale: least and largest rating that there may be, or None where labels are no ratings.
        directed_weight: (nnz,) the weight of the edge from the row of every stored edge to its
            column, -1 where only the other direction is listed; float64, or int8 where each
            direction has the weight of the edge. None: edges have no directions. Only runs
            with `directed` read it.
    """

    adj: CSR
    x: Features
    y: Tensor
    num_classes: int
    node_id: np.ndarray
    name: str = "graph"
    split: Split | None = None
    silo: Tensor | None = None
    silo_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()
    edge_weight: Tensor | None = None
    scale: tuple[float, float] | None = None
    directed_weight: Tensor | None = None

    def __post_init__(self) -> None:
        """Copy tensors that autograd could not use as data, such as those of inference mode."""
        for name in ("adj", "x", "y", "split", "silo", "edge_weight", "directed_weight"):
            value = getattr(self, name)
            if value is not None:
                same = value.map(as_data) if isinstance(value, CSR | Split) else as_data(value)
                object.__setattr__(self, name, same)
        object.__setattr__(self, "columns", {k: as_data(v) for k, v in self.columns.items()})

    def __repr__(self) -> str:
        """Return name and sizes."""
        what = "targets" if self.has_numbers else "classes"
        own = self.rating_sizes or {"features": self.num_features, what: self.num_classes}
        sizes = {"nodes": self.num_nodes, "edges": self.num_edges, **own}
        sizes_text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"Graph({self.name!r}, {sizes_text}, task={self.task!r})"

    def _repr_html_(self) -> str:
        what = "targets" if self.has_numbers else "classes"
        silos = {"silos": f"{len(self.silo_names):,}"} if self.silo_names else {}
        own = self.rating_sizes or {"features": self.num_features, what: self.num_classes}
        rows = {
            "nodes": f"{self.num_nodes:,}",
            "edges": f"{self.num_edges:,}" + ", weighted" * (self.edge_weight is not None),
            **{name: f"{size:,}" for name, size in own.items()},
            "task": self.task,
            "labeled nodes": f"{int(self.labeled.sum()):,}",
            "split": "none" if self.split is None else "train, val and test masks",
        }
        return html_table("graph", ["name", self.name], (rows | silos).items())

    @property
    def has_numbers(self) -> bool:
        """Whether labels are numbers to predict, and not classes or bits."""
        return self.y.is_floating_point()

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.adj.num_rows

    @property
    def num_edges(self) -> int:
        """Number of undirected edges."""
        return self.adj.nnz // 2

    @property
    def num_features(self) -> int:
        """Number of features a node."""
        return self.x.num_cols if isinstance(self.x, CSR) else int(self.x.shape[1])

    @property
    def is_directed(self) -> bool:
        """Whether some edge goes one way only, or has another weight the other way."""
        weight = self.directed_weight
        if weight is None:
            return self.edge_weight is not None and self.edge_weight.dim() == 2
        return not torch.equal(weight, weight[self.adj.by_column])

    @property
    def task(self) -> LabelForm:
        """`multiclass` (one class a node), `multilabel`, `node_value` (T numbers) or `rating`."""
        return label_form(self.y)

    @property
    def rating_sizes(self) -> dict[str, int]:
        """How many users, items and ratings there are; nothing where labels are no ratings."""
        if self.task != "rating" or isinstance(self.x, CSR):
            return {}
        return rating_sizes(self.x)

    @property
    @standard_numerics()
    def labeled(self) -> Tensor:
        """Nodes with at least one known label, (n,) bool."""
        is_known = known_labels(self.y)
        return is_known if is_known.dim() == 1 else is_known.any(dim=1)

    @property
    @standard_numerics()
    def weighted_adj(self) -> CSR:
        """`adj` with the weights of edges, (nnz,) or (nnz, 2), as values, if they have any."""
        return self.adj if self.edge_weight is None else self.adj.with_values(self.edge_weight)

    @property
    @standard_numerics()
    def edge_index(self) -> Tensor:
        """Both directions of every edge, (2, E) int64, sorted by first end point."""
        return torch.stack([self.adj.row, self.adj.indices.long()])


def label_form(y: Tensor) -> LabelForm:
    """Return which form labels (n,) or (n, T) have."""
    if y.is_floating_point():
        return "rating" if y.dim() == 1 else "node_value"
    return "multiclass" if y.dim() == 1 else "multilabel"


def known_labels(y: Tensor) -> Tensor:
    """Return which labels are known, bool of the shape of y."""
    return ~torch.isnan(y) if y.is_floating_point() else y != MISSING


@dataclass(frozen=True)
class Schema:
    """What a model needs to know of a graph, and all that server and silos must agree on.

    Attributes:
        num_features: F.
        num_classes: as in `Graph`.
        task: as in `Graph`.
        class_names: names of the classes, or empty.
    """

    num_features: int
    num_classes: int
    task: LabelForm
    class_names: tuple[str, ...] = ()


def schema_of(graph: Graph) -> Schema:
    """Return the schema of a graph."""
    return Schema(graph.num_features, graph.num_classes, graph.task, graph.class_names)


def subgraph(graph: Graph, nodes: Tensor) -> Graph:
    """Return the graph induced by `nodes` (k,) int64, in that order."""
    local = torch.full((graph.num_nodes,), -1, dtype=torch.int64)
    local[nodes] = torch.arange(len(nodes))
    rows = graph.adj.with_values(torch.arange(graph.adj.nnz)).select_rows(nodes)
    cols = local[rows.indices.long()]
    is_internal = cols >= 0
    assert rows.values is not None  # the places of edges in the graph
    values = rows.values[is_internal]
    adj = CSR.from_pairs(rows.row[is_internal], cols[is_internal], (len(nodes), len(nodes)), values)
    weight, directed_weight = graph.edge_weight, graph.directed_weight
    x = graph.x.select_rows(nodes) if isinstance(graph.x, CSR) else graph.x[nodes]
    split = graph.split
    return replace(
        graph,
        adj=replace(adj, values=None),
        edge_weight=None if weight is None else weight[adj.values],
        directed_weight=None if directed_weight is None else directed_weight[adj.values],
        x=x,
        y=graph.y[nodes],
        node_id=graph.node_id[nodes.numpy()],
        split=split and split.map(lambda mask: mask[nodes]),
        silo=None if graph.silo is None else graph.silo[nodes],
        columns={name: column[nodes] for name, column in graph.columns.items()},
    )


def with_directions(graph: Graph, *, symmetric: bool = False) -> Graph:
    """Return the graph with an `edge_weight` (nnz, 2) for each direction of its edges.

    The weight from the row to the column, and that from the column to the row; NaN where there is
    no such edge. Blocks of it know directions.

    Args:
        graph: as it was read.
        symmetric: whether all edges may go both ways.

    Raises:
        DataError: edges have no directions, or all go both ways.
    """
    if not graph.is_directed and not (symmetric and graph.directed_weight is not None):
        got = "none" if graph.directed_weight is None else "edges that all go both ways"
        raise DataError(
            f"expected edges with directions in {graph.name}, got {got}: leave directed out, or "
            "list each edge from its source to its target"
        )
    if graph.directed_weight is None:  # they are in use already
        return graph
    weight = both_directions(graph.adj, graph.edge_weight, graph.directed_weight)
    return replace(graph, edge_weight=weight, directed_weight=None)


def both_directions(adj: CSR, edge_weight: Tensor | None, directed_weight: Tensor) -> Tensor:
    """Return the weight of both directions of every stored edge, (nnz, 2) float64; NaN: none.

    Args:
        adj: (n, n), its places symmetric.
        edge_weight: (nnz,) as in `Graph`; None: edges count 1 in either direction.
        directed_weight: (nnz,) as in `Graph`.
    """
    if edge_weight is None:
        weight = torch.ones(adj.nnz, dtype=torch.float64)
    else:
        weight = edge_weight if directed_weight.dtype == torch.int8 else directed_weight
    weight = weight.double().masked_fill(directed_weight < 0, math.nan)
    # The k-th edge by rows is, the other way round, the k-th by columns.
    return torch.stack([weight, weight[adj.by_column]], dim=1)


def largest_component(graph: Graph) -> Graph:
    """Return the largest connected component, nodes in their old order."""
    from scipy.sparse.csgraph import connected_components

    _, label = connected_components(graph.adj.scipy(np.int8), directed=False)
    keep = label == np.bincount(label).argmax()
    return subgraph(graph, torch.from_numpy(np.flatnonzero(keep)))


def row_normalize(graph: Graph) -> Graph:
    """Return the graph with every node's features divided by their sum (rows of zeros stay)."""
    return replace(graph, x=normalized_rows(graph.x))


def normalized_rows(x: Features) -> Features:
    """Return features (n, F) with every row divided by its sum (rows of zeros stay)."""
    if isinstance(x, CSR):
        assert x.values is not None  # features always carry values
        total = torch.zeros(x.num_rows, dtype=x.values.dtype).index_add_(0, x.row, x.values)
        scale = torch.where(total == 0, torch.ones_like(total), 1 / total)
        return replace(x, values=x.values * scale[x.row])
    total = x.sum(dim=1, keepdim=True)
    return torch.where(total == 0, x, x / total)


def fingerprint(graph: Graph) -> str:
    """Return 16 hex digits (BLAKE2b) of everything that training reads of a graph."""
    digest = hashlib.blake2b(digest_size=8)
    x = graph.x
    parts = [graph.adj.indptr, graph.adj.indices, graph.y]
    parts += [x] if isinstance(x, Tensor) else [x.indptr, x.indices]
    if isinstance(x, CSR) and x.values is not None:
        parts.append(x.values)
    # Weights of 1 are no weights; they are there where only directions have others.
    if graph.edge_weight is not None and not bool((graph.edge_weight == 1).all()):
        parts.append(graph.edge_weight)
    if graph.split is not None:
        parts += [graph.split.train, graph.split.val, graph.split.test]
    for name, column in sorted(graph.columns.items()):
        digest.update(f"{name};".encode())
        parts.append(column)
    for part in parts:
        digest.update(f"{part.dtype} {tuple(part.shape)};".encode())
        digest.update(part.contiguous().numpy().data)
    digest.update(f"{graph.num_classes} {graph.node_id.dtype};".encode())
    digest.update(graph.node_id.tobytes())
    return digest.hexdigest()


# --- features ------------------------------------------------------------------------------------
# Features that are made of what every silo knows of its own nodes, for graphs without features.
#
# n: nodes. F: features.


FeatureSource = Literal["given", "degree", "constant", "onehot-degree"]
# Columns of features that are made. Those of onehot-degree are fixed, for no silo knows the largest
# degree of others: one for each degree from 0 to 62, and one for 63 and more.
WIDTHS = {"degree": 1, "constant": 1, "onehot-degree": 64}


def made_features(source: FeatureSource, degree: Tensor) -> Features:
    """Return the features that are made of the degrees (n,) int64 of nodes.

    >>> made_features("degree", torch.tensor([2, 0]))
    tensor([[2.],
            [0.]])

    Args:
        source: degree: (n, 1), the degree; constant: (n, 1), ones; onehot-degree: (n, 64) sparse,
            one 1 a row.
        degree: number of neighbors, in the own silo and in others.
    """
    if source == "degree":
        return degree.float()[:, None]
    if source == "constant":
        return torch.ones(len(degree), 1)
    width, n = WIDTHS["onehot-degree"], len(degree)
    column = degree.clamp(max=width - 1).numpy()
    ones = np.ones(n, dtype=np.float32)
    return CSR.from_scipy(sp.csr_matrix((ones, column, np.arange(n + 1)), shape=(n, width)))


SAMPLE = 10_000  # rows that scales are estimated from
ALONE, ALL = 10.0, 100.0  # see `scale_problem`; measured on digits with a column of noise
MOST = 0.5  # of the sums by which rows are divided; measured likewise
SCALE = "scale such columns before"


def scale_problem(x: Features, names: Sequence[str] = ()) -> str | None:
    """Return what is wrong with the scale of features, or None.

    The root mean square of a column is at least `ALONE`, and `ALONE` times the median one, so that
    it drowns the others; or at least `ALL`. Words, one-hot and standardized columns stay below.

    Args:
        x: (n, F), as clients train on them.
        names: (F,) of the columns, or none.
    """
    count, part = _sample(x)
    scale = (_column_sums(part, lambda values: values.square()) / count).sqrt()
    if not bool((scale > 0).any()):
        return None
    largest, median = int(scale.argmax()), float(scale[scale > 0].median())
    most = float(scale[largest])
    if most < ALL and (most < ALONE or most < ALONE * median):
        return None
    column = _column(largest, names)
    how = "add --normalize standard"
    if isinstance(x, CSR):  # standardized, they would be dense
        how = "add --normalize row, as they are sparse" if row_problem(x) is None else SCALE
    return (
        f"features are on very different or large scales (column {column}: about {most:.3g}; the "
        f"median column: {median:.3g}), and models may not learn from them: {how}"
    )


def row_problem(x: Features, names: Sequence[str] = ()) -> str | None:
    """Return what is wrong with features whose rows are divided by their sums, or None.

    Columns whose values other than 0 are on average `ALONE` times those of the median column make
    up most of the sums. So they are nearly the same at every node, and what the others say is
    divided away. Or sums are close to 0.

    Args:
        x: (n, F), before or after the division.
        names: (F,) of the columns, or none.
    """
    count, part = _sample(x)
    part = normalized_rows(part)
    share = _column_sums(part, torch.abs) / count
    if not bool((share > 0).any()):
        return None
    largest, total = int(share.argmax()), float(share.sum())
    # Of values other than 0: a common word is no large number.
    value = share * count / _column_sums(part, lambda values: (values != 0).double()).clamp(min=1)
    large = value >= ALONE * value[value > 0].median()
    large_share = float(share[large].sum()) / total
    if large_share >= MOST or len(share) == 1:
        what = f"are mostly column {_column(largest, names)} ({share[largest] / total:.0%})"
    elif total >= ALL:
        what = f"are close to 0 (a row's values are then about {total:.3g} in all)"
    else:
        return None
    how = SCALE if isinstance(x, CSR) else "use --normalize standard"
    return (
        f"sums of features by which --normalize row divides {what}, and models may not learn from "
        f"the other columns: {how}"
    )


MOST_SORTED = 2 * 10**7  # numbers that are sorted to find equal ones
LOST = (
    0.01  # of the distinct values of a column: of very many, a few are equal in float32 by chance
)
NAMED = 5  # columns in a message


def narrowing_problem(
    before: Features, after: Features, names: Sequence[str] = (), *, standardized: bool
) -> str | None:
    """Return which columns have fewer distinct values in the dtype of a run, or None.

    Columns are named that lose more than `LOST` of their distinct values. If there are more than
    `MOST_SORTED` numbers, evenly spaced rows are looked at.

    Args:
        before: (n, F) in float64; other dtypes lose nothing.
        after: the same rows and columns as clients train on them.
        names: (F,) of the columns, or none.
        standardized: whether the run standardizes already.
    """
    values = before.values if isinstance(before, CSR) else before
    if values is None or values.dtype != torch.float64 or not values.numel():
        return None
    merged: list[str] = []
    for column, (wide, narrow) in enumerate(_pairs_of_columns(before, after)):
        if not bool(narrow.any()):  # constant on training nodes, so that it was made 0
            continue
        order = wide.argsort()
        is_new, differs = wide[order].diff() != 0, narrow[order].diff() != 0
        had, has = int(is_new.sum()) + 1, int((is_new & differs).sum()) + 1
        if had - has > LOST * had:
            merged.append(f"column {_column(column, names)}: {had:,} become {has:,}")
    if not merged:
        return None
    more = f"; and {len(merged) - NAMED} more" if len(merged) > NAMED else ""
    how = "use --dtype float64" if standardized else "add --normalize standard or --dtype float64"
    return (
        f"distinct values of features become equal in the dtype of the run "
        f"({'; '.join(merged[:NAMED])}{more}), and models cannot tell them apart: {how}"
    )


def _pairs_of_columns(before: Features, after: Features) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values of each column before and after; of sparse features the stored ones."""
    if isinstance(before, CSR):
        assert isinstance(after, CSR)  # of the same places
        assert before.values is not None  # features always carry values
        assert after.values is not None
        column = before.indices.long()
        order, sizes = column.argsort(), column.bincount(minlength=before.num_cols).tolist()
        parts = before.values[order].split(sizes), after.values[order].split(sizes)
        yield from zip(*parts, strict=True)
        return
    assert not isinstance(after, CSR)
    step = -(-before.numel() // MOST_SORTED)
    for number in range(before.shape[1]):
        yield before[::step, number], after[::step, number]


def _sample(x: Features) -> tuple[int, Features]:
    """Return the number (at least 1) of evenly spaced rows, and them: `SAMPLE` at most."""
    rows = x.num_rows if isinstance(x, CSR) else len(x)
    step = -(-max(rows, 1) // SAMPLE)
    part = x.select_rows(torch.arange(0, rows, step)) if isinstance(x, CSR) else x[::step]
    return max(-(-rows // step), 1), part


def _column_sums(x: Features, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of a function of the values of each column, (F,) float64; it keeps 0."""
    if not isinstance(x, CSR):
        return of(x.double()).sum(dim=0)
    assert x.values is not None  # features always carry values
    zero = torch.zeros(x.num_cols, dtype=torch.float64)
    return zero.index_add_(0, x.indices.long(), of(x.values.double()))


def _column(number: int, names: Sequence[str]) -> str:
    return repr(names[number]) if names else str(number)


def with_features(graph: Graph, source: FeatureSource) -> Graph:
    """Return the graph with features from `source`; degrees are those of the graph."""
    if source == "given":
        return graph
    return replace(graph, x=made_features(source, graph.adj.degree), feature_names=())


def with_width(schema: Schema, source: FeatureSource, name: str) -> Schema:
    """Return the schema of the graph that `with_features` makes; raises as `check_given` does."""
    check_given(source, schema.num_features, name)
    return replace(schema, num_features=WIDTHS.get(source, schema.num_features))


def check_given(source: FeatureSource, num_features: int, name: str) -> None:
    """Raise `DataError` if `source` is `given` and there are no features."""
    if source == "given" and not num_features:
        raise DataError(
            f"expected a graph with features, got {name!r} without: choose features degree, "
            "constant or onehot-degree, such as --features degree"
        )
