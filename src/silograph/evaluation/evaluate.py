"""Scoring models at the clients: ops, and the server's calls of them.

All counts of a client come in one reply, histograms included, as their bins are fixed
(`silograph.task.counts`). The server adds histograms up over clients and keeps the sums.

A client keeps the logits of its judged rows as state; they never leave. `server/logits` are those
of the server's model, `own/logits` those of the client's own model, which training leaves there
(`remembered`).

`cfg` is whatever the method's ops are given; it has `model`, `backend` and `count_rules`.

C: clients. n: rows. j: judged rows.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Payload,
    Ragged,
    Stacked,
    State,
    fields_under,
    tensors_under,
)
from silograph.core.setting_values import NO_MINIMUM, RowMinimum
from silograph.exchange.collect import local_graph
from silograph.exchange.passes import divisible, end, logits_of, predict_steps
from silograph.exchange.passes import predict as predict_together
from silograph.exchange.sent_weights import decode_weights
from silograph.federation.base import Federation, Op, Sum, positions_of
from silograph.federation.field_specs import JUDGED, TEST, VAL, FieldSpec, FieldSpecs
from silograph.federation.program import Call, Maybe, Steps
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import LabelForm
from silograph.nn.backends import Backend
from silograph.nn.conv import Messages
from silograph.nn.fit import check_weights, dtype_of
from silograph.nn.forward import AnyModel, Pass, forward_pass
from silograph.task.base import CountSpec
from silograph.task.counts import (
    ALL_COUNTS,
    CountRules,
    JudgedRows,
    judged_rows,
    judges_of,
)
from silograph.task.least_count import (
    MERGED,
    count_problem,
    counts_to_send,
    limited_sums,
    specs_to_send,
    spread_bins,
)
from silograph.task.rating_value import FIELDS, RankingModel, ranking_counts, ranking_specs
from silograph.task.registry import task_of

# --- ranking -------------------------------------------------------------------------------------
# Scores of rankings: clients rank their items where they score a model, and send three sums.
#
# The counts of a ranking stay in the state until the server asks, as logits of scored rows do, so
# no model is sent twice. Users, items and ratings never leave; see `silograph.task.rating_value`.


Whose = Literal["server", "own"]


def no_ranking(cfg: Any, block: ClientBlock) -> dict[str, Stacked]:
    """Return the initial state of rankings, zeros; empty if the run has no rankings."""
    if cfg.relevant is None:
        return {}
    zero = torch.zeros(block.num_clients, len(FIELDS), dtype=torch.float64, device=block.y.device)
    return {f"{model_name}/ranking": Stacked(zero) for model_name in ("server", "own")}


def rankings_specs(cfg: Any) -> FieldSpecs:
    """Return the specs of rankings in the state."""
    spec = FieldSpec(Stacked, (len(FIELDS),), torch.float64)
    return {} if cfg.relevant is None else {"server/ranking": spec, "own/ranking": spec}


def ranked(
    cfg: Any, model_name: Whose, weights: Mapping[str, Tensor], block: ClientBlock, tables: State
) -> dict[str, Stacked]:
    """Rank items by a model; return the state field with the counts, none without rankings."""
    if cfg.relevant is None:
        return {}
    assert isinstance(cfg.model, RankingModel)  # see `resolve`
    with torch.no_grad():
        factors = cfg.model.factors(weights, block, tables=tables)
        return {f"{model_name}/ranking": Stacked(ranking_counts(block, factors, cfg.relevant))}


def rank_server(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Report rankings by the server's model, scored before. In: nothing. Out: `FIELDS`, (C,)."""
    del inbox, key
    return state, ranking_reply(cfg, state, block, "server")


def rank_own(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Report rankings by the clients' own models. In: nothing. Out: `FIELDS`, (C,)."""
    del inbox, key
    return state, ranking_reply(cfg, state, block, "own")


def ranking_reply(
    cfg: Any, state: State, block: ClientBlock, model_name: Whose
) -> dict[str, Stacked]:
    """Return the reply with the counts of rankings in a state; see `counts_to_send`."""
    counts = counts_to_send(_ranking_counts(state, block, model_name), "rating", cfg.count_rules)
    return {name: Stacked(t) for name, t in counts.items()}


def _ranking_counts(state: State, block: ClientBlock, model_name: Whose) -> dict[str, Tensor]:
    counts = state[f"{model_name}/ranking"].t
    if counts.shape != (block.num_clients, len(FIELDS)):
        raise ProtocolError(
            f"expected {model_name}/ranking of {block.num_clients} clients, got "
            f"{tuple(counts.shape)}: this is the state of another model or silo"
        )
    return {name: counts[:, place] for place, name in enumerate(FIELDS)}


def stored_ranking_counts(state: State, block: ClientBlock, model_name: Whose) -> dict[str, Tensor]:
    """Return the counts of the latest rankings by a model; none if the run has no rankings."""
    if f"{model_name}/ranking" not in state:
        return {}
    return _ranking_counts(state, block, model_name)


def with_rankings(
    fed: Federation, counts: Mapping[str, Tensor], model_name: Whose, key: Key, rules: CountRules
) -> dict[str, Tensor]:
    """Call for the counts of rankings and return them together with `counts`."""
    op = rank_server if model_name == "server" else rank_own
    reply = call_for_tallies(fed, op, {}, key, rules)
    return {**counts, **{name: field.t for name, field in reply.items()}}


def ranking_steps(model_name: Whose, key: Key) -> tuple[Call, ...]:
    """Return the call of `with_rankings`."""
    op = rank_server if model_name == "server" else rank_own
    return (Call(op, Kind.EVALUATION, key, {}, ranking_reply_specs()),)


def ranking_reply_specs() -> FieldSpecs:
    """Return the specs of a reply with counts of rankings."""
    return {
        name: FieldSpec(Stacked, spec.shape, spec.dtype, low=spec.low, high=spec.high)
        for name, spec in ranking_specs().items()
    }


def unranked(clients: int) -> dict[str, Tensor]:
    """Return counts of 0 for all clients."""
    return {name: torch.zeros(clients, dtype=torch.float64) for name in FIELDS}


HISTOGRAM = ".histogram"  # ends the names of histograms
NEIGHBORS = "neighbors"  # begins the names of what a neighbor sampler keeps in the state
TABLES = "tables"  # begins the names of a model's tables, and of what the optimizer keeps of them


def no_logits(model: AnyModel, block: ClientBlock) -> dict[str, Ragged]:
    """Return the initial logits: zeros, so that all classes are equally likely."""
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    judges = judges_of(block)
    empty = Ragged(block.adj.values.new_zeros(len(judges.rows), model.outputs), judges.off)
    return {"server/logits": empty, "own/logits": empty}


def logits_specs(model: AnyModel) -> FieldSpecs:
    """Return the specs of the logits of scored rows in the state."""
    logits = FieldSpec(Ragged, (model.outputs,), rows=JUDGED)
    return {"server/logits": logits, "own/logits": logits}


def rows_left(cfg: Any, block: ClientBlock, state: State, model_name: str) -> JudgedRows:
    """Return the stored predictions of the `server` or `own` model for the scored rows."""
    name = f"{model_name}/logits"
    if name not in state:
        raise ProtocolError(
            f"expected {name} in the state of clients, got none: call clients.begin() in the first "
            "op of the method's set-up"
        )
    logits, compiled = state[name].t, cfg.backend.compiled
    expected, dtype = (len(judges_of(block).rows), cfg.model.outputs), dtype_of(block)
    if logits.shape != expected or logits.dtype is not dtype:
        raise ProtocolError(
            f"expected {model_name}/logits of shape {expected} in {dtype}, got "
            f"{tuple(logits.shape)} in {logits.dtype}: this is the state of another model or silo"
        )
    return judged_rows(block, logits, block.client, block.num_clients, compiled=compiled)


def predict(cfg: Any, weights: Mapping[str, Tensor], graph: ClientBlock, state: State) -> Tensor:
    """Return logits (n, K) of the clients' rows; messages count as the neighbor sampler says.

    Args:
        cfg: with `model`, `backend` and `schedule`.
        weights: shared by all clients, or (C, ...).
        graph: that clients train on.
        state: theirs, with what the sampler keeps, and tables.
    """
    messages = weighed_messages(cfg, graph, state)
    if messages is not None:
        return predict_weighed(cfg, weights, graph, messages)
    logits: Tensor = cfg.backend.predict(cfg.model, weights, graph, fields_under(TABLES, state))
    return logits


def weighed_messages(cfg: Any, graph: ClientBlock, state: State) -> tuple[Messages, ...] | None:
    """Return the messages of each stage that the neighbor sampler weighs; None: it weighs none."""
    staged = cfg.model.staged
    if staged is None:
        return None
    sums = [stage.conv.sums for stage in staged.stages]
    messages: tuple[Messages, ...] | None = cfg.schedule.neighbors.messages(
        graph, sums, fields_under(NEIGHBORS, state)
    )
    return messages


def predict_weighed(
    cfg: Any, weights: Mapping[str, Tensor], graph: ClientBlock, messages: tuple[Messages, ...]
) -> Tensor:
    """Return logits (n, K) by messages of `weighed_messages`."""
    check_weights(cfg.model, weights, graph)
    inputs = Pass(graph.x, messages, (graph.row_key,) * len(messages))
    with torch.no_grad():
        return forward_pass(cfg.model.staged, weights, inputs, None)


# Name in `ClientBlock.memo` of logits of a pass over all silos, and the reply with their counts.
EXCHANGED_COUNTS = "exchanged counts"


def judge_server(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Score the server's model on own nodes, as it arrives to be trained.

    In: `weights/*`, as training calls have them. Out: see `Task.tally`.
    """
    del key
    graph, tables = local_graph(block, state), fields_under(TABLES, state)
    weights = tensors_under(
        "weights", inbox if cfg.sent.plain else decode_weights(cfg, block, state, inbox)
    )
    logits = predict(cfg, weights, graph, state)
    new = {**state, "server/logits": judges_of(graph).select(logits)}
    new |= ranked(cfg, "server", weights, graph, tables)
    return new, _reply_with_counts(cfg, rows_left(cfg, block, new, "server"))


def judge_own(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Score each client's own model on its own nodes. In: nothing. Out: see `Task.tally`."""
    del inbox, key
    rows = rows_left(cfg, block, state, "own")
    # `judge_exchanged` scores one model in both views, so `judge_own` need not count again. The
    # entry is valid only for the very same logits tensor; it is removed when read.
    exchanged = block.memo.pop(EXCHANGED_COUNTS, None)
    if isinstance(exchanged, tuple) and exchanged[0] is rows.logits:
        return state, dict(exchanged[1])
    return state, _reply_with_counts(cfg, rows)


def judge_exchanged(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Score the logits of a pass over all silos. In: nothing. Out: see `Task.tally`.

    The server's model is every client's own.
    """
    del inbox, key
    logits = judges_of(block).select(logits_of(cfg.model, state))
    new = {**end(state), "server/logits": logits, "own/logits": logits}
    rows = rows_left(cfg, block, new, "server")
    reply = _reply_with_counts(cfg, rows)
    block.memo[EXCHANGED_COUNTS] = rows.logits, reply  # for `judge_own`
    return new, reply


def judge_left(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Score the logits of a pass with the server's model. In: nothing. Out: see `Task.tally`."""
    del inbox, key
    new = {**end(state), "server/logits": judges_of(block).select(logits_of(cfg.model, state))}
    return new, _reply_with_counts(cfg, rows_left(cfg, block, new, "server"))


def _reply_with_counts(cfg: Any, rows: JudgedRows) -> dict[str, Stacked]:
    """Return the reply that reports the counts of a model."""
    return {name: Stacked(t) for name, t in tally_by_client(rows, cfg.count_rules).items()}


def tally_by_client(rows: JudgedRows, rules: CountRules) -> dict[str, Tensor]:
    """Return the counts of scored rows that clients report, each (C, ...); see `counts_to_send`."""
    counts = task_of(rows.task).tally(rows, val_histogram=rules.val_histogram)
    if rules.merges:
        counts |= limited_sums(rows)
    return counts_to_send(counts, rows.task, rules) if rules.withholds else counts


def call_for_tallies(
    fed: Federation, op: Op, inbox: Payload, key: Key, rules: CountRules
) -> dict[str, Field]:
    """Return the counts that all clients report, (C, ...); (1, ...) where `rules` sum them."""
    reduce = Sum() if rules.summed else None
    reply = fed.call(op, inbox, what=Kind.EVALUATION, key=key, reduce=reduce)
    if reduce is None:
        return dict(reply)
    return {name: Stacked(field.t[None]) for name, field in reply.items()}


def call_for_counts(
    fed: Federation, judge: Op, inbox: Payload, key: Key, rules: CountRules
) -> dict[str, Tensor]:
    """Return the counts of all clients (C, ...), histograms (K, 2, B) added up.

    `rules`: what the replies hold.
    """
    reply = call_for_tallies(fed, judge, inbox, key, rules)
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
    all_counts = dict(counts)
    for name, bins in counts.items():
        if name.endswith(HISTOGRAM):
            # In NumPy: torch takes twenty times as long to see whether any of many is not 0. Sums
            # are several times as fast without a change of type, where they cannot overflow.
            table, part = bins.cpu().numpy(), name.removesuffix(HISTOGRAM)
            # As unsigned numbers, negative counts are the largest: one maximum bounds both signs.
            unsigned = table.view(f"u{table.itemsize}")
            most = unsigned.reshape(len(table), -1).max(axis=1, initial=0)
            if rules.merges:
                all_counts[name] = spread_bins(bins, rules.min_count)
            else:
                fits_int32 = len(table) * int(most.max(initial=0)) < 2**31
                dtype = np.int32 if fits_int32 and table.dtype == np.int32 else np.int64
                total = table.sum(axis=0, dtype=dtype)
                all_counts[name] = torch.from_numpy(total).to(bins.device, torch.int64)
            has_any = torch.from_numpy(most != 0)
            all_counts[f"{part}.has_histogram"] = has_any.to(bins.device)
    return all_counts


def server_counts(
    fed: Federation, inbox: Payload, key: Key, rules: CountRules
) -> dict[str, Tensor]:
    """Return all clients' counts of the server's model, histograms (K, 2, B) summed.

    `inbox`: its encoded weights, see `silograph.exchange.sent_weights.outgoing`. `rules`:
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
    """Return the same as `server_counts` where some clients have scored the model on receipt.

    Args:
        fed: the engine.
        received: counts (C, ...) of clients that have scored it, from their training replies.
        others: the other clients, to which the model is sent.
        inbox: its weights, encoded for these.
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
    row_minimum: RowMinimum = NO_MINIMUM,
) -> dict[str, Tensor]:
    """The same with sums over the neighbors in all silos, `row_minimum` at least in each sum."""
    predict_together(fed, divisible(model), weights, key, row_minimum=row_minimum)
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
    """Return predictions of a model for the scored rows of a block here, by `group` (n,)."""
    logits = judges_of(block).select(backend.predict(model, weights, block)).t
    return judged_rows(block, logits, group, groups, compiled=backend.compiled)


def counts_of_logits(cfg: Any, block: ClientBlock, logits: Ragged) -> dict[str, Tensor]:
    """Return the counts that clients report, from logits of their scored rows."""
    rows = judged_rows(
        block, logits.t, block.client, block.num_clients, compiled=cfg.backend.compiled
    )
    return tally_by_client(rows, cfg.count_rules)


def counts_left(
    cfg: Any, block: ClientBlock, state: State, model_name: Literal["server", "own"]
) -> dict[str, Tensor]:
    """Return the counts of the `server` or `own` model from the logits in a state."""
    rows = rows_left(cfg, block, state, model_name)
    counts = counts_of(rows, val_histogram=cfg.count_rules.val_histogram)
    return counts | stored_ranking_counts(state, block, model_name)


def counts_of(rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
    """Return the counts of rows in this process, all of them, histograms (K, 2, B) summed.

    `val_histogram`: whether validation nodes have a histogram, too.
    """
    return sum_histograms(task_of(rows.task).tally(rows, val_histogram=val_histogram))


# --- The calls of evaluations, which silos enforce against their server --------------------------


def server_steps(model: AnyModel, inbox_specs: FieldSpecs, key: Key, rules: CountRules) -> Steps:
    """Return the calls of `server_counts`; `inbox_specs`: specs of the encoded weights."""
    return scoring_steps(judge_server, inbox_specs, model, key, rules)


def received_steps(
    model: AnyModel, inbox_specs: FieldSpecs, key: Key, rules: CountRules, *, ranks: bool
) -> Steps:
    """Return the calls of `received_counts`, which may be left out.

    Args:
        model: of the run.
        inbox_specs: specs of the encoded weights.
        key: of the calls.
        rules: what the replies hold.
        ranks: whether clients rank, too.
    """
    ranking = ranking_steps("server", key) if ranks else ()
    return Maybe((server_steps(model, inbox_specs, key, rules), ranking))


def exchanged_steps(
    model: AnyModel, key: Key, rules: CountRules, row_minimum: RowMinimum = NO_MINIMUM
) -> Steps:
    """Return the calls of `exchanged_counts`."""
    prediction = predict_steps(divisible(model), key, row_minimum=row_minimum)
    return prediction, scoring_steps(judge_exchanged, {}, model, key, rules)


def own_steps(model: AnyModel, key: Key, rules: CountRules) -> Steps:
    """Return the calls of `own_counts`."""
    return scoring_steps(judge_own, {}, model, key, rules)


def scoring_steps(
    judge: Op, inbox_specs: FieldSpecs, model: AnyModel, key: Key, rules: CountRules
) -> Steps:
    """Return the call of `call_for_counts`."""
    specs = tally_specs(model.task, model.outputs, rules)
    return (Call(judge, Kind.EVALUATION, key, inbox_specs, specs, tallies(model, rules)),)


def tallies(
    model: AnyModel, rules: CountRules, prefix: str = ""
) -> Callable[[Payload, Payload], str | None]:
    """Return a check of the counts in a reply: fields whose names begin with `prefix`."""

    def problem(_: Payload, reply: Payload) -> str | None:
        counts = {n.removeprefix(prefix): f.t for n, f in reply.items() if n.startswith(prefix)}
        return count_problem(model.task, counts, rules.min_count)

    return problem


@lru_cache(maxsize=16)  # programs ask for specs in every round
def tally_specs(labels: LabelForm, outputs: int, rules: CountRules) -> FieldSpecs:
    """Return the specs of the counts that clients report."""
    counts = specs_to_send(task_of(labels), outputs, rules)
    specs = {
        n: FieldSpec(Stacked, c.shape, c.dtype, low=c.low, high=c.high, among=_reported_nodes(n, c))
        for n, c in counts.items()
    }
    return MappingProxyType(specs)


def _reported_nodes(name: str, count: CountSpec) -> str:
    """Return VAL or TEST for a number of such nodes; "" for sums, and for merged classes."""
    part, _, remainder = name.partition(".")
    numbers = part in (VAL, TEST) and count.dtype is torch.int32
    return part if numbers and not remainder.startswith(f"{MERGED}.") else ""
