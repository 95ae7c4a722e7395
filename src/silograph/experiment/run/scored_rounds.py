"""Scoring a round once it has trained: at once, on receipt in the next one, or at the end."""

from dataclasses import dataclass, replace

from silograph.core.resolved_config import training_key
from silograph.experiment.result_files import Row
from silograph.experiment.run.clock import TrainingClock
from silograph.experiment.run.delayed_scores import (
    Pending,
    begin,
    complete,
    counts_on_receipt,
)
from silograph.experiment.run.divergence import check_loss
from silograph.experiment.run.round_scores import (
    Judged,
    is_better,
    judge,
    judged,
    row_of,
    scored_by_participants,
    server_counts_of,
)
from silograph.experiment.run.setup import Setup
from silograph.experiment.run.snapshot import Snapshot
from silograph.methods.base import RoundReport, ServerState, own_weights


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
