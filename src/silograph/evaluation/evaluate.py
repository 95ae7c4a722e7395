"""Judging models at the clients: ops, and the server's two steps through them.

A client keeps the logits of its judged rows as state; they never leave. `server/logits` are those
of the server's model, `own/logits` those of the client's own model, which training leaves there
(`remembered`).

`cfg` is whatever the method's ops are given; it has `model` and `backend`.

C: clients. n: rows. j: judged rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    below,
    named,
    offsets,
    under,
)
from silograph.core.row_minimum import NO_MINIMUM, RowMinimum
from silograph.evaluation.ranking import left_rankings, ranked
from silograph.exchange.collect import local_graph
from silograph.exchange.passes import divisible
from silograph.exchange.passes import predict as predict_together
from silograph.exchange.stages import end, logits_of
from silograph.federation.base import Federation, Op, Sum, positions_of
from silograph.federation.field_specs import JUDGED, FieldSpec, FieldSpecs
from silograph.graph.block.block import ClientBlock
from silograph.nn.any_model import AnyModel
from silograph.nn.backends import Backend
from silograph.nn.doors import dtype_of
from silograph.task.counts import (
    SCORE_SUMS,
    JudgedRows,
    histogram,
    judged_mask,
    judged_rows,
    judges_of,
    score_scale,
)
from silograph.task.registry import task_of

HISTOGRAM, VAL_HISTOGRAM = "test.histogram", "val.histogram"
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
    """Judge the server's model on own nodes. In: `weights/*`. Out: see `Task.tally`."""
    del key
    graph = local_graph(block, state)
    weights, tables = under("weights", inbox), below(TABLES, state)
    logits = cfg.backend.predict(cfg.model, weights, graph, tables)
    new = {**state, "server/logits": judged_logits(logits, graph)}
    new |= ranked(cfg, "server", weights, graph, tables)
    return new, _tallied(rows_left(cfg, block, new, "server"))


def judge_own(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Judge each client's own model on its own nodes. In: nothing. Out: see `Task.tally`."""
    del inbox, key
    return state, _tallied(rows_left(cfg, block, state, "own"))


def judge_exchanged(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Judge what a pass over all silos has left. In: nothing. Out: see `Task.tally`.

    The server's model is every client's own.
    """
    del inbox, key
    logits = judged_logits(logits_of(cfg.model, state), block)
    new = {**end(state), "server/logits": logits, "own/logits": logits}
    return new, _tallied(rows_left(cfg, block, new, "server"))


def judge_left(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Judge what a pass has left of the server's model. In: nothing. Out: see `Task.tally`."""
    del inbox, key
    new = {**end(state), "server/logits": judged_logits(logits_of(cfg.model, state), block)}
    return new, _tallied(rows_left(cfg, block, new, "server"))


def bin_server(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Sort the scores just judged into bins. In: `mean`, `deviation` (K,). Out: the histogram."""
    del key
    counts = histogram(
        rows_left(cfg, block, state, "server"), inbox["mean"].t, inbox["deviation"].t
    )
    return state, {HISTOGRAM: Stacked(counts)}


def bin_own(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """The same for the clients' own models. In: `mean`, `deviation` (K,). Out: the histogram."""
    del key
    counts = histogram(rows_left(cfg, block, state, "own"), inbox["mean"].t, inbox["deviation"].t)
    return state, {HISTOGRAM: Stacked(counts)}


def bin_server_val(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Sort scores of validation nodes into bins. In: `mean`, `deviation` (K,). Out: histogram."""
    del key
    rows, (mean, deviation) = rows_left(cfg, block, state, "server"), _scale(inbox)
    return state, {VAL_HISTOGRAM: Stacked(val_histogram(rows, mean, deviation))}


def bin_own_val(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """The same for the clients' own models. In: `mean`, `deviation` (K,). Out: histogram."""
    del key
    rows, (mean, deviation) = rows_left(cfg, block, state, "own"), _scale(inbox)
    return state, {VAL_HISTOGRAM: Stacked(val_histogram(rows, mean, deviation))}


def _scale(inbox: Payload) -> tuple[Tensor, Tensor]:
    return inbox["mean"].t, inbox["deviation"].t


def val_histogram(rows: JudgedRows, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return what `histogram` does, of validation nodes."""
    return histogram(replace(rows, val=~rows.val), mean, deviation)


def _tallied(rows: JudgedRows) -> dict[str, Stacked]:
    fields = task_of(rows.task).tally(rows)
    return {name: Stacked(t) for name, t in fields.items()}


def tallied_counts(
    fed: Federation, judge: Op, sort: Op, inbox: Payload, key: Key
) -> dict[str, Tensor]:
    """Ask all clients for counts, then for histograms on the scale that the counts give.

    Counts of tasks without histograms have no sums to work out a scale from.
    """
    reply = fed.call(judge, inbox, what=Kind.EVALUATION, key=key)
    return _with_histograms(fed, sort, {name: field.t for name, field in reply.items()}, key)


def _with_histograms(
    fed: Federation, sort: Op, fields: dict[str, Tensor], key: Key
) -> dict[str, Tensor]:
    """Ask all clients for histograms on the scale that their counts give, if the task has any."""
    if SCORE_SUMS[0] not in fields:
        return fields
    return _with_bins(fed, sort, fields, score_scale(fields), HISTOGRAM, key)


def _with_bins(
    fed: Federation,
    sort: Op,
    fields: Mapping[str, Tensor],
    scale: tuple[Tensor, Tensor],
    name: str,
    key: Key,
) -> dict[str, Tensor]:
    inbox = {"mean": Shared(scale[0]), "deviation": Shared(scale[1])}
    bins = fed.call(sort, inbox, what=Kind.EVALUATION, key=key, reduce=Sum())
    return {**fields, name: bins[name].t}


def with_validation(
    fed: Federation, fields: Mapping[str, Tensor], whose: Literal["server", "own"], key: Key
) -> dict[str, Tensor]:
    """Return counts that have just been asked for, with histograms of validation nodes.

    Runs that pick their round by the AUC ask for them. The scale is that of the counts, which is
    fine where scores are many; it needs no labels.
    """
    sort = bin_server_val if whose == "server" else bin_own_val
    return _with_bins(fed, sort, fields, _val_scale(fields), VAL_HISTOGRAM, key)


def _val_scale(fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the scale of test scores; a plain one for classes that no test node is scored for."""
    mean, deviation = score_scale(fields)
    none = fields["test.known"].sum(0) == 0
    return mean.where(~none, 0.0), deviation.where(~none, 1.0)


def server_counts(fed: Federation, weights: Mapping[str, Tensor], key: Key) -> dict[str, Tensor]:
    """Return all clients' counts of the server's model, histograms (K, 2, B) summed."""
    inbox = {name: Shared(w) for name, w in named("weights", weights).items()}
    return tallied_counts(fed, judge_server, bin_server, inbox, key)


def received_counts(
    fed: Federation,
    weights: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    answered: Tensor,
    key: Key,
) -> dict[str, Tensor]:
    """Return what `server_counts` does, where some clients have scored the model on receipt.

    Args:
        fed: the engine.
        weights: the server's model, which the others are sent.
        received: counts (C, ...) of who has scored it, as they came with what they trained.
        answered: (C,) bool, who has.
        key: of the calls.
    """
    there = zip(fed.ids, answered.tolist(), strict=True)
    others = [name for name, has in there if not has and name not in fed.away]
    counts = dict(received)
    if others:
        inbox = {name: Shared(w) for name, w in named("weights", weights).items()}
        reply = fed.call(judge_server, inbox, what=Kind.EVALUATION, key=key, to=others)
        places = positions_of(fed.ids, others)
        for name, field in reply.items():
            at = places.to(field.t.device)
            counts[name] = counts[name].to(field.t.device).index_copy(0, at, field.t)
    return _with_histograms(fed, bin_server, counts, key)


def exchanged_counts(
    fed: Federation,
    model: AnyModel,
    weights: Mapping[str, Tensor],
    key: Key,
    behind: RowMinimum = NO_MINIMUM,
) -> dict[str, Tensor]:
    """The same with sums over the neighbors in all silos, those with enough behind them."""
    predict_together(fed, divisible(model), weights, key, behind=behind)
    return tallied_counts(fed, judge_exchanged, bin_server, {}, key)


def own_counts(fed: Federation, key: Key) -> dict[str, Tensor]:
    """Return all clients' counts of their own models, histograms (K, 2, B) summed."""
    return tallied_counts(fed, judge_own, bin_own, {}, key)


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
    """Return what `Task.tally` gives of logits of the judged rows, by client of the block."""
    rows = judged_rows(
        block, logits.t, block.client, block.num_clients, compiled=cfg.backend.compiled
    )
    return task_of(rows.task).tally(rows)


def counts_left(
    cfg: Any,
    block: ClientBlock,
    state: State,
    whose: Literal["server", "own"],
    *,
    validation: bool = False,
) -> dict[str, Tensor]:
    """Return the counts of `server` or `own` from what a round has left in a state."""
    counts = counts_of(rows_left(cfg, block, state, whose), validation=validation)
    return counts | left_rankings(state, block, whose)


def counts_of(rows: JudgedRows, *, validation: bool = False) -> dict[str, Tensor]:
    """Return the counts of rows in this process, with the histograms of tasks that have them.

    `validation`: whether with those of validation nodes, too.
    """
    fields = task_of(rows.task).tally(rows)
    if SCORE_SUMS[0] not in fields:
        return fields
    found = {**fields, HISTOGRAM: histogram(rows, *score_scale(fields)).sum(0)}
    if validation:
        found[VAL_HISTOGRAM] = val_histogram(rows, *_val_scale(fields)).sum(0)
    return found
