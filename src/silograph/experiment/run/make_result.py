"""From the last snapshot of a run to its result: the best round in every view, models and costs."""

import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from silograph.core.resolved_config import training_key
from silograph.core.text import counted
from silograph.experiment.advice import advice_of
from silograph.experiment.result_files import FACT, Row
from silograph.experiment.run import each_best
from silograph.experiment.run.controlling import controlling
from silograph.experiment.run.divergence import check_loss
from silograph.experiment.run.local_bias import local_bias
from silograph.experiment.run.preprocessing import Preprocessing
from silograph.experiment.run.result import Result
from silograph.experiment.run.round_scores import (
    Counts,
    Judged,
    baseline_scores,
    clients_scored,
    metrics_of,
    run_metric,
    scores_by_class,
    scores_by_client,
    task_in,
    uncut_counts,
    uncut_rows,
    views_of,
)
from silograph.experiment.run.server_parts import CONTROLLER, STATISTICS, part_of
from silograph.experiment.run.setup import Setup, first_weights
from silograph.experiment.run.snapshot import Snapshot
from silograph.experiment.run.trained_model import TrainedModel
from silograph.experiment.run.untrained import untrained_scores
from silograph.graph.column_statistics import EDGE_WEIGHTS, FEATURES, ColumnStatistics
from silograph.methods.base import client_weights
from silograph.nn.conv import Params
from silograph.task.counts import JudgedRows, confusion
from silograph.task.scores import Views


def make_result(
    setup: Setup,
    snapshot: Snapshot,
    rows: Sequence[Row],
    path: str | None,
    handed_over_bytes: int,
    tell: Callable[[str], None],
    compile_seconds: float = 0.0,
) -> Result:
    """Return the result of a run that is over.

    Args:
        setup: the run.
        snapshot: after its last round.
        rows: the table of rounds.
        path: the result folder, or None.
        handed_over_bytes: what it took to give the clients the model.
        tell: told what takes long.
        compile_seconds: that this process has spent on compiling kernels.

    Raises:
        TrainingError: the loss of the best model on the uncut graph is not finite.
    """
    best, config = snapshot.best, setup.config
    assert best is not None  # a run ends after a judged round
    rows_of_all = _uncut_rows(setup, best)
    uncut = None if rows_of_all is None else uncut_counts(setup, rows_of_all)
    val, test = _finite_views(setup, best, uncut)
    task, statistics = task_in(setup), common_statistics(setup, snapshot)
    mean = mean_edge_weight(setup, snapshot)
    return Result(
        config=replace(config, out=path),
        method=setup.method,
        held=setup.method.setting.held(setup.method_config.options),
        test=test,
        val=val,
        each_best=each_best.scores_of(setup, snapshot.each),
        baseline=baseline_scores(setup, best),
        untrained=untrained_scores(setup),
        constant=task.constant,
        metrics=metrics_of(setup),
        client_scores=scores_by_client(setup, best, uncut),
        class_scores=scores_by_class(setup, best),
        confusion=None if rows_of_all is None else confusion(rows_of_all),
        client_facts=snapshot.client_facts,
        judged_without=best.away,
        scored_clients=clients_scored(best),
        left_out=setup.federation.left_out,
        best_round=best.round,
        rounds=tuple(rows),
        stopped=snapshot.stopped or f"all {counted(config.rounds, 'round')}",
        advice=_advice(setup, best, rows, snapshot),
        model=None if best.weights is None else _model(setup, best.weights, statistics, mean),
        models=_own_models(setup, best, statistics, mean),
        local_bias=_local_bias(setup, snapshot, tell),
        ledger=setup.federation.ledger,
        executed=snapshot.executed,
        handed_over_bytes=handed_over_bytes,
        partition_hash=setup.partition_hash,
        cut=setup.simulated,
        seconds=snapshot.seconds,
        compile_seconds=compile_seconds,
        virtual_seconds=snapshot.virtual_seconds,
        peak_memory_bytes=peak_memory_bytes(),
        result_dir=path,
    )


def _uncut_rows(setup: Setup, best: Judged) -> JudgedRows | None:
    """Return what the server's model says of the uncut graph, None where there is none."""
    if best.weights is None or setup.simulated is None:
        return None
    if setup.method_config.model.table_widths:
        return None  # nobody has the tables of all clients
    return uncut_rows(setup, best.weights)


def _finite_views(setup: Setup, best: Judged, uncut: Counts | None) -> tuple[Views, Views]:
    """Return validation and test scores; raise `TrainingError` where the uncut loss diverged."""
    val, test = views_of(setup, best, uncut)
    check_loss([val.uncut], "val", best.round)
    check_loss([test.uncut], "test", best.round)
    return val, test


def _advice(setup: Setup, best: Judged, rows: Sequence[Row], snapshot: Snapshot) -> str | None:
    """Return what the number of rounds was too small or too large for, None where nothing."""
    by_scores = advice_of(
        rows,
        setup.method.evaluate.view,
        run_metric(setup),
        best.round,
        rounds=setup.config.rounds,
        patience=setup.config.patience,
    )
    control, said = controlling(setup), None
    if control is not None:
        found, known = control.controller, part_of(snapshot.state, CONTROLLER)
        said = found.note(found.options, known, snapshot.round)
    lines = said, _method_note(setup, rows), by_scores
    return "; ".join(line for line in lines if line is not None) or None


def _method_note(setup: Setup, rows: Sequence[Row]) -> str | None:
    """Return what the method says of its facts, None where it says nothing."""
    if setup.method.note is None:
        return None
    names = [name for name in rows[-1] if name.startswith(FACT)]
    facts = {
        name.removeprefix(FACT): [float(v) for row in rows if (v := row[name]) is not None]
        for name in names
    }
    return setup.method.note(setup.method_config.options, facts)


def _model(
    setup: Setup, weights: Params, statistics: ColumnStatistics | None, mean: float | None
) -> TrainedModel:
    """Return weights as a model, with how data were prepared for it."""
    config = setup.config
    preprocessing = Preprocessing(
        config.features,
        config.normalize,
        setup.feature_names,
        config.edge_weights,
        statistics,
        mean,
    )
    return TrainedModel(setup.method_config.model, weights, setup.schema.class_names, preprocessing)


def common_statistics(setup: Setup, snapshot: Snapshot) -> ColumnStatistics | None:
    """Return the (F,) statistics of features that all clients have in common, None without."""
    fitted = part_of(snapshot.state, STATISTICS)
    if f"{FEATURES}/mean" in fitted:
        return ColumnStatistics(fitted[f"{FEATURES}/mean"], fitted[f"{FEATURES}/deviation"])
    cut = setup.simulated
    if cut is None or cut.statistics is None or cut.statistics.mean.dim() > 1:
        return None
    return cut.statistics


def mean_edge_weight(setup: Setup, snapshot: Snapshot) -> float | None:
    """Return what divided the weights of edges of all clients, None where nothing did."""
    fitted = part_of(snapshot.state, STATISTICS).get(f"{EDGE_WEIGHTS}/mean")
    if fitted is not None:
        return float(fitted)
    return None if setup.simulated is None else setup.simulated.mean_edge_weight


def _own_models(
    setup: Setup, best: Judged, common: ColumnStatistics | None, mean: float | None
) -> dict[str, TrainedModel]:
    """Return the clients' own models of the best round, if they have any.

    Args:
        setup: of the run.
        best: the best round.
        common: statistics of features that all clients have in common; None: none, or each its own.
        mean: of weights of edges.
    """
    if best.own is None:
        return {}
    shapes, models = setup.method_config.model.weight_shapes, {}
    own = None if setup.simulated is None else setup.simulated.statistics
    for number, client in enumerate(setup.federation.ids):
        statistics = common
        if common is None and own is not None:
            statistics = own.of_client(number)
        weights = client_weights(shapes, best.own, number)
        models[client] = _model(setup, weights, statistics, mean)
    return models


def _local_bias(setup: Setup, snapshot: Snapshot, tell: Callable[[str], None]) -> float | None:
    """Return the distance to a centralized model, None where it was not asked for."""
    last = snapshot.state.weights
    if not setup.config.local_bias or last is None:
        return None
    key = training_key(setup.config)
    return local_bias(setup, first_weights(setup), last, snapshot.round, key, tell)


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    with suppress(OSError, StopIteration):  # Linux; ru_maxrss begins with the parent's peak
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024  # "VmHWM:   123456 kB"
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return own if sys.platform == "darwin" else own * 1024
