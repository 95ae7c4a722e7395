"""The program of a run: what its config, method and model call at every client, put together."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch

from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Shared
from silograph.core.resolved_config import ResolvedConfig, training_key
from silograph.evaluation.evaluate import own_steps, ranking_steps, received_steps
from silograph.exchange.collect import (
    collect_steps,
    collected_specs,
    statistics_state,
    statistics_steps,
)
from silograph.exchange.feature_drift import DriftForm, drift_steps
from silograph.exchange.passes import weight_specs
from silograph.exchange.sent_weights import inbox_spec
from silograph.exchange.shared_biases import sharing_state, sharing_steps
from silograph.experiment.resolve.data import sum_specs
from silograph.experiment.resolve.exclusions import scores_some
from silograph.experiment.resolve.user_code import is_spec
from silograph.federation.field_specs import EDGES, ROWS, TRAIN, FieldSpec, FieldSpecs
from silograph.federation.program import (
    WEIGHTS,
    Call,
    Closing,
    Maybe,
    Program,
    ScoringRules,
    Steps,
    calls_of,
    is_certain,
)
from silograph.federation.session.peer import WorkBound
from silograph.graph.graph import Schema
from silograph.methods.base import AnyMethod, Method, MethodConfig
from silograph.methods.local_only import sharing_in
from silograph.nn.shared_items import ITEMS
from silograph.task.threshold import NO_THRESHOLD, THRESHOLD

MOST_LOOKED_AT = 1000  # calls of a run, for rows in them
COLLECT = "collect"  # named beside methods where a silo says what it allows, as items are
FEATURES = "features"  # with weight_rows=used: which ones occur at a silo
USERS = "users"  # with model.shared=all: how many ratings each user has whom silos share
BESIDES = (COLLECT, ITEMS, USERS, FEATURES)


def program_of(
    config: ResolvedConfig,
    schema: Schema,
    method: Method,
    method_config: MethodConfig,
    *,
    hand_over: bool = True,
) -> Program:
    """Return what a run calls.

    Args:
        config: of the run.
        schema: features and classes.
        method: the method.
        method_config: what its ops read.
        hand_over: whether clients get the server's model when the run is over.

    Raises:
        ConfigError: the method does not say what it calls.
    """
    calls, key = method.calls, training_key(config)
    if calls is None:
        raise ConfigError(
            f"expected a method that declares its calls (Method.calls), got {method.name}: silos "
            "do nothing that they cannot check"
        )
    setup: tuple[Steps, ...] = (calls.setup(method_config, key.fold("init")),)
    state = dict(calls.state(method_config))
    specs = sum_specs(config, schema, method)
    sharing = sharing_in(method, method_config.model)
    if sharing is not None:
        setup = (sharing_steps(sharing, key.fold("shared biases")), *setup)
        state |= sharing_state(sharing)
    if config.collect:
        collected = collect_steps(config.collect, schema.num_features, key.fold("collect"))
        setup = (collected, *setup)
        state |= collected_specs(schema.num_features)
    if config.feature_drift:
        form = DriftForm(schema.num_features, config.evaluation_min_count)
        setup = (drift_steps(form, key.fold("feature drift")), *setup)
    if specs:
        setup = (statistics_steps(specs, key.fold("statistics")), *setup)
        state |= statistics_state(specs)

    if method.needs.score_first:
        setup = (*setup, _scoring_steps(config, method, method_config, 0, key))

    def round_steps(t: int) -> Steps:
        trained = calls.round(method_config, t, key)
        return trained, _evaluation_steps(config, method, method_config, t, key)

    scores_after_hand_over = hand_over and calls.scores_server(method_config)
    result = dict(weight_specs(method_config.model, Shared)) if scores_after_hand_over else {}
    if hand_over and config.threshold is not None:
        result |= {THRESHOLD: FieldSpec(Shared, (), torch.float64, low=0, high=NO_THRESHOLD)}
    rules = _scoring_rules(config, method, method_config)
    return Program(setup, round_steps, config.rounds, state, result, rules)


def _scoring_rules(
    config: ResolvedConfig, method: Method, method_config: MethodConfig
) -> ScoringRules:
    """Return what clients can check of the weights that they score."""
    assert method.calls is not None  # it has a program
    first_round = method.calls.round(method_config, 1, training_key(config))
    training = [_weight_specs(call) for call in calls_of(first_round) if _brings_weights(call)]
    # A method of a user may send other rows to train than to score. And passes over all silos send
    # exact weights, which cannot be compared with rounded ones.
    some, sends_none = scores_some(config), not method.calls.scores_server(method_config)
    is_alike = sends_none or (
        training[:1] == [inbox_spec(method_config)]
        and (method_config.sent.plain or not method.evaluate.crosses)
    )
    everyone = method_config.everyone_trains and (
        sends_none or is_certain(first_round, _brings_weights)
    )
    return ScoringRules(
        next_trains=method_config.score_on_receipt != "all" and is_alike,
        bounded=everyone or some or sends_none,
        closing=1 if everyone else 2,
        in_setup=int(method.needs.score_first),
        in_rounds=config.rounds * max(1, sum(call.scores_inbox for call in calls_of(first_round))),
    )


def _brings_weights(call: Call) -> bool:
    """Whether a call has a client train from weights."""
    return call.what is not Kind.EVALUATION and bool(_weight_specs(call))


def _weight_specs(call: Call) -> FieldSpecs:
    return {name: spec for name, spec in call.inbox_specs.items() if name.startswith(WEIGHTS)}


def _evaluation_steps(
    config: ResolvedConfig, method: Method, method_config: MethodConfig, t: int, key: Key
) -> Steps:
    """Return the calls that score a round, if it is to be scored."""
    if method_config.score_on_receipt == "all":
        return _delayed_steps(config, method, method_config, t, key)
    scored = _scoring_steps(config, method, method_config, t, key)
    if t % config.eval_every == 0 or t == config.rounds:
        return scored
    # A limit that ends the run before its first evaluation has that round scored.
    return Closing(scored) if t < config.eval_every else ()


def _delayed_steps(
    config: ResolvedConfig, method: Method, method_config: MethodConfig, t: int, key: Key
) -> Steps:
    """Return the calls that score the round before on receipt, and this one where the run ends.

    Every round may be the last one, as limits of the run end it.
    """
    every, everyone, some = config.eval_every, method_config.everyone_trains, scores_some(config)
    before: Steps = ()
    if t > 1 and (t - 1) % every == 0 and not (everyone or some):
        before = received_steps(
            method_config.model,
            inbox_spec(method_config),
            key.fold("judge server", t - 1),
            method_config.count_rules,
            ranks=config.relevant is not None,
        )
    server, own = _scoring_steps(config, method, method_config, t, key)
    if some and not everyone:  # the best model is scored by all in the end
        best = Maybe(_scoring_steps(config, method, method_config, t, key.fold("best"))[0])
        if t == config.rounds:
            return before, own, best, server
        if t % every == 0:
            return before, own, Closing((best, server))
        return before, Closing(best if t > every else (server, own))
    if t == config.rounds:
        return before, own, server
    if t % every == 0:
        return before, own, Closing(server)
    return before, Closing((server, own)) if t < every else ()


def _scoring_steps(
    config: ResolvedConfig, method: Method, method_config: MethodConfig, t: int, key: Key
) -> tuple[Steps, Steps]:
    """Return the calls that score the server's model of a round, and the clients' own ones."""
    model, rules = method_config.model, method_config.count_rules
    judging, own = key.fold("judge server", t), key.fold("judge own", t)
    ranks, server = config.relevant is not None, tuple[Steps, ...]()
    if method.calls is not None and method.calls.scores_server(method_config):
        server = (
            method.evaluate.steps(model, inbox_spec(method_config), judging, rules),
            ranking_steps("server", judging) if ranks else (),
        )
    return server, (own_steps(model, own, rules), ranking_steps("own", own) if ranks else ())


def beyond_weights(
    config: ResolvedConfig, method: Method, method_config: MethodConfig
) -> tuple[str, ...]:
    """Return what a silo must allow by name: rows of single nodes, which items or features it has.

    Set-up, the last round and the first ones are looked at, until `MOST_LOOKED_AT` calls. Where
    rows appear later still, the silo refuses the call (`Prepared.sends_rows`).
    """
    calls, key, names = method.calls, training_key(config), []
    assert calls is not None  # it has a program
    own = calls.setup(method_config, key.fold("init")), _scored(config, method, method_config, 0)
    later = (
        (calls.round(method_config, t, key), _scored(config, method, method_config, t))
        for t in (config.rounds, *range(1, config.rounds))
    )
    every = (call for steps in chain([own], later) for call in calls_of(steps))
    if any(call.rows for call in islice(every, MOST_LOOKED_AT)):
        names.append(config.method)
    if config.collect:
        names.append(COLLECT)
    sharing = sharing_in(method, method_config.model)
    # Which rows move says what a silo sells, and so do tags of items.
    if ITEMS in method_config.model.weight_shapes or sharing is not None:
        names.append(ITEMS)
    if sharing is not None and "user" in sharing.sides:
        names.append(USERS)
    if method_config.sent.rows == "used":
        names.append(FEATURES)
    return tuple(names)


def _scored(config: ResolvedConfig, method: Method, method_config: MethodConfig, t: int) -> Steps:
    return _scoring_steps(config, method, method_config, t, training_key(config))


def kinds_sent(program: Program) -> tuple[str, ...]:
    """Return the kinds of what a client sends in a run, sorted."""
    both = program.setup, program.round(1), program.round(program.rounds)
    return tuple(sorted({call.reply_kind.value for steps in both for call in calls_of(steps)}))


# --- The most work that one call can be at a silo, of what is fixed before the first round -------


PER_WEIGHT = 6  # of a row: multiply and add, forward and twice on the way back
PER_VALUE = 40  # of a row or an edge: scales, softmax, draws, activations, loss, and the way back
PER_PARAMETER = 40  # of a step: optimizer, decay, corrections
MARGIN = 10  # times that, for what methods do besides


def most_work(
    config: ResolvedConfig, method: AnyMethod, cfg: MethodConfig[Any], sizes: Mapping[str, int]
) -> WorkBound | None:
    """Return a bound of the floating-point operations of any one call at a silo.

        steps = epochs ceil(training nodes / batch size) + 1
        step  = 6 R P + 40 (R + E) D + 40 P
        bound = MARGIN steps step

    R and E are rows and edges with the halo's, P the parameters of the model and of the networks of
    its sampler, one a hop, D their widths added up, those of the model once a hop, and those of its
    tables. A step takes all rows at most, and the one more is for scores. Biases of ratings are
    solved in turns over all rows besides. With ConsisRec, each rating meets the neighbors of both
    its ends, which are all rows at most: so many stand in place of edges.

    Where a method trains another network, R and E have the rows that it makes, and edges to them.
    The bound is the larger one of the model's and of that network's, which also compares each row
    with all that a call brings: 2 R operations for each number.

    Args:
        config: of the run.
        method: its method.
        cfg: what its ops read.
        sizes: of the silo, by TRAIN, ROWS and EDGES, as it has reported.

    Returns:
        None for code of users: it may do anything, and its bound is time.
    """
    if is_spec(config.method) or is_spec(config.model) or method.calls is None or ROWS not in sizes:
        return None
    make_other_network = method.calls.other_network
    other_network = None if make_other_network is None else make_other_network(cfg)
    rows_per_node = other_network.made if other_network else 0
    rows = sizes[ROWS] * (1 + rows_per_node)
    edges = sizes[EDGES] * (1 + rows_per_node) + 2 * rows_per_node * sizes[ROWS]
    if cfg.model.meets_all:
        edges = 2 * rows * rows
    steps = cfg.schedule.epochs * -(-sizes[TRAIN] // (cfg.schedule.batch_size or 2**62)) + 1
    model_shapes = list(cfg.model.weight_shapes.values())
    sampler_shapes = cfg.schedule.neighbors.maps(cfg.model)
    hops = int(cfg.model.described().get("hops") or 1)
    widths = (
        hops * _widths(model_shapes)
        + _widths(sampler_shapes)
        + sum(cfg.model.table_widths.values())
    )
    solver_work = cfg.model.solved_flops * rows
    work = steps * _step([*model_shapes, *sampler_shapes], widths, rows, edges) + solver_work
    if not other_network:
        return WorkBound(float(MARGIN * work))
    shapes = list(other_network.shapes.values())
    other_work = (other_network.steps + 1) * _step(shapes, _widths(shapes), rows, edges)
    return WorkBound(float(MARGIN * max(work, other_work)), float(MARGIN * 2 * sizes[ROWS]))


def _widths(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, shapes))


def _step(shapes: Sequence[Sequence[int]], widths: int, rows: int, edges: int) -> int:
    """Return the operations of a step through maps of such shapes."""
    weights = sum(map(math.prod, shapes))
    return (
        PER_WEIGHT * rows * weights
        + PER_VALUE * (rows + edges) * widths
        + (PER_PARAMETER * weights)
    )
