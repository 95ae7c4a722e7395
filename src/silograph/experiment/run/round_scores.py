"""Judging a round: the counts that clients report, the scores, and which round is best."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import TrainingError, mistake
from silograph.core.key import Key
from silograph.core.payload import Payload, Stacked, tensors_under
from silograph.core.resolved_config import training_key
from silograph.core.setting_values import PLAIN_WEIGHTS
from silograph.evaluation.evaluate import (
    HISTOGRAM,
    counts_of,
    own_counts,
    received_counts,
    rows_here,
    unranked,
    with_rankings,
)
from silograph.evaluation.scoring import RECEIVED
from silograph.exchange.sent_weights import encode_weights, remembered_form
from silograph.experiment.report.reading import scores_are_withheld
from silograph.experiment.resolve.exclusions import (
    positive_output,
    score_request,
    scores_some,
)
from silograph.experiment.result_files import FACT, VIRTUAL, Row
from silograph.experiment.run.setup import Setup, uncut_block
from silograph.federation.base import positions_of
from silograph.methods.base import RoundReport, ServerState
from silograph.nn.conv import Params
from silograph.task.base import ClientValues, Task
from silograph.task.counts import JudgedRows
from silograph.task.decision_scores import DecisionScores, decision_scores
from silograph.task.metric_table import LOSS, METRICS, RANKINGS, Metric
from silograph.task.registry import task_of
from silograph.task.scores import PARTS, ClassScores, Part, Scores, Views, constant_scores
from silograph.task.threshold import (
    DecisionCounts,
    Threshold,
    ThresholdScores,
    best_bin,
    parse_threshold,
    probability_of,
)

Counts = Mapping[str, Tensor]
SCORED_CLIENTS = f"{FACT}scored_clients"
ViewScores = Mapping[str, Scores | None]


@dataclass(frozen=True, eq=False)
class JudgedRound:
    """A round as validation sees it.

    Attributes:
        round: its number.
        server: counts of the server's model, or None where there is none.
        personalized: counts of the clients' own models.
        weights: the server's model.
        val: validation scores by view, the two views that clients can tell.
        test: test scores, likewise.
        away: clients whose nodes are not counted, as they were not there.
        own: weights of the clients' own models, of the best round of a simulation only; see
            `silograph.experiment.run.result_folder`.
    """

    round: int
    server: Counts | None
    personalized: Counts
    weights: Params | None
    val: ViewScores
    test: ViewScores
    away: tuple[str, ...]
    own: Params | None = None


def task_in(setup: Setup) -> Task:
    """Return what the run predicts."""
    return task_of(setup.schema.task)


def run_metric(setup: Setup) -> Metric:
    """Return the metric that picks the round."""
    name = setup.config.metric
    assert name is not None  # written out
    return METRICS[name]


def metrics_of(setup: Setup) -> tuple[str, ...]:
    """Return the names of the scores that the run has."""
    ranks, task = setup.config.relevant is not None, task_in(setup)
    if not task.histograms:
        return tuple(n for n in task.metrics if ranks or n not in RANKINGS)
    names = [n for n in task.metrics if not METRICS[n].from_histogram]
    extra = score_request(setup.config, setup.schema).metrics
    return (*names[:-1], *extra, names[-1])  # the loss is last


def scores_of(setup: Setup, counts: Counts, part: Part) -> Scores | None:
    """Return the scores of `val` or `test` that the run has; see `Task.scores`."""
    return task_in(setup).scores(counts, part, score_request(setup.config, setup.schema))


def columns_of(setup: Setup) -> tuple[str, ...]:
    """Return the metrics of the table of rounds: those of the task, and the one of the run."""
    columns, metric_name = task_in(setup).columns, run_metric(setup).name
    if setup.config.relevant is not None:
        return (*columns, *RANKINGS, *({metric_name} - {*columns, *RANKINGS}))
    return columns if metric_name in columns else (*columns, metric_name)


def judged_from_counts(
    setup: Setup,
    t: int,
    server: Counts | None,
    own: Counts,
    weights: Params | None,
    away: tuple[str, ...],
) -> JudgedRound:
    """Return a round with the scores of its counts."""
    # Scores depend on the counts alone, so equal counts are scored once.
    has_equal_counts = (
        server is not None
        and server.keys() == own.keys()
        and all(torch.equal(t, own[name]) for name, t in server.items())
    )

    def views_of(part: Part) -> ViewScores:
        server_scores = None if server is None else scores_of(setup, server, part)
        own_scores = server_scores if has_equal_counts else scores_of(setup, own, part)
        if setup.config.dp_unit == "node":  # silos send sums of gradients, and train no models
            own_scores = None
        return {"server": server_scores, "personalized": own_scores}

    val, test = map(views_of, PARTS)
    return JudgedRound(t, server, own, weights, val, test, away)


def judge(setup: Setup, state: ServerState, t: int, key: Key) -> JudgedRound:
    """Have all clients score the server's model and their own."""
    server = None
    if state.weights is not None:
        server = server_counts_of(setup, state, key.fold("judge server", t))
    own = own_counts_of(setup, t, key)
    return judged_from_counts(setup, t, server, own, state.weights, setup.federation.away)


def server_counts_of(setup: Setup, state: ServerState, key: Key) -> Counts:
    """Return all clients' counts of the server's model, which is sent to them."""
    fed, cfg = setup.federation, setup.method_config
    inbox = weights_message(setup, state, fed.ids)
    counts = setup.method.evaluate.counts(fed, cfg.model, inbox, key, cfg.count_rules)
    return (
        counts
        if setup.config.relevant is None
        else with_rankings(fed, counts, "server", key, cfg.count_rules)
    )


def own_counts_of(setup: Setup, t: int, key: Key) -> Counts:
    """Return all clients' counts of their own models, after round t."""
    fed, judging = setup.federation, key.fold("judge own", t)
    rules = setup.method_config.count_rules
    own = own_counts(fed, judging, rules)
    return own if setup.config.relevant is None else with_rankings(fed, own, "own", judging, rules)


def weights_message(setup: Setup, state: ServerState, to: Sequence[str]) -> Payload:
    """Return the message that brings the server's model to clients to be scored.

    The weights travel as they do to be trained, so a score is that of what clients receive. Passes
    over all silos send them exactly.
    """
    assert state.weights is not None  # only then is there something to score
    cfg = setup.method_config
    if setup.method.evaluate.crosses:
        cfg = replace(cfg, sent=PLAIN_WEIGHTS)
    positions = positions_of(setup.federation.ids, to)
    return encode_weights(cfg, state.weights, remembered_form(state.memory), positions)


def is_better(setup: Setup, new: JudgedRound, old: JudgedRound | None) -> bool:
    """Whether `new` is chosen over `old`: by the run's metric, then loss; the later if none.

    Rounds that were judged without some clients compare on the nodes that both have counted. Rounds
    that were scored by their participants compare by the scores as they are: two draws may have no
    client in common. Of the best and the last one all clients decide in the end.
    With differential privacy it is the last round.
    """
    if setup.config.dp_epsilon is not None:  # a choice by scores would be outside the guarantee
        return True
    view = setup.method.evaluate.view
    new_scores, old_scores = new.val[view], None if old is None else old.val[view]
    if scored_by_participants(setup):
        if new_scores is None:  # nobody who scored it has a validation node
            return old_scores is None
    elif old is not None and new.away != old.away and not setup.config.secure_aggregation:
        new_scores, old_scores = (
            _validation_scores_of_common_clients(setup, judged_round, other)
            for judged_round, other in ((new, old), (old, new))
        )
    if new_scores is None or old_scores is None:
        return True
    metric, loss = run_metric(setup), METRICS[LOSS]
    ranks = [
        (metric.goodness(scores[metric.name]), loss.goodness(scores[LOSS]))
        for scores in (new_scores, old_scores)
    ]
    return ranks[0] > ranks[1]


def _validation_scores_of_common_clients(
    setup: Setup, judged_round: JudgedRound, other_round: JudgedRound
) -> Scores | None:
    """Return validation scores of `one`, on the clients that `other` has counted, too."""
    counts, other_counts = (
        j.server if setup.method.evaluate.view == "server" else j.personalized
        for j in (judged_round, other_round)
    )
    if counts is None or other_counts is None:
        return None
    in_both = (counts["val.nodes"] > 0) & (other_counts["val.nodes"] > 0)
    # Histograms are of all clients together: rounds without some of them compare by the loss.
    names = (n for n in counts if n.startswith("val.") and not n.endswith(HISTOGRAM))
    common_counts = {n: counts[n][in_both] for n in names}
    return scores_of(setup, common_counts, "val")


def scored_by_participants(setup: Setup) -> bool:
    """Whether models of rounds are scored by some clients only."""
    cfg = setup.method_config
    return scores_some(setup.config) and cfg.score_on_receipt == "all" and not cfg.everyone_trains


def row_of(
    setup: Setup,
    judged: JudgedRound,
    report: RoundReport,
    seconds: float,
    virtual_seconds: float | None = None,
) -> Row:
    """Return the round's row of the table; bytes, flops and seconds are totals so far."""
    ledger, away = setup.federation.ledger, setup.federation.away
    row: Row = {
        "round": judged.round,
        "participants": sum(name not in away for name in report.participants),
        "train_loss": report.train_loss,
    }
    row |= _score_columns(setup, judged, tuple(judged.val)) | _scored_clients(setup, judged)
    facts: Row = {
        f"{FACT}{name}": float(value) if math.isfinite(value) else None
        for name, value in report.facts.items()
    }
    return row | {
        "bytes": ledger.bytes,
        "bytes_evaluation": ledger.bytes_by_kind.get("evaluation", 0),
        "flops": ledger.flops,
        "seconds": round(seconds, 3),
        **({} if virtual_seconds is None else {VIRTUAL: virtual_seconds}),
        **facts,
    }


def _scored_clients(setup: Setup, judged: JudgedRound) -> Row:
    """Return how many clients have nodes in the scores of the server's model, if not all."""
    if not scored_by_participants(setup):
        return {}
    counts = judged.server
    if counts is None:
        return {SCORED_CLIENTS: None}
    return {SCORED_CLIENTS: float(((counts["val.nodes"] + counts["test.nodes"]) > 0).sum())}


def _score_columns(setup: Setup, judged: JudgedRound, view_names: tuple[str, ...]) -> Row:
    row: Row = {}
    for part, views in (("val", judged.val), ("test", judged.test)):
        for view in view_names:
            scores = views[view]
            for name in columns_of(setup):
                if part == "test" or METRICS[name].validation or name == run_metric(setup).name:
                    row[f"{part}_{view}_{name}"] = None if scores is None else scores[name]
    return row


def progress_of(setup: Setup, row: Row) -> str:
    """Return what progress shows of a row."""
    is_simulation = setup.simulated is not None
    if scores_are_withheld(setup.config.dp_epsilon, is_simulation=is_simulation):
        return "scores withheld: differential privacy"
    metric = run_metric(setup)
    value = row[f"val_{setup.method.evaluate.view}_{metric.name}"]
    value_text = "-" if value is None else f"{value:.3f}"
    return f"val {metric.title} {value_text}  {loss_text(row)}"


def loss_text(row: Row) -> str:
    """Return what progress shows of a row that has no scores yet."""
    loss = "-" if row["train_loss"] is None else f"{row['train_loss']:.3f}"
    return f"train loss {loss}"


def uncut_rows(setup: Setup, weights: Params) -> JudgedRows:
    """Return what the server's model says of the uncut graph, each node counted for its owner."""
    block, partition = uncut_block(setup), setup.cut.partition
    owner = partition.owner.to(setup.device)
    is_held = owner >= 0
    split = block.split.map(lambda mask: mask & is_held)
    judged_block = replace(block, split=split)
    cfg, clients = setup.method_config, len(partition.ids)
    return rows_here(cfg.backend, cfg.model, weights, judged_block, owner, clients)


def uncut_counts(setup: Setup, rows: JudgedRows) -> Counts:
    """Return the counts of `uncut_rows`."""
    counts = counts_of(rows, val_histogram=setup.method_config.count_rules.val_histogram)
    ranked = setup.method_config.relevant is not None
    return counts | (unranked(rows.groups) if ranked else {})


def baseline_scores(setup: Setup, best: JudgedRound) -> Scores | None:
    """Return the test scores of the best constant prediction by all training labels.

    The experiment knows the labels, as it has cut the graph. Silos would not tell them: what they
    do tell has the classes of validation nodes, and the commonest of these is what counts then.
    """
    if setup.simulated is None:
        reported_counts = best.personalized if best.server is None else best.server
        form = task_in(setup).labels
        return (
            constant_scores(reported_counts, form) if form in ("multiclass", "multilabel") else None
        )
    graph, split = setup.cut.graph, setup.cut.split
    owner, task = setup.cut.partition.owner, task_in(setup)
    is_known = graph.labeled & (owner >= 0)
    rows = (is_known & split.test).nonzero()[:, 0]
    outputs = task.outputs(setup.schema)
    constant = task.constant_logits(graph.y[is_known & split.train], outputs)
    is_unscored = torch.zeros(len(rows), dtype=torch.bool)
    judged = JudgedRows(
        constant.expand(len(rows), outputs),
        graph.y[rows],
        is_unscored,
        owner[rows],
        len(setup.cut.partition.ids),
        graph.task,
    )
    counts = counts_of(judged)
    if setup.config.relevant is not None:
        counts |= unranked(judged.groups)
    return scores_of(setup, counts, "test")


def views_of(setup: Setup, best: JudgedRound, uncut: Counts | None) -> tuple[Views, Views]:
    """Return the validation and test scores of a round in all three views."""
    val, test = (
        Views(
            uncut=None if uncut is None else scores_of(setup, uncut, part),
            **(best.val if part == "val" else best.test),
        )
        for part in PARTS
    )
    return val, test


def scores_by_class(setup: Setup, best: JudgedRound) -> dict[str, ClassScores]:
    """Return the test scores of each class in a round, in the view that picks the round."""
    view = setup.method.evaluate.view
    counts = best.server if view == "server" else best.personalized
    if counts is None or best.test[view] is None:
        return {}
    class_scores = task_in(setup).class_scores(counts, "test")
    names = setup.schema.class_names or [str(k) for k in range(len(class_scores))]
    return dict(zip(names, class_scores, strict=True))


def scores_of_decisions(setup: Setup, best: JudgedRound) -> DecisionScores | None:
    """Return what test nodes say of decisions, in the view that picks the round.

    None where the task has no classes, and where no client has sent a histogram of scores.
    """
    schema, counts = setup.schema, _picking_counts(setup, best)
    if counts is None or not task_in(setup).histograms:
        return None
    bins = counts["test.histogram"].cpu().numpy()
    names = schema.class_names or [str(k) for k in range(len(bins))]
    positive = score_request(setup.config, schema).positive
    return decision_scores(bins, schema.task, names, positive)


def _picking_counts(setup: Setup, best: JudgedRound) -> Counts | None:
    """Return the counts in the view that picks the round."""
    return best.server if setup.method.evaluate.view == "server" else best.personalized


def chosen_threshold(setup: Setup, best: JudgedRound) -> Threshold | None:
    """Return the threshold that the validation nodes of all clients choose in a round.

    None where the run asks for none, or no client has sent scores of nodes of both kinds.
    """
    rule, counts = setup.config.threshold, _picking_counts(setup, best)
    if rule is None or counts is None or "val.histogram" not in counts:
        return None
    positive = positive_output(setup.config, setup.schema)
    table = counts["val.histogram"].cpu().numpy()[positive].astype(np.float64)
    place = best_bin(table, parse_threshold(rule))
    return None if place is None else Threshold(rule, positive, probability_of(place))


def scores_of_threshold(
    setup: Setup, best: JudgedRound, threshold: Threshold | None
) -> ThresholdScores | None:
    """Return what a threshold does on validation and test nodes, in the view of the round."""
    counts = _picking_counts(setup, best)
    if threshold is None or counts is None:
        return None
    val, test = (
        DecisionCounts.of(
            counts[f"{part}.histogram"][threshold.positive].cpu().double().numpy(),
            threshold.probability,
        )
        for part in PARTS
    )
    names = setup.schema.class_names or [str(k) for k in range(setup.schema.num_classes)]
    return ThresholdScores(names[threshold.positive], threshold, val, test)


def scores_by_client(
    setup: Setup, best: JudgedRound, uncut: Counts | None
) -> dict[str, dict[str, ClientValues]]:
    """Return each client's test scores in a round, by metric and by the views that exist."""
    own = None if best.test["personalized"] is None else best.personalized
    views = {"server": best.server, "uncut": uncut, "personalized": own}
    if setup.config.secure_aggregation:  # of the other views nobody has counts by client
        views = {"uncut": uncut}
    task = task_in(setup)
    scores_by_view = {
        view: task.client_scores(counts, "test")
        for view, counts in views.items()
        if counts is not None
    }
    return {
        name: {view: view_scores[name] for view, view_scores in scores_by_view.items()}
        for name in task.by_client
    }


def count_scored_clients(best: JudgedRound) -> dict[str, dict[str, int]]:
    """Return how many clients are behind the test scores of a round; see `Result`."""
    own = None if best.test["personalized"] is None else best.personalized
    views = {"server": best.server, "personalized": own}
    names = {"nodes": "test.nodes", "auc": "test.has_histogram"}
    return {
        view: {n: int((counts[field] > 0).sum()) for n, field in names.items() if field in counts}
        for view, counts in views.items()
        if counts is not None
    }


# --- Each client's own model in the round that is best by this client's validation nodes ---------
#
# A run picks one round for all clients. Where models are the clients' own, each client can keep
# the one that its own validation nodes like best, and papers on personalized methods often report
# that.
#
# C: clients.


def update_best_by_client(
    setup: Setup, best_counts: Counts | None, round_counts: Counts
) -> Counts | None:
    """Return the counts of each client's best round so far, after one more was scored.

    Clients compare rounds by the run's metric if it is one of single clients, otherwise by their
    first metric, then by their loss; on a tie the earlier round stays, and without validation nodes
    the later one.

    Args:
        setup: the run.
        best_counts: the counts so far, by name (C, ...); empty before the first scored round,
            None where earlier rounds are not known.
        round_counts: counts of the clients' own models in the new round.
    """
    if best_counts is None or setup.config.secure_aggregation:
        return None
    new_counts = {name: t for name, t in round_counts.items() if not name.endswith(HISTOGRAM)}
    if not best_counts:
        return new_counts
    new_ranks, old_ranks = _ranks(setup, new_counts), _ranks(setup, best_counts)
    is_equal, has_lower_loss = new_ranks[0] == old_ranks[0], new_ranks[1] > old_ranks[1]
    is_better_round = (new_ranks[0] > old_ranks[0]) | (is_equal & has_lower_loss)
    is_better_round |= np.isnan(old_ranks[0])
    if not is_better_round.any():
        return best_counts
    counts = {}
    for name, new in new_counts.items():
        mask = is_better_round.reshape(-1, *[1] * (new.dim() - 1))
        old = best_counts[name].cpu().numpy()
        counts[name] = torch.from_numpy(np.where(mask, new.cpu().numpy(), old))
    return counts


def _ranks(setup: Setup, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Return how good each client's validation score and loss are, two (C,); NaN: no nodes."""
    by_metric = task_in(setup).client_scores(counts, "val")
    metric_name = run_metric(setup).name
    losses, nodes = (counts[f"val.{name}"].cpu().numpy() for name in ("loss", "nodes"))
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = -losses / nodes
    name = next((n for n in (metric_name, *by_metric) if n in by_metric), None)
    if name is None:
        return loss, loss
    sign = 1.0 if METRICS[name].higher else -1.0
    values = [float("nan") if value is None else sign * value for value in by_metric[name]]
    return np.array(values), loss


def scores_of_best_by_client(
    setup: Setup, counts: Counts | None
) -> Mapping[str, Scores | None] | None:
    """Return validation and test scores of the clients' own best rounds, None if unknown.

    AUC is None: its histograms are of all clients together.
    """
    if not counts:
        return None
    return {part: scores_of(setup, counts, part) for part in PARTS}


# --- Losses that are NaN or infinite end a run: training diverged --------------------------------


def divergence_error(what: str, loss: float, t: int) -> TrainingError:
    """Return the error for a loss that is NaN or infinite."""
    return TrainingError(
        f"expected a finite {what} loss, got {loss} in round {t}: training diverged; lower --lr, "
        "or the server's learning rate",
        **mistake("diverged", what, t, str(loss)),
    )


def check_loss(scores: Iterable[Scores | None], part: Part, t: int) -> None:
    """Raise `TrainingError` where a judged model's loss is NaN or infinite."""
    for judged in scores:
        if judged is not None and judged.loss is not None and not math.isfinite(judged.loss):
            raise divergence_error({"val": "validation", "test": "test"}[part], judged.loss, t)


# --- Scores on receipt: what a round was worth is known when the next one has trained ------------
#
# The clients' own models are scored in their round. The server's model is scored by who receives
# it to train in the next round, before it trains, and sent for that to the other clients only.
# The last round is scored at once.


@dataclass(frozen=True, eq=False)
class PendingRound:
    """A round whose server's model is not scored yet.

    Attributes:
        judged: scores of the clients' own models.
        row: of the table of rounds, without scores of the server's model.
    """

    judged: JudgedRound
    row: Row


def score_own_models(
    setup: Setup, t: int, report: RoundReport, seconds: float, virtual: float | None
) -> PendingRound:
    """Score the clients' own models of a round."""
    own = own_counts_of(setup, t, training_key(setup.config))
    judged_round = judged_from_counts(setup, t, None, own, None, setup.federation.away)
    _check_losses(judged_round)
    return PendingRound(judged_round, row_of(setup, judged_round, report, seconds, virtual))


def counts_on_receipt(setup: Setup, t: int, state: ServerState, report: RoundReport) -> Counts:
    """Return all clients' counts of the server's model of round t.

    Args:
        setup: the run.
        t: the round.
        state: the server's after it.
        report: of the next round, in which some clients have scored it.

    Raises:
        TrainingError: the method's clients do not score what they receive.
    """
    fields = {name: Stacked(tensor) for name, tensor in report.trained.items()}
    received = tensors_under(RECEIVED, fields)
    if not received:
        raise TrainingError(
            f"expected clients of {setup.method.name} to score the model that they receive, got a "
            "round without such counts: call by Server.average and keep its report, or set "
            "Method.scores_on_receipt to False"
        )
    fed, config = setup.federation, setup.config
    answered = zip(fed.ids, report.trained["answered"].tolist(), strict=True)
    other_clients = [
        name for name, has_answered in answered if not has_answered and name not in fed.away
    ]
    if scored_by_participants(setup):
        other_clients = []
    inbox = weights_message(setup, state, other_clients) if other_clients else {}
    key, ranks = training_key(config).fold("judge server", t), config.relevant is not None
    return received_counts(
        fed, received, other_clients, inbox, key, setup.method_config.count_rules, ranks=ranks
    )


def add_server_scores(
    setup: Setup, pending: PendingRound, server: Counts, weights: Params
) -> tuple[JudgedRound, Row]:
    """Return a round with the scores of the server's model, and its row."""
    partial_scores, away = pending.judged, setup.federation.away
    absent_clients = tuple(
        name for name in setup.federation.ids if name in {*partial_scores.away, *away}
    )
    val, test = (
        {**scores, "server": scores_of(setup, server, part)}
        for part, scores in zip(PARTS, (partial_scores.val, partial_scores.test), strict=True)
    )
    judged_round = replace(
        partial_scores, server=server, weights=weights, val=val, test=test, away=absent_clients
    )
    _check_losses(judged_round)
    return judged_round, pending.row | _score_columns(
        setup, judged_round, ("server",)
    ) | _scored_clients(setup, judged_round)


def _check_losses(judged_round: JudgedRound) -> None:
    check_loss(judged_round.val.values(), "val", judged_round.round)
    check_loss(judged_round.test.values(), "test", judged_round.round)
