"""`run` and `resume`, and their loop of rounds: from a request to a result, with checkpoints."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from silograph.core.config import ENGINE, RunConfig, make_config, with_keywords
from silograph.core.errors import (
    ConfigError,
    StateError,
    TrainingError,
    mistake,
    reword_error,
    unknown,
)
from silograph.core.key import Key
from silograph.core.numeric_state import standard_numerics, torch_threads
from silograph.core.payload import Shared, with_prefix
from silograph.core.resolved_config import ResolvedConfig, training_key
from silograph.core.work import REUSED_MEMORY
from silograph.exchange.collect import collect, fit_statistics
from silograph.exchange.feature_drift import DriftForm, measure_drift
from silograph.exchange.shared_biases import share_biases
from silograph.experiment.report import add_report
from silograph.experiment.resolve.resolve import parse_request, parse_resume_request
from silograph.experiment.resolve.user_code import Trust, check_code, check_trusted, own_code
from silograph.experiment.result_files import LEDGER, Row
from silograph.experiment.run.clock import (
    Stop,
    TrainingClock,
    clock_of,
    reason_to_stop,
    watch_first_use,
)
from silograph.experiment.run.progress import (
    Progress,
    RunFacts,
    Tracker,
    TrackerGroup,
    check_trackers,
    generation_callback,
    line_printer,
    make_tracker,
    plan_text,
    show_progress,
)
from silograph.experiment.run.result import Result, make_result
from silograph.experiment.run.result_folder import ResultFolder, check_free
from silograph.experiment.run.round_scores import (
    JudgedRound,
    PendingRound,
    add_server_scores,
    check_loss,
    chosen_threshold,
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
    update_best_by_client,
)
from silograph.experiment.run.selecting import (
    RunControl,
    Selection,
    check_report,
    make_run_control,
    with_knobs,
)
from silograph.experiment.run.setup import Setup, first_weights, set_up, versions
from silograph.experiment.run.snapshot import (
    DISTANCES,
    STATISTICS,
    Snapshot,
    check_identity,
    from_checkpoint,
    identity,
    part_of,
    separate_best_weights,
    to_checkpoint,
    with_part,
    without_parts,
)
from silograph.experiment.run_options import RunOptions
from silograph.federation.base import AwayError, at_server
from silograph.federation.checkpoint import Checkpoint
from silograph.federation.ledger import records_of_last_round
from silograph.federation.program import BLANK
from silograph.methods.base import Method, MethodConfig, RoundReport, ServerState, own_weights
from silograph.methods.local_only import sharing_in
from silograph.methods.local_training import selected
from silograph.methods.ops import written_function
from silograph.nn.own_module import Make
from silograph.selection.base import ALL, UNIFORM
from silograph.task.threshold import NO_THRESHOLD, THRESHOLD

LOG = logging.getLogger("silograph")
MODES = ("live", "plain", "none")


@with_keywords(RunOptions)
@standard_numerics()
def run(
    graph: Any = None,
    *,
    config: RunConfig | ResolvedConfig | None = None,
    method: Method | str | None = None,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
    **options: Unpack[RunOptions],
) -> Result:
    """Train a federation and return its result.

    >>> import silograph as sg
    >>> result = sg.run("digits", clients=4, partition="random", rounds=2, hidden=8)
    >>> result.best_round in (1, 2)
    True

    Args:
        graph: a graph (also PyG `Data` or a networkx graph), or the name or path of one; or a
            list of PyG `Data`, each the graph of one client; or silos, or the path of a folder
            that holds their folders; None takes `dataset` of the config.
        config: where to start from, also that of a result; None means all defaults.
        method: a name, `FILE.py:NAME`, `package.module:NAME`, or a method as a value, which has a
            name of its own; None takes that of the config.
        progress: `live`, `plain` or `none`, on standard error; or an object whose
            `update` is called after every round.
        trackers: further trackers, besides `tracker` of the config.
        options: fields of `RunConfig`, replacing those of `config`. A result folder is written
            only if `out` is among them or in `config`. `model` may also be a class of your own,
            whose call with numbers of features and outputs gives a torch.nn.Module. `partition`
            may also be an array with the client of every node, (n,) numbers from 0 or names, a
            `Partition`, or a function of the graph that returns either.

    Raises:
        SilographError: something about the options, the graph or the cut cannot be used.
    """
    check_mode(progress)
    check_trackers(trackers)
    # Before any data is read: a wrong name should not cost a minute.
    request = parse_request(graph, config, method, options)
    tracker_group = make_trackers(request.config, trackers)
    if request.config.out is not None:
        check_free(request.config.out)
    simulation = request.read_and_resolve(generation_callback(progress))
    config = simulation.user_config
    with torch_threads(config.threads), closing(set_up(simulation)) as setup:
        first = first_snapshot(setup)  # before there is a folder: weights may not fit into memory
        if config.out is None:
            return train(setup, None, progress, first, [], tracker_group)
        folder = ResultFolder.create(config.out, setup, config, request.source)
        with closing(folder), noted_divergence(folder, is_new=True):
            return train(setup, folder, progress, first, [], tracker_group)


@contextmanager
def noted_divergence(folder: ResultFolder, *, is_new: bool = False) -> Iterator[None]:
    """Note in the folder that training diverged, or remove a new folder without rounds."""
    try:
        yield
    except TrainingError as error:
        if is_new and not folder.has_rounds:
            folder.remove()
        else:
            folder.record_divergence(str(error))
            add_report(folder.path)
        raise


def make_trackers(config: RunConfig, trackers: Sequence[Tracker]) -> TrackerGroup:
    """Return the trackers of a run; raise `ConfigError` for one that cannot be used."""
    config_trackers = [] if config.tracker is None else [make_tracker(config.tracker)]
    return TrackerGroup([*config_trackers, *trackers])


@standard_numerics()
def resume(
    path: str | os.PathLike[str],
    *,
    graph: Any = None,
    partition: Any = None,
    model: Make | None = None,
    method: Method | None = None,
    trust: Trust = False,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
    engine: Mapping[str, Any] | None = None,
) -> Result:
    """Resume an interrupted run and return its result.

    The result is identical to that of an uninterrupted run. A complete run is not trained again:
    its result is computed once more.

    Args:
        path: the run's result folder.
        graph: the graph or silos, for a run on what was in memory.
        partition: the partition, for a run whose partition was passed as a value.
        model: the class of the model, for a run with one that cannot be imported.
        method: the method, for a run whose method was passed as a value.
        trust: whether code may be imported that the folder names, as a run with `FILE.py:NAME` has
            it; or which, as `FILE.py:NAME`.
        progress: `live`, `plain` or `none`, on standard error; or an object whose
            `update` is called after every round.
        trackers: further trackers, besides `tracker` of the config.
        engine: `engine`, `workers`, `address` and `keep_every`, in place of all four of the run;
            None: as in the run.

    Raises:
        ConfigError: there is no run at `path`, another process is writing it, or it names code that
            is not trusted.
        CheckpointError: a file or the code of the run has changed, the checkpoint is of another
            config, graph or version, or no whole one is left.
    """
    check_mode(progress)
    check_trackers(trackers)
    target = Path(path)
    with closing(ResultFolder(target)) as folder:
        about = folder.about()
        if not about["simulated"]:
            raise ConfigError(
                f"expected a run of this process in {target}, got one whose graph silos hold: "
                "use silograph server --resume"
            )
        config = folder.config()
        if engine is not None:
            config = with_engine(config, engine)
        # Code that the folder names is imported only if it is trusted and as it was.
        value_kinds = {name for name, value in (("method", method), ("model", model)) if value}
        code = {kind: spec for kind, spec in own_code(config).items() if kind not in value_kinds}
        try:
            check_trusted(code, trust, target)
        except ConfigError as error:
            hint = "; or give the class: sg.resume(DIR, model=...)" if "model" in code else ""
            raise reword_error(error, f"{error}{hint}", ConfigError) from None
        check_code(about["code"], config, value_kinds)
        request = parse_resume_request(
            target, config, about["source"], graph, partition, method, model
        )
        tracker_group = make_trackers(config, trackers)
        simulation = request.read_and_resolve(generation_callback(progress))
        with torch_threads(config.threads), closing(set_up(simulation)) as setup:
            check_identity(about["same"], identity(setup), config)
            snapshot, rows = restore_run(setup, folder, about["same"])
            with noted_divergence(folder):
                return train(
                    setup, folder, progress, snapshot, rows, tracker_group, is_resumed=True
                )


def with_engine(config: RunConfig, engine: Mapping[str, Any]) -> RunConfig:
    """Return a config with another engine; raise `ConfigError` for an option of anything else."""
    for name in engine:
        if name not in ENGINE:
            raise unknown("option of an engine", name, ENGINE)
    others = {name: value for name, value in vars(config).items() if name not in ENGINE}
    return make_config(others | dict(engine), source="engine")


def restore_run(
    setup: Setup, folder: ResultFolder, run_identity: Mapping[str, str]
) -> tuple[Snapshot, list[Row]]:
    """Bring federation and folder back to the latest usable checkpoint, or to the start."""
    folder.set_identity(run_identity)
    folder.checkpoints.drop_partial()
    problems: list[str] = []
    for checkpoint in folder.checkpoints.each(folder.why_checkpoint_unusable):
        if isinstance(checkpoint, str):
            problems.append(checkpoint)
            continue
        try:
            snapshot, rows = _restore_snapshot(setup, folder, checkpoint)
        except StateError as error:  # silos may still have the round before
            problems.append(f"round {checkpoint.round} cannot be gone on from: {error}")
            continue
        for line in problems:
            LOG.warning("%s; going on from round %d", line, checkpoint.round)
        return snapshot, rows
    if problems:
        raise folder.checkpoints.none_usable(problems)
    if folder.is_complete:
        raise ConfigError(
            f"expected a run to go on with in {folder.path}, got a complete one without "
            "checkpoints: its result is in result.json",
            **mistake("completed-run", folder.path),
        )
    folder.truncate_files(dict.fromkeys(folder.sizes(), 0))
    if not setup.is_simulation:  # silos may remember more
        setup.federation.restore(BLANK, (), ())
    return first_snapshot(setup), []


def _restore_snapshot(
    setup: Setup, folder: ResultFolder, checkpoint: Checkpoint
) -> tuple[Snapshot, list[Row]]:
    """Bring federation and folder back to a checkpoint, the folder last.

    Raises:
        StateError: a silo lacks its state of that round; no file was changed.
    """
    facts = checkpoint.facts
    best_weights = folder.checkpoints.best(facts["best_round"]) if facts["best_apart"] else None
    place = folder.checkpoints.path
    snapshot, states = from_checkpoint(setup, checkpoint, best_weights, place)
    sizes = {name: size for name, (size, _) in facts["prefixes"].items()}
    records, engine_facts = folder.records(sizes[LEDGER]), facts.get("engine", {})
    setup.federation.restore(snapshot.round, states, records, engine_facts)
    return snapshot, folder.truncate_files(sizes)


def check_mode(progress: object) -> None:
    """Raise `ConfigError` for a way of showing progress that does not exist."""
    if progress not in MODES and not isinstance(progress, Progress):
        raise ConfigError(
            f"expected progress live, plain or none, got {progress!r}",
            **mistake("option-value", "progress", str(progress)),
        )


# --- Scored rounds -------------------------------------------------------------------------------
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
    method, cfg = setup.method, setup.method_config
    if method.own_weights is None:  # workers need not send their states
        return judged_round
    states = setup.federation.states()
    return replace(judged_round, own=own_weights(method, cfg, judged_round.weights or {}, states))


def judge_finite(setup: Setup, state: ServerState, t: int) -> JudgedRound:
    """Judge a round; raise `TrainingError` where training diverged."""
    judged_round = judge(setup, state, t, training_key(setup.config))
    check_loss(judged_round.val.values(), "val", t)
    check_loss(judged_round.test.values(), "test", t)
    return judged_round


# --- The loop of rounds --------------------------------------------------------------------------


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
    if config.feature_drift:
        form = DriftForm(setup.schema.num_features, config.evaluation_min_count)
        distances = measure_drift(setup.federation, form, key.fold("feature drift"))
        fitted_statistics[DISTANCES] = distances
    sharing = sharing_in(setup.method, setup.method_config.model)
    if sharing is not None:
        share_biases(setup.federation, sharing, key.fold("shared biases"))
    if config.collect:
        collect(setup.federation, config.collect, key.fold("collect"))
    weights = first_weights(setup)
    with at_server(written_function(setup.method.init), f"method {setup.method.name}", 0):
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
    if selector.part in (ALL, UNIFORM) and not setup.method_config.selector_has_budget:
        return None
    return Selection(selector.part, selector.options, setup)


def train(
    setup: Setup,
    folder: ResultFolder | None,
    progress: str | Progress,
    snapshot: Snapshot,
    rows: list[Row],
    trackers: TrackerGroup,
    report: Callable[[str], None] | None = None,
    *,
    is_resumed: bool = False,
) -> Result:
    """Train from a snapshot to the end of the run, and show its progress.

    Args:
        setup: the run.
        folder: where checkpoints and results go, or None.
        progress: how it is shown, or an object that is called after every round.
        snapshot: where the run is; its federation has the states that belong to it.
        rows: the table of rounds so far; grows.
        trackers: called after every scored round, unless the run is complete already.
        report: called with the lines at the beginning; None prints them on standard error, unless
            `progress` is `none` or an object.
        is_resumed: whether a line says from which round the run continues.
    """
    config, federation = setup.config, setup.federation
    path = None if folder is None else str(folder.path)
    report = report or line_printer(progress)
    is_complete = folder is not None and folder.is_complete
    if not is_complete:  # else nothing is left to do
        for line in first_lines(setup, snapshot, is_resumed=is_resumed):
            report(line)
    with (
        show_progress(config.rounds, progress, snapshot.round) as display,
        watch_first_use(config.kernels, report) as first_use,
    ):
        clock = TrainingClock(time.monotonic() - snapshot.seconds, first_use)
        metric, selection = progress_of(setup, rows[-1]) if rows else "", _make_selection(setup)
        if not is_complete:
            facts = RunFacts(
                setup.method.name, snapshot.round, path, setup.partition_hash, versions()
            )
            trackers.begin(replace(config, out=path), facts)
        method, checkpoints = setup.method, CheckpointWriter(setup, folder)
        while snapshot.round < config.rounds and snapshot.stopped is None:
            try:
                begun = begin_round(setup, selection, snapshot, clock)
                # The method sees its own memory only, not that of selection and control.
                own, t = without_parts(snapshot.state), begun.t
                with at_server(written_function(method.round), f"method {method.name}", t):
                    trained = method.round(federation, begun.cfg, own, t, begun.key)
                after, scored_rows = finish_round(setup, selection, snapshot, begun, *trained)
                # Clients keep their states of rounds with a checkpoint, and of the best one, which
                # they are sent when the run is over.
                kept_rounds = {*(() if folder is None else folder.checkpoints.rounds or (0,))}
                kept_rounds |= set() if after.best is None else {after.best.round}
                federation.keep(after.round, sorted(kept_rounds))
            except AwayError as away:
                federation.rejoin(away)
                continue  # the round is run again
            snapshot = after
            for row in scored_rows:
                rows.append(row)
                metric = progress_of(setup, row)
                if folder is not None:
                    folder.add_round(row)
                trackers.round(row)
            checkpoints.write_if_due(snapshot)
            if not rows and snapshot.pending is not None:  # scored when round 2 begins
                metric = loss_text(snapshot.pending.row)
            display.update(snapshot.round, metric)
        REUSED_MEMORY.release()  # no client trains any more, and the uncut graph needs memory
        result = make_result(
            setup,
            snapshot,
            rows,
            path,
            _hand_over(setup, snapshot),
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


def first_lines(setup: Setup, snapshot: Snapshot, *, is_resumed: bool) -> Iterator[str]:
    """Yield what is said of a run before it trains; see `train`."""
    config = setup.config
    yield plan_text(config)
    if setup.why_torch is not None:
        yield setup.why_torch
    if is_resumed and snapshot.round == 0:
        yield f"there is no checkpoint: beginning again with round 1 of {config.rounds}"
    elif is_resumed:
        yield f"going on with round {snapshot.round + 1} of {config.rounds}"
    if setup.edge_weights is not None and config.edge_weights != "ignore":
        yield setup.edge_weights


def _hand_over(setup: Setup, snapshot: Snapshot) -> int:
    """Send the clients the best model; return the bytes that it took."""
    best = snapshot.best
    assert best is not None  # a run ends after a judged round
    weights = with_prefix("weights", best.weights or {})
    fields = {n: Shared(w) for n, w in weights.items()}
    if setup.config.threshold is not None:
        threshold = chosen_threshold(setup, best)
        value = NO_THRESHOLD if threshold is None else threshold.probability
        fields[THRESHOLD] = Shared(torch.tensor(value, dtype=torch.float64))
    return setup.federation.hand_over(best.round, fields)


class CheckpointWriter:
    """Writes checkpoints of a run as often as its config says.

    Args:
        setup: the run.
        folder: where they go; None: nowhere.
    """

    def __init__(self, setup: Setup, folder: ResultFolder | None) -> None:
        self._setup, self._folder = setup, folder
        # When the last one was complete, or the first round of this process began, and how long it
        # took to write.
        self._last, self._seconds = time.monotonic(), 0.0

    def write_if_due(self, snapshot: Snapshot) -> None:
        """Write the ledger so far, the best model where it stays apart, and the snapshot."""
        folder, federation = self._folder, self._setup.federation
        if folder is None or not self._is_due(snapshot):
            return
        start = time.monotonic()
        folder.add_records(federation.ledger)
        separate_weights = separate_best_weights(snapshot)
        if separate_weights is not None and snapshot.best is not None:
            folder.checkpoints.keep_best(snapshot.best.round, separate_weights)
        files = federation.write_states(folder.checkpoints.make(), snapshot.round)
        checkpoint = to_checkpoint(self._setup, snapshot, folder.run, folder.prefixes(), files)
        folder.checkpoints.write(checkpoint)
        self._last = time.monotonic()
        self._seconds = self._last - start

    def _is_due(self, snapshot: Snapshot) -> bool:
        """Whether one is to be written after a round; without a number of rounds the clock says."""
        config = self._setup.config
        every, is_last = config.checkpoint_every, snapshot.round == config.rounds
        if every == 0:
            return False
        if is_last or snapshot.stopped is not None:
            return True
        if every is not None:
            return snapshot.round % every == 0
        return time.monotonic() - self._last >= IDLE * self._seconds


@dataclass(frozen=True, eq=False)
class BegunRound:
    """A round before it is trained.

    Attributes:
        t: its number.
        cfg: of the method in it: who takes part, with which knobs.
        key: of the run.
        control: what sets the knobs; None: nothing does.
        clock: of the run.
        seconds: of training before the round.
        executed: operations that the engine has executed before it.
    """

    t: int
    cfg: MethodConfig[Any]
    key: Key
    control: RunControl | None
    clock: TrainingClock
    seconds: float
    executed: float | None


def begin_round(
    setup: Setup, selection: Selection | None, before: Snapshot, clock: TrainingClock
) -> BegunRound:
    """Choose clients and knobs of the next round, which may read the server's state before it."""
    federation, t = setup.federation, before.round + 1
    executed, control = federation.executed, make_run_control(setup)
    federation.start_round(t)
    cfg = _round_config(setup, selection, control, before)
    key = training_key(setup.config)
    return BegunRound(t, cfg, key, control, clock, clock.seconds(), executed)


def finish_round(
    setup: Setup,
    selection: Selection | None,
    before: Snapshot,
    begun: BegunRound,
    state: ServerState,
    report: RoundReport,
) -> tuple[Snapshot, list[Row]]:
    """Score a round that has been trained, and let selection and control learn from it.

    Args:
        setup: the run.
        selection: what selects its clients.
        before: the run before the round.
        begun: the round.
        state: the server's after it.
        report: what the method reports of it.

    Returns:
        The run after it, and the rows of rounds that were scored in it.
    """
    config, fed, cfg, key, t = setup.config, setup.federation, begun.cfg, begun.key, begun.t
    clock, run_control = begun.clock, begun.control
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
    round_seconds, virtual = clock.seconds() - begun.seconds, virtual_seconds(setup, before, t)
    trained_round, received = TrainedRound(t, state, report, clock, virtual), cfg.score_on_receipt
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
            is_server_view = setup.method.evaluate.view == "server"
            counts = judged_round.server if is_server_view else judged_round.personalized
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
    facts, executed = checked_facts(report, len(fed.ids), t), begun.executed
    if executed is not None and fed.executed is not None:
        executed = (before.executed or 0.0) + fed.executed - executed
    best_by_client = before.each
    for judged_now in scored.judged:
        best_by_client = update_best_by_client(setup, best_by_client, judged_now.personalized)
    snapshot = Snapshot(
        round=t,
        state=state,
        best=scored.best,
        seconds=seconds,
        stopped=None if stop is None else str(stop),
        scores=last_scores,
        client_facts=facts,
        virtual_seconds=trained_round.virtual,
        pending=scored.pending,
        executed=executed,
        each=best_by_client,
    )
    return snapshot, scored.rows


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
