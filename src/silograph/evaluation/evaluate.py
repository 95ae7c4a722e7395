"""Scoring models at the clients: ops, and the server's calls of them.

All counts of a client come in one reply, histograms included, as their bins are fixed
(`silograph.task.counts`). The server adds histograms up over clients and keeps the sums.

A client keeps the logits of its judged rows as state; they never leave. `server/logits` are those
of the server's model, `own/logits` those of the client's own model, which training leaves there
(`remembered`).

`cfg` is whatever the method's ops are given; it has `model`, `backend` and `count_rules`.

C: clients. n: rows. j: judged rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Payload,
    Ragged,
    Stacked,
    State,
    below,
    offsets,
    under,
)
from silograph.core.row_minimum import NO_MINIMUM, RowMinimum
from silograph.evaluation.ranking import left_rankings, rank_server, ranked
from silograph.exchange.collect import local_graph
from silograph.exchange.passes import divisible
from silograph.exchange.passes import predict as predict_together
from silograph.exchange.sent_weights import arrived
from silograph.exchange.stages import end, logits_of
from silograph.federation.base import Federation, Op, positions_of
from silograph.federation.field_specs import JUDGED, FieldSpec, FieldSpecs
from silograph.graph.block.block import ClientBlock
from silograph.nn.any_model import AnyModel
from silograph.nn.backends import Backend
from silograph.nn.doors import dtype_of
from silograph.task.counts import (
    ALL_COUNTS,
    CountRules,
    JudgedRows,
    judged_mask,
    judged_rows,
    judges_of,
)
from silograph.task.least_count import counts_to_send, limited_sums, spread_bins
from silograph.task.registry import task_of

HISTOGRAM = ".histogram"  # ends the names of histograms
TABLES = "tables"  # begins the names of a model's tables, and of what the optimizer keeps of them


def no_logits(model: AnyModel, block: ClientBlock) -> dict[str, Ragged]:
    """Return the state of clients that have no model yet: for them all classes are alike."""
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    counts = block.count(judged_mask(block))
    zeros = block.adj.values.new_zeros(int(counts.sum()), model.outputs)
    empty = Ragged(zeros, offsets(counts))
    return {"server/logits": empty, "own/logits": empty}


def logits_specs(model: AnyModel) -> FieldSpecs:
    """Return what the state holds of judged rows."""
    logits = FieldSpec(Ragged, (model.outputs,), rows=JUDGED)
    return {"server/logits": logits, "own/logits": logits}


def judged_logits(logits: Tensor, block: ClientBlock) -> Ragged:
    """Return the judged rows of logits (n, K)."""
    judges = judges_of(block)
    return Ragged(logits.index_select(0, judges.rows), judges.off)


def remembered(logits: Tensor, block: ClientBlock) -> dict[str, Ragged]:
    """Return the state field that tells what clients' own models say of their rows (n, K)."""
    return {"own/logits": judged_logits(logits, block)}


def rows_left(cfg: Any, block: ClientBlock, state: State, whose: str) -> JudgedRows:
    """Return what the `server` or `own` model says of the judged rows, as a round has left it."""
    logits, compiled = state[f"{whose}/logits"].t, cfg.backend.compiled
    wanted, dtype = (len(judges_of(block).rows), cfg.model.outputs), dtype_of(block)
    if logits.shape != wanted or logits.dtype is not dtype:
        raise ProtocolError(
            f"expected {whose}/logits of shape {wanted} in {dtype}, got {tuple(logits.shape)} in "
            f"{logits.dtype}: this is the state of another model or silo"
        )
    return judged_rows(block, logits, block.client, block.num_clients, compiled=compiled)


def judge_server(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Score the server's model on own nodes, as it arrives to be trained.

    In: `weights/*`, as training calls have them. Out: see `Task.tally`.
    """
    del key
    graph, tables = local_graph(block, state), below(TABLES, state)
    weights = under("weights", inbox if cfg.sent.plain else arrived(cfg, block, state, inbox))
    logits = cfg.backend.predict(cfg.model, weights, graph, tables)
    new = {**state, "server/logits": judged_logits(logits, graph)}
    new |= ranked(cfg, "server", weights, graph, tables)
    return new, _reply_with_counts(cfg, rows_left(cfg, block, new, "server"))


def judge_own(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Judge each client's own model on its own nodes. In: nothing. Out: see `Task.tally`."""
    del inbox, key
    return state, _reply_with_counts(cfg, rows_left(cfg, block, state, "own"))


def judge_exchanged(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Judge what a pass over all silos has left. In: nothing. Out: see `Task.tally`.

    The server's model is every client's own.
    """
    del inbox, key
    logits = judged_logits(logits_of(cfg.model, state), block)
    new = {**end(state), "server/logits": logits, "own/logits": logits}
    return new, _reply_with_counts(cfg, rows_left(cfg, block, new, "server"))


def judge_left(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Judge what a pass has left of the server's model. In: nothing. Out: see `Task.tally`."""
    del inbox, key
    new = {**end(state), "server/logits": judged_logits(logits_of(cfg.model, state), block)}
    return new, _reply_with_counts(cfg, rows_left(cfg, block, new, "server"))


def _reply_with_counts(cfg: Any, rows: JudgedRows) -> dict[str, Stacked]:
    """Return the reply that reports the counts of a model."""
    return {name: Stacked(t) for name, t in tally_by_client(rows, cfg.count_rules).items()}


def tally_by_client(rows: JudgedRows, rules: CountRules) -> dict[str, Tensor]:
    """Return what clients report of judged rows, each (C, ...); see `counts_to_send`."""
    counts = task_of(rows.task).tally(rows, val_histogram=rules.val_histogram)
    if rules.merges:
        counts |= limited_sums(rows)
    return counts_to_send(counts, rows.task, rules) if rules.withholds else counts


def call_for_counts(
    fed: Federation, judge: Op, inbox: Payload, key: Key, rules: CountRules
) -> dict[str, Tensor]:
    """Return the counts of all clients (C, ...), histograms (K, 2, B) added up.

    `rules`: what the replies hold.
    """
    reply = fed.call(judge, inbox, what=Kind.EVALUATION, key=key)
    return sum_histograms({name: field.t for name, field in reply.items()}, rules)


def sum_histograms(
    counts: Mapping[str, Tensor], rules: CountRules = ALL_COUNTS
) -> dict[str, Tensor]:
    """Return counts by client (C, ...) with histograms summed over clients, (K, 2, B).

    Beside each is `PART.has_histogram` (C,) bool, which clients have sent one. Sums are int64; they
    are float64 where bins may have been merged, as then they are spread out (`spread_bins`).

    Args:
        counts: of the clients.
        rules: that they were sent by.
    """
    summed = dict(counts)
    for name, bins in counts.items():
        if name.endswith(HISTOGRAM):
            part = name.removesuffix(HISTOGRAM)
            summed[name] = spread_bins(bins, rules.min_count) if rules.merges else bins.sum(0)
            summed[f"{part}.has_histogram"] = bins.flatten(1).any(dim=1)
    return summed


def server_counts(
    fed: Federation, inbox: Payload, key: Key, rules: CountRules
) -> dict[str, Tensor]:
    """Return all clients' counts of the server's model, histograms (K, 2, B) summed.

    `inbox`: its weights as they travel, see `silograph.exchange.sent_weights.outgoing`. `rules`:
    what the replies hold.
    """
    return call_for_counts(fed, judge_server, inbox, key, rules)


def received_counts(
    fed: Federation,
    received: Mapping[str, Tensor],
    others: Sequence[str],
    inbox: Payload,
    key: Key,
    rules: CountRules,
    *,
    ranks: bool,
) -> dict[str, Tensor]:
    """Return what `server_counts` does, where some clients have scored the model on receipt.

    Args:
        fed: the engine.
        received: counts (C, ...) of who has scored it, as they came with what they trained.
        others: who has not, and is sent the model.
        inbox: its weights as they travel to these.
        key: of the calls.
        rules: what the replies hold.
        ranks: whether clients rank, too.
    """
    counts = dict(received)
    if others:
        what, places = Kind.EVALUATION, positions_of(fed.ids, others)
        reply = {**fed.call(judge_server, inbox, what=what, key=key, to=others)}
        if ranks:
            reply |= fed.call(rank_server, {}, what=what, key=key, to=others)
        for name, field in reply.items():
            at = places.to(field.t.device)
            counts[name] = counts[name].to(field.t.device).index_copy(0, at, field.t)
    return sum_histograms(counts, rules)


def exchanged_counts(
    fed: Federation,
    model: AnyModel,
    weights: Mapping[str, Tensor],
    key: Key,
    rules: CountRules,
    behind: RowMinimum = NO_MINIMUM,
) -> dict[str, Tensor]:
    """The same with sums over the neighbors in all silos, those with enough behind them."""
    predict_together(fed, divisible(model), weights, key, behind=behind)
    return call_for_counts(fed, judge_exchanged, {}, key, rules)


def own_counts(fed: Federation, key: Key, rules: CountRules) -> dict[str, Tensor]:
    """Return all clients' counts of their own models, histograms (K, 2, B) summed."""
    return call_for_counts(fed, judge_own, {}, key, rules)


def rows_here(
    backend: Backend,
    model: AnyModel,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    group: Tensor,
    groups: int,
) -> JudgedRows:
    """Return what a model says of the judged rows of a block in this process, by `group` (n,)."""
    logits = judged_logits(backend.predict(model, weights, block), block).t
    return judged_rows(block, logits, group, groups, compiled=backend.compiled)


def counts_of_logits(cfg: Any, block: ClientBlock, logits: Ragged) -> dict[str, Tensor]:
    """Return what clients report of logits of their judged rows, by client of the block."""
    rows = judged_rows(
        block, logits.t, block.client, block.num_clients, compiled=cfg.backend.compiled
    )
    return tally_by_client(rows, cfg.count_rules)


def counts_left(
    cfg: Any, block: ClientBlock, state: State, whose: Literal["server", "own"]
) -> dict[str, Tensor]:
    """Return the counts of `server` or `own` from what a round has left in a state."""
    rows = rows_left(cfg, block, state, whose)
    counts = counts_of(rows, val_histogram=cfg.count_rules.val_histogram)
    return counts | left_rankings(state, block, whose)


def counts_of(rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
    """Return the counts of rows in this process, all of them, histograms (K, 2, B) summed.

    `val_histogram`: whether validation nodes have a histogram, too.
    """
    return sum_histograms(task_of(rows.task).tally(rows, val_histogram=val_histogram))
