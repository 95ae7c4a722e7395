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
from silograph.experiment.run.progress import Progress, RunFacts, Watched
from silograph.experiment.run.result import Result, make_result
from silograph.experiment.run.result_folder import ResultFolder
from silograph.experiment.run.round_scores import (
    Counts,
    Judged,
    Pending,
    begin,
    check_loss,
    complete,
    counts_on_receipt,
    diverged,
    is_better,
    judge,
    judged,
    loss_text,
    progress_of,
    row_of,
    scored_by_participants,
    server_counts_of,
)
from silograph.experiment.run.selecting import (
    Controlling,
    Selection,
    check_report,
    controlling,
    with_knobs,
)
from silograph.experiment.run.setup import Setup, first_weights, versions
from silograph.experiment.run.snapshot import (
    STATISTICS,
    Snapshot,
    best_apart,
    part_of,
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

    def row(self, setup: Setup, now: Judged) -> Row:
        """Return its row, once it is scored."""
        return row_of(setup, now, self.report, self.clock.seconds(), self.virtual)


@dataclass(frozen=True, eq=False)
class Scored:
    """What scoring in a round has come to.

    Attributes:
        best: the best round so far.
        latest: the round that was scored, None if none was.
        rows: of rounds that were scored.
        judged: these rounds.
        pending: this round, where the next one completes its scores.
    """

    best: Judged | None
    latest: Judged | None
    rows: list[Row]
    judged: tuple[Judged, ...] = ()
    pending: Pending | None = None


def scored_now(setup: Setup, before: Snapshot, done: TrainedRound) -> Scored:
    """Score a round at once, if it is to be scored."""
    if not _is_judged(setup, done.t):
        return Scored(before.best, None, [])
    now, best = judge_finite(setup, done.state, done.t), before.best
    best = _with_own(setup, now) if is_better(setup, now, best) else best
    return Scored(best, now, [done.row(setup, now)], (now,))


def scored_late(setup: Setup, before: Snapshot, done: TrainedRound) -> Scored:
    """Complete the scores of the round before, and begin those of this one."""
    best, latest, rows = before.best, None, []
    if before.pending is not None:
        weights, t = before.state.weights, before.round
        assert weights is not None  # clients train from them
        counts = counts_on_receipt(setup, t, before.state, done.report)
        latest, row = complete(setup, before.pending, counts, weights)
        best = latest if is_better(setup, latest, best) else best
        rows.append(row)
    pending = None
    if _is_judged(setup, done.t):
        seconds = done.clock.seconds()
        pending = begin(setup, done.t, done.report, seconds, done.virtual)
    return Scored(best, latest, rows, () if latest is None else (latest,), pending)


def scored_at_last(setup: Setup, done: TrainedRound, scored: Scored) -> Scored:
    """Score the last round, where that is still to be done.

    Where rounds were scored by their participants, all clients score the best one, too: then the
    better of these two is the best one.
    """
    weights, best, key = done.state.weights, scored.best, training_key(setup.config)
    if best is not None and scored_by_participants(setup):
        best = _scored_by_all(setup, done, best)
    if scored.pending is not None:
        assert weights is not None  # clients train from them
        counts = server_counts_of(setup, done.state, key.fold("judge server", done.t))
        now, row = complete(setup, scored.pending, counts, weights)
        best = now if is_better(setup, now, best) else best
        return Scored(best, scored.latest, [*scored.rows, row], (*scored.judged, now))
    if best is None:  # a limit before the first evaluation
        best = _with_own(setup, judge_finite(setup, done.state, done.t))
        return Scored(best, scored.latest, [done.row(setup, best)], (best,))
    return replace(scored, best=best)


def _scored_by_all(setup: Setup, done: TrainedRound, best: Judged) -> Judged:
    """Return the best round with all clients' counts of the server's model, sent to them again."""
    key = training_key(setup.config).fold("best", "judge server", done.t)
    state = replace(done.state, weights=best.weights)
    counts, away = server_counts_of(setup, state, key), setup.federation.away
    gone = tuple(name for name in setup.federation.ids if name in {*best.away, *away})
    return judged(setup, best.round, counts, best.personalized, best.weights, gone)


def _is_judged(setup: Setup, t: int) -> bool:
    """Whether a round is to be scored."""
    return t % setup.config.eval_every == 0 or t == setup.config.rounds


def _with_own(setup: Setup, best: Judged) -> Judged:
    """Return a round that was just judged, with the clients' own models."""
    method, cfg, states = setup.method, setup.method_config, setup.federation.states()
    return replace(best, own=own_weights(method, cfg, best.weights or {}, states))


def judge_finite(setup: Setup, state: ServerState, t: int) -> Judged:
    """Judge a round; raise `TrainingError` where training diverged."""
    now = judge(setup, state, t, training_key(setup.config))
    check_loss(now.val.values(), "val", t)
    check_loss(now.test.values(), "test", t)
    return now


IDLE = 10  # times what a checkpoint took pass before the next one, where nothing says how often


def first_snapshot(setup: Setup) -> Snapshot:
    """Set up the clients and return the run before its first round; they write that down."""
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
    specs = setup.sums
    fitted: dict[str, Tensor] = {}
    if specs:  # before any features leave a client
        results = fit_statistics(setup.federation, specs, key.fold("statistics"))
        fitted = {f"{name}/mean": result.mean for name, result in results.items()}
        fitted |= {f"{name}/deviation": result.deviation for name, result in results.items()}
    if config.collect:
        collect(setup.federation, config.collect, key.fold("collect"))
    weights = first_weights(setup)
    with at_server(setup.method.init, f"method {setup.method.name}", 0):
        state = setup.method.init(setup.federation, setup.method_config, weights, key.fold("init"))
    if fitted:
        state = with_part(state, STATISTICS, fitted)
    selection = _selection(setup)
    if selection is not None:
        state = selection.begin(state)
    scores = None
    if setup.method.needs.score_first:
        scores = replace(judge_finite(setup, state, 0), weights=None)
    control, virtual = controlling(setup), virtual_seconds(setup, None, 0)
    if control is not None:
        state = control.begin(state, scores, virtual)
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


def _selection(setup: Setup) -> Selection | None:
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
    trackers: Watched,
    first_use: FirstUse | None = None,
) -> Result:
    """Go on from a snapshot to the end of the run.

    Args:
        setup: the run.
        folder: where checkpoints and results go, or None.
        display: told of every round.
        snapshot: where the run is; its federation has the states that belong to it.
        rows: the table of rounds so far; grows.
        trackers: told of every judged round, unless the run is complete already.
        first_use: knows what this process has spent on new kernels since the call; None is nothing.
    """
    config, first_use = setup.config, first_use or NoFirstUse()
    clock = TrainingClock(time.monotonic() - snapshot.seconds, first_use)
    metric = progress_of(setup, rows[-1]) if rows else ""
    complete, selection = folder is not None and folder.is_complete, _selection(setup)
    path = None if folder is None else str(folder.path)
    if not complete:
        facts = RunFacts(setup.method.name, snapshot.round, path, setup.partition_hash, versions())
        trackers.begin(replace(config, out=path), facts)
    took, written = 0.0, time.monotonic()  # seconds of the last checkpoint, and when it was there
    while snapshot.round < config.rounds and snapshot.stopped is None:
        committed = () if folder is None else folder.checkpoints.rounds or (0,)
        snapshot, scored_rows = _whole_round(setup, selection, snapshot, clock, committed)
        for row in scored_rows:
            rows.append(row)
            metric = progress_of(setup, row)
            if folder is not None:
                folder.add_round(row)
            trackers.round(row)
        if folder is not None and _is_due(config, snapshot, time.monotonic() - written, took):
            since = time.monotonic()
            _write_checkpoint(setup, snapshot, folder)
            written = time.monotonic()
            took = written - since
        if not rows and snapshot.pending is not None:  # round 1 is scored when round 2 begins
            metric = loss_text(snapshot.pending.row)
        display.update(snapshot.round, metric)
    handed = _hand_over(setup, snapshot)
    result = make_result(
        setup,
        snapshot,
        rows,
        path,
        handed,
        lambda line: display.update(snapshot.round, line),
        first_use.seconds,
    )
    if folder is not None:
        result = folder.as_told(result) if complete else result
        folder.finish(result, setup)
        add_report(folder.path)
    if not complete:
        trackers.end(result)
    return result


def _hand_over(setup: Setup, snapshot: Snapshot) -> int:
    """Give the clients what the run has come to; return the bytes that it took."""
    best = snapshot.best
    assert best is not None  # a run ends after a judged round
    weights = named("weights", best.weights or {})
    return setup.federation.hand_over(best.round, {n: Shared(w) for n, w in weights.items()})


def _is_due(config: ResolvedConfig, snapshot: Snapshot, idle: float, took: float) -> bool:
    """Whether there is to be a checkpoint of a round.

    Args:
        config: says every how many rounds; if it does not, the clock does.
        snapshot: of the round.
        idle: seconds since the last checkpoint was there, or the first round of this process began.
        took: seconds that the last checkpoint took, 0 before the first of this process.
    """
    every = config.checkpoint_every
    if every == 0:
        return False
    over = snapshot.round == config.rounds or snapshot.stopped is not None
    due = idle >= IDLE * took if every is None else snapshot.round % every == 0
    return over or due


def _write_checkpoint(setup: Setup, snapshot: Snapshot, folder: ResultFolder) -> None:
    """Write the ledger so far, the best model where it stays apart, and the snapshot."""
    folder.add_records(setup.federation.ledger)
    apart = best_apart(snapshot)
    if apart is not None and snapshot.best is not None:
        folder.checkpoints.keep_best(snapshot.best.round, apart)
    folder.checkpoints.write(to_checkpoint(setup, snapshot, folder.run, folder.prefixes()))


def _whole_round(
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
            after, rows = _round(setup, selection, before, clock)
            best = () if after.best is None else (after.best.round,)  # silos get it in the end
            setup.federation.keep(after.round, sorted({*committed, *best}))
        except AwayError as away:
            setup.federation.rejoin(away)
        else:
            return after, rows


def _round(
    setup: Setup, selection: Selection | None, before: Snapshot, clock: TrainingClock
) -> tuple[Snapshot, list[Row]]:
    """Run one round; return the run after it, and the rows of rounds that were scored in it."""
    config, fed, key = setup.config, setup.federation, training_key(setup.config)
    t, executed = before.round + 1, fed.executed
    fed.start_round(t)
    control = controlling(setup)
    cfg = _config_of(setup, selection, control, before)
    since = clock.seconds()
    with at_server(setup.method.round, f"method {setup.method.name}", t):
        state, report = setup.method.round(fed, cfg, without_parts(before.state), t, key)
    check_report(setup, cfg, report, t, key)
    on_held = setup.method.setting.on_held
    if on_held is not None and setup.server_block is not None:
        state = on_held(cfg, setup.server_block, state, t, key)
    if fitted := part_of(before.state, STATISTICS):
        state = with_part(state, STATISTICS, fitted)
    own, report = report, with_knobs(report, cfg.knobs)
    if report.train_loss is not None and not math.isfinite(report.train_loss):
        raise diverged("training", report.train_loss, t)
    took, virtual = clock.seconds() - since, virtual_seconds(setup, before, t)
    done, received = TrainedRound(t, state, report, clock, virtual), cfg.received
    scored = (scored_late if received == "all" else scored_now)(setup, before, done)
    now = scored.latest
    last = before.scores
    if last is not None and now is not None:
        last = replace(now, weights=None)
    if selection is not None:
        late = received == "all"  # scores of the round before, which the selector does not read
        counts = None if now is None or late else _counts_that_decide(setup, now)
        state = selection.observe(before.state, state, t, report, counts)
    if control is not None:
        state = control.observe(before.state, state, t, own, last, cfg.knobs, virtual, took)
    seconds, exchanged = clock.seconds(), fed.ledger.bytes
    stop = _reason_to_stop(setup, selection, done, scored, state, seconds)
    if stop is not None or t == config.rounds:
        scored = scored_at_last(setup, done, scored)
    if stop is not None:
        stop = stop.after_evaluation(fed.ledger.bytes - exchanged)
    facts = checked_facts(report, len(fed.ids), t)
    if executed is not None and fed.executed is not None:
        executed = (before.executed or 0.0) + fed.executed - executed
    stopped = None if stop is None else str(stop)
    after = Snapshot(
        t, state, scored.best, seconds, stopped, last, facts, done.virtual, scored.pending, executed
    )
    each = before.each
    for done_round in scored.judged:
        each = each_best.with_round(setup, each, done_round.personalized)
    return replace(after, each=each), scored.rows


def _reason_to_stop(
    setup: Setup,
    selection: Selection | None,
    done: TrainedRound,
    scored: Scored,
    state: ServerState,
    seconds: float,
) -> Stop | None:
    """Return why the run stops after a round, or None.

    Args:
        setup: the run.
        selection: what selects its clients.
        done: the round.
        scored: what has been scored in it.
        state: the server's, once selection and control have observed the round.
        seconds: of training so far.
    """
    now = scored.latest
    stop = reason_to_stop(
        setup.config,
        t=done.t if now is None else now.round,
        best_round=done.t if scored.best is None else scored.best.round,
        validation=None if now is None else now.val[setup.method.evaluate.view],
        total_bytes=setup.federation.ledger.bytes,
        seconds=seconds,
        virtual_seconds=done.virtual,
        first=done.t == 1,
    )
    if stop is None and selection is not None:
        return selection.reason_to_stop(state, done.t + 1)
    return stop


def _config_of(
    setup: Setup, selection: Selection | None, control: Controlling | None, before: Snapshot
) -> MethodConfig[Any]:
    """Return the method's config in the next round: who takes part, with which knobs."""
    cfg, t, key = setup.method_config, before.round + 1, training_key(setup.config)
    if selection is not None:
        cfg = selection.choose(before.state, t, key)
    elif setup.method.selects and cfg.participation < 1:  # drawn once, for the round and its check
        cfg = replace(cfg, selected=selected(setup.federation, cfg, t, key))
    if control is not None:
        known = before.state, before.scores, before.virtual_seconds
        cfg = replace(cfg, knobs=control.propose(*known, t, key))
    return cfg.in_round(t)


def _counts_that_decide(setup: Setup, now: Judged) -> Counts | None:
    """Return the counts of the view that picks the round."""
    return now.server if setup.method.evaluate.view == "server" else now.personalized


def virtual_seconds(setup: Setup, before: Snapshot | None, t: int) -> float | None:
    """Return the virtual seconds up to the end of a round, the ledger's last; None: no clock."""
    clock = clock_of(setup.config, setup.federation.ids)
    if clock is None:
        return None
    passed = 0.0 if before is None else before.virtual_seconds or 0.0
    return passed + clock.seconds(records_of_last_round(setup.federation.ledger, t))


def checked_facts(report: RoundReport, clients: int, t: int) -> Mapping[str, Tensor]:
    """Return the facts by client, on the CPU; raise `TrainingError` where they are not (C,)."""
    for name, fact in report.client_facts.items():
        if fact.shape != (clients,):
            raise TrainingError(
                f"expected a value for each of {clients} clients as fact {name!r}, got shape "
                f"{tuple(fact.shape)} in round {t}"
            )
    return {name: fact.cpu() for name, fact in report.client_facts.items()}
