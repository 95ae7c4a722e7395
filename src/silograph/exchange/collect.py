"""Collecting: silos fetch the features of a share of their halo once, before training.

From then on a client trains and is judged on its own nodes, those it has fetched, and the edges
between the two; fetched nodes have no label there, and what connects them to each other stays
unknown. Features leave their silo. This is the "neighbor collection" of Zhang, Luo, Feng, Liu, Zhou
and Zheng, "Tackling the local bias in federated graph learning", 2021, section 4.2 (a share of .2).

State: `collected/slot` (k,) int32 as the client counts its slots, ascending; `collected/x` (k, F).

C: clients. n: rows. k: fetched rows. F: features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State, offsets, owners
from silograph.exchange.pull import pull, pull_steps, rows_of_width
from silograph.federation.base import Federation, Sum
from silograph.federation.field_specs import (
    COUNT,
    NODES,
    SLOTS,
    TRAIN,
    FieldSpec,
    FieldSpecs,
    places,
)
from silograph.federation.fold import Fold
from silograph.federation.program import Call, Steps
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
    """Return a graph with the generated neighbors of the clients' own rows, if there are any.

    Args:
        graph: their own rows, followed by the rows that they fetched.
        block: their own rows.
        state: of the clients.

    Raises:
        ProtocolError: rows that are not those that were counted.
    """
    if GENERATED not in state:
        return graph
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
LOCAL_GRAPH = (SLOT, ROWS, COUNTS, GENERATED)  # what `local_graph` reads of the state


def collect(fed: Federation, share: float, key: Key) -> None:
    """Let every client fetch the features of a share of its halo.

    Args:
        fed: the federation.
        share: of each client's slots, in [0, 1]; rounded to whole slots.
        key: key of the draw.
    """
    inbox = {"share": Shared(torch.tensor(share, dtype=torch.float64))}
    pull(fed, choose, serve, keep, what=Kind.FEATURES, key=key, inbox=inbox)


def collect_steps(share: float, features: int, key: Key) -> Steps:
    """Return the calls of `collect`."""
    share_spec = {"share": FieldSpec(Shared, (), torch.float64, low=share, high=share)}
    what = Kind.FEATURES
    return pull_steps(
        choose, serve, keep, what=what, key=key, inbox=share_spec, form=rows_of_width(features)
    )


def collected_specs(features: int) -> FieldSpecs:
    """Return what the state holds of fetched rows."""
    return {SLOT: places(SLOTS), ROWS: FieldSpec(Ragged, (features,), rows=f"own/{SLOT}")}


def choose(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw slots, without replacement. In: `share`. Out: `slot` (k,) int32."""
    del cfg
    sizes, share = block.halo.off.diff(), inbox["share"].t
    if not bool(((share >= 0) & (share <= 1)).all()):  # so not if it is NaN
        raise ProtocolError(f"expected a share in [0, 1], got {share.flatten()[:4].tolist()}")
    num_slots = (share * sizes).round().long()
    client = owners(block.halo.off)
    word = key.uniform(block.halo.key)[:, 0]
    order = torch.argsort(word, stable=True)
    order = order[torch.argsort(client[order], stable=True)]  # by client, then by draw
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - block.halo.off[client]
    slot = (rank < num_slots[client]).nonzero()[:, 0]
    own = (slot - block.halo.off[client[slot]]).int()
    field = Ragged(own, offsets(num_slots))
    return {**state, SLOT: field}, {"slot": field}


def serve(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send features of boundary rows. In: `share`, `row` (k,). Out: `rows` (k, F)."""
    del cfg, key
    row = inbox["row"]
    assert isinstance(row, Ragged)  # from `pull`
    boundary_rows = block.halo.boundary[check_places(row, block.halo.boundary_off, "boundary rows")]
    return state, {"rows": Ragged(dense_rows(block, boundary_rows), row.off)}


def keep(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep what was fetched. In: `share`, `rows` (k, F). Out: nothing."""
    del cfg, block, key
    rows = inbox["rows"]
    assert isinstance(rows, Ragged)  # from `pull`
    return {**state, ROWS: rows}, {}


def local_graph(block: ClientBlock, state: State) -> ClientBlock:
    """Return the graph that clients train and are scored on, with fetched and generated rows.

    Raises:
        ProtocolError: features that are not those of the slots, or of the generated neighbors.
    """
    return with_generated(_with_fetched(block, state), block, state)


def _with_fetched(block: ClientBlock, state: State) -> ClientBlock:
    """Return the block with the rows that clients have fetched."""
    if ROWS not in state:
        return block
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


def fit_statistics(fed: Federation, specs: SumSpecs, key: Key) -> dict[str, ColumnStatistics]:
    """Compute means and deviations of the sums of all clients; return them by name, each (W,).

    Args:
        fed: the federation.
        specs: the sums, by name.
        key: of the calls; nothing is drawn.
    """
    what, deviating = Kind.STATISTICS, [name for name, spec in specs.items() if spec.deviation]
    sums = fed.call(send_sums, {}, what=what, key=key, reduce=Sum())
    count = {name: sums[f"count/{name}"].t for name in specs}
    mean = {name: mean_of(count[name], sums[f"total/{name}"].t) for name in specs}
    deviation = {name: torch.ones_like(mean[name]) for name in specs}
    if deviating:
        around = {f"mean/{name}": Shared(mean[name]) for name in deviating}
        replies = fed.call(send_squares, around, what=what, key=key, reduce=Sum())
        for name in deviating:
            squares = replies[f"squares/{name}"].t
            deviation[name] = deviation_of(mean[name], count[name], squares)
    inbox = {f"mean/{name}": Shared(t) for name, t in mean.items()}
    inbox |= {f"deviation/{name}": Shared(deviation[name]) for name in deviating}
    fed.call(keep_statistics, inbox, what=what, key=key)
    return {name: ColumnStatistics(mean[name].cpu(), deviation[name].cpu()) for name in specs}


def fit_from_sums(sums: Mapping[str, ClientSums], specs: SumSpecs) -> dict[str, ColumnStatistics]:
    """Return the same as `fit_statistics`, bit for bit, where one process has all sums."""
    results = {}
    for name, spec in specs.items():
        of_clients = sums[name]
        count = int(of_clients.count.sum())
        total_count = torch.tensor(count)
        mean = mean_of(total_count, _add_in_client_order(of_clients.total))
        deviation = torch.ones_like(mean)
        if spec.deviation:
            squares = _add_in_client_order(of_clients.squares_around(mean))
            deviation = deviation_of(mean, total_count, squares)
        results[name] = ColumnStatistics(mean, deviation)
    return results


def _add_in_client_order(slices: Tensor) -> Tensor:
    """Return the sum (W,) of (C, W), added as the engine folds replies."""
    fold = Fold(Sum())
    fold.add({"sum": Stacked(slices)})
    return fold.result()["sum"].t


def statistics_steps(specs: SumSpecs, key: Key) -> Steps:
    """Return the calls of `fit_statistics`."""
    what = Kind.STATISTICS
    sums: dict[str, FieldSpec] = {}
    squares: dict[str, FieldSpec] = {}
    result: dict[str, FieldSpec] = {}
    for name, spec in specs.items():
        shape, wide = (spec.width,), torch.float64
        sums[f"count/{name}"] = FieldSpec(
            Stacked, (), torch.int64, low=0, high=COUNT.high, among=spec.among
        )
        sums[f"total/{name}"] = FieldSpec(
            Stacked, shape, wide, low=-LARGEST_TOTAL, high=LARGEST_TOTAL
        )
        result[f"mean/{name}"] = FieldSpec(Shared, shape, wide, low=-LARGEST, high=LARGEST)
        if spec.deviation:
            squares[f"squares/{name}"] = FieldSpec(
                Stacked, shape, wide, low=0, high=LARGEST_SQUARES
            )
            result[f"deviation/{name}"] = FieldSpec(Shared, shape, wide, low=0)
    around = {n: f for n, f in result.items() if f"squares/{n.removeprefix('mean/')}" in squares}
    return (
        Call(send_sums, what, key, {}, sums, _sums_problem),
        Call(send_squares, what, key, around, squares, _finite_problem) if squares else (),
        Call(keep_statistics, what, key, result, {}),
    )


def statistics_state(specs: SumSpecs) -> FieldSpecs:
    """Return what the state holds of the result."""
    fields: dict[str, FieldSpec] = {}
    for name, spec in specs.items():
        fields[MEAN + name] = FieldSpec(Stacked, (spec.width,), torch.float64)
        if spec.deviation:
            fields[DEVIATION + name] = FieldSpec(Stacked, (spec.width,), torch.float64, low=0)
    return fields


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


def _finite_problem(inbox: Payload, reply: Payload) -> str | None:
    """Return the problem with sums that are NaN or infinite, which no bound refuses, or None."""
    del inbox
    bad = next((name for name, field in reply.items() if not bool(field.t.isfinite().all())), None)
    return None if bad is None else f"finite sums, got NaN or infinity in {bad!r}"


def _sums_problem(inbox: Payload, reply: Payload) -> str | None:
    """Return which sums cannot be those of as many rows, or None."""
    if (problem := _finite_problem(inbox, reply)) is not None:
        return problem
    for field in reply:
        if field.startswith("total/"):
            name = field.removeprefix("total/")
            count, total = reply[f"count/{name}"].t, reply[field].t
            if bool((total.abs() > LARGEST * count.double()[:, None]).any()):
                return f"sums of {name} of at most {LARGEST:g} a row, got more"
    return None


def send_sums(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send counts and sums. In: nothing. Out: by name `count` (C,) int64, `total` (C, W) f64."""
    del cfg, inbox, key
    reply: dict[str, Stacked] = {}
    for name, sums in block.sums.items():
        reply |= {f"count/{name}": Stacked(sums.count), f"total/{name}": Stacked(sums.total)}
    return state, reply


def send_squares(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send squared differences. In: by name `mean` (W,) f64. Out: `squares` (C, W) f64."""
    del cfg, key
    names = [field.removeprefix("mean/") for field in inbox]
    return state, {
        f"squares/{name}": Stacked(block.sums[name].squares_around(inbox[f"mean/{name}"].t))
        for name in names
    }


def keep_statistics(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep the result. In: by name `mean` (W,), `deviation` (W,) f64. Out: nothing."""
    del cfg, key
    clients = block.num_clients
    fields = {
        f"statistics/{name}": Stacked(field.t.expand(clients, *field.t.shape).clone())
        for name, field in inbox.items()
    }
    return {**state, **fields}, {}
