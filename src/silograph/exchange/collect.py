"""Collecting: silos fetch the features of a share of their halo once, before training.

From then on a client trains and is judged on its own nodes, those it has fetched, and the edges
between the two; fetched nodes have no label there, and what connects them to each other stays
unknown. Features leave their silo. This is the "neighbor collection" of Zhang, Luo, Feng, Liu, Zhou
and Zheng, "Tackling the local bias in federated graph learning", 2021, section 4.2 (a share of .2).

C: clients. n: rows. k: fetched rows. F: features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Shared, Stacked, State, offsets, owners
from silograph.exchange.pull import BoundaryRows, Fetch, Slots
from silograph.exchange.shared_biases import SHARED, SHARED_MEAN, with_shared_sums
from silograph.federation.base import Federation, Sum
from silograph.federation.field_specs import (
    COUNT,
    NODES,
    SLOTS,
    TRAIN,
    FieldSpec,
    FieldSpecs,
    exactly,
    places,
)
from silograph.federation.fold import Fold
from silograph.federation.messages import Empty, specs_of, to_payload
from silograph.federation.ops import CallContext, Clients, op, steps_of, when
from silograph.federation.program import Steps
from silograph.federation.secure.fixed_point import sum_exactly
from silograph.graph.block.block import ClientBlock, dense_rows, extended, with_neighbors
from silograph.graph.column_statistics import (
    LARGEST,
    ClientSums,
    ColumnStatistics,
    deviation_of,
    mean_of,
)
from silograph.nn.fit import check_places, dtype_of

# --- Generated neighbors: rows that a client generates for neighbors that it cannot see ----------
#
# A client that has some trains and is judged on its own graph with them as further nodes: each has
# one edge, to the row that it was made for, no label, and no part in the split. They stay in the
# client's state.
#
# State: `generated/count` (n,) int32 of every own row; `generated/x` (k, F) in the order of the
# rows.
#
# C: clients. n: own rows. k: generated rows. F: features.


COUNTS, GENERATED = "generated/count", "generated/x"


def generated_specs(features: int, most: int) -> FieldSpecs:
    """Return what the state holds of generated rows, at most `most` for an own row."""
    count = FieldSpec(Ragged, (), torch.int32, rows=NODES, low=0, high=most)
    return {COUNTS: count, GENERATED: FieldSpec(Ragged, (features,))}


def with_generated(graph: ClientBlock, block: ClientBlock, state: State) -> ClientBlock:
    """Return a graph with the generated neighbors of the clients' own rows.

    Args:
        graph: their own rows, followed by the rows that they fetched.
        block: their own rows.
        state: of the clients.

    Raises:
        ProtocolError: rows that are not those that were counted.
    """
    count, rows = state[COUNTS], state[GENERATED]
    assert isinstance(count, Ragged)  # see `generated_specs`
    assert isinstance(rows, Ragged)
    cached = graph.memo.get("generated")
    if isinstance(cached, tuple) and cached[0] is rows.t:
        cached_graph: ClientBlock = cached[1]
        return cached_graph
    shape, dtype, counts = (len(rows.t), block.num_features), dtype_of(block), count.t.long()
    fits = len(counts) == len(block.row_key) and bool((counts >= 0).all())
    if not fits or not torch.equal(offsets(counts)[block.off], rows.off):
        raise ProtocolError("expected as many generated rows as were counted, got others")
    if rows.t.shape != shape or rows.t.dtype is not dtype:
        raise ProtocolError(
            f"expected generated features {dtype} {shape}, got {rows.t.dtype} {tuple(rows.t.shape)}"
        )
    if not len(rows.t):
        return graph
    shift = (graph.off - block.off)[:-1][block.client]
    own = torch.arange(len(counts), device=counts.device) + shift
    larger = with_neighbors(graph, torch.repeat_interleave(own, counts), rows.off, rows.t)
    graph.memo["generated"] = (rows.t, larger)
    return larger


SLOT, ROWS = "collected/slot", "collected/x"
LOCAL_GRAPH = (SLOT, ROWS, COUNTS, GENERATED, SHARED)  # what `local_graph` reads of the state


@dataclass(frozen=True)
class CollectForm:
    """What messages and state of fetched rows depend on.

    Attributes:
        features: F.
        share: of each client's slots, in [0, 1]; rounded to whole slots.
    """

    features: int
    share: float = 0.0


def features_spec(rows: str, *, fewer: bool = False) -> Callable[[CollectForm], FieldSpec]:
    """Return the spec of features of fetched rows."""
    return lambda form: FieldSpec(Ragged, (form.features,), rows=rows, fewer=fewer)


@dataclass(frozen=True)
class Collected:
    """State of a client: fetched rows.

    Attributes:
        slot: (k,) int32 as the client counts its slots, ascending.
        x: (k, F), once they have come.
    """

    PREFIX: ClassVar[str] = "collected/"
    slot: Annotated[Ragged, places(SLOTS)]
    x: Annotated[Ragged | None, features_spec(f"own/{SLOT}")] = None


@dataclass(frozen=True)
class ShareOfHalo:
    """Share of the own slots to fetch, () float64."""

    share: Annotated[Tensor, lambda form: exactly(form.share, torch.float64)]


@dataclass(frozen=True)
class RequestedRows(BoundaryRows, ShareOfHalo):
    """The boundary rows that others have chosen."""


@dataclass(frozen=True)
class SentFeatures:
    """Their features (k, F)."""

    rows: Annotated[Ragged, features_spec("inbox/row")]


@dataclass(frozen=True)
class FetchedFeatures(ShareOfHalo):
    """Features (k, F) of the slots that a client has chosen."""

    rows: Annotated[Ragged, features_spec(SLOTS, fewer=True)]


@op(Kind.HALO_KEYS)
def choose(clients: Clients, _state: Empty, request: ShareOfHalo) -> tuple[Collected, Slots]:
    """Draw slots, without replacement."""
    halo, share = clients.block.halo, request.share
    if not bool(((share >= 0) & (share <= 1)).all()):  # so not if it is NaN
        raise ProtocolError(f"expected a share in [0, 1], got {share.flatten()[:4].tolist()}")
    num_slots = (share * halo.off.diff()).round().long()
    client = owners(halo.off)
    word = clients.key.uniform(halo.key)[:, 0]
    order = torch.argsort(word, stable=True)
    order = order[torch.argsort(client[order], stable=True)]  # by client, then by draw
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - halo.off[client]
    slot = (rank < num_slots[client]).nonzero()[:, 0]
    own = (slot - halo.off[client[slot]]).int()
    chosen = Ragged(own, offsets(num_slots))
    return Collected(chosen), Slots(chosen)


@op(Kind.FEATURES)
def serve(clients: Clients, state: Empty, request: RequestedRows) -> tuple[Empty, SentFeatures]:
    """Send features of boundary rows."""
    rows = dense_rows(clients.block, request.rows(clients.block))
    return state, SentFeatures(Ragged(rows, request.row.off))


@op(Kind.FEATURES)
def keep(_clients: Clients, state: Collected, request: FetchedFeatures) -> tuple[Collected, Empty]:
    """Keep what was fetched."""
    return replace(state, x=request.rows), Empty()


NEIGHBORS = Fetch(choose, serve, keep)


def collect(fed: Federation, share: float, key: Key) -> None:
    """Let every client fetch the features of a share of its halo.

    Args:
        fed: the federation.
        share: of each client's slots, in [0, 1]; rounded to whole slots.
        key: key of the draw.
    """
    request = ShareOfHalo(torch.tensor(share, dtype=torch.float64))
    NEIGHBORS.carry(fed, request, CallContext(CollectForm(0, share), key))


def collect_steps(share: float, features: int, key: Key) -> Steps:
    """Return the calls of `collect`."""
    return NEIGHBORS.steps(CallContext(CollectForm(features, share), key))


def collected_specs(features: int) -> FieldSpecs:
    """Return what the state holds of fetched rows."""
    return specs_of(Collected, CollectForm(features))


def local_graph(block: ClientBlock, state: State) -> ClientBlock:
    """Return the graph that clients train and are scored on, with fetched and generated rows.

    Raises:
        ProtocolError: features that are not those of the slots, or of the generated neighbors.
    """
    if SHARED_MEAN in state:
        return with_shared_sums(block, state)
    graph = _with_fetched(block, state) if ROWS in state else block
    return with_generated(graph, block, state) if GENERATED in state else graph


def _with_fetched(block: ClientBlock, state: State) -> ClientBlock:
    """Return the block with the rows that clients have fetched."""
    slot, rows = state[SLOT], state[ROWS]
    assert isinstance(slot, Ragged)  # as `choose` left it
    cached = block.memo.get("local graph")
    if isinstance(cached, tuple) and cached[0] is rows.t:
        cached_graph: ClientBlock = cached[1]
        return cached_graph
    place = check_places(slot, block.halo.off, "halo slots")
    shape, dtype = (len(place), block.num_features), dtype_of(block)
    if rows.t.shape != shape or rows.t.dtype is not dtype:
        raise ProtocolError(
            f"expected features {dtype} {shape} of the slots that were fetched, got {rows.t.dtype} "
            f"{tuple(rows.t.shape)}"
        )
    larger = extended(block, place, slot.off, rows.t)
    block.memo["local graph"] = (rows.t, larger)
    return larger


# --- statistics ----------------------------------------------------------------------------------
# Federated sums at the start of a run: means and deviations over the training data of all clients.
#
# Each client first sends how many training rows it has and the sum of each column; the server
# divides. Then each client gets the mean of all and sends its sums of squared differences from
# it. Both are plain sums over clients, so that secure aggregation can mask them. A client without
# rows sends zeros. A node that several clients hold counts once at each client that trains on it.
# In the end each client gets mean and deviation, and keeps them in its state.
#
# To add a sum, such as the mean weight of edges:
#
# 1. put `ClientSums` under a new name into `ClientBlock.sums` where blocks are made (`silo_block`
#    for a silo, `clients_of` for a graph that is cut), from `sum_by_client`;
# 2. add its `SumSpec` to `sum_specs` in `silograph.experiment.resolve.data`;
# 3. use the result where blocks are completed: `complete_block` there;
# 4. write what was fitted into `Preprocessing`, so that predictions use it.
#
# Calls, checks, ledger, audit, policy (kind `statistics`) and resuming follow from that.
#
# C: clients. W: columns of a sum.


MEAN, DEVIATION = "statistics/mean/", "statistics/deviation/"  # begin the names of state fields
LARGEST_TOTAL, LARGEST_SQUARES = 1e110, 1e220  # of one client, by LARGEST and MOST_NODES


@dataclass(frozen=True)
class SumSpec:
    """Describes a named sum.

    Attributes:
        width: W, its columns.
        among: what its rows are a part of, by TRAIN, ROWS or EDGES of what a silo has reported.
        deviation: whether the deviation is asked for as well; else `deviation` of the result is 1.
    """

    width: int
    among: str = TRAIN
    deviation: bool = True


SumSpecs = Mapping[str, SumSpec]


def columns(
    field: str,
    form: type[Shared] | type[Stacked],
    low: float | None = None,
    high: float | None = None,
    *,
    deviating: bool = False,
) -> Callable[[SumSpecs], FieldSpecs]:
    """Return specs (W,) float64 for each sum, or for those whose deviation is asked for."""
    return lambda sums: {
        f"{field}/{name}": FieldSpec(form, (spec.width,), torch.float64, low=low, high=high)
        for name, spec in sums.items()
        if spec.deviation or not deviating
    }


def count_specs(sums: SumSpecs) -> FieldSpecs:
    """Return the specs of how many rows each sum has."""
    return {f"count/{name}": replace(COUNT, among=spec.among) for name, spec in sums.items()}


@dataclass(frozen=True)
class Sums:
    """Sums over training rows, by name.

    Attributes:
        count: (C,) int64 how many rows there are.
        total: (C, W) float64.
    """

    count: Annotated[Mapping[str, Stacked], count_specs]
    total: Annotated[
        Mapping[str, Stacked], columns("total", Stacked, -LARGEST_TOTAL, LARGEST_TOTAL)
    ]

    def find_problem(self, request: Empty, cfg: object) -> str | None:
        """Return which sums cannot be those of as many rows, or None."""
        del request, cfg
        if (problem := _finite_problem(self)) is not None:
            return problem
        for name, total in self.total.items():
            if bool((total.t.abs() > LARGEST * self.count[name].t.double()[:, None]).any()):
                return f"sums of {name} of at most {LARGEST:g} a row, got more"
        return None


@dataclass(frozen=True)
class Means:
    """Means (W,) of all clients, by name, of those whose deviation is asked for."""

    mean: Annotated[
        Mapping[str, Tensor], columns("mean", Shared, -LARGEST, LARGEST, deviating=True)
    ]


@dataclass(frozen=True)
class Squares:
    """Sums (C, W) of squared differences from these means."""

    squares: Annotated[
        Mapping[str, Stacked], columns("squares", Stacked, 0, LARGEST_SQUARES, deviating=True)
    ]

    def find_problem(self, request: Means, cfg: object) -> str | None:
        """Return which sums are NaN or infinite, which no bound refuses, or None."""
        del request, cfg
        return _finite_problem(self)


@dataclass(frozen=True)
class Result:
    """Means and deviations (W,) of all clients, by name."""

    mean: Annotated[Mapping[str, Tensor], columns("mean", Shared, -LARGEST, LARGEST)]
    deviation: Annotated[Mapping[str, Tensor], columns("deviation", Shared, 0, deviating=True)]


@dataclass(frozen=True)
class KeptResult:
    """State of a client: the same, (C, W)."""

    PREFIX: ClassVar[str] = "statistics/"
    mean: Annotated[Mapping[str, Stacked], columns("mean", Stacked)]
    deviation: Annotated[Mapping[str, Stacked], columns("deviation", Stacked, 0, deviating=True)]


def _finite_problem(reply: Sums | Squares) -> str | None:
    """Return the problem with sums that are NaN or infinite, or None."""
    parts = to_payload(reply).items()
    bad = next((name for name, part in parts if not bool(part.t.isfinite().all())), None)
    return None if bad is None else f"finite sums, got NaN or infinity in {bad!r}"


@op(Kind.STATISTICS)
def send_sums(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, Sums]:
    """Send counts and sums."""
    sums = [(name, own) for name, own in clients.block.sums.items() if own.is_sent]
    counts = {name: Stacked(own.count) for name, own in sums}
    return state, Sums(counts, {name: Stacked(own.total) for name, own in sums})


@op(Kind.STATISTICS)
def send_squares(clients: Clients, state: Empty, request: Means) -> tuple[Empty, Squares]:
    """Send squared differences."""
    sums, means = clients.block.sums, request.mean.items()
    return state, Squares({n: Stacked(sums[n].squares_around(mean)) for n, mean in means})


@op(Kind.STATISTICS)
def keep_statistics(clients: Clients, _state: Empty, request: Result) -> tuple[KeptResult, Empty]:
    """Keep the result."""

    def to_each_client(values: Mapping[str, Tensor]) -> dict[str, Stacked]:
        size = clients.block.num_clients
        return {name: Stacked(t.expand(size, *t.shape).clone()) for name, t in values.items()}

    return KeptResult(to_each_client(request.mean), to_each_client(request.deviation)), Empty()


def asks_deviation(specs: SumSpecs) -> bool:
    """Return whether the deviation of any sum is asked for."""
    return any(spec.deviation for spec in specs.values())


def fit_statistics(fed: Federation, specs: SumSpecs, key: Key) -> dict[str, ColumnStatistics]:
    """Compute means and deviations of the sums of all clients; return them by name, each (W,).

    Args:
        fed: the federation.
        specs: the sums, by name.
        key: of the calls; nothing is drawn.
    """
    context, deviating = CallContext(specs, key), [n for n, s in specs.items() if s.deviation]
    sums = context.call(fed, send_sums, Empty(), Sum())
    count = {name: sums[f"count/{name}"].t for name in specs}
    mean = {name: mean_of(count[name], sums[f"total/{name}"].t) for name in specs}
    deviation = {name: torch.ones_like(mean[name]) for name in specs}
    if asks_deviation(specs):
        around = Means({name: mean[name] for name in deviating})
        replies = context.call(fed, send_squares, around, Sum())
        for name in deviating:
            squares = replies[f"squares/{name}"].t
            deviation[name] = deviation_of(mean[name], count[name], squares)
    result = Result(mean, {name: deviation[name] for name in deviating})
    context.call(fed, keep_statistics, result)
    return {name: ColumnStatistics(mean[name].cpu(), deviation[name].cpu()) for name in specs}


def fit_from_sums(
    sums: Mapping[str, ClientSums], specs: SumSpecs, *, secure: bool = False
) -> dict[str, ColumnStatistics]:
    """Return the same as `fit_statistics`, bit for bit, where one process has all sums.

    Args:
        sums: of each client, by name.
        specs: of these.
        secure: whether the run has secure aggregation, whose sums are rounded once.
    """
    results, add_up = {}, _add_exactly if secure else _add_in_client_order
    for name, spec in specs.items():
        of_clients = sums[name]
        count = int(of_clients.count.sum())
        total_count = torch.tensor(count)
        mean = mean_of(total_count, add_up(of_clients.total))
        deviation = torch.ones_like(mean)
        if spec.deviation:
            squares = add_up(of_clients.squares_around(mean))
            deviation = deviation_of(mean, total_count, squares)
        results[name] = ColumnStatistics(mean, deviation)
    return results


def _add_exactly(slices: Tensor) -> Tensor:
    """Return the sum (W,) of (C, W) as secure sums have it."""
    return torch.from_numpy(sum_exactly(slices.cpu().numpy())).to(slices.device)


def _add_in_client_order(slices: Tensor) -> Tensor:
    """Return the sum (W,) of (C, W), added as the engine folds replies."""
    fold = Fold(Sum())
    fold.add({"sum": Stacked(slices)})
    return fold.result()["sum"].t


STATISTICS = send_sums, when(asks_deviation, send_squares), keep_statistics


def statistics_steps(specs: SumSpecs, key: Key) -> Steps:
    """Return the calls of `fit_statistics`."""
    return steps_of(STATISTICS, CallContext(specs, key))


def statistics_state(specs: SumSpecs) -> FieldSpecs:
    """Return what the state holds of the result."""
    return specs_of(KeptResult, specs)


def statistics_in(state: State) -> dict[str, ColumnStatistics]:
    """Return the statistics (W,) by name in the state of one client; empty before they came."""
    results = {}
    for field, mean in state.items():
        if field.startswith(MEAN):
            name = field.removeprefix(MEAN)
            mean_values = mean.t[0].cpu()
            deviation = state.get(DEVIATION + name)
            deviation_values = (
                torch.ones_like(mean_values) if deviation is None else deviation.t[0].cpu()
            )
            results[name] = ColumnStatistics(mean_values, deviation_values)
    return results
