"""The round loop: from a snapshot to a result, with checkpoints on the way."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from silograph.core.errors import TrainingError
from silograph.core.payload import Shared, named
from silograph.core.resolved_config import ResolvedConfig, training_key
from silograph.exchange.collect import collect, fit_statistics
from silograph.experiment.report import add_report
from silograph.experiment.result_files import Row
from silograph.experiment.run import round_scores as each_best
from silograph.experiment.run.clock import (
    FirstUse,
    NoFirstUse,
    Stop,
    TrainingClock,
    clock_of,
    reason_to_stop,
    watch_first_use,
)
from silograph.experiment.run.progress import Progress, RunFacts, TrackerGroup
from silograph.experiment.run.result import Result, make_result
from silograph.experiment.run.result_folder import ResultFolder
from silograph.experiment.run.round_scores import (
    Counts,
    JudgedRound,
    PendingRound,
    add_server_scores,
    check_loss,
    counts_on_receipt,
    divergence_error,
    is_better,
    judge,
    judged_from_counts,
    loss_text,
    progress_of,
    row_of,
    score_own_models,
    scored_by_participants,
    server_counts_of,
)
from silograph.experiment.run.selecting import (
    RunControl,
    Selection,
    check_report,
    make_run_control,
    with_knobs,
)
from silograph.experiment.run.setup import Setup, first_weights, versions
from silograph.experiment.run.snapshot import (
    STATISTICS,
    Snapshot,
    part_of,
    separate_best_weights,
    to_checkpoint,
    with_part,
    without_parts,
)
from silograph.federation.base import AwayError, at_server
from silograph.federation.ledger import records_of_last_round
from silograph.methods.base import MethodConfig, RoundReport, ServerState, own_weights
from silograph.methods.local_training import selected
from silograph.selection.base import ALL, UNIFORM

# --- scored rounds -------------------------------------------------------------------------------
# Scoring a round once it has trained: at once, on receipt in the next one, or at the end.


@dataclass(frozen=True, eq=False)
class TrainedRound:
    """A round before it is scored.

    Attributes:
        t: its number.
        state: the server's after it.
        report: what the method reports of it.
        clock: of the run.
        virtual: seconds of the virtual clock so far, None without one.
    """

    t: int
    state: ServerState
    report: RoundReport
    clock: TrainingClock
    virtual: float | None

    def row(self, setup: Setup, judged_round: JudgedRound) -> Row:
        """Return its row, once it is scored."""
        return row_of(setup, judged_round, self.report, self.clock.seconds(), self.virtual)


@dataclass(frozen=True, eq=False)
class RoundScores:
    """The scores that became known in a round.

    Attributes:
        best: the best round so far.
        latest: the round that was scored, None if none was.
        rows: of rounds that were scored.
        judged: these rounds.
        pending: this round, where the next one completes its scores.
    """

    best: JudgedRound | None
    latest: JudgedRound | None
    rows: list[Row]
    judged: tuple[JudgedRound, ...] = ()
    pending: PendingRound | None = None


def score_now(setup: Setup, before: Snapshot, trained_round: TrainedRound) -> RoundScores:
    """Score a round at once, if it is to be scored."""
    if not _is_judged(setup, trained_round.t):
        return RoundScores(before.best, None, [])
    judged_round, best = judge_finite(setup, trained_round.state, trained_round.t), before.best
    best = _with_own_models(setup, judged_round) if is_better(setup, judged_round, best) else best
    return RoundScores(
        best, judged_round, [trained_round.row(setup, judged_round)], (judged_round,)
    )


def score_on_receipt(setup: Setup, before: Snapshot, trained_round: TrainedRound) -> RoundScores:
    """Complete the scores of the round before, and begin those of this one."""
    best, latest, rows = before.best, None, []
    if before.pending is not None:
        weights, t = before.state.weights, before.round
        assert weights is not None  # clients train from them
        counts = counts_on_receipt(setup, t, before.state, trained_round.report)
        latest, row = add_server_scores(setup, before.pending, counts, weights)
        best = latest if is_better(setup, latest, best) else best
        rows.append(row)
    pending = None
    if _is_judged(setup, trained_round.t):
        seconds = trained_round.clock.seconds()
        pending = score_own_models(
            setup, trained_round.t, trained_round.report, seconds, trained_round.virtual
        )
    return RoundScores(best, latest, rows, () if latest is None else (latest,), pending)


def score_last_round(setup: Setup, trained_round: TrainedRound, scored: RoundScores) -> RoundScores:
    """Score the last round, if it is not scored yet.

    Where rounds were scored by their participants, all clients score the best one, too: then the
    better of these two is the best one.
    """
    weights, best, key = trained_round.state.weights, scored.best, training_key(setup.config)
    if best is not None and scored_by_participants(setup):
        best = _score_by_all_clients(setup, trained_round, best)
    if scored.pending is not None:
        assert weights is not None  # clients train from them
        counts = server_counts_of(
            setup, trained_round.state, key.fold("judge server", trained_round.t)
        )
        judged_round, row = add_server_scores(setup, scored.pending, counts, weights)
        best = judged_round if is_better(setup, judged_round, best) else best
        return RoundScores(best, scored.latest, [*scored.rows, row], (*scored.judged, judged_round))
    if best is None:  # a limit before the first evaluation
        best = _with_own_models(setup, judge_finite(setup, trained_round.state, trained_round.t))
        return RoundScores(best, scored.latest, [trained_round.row(setup, best)], (best,))
    return replace(scored, best=best)


def _score_by_all_clients(
    setup: Setup, trained_round: TrainedRound, best: JudgedRound
) -> JudgedRound:
    """Return the best round with all clients' counts of the server's model, sent to them again."""
    key = training_key(setup.config).fold("best", "judge server", trained_round.t)
    state = replace(trained_round.state, weights=best.weights)
    counts, away = server_counts_of(setup, state, key), setup.federation.away
    absent_clients = tuple(name for name in setup.federation.ids if name in {*best.away, *away})
    return judged_from_counts(
        setup, best.round, counts, best.personalized, best.weights, absent_clients
    )


def _is_judged(setup: Setup, t: int) -> bool:
    """Whether a round is to be scored."""
    return t % setup.config.eval_every == 0 or t == setup.config.rounds


def _with_own_models(setup: Setup, judged_round: JudgedRound) -> JudgedRound:
    """Return a round that was just judged, with the clients' own models."""
    method, cfg, states = setup.method, setup.method_config, setup.federation.states()
    return replace(judged_round, own=own_weights(method, cfg, judged_round.weights or {}, states))


def judge_finite(setup: Setup, state: ServerState, t: int) -> JudgedRound:
    """Judge a round; raise `TrainingError` where training diverged."""
    judged_round = judge(setup, state, t, training_key(setup.config))
    check_loss(judged_round.val.values(), "val", t)
    check_loss(judged_round.test.values(), "test", t)
    return judged_round


IDLE = 10  # without `checkpoint_every`, 10 times the seconds of a checkpoint pass before the next


def first_snapshot(setup: Setup) -> Snapshot:
    """Set up the clients, which save their state, and return the run before its first round."""
    while True:
        try:
            with watch_first_use(setup.config.kernels) as watch:
                start = _set_up(setup, TrainingClock(time.monotonic(), watch))
            setup.federation.keep(start.round, ())
        except AwayError as away:
            setup.federation.rejoin(away)
        else:
            return start


def _set_up(setup: Setup, clock: TrainingClock) -> Snapshot:
    config, key = setup.config, training_key(setup.config)
    sum_specs = setup.sums
    fitted_statistics: dict[str, Tensor] = {}
    if sum_specs:  # before any features leave a client
        statistics = fit_statistics(setup.federation, sum_specs, key.fold("statistics"))
        fitted_statistics = {f"{name}/mean": result.mean for name, result in statistics.items()}
        fitted_statistics |= {
            f"{name}/deviation": result.deviation for name, result in statistics.items()
        }
    if config.collect:
        collect(setup.federation, config.collect, key.fold("collect"))
    weights = first_weights(setup)
    with at_server(setup.method.init, f"method {setup.method.name}", 0):
        state = setup.method.init(setup.federation, setup.method_config, weights, key.fold("init"))
    if fitted_statistics:
        state = with_part(state, STATISTICS, fitted_statistics)
    selection = _make_selection(setup)
    if selection is not None:
        state = selection.begin(state)
    scores = None
    if setup.method.needs.score_first:
        scores = replace(judge_finite(setup, state, 0), weights=None)
    run_control, virtual = make_run_control(setup), virtual_seconds(setup, None, 0)
    if run_control is not None:
        state = run_control.begin(state, scores, virtual)
    return Snapshot(
        round=0,
        state=state,
        best=None,
        seconds=clock.seconds(),  # some methods train before the first round
        stopped=None,
        scores=scores,
        virtual_seconds=virtual,
        executed=setup.federation.executed,
        each={},
    )


def _make_selection(setup: Setup) -> Selection | None:
    """Return what selects clients, None where the method's own uniform draw does."""
    selector = setup.parts.selector
    # `all` and `uniform` need nothing from the server, unless the number of clients is limited.
    if selector.part in (ALL, UNIFORM) and not setup.method_config.limited:
        return None
    return Selection(selector.part, selector.options, setup)


def train(
    setup: Setup,
    folder: ResultFolder | None,
    display: Progress,
    snapshot: Snapshot,
    rows: list[Row],
    trackers: TrackerGroup,
    first_use: FirstUse | None = None,
) -> Result:
    """Train from a snapshot to the end of the run.

    Args:
        setup: the run.
        folder: where checkpoints and results go, or None.
        display: called after every round.
        snapshot: where the run is; its federation has the states that belong to it.
        rows: the table of rounds so far; grows.
        trackers: called after every scored round, unless the run is complete already.
        first_use: measures what this process spends on new kernels; None: nothing.
    """
    config, first_use = setup.config, first_use or NoFirstUse()
    clock = TrainingClock(time.monotonic() - snapshot.seconds, first_use)
    metric = progress_of(setup, rows[-1]) if rows else ""
    is_complete, selection = folder is not None and folder.is_complete, _make_selection(setup)
    path = None if folder is None else str(folder.path)
    if not is_complete:
        facts = RunFacts(setup.method.name, snapshot.round, path, setup.partition_hash, versions())
        trackers.begin(replace(config, out=path), facts)
    # How long the last checkpoint took to write, and when it was complete.
    checkpoint_seconds, checkpoint_time = 0.0, time.monotonic()
    while snapshot.round < config.rounds and snapshot.stopped is None:
        committed = () if folder is None else folder.checkpoints.rounds or (0,)
        snapshot, scored_rows = _run_round_with_retries(
            setup, selection, snapshot, clock, committed
        )
        for row in scored_rows:
            rows.append(row)
            metric = progress_of(setup, row)
            if folder is not None:
                folder.add_round(row)
            trackers.round(row)
        if folder is not None and _is_due(
            config, snapshot, time.monotonic() - checkpoint_time, checkpoint_seconds
        ):
            write_start = time.monotonic()
            _write_checkpoint(setup, snapshot, folder)
            checkpoint_time = time.monotonic()
            checkpoint_seconds = checkpoint_time - write_start
        if not rows and snapshot.pending is not None:  # round 1 is scored when round 2 begins
            metric = loss_text(snapshot.pending.row)
        display.update(snapshot.round, metric)
    handed_over_bytes = _hand_over(setup, snapshot)
    result = make_result(
        setup,
        snapshot,
        rows,
        path,
        handed_over_bytes,
        lambda line: display.update(snapshot.round, line),
        first_use.seconds,
    )
    if folder is not None:
        result = folder.with_recorded_costs(result) if is_complete else result
        folder.finish(result, setup)
        add_report(folder.path)
    if not is_complete:
        trackers.end(result)
    return result


def _hand_over(setup: Setup, snapshot: Snapshot) -> int:
    """Send the clients the best model; return the bytes that it took."""
    best = snapshot.best
    assert best is not None  # a run ends after a judged round
    weights = named("weights", best.weights or {})
    return setup.federation.hand_over(best.round, {n: Shared(w) for n, w in weights.items()})


def _is_due(config: ResolvedConfig, snapshot: Snapshot, idle: float, write_seconds: float) -> bool:
    """Whether a checkpoint is to be written after a round.

    Args:
        config: says every how many rounds; if it does not, the clock does.
        snapshot: of the round.
        idle: seconds since the last checkpoint was there, or the first round of this process began.
        write_seconds: seconds that the last checkpoint took, 0 before the first of this process.
    """
    checkpoint_every = config.checkpoint_every
    if checkpoint_every == 0:
        return False
    is_last = snapshot.round == config.rounds or snapshot.stopped is not None
    is_due = (
        idle >= IDLE * write_seconds
        if checkpoint_every is None
        else snapshot.round % checkpoint_every == 0
    )
    return is_last or is_due


def _write_checkpoint(setup: Setup, snapshot: Snapshot, folder: ResultFolder) -> None:
    """Write the ledger so far, the best model where it stays apart, and the snapshot."""
    folder.add_records(setup.federation.ledger)
    separate_weights = separate_best_weights(snapshot)
    if separate_weights is not None and snapshot.best is not None:
        folder.checkpoints.keep_best(snapshot.best.round, separate_weights)
    folder.checkpoints.write(to_checkpoint(setup, snapshot, folder.run, folder.prefixes()))


def _run_round_with_retries(
    setup: Setup,
    selection: Selection | None,
    before: Snapshot,
    clock: TrainingClock,
    committed: Sequence[int],
) -> tuple[Snapshot, list[Row]]:
    """Run one round, and again where clients were away that came back; see `_round`.

    Args:
        setup: the run.
        selection: what selects its clients.
        before: where it is.
        clock: of the run.
        committed: rounds that there are checkpoints of.
    """
    while True:
        try:
            snapshot, rows = _run_round(setup, selection, before, clock)
            # Silos are sent the best round when the run is over.
            best_rounds = () if snapshot.best is None else (snapshot.best.round,)
            setup.federation.keep(snapshot.round, sorted({*committed, *best_rounds}))
        except AwayError as away:
            setup.federation.rejoin(away)
        else:
            return snapshot, rows


def _run_round(
    setup: Setup, selection: Selection | None, before: Snapshot, clock: TrainingClock
) -> tuple[Snapshot, list[Row]]:
    """Run one round; return the run after it, and the rows of rounds that were scored in it."""
    config, fed, key = setup.config, setup.federation, training_key(setup.config)
    t, executed = before.round + 1, fed.executed
    fed.start_round(t)
    # Choose clients and knobs, which may read the server's state before the round.
    run_control = make_run_control(setup)
    cfg = _round_config(setup, selection, run_control, before)
    start_seconds = clock.seconds()
    # Train. The method sees its own memory only, not that of selection and control.
    with at_server(setup.method.round, f"method {setup.method.name}", t):
        state, report = setup.method.round(fed, cfg, without_parts(before.state), t, key)
    check_report(setup, cfg, report, t, key)
    on_held = setup.method.setting.on_held
    if on_held is not None and setup.server_block is not None:
        state = on_held(cfg, setup.server_block, state, t, key)
    # Statistics were fitted once and stay in the state.
    if fitted_statistics := part_of(before.state, STATISTICS):
        state = with_part(state, STATISTICS, fitted_statistics)
    method_report, report = report, with_knobs(report, cfg.knobs)
    if report.train_loss is not None and not math.isfinite(report.train_loss):
        raise divergence_error("training", report.train_loss, t)
    round_seconds, virtual = clock.seconds() - start_seconds, virtual_seconds(setup, before, t)
    trained_round, received = TrainedRound(t, state, report, clock, virtual), cfg.received
    # Score this round, or the one before if clients score the model that they receive.
    scored = (score_on_receipt if received == "all" else score_now)(setup, before, trained_round)
    judged_round = scored.latest
    last_scores = before.scores
    if last_scores is not None and judged_round is not None:
        last_scores = replace(judged_round, weights=None)
    # Let selection and control learn from the round.
    if selection is not None:
        # Scores on receipt are of the round before, and the selector does not read them.
        counts = None
        if judged_round is not None and received != "all":
            counts = _deciding_counts(setup, judged_round)
        state = selection.observe(before.state, state, t, report, counts)
    if run_control is not None:
        state = run_control.observe(
            before.state, state, t, method_report, last_scores, cfg.knobs, virtual, round_seconds
        )
    # The last round is always scored, so limits are checked before its evaluation costs anything.
    seconds, bytes_before_evaluation = clock.seconds(), fed.ledger.bytes
    stop = _reason_to_stop(setup, selection, trained_round, scored, state, seconds)
    if stop is not None or t == config.rounds:
        scored = score_last_round(setup, trained_round, scored)
    if stop is not None:
        stop = stop.after_evaluation(fed.ledger.bytes - bytes_before_evaluation)
    facts = checked_facts(report, len(fed.ids), t)
    if executed is not None and fed.executed is not None:
        executed = (before.executed or 0.0) + fed.executed - executed
    stopped = None if stop is None else str(stop)
    snapshot = Snapshot(
        t,
        state,
        scored.best,
        seconds,
        stopped,
        last_scores,
        facts,
        trained_round.virtual,
        scored.pending,
        executed,
    )
    best_by_client = before.each
    for judged_now in scored.judged:
        best_by_client = each_best.with_round(setup, best_by_client, judged_now.personalized)
    return replace(snapshot, each=best_by_client), scored.rows


def _reason_to_stop(
    setup: Setup,
    selection: Selection | None,
    trained_round: TrainedRound,
    scored: RoundScores,
    state: ServerState,
    seconds: float,
) -> Stop | None:
    """Return why the run stops after a round, or None.

    Args:
        setup: the run.
        selection: what selects its clients.
        trained_round: the round.
        scored: what has been scored in it.
        state: the server's, once selection and control have observed the round.
        seconds: of training so far.
    """
    judged_round = scored.latest
    stop = reason_to_stop(
        setup.config,
        t=trained_round.t if judged_round is None else judged_round.round,
        best_round=trained_round.t if scored.best is None else scored.best.round,
        validation=None if judged_round is None else judged_round.val[setup.method.evaluate.view],
        total_bytes=setup.federation.ledger.bytes,
        seconds=seconds,
        virtual_seconds=trained_round.virtual,
        first=trained_round.t == 1,
    )
    if stop is None and selection is not None:
        return selection.reason_to_stop(state, trained_round.t + 1)
    return stop


def _round_config(
    setup: Setup, selection: Selection | None, control: RunControl | None, before: Snapshot
) -> MethodConfig[Any]:
    """Return the method's config in the next round: who takes part, with which knobs."""
    cfg, t, key = setup.method_config, before.round + 1, training_key(setup.config)
    if selection is not None:
        cfg = selection.choose(before.state, t, key)
    elif setup.method.selects and cfg.participation < 1:  # drawn once, for the round and its check
        cfg = replace(cfg, selected=selected(setup.federation, cfg, t, key))
    if control is not None:
        run_state = before.state, before.scores, before.virtual_seconds
        cfg = replace(cfg, knobs=control.propose(*run_state, t, key))
    return cfg.in_round(t)


def _deciding_counts(setup: Setup, judged_round: JudgedRound) -> Counts | None:
    """Return the counts of the view that picks the round."""
    is_server_view = setup.method.evaluate.view == "server"
    return judged_round.server if is_server_view else judged_round.personalized


def virtual_seconds(setup: Setup, before: Snapshot | None, t: int) -> float | None:
    """Return the virtual seconds up to the end of a round, the ledger's last; None: no clock."""
    clock = clock_of(setup.config, setup.federation.ids)
    if clock is None:
        return None
    previous_seconds = 0.0 if before is None else before.virtual_seconds or 0.0
    return previous_seconds + clock.seconds(records_of_last_round(setup.federation.ledger, t))


def checked_facts(report: RoundReport, clients: int, t: int) -> Mapping[str, Tensor]:
    """Return the facts by client, on the CPU; raise `TrainingError` where they are not (C,)."""
    for name, fact in report.client_facts.items():
        if fact.shape != (clients,):
            raise TrainingError(
                f"expected a value for each of {clients} clients as fact {name!r}, got shape "
                f"{tuple(fact.shape)} in round {t}"
            )
    return {name: fact.cpu() for name, fact in report.client_facts.items()}
