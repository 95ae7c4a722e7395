"""The round loop: from a snapshot to a result, with checkpoints on the way."""

import math
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from silograph.core.errors import TrainingError
from silograph.core.key import Key
from silograph.core.payload import Shared, named
from silograph.core.resolved_config import ResolvedConfig
from silograph.exchange.collect import collect
from silograph.experiment.advice import advice_of
from silograph.experiment.report import add_report
from silograph.experiment.resolve.resolve import DTYPES, draws_at_the_server
from silograph.experiment.resolve.run_program import scores_are_kept, training_key
from silograph.experiment.result_files import Row
from silograph.experiment.run.controlling import controlling, with_knobs
from silograph.experiment.run.local_bias import local_bias
from silograph.experiment.run.own_models import own_weights
from silograph.experiment.run.progress import Progress
from silograph.experiment.run.result import Result
from silograph.experiment.run.result_folder import ResultFolder
from silograph.experiment.run.round_scores import (
    Judged,
    baseline_scores,
    is_better,
    judge,
    progress_of,
    row_of,
    run_metric,
    scores_by_class,
    scores_by_client,
    task_in,
    uncut_counts,
    views_of,
)
from silograph.experiment.run.selecting import Selection
from silograph.experiment.run.server_parts import without_parts
from silograph.experiment.run.setup import Setup, versions
from silograph.experiment.run.snapshot import Snapshot, best_apart, to_checkpoint
from silograph.experiment.run.stopping import reason_to_stop
from silograph.experiment.run.trackers import RunFacts, Watched
from silograph.experiment.run.trained_model import TrainedModel
from silograph.federation.base import AwayError
from silograph.methods.base import RoundReport, ServerState, client_weights
from silograph.nn.conv import Params
from silograph.task.scores import Part, Scores


def first_weights(setup: Setup) -> Params:
    """Return the initial weights."""
    config = setup.config
    key = Key.of(config.init_seed).fold("init")
    weights = setup.method_config.model.init_weights(key, DTYPES[config.dtype])
    return {name: w.to(setup.device) for name, w in weights.items()}


def first_snapshot(setup: Setup) -> Snapshot:
    """Set up the clients and return the run before its first round; they write that down."""
    while True:
        try:
            start = _set_up(setup)
            setup.federation.keep(start.round, ())
        except AwayError as away:
            setup.federation.rejoin(away)
        else:
            return start


def _set_up(setup: Setup) -> Snapshot:
    config, key = setup.config, training_key(setup.config)
    if config.collect:
        collect(setup.federation, config.collect, key.fold("collect"))
    weights = first_weights(setup)
    state = setup.method.init(setup.federation, setup.method_config, weights, key.fold("init"))
    selection = _selection(setup)
    if selection is not None:
        state = selection.begin(state)
    scores = None
    if scores_are_kept(setup.method):
        scores = replace(judge_finite(setup, state, 0), weights=None)
    control = controlling(setup)
    if control is not None:
        state = control.begin(state, scores)
    return Snapshot(round=0, state=state, best=None, seconds=0.0, stopped=None, scores=scores)


def _selection(setup: Setup) -> Selection | None:
    """Return what selects clients, None where the method's own uniform draw does."""
    selector = setup.parts.selector
    if not draws_at_the_server(setup.parts):
        return None
    return Selection(selector.part, selector.options, setup)


def train(
    setup: Setup,
    folder: ResultFolder | None,
    display: Progress,
    snapshot: Snapshot,
    rows: list[Row],
    trackers: Watched,
) -> Result:
    """Go on from a snapshot to the end of the run.

    Args:
        setup: the run.
        folder: where checkpoints and results go, or None.
        display: told of every round.
        snapshot: where the run is; its federation has the states that belong to it.
        rows: the table of rounds so far; grows.
        trackers: told of every judged round, unless the run is complete already.
    """
    config, fed = setup.config, setup.federation
    began = time.monotonic() - snapshot.seconds
    metric = progress_of(setup, rows[-1]) if rows else ""
    complete = folder is not None and folder.is_complete
    path = None if folder is None else str(folder.path)
    if not complete:
        facts = RunFacts(setup.method.name, snapshot.round, path, setup.partition_hash, versions())
        trackers.begin(replace(config, out=path), facts)
    while snapshot.round < config.rounds and snapshot.stopped is None:
        committed = () if folder is None else folder.checkpoints.rounds or (0,)
        snapshot, row = _whole_round(setup, snapshot, began, committed)
        if row is not None:
            rows.append(row)
            metric = progress_of(setup, row)
            if folder is not None:
                folder.add_round(row)
            trackers.round(row)
        if folder is not None and _is_due(config, snapshot):
            folder.add_records(fed.ledger)
            apart = best_apart(snapshot)
            if apart is not None and snapshot.best is not None:
                folder.checkpoints.keep_best(snapshot.best.round, apart)
            folder.checkpoints.write(to_checkpoint(setup, snapshot, folder.run, folder.sizes()))
        display.update(snapshot.round, metric)
    handed = _hand_over(setup, snapshot)
    result = _result(setup, snapshot, rows, folder, display, handed)
    if folder is not None:
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


def _is_due(config: ResolvedConfig, snapshot: Snapshot) -> bool:
    """Whether there is to be a checkpoint of a round."""
    every = config.checkpoint_every
    over = snapshot.round == config.rounds or snapshot.stopped is not None
    return bool(every) and (over or snapshot.round % every == 0)


def _whole_round(
    setup: Setup, before: Snapshot, began: float, committed: Sequence[int]
) -> tuple[Snapshot, Row | None]:
    """Run one round, and again where clients were away that came back; see `_round`.

    Args:
        setup: the run.
        before: where it is.
        began: when it began.
        committed: rounds that there are checkpoints of.
    """
    while True:
        try:
            after, row = _round(setup, before, began)
            best = () if after.best is None else (after.best.round,)  # silos get it in the end
            setup.federation.keep(after.round, sorted({*committed, *best}))
        except AwayError as away:
            setup.federation.rejoin(away)
        else:
            return after, row


def _round(setup: Setup, before: Snapshot, began: float) -> tuple[Snapshot, Row | None]:
    """Run one round; return the run after it, and its row if it was judged."""
    config, fed, key = setup.config, setup.federation, training_key(setup.config)
    t = before.round + 1
    judged = t % config.eval_every == 0 or t == config.rounds
    fed.start_round(t)
    selection, cfg = _selection(setup), setup.method_config
    if selection is not None:
        cfg = selection.choose(before.state, t, key)
    control = controlling(setup)
    if control is not None:
        cfg = replace(cfg, knobs=control.propose(before.state, before.scores, t, key))
    state, report = setup.method.round(fed, cfg, without_parts(before.state), t, key)
    on_held = setup.method.setting.on_held
    if on_held is not None and setup.held is not None:
        state = on_held(cfg, setup.held, state, t, key)
    own, report = report, with_knobs(report, cfg.knobs)
    if report.train_loss is not None and not math.isfinite(report.train_loss):
        raise diverged("training", report.train_loss, t)
    best, row, scores, last, counts = before.best, None, None, before.scores, None
    if judged:
        now = judge_finite(setup, state, t)
        last = None if last is None else replace(now, weights=None)
        best = _with_own(setup, now) if is_better(setup, now, best) else best
        view = setup.method.evaluate.view
        scores = now.val[view]
        counts = now.server if view == "server" else now.personalized
        row = row_of(setup, now, report, time.monotonic() - began)
    if selection is not None:
        state = selection.observe(before.state, state, t, report, counts)
    if control is not None:
        state = control.observe(before.state, state, t, own, last, cfg.knobs)
    seconds = time.monotonic() - began
    stopped = reason_to_stop(
        config,
        t=t,
        best_round=t if best is None else best.round,
        validation=scores,
        total_bytes=fed.ledger.bytes,
        seconds=seconds,
    )
    if stopped is not None and best is None:  # a limit before the first evaluation: judge now
        best = _with_own(setup, judge_finite(setup, state, t))
        row = row_of(setup, best, report, time.monotonic() - began)
    facts = checked_facts(report, len(fed.ids), t)
    return Snapshot(t, state, best, seconds, stopped, last, facts), row


def _with_own(setup: Setup, best: Judged) -> Judged:
    """Return a round that was just judged, with the clients' own models."""
    return replace(best, own=own_weights(setup, best.weights, setup.federation.states()))


def checked_facts(report: RoundReport, clients: int, t: int) -> Mapping[str, Tensor]:
    """Return the facts by client, on the CPU; raise `TrainingError` where they are not (C,)."""
    for name, fact in report.client_facts.items():
        if fact.shape != (clients,):
            raise TrainingError(
                f"expected a value for each of {clients} clients as fact {name!r}, got shape "
                f"{tuple(fact.shape)} in round {t}"
            )
    return {name: fact.cpu() for name, fact in report.client_facts.items()}


def diverged(what: str, loss: float, t: int) -> TrainingError:
    """Return the error for a loss that is NaN or infinite."""
    return TrainingError(
        f"expected a finite {what} loss, got {loss} in round {t}: training diverged; lower --lr, "
        "or the server's learning rate"
    )


def check_loss(scores: Iterable[Scores | None], part: Part, t: int) -> None:
    """Raise `TrainingError` where a judged model's loss is NaN or infinite."""
    for judged in scores:
        if judged is not None and judged.loss is not None and not math.isfinite(judged.loss):
            raise diverged({"val": "validation", "test": "test"}[part], judged.loss, t)


def judge_finite(setup: Setup, state: ServerState, t: int) -> Judged:
    """Judge a round; raise `TrainingError` where training diverged."""
    now = judge(setup, state, t, training_key(setup.config))
    check_loss(now.val.values(), "val", t)
    check_loss(now.test.values(), "test", t)
    return now


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    with suppress(OSError, StopIteration):  # Linux; ru_maxrss begins with the parent's peak
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024  # "VmHWM:   123456 kB"
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return own if sys.platform == "darwin" else own * 1024


def _own_models(setup: Setup, best: Judged) -> dict[str, TrainedModel]:
    """Return the clients' own models of the best round, if they have any."""
    if best.own is None:
        return {}
    shape, names = setup.method_config.model, setup.schema.class_names
    shapes, config = shape.weight_shapes, setup.config
    return {
        client: TrainedModel(
            shape,
            client_weights(shapes, best.own, number),
            names,
            config.normalize,
            features=config.features,
        )
        for number, client in enumerate(setup.federation.ids)
    }


def _result(
    setup: Setup,
    snapshot: Snapshot,
    rows: list[Row],
    folder: ResultFolder | None,
    display: Progress,
    handed_over_bytes: int,
) -> Result:
    best, config = snapshot.best, setup.config
    assert best is not None  # a run ends after a judged round
    path = None if folder is None else str(folder.path)
    shape, ledger = setup.method_config.model, setup.federation.ledger
    model = None
    if best.weights is not None:
        names, normalize = setup.schema.class_names, config.normalize
        model = TrainedModel(shape, best.weights, names, normalize, features=config.features)
    uncut = None
    tables = setup.method_config.model.table_widths  # nobody has those of all clients
    if best.weights is not None and setup.simulated is not None and not tables:
        uncut = uncut_counts(setup, best.weights)
    val, test = views_of(setup, best, uncut)
    bias, last = None, snapshot.state.weights
    if config.local_bias and last is not None:
        bias = local_bias(
            setup,
            first_weights(setup),
            last,
            snapshot.round,
            training_key(setup.config),
            lambda line: display.update(snapshot.round, line),
        )
    check_loss([val.uncut], "val", best.round)
    check_loss([test.uncut], "test", best.round)
    return Result(
        config=replace(config, out=path),
        method=setup.method,
        held=setup.method.setting.held(setup.method_config.options),
        test=test,
        val=val,
        baseline=None if setup.simulated is None else baseline_scores(setup),
        constant=task_in(setup).constant,
        metrics=task_in(setup).metrics,
        client_scores=scores_by_client(setup, best, uncut),
        class_scores=scores_by_class(setup, best),
        client_facts=snapshot.client_facts,
        judged_without=best.away,
        best_round=best.round,
        rounds=tuple(rows),
        stopped=snapshot.stopped or f"all {config.rounds} rounds",
        advice=advice_of(
            rows,
            setup.method.evaluate.view,
            run_metric(setup),
            best.round,
            rounds=config.rounds,
            patience=config.patience,
        ),
        model=model,
        client_models=_own_models(setup, best),
        local_bias=bias,
        ledger=ledger,
        handed_over_bytes=handed_over_bytes,
        partition_hash=setup.partition_hash,
        cut=setup.simulated,
        seconds=snapshot.seconds,
        peak_memory_bytes=peak_memory_bytes(),
        result_dir=path,
    )
