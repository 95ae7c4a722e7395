"""Judging a round: the counts that clients report, the scores, and which round is best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import Payload
from silograph.core.sent_weights import PLAIN_WEIGHTS
from silograph.evaluation.evaluate import HISTOGRAM, counts_of, own_counts, rows_here
from silograph.evaluation.ranking import unranked, with_rankings
from silograph.exchange.sent_weights import outgoing, remembered_form
from silograph.experiment.resolve.run_metric import scores_some
from silograph.experiment.result_files import FACT, VIRTUAL, Row
from silograph.experiment.run.setup import Setup, uncut_block
from silograph.federation.base import positions_of
from silograph.methods.base import RoundReport, ServerState
from silograph.nn.conv import Params
from silograph.task.base import ClientValues, Task
from silograph.task.counts import JudgedRows
from silograph.task.metric_table import LOSS, METRICS, RANKINGS, Metric
from silograph.task.registry import task_of
from silograph.task.scores import PARTS, ClassScores, Scores, Views, constant_scores

Counts = Mapping[str, Tensor]
SCORED_CLIENTS = f"{FACT}scored_clients"
ViewScores = Mapping[str, Scores | None]


@dataclass(frozen=True, eq=False)
class Judged:
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
            `silograph.experiment.run.own_models`.
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
    ranks = setup.config.relevant is not None
    return tuple(n for n in task_in(setup).metrics if ranks or n not in RANKINGS)


def columns_of(setup: Setup) -> tuple[str, ...]:
    """Return the metrics of the table of rounds: those of the task, and the one of the run."""
    columns, chosen = task_in(setup).columns, run_metric(setup).name
    if setup.config.relevant is not None:
        return (*columns, *RANKINGS, *({chosen} - {*columns, *RANKINGS}))
    return columns if chosen in columns else (*columns, chosen)


def judged(
    setup: Setup,
    t: int,
    server: Counts | None,
    own: Counts,
    weights: Params | None,
    away: tuple[str, ...],
) -> Judged:
    """Return a round with the scores of its counts."""
    task = task_in(setup)
    val, test = (
        {
            "server": None if server is None else task.scores(server, part),
            "personalized": task.scores(own, part),
        }
        for part in PARTS
    )
    return Judged(t, server, own, weights, val, test, away)


def judge(setup: Setup, state: ServerState, t: int, key: Key) -> Judged:
    """Ask all clients what the server's and their own models get right."""
    server = None
    if state.weights is not None:
        server = server_counts_of(setup, state, key.fold("judge server", t))
    own = own_counts_of(setup, t, key)
    return judged(setup, t, server, own, state.weights, setup.federation.away)


def server_counts_of(setup: Setup, state: ServerState, key: Key) -> Counts:
    """Return all clients' counts of the server's model, which is sent to them."""
    fed, cfg = setup.federation, setup.method_config
    inbox = weights_message(setup, state, fed.ids)
    counts = setup.method.evaluate.counts(fed, cfg.model, inbox, key, cfg.count_rules)
    return counts if setup.config.relevant is None else with_rankings(fed, counts, "server", key)


def own_counts_of(setup: Setup, t: int, key: Key) -> Counts:
    """Return all clients' counts of their own models, as round t has left them."""
    fed, judging = setup.federation, key.fold("judge own", t)
    own = own_counts(fed, judging, setup.method_config.count_rules)
    return own if setup.config.relevant is None else with_rankings(fed, own, "own", judging)


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
    return outgoing(cfg, state.weights, remembered_form(state.memory), positions)


def is_better(setup: Setup, new: Judged, old: Judged | None) -> bool:
    """Whether `new` is chosen over `old`: by the run's metric, then loss; the later if none.

    Rounds that were judged without some clients compare on the nodes that both have counted. Rounds
    that were scored by their participants compare by the scores as they are: two draws may have no
    client in common. Of the best and the last one all clients decide in the end.
    """
    view = setup.method.evaluate.view
    ours, theirs = new.val[view], None if old is None else old.val[view]
    if scored_by_participants(setup):
        if ours is None:  # nobody who scored it has a validation node
            return theirs is None
    elif old is not None and new.away != old.away:
        ours, theirs = (_val_of_both(setup, one, other) for one, other in ((new, old), (old, new)))
    if ours is None or theirs is None:
        return True
    metric, loss = run_metric(setup), METRICS[LOSS]
    ranks = [
        (metric.goodness(scores[metric.name]), loss.goodness(scores[LOSS]))
        for scores in (ours, theirs)
    ]
    return ranks[0] > ranks[1]


def _val_of_both(setup: Setup, one: Judged, other: Judged) -> Scores | None:
    """Return validation scores of `one`, on the clients that `other` has counted, too."""
    counts, others = (
        j.server if setup.method.evaluate.view == "server" else j.personalized for j in (one, other)
    )
    if counts is None or others is None:
        return None
    both = (counts["val.nodes"] > 0) & (others["val.nodes"] > 0)
    # Histograms are of all clients together: rounds without some of them compare by the loss.
    mine = (n for n in counts if n.startswith("val.") and not n.endswith(HISTOGRAM))
    kept = {n: counts[n][both] for n in mine}
    return task_in(setup).scores(kept, "val")


def scored_by_participants(setup: Setup) -> bool:
    """Whether models of rounds are scored by some clients only."""
    cfg = setup.method_config
    return scores_some(setup.config) and cfg.received == "all" and not cfg.everyone_trains


def row_of(
    setup: Setup,
    judged: Judged,
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


def server_columns(setup: Setup, judged: Judged) -> Row:
    """Return the scores of the server's model in a row of the table."""
    return _score_columns(setup, judged, ("server",)) | _scored_clients(setup, judged)


def _scored_clients(setup: Setup, judged: Judged) -> Row:
    """Return how many clients have nodes in the scores of the server's model, if not all."""
    if not scored_by_participants(setup):
        return {}
    counts = judged.server
    if counts is None:
        return {SCORED_CLIENTS: None}
    return {SCORED_CLIENTS: float(((counts["val.nodes"] + counts["test.nodes"]) > 0).sum())}


def _score_columns(setup: Setup, judged: Judged, kept: tuple[str, ...]) -> Row:
    row: Row = {}
    for part, views in (("val", judged.val), ("test", judged.test)):
        for view in kept:
            scores = views[view]
            for name in columns_of(setup):
                if part == "test" or METRICS[name].validation or name == run_metric(setup).name:
                    row[f"{part}_{view}_{name}"] = None if scores is None else scores[name]
    return row


def progress_of(setup: Setup, row: Row) -> str:
    """Return what progress shows of a row."""
    metric = run_metric(setup)
    value = row[f"val_{setup.method.evaluate.view}_{metric.name}"]
    shown = "-" if value is None else f"{value:.3f}"
    return f"val {metric.title} {shown}  {loss_text(row)}"


def loss_text(row: Row) -> str:
    """Return what progress shows of a row that has no scores yet."""
    loss = "-" if row["train_loss"] is None else f"{row['train_loss']:.3f}"
    return f"train loss {loss}"


def uncut_rows(setup: Setup, weights: Params) -> JudgedRows:
    """Return what the server's model says of the uncut graph, each node counted for its owner."""
    block, partition = uncut_block(setup), setup.cut.partition
    owner = partition.owner.to(setup.device)
    held = owner >= 0
    split = block.split.map(lambda mask: mask & held)
    judged = replace(block, split=split)
    cfg, clients = setup.method_config, len(partition.ids)
    return rows_here(cfg.backend, cfg.model, weights, judged, owner, clients)


def uncut_counts(setup: Setup, rows: JudgedRows) -> Counts:
    """Return the counts of `uncut_rows`."""
    counts = counts_of(rows, val_histogram=setup.method_config.count_rules.val_histogram)
    ranked = setup.method_config.relevant is not None
    return counts | (unranked(rows.groups) if ranked else {})


def baseline_scores(setup: Setup, best: Judged) -> Scores | None:
    """Return the test scores of the best constant prediction by all training labels.

    The experiment knows the labels, as it has cut the graph. Silos would not tell them: what they
    do tell has the classes of validation nodes, and the commonest of these is what counts then.
    """
    if setup.simulated is None:
        told = best.personalized if best.server is None else best.server
        form = task_in(setup).labels
        return constant_scores(told, form) if form in ("multiclass", "multilabel") else None
    graph, split = setup.cut.graph, setup.cut.split
    owner, task = setup.cut.partition.owner, task_in(setup)
    known = graph.labeled & (owner >= 0)
    rows = (known & split.test).nonzero()[:, 0]
    outputs = task.outputs(setup.schema)
    constant = task.constant_logits(graph.y[known & split.train], outputs)
    nobody = torch.zeros(len(rows), dtype=torch.bool)
    judged = JudgedRows(
        constant.expand(len(rows), outputs),
        graph.y[rows],
        nobody,
        owner[rows],
        len(setup.cut.partition.ids),
        graph.task,
    )
    counts = counts_of(judged)
    if setup.config.relevant is not None:
        counts |= unranked(judged.groups)
    return task.scores(counts, "test")


def views_of(setup: Setup, best: Judged, uncut: Counts | None) -> tuple[Views, Views]:
    """Return the validation and test scores of a round in all three views."""
    task = task_in(setup)
    val, test = (
        Views(
            uncut=None if uncut is None else task.scores(uncut, part),
            **(best.val if part == "val" else best.test),
        )
        for part in PARTS
    )
    return val, test


def scores_by_class(setup: Setup, best: Judged) -> dict[str, ClassScores]:
    """Return the test scores of each class in a round, in the view that picks the round."""
    view = setup.method.evaluate.view
    counts = best.server if view == "server" else best.personalized
    if counts is None or best.test[view] is None:
        return {}
    found = task_in(setup).class_scores(counts, "test")
    names = setup.schema.class_names or [str(k) for k in range(len(found))]
    return dict(zip(names, found, strict=True))


def scores_by_client(
    setup: Setup, best: Judged, uncut: Counts | None
) -> dict[str, dict[str, ClientValues]]:
    """Return each client's test scores in a round, by metric and by the views that exist."""
    views = {"server": best.server, "uncut": uncut, "personalized": best.personalized}
    task = task_in(setup)
    found = {
        view: task.client_scores(counts, "test")
        for view, counts in views.items()
        if counts is not None
    }
    return {name: {view: by[name] for view, by in found.items()} for name in task.by_client}


def clients_scored(best: Judged) -> dict[str, dict[str, int]]:
    """Return how many clients are behind the test scores of a round; see `Result`."""
    views = {"server": best.server, "personalized": best.personalized}
    names = {"nodes": "test.nodes", "auc": "test.has_histogram"}
    return {
        view: {n: int((counts[field] > 0).sum()) for n, field in names.items() if field in counts}
        for view, counts in views.items()
        if counts is not None
    }
