"""What silos' folders hold, per silo and together, and what looks wrong, before anything trains.

n: nodes of a silo. F: features. K: classes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.text import count_of, printable
from silograph.graph.graph import MISSING, Graph
from silograph.graph.silos.data import DIRECTIONS, Silo, one_sided_edges
from silograph.graph.silos.prepare import ONE_SIDED

LEAST_ROWS = 20  # of a silo, or of a class, for a statement about a column
DRIFT_WARNING = 0.5  # distance of distributions from which it is named
LEAK = 0.99  # area under the curve of a single column
HISTOGRAM_BINS = 24  # of a column's histogram
# Ends of columns that `silograph prepare` adds for words and gaps that need not occur.
ADDED_ENDINGS = (" other", " missing")


@dataclass(frozen=True)
class SiloSummary:
    """What one silo holds.

    Attributes:
        silo: its name.
        nodes: n.
        labeled: nodes with a label.
        classes: share of each class among them, by its name; of label sets, of each label.
        edges: among own nodes.
        cross_edges: to nodes of other silos.
        mean_degree: edges of a node, those to other silos included.
        isolated: nodes without any edge.
        degrees: nodes with 0, with 1, with 2 to 3, with 4 to 7 edges, and so on.
        missing: cells without a value in the raw tables, by feature, where they are known.
    """

    silo: str
    nodes: int
    labeled: int
    classes: Mapping[str, float]
    edges: int
    cross_edges: int
    mean_degree: float
    isolated: int
    degrees: tuple[int, ...]
    missing: Mapping[str, int]


@dataclass(frozen=True)
class RatingSummary:
    """What one silo with ratings holds.

    Attributes:
        silo: its name.
        users: with at least one rating or neighbor.
        items: likewise.
        ratings: their number.
        mean: of them.
        shared_users: users whose key another silo has, too.
        shared_items: items likewise.
    """

    silo: str
    users: int
    items: int
    ratings: int
    mean: float
    shared_users: int
    shared_items: int


@dataclass(frozen=True)
class ColumnSummary:
    """What a column of features, or the ratings, hold over all silos.

    Attributes:
        column: its name, or its number.
        low: least value.
        mean: over all nodes.
        high: largest value.
        drift: largest distance of two silos' distributions (Kolmogorov and Smirnov's: the largest
            difference of their cumulative shares), 0 to 1; 0 for one silo.
        between: these two silos.
        histogram: numbers of values of each silo in bins of one width from `low` to `high`.
    """

    column: str
    low: float
    mean: float
    high: float
    drift: float
    between: tuple[str, ...]
    histogram: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Inspection:
    """What a folder of silos holds.

    Attributes:
        silos: silo by silo; of ratings `RatingSummary`.
        columns: features, those that drift most first; none if they are sparse. For ratings they
            are the one column.
        warnings: what looks wrong, a line each.
    """

    silos: tuple[SiloSummary, ...] | tuple[RatingSummary, ...]
    columns: tuple[ColumnSummary, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def inspect_silos(members: Sequence[Silo]) -> Inspection:
    """Look at the data of one silo or of several in one process.

    Columns of sparse features are not looked at one by one.
    """
    if members[0].scale is not None:
        rated = [silo.y[silo.graph.labeled].double().flatten().numpy() for silo in members]
        column = _column("rating", rated, [silo.name for silo in members])
        return Inspection(
            tuple(_rating_summaries(members)), (column,), tuple(_drift_warnings(column))
        )
    summaries = tuple(_summary(silo) for silo in members)
    dense = [silo.x.numpy() for silo in members if isinstance(silo.x, Tensor)]
    columns: list[ColumnSummary] = []
    warnings = [*_shared_warnings(summaries), *_edge_warnings(members)]
    if len(dense) == len(members) and dense[0].shape[1]:
        names = [printable(n) for n in members[0].feature_names] or [
            str(number) for number in range(dense[0].shape[1])
        ]
        for number, name in enumerate(names):
            parts = [x[:, number].astype(np.float64) for x in dense]
            columns.append(_column(name, parts, [silo.name for silo in members]))
            warnings += _column_warnings(columns[-1], parts, members)
    columns.sort(key=lambda column: -column.drift)
    return Inspection(summaries, tuple(columns), tuple(warnings))


def _summary(silo: Silo) -> SiloSummary:
    graph = silo.graph
    degree = graph.adj.degree + torch.bincount(silo.cross.row, minlength=graph.num_nodes)
    return SiloSummary(
        silo=silo.name,
        nodes=graph.num_nodes,
        labeled=int(graph.labeled.sum()),
        classes=_shares(graph),
        edges=graph.num_edges,
        cross_edges=len(silo.cross.row),
        mean_degree=float(degree.double().mean()) if graph.num_nodes else 0.0,
        isolated=int((degree == 0).sum()),
        # 2^k to 2^(k + 1) - 1 edges are one group.
        degrees=tuple(np.bincount(np.frexp(degree.numpy())[1]).tolist()),
        missing=silo.missing,
    )


def _rating_summaries(members: Sequence[Silo]) -> Iterator[RatingSummary]:
    """Yield what silos with ratings hold."""
    counts: list[Counter[str]] = [Counter(), Counter()]
    keys: list[list[set[str]]] = []
    for silo in members:
        assert isinstance(silo.x, Tensor)  # the kinds of nodes: user, item
        sides = [np.array(silo.keys)[(silo.x[:, side] > 0).numpy()] for side in (0, 1)]
        keys.append([set(side.tolist()) for side in sides])
        for count, side in zip(counts, keys[-1], strict=True):
            count.update(side)
    for silo, (users, items) in zip(members, keys, strict=True):
        rated = silo.y[silo.graph.labeled].double()
        yield RatingSummary(
            silo.name,
            len(users),
            len(items),
            len(rated),
            float(rated.mean()) if len(rated) else 0.0,
            sum(counts[0][user] > 1 for user in users),
            sum(counts[1][item] > 1 for item in items),
        )


def _shares(graph: Graph) -> dict[str, float]:
    """Return the share of each class among labeled nodes; of label sets, of each label."""
    names = graph.class_names or [str(number) for number in range(graph.num_classes)]
    if graph.has_numbers or not bool(graph.labeled.any()):
        return {}
    if graph.task == "multilabel":
        known = (graph.y != MISSING).sum(dim=0).clamp(min=1)
        shares = (graph.y == 1).sum(dim=0) / known
    else:
        counts = torch.bincount(graph.y[graph.labeled], minlength=graph.num_classes)
        shares = counts / counts.sum()
    return dict(zip(names, shares.tolist(), strict=True))


def _column(name: str, parts: Sequence[np.ndarray], ids: Sequence[str]) -> ColumnSummary:
    values = np.concatenate(parts)
    distances = {
        (a, b): _distance(parts[a], parts[b])
        for a, b in combinations(range(len(parts)), 2)
        if min(len(parts[a]), len(parts[b])) >= LEAST_ROWS
    }
    far = max(distances, key=lambda pair: distances[pair], default=None)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    bins = np.linspace(low, high, 1 + min(HISTOGRAM_BINS, max(1, len(np.unique(values)))))
    return ColumnSummary(
        name,
        low,
        float(values.mean()) if len(values) else 0.0,
        high,
        0.0 if far is None else distances[far],
        () if far is None else (ids[far[0]], ids[far[1]]),
        tuple(tuple(np.histogram(part, bins)[0].tolist()) for part in parts),
    )


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference of the cumulative shares of two samples."""
    values = np.concatenate([one, other])
    cumulative = [
        np.searchsorted(np.sort(part), values, side="right") / len(part) for part in (one, other)
    ]
    return float(np.abs(cumulative[0] - cumulative[1]).max())


def _column_warnings(
    column: ColumnSummary, parts: Sequence[np.ndarray], members: Sequence[Silo]
) -> Iterator[str]:
    """Yield what looks wrong about a column: parts (n,) of each silo."""
    name, values = column.column, np.concatenate(parts)
    whole = len(values) >= LEAST_ROWS and bool((values == np.round(values)).all())
    is_prepared = any(silo.missing for silo in members)
    is_added = is_prepared and name.endswith(ADDED_ENDINGS) and column.low == 0
    if column.low == column.high:
        if not is_added:
            yield f"{name} has one value everywhere ({column.low:g}): drop it"
    elif whole and any(len(p) >= LEAST_ROWS and (np.diff(p) == 1).all() for p in parts):
        yield f"{name} numbers the rows of a silo: drop it"
    elif whole and len(np.unique(values)) == len(values):
        yield f"{name} has another whole number at each node, as a key has: drop it"
    for number, silo in enumerate(members):
        if len(np.unique(parts[number])) == 1 and column.low != column.high and not is_added:
            yield f"{name} has one value in {silo.name} ({parts[number][0]:g}), not in others"
    yield from _drift_warnings(column)
    for label, area in _areas(parts, members):
        if max(area, 1 - area) >= LEAK:
            yield (
                f"{name} alone tells who is {label!r} (area {max(area, 1 - area):.3f}): "
                "is it known before the label?"
            )


def _drift_warnings(column: ColumnSummary) -> Iterator[str]:
    if column.drift > DRIFT_WARNING:
        a, b = column.between
        yield (
            f"{column.column} differs between {a} and {b} (distance {column.drift:.2f} of 1): "
            "another unit or coding?"
        )


def _areas(parts: Sequence[np.ndarray], members: Sequence[Silo]) -> Iterator[tuple[str, float]]:
    """Yield the area under the curve of a column for each class with enough nodes in and out."""
    from scipy.stats import rankdata

    graphs = [silo.graph for silo in members]
    if graphs[0].has_numbers:
        return
    names = graphs[0].class_names or [str(k) for k in range(graphs[0].num_classes)]
    for number, label in enumerate(names):
        if graphs[0].task == "multilabel":
            y = torch.cat([graph.y[:, number] for graph in graphs]).numpy()
            known, hit = y != MISSING, y == 1
        else:
            y = torch.cat([graph.y for graph in graphs]).numpy()
            known, hit = y != MISSING, y == number
        ranks, hit = rankdata(np.concatenate(parts)[known]), hit[known]
        inside, outside = int(hit.sum()), int((~hit).sum())
        if min(inside, outside) >= LEAST_ROWS:
            area = (ranks[hit].sum() - inside * (inside + 1) / 2) / (inside * outside)
            yield label, float(area)


def _edge_warnings(members: Sequence[Silo]) -> Iterator[str]:
    """Yield what looks wrong about edges between silos."""
    edges = {}
    for silo in members:
        own, remote, cross = silo.keys, silo.cross.keys, silo.cross
        directions: list[tuple[str, ...]] = [("",)] * len(cross.row)
        if cross.directed_weight is not None:
            is_listed = (~cross.directed_weight.isnan()).tolist()
            directions = [tuple(compress(DIRECTIONS, each)) for each in is_listed]
        ends = zip(cross.row.tolist(), cross.slot.tolist(), directions, strict=True)
        edges[silo.name] = [
            (own[row], cross.silo[slot], remote[slot], direction)
            for row, slot, listed_directions in ends
            for direction in listed_directions
        ]
    for (one, other), number in sorted(one_sided_edges(edges).items()):
        listed = f"{one} lists {count_of(number, 'edge')} to {other}"
        yield f"{listed} that {other} does not list: {ONE_SIDED}"


def _shared_warnings(silos: Sequence[SiloSummary]) -> Iterator[str]:
    """Yield what looks wrong about labels and edges."""
    for silo in silos:
        if silo.labeled == 0 and silo.classes == {} and silo.nodes:
            yield f"{silo.silo} has no label: it is not trained on or scored"
        absent = [name for name, share in silo.classes.items() if share == 0]
        if absent:
            yield f"{silo.silo} has no {', '.join(map(repr, map(printable, absent)))}"
        if silo.isolated > silo.nodes / 2:
            yield f"{silo.silo}: {count_of(silo.isolated, 'node')} of {silo.nodes} without an edge"
